"""What a model's answers to a suite come to, as it is filed, and two such reports compared question by question."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from rollout_core.base.errors import ConfigError, MissingObject, NotFound
from rollout_core.base.ids import ContentId, content_id
from rollout_core.config.base import identity
from rollout_core.config.evaluation import Suite
from rollout_core.data.samples import decode_completions_blob, decode_samples
from rollout_core.evaluation.bootstrap import PairedGain, paired_gain
from rollout_core.evaluation.metrics import Question, estimate, value_of
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import BlobId, Completions, Record, Scores
from rollout_core.rewards.votes import read_answers

CONFIDENCE = 0.95
RIGHT_SHARE = "accuracy"
"""The metric by whose value a question counts as right: at least half of its answers are."""


class Metric(BaseModel):
    """One figure of a report; see `rollout_core.evaluation.metrics.Estimate`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    value: float
    lower: float | None = None
    upper: float | None = None
    num_questions: int


class SuiteReport(Record):
    """What a model's answers to a suite came to."""

    suite: str
    """Its name."""
    suite_id: ContentId
    """Of the prompts, how answers are drawn and how they are scored: the same for every model."""
    model: ContentId
    samples: BlobId
    completions: BlobId
    scores: BlobId
    """As of `Scores`."""
    questions: BlobId
    """JSON: the ids of the questions and, by metric, their values, ``null`` of one without."""
    num_questions: int
    num_samples: int
    num_tokens: int
    num_truncated: int
    """Answers that were cut at ``max_tokens``."""
    num_abstained: int
    """Answers without a score: the scorer abstained."""
    num_score_failed: int
    """Answers without a score: the scorer failed on them."""
    metrics: tuple[Metric, ...]

    @property
    def headline(self) -> Metric:
        """The figure that stands for all in a table: the first that counts right answers, else the first."""
        return next((metric for metric in self.metrics if metric.name != "mean"), self.metrics[0])


def suite_id_of(suite: Suite, prompts: ContentId, reward_source: ContentId) -> ContentId:
    """What makes two evaluations comparable: equal questions, drawn and scored alike. ``suite`` names reward models by
    content."""
    asked = [prompts, identity(suite.sampling), suite.samples, identity(suite.scorer), reward_source]
    return content_id("suite/1", asked)


def report_suite(
    objects: ObjectStore,
    suite: Suite,
    suite_id: ContentId,
    completions: Completions,
    scores: Scores,
    on_line: Callable[[str], None],
) -> SuiteReport:
    """The report of scored completions, of which those of one question stand side by side. ``on_line`` gets a line
    about answers that could not be read.

    Raises ConfigError where no question has a value of a metric.
    """
    values: list[float | None] = json.loads(objects.get_bytes(scores.scores))
    answers = _answers(objects, suite, completions, on_line)
    groups = [slice(start, start + suite.samples) for start in range(0, len(values), suite.samples)]
    questions = [Question(values[group], answers[group]) for group in groups]
    by_metric = {name: [value_of(name, question, suite.threshold) for question in questions] for name in _named(suite)}
    samples = decode_samples(objects.get_bytes(completions.samples))[:: suite.samples]
    ids = [sample.row_id or str(number) for number, sample in enumerate(samples, start=1)]
    return SuiteReport(
        suite=suite.name,
        suite_id=suite_id,
        model=completions.model,
        samples=completions.samples,
        completions=completions.completions,
        scores=scores.scores,
        questions=objects.put_json({"ids": ids, "values": by_metric}),
        num_questions=len(questions),
        num_samples=scores.num_samples,
        num_tokens=completions.num_tokens,
        num_truncated=completions.finish_reasons.get("length", 0),
        num_abstained=scores.num_abstained,
        num_score_failed=scores.num_reward_failed,
        metrics=tuple(_metric(name, by_metric[name], suite.samples) for name in suite.chosen_metrics),
    )


def _named(suite: Suite) -> list[str]:
    """Metrics whose values are filed: by ``accuracy`` a comparison tells which questions flipped."""
    return list(dict.fromkeys([*suite.chosen_metrics, RIGHT_SHARE]))


def _answers(
    objects: ObjectStore, suite: Suite, completions: Completions, on_line: Callable[[str], None]
) -> list[str | None]:
    """The answer of each completion, where one of the metrics is a vote."""
    if not any(name.startswith("maj@") for name in suite.chosen_metrics):
        return [None] * completions.num_samples
    texts = [row.text for row in decode_completions_blob(objects.get_bytes(completions.completions))]
    return read_answers(suite.scorer, texts, on_line)


def _metric(name: str, values: Sequence[float | None], samples: int) -> Metric:
    found = estimate(name, values, samples)
    if found is None:
        raise ConfigError(
            f"no question has enough answers with a score for {name}; look at the scorer, or leave that metric out"
        )
    return Metric(name=name, value=found.value, lower=found.lower, upper=found.upper, num_questions=found.num_questions)


@dataclass(frozen=True)
class Flip:
    """A question that one model has right and the other has not."""

    question: str
    """Its id."""
    prompt: Any
    """The text, or the chat messages."""
    completions: tuple[str, str]
    """The first answer of each model."""
    shares: tuple[float, float]
    """Of right answers."""


@dataclass(frozen=True)
class SuiteComparison:
    """Two models on one suite."""

    suite: str
    gains: Mapping[str, PairedGain]
    """By metric of the second report, what its model gains over the first; without those that no question has twice."""
    lost: tuple[Flip, ...]
    """Questions that the first model has right and the second has not, in order."""
    gained: tuple[Flip, ...]


def compare_reports(objects: ObjectStore, before: SuiteReport, after: SuiteReport) -> SuiteComparison:
    """The report ``after`` against ``before``, paired by question.

    Raises ConfigError where the two are not of the same questions, drawn and scored alike, NotFound where what was
    filed is not kept any more.
    """
    if before.suite_id != after.suite_id:
        raise ConfigError(
            f"suite {before.suite} was changed between the two evaluations ({before.suite_id.short} and "
            f"{after.suite_id.short}); evaluate both models by the suite as it is now"
        )
    try:
        filed = [objects.get_json(report.questions) for report in (before, after)]
        gains = {}
        for name in [metric.name for metric in after.metrics if metric.name in filed[0]["values"]]:
            sides = [_by_question(one["values"][name]) for one in filed]
            if any(sides[0][place] and sides[1][place] for place in sides[0]):
                gains[name] = paired_gain(sides[0], sides[1], confidence=CONFIDENCE)
        flips = _flips(objects, before, after, filed)
    except MissingObject as error:
        raise NotFound(
            f"the answers to {before.suite} are not in {objects.url} any more (object {error.content_id[:12]} is "
            "gone); evaluate the model again"
        ) from error
    return SuiteComparison(
        suite=before.suite,
        gains=gains,
        lost=tuple(flip for flip in flips if flip.shares[0] > flip.shares[1]),
        gained=tuple(flip for flip in flips if flip.shares[0] < flip.shares[1]),
    )


def _by_question(values: Sequence[float | None]) -> dict[str, list[float]]:
    return {f"{place:08d}": [] if value is None else [value] for place, value in enumerate(values)}


def _flips(
    objects: ObjectStore, before: SuiteReport, after: SuiteReport, filed: Sequence[Mapping[str, Any]]
) -> list[Flip]:
    pairs = list(zip(*(one["values"][RIGHT_SHARE] for one in filed), strict=True))
    flipped = [
        place
        for place, (first, second) in enumerate(pairs)
        if first is not None and second is not None and (first >= 0.5) != (second >= 0.5)
    ]
    if not flipped:
        return []
    samples = decode_samples(objects.get_bytes(before.samples))
    texts = [decode_completions_blob(objects.get_bytes(report.completions)) for report in (before, after)]
    each = before.num_samples // before.num_questions
    return [
        Flip(
            question=filed[0]["ids"][place],
            prompt=samples[place * each].prompt,
            completions=(texts[0][place * each].text, texts[1][place * each].text),
            shares=pairs[place],
        )
        for place in flipped
    ]
