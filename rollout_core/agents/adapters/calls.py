"""LLM calls as spans record them: token ids, log-probabilities and endings.

Spans of our proxy (``semconv.LLM_CALL``) are read, those of tracers (``prompt_token_ids``, ``response_token_ids`` and
``logprobs.content`` next to OpenTelemetry's ``gen_ai.*``), of Weave (below ``agentlightning.operation``) and of LiteLLM
in front of vLLM (``llm.hosted_vllm.*``, partly text in Python's syntax).
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout_core.store import Span
from rollout_core.store.semconv import LLM_CALL, ChoiceAttributes, LlmCallAttributes

POLICY = "policy"
"""The model's name for agents."""
PROXY_SPANS = (LLM_CALL, "raw_gen_ai_request", "litellm_request")
"""Names of spans that proxies write, on machines and clocks of their own."""

_WEAVE_OUTPUT = "agentlightning.operation.output"
_VLLM = "llm.hosted_vllm"
_RESPONSE_ID = (LlmCallAttributes.RESPONSE_ID.value, f"{_WEAVE_OUTPUT}.id", f"{_VLLM}.id")
_PROMPT_IDS = (
    LlmCallAttributes.PROMPT_TOKEN_IDS.value,
    "prompt_token_ids",
    f"{_WEAVE_OUTPUT}.prompt_token_ids",
    f"{_VLLM}.prompt_token_ids",
)
_RESPONSE_IDS = (
    "response_token_ids",
    f"{_WEAVE_OUTPUT}.response_token_ids.0",
    f"{_WEAVE_OUTPUT}.choices.0.token_ids",
    f"{_WEAVE_OUTPUT}.choices.0.provider_specific_fields.token_ids",
    f"{_VLLM}.response_token_ids",
)
_LOGPROBS = ("logprobs.content", f"{_WEAVE_OUTPUT}.choices.0.logprobs.content")
_FINISH_REASONS = (
    "gen_ai.completion.0.finish_reason",
    "gen_ai.response.finish_reasons",
    f"{_WEAVE_OUTPUT}.choices.0.finish_reason",
)
_LITERAL = re.compile(r"""\s*[\[{("']""")


@dataclass(frozen=True)
class Choice:
    """One answer to a request."""

    token_ids: list[int]
    """Empty if the span has none."""
    logprobs: list[float]
    """Of each token as it was drawn, nats; empty if the span has none, or not one for each token."""
    finish_reason: str | None


def response_id(attributes: Mapping[str, Any]) -> str | None:
    """The id that the server gave its answer."""
    found = (attributes.get(key) for key in _RESPONSE_ID)
    return next((value for value in found if isinstance(value, str) and value), None)


class CallNames:
    """Which of some spans are records of one call: a proxy's and tracers', which have the server's id of the answer.

    Servers may repeat an id. So the second span of one name and id is the second call, unless it is inside the first,
    or the same span again.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        ordered = sorted(spans, key=lambda span: (span.sequence_id, span.start_time or 0.0))
        by_id = {span.span_id: span for span in reversed(ordered)}
        answers = [response_id(span.attributes) for span in ordered]
        spans_of = Counter(answers)
        answer_of = dict(reversed([*zip((span.span_id for span in ordered), answers, strict=True)]))
        self._names: dict[tuple[Any, ...], str] = {}
        counts: Counter[tuple[str, str]] = Counter()
        inner: list[tuple[Span, Span]] = []
        for span, found in zip(ordered, answers, strict=True):
            if found is None or _this(span) in self._names:
                continue
            outer = span if spans_of[found] == 1 else _outermost(span, found, by_id, answer_of)
            if outer is not span:
                inner.append((span, outer))
                continue
            number = counts[span.name, found] = counts[span.name, found] + 1
            self._names[_this(span)] = found if number == 1 else f"{found} ({number})"
        for span, outer in inner:
            self._names[_this(span)] = self._names[_this(outer)]

    def of(self, span: Span) -> str | None:
        """The same for records of the same call; None where a span has no server's id."""
        return self._names.get(_this(span))

    def any_of(self, span: Span) -> str:
        """The same, and a name of its own where a span has no server's id."""
        return self._names.get(_this(span)) or f"span {span.trace_id} {span.span_id}"


def _this(span: Span) -> tuple[Any, ...]:
    return span.trace_id, span.span_id, span.name, span.start_time, span.end_time


def _outermost(span: Span, name: str, by_id: Mapping[str, Span], answer_of: Mapping[str, str | None]) -> Span:
    """Of the spans around this one, the last with the same id of an answer; ``answer_of`` has these by span."""
    found, seen, around = span, {span.span_id}, by_id.get(span.parent_id or "")
    while around is not None and around.span_id not in seen:
        seen.add(around.span_id)
        if answer_of[around.span_id] == name:
            found = around
        around = by_id.get(around.parent_id or "")
    return found


def model_id(attributes: Mapping[str, Any]) -> str | None:
    """Content id of the weights that answered, where a proxy knows it."""
    return attributes.get(LlmCallAttributes.MODEL_ID.value)


def has_failed(span: Span) -> bool:
    """Whether the call ended in an error, such as a stream that was cut; what there is of the answer is incomplete."""
    return span.status.status_code == "ERROR"


def has_tokens(span: Span) -> bool:
    """Whether the call succeeded, and the ids of its prompt and of an answer are known."""
    if has_failed(span) or not prompt_token_ids(span.attributes):
        return False
    return any(choice.token_ids for choice in choices_of(span.attributes))


def prompt_token_ids(attributes: Mapping[str, Any]) -> list[int]:
    """What the model was given; empty if the span does not say."""
    return _first_ids(attributes, _PROMPT_IDS)


def choices_of(attributes: Mapping[str, Any]) -> list[Choice]:
    """The answers, in order; only our proxy records more than the first."""
    found: list[Choice] = []
    while choice := _proxy_choice(attributes, len(found)):
        found.append(choice)
    if found:
        return found
    raw = _raw_choice(attributes)
    token_ids = _first_ids(attributes, _RESPONSE_IDS) or _ids(raw.get("token_ids"))
    logprobs = next((attributes[key] for key in _LOGPROBS if key in attributes), raw.get("logprobs"))
    reasons = [*(attributes.get(key) for key in _FINISH_REASONS), raw.get("finish_reason")]
    reason = next((_first(reason) for reason in reasons if reason), None)
    if not token_ids and reason is None:
        return []
    return [Choice(token_ids, _logprobs(logprobs, token_ids), None if reason is None else str(reason))]


def _proxy_choice(attributes: Mapping[str, Any], place: int) -> Choice | None:
    keys = {key: f"{LlmCallAttributes.CHOICES.value}.{place}.{key.value}" for key in ChoiceAttributes}
    if not any(key in attributes for key in keys.values()):
        return None
    token_ids = _ids(attributes.get(keys[ChoiceAttributes.TOKEN_IDS]))
    reason = attributes.get(keys[ChoiceAttributes.FINISH_REASON])
    return Choice(
        token_ids,
        _logprobs(attributes.get(keys[ChoiceAttributes.LOGPROBS]), token_ids),
        None if reason is None else str(reason),
    )


def _raw_choice(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The first choice of vLLM's answer, where a LiteLLM proxy recorded it whole."""
    first = _first(parsed(attributes.get(f"{_VLLM}.choices")))
    return first if isinstance(first, dict) else {}


def _first_ids(attributes: Mapping[str, Any], keys: Iterable[str]) -> list[int]:
    return next((ids for key in keys if (ids := _ids(attributes.get(key)))), [])


def _ids(value: Any) -> list[int]:
    """A list of token ids, of lists of them the first; empty for anything else."""
    value = parsed(value)
    if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        value = value[0]
    is_ids = isinstance(value, list | tuple) and set(map(type, value)) <= {int}
    return list(value) if is_ids else []


def _logprobs(value: Any, token_ids: list[int]) -> list[float]:
    value = parsed(value)
    if isinstance(value, dict):
        value = value.get("content")
    if not isinstance(value, list | tuple) or len(value) != len(token_ids):
        return []
    numbers = [entry.get("logprob") if isinstance(entry, dict) else entry for entry in value]
    finite = [float(number) for number in numbers if isinstance(number, int | float) and math.isfinite(number)]
    return finite if len(finite) == len(numbers) else []


def _first(value: Any) -> Any:
    return (value[0] if value else None) if isinstance(value, list | tuple) else value


def parsed(value: Any) -> Any:
    """The list, mapping or string that a text in JSON's or Python's syntax stands for; others as they are."""
    if not isinstance(value, str) or not _LITERAL.match(value):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value
