"""An OpenAI-compatible endpoint as a backend.

An answer that is malformed fails its own sample, to be asked for again by the next run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.ids import ContentId
from rollout_core.config import OpenAIBackend
from rollout_core.data.samples import Completion, Failure, Outcome
from rollout_core.inference.backend import ModelRef, Request
from rollout_core.inference.endpoint import Endpoint, Malformed, Passing, Refused, Unpaid, look_once
from rollout_core.inference.endpoint_stream import EndpointStream
from rollout_core.inference.openai_wire import (
    NoPromptLogprobs,
    OtherDialect,
    body_of,
    longest_answer,
    no_scores,
    no_vllm,
    outcome_of,
    path_of,
    usage_of,
)
from rollout_core.inference.pace import shared_pace
from rollout_core.inference.spending import Account
from rollout_core.models.facts import known_ids, vocab_size
from rollout_core.models.pretrained import HeldTokenizer, renewed_tokenizer


class OpenAIEngine(EndpointStream):
    """An `InferenceBackend` over HTTP. Requests without an account share one of the engine's.

    Raises ConfigError when the endpoint refuses access or serves no such model, Recoverable when it does not answer.
    """

    def __init__(self, config: OpenAIBackend, model: ModelRef) -> None:
        self._config = config
        self._account = Account(config, config.budget)
        self._understood = False
        """It has answered in the configured dialect, so it is no fault of the configuration where it does not."""
        self._held: HeldTokenizer | None = None
        self.update_weights(model)
        pace = shared_pace(config.url, config.served_model or "", config.max_concurrency)
        super().__init__(Endpoint(config, pace=pace), config.max_concurrency)
        try:
            self._served, self._limit = self.run(_look_up(self._endpoint, config))
        except BaseException:
            self.close()
            raise

    @property
    def model_id(self) -> ContentId:
        return self._model.content_id

    @property
    def max_model_len(self) -> int | None:
        return self._config.max_model_len or self._limit

    async def ask(self, request: Request) -> Outcome:
        """Raises Malformed for an answer that is no outcome."""
        config, tokenizer = self._config, self._tokenizer

        async def read(answer: Mapping[str, Any]) -> Outcome:
            return await self._read(request, answer)

        try:
            return await self.post(
                request.key,
                path_of(config),
                body_of(config, self._served, tokenizer, request),
                read,
                request.account or self._account,
                api=config.api,
                max_bytes=longest_answer(request),
                longest_answer=request.params.max_tokens,
            )
        except (Passing, Unpaid) as error:
            return Failure(request.key, str(error), passing=True)
        except Refused as error:
            return Failure(request.key, str(error))

    async def _read(self, request: Request, answer: Mapping[str, Any]) -> Outcome:
        config, tokenizer = self._config, self._tokenizer
        try:
            # Off the loop: tokenising a long text holds up no other request.
            outcome = await asyncio.to_thread(outcome_of, config, tokenizer, request, answer, self._vocab_size)
        except NoPromptLogprobs:
            if not self._understood:
                raise no_scores(config.url) from None
            raise Malformed("it does not repeat the prompt with log-probabilities") from None
        except OtherDialect:
            if not self._understood:
                raise no_vllm(config) from None
            raise Malformed("it lacks token ids or log-probabilities") from None
        if isinstance(outcome, Completion):
            self._understood = True
            outcome.usage = usage_of(request, answer, outcome)
        return outcome

    def update_weights(self, model: ModelRef) -> None:
        """The answers are taken for those of ``model`` from now on; what the endpoint serves stays as it is."""
        self._held = renewed_tokenizer(model.folder, self._held)
        self._tokenizer = self._held[0]
        self._vocab_size = known_ids(model.folder, self._tokenizer) or vocab_size(model.folder)
        self._model = model


async def _look_up(endpoint: Endpoint, config: OpenAIBackend) -> tuple[str, int | None]:
    """Name of the served model, and the longest sequence it takes, where the endpoint tells."""
    try:
        models = {model["id"]: model for model in await endpoint.models()}
    except Passing as error:
        raise Recoverable(f"the endpoint does not answer: {error}") from error
    except (Refused, Malformed) as error:
        raise ConfigError(f"{config.url}: {error}") from error
    named = endpoint.fit_to_show(", ".join(sorted(models)) or "none")
    wanted = config.served_model
    if wanted is None and len(models) != 1:
        raise ConfigError(f"{config.url} serves {len(models)} models ({named}); name one as backend.served_model")
    name = wanted or next(iter(models))
    if name not in models:
        raise ConfigError(f"{config.url} serves no model {name!r}, but {named}; look at backend.served_model")
    limit = models[name].get("max_model_len")
    return name, limit if type(limit) is int and limit > 0 else None


def try_endpoint(config: OpenAIBackend) -> None:
    """Look once whether the endpoint answers and serves the model.

    Raises ConfigError where it never will, Recoverable where it does not answer now.
    """
    once = config.model_copy(update={"max_retries": 0, "timeout_seconds": 10.0})
    look_once(lambda: Endpoint(once), lambda endpoint: _look_up(endpoint, once))
