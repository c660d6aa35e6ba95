"""The reward that judges give: questions asked through the ledger of samples, answers read, votes counted."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_core.base.errors import Fatal, Recoverable
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.stopping import run_async
from rollout_core.config import SamplingParams
from rollout_core.config.judges import JudgeReward
from rollout_core.data.samples import Sample, SampledCompletion, decode_completions_blob, encode_samples
from rollout_core.inference.batch import BatchOptions, complete_samples
from rollout_core.inference.ledger import SampleLedger, this_worker
from rollout_core.rewards.judges.engine import JudgeModel, charged
from rollout_core.rewards.judges.kept_answers import AnswerLedger
from rollout_core.rewards.judges.questions import Question, Unusable, questions_of, read_answer, repair_of
from rollout_core.rewards.judges.spending import Spending
from rollout_core.rewards.scoring import RewardInput, Score, places

GENERATOR = "judge/1"
"""All that decides an answer is in its question's id."""
STALE_AFTER_SECONDS = 60.0


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
    passing: int = 0
    """Of those without any answer, how many may get one later."""
    repaired: int = 0
    """Answers that were usable at the second time."""
    charges: dict[str, Any] = field(default_factory=dict)
    """What each answer took, by question."""

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "reward": self.reward,
            "verdicts": [[vars(verdict) for verdict in verdicts] for verdicts in self.verdicts],
            "problems": dict(self.problems),
            "repaired": self.repaired,
            "charges": {question: list(charge) for question, charge in self.charges.items()},
        }


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

        Raises BudgetSpent before a question that the budget may not have room for, and Recoverable where an endpoint is
        down and that is to fail.
        """
        return run_async(self._judge(inputs))

    async def _judge(self, inputs: Sequence[RewardInput]) -> list[Score | Fatal]:
        spec = self._spec
        questions, wrong = questions_of(spec, inputs)
        judgement = Judgement(self.reward, [[] for _ in inputs])
        first, repairs, again = await self._ask(questions, judgement), [], []
        values: list[tuple[Question, Mapping[int, float] | None, str]] = []
        for question, answer in zip(questions, first, strict=True):
            try:
                values.append(self._read(question, answer, judgement))
            except Unusable as problem:
                repairs.append(repair_of(question, spec.judges[question.judge], answer.text, str(problem)))
        if repairs:
            again = await self._ask(repairs, judgement)
        for question, answer in zip(repairs, again, strict=True):
            try:
                values.append(self._read(question, answer, judgement))
                judgement.repaired += 1
            except Unusable as problem:
                values.append((question, None, f"no answer of the schema, and not after the repair either: {problem}"))
        self._tell(judgement, values)
        given: list[dict[int, list[float | None]]] = [{} for _ in inputs]
        for question, found, reasoning in values:
            for place in question.inputs:
                value = None if found is None else found[place]
                given[place].setdefault(question.judge, []).append(value)
                name = spec.judges[question.judge].name
                judgement.verdicts[place].append(Verdict(name, question.id, value, reasoning))
        self._judgements.append(judgement)
        named = list(places(inputs))
        return [
            Fatal(f"reward judge failed on {named[place]}: {wrong[place]}") if place in wrong else self._score(votes)
            for place, votes in enumerate(given)
        ]

    def _read(
        self, question: Question, answer: SampledCompletion, judgement: Judgement
    ) -> tuple[Question, Mapping[int, float] | None, str]:
        """Raises Unusable for an answer that has no verdict."""
        if answer.error is not None:
            judgement.problems["no answer"] += 1
            return question, None, answer.error
        found = read_answer(question, answer.text)
        return question, question.read(found), str(found["reasoning"])

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

    def _tell(self, judgement: Judgement, values: Sequence[tuple[Question, Mapping[int, float] | None, str]]) -> None:
        """Count answers of no use; raises Fatal where they are to fail."""
        useless = [(question, reason) for question, found, reason in values if found is None]
        judgement.problems["not of the schema"] = len(useless) - judgement.problems["no answer"]
        judgement.problems += Counter()  # without those of none
        if judgement.repaired:
            self._on_line(f"{judgement.repaired} of {len(values)} answers were of the schema at the second time only")
        if not useless:
            return
        question, reason = useless[0]
        text = (
            f"{len(useless)} of {len(values)} questions have no usable answer; the first, to "
            f"{self._spec.judges[question.judge].name}: {reason}"
        )
        tolerated = judgement.passing if self._spec.when_down == "abstain" else 0
        if self._spec.when_unusable == "fail" and len(useless) > tolerated:
            raise Fatal(f"reward judge: {text}. See when_unusable")
        self._on_line(text)

    async def _ask(self, questions: Sequence[Question], judgement: Judgement) -> list[SampledCompletion]:
        """The answer to each, of all judges at the same time; those that are kept are not asked again."""
        by_judge = [
            {str(each.id): each for each in questions if each.judge == number}
            for number in range(len(self._spec.judges))
        ]
        async with self._ledger.open_store() as store:
            asked = [self._ask_judge(store, number, own, judgement) for number, own in enumerate(by_judge) if own]
            # One that ends by an error takes none of the others along: their answers are paid for.
            results = await asyncio.gather(*asked, return_exceptions=True)
        answers: dict[str, SampledCompletion] = {}
        for result in results:
            if isinstance(result, BaseException):
                raise result
            answers |= result
        return [answers[str(question.id)] for question in questions]

    async def _ask_judge(
        self, store: Any, number: int, questions: Mapping[str, Question], judgement: Judgement
    ) -> dict[str, SampledCompletion]:
        judge, objects = self._spec.judges[number], self._ledger.objects
        samples = [
            Sample(question.id, [dict(message) for message in question.messages], [], 0, None, {"judge": judge.name})
            for question in questions.values()
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
        self._charge(number, standing.done.values(), judgement)
        source = await asyncio.to_thread(objects.put_bytes, encode_samples(samples))
        params = SamplingParams(max_tokens=judge.longest_answer, temperature=judge.temperature or 0.0)
        model = JudgeModel(self._spec, judge, questions, self.spending, self._on_line)
        completed = await complete_samples(
            store, objects, model, samples, params, source=source, worker_id=this_worker(), options=options
        )
        if completed.passing_failures and self._spec.when_down == "fail":
            rows = decode_completions_blob(b"".join(completed.lines))
            reason = next(row.error for row in rows if row.error is not None)
            raise Recoverable(f"reward judge: {reason}; all answers are kept, so the same again asks only the others")
        judgement.passing += completed.passing_failures
        self._charge(number, completed.lines, judgement)
        return {str(row.id): row for row in decode_completions_blob(b"".join(completed.lines))}

    def _charge(self, number: int, lines: Any, judgement: Judgement) -> None:
        """Count in what kept answers took."""
        for row in decode_completions_blob(b"".join(lines)):
            if row.usage is not None:
                charge = charged(self._spec.judges[number], *row.usage)
                judgement.charges[str(row.id)] = charge
                self.spending.note(str(row.id), charge)


def _vote(rule: str, values: Sequence[float]) -> float:
    if rule == "mean":
        return statistics.fmean(values)
    if rule == "majority":
        counts = Counter(values)
        most = max(counts.values())
        values = [value for value in counts if counts[value] == most]
    return statistics.median(values)
