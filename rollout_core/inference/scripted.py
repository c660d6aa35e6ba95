"""Answers without a model: for trying a pipeline, and for tests of everything around generation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from rollout_core.config import ScriptedBackend
from rollout_core.ids import ContentId
from rollout_core.inference.base import Completion, GathersStream, ModelRef, Request
from rollout_core.models import load_tokenizer


class ScriptedEngine(GathersStream):
    """An `InferenceBackend` that completes every prompt with ``config.text``; each token has logprob 0."""

    batch_invariant = True
    max_model_len = None

    def __init__(self, config: ScriptedBackend, model: ModelRef) -> None:
        self._config = config
        self.update_weights(model)

    @property
    def model_id(self) -> ContentId:
        return self._model.content_id

    def stream(self, requests: Iterable[Request]) -> Iterator[Completion]:
        for request in requests:
            if self._config.delay_seconds:
                time.sleep(self._config.delay_seconds)
            text = self._config.text.replace("{prompt}", request.prompt_text)
            token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"] + [self._tokenizer.eos_token_id]
            cut = token_ids[: request.params.max_tokens]
            whole = len(cut) == len(token_ids)
            yield Completion(
                key=request.key,
                token_ids=cut,
                logprobs=[0.0] * len(cut),
                text=text if whole else self._tokenizer.decode(cut, skip_special_tokens=True),
                finish_reason="stop" if whole else "length",
            )

    def update_weights(self, model: ModelRef) -> None:
        self._tokenizer = load_tokenizer(model.folder)
        self._model = model

    def close(self) -> None:
        """Nothing to free."""
