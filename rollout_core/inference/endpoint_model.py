"""A model at an endpoint, whose files are not here: texts or messages in, texts out, in OpenAI's or Anthropic's form.

Its tokens have no ids here, so nothing can be trained on its answers, whose lengths are the endpoint's own count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_core.base.ids import ContentId, content_id
from rollout_core.config import EndpointModel, OpenAIBackend
from rollout_core.config.base import identity
from rollout_core.data.samples import Completion, Failure, Outcome
from rollout_core.inference import anthropic_wire
from rollout_core.inference.backend import ModelRef, Request, problem_with_text
from rollout_core.inference.endpoint import (
    Endpoint,
    Malformed,
    Passing,
    Refused,
    Unpaid,
    counted_tokens,
    look_for_model,
)
from rollout_core.inference.endpoint_stream import EndpointStream
from rollout_core.inference.lanes import Lanes
from rollout_core.inference.openai_wire import (
    NoPromptLogprobs,
    body_of as openai_body,
    longest_answer,
    no_scores,
    outcome_of as openai_outcome,
    path_of as openai_path,
    usage_of,
)
from rollout_core.inference.pace import Pace, shared_pace
from rollout_core.inference.spending import Account

_CHARACTERS_OF_A_TOKEN = 4
"""About, of what a request is reckoned to take of a limit by the minute."""


def endpoint_id(config: EndpointModel) -> ContentId:
    """What stands for the model: its address, its name and the revision that its user gives."""
    return content_id("endpoint-model/1", identity(config))


class EndpointEngine(EndpointStream):
    """An `InferenceBackend` whose model is the endpoint's own.

    Requests without an account share one of the engine's. Raises ConfigError when the endpoint refuses access, and
    where it cannot score a continuation.
    """

    max_model_len = None

    def __init__(self, config: EndpointModel, model: ModelRef) -> None:
        self._config, self._model = config, model
        self._form = _openai_form(config)
        self._account = Account(config, config.budget)
        self._has_scored = False
        limits = config.max_concurrency, config.requests_per_minute, config.tokens_per_minute
        pace = shared_pace(config.url, config.model, *limits)
        super().__init__(_endpoint(config, pace), config.max_concurrency)

    @property
    def model_id(self) -> ContentId:
        return self._model.content_id

    def update_weights(self, model: ModelRef) -> None:
        """See `InferenceBackend`: they are somebody else's, and another model is another configuration."""
        self._model = model

    async def ask(self, request: Request) -> Outcome:
        """Raises Malformed for an answer that is no outcome."""
        config = self._config

        async def read(answer: Mapping[str, Any]) -> Outcome:
            return self._read(request, answer)

        try:
            return await self.post(
                request.key,
                path_of(config),
                body_of(config, request),
                read,
                request.account or self._account,
                api=config.api,
                max_bytes=longest_answer(request),
                longest_answer=request.params.max_tokens,
                paced=_paced_tokens(request),
            )
        except (Passing, Unpaid) as error:
            return Failure(request.key, str(error), passing=True)
        except Refused as error:
            return Failure(request.key, str(error))

    def _read(self, request: Request, answer: Mapping[str, Any]) -> Outcome:
        if self._form is None:
            return _anthropic_outcome(request, answer)
        try:
            outcome = openai_outcome(self._form, None, request, answer, 0)
        except NoPromptLogprobs:
            if not self._has_scored:
                raise no_scores(self._config.url) from None
            raise Malformed("it does not repeat the prompt with log-probabilities") from None
        self._has_scored = self._has_scored or bool(request.continuation)
        is_counted = None not in counted_tokens(answer, self._config.api)
        # Where it is not counted, a budget is to hold all the same: by what was reserved.
        if isinstance(outcome, Completion) and (is_counted or self._config.budget is None):
            outcome.usage = usage_of(request, answer, outcome)
        return outcome


@dataclass(frozen=True)
class OwnEndpoint:
    """A model at an endpoint with an engine of its own, while another one has this process's pool."""

    config: EndpointModel

    batch_invariant = False

    @property
    def model_id(self) -> ContentId:
        """What stands for the model."""
        return endpoint_id(self.config)

    @property
    def model(self) -> ModelRef:
        """The model, of which there is no folder."""
        return ModelRef(self.model_id, Path())

    @contextmanager
    def open(self) -> Iterator[Lanes]:
        """The lanes of an engine of its own."""
        engine = EndpointEngine(self.config, self.model)
        try:
            yield Lanes(engine)
        finally:
            engine.close()


def _openai_form(config: EndpointModel) -> OpenAIBackend | None:
    """How the endpoint is asked in OpenAI's form; None where it has Anthropic's."""
    if config.api == "anthropic":
        return None
    return OpenAIBackend(url=config.url, served_model=config.model, api=config.api, dialect="openai")


def _endpoint(config: EndpointModel, pace: Pace | None = None) -> Endpoint:
    access = anthropic_wire.ACCESS if config.api == "anthropic" else {}
    return Endpoint(config, table="model", names="model.model", pace=pace, **access)


def _paced_tokens(request: Request) -> int:
    prompt = request.prompt_text or "".join(str(message.get("content")) for message in request.messages)
    return len(prompt + request.continuation) // _CHARACTERS_OF_A_TOKEN + request.params.max_tokens


def path_of(config: EndpointModel) -> str:
    """Where requests are posted, below the endpoint's url."""
    form = _openai_form(config)
    return anthropic_wire.PATH if form is None else openai_path(form)


def body_of(config: EndpointModel, request: Request) -> dict[str, Any]:
    """The JSON body of a request."""
    form = _openai_form(config)
    body = _anthropic_body(config, request) if form is None else openai_body(form, config.model, None, request)
    body |= {config.max_tokens_key: body.pop("max_tokens"), **config.body}
    return {name: value for name, value in body.items() if name not in config.leave_out}


def _anthropic_body(config: EndpointModel, request: Request) -> dict[str, Any]:
    params = request.params
    messages = request.messages or [{"role": "user", "content": request.prompt_text}]
    body: dict[str, Any] = {
        "model": config.model,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        **anthropic_wire.conversation(messages),
    }
    if request.tools:
        body["tools"] = anthropic_wire.tools_of(request.tools)
    # Models of theirs refuse temperature and top_p together.
    if params.top_p != 1.0:
        body["top_p"] = params.top_p
    if params.top_k > 0:
        body["top_k"] = params.top_k
    if params.stop:
        body["stop_sequences"] = list(params.stop)
    return body


def _anthropic_outcome(request: Request, answer: Mapping[str, Any]) -> Outcome:
    try:
        text, reason = anthropic_wire.read_message(answer)
    except (LookupError, TypeError) as error:
        raise Malformed(f"it has no text of a message ({type(error).__name__}: {error})") from None
    if problem := problem_with_text(text, request.params):
        raise Malformed(problem)
    prompt_tokens, answer_tokens = counted_tokens(answer, "anthropic")
    if prompt_tokens is None or answer_tokens is None:
        raise Malformed("its usage counts no tokens")
    if reason not in ("stop", "length"):
        return Failure(request.key, f"the endpoint ended it with {reason!r}")
    return Completion(request.key, (), (), text, reason, usage=(prompt_tokens, answer_tokens))


def try_endpoint_model(config: EndpointModel) -> None:
    """Raises as `look_for_model`."""
    once = config.model_copy(update={"max_retries": 0, "timeout_seconds": 10.0})
    look_for_model(lambda: _endpoint(once), config.url, config.model, "the endpoint")
