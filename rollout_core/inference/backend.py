"""What every inference backend is: requests in, completions out as they finish, weights swapped in place.

Here is also what of the sampling parameters each backend supports (the rest is refused before any work, never ignored),
what every completion must be, whoever made it, before it is kept, and the simplest backend, which answers without a
model.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId, content_id
from rollout_core.config import (
    AnyBackend,
    ChoiceOutput,
    EndpointModel,
    GrammarOutput,
    JsonSchemaOutput,
    OpenAIBackend,
    RegexOutput,
    SamplingParams,
    ScriptedBackend,
    StructuredOutput,
    TransformersBackend,
    VLLMBackend,
    identity,
)
from rollout_core.data.samples import Completion, Failure, Outcome
from rollout_core.data.text import token_ids_of
from rollout_core.inference.spending import Account
from rollout_core.models.pretrained import HeldTokenizer, renewed_tokenizer

LOGPROB_NOISE = 1e-3
"""A log-probability above 0 by no more than this, in nats, is the rounding of a certain token's."""
TEXT_TOKENS = 8
"""Token ids made of a text may be so many times those it was sampled as: a byte that is no character reads as one of
three bytes, and the endpoint's own vocabulary may have longer tokens."""
TOKEN_CHARACTERS = 256
"""No token is longer, at least not on average: the longest of common vocabularies are 128 spaces."""
_SCRIPTED = SamplingParams.identity_without_default
"""A scripted text is not sampled; the oldest fields say nothing of it either way."""
_NOT_OPENAI = ("top_k", "min_tokens", "stop_token_ids", "ignore_eos", "repetition_penalty", "logprobs")
_MAX_TEMPERATURE = 2.0
_MAX_CHAT_LOGPROBS = 19


@dataclass(slots=True)  # a frozen one takes six times as long to make, and a million are
class Request:
    """One completion to generate."""

    key: str
    """Names the request among those in flight; the sample id."""
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    """Seed of this request alone, in [0, 2**31): the same request draws the same tokens in any batch."""
    prompt_text: str = field(default="", compare=False)
    messages: Sequence[Mapping[str, Any]] = field(default=(), compare=False)
    """Of a chat, before the template."""
    tools: Sequence[Mapping[str, Any]] = field(default=(), compare=False)
    """That the template shows to the model."""
    ends: Sequence[int] = ()
    """Tokens that end it in addition to the model's own ends; among its token ids, and not part of its text."""
    continuation: str = ""
    """A text whose log-probability is asked for, given the prompt: nothing is generated, and ``params`` do not count.
    It is what the last ``scored`` of ``prompt_token_ids`` write, or where that is 0, to follow ``prompt_text``."""
    scored: int = 0
    account: Account | None = field(default=None, compare=False)
    """In which an endpoint's answer counts."""


def scored_completion(request: Request, logprobs: Sequence[float], *, greedy: bool) -> Completion:
    """The outcome of a request whose continuation was scored, with the log-probability of each of its tokens."""
    token_ids = list(request.prompt_token_ids[len(request.prompt_token_ids) - request.scored :])
    if len(token_ids) != len(logprobs):  # of an endpoint with a vocabulary of its own
        token_ids = []
    least = [min(logprob, 0.0) for logprob in logprobs]  # rounding may have one above 0
    return Completion(request.key, token_ids, least, request.continuation, "stop", greedy=greedy)


@dataclass(frozen=True)
class ModelRef:
    """A model's content id and a local folder that holds it."""

    content_id: ContentId
    folder: Path


def generator_id(backend: AnyBackend) -> str:
    """What answers besides the model: software, dtype and device, as far as they decide what is generated."""
    return content_id("generator/1", identity(backend)).short


class InferenceBackend(Protocol):
    """Generates completions with one model at a time.

    ``stream`` is the primary form; it may be used by one caller at a time. ``generate`` is its gathered form.
    """

    @property
    def model_id(self) -> ContentId:
        """Content of the weights in use."""
        ...

    @property
    def batch_invariant(self) -> bool:
        """True where a request's tokens and logprobs are bitwise the same whatever else is in its batch."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus completion, in tokens; None where the backend knows no limit."""
        ...

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Outcome]:
        """Yield outcomes as they are known, in any order. Requests are drawn from the iterable as there is room.

        None among the requests means: none now, ask again soon. It comes only while requests are under way.
        """
        ...

    def interrupt(self) -> None:
        """End the stream under way soon, from another thread: nobody wants its outcomes any more."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions of ``requests``, in their order. Raises Fatal where one fails."""
        ...

    def update_weights(self, model: ModelRef) -> None:
        """Use another model of the same architecture from now on. Raises Fatal when the parity check fails."""
        ...

    def sleep(self) -> None:
        """Give memory back until the next `update_weights`, where the backend can. Nothing is streamed meanwhile."""
        ...

    def close(self) -> None:
        """Free the engine. The backend is not used afterwards."""
        ...


class GathersStream:
    """`generate` in terms of `stream`; keeps its memory, and needs no interruption."""

    def interrupt(self) -> None:
        """See `InferenceBackend`: one that asks for requests often, and soon has outcomes, notices by itself."""

    def sleep(self) -> None:
        """See `InferenceBackend`."""

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Outcome]:
        raise NotImplementedError("a backend implements stream")

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        finished: dict[str, Completion] = {}
        for outcome in self.stream(requests):
            if isinstance(outcome, Failure):
                raise Fatal(f"request {outcome.key[:12]} failed: {outcome.reason}")
            finished[outcome.key] = outcome
        return [finished[request.key] for request in requests]


def problem_with(
    token_ids: Sequence[int], logprobs: Sequence[float], params: SamplingParams, vocab_size: int | None = None
) -> str | None:
    """Why these tokens with their log-probabilities are no completion under ``params``, if they are none.

    Without log-probabilities the ids were made of a text, and their number tells only roughly what was sampled.
    """
    if token_ids and (min(token_ids) < 0 or (vocab_size is not None and max(token_ids) >= vocab_size)):
        beyond = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        known = "" if vocab_size is None else f"; the tokenizer has {vocab_size} ids"
        return f"token id {beyond}, which is outside the vocabulary{known}"
    if not logprobs:
        return _problem_with_length(len(token_ids), params)
    if len(logprobs) != len(token_ids):
        return f"{len(token_ids)} tokens, but log-probabilities of {len(logprobs)}"
    if len(token_ids) > params.max_tokens:
        return f"{len(token_ids)} tokens, but sampling.max_tokens is {params.max_tokens}"
    if max(logprobs) > LOGPROB_NOISE:
        return f"a log-probability of {max(logprobs):g}, above 0"
    return None


def _problem_with_length(num_tokens: int, params: SamplingParams) -> str | None:
    most = TEXT_TOKENS * params.max_tokens
    if num_tokens <= most:
        return None
    return f"a text of {num_tokens} tokens, more than {TEXT_TOKENS} times sampling.max_tokens {params.max_tokens}"


def problem_with_text(text: str, params: SamplingParams) -> str | None:
    """Why this is no text of a completion under ``params``, if it is none, before anybody tokenises it."""
    most = TOKEN_CHARACTERS * params.max_tokens
    if len(text) <= most:
        return None
    return (
        f"a text of {len(text):,} characters, more than the {most:,} that fit sampling.max_tokens {params.max_tokens}"
    )


def unsupported(params: SamplingParams, backend: AnyBackend) -> Iterator[tuple[str, str]]:
    """Fields of ``params`` that the backend cannot honour, and why."""
    match backend:
        case VLLMBackend():
            yield from _vllm(params)
        case TransformersBackend():
            for name in _given(params, ("structured",)):
                yield name, "backend 'transformers' has no guided decoding; use 'vllm', or 'openai' with a vLLM server"
        case ScriptedBackend():
            for name in _given(params, sorted(_SCRIPTED)):
                yield name, "backend 'scripted' has its text from the configuration; use a backend with a model"
        case OpenAIBackend(dialect="vllm"):
            yield from _vllm(params)
            if backend.api == "chat" and params.logprobs > _MAX_CHAT_LOGPROBS:
                yield "logprobs", f"backend 'openai' with api 'chat' has at most {_MAX_CHAT_LOGPROBS}"
        case OpenAIBackend():
            yield from _openai(params, backend)
        case EndpointModel():
            yield from _endpoint(params, backend)


def _vllm(params: SamplingParams) -> Iterator[tuple[str, str]]:
    if params.temperature > _MAX_TEMPERATURE:
        yield "temperature", f"vLLM takes at most {_MAX_TEMPERATURE:g}, got {params.temperature:g}"


def _openai(params: SamplingParams, backend: OpenAIBackend) -> Iterator[tuple[str, str]]:
    for name in _given(params, _NOT_OPENAI):
        yield name, "backend 'openai' with dialect 'openai' knows no such field; dialect 'vllm' does, at a vLLM server"
    if params.structured is not None and not (
        backend.api == "chat" and isinstance(params.structured, JsonSchemaOutput)
    ):
        yield (
            "structured",
            "backend 'openai' with dialect 'openai' has guided decoding for kind 'json_schema' with api 'chat' only",
        )
    if len(params.stop) > 4:
        yield "stop", f"backend 'openai' with dialect 'openai' takes at most 4 strings, got {len(params.stop)}"


def _endpoint(params: SamplingParams, backend: EndpointModel) -> Iterator[tuple[str, str]]:
    is_anthropic = backend.api == "anthropic"
    names = (*_NOT_OPENAI, "structured")
    if is_anthropic:
        names = (*(name for name in names if name != "top_k"), "presence_penalty", "frequency_penalty")
    for name in _given(params, names):
        yield name, f"an endpoint with api {backend.api!r} knows no such field; leave it out"
    if is_anthropic and params.temperature > 1:
        yield "temperature", f"api 'anthropic' takes at most 1, got {params.temperature:g}"
    if not is_anthropic and len(params.stop) > 4:
        yield "stop", f"an endpoint with api {backend.api!r} takes at most 4 strings, got {len(params.stop)}"


def cannot_score(backend: AnyBackend) -> str | None:
    """Why the backend gives no log-probability of a continuation, if so."""
    if isinstance(backend, OpenAIBackend | EndpointModel) and backend.api != "completions":
        return (
            f"an endpoint with api {backend.api!r} gives no log-probabilities of prompts, by which choices are scored; "
            "take api 'completions', where the endpoint has it"
        )
    return None


def _given(params: SamplingParams, names: tuple[str, ...] | list[str]) -> list[str]:
    fields = SamplingParams.model_fields
    return [name for name in names if getattr(params, name) != fields[name].get_default()]


def vllm_constraint(structured: StructuredOutput) -> dict[str, Any]:
    """The one argument of vLLM's ``StructuredOutputsParams``, by name."""
    match structured:
        case JsonSchemaOutput():
            return {"json": structured.definition}
        case RegexOutput():
            return {"regex": structured.pattern}
        case ChoiceOutput():
            return {"choice": list(structured.choices)}
        case GrammarOutput():
            return {"grammar": structured.grammar}


GROUP = 256
"""Prompts whose texts are tokenised together."""


class ScriptedEngine(GathersStream):
    """An `InferenceBackend` that completes every prompt with ``config.text``; each token has logprob 0."""

    batch_invariant = True
    max_model_len = None

    def __init__(self, config: ScriptedBackend, model: ModelRef) -> None:
        self._config = config
        self._held: HeldTokenizer | None = None
        self.update_weights(model)

    @property
    def model_id(self) -> ContentId:
        return self._model.content_id

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        waiting = iter(requests)
        while group := self._next_group(waiting):
            yield from map(self._score, [request for request in group if request.scored])
            if drawn := [request for request in group if not request.scored]:
                yield from self._complete(drawn)

    def _score(self, request: Request) -> Completion:
        """The scripted text is certain; a token of any other has a log-probability of -1."""
        time.sleep(self._config.delay_seconds)
        scripted = self._config.text.replace("{prompt}", request.prompt_text)
        is_scripted = request.continuation.strip() == scripted.strip()
        return scored_completion(request, [is_scripted - 1.0] * request.scored, greedy=is_scripted)

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
        self._held = renewed_tokenizer(model.folder, self._held)
        self._tokenizer = self._held[0]
        self._model = model

    def close(self) -> None:
        """Nothing to free."""
