"""An endpoint that judges, as a backend of the sample ledger: a question is a sample, its answer a completion."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.ids import ContentId
from rollout_core.config.judges import JudgeEndpoint, JudgeReward
from rollout_core.data.samples import Completion, Failure, Outcome
from rollout_core.inference.backend import TOKEN_CHARACTERS, Request
from rollout_core.inference.endpoint import MAX_BACKOFF_SECONDS, Endpoint, Malformed, Passing, Refused
from rollout_core.inference.endpoint_stream import EndpointStream
from rollout_core.inference.lanes import Lanes
from rollout_core.inference.pace import Pace
from rollout_core.rewards.judges.questions import Question, judge_id
from rollout_core.rewards.judges.spending import MARGIN, BudgetSpent, Charge, Spending

ANTHROPIC_VERSION = "2023-06-01"
MAX_ANSWER_BYTES = 2**20
"""Besides the tokens of an answer."""
MOST_COUNTED = 10**9
"""Tokens; an endpoint that counts more miscounts."""


class JudgeModel:
    """The model of an endpoint, as `complete_samples` starts one when a question needs it."""

    batch_invariant = False

    def __init__(
        self,
        spec: JudgeReward,
        judge: JudgeEndpoint,
        questions: Mapping[str, Question],
        spending: Spending,
        on_line: Callable[[str], None],
    ) -> None:
        self._parts = spec, judge, questions, spending, on_line

    @property
    def model_id(self) -> ContentId:
        return judge_id(self._parts[1])

    @contextmanager
    def open(self) -> Iterator[Lanes]:
        """The running engine."""
        engine = JudgeEngine(*self._parts)
        try:
            yield Lanes(engine)
        finally:
            engine.close()


class JudgeEngine(EndpointStream):
    """Asks a judge questions by their ids."""

    max_model_len = None
    finishes_on = (BudgetSpent,)

    def __init__(
        self,
        spec: JudgeReward,
        judge: JudgeEndpoint,
        questions: Mapping[str, Question],
        spending: Spending,
        on_line: Callable[[str], None],
    ) -> None:
        self._spec, self._judge, self._questions = spec, judge, questions
        self._spending, self._on_line = spending, on_line
        self._pace = Pace(judge.max_concurrency, judge.requests_per_minute, judge.tokens_per_minute)
        self._has_told = False
        self.gives_up = spec.when_down == "fail"
        super().__init__(_endpoint(judge, self._pace), judge.max_concurrency)

    @property
    def model_id(self) -> ContentId:
        return judge_id(self._judge)

    def update_weights(self, model: Any) -> None:
        """See `InferenceBackend`: they are somebody else's."""

    async def ask(self, request: Request) -> Outcome:
        """See `EndpointStream`. Raises BudgetSpent where there is no budget for it."""
        question = self._questions[request.key]
        while True:
            try:
                return await self._ask_once(question)
            except Passing as error:
                if self._spec.when_down != "wait":
                    return Failure(request.key, str(error), passing=True)
                if not self._has_told:
                    self._has_told = True
                    self._on_line(f"{error}; it is asked on until it answers")
            except Refused as error:
                return Failure(request.key, str(error))
            tries = self._judge.max_retries + 1
            await asyncio.sleep(min(MAX_BACKOFF_SECONDS, self._judge.backoff_seconds * 2**tries))

    async def _ask_once(self, question: Question) -> Outcome:
        judge, spending = self._judge, self._spending
        most = most_taken(judge, question)
        reserved = [await spending.reserve(most, self._spec.budget)]
        charge: Charge | None = None

        async def lost() -> None:
            spending.lose(reserved[0])
            reserved[0] = await spending.reserve(most, self._spec.budget)

        try:
            limit = MAX_ANSWER_BYTES + TOKEN_CHARACTERS * judge.longest_answer
            answer = await self._endpoint.post(
                path_of(judge), body_of(judge, question), limit, tokens=most.tokens, lost=lost
            )
            charge = _charge(judge, answer, most)
            self._pace.give_back(most.tokens - charge.tokens)
            if self._has_told:
                self._has_told = False
                self._on_line(f"{judge.name} answers again")
            return _outcome(judge, str(question.id), answer, charge)
        except Malformed:
            charge = charge or most
            raise
        finally:
            spending.settle(reserved[0], str(question.id), charge)


def most_taken(judge: JudgeEndpoint, question: Question) -> Charge:
    """That an answer can take: a token for each byte of the question, and the longest answer."""
    prompt = sum(len(message["content"].encode()) + MARGIN for message in question.messages) + MARGIN
    return charged(judge, prompt, judge.longest_answer)


def charged(judge: JudgeEndpoint, prompt_tokens: int, answer_tokens: int) -> Charge:
    """What an answer of so many tokens takes."""
    return Charge(judge.name, prompt_tokens, answer_tokens, judge.price_of(prompt_tokens, answer_tokens))


def _endpoint(judge: JudgeEndpoint, pace: Pace | None = None) -> Endpoint:
    is_anthropic = judge.api == "anthropic"
    return Endpoint(
        judge,
        table="reward.judges",
        names="reward.judges.model",
        headers={"anthropic-version": ANTHROPIC_VERSION} if is_anthropic else None,
        key_header="x-api-key" if is_anthropic else None,
        pace=pace,
    )


def path_of(judge: JudgeEndpoint) -> str:
    """Where questions are posted, below the endpoint's url."""
    return "/messages" if judge.api == "anthropic" else "/chat/completions"


def body_of(judge: JudgeEndpoint, question: Question) -> dict[str, Any]:
    """The JSON body of a question."""
    body: dict[str, Any] = {"model": judge.model}
    if "max_completion_tokens" not in judge.body:
        body["max_tokens"] = judge.max_tokens
    if judge.send_temperature and judge.temperature is not None:
        body["temperature"] = judge.temperature
    messages = [dict(message) for message in question.messages]
    if judge.api == "anthropic":
        return {**body, "system": messages[0]["content"], "messages": messages[1:], **judge.body}
    body["messages"] = messages
    if judge.guided:
        schema = {"name": "judgement", "schema": question.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {**body, **judge.body}


def _charge(judge: JudgeEndpoint, answer: Mapping[str, Any], most: Charge) -> Charge:
    """By the endpoint's count; all that was reserved, where it counts nothing that can be."""
    usage = answer.get("usage")
    names = ("input_tokens", "output_tokens") if judge.api == "anthropic" else ("prompt_tokens", "completion_tokens")
    counts = [usage.get(name) if isinstance(usage, Mapping) else None for name in names]
    prompt, given = (count if type(count) is int and 0 <= count <= MOST_COUNTED else None for count in counts)
    if judge.api == "anthropic" and isinstance(usage, Mapping) and prompt is not None:
        # What a cache of prompts took or gave is counted apart.
        cached = [usage.get(name) for name in ("cache_creation_input_tokens", "cache_read_input_tokens")]
        prompt += sum(count for count in cached if type(count) is int and 0 <= count <= MOST_COUNTED)
    return most if prompt is None or given is None else charged(judge, prompt, given)


def _outcome(judge: JudgeEndpoint, key: str, answer: Mapping[str, Any], charge: Charge) -> Outcome:
    """Raises Malformed where the answer is none."""
    try:
        if judge.api == "anthropic":
            text = "".join(part["text"] for part in answer["content"] if part["type"] == "text")
            reason = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}.get(
                answer["stop_reason"], answer["stop_reason"]
            )
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
    return Completion(key, (), (), text, reason, usage=(charge.prompt_tokens, charge.answer_tokens))


def try_judge(judge: JudgeEndpoint) -> None:
    """Look once whether the endpoint answers, takes the key, and serves the model where it lists any.

    Raises ConfigError where it never will, Recoverable where it does not answer now.
    """

    async def look() -> None:
        once = judge.model_copy(update={"max_retries": 0, "timeout_seconds": 10.0})
        endpoint = _endpoint(once)
        try:
            names = [str(model["id"]) for model in await endpoint.models()]
        except Passing as error:
            raise Recoverable(f"the judge does not answer: {error}") from error
        except (Refused, Malformed) as error:
            raise ConfigError(f"{judge.url}: {error}") from error
        finally:
            await endpoint.close()
        if names and judge.model not in names:
            named = endpoint.fit_to_show(", ".join(sorted(names)))
            raise ConfigError(f"{judge.url} serves no model {judge.model!r}, but {named}; look at reward.judges.model")

    # In a thread of its own, as the caller's may have a loop that runs.
    with ThreadPoolExecutor(1) as threads:
        threads.submit(asyncio.run, look()).result()
