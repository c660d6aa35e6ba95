"""Answers without a model: for trying a pipeline, and for tests of everything around generation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from rollout_core.base.ids import ContentId
from rollout_core.config import ScriptedBackend
from rollout_core.data.samples import Completion
from rollout_core.data.text import token_ids_of
from rollout_core.inference.base import GathersStream, ModelRef, Request
from rollout_core.models.pretrained import load_tokenizer

GROUP = 256
"""Prompts whose texts are tokenised together."""


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

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        waiting = iter(requests)
        while group := self._next_group(waiting):
            yield from self._complete(group)

    def _next_group(self, waiting: Iterator[Request | None]) -> list[Request]:
        """What is there now, up to the size of a group; one request where each takes its time."""
        group: list[Request] = []
        while len(group) < (1 if self._config.delay_seconds else GROUP):
            request = next(waiting, None)
            if request is None:
                break
            group.append(request)
        return group

    def _complete(self, group: Sequence[Request]) -> Iterator[Completion]:
        texts = [self._config.text.replace("{prompt}", request.prompt_text) for request in group]
        different = list(dict.fromkeys(texts))
        encoded = dict(zip(different, token_ids_of(self._tokenizer, different, special_tokens=False), strict=True))
        end = self._tokenizer.eos_token_id
        for request, text in zip(group, texts, strict=True):
            if self._config.delay_seconds:
                time.sleep(self._config.delay_seconds)
            token_ids = [*encoded[text], end]
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
