"""The reward that judges give: questions asked through the ledger of samples, answers read, votes counted."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_core.base.errors import Fatal, Recoverable
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.stopping import run_async
from rollout_core.config import SamplingParams
from rollout_core.config.judges import JudgeReward
from rollout_core.data.samples import Sample, SampledCompletion, decode_completions_blob, encode_samples
from rollout_core.inference.batch import BatchOptions, complete_samples
from rollout_core.inference.endpoint_stream import LONE_FAILURES
from rollout_core.inference.ledger import SampleLedger, this_worker
from rollout_core.inference.spending import Account, Spending
from rollout_core.rewards.judges.engine import JudgeCall, JudgeModel
from rollout_core.rewards.judges.kept_answers import AnswerLedger
from rollout_core.rewards.judges.questions import Question, Unusable, questions_of, read_answer, repair_of
from rollout_core.rewards.scoring import RewardInput, Score, places

GENERATOR = "judge/1"
"""All that decides an answer is in its question's id."""
STALE_AFTER_SECONDS = 60.0
TIMES_ASKED = 3
"""That a question is asked of an endpoint which is waited for, and gives no answer to this one."""


@dataclass
class Verdict:
    """What one judge says of one completion."""

    judge: str
    question: ContentId
    """Of the last question."""
    value: float | None
    """On the scale, or 0 to 1 of a pair; None where the answer is of no use."""
    reasoning: str


@dataclass
class Judgement:
    """What was said of some completions."""

    reward: ContentId
    """Of what decides scores."""
    verdicts: list[list[Verdict]] = field(default_factory=list)
    """Of each completion."""
    problems: Counter[str] = field(default_factory=Counter)
    """Questions without a usable answer, by why."""
    repaired: int = 0
    """Answers that were usable at the second time."""
    charges: dict[str, Any] = field(default_factory=dict)
    """What each answer took, by question."""
    human: list[float | None] | None = None
    """What a person says of each completion, where rows have that."""

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **({} if self.human is None else {"human": self.human}),
            "reward": self.reward,
            "verdicts": [[vars(verdict) for verdict in verdicts] for verdicts in self.verdicts],
            "problems": dict(self.problems),
            "repaired": self.repaired,
            "charges": {question: list(charge) for question, charge in self.charges.items()},
        }


@dataclass(frozen=True)
class _Reading:
    """What came of a question."""

    last: Question
    """The question itself, or the one for repair."""
    found: Mapping[str, Any] | None
    """The answer; None where there is none of use."""
    reason: str = ""
    """Why there is none."""
    was_answered: bool = True


class Judges:
    """A reward that asks judges; called with all completions that are scored together."""

    def __init__(self, spec: JudgeReward, ledger: AnswerLedger | None, on_line: Callable[[str], None]) -> None:
        self._spec = spec
        self._ledger = ledger or AnswerLedger.in_memory()
        self._on_line = lambda line: on_line(f"reward judge: {line}")
        self.reward = content_id("judge-reward/1", spec.cache_identity())
        """What decides its scores."""
        self.spending = Spending()
        """What the run has taken, which the budget bounds; a run puts its own here."""
        self._judgements: list[Judgement] = []

    def take_judgements(self) -> list[Judgement]:
        """Of the calls since this was last asked."""
        taken, self._judgements = self._judgements, []
        return taken

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score | Fatal]:
        """The reward of each input; None where no judge has a usable answer.

        Raises BudgetSpent before a question that the budget may not have room for; Recoverable where an endpoint gives
        no answers and that is to fail, or gives none to one question for which it is waited; ConfigError where one
        refuses all questions.
        """
        return run_async(self._judge(inputs))

    async def _judge(self, inputs: Sequence[RewardInput]) -> list[Score | Fatal]:
        spec = self._spec
        questions, wrong = questions_of(spec, inputs)
        judgement = Judgement(self.reward, [[] for _ in inputs])
        if spec.human_key is not None:
            judgement.human = [spec.human_judgement(each.extras) for each in inputs]
        calls = [
            JudgeCall(spec, judge, Account(judge, spec.budget, self.spending), self._on_line) for judge in spec.judges
        ]
        readings = await self._readings(questions, calls, judgement)
        self._tell(readings.values(), calls, judgement)
        given: list[dict[int, list[float | None]]] = [{} for _ in inputs]
        for question in questions:
            reading = readings[str(question.id)]
            values = None if reading.found is None else question.read(reading.found)
            reasoning = reading.reason if reading.found is None else reading.found["reasoning"]
            for place in question.inputs:
                value = None if values is None else values[place]
                given[place].setdefault(question.judge, []).append(value)
                name = spec.judges[question.judge].name
                judgement.verdicts[place].append(Verdict(name, reading.last.id, value, reasoning))
        self._judgements.append(judgement)
        named = list(places(inputs))
        return [
            Fatal(f"reward judge failed on {named[place]}: {wrong[place]}") if place in wrong else self._score(votes)
            for place, votes in enumerate(given)
        ]

    async def _readings(
        self, questions: Sequence[Question], calls: Sequence[JudgeCall], judgement: Judgement
    ) -> dict[str, _Reading]:
        """What came of each question, by its id; equal questions are one."""
        asked = {str(question.id): question for question in questions}
        answers = await self._ask(asked.values(), calls, judgement)
        readings: dict[str, _Reading] = {}
        repairs: dict[str, Question] = {}
        for key, question in asked.items():
            try:
                readings[key] = _read(question, answers[key])
            except Unusable as problem:
                judge = self._spec.judges[question.judge]
                repairs[key] = repair_of(question, judge, answers[key].text, str(problem))
        answers = await self._ask(repairs.values(), calls, judgement) if repairs else {}
        for key, repair in repairs.items():
            try:
                readings[key] = _read(repair, answers[str(repair.id)])
                judgement.repaired += readings[key].was_answered
            except Unusable as problem:
                reason = f"no answer of the schema, and not after the repair either: {problem}"
                readings[key] = _Reading(repair, None, reason)
        return readings

    def _score(self, votes: Mapping[int, Sequence[float | None]]) -> Score:
        """Of a judge counts the mean of its answers in both orders, where it gave both."""
        means = [
            statistics.fmean([value for value in values if value is not None])
            for values in votes.values()
            if None not in values
        ]
        if not means:
            return None
        value = _vote(self._spec.vote, means)
        return value if self._spec.mode == "pairwise" else self._spec.scale.reward(value)

    def _tell(self, readings: Iterable[_Reading], calls: Sequence[JudgeCall], judgement: Judgement) -> None:
        """Count questions without a usable answer; raises Fatal where they are to fail."""
        readings = list(readings)
        useless = [reading for reading in readings if reading.found is None]
        judgement.problems.update("not of the schema" if each.was_answered else "no answer" for each in useless)
        if judgement.repaired:
            self._on_line(f"{judgement.repaired} of {len(readings)} answers were of the schema at the second time only")
        if not useless:
            return
        first = useless[0]
        text = (
            f"{len(useless)} of {len(readings)} questions have no usable answer; the first, to "
            f"{self._spec.judges[first.last.judge].name}: {first.reason}"
        )
        # One without an answer is for `when_down` to say about, which leaves it without a score where it gets here.
        down = {key for call in calls for key in call.unanswered.keys() - call.refused}
        if self._spec.when_unusable == "fail" and any(str(each.last.id) not in down for each in useless):
            raise Fatal(f"reward judge: {text}. See when_unusable")
        self._on_line(text)

    async def _ask(
        self, questions: Iterable[Question], calls: Sequence[JudgeCall], judgement: Judgement
    ) -> dict[str, SampledCompletion]:
        """The answer to each, of all judges at the same time; those that are kept are not asked again."""
        for number, call in enumerate(calls):
            call.questions = {str(each.id): each for each in questions if each.judge == number}
        async with self._ledger.open_store() as store:
            asked = [self._ask_judge(store, call, judgement) for call in calls if call.questions]
            # One that ends by an error takes none of the others along: their answers are paid for.
            results = await asyncio.gather(*asked, return_exceptions=True)
        answers: dict[str, SampledCompletion] = {}
        for result in results:
            if isinstance(result, BaseException):
                raise result
            answers |= result
        return answers

    async def _ask_judge(self, store: Any, call: JudgeCall, judgement: Judgement) -> dict[str, SampledCompletion]:
        judge, objects, spec = call.judge, self._ledger.objects, self._spec
        samples = [
            Sample(question.id, [dict(message) for message in question.messages], [], 0, None, {"judge": judge.name})
            for question in call.questions.values()
        ]
        options = BatchOptions(
            mode="test",
            deterministic=False,
            exclusive=False,
            commit_size=1,  # it is paid for, so it is kept at once
            claim_size=4 * judge.max_concurrency,
            generator=GENERATOR,
            stale_after_seconds=STALE_AFTER_SECONDS,
        )
        ledger = SampleLedger(
            store,
            objects,
            worker_id=this_worker(),
            stale_after_seconds=options.stale_after_seconds,
            generator=options.generator,
        )
        standing = await ledger.shard_status([sample.id for sample in samples], exclusive=False, unknown_are_free=True)
        _charge(call.account, standing.done.values(), judgement)
        call.has_answered = call.has_answered or bool(standing.done)
        source = await asyncio.to_thread(objects.put_bytes, encode_samples(samples))
        params = SamplingParams(max_tokens=judge.longest_answer, temperature=judge.temperature)
        times_left, last_refused = TIMES_ASKED if spec.when_down == "wait" else 1, -1
        while True:
            completed = await complete_samples(
                store,
                objects,
                JudgeModel(call),
                samples,
                params,
                source=source,
                worker_id=this_worker(),
                options=options,
            )
            _charge(call.account, completed.lines, judgement)
            if not call.has_answered and call.refused and call.refused.issuperset(call.unanswered):
                raise call.refuses_all(call.unanswered[min(call.refused)])
            last_refused = call.refused_in_row if last_refused < 0 else last_refused
            times_left -= 1
            if not times_left or call.unanswered.keys().isdisjoint(call.questions):
                break
            await asyncio.sleep(judge.backoff_seconds)
        # An endpoint that refuses all from some question on may lack more than those questions, such as credit.
        is_closed = len(call.refused) >= last_refused >= max(LONE_FAILURES, judge.max_concurrency)
        down = [key for key in call.questions if key in call.unanswered and (is_closed or key not in call.refused)]
        if down and spec.when_down != "abstain":
            raise Recoverable(
                f"reward judge: {call.unanswered[down[0]]} ({len(down)} of {len(call.questions)} questions have no "
                "answer); all answers are kept, so the same again asks only the others"
            )
        return {str(row.id): row for row in decode_completions_blob(b"".join(completed.lines))}


def _charge(account: Account, lines: Iterable[bytes], judgement: Judgement) -> None:
    """Count in what kept answers took."""
    for row in decode_completions_blob(b"".join(lines)):
        if row.usage is not None:
            judgement.charges[str(row.id)] = account.note(str(row.id), row.usage)


def _read(question: Question, answer: SampledCompletion) -> _Reading:
    """Raises Unusable for an answer that has no verdict."""
    if answer.error is not None:
        return _Reading(question, None, answer.error, was_answered=False)
    return _Reading(question, read_answer(question, answer.text))


def _vote(rule: str, values: Sequence[float]) -> float:
    if rule == "mean":
        return statistics.fmean(values)
    if rule == "majority":
        counts = Counter(values)
        most = max(counts.values())
        values = [value for value in counts if counts[value] == most]
    return statistics.median(values)
