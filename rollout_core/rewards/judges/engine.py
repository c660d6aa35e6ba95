"""An endpoint that judges, as a backend of the sample ledger: a question is a sample, its answer a completion."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.config.judges import JudgeEndpoint, JudgeReward
from rollout_core.data.samples import Completion, Failure, Outcome
from rollout_core.inference import anthropic_wire
from rollout_core.inference.backend import TOKEN_CHARACTERS, Request
from rollout_core.inference.endpoint import (
    MAX_BACKOFF_SECONDS,
    Endpoint,
    Malformed,
    Passing,
    Refused,
    Unpaid,
    look_for_model,
)
from rollout_core.inference.endpoint_stream import EndpointStream
from rollout_core.inference.lanes import Lanes
from rollout_core.inference.pace import Pace, shared_pace
from rollout_core.inference.spending import Account
from rollout_core.rewards.judges.questions import Question, judge_id

MAX_ANSWER_BYTES = 2**20
"""Besides the tokens of an answer."""


@dataclass
class JudgeCall:
    """One judge in one scoring: what it is asked, by which rules, and what was seen of it."""

    spec: JudgeReward
    judge: JudgeEndpoint
    account: Account
    on_line: Callable[[str], None]
    questions: dict[str, Question] = field(default_factory=dict)
    """By id."""
    has_answered: bool = False
    """A question, in this scoring or, if it is one of this scoring's, before."""
    unanswered: dict[str, str] = field(default_factory=dict)
    """Questions that may be answered another time, with what was in the way."""
    refused: set[str] = field(default_factory=set)
    """Those of them that the endpoint refused: a fault of theirs, where it answers others."""
    refused_in_row: int = 0
    """Refusals since the last answer."""

    def refuses_all(self, reason: str) -> ConfigError:
        """The error where every question was refused."""
        return ConfigError(
            f"{self.judge.name} has answered no question so far: {reason}; look at reward.judges (api, guided, "
            "send_temperature, max_tokens, body), at the length of the questions, and at your account there"
        )


class JudgeModel:
    """The model of an endpoint, as `complete_samples` starts one when a question needs it."""

    batch_invariant = False

    def __init__(self, call: JudgeCall) -> None:
        self._call = call

    @property
    def model_id(self) -> ContentId:
        return judge_id(self._call.judge)

    @contextmanager
    def open(self) -> Iterator[Lanes]:
        """The running engine."""
        engine = JudgeEngine(self._call)
        try:
            yield Lanes(engine)
        finally:
            engine.close()


class JudgeEngine(EndpointStream):
    """Asks a judge questions by their ids."""

    max_model_len = None

    def __init__(self, call: JudgeCall) -> None:
        self._call, judge = call, call.judge
        limits = judge.max_concurrency, judge.requests_per_minute, judge.tokens_per_minute
        self._has_told = False
        self.gives_up = call.spec.when_down != "abstain"
        pace = shared_pace(judge.url, judge.model, *limits)
        super().__init__(_endpoint(judge, pace), judge.max_concurrency)

    @property
    def model_id(self) -> ContentId:
        return judge_id(self._call.judge)

    def update_weights(self, model: Any) -> None:
        """See `InferenceBackend`: they are somebody else's."""

    async def ask(self, request: Request) -> Outcome:
        """See `EndpointStream`. Raises BudgetSpent where there is no budget for it, ConfigError where all questions are
        refused."""
        call, key = self._call, request.key
        call.unanswered.pop(key, None)
        call.refused.discard(key)
        if self.is_gone:
            return Failure(key, f"{call.judge.name} gives no answers, so it was not asked", passing=True)
        while True:
            try:
                return await self._ask_once(call.questions[key])
            except Passing as error:
                if call.spec.when_down != "wait":
                    return Failure(key, str(error), passing=True)
                if not self._has_told:
                    self._has_told = True
                    call.on_line(f"{error}; it is asked on until it answers")
            except Refused as error:
                return self._refused(key, error)
            tries = call.judge.max_retries + 1
            await asyncio.sleep(min(MAX_BACKOFF_SECONDS, call.judge.backoff_seconds * 2**tries))

    def _refused(self, key: str, error: Refused) -> Failure:
        """Not kept: what is refused now (too little money, a key of the body) may not be another time."""
        call, of_all = self._call, isinstance(error, Unpaid)
        if not of_all:
            call.refused.add(key)
            call.refused_in_row += 1
        if not call.has_answered and (of_all or len(call.refused) >= self.patience):
            raise call.refuses_all(str(error))
        return Failure(key, str(error), passing=True)

    def is_refused(self, failure: Failure) -> bool:
        """See `EndpointStream`."""
        return failure.key in self._call.refused

    def _failure(self, request: Request, reason: str, *, passing: bool) -> Failure:
        failure = super()._failure(request, reason, passing=passing)
        if passing:
            self._call.unanswered[request.key] = failure.reason
        return failure

    async def _ask_once(self, question: Question) -> Outcome:
        call, judge, key = self._call, self._call.judge, str(question.id)

        async def read(answer: Mapping[str, Any]) -> Outcome:
            call.has_answered, call.refused_in_row = True, 0
            return _outcome(judge, key, answer)

        outcome = await self.post(
            key,
            path_of(judge),
            body_of(judge, question),
            read,
            call.account,
            api=judge.api,
            max_bytes=MAX_ANSWER_BYTES + TOKEN_CHARACTERS * judge.longest_answer,
            longest_answer=judge.longest_answer,
        )
        if self._has_told:
            self._has_told = False
            call.on_line(f"{judge.name} answers again")
        return outcome


def _endpoint(judge: JudgeEndpoint, pace: Pace | None = None) -> Endpoint:
    access = anthropic_wire.ACCESS if judge.api == "anthropic" else {}
    return Endpoint(judge, table="reward.judges", names="reward.judges.model", pace=pace, **access)


def path_of(judge: JudgeEndpoint) -> str:
    """Where questions are posted, below the endpoint's url."""
    return anthropic_wire.PATH if judge.api == "anthropic" else "/chat/completions"


def body_of(judge: JudgeEndpoint, question: Question) -> dict[str, Any]:
    """The JSON body of a question."""
    body: dict[str, Any] = {"model": judge.model}
    if "max_completion_tokens" not in judge.body:
        body["max_tokens"] = judge.max_tokens
    if judge.send_temperature:
        body["temperature"] = judge.temperature
    messages = [dict(message) for message in question.messages]
    if judge.api == "anthropic":
        return {**body, "system": messages[0]["content"], "messages": messages[1:], **judge.body}
    body["messages"] = messages
    if judge.guided:
        schema = {"name": "judgement", "schema": question.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {**body, **judge.body}


def _outcome(judge: JudgeEndpoint, key: str, answer: Mapping[str, Any]) -> Outcome:
    """Raises Malformed where the answer is none."""
    try:
        if judge.api == "anthropic":
            text, reason = anthropic_wire.read_message(answer)
        else:
            [choice] = answer["choices"]
            text, reason = choice["message"].get("content") or "", choice.get("finish_reason")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Malformed(f"it has no text of a message ({type(error).__name__}: {error})") from None
    if not isinstance(text, str):
        raise Malformed("its text is no text")
    if len(text) > TOKEN_CHARACTERS * judge.longest_answer:
        raise Malformed(f"a text of {len(text):,} characters, for max_tokens {judge.max_tokens}")
    if reason not in ("stop", "length"):
        # An abort is the server's doing and may go away; a filter will answer the same again.
        return Failure(key, f"the endpoint ended it with {reason!r}", passing=reason in ("abort", "error"))
    return Completion(key, (), (), text, reason)


def try_judge(judge: JudgeEndpoint) -> None:
    """Raises as `look_for_model`."""
    once = judge.model_copy(update={"max_retries": 0, "timeout_seconds": 10.0})
    look_for_model(lambda: _endpoint(once), judge.url, judge.model, "the judge")
