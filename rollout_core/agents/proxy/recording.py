"""What a call asked and what came back: the request as its upstream gets it, the answer as the agent gets it, and the
span that keeps both, token by token.

vLLM gives the ids and log-probabilities of its tokens to those who ask for them, so the proxy does. Log-probabilities
that the agent did not ask for are taken out of what it gets; the ids stay, as clients ignore them, unless the call says
otherwise.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

from rollout_core.agents.proxy.upstreams import Upstream
from rollout_core.store.codec import ordered_json, read_json
from rollout_core.store.semconv import LLM_CALL, ChoiceAttributes, LlmCallAttributes
from rollout_core.store.spans import Span, TraceStatus

CHAT, COMPLETIONS = "/chat/completions", "/completions"
SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop_sequences",
    "seed": "seed",
    "n": "choice.count",
}
"""Sampling settings of a request, and what follows ``gen_ai.request.`` in their keys."""
_WHOLE = {"role", "type", "id", "index", "name"}
"""Parts of a message that a stream sends at once, some servers more than once; other texts come in pieces."""
_IDS = ("prompt_token_ids", "token_ids")
"""Keys of an answer, or of a choice in it, that vLLM fills for those who ask."""
_EVENT_END = re.compile(rb"\r?\n\r?\n")


class Choice:
    """One answer to a request, as far as it has come."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        self.token_ids: list[int] | None = None
        self.logprobs: list[float] | None = None
        self.finish_reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """Take in a whole choice, or one piece of a stream."""
        if isinstance(message := choice.get("message") or choice.get("delta"), dict):
            _merge(self.message, message)
        elif isinstance(text := choice.get("text"), str):
            _merge(self.message, {"role": "assistant", "content": text})
        if isinstance(ids := choice.get("token_ids"), list):
            self.token_ids = [] if self.token_ids is None else self.token_ids
            self.token_ids += ids
        if isinstance(logprobs := choice.get("logprobs"), dict):
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += _logprobs(logprobs)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def attributes(self, index: int) -> Iterator[tuple[str, Any]]:
        """Of the span. Log-probabilities are left out unless there is one for each token."""
        prefix = f"{LlmCallAttributes.CHOICES.value}.{index}."
        ids, logprobs = self.token_ids, self.logprobs
        if ids is not None and set(map(type, ids)) <= {int}:
            yield prefix + ChoiceAttributes.TOKEN_IDS.value, ids
            if logprobs is not None and len(logprobs) == len(ids) and set(map(type, logprobs)) <= {int, float}:
                yield prefix + ChoiceAttributes.LOGPROBS.value, [float(logprob) for logprob in logprobs]
        if isinstance(self.finish_reason, str):
            yield prefix + ChoiceAttributes.FINISH_REASON.value, self.finish_reason


def _logprobs(given: dict[str, Any]) -> list[Any]:
    if isinstance(content := given.get("content"), list):
        return [entry.get("logprob") if isinstance(entry, dict) else None for entry in content]
    return found if isinstance(found := given.get("token_logprobs"), list) else []


class _Pieces(list[str]):
    """A text as it came. To add text to text again and again would copy it as often."""


def _merge(into: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a piece of a streamed message, or a whole one, to what has come of it."""
    for key, value in piece.items():
        before = into.get(key)
        if isinstance(value, list) and value and all(isinstance(entry, dict) and "index" in entry for entry in value):
            if not isinstance(before, list) or not all(isinstance(part, dict) for part in before):
                before = into[key] = []
            parts: list[dict[str, Any]] = before
            for entry in value:
                known = next((part for part in parts if part.get("index") == entry["index"]), None)
                if known is None:
                    parts.append(known := {})
                _merge(known, entry)
        elif isinstance(value, dict):
            if not isinstance(before, dict):
                before = into[key] = {}
            _merge(before, value)
        elif isinstance(value, str) and key not in _WHOLE:
            if not isinstance(before, _Pieces):
                before = into[key] = _Pieces()
            before.append(value)
        elif value or key not in into:
            into[key] = value


def _joined(value: Any) -> Any:
    """What was merged, as the message that an answer without a stream has."""
    if isinstance(value, _Pieces):
        return "".join(value)
    if isinstance(value, list):
        return [_joined(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    message = {key: _joined(entry) for key, entry in value.items()}
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            call.pop("index", None)
    return message


class Call:
    """One request of an agent, and what has come of it.

    Args:
        path: behind the base URL, such as ``/chat/completions``.
        raw: the body as it was sent.
        body: the same as an object; empty if it is none.
        is_recorded: whether it gets a span.
        hides_ids: whether token ids that were not asked for are taken out of the answer, too.
    """

    def __init__(
        self, path: str, raw: bytes, body: dict[str, Any], *, is_recorded: bool, hides_ids: bool = False
    ) -> None:
        self.path = path
        self.is_recorded = is_recorded
        self.upstream: Upstream | None = None
        """That answers, or was asked last."""
        self.num_bytes = len(raw)
        """Of request and answer so far."""
        self.seed: int | None = None
        """For upstreams that are sent one, where the request has none."""
        self.problem: str | None = None
        """Why it failed, if it did."""
        self._raw, self._body = raw, body
        self._generates = path in (CHAT, COMPLETIONS)
        self._hides_logprobs = False
        self._hides_ids = hides_ids and not body.get("return_token_ids")
        self._begun_at = time.time()
        self._response_id: str | None = None
        self._prompt_token_ids: list[int] | None = None
        self._choices: dict[int, Choice] = {}
        self.is_done = False
        """Whether a stream has come to its end."""
        self.has_told_problem = False
        """Whether the stream itself said that it failed."""
        self._rest = bytearray()
        """Of a stream: what has come of an event that is not at its end."""
        self._num_searched = 0
        """Bytes of the rest in which no event ends."""

    @property
    def response_id(self) -> str | None:
        """Of the answer, once some of it has come."""
        return self._response_id

    @property
    def _hides(self) -> bool:
        """Whether the agent gets less than the upstream gave."""
        return self._hides_logprobs or self._hides_ids

    @property
    def is_whole(self) -> bool:
        """Whether every choice that was asked for has come to its end, though perhaps not the stream."""
        ended = sum(bool(choice.finish_reason) for choice in self._choices.values())
        return self.problem is None and self._num_choices <= ended == len(self._choices)

    @property
    def _num_choices(self) -> int:
        prompt, count = self._body.get("prompt"), self._body.get("n")
        num_prompts = len(prompt) if self._has_many_prompts() and isinstance(prompt, list) else 1
        return num_prompts * (count if type(count) is int and count > 0 else 1)

    @property
    def is_streamed(self) -> bool:
        """Whether the agent wants the answer as it is written."""
        return self._body.get("stream") is True

    def body_for(self, upstream: Upstream) -> bytes:
        """What to send there. The answer that is read next is that upstream's."""
        self.upstream = upstream
        fields: dict[str, Any] = {}
        if upstream.model is not None and upstream.model != self._body.get("model"):
            fields["model"] = upstream.model
        self._hides_logprobs = False
        if self._generates and upstream.seeds and self.seed is not None and self._body.get("seed") is None:
            fields["seed"] = self.seed
        if self.is_recorded and self._generates and upstream.token_ids:
            fields["return_token_ids"] = True
            asked = self._body.get("logprobs")
            if self.path == CHAT and not asked:
                fields["logprobs"] = self._hides_logprobs = True
            elif self.path == COMPLETIONS and asked is None:
                # 0: of the token drawn, and of no others.
                fields["logprobs"], self._hides_logprobs = 0, True
        return ordered_json(self._body | fields) if fields else self._raw

    # The answer

    def read_whole(self, data: bytes) -> bytes:
        """Take in an answer that is no stream; what the agent gets of it."""
        if not (self.is_recorded and self._generates):
            return data
        self.num_bytes += len(data)
        answer = _object(data)
        if answer is None or not isinstance(answer.get("choices"), list):
            self.problem = "the answer is no JSON object with choices"
            return data
        self._add(answer)
        return ordered_json(answer) if self._hides else data

    def read_piece(self, data: bytes) -> bytes:
        """Take in a piece of a stream; what the agent gets now."""
        if not (self.is_recorded and self._generates):
            self.is_done = True
            return data
        self.num_bytes += len(data)
        self._rest += data
        begin, shown = 0, []
        for end in list(_EVENT_END.finditer(self._rest, self._num_searched)):
            shown.append(self._read_event(bytes(self._rest[begin : end.start()])))
            begin = end.end()
        del self._rest[:begin]
        self._num_searched = max(0, len(self._rest) - 3)
        return b"".join(shown) if self._hides else data

    def end_stream(self) -> bytes:
        """The stream has ended; what the agent still gets. Sets ``problem`` if the answer was not at its end."""
        rest = bytes(self._rest)
        self._rest.clear()
        shown = self._read_event(rest) if rest.strip() else b""
        if not (self.is_done or self.is_whole or self.problem):
            self.problem = "the upstream's stream ended before the answer did"
        return shown if self._hides else b""

    def _read_event(self, event: bytes) -> bytes:
        """The event as the agent gets it."""
        whole = event + b"\n\n"
        lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
        data = b"\n".join(lines)
        if data == b"[DONE]":
            self.is_done = True
            return whole
        chunk = _object(data) if data else None
        if chunk is None:
            return whole
        if isinstance(error := chunk.get("error"), dict):
            self.problem = str(error.get("message") or "the upstream reports an error in its stream")
            self.has_told_problem = True
        elif self._add(chunk):
            return b"data: " + ordered_json(chunk) + b"\n\n"
        return whole

    def _add(self, answer: dict[str, Any]) -> bool:
        """Take in an answer or a part of one, and take out what the agent did not ask for; whether there was any."""
        if isinstance(found := answer.get("id"), str):
            self._response_id = found
        self._note_prompt(answer)
        has_changed = self._hide_ids(answer)
        choices = answer.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            self._note_prompt(choice)
            index = choice.get("index", 0)
            self._choices.setdefault(index if type(index) is int else 0, Choice()).add(choice)
            if self._hides_logprobs and choice.get("logprobs") is not None:
                choice["logprobs"] = None
                has_changed = True
            has_changed = self._hide_ids(choice) or has_changed
        return has_changed

    def _hide_ids(self, part: dict[str, Any]) -> bool:
        """Take token ids out, as an answer has it whose request has not asked for them; whether there were any."""
        found = [key for key in _IDS if part.get(key) is not None] if self._hides_ids else []
        part.update(dict.fromkeys(found))
        return bool(found)

    def _note_prompt(self, part: dict[str, Any]) -> None:
        ids = part.get("prompt_token_ids")
        if self._prompt_token_ids is None and isinstance(ids, list) and set(map(type, ids)) <= {int}:
            self._prompt_token_ids = ids

    # The span

    def give_up(self, problem: str) -> None:
        """The answer cannot be recorded, and this is why: the span is to be without it."""
        self.problem = problem
        self._choices, self._response_id, self._prompt_token_ids = {}, None, None

    def span(self, rollout_id: str, attempt_id: str) -> Span:
        """The call's span, but for its number."""
        failed = None if self.problem is None else TraceStatus(status_code="ERROR", description=self.problem)
        return Span.from_attributes(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            name=LLM_CALL,
            attributes=dict(self._attributes()),
            start_time=self._begun_at,
            end_time=time.time(),
            status=failed,
        )

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        keys, body = LlmCallAttributes, self._body
        if isinstance(model := body.get("model"), str):
            yield keys.REQUEST_MODEL.value, model
        if self.upstream is not None:
            yield keys.SERVED_MODEL.value, self.upstream.model or model or ""
            if self.upstream.model_id is not None:
                yield keys.MODEL_ID.value, self.upstream.model_id
        for name, key in SETTINGS.items():
            if isinstance(value := body.get(name), int | float | str | list):
                yield f"{keys.REQUEST.value}.{key}", value
        if not self._generates:
            return
        yield keys.INPUT_MESSAGES.value, _text(body.get("messages" if self.path == CHAT else "prompt"))
        if body.get("tools"):
            yield keys.TOOLS.value, _text(body["tools"])
        if self._response_id is not None:
            yield keys.RESPONSE_ID.value, self._response_id
        if self._prompt_token_ids is not None and not self._has_many_prompts():
            yield keys.PROMPT_TOKEN_IDS.value, self._prompt_token_ids
        if self._choices:
            choices = [self._choices[index] for index in sorted(self._choices)]
            yield keys.OUTPUT_MESSAGES.value, _text([_joined(choice.message) for choice in choices])
        for index, choice in self._choices.items():
            yield from choice.attributes(index)

    def _has_many_prompts(self) -> bool:
        """Whether choices belong to different prompts, so that no one prompt is that of all."""
        prompt = self._body.get("prompt")
        return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        found = read_json(data, half_pairs=True)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _text(value: Any) -> str:
    return ordered_json(value).decode()
