"""What a model's answers to a suite come to, as it is filed, and two such reports compared question by question."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from rollout_core.base.errors import ConfigError, MissingObject, NotFound
from rollout_core.base.ids import ContentId, content_id
from rollout_core.config.evaluation import INSTRUCTION_METRIC, ChoiceScorer, Suite
from rollout_core.config.judges import JudgeReward
from rollout_core.config.verifiers import InstructionsReward
from rollout_core.data.samples import Sample, decode_completions_blob, decode_samples
from rollout_core.evaluation.agreement import agreement
from rollout_core.evaluation.bootstrap import PairedGain, Sides, paired_gains
from rollout_core.evaluation.metrics import (
    HUMAN,
    Metric,
    Question,
    estimate,
    value_of,
    weighted_estimate,
)
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import BlobId, Completions, Record, Scores
from rollout_core.rewards.votes import read_answers

CONFIDENCE = 0.95
SAME = 1e-6
"""Figures that differ by less are the same, whatever precision they were computed in."""
RIGHT_SHARE = "accuracy"
"""The metric by whose value a question counts as right: at least half of its answers are."""


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
    """As of `Scores`; of a choice whether its question was answered right."""
    questions: BlobId
    """JSON: the ids of the questions; by metric, their values, ``null`` of one without; the places of the
    completions that are shown of them, ``null`` where none is kept; by metric the ``weights`` of questions that do not
    count alike; and by endpoint and sample the ``usage`` of answers that no `Completions` of the run have."""
    num_questions: int
    num_samples: int
    """Answers that were had."""
    num_tokens: int
    num_truncated: int
    """Answers that were cut at ``max_tokens``."""
    num_abstained: int
    """Answers without a score: the scorer abstained."""
    num_score_failed: int
    """Answers without a score: the scorer failed on them."""
    num_failed: int = 0
    """Answers that could not be had, and count as the suite's ``failed`` says."""
    failed: tuple[str, ...] = ()
    """Ids of their questions."""
    unscored: tuple[str, ...] = ()
    """Ids of the questions of answers without a score, where tasks of others say which; some may count as 0 in figures
    of theirs."""
    conditions: ContentId | None = None
    """How answers are drawn and scored, without the prompts; None where rows have no ids of their own, by which a
    question could be found in other prompts."""
    metrics: tuple[Metric, ...]

    @property
    def headline(self) -> Metric:
        """The figure that stands for all in a table: the first that counts right answers, else the first."""
        counting = (each for each in self.metrics if each.name != "mean" and not each.name.startswith(HUMAN))
        return next(counting, self.metrics[0])

    def figure(self, name: str | None) -> Metric:
        """The one of that name, by default `headline`. Raises ConfigError where there is none of that name."""
        if name is None:
            return self.headline
        found = next((metric for metric in self.metrics if metric.name == name), None)
        if found is None:
            known = ", ".join(metric.name for metric in self.metrics)
            raise ConfigError(f"suite {self.suite} came to no metric {name!r}; expected one of {known}")
        return found

    def num_asked(self, name: str) -> int:
        """Questions that should have the metric: all of them, or, where no answer lacks a score, those that have it,
        as each task of a suite has metrics of its own."""
        lacks = self.num_abstained + self.num_score_failed + self.num_failed
        return self.num_questions if lacks else self.figure(name).num_questions


def suite_id_of(suite: Suite, prompts: ContentId, source: ContentId | None) -> ContentId:
    """What makes two evaluations the same: equal questions, drawn and scored alike, by code of id ``source``. ``suite``
    names reward models by content."""
    return content_id("suite/1", [prompts, *suite.how_answered(source)])


def report_suite(
    objects: ObjectStore,
    suite: Suite,
    prompts: ContentId,
    source: ContentId,
    completions: Completions,
    scores: Scores,
    on_line: Callable[[str], None],
    *,
    asked: ContentId | None = None,
) -> SuiteReport:
    """The report of scored completions, of which those of one question stand side by side. ``asked`` are all samples,
    where answers to some could not be had. ``on_line`` gets a line about answers that could not be read.

    Raises ConfigError where no question has a value of a metric.
    """
    answered = decode_samples(objects.get_bytes(completions.samples))
    samples = answered if asked is None else decode_samples(objects.get_bytes(asked))
    values: dict[str, float | None] = {}
    if suite.failed == "wrong":
        values = dict.fromkeys((sample.id for sample in samples), 0.0)
    scored = dict(zip((one.id for one in answered), json.loads(objects.get_bytes(scores.scores)), strict=True))
    values |= scored
    read = _answers(objects, suite, completions, on_line)
    answers = dict(zip((sample.id for sample in answered), read, strict=True))
    groups = [samples[start : start + suite.samples] for start in range(0, len(samples), suite.samples)]
    questions = [
        Question([values.get(one.id) for one in group], [answers.get(one.id) for one in group]) for group in groups
    ]
    by_metric = {name: [value_of(name, question, suite.threshold) for question in questions] for name in _named(suite)}
    firsts = [group[0] for group in groups]
    weights: dict[str, Sequence[float]] = {}
    metrics = {name: estimate(name, by_metric[name], suite.samples) for name in suite.chosen_metrics}
    if INSTRUCTION_METRIC in metrics and isinstance(suite.scorer, InstructionsReward):
        counts = [len(sample.extras[suite.scorer.ids_key]) for sample in firsts]
        metrics[INSTRUCTION_METRIC] = weighted_estimate(INSTRUCTION_METRIC, by_metric[INSTRUCTION_METRIC], counts)
        weights[INSTRUCTION_METRIC] = counts
    place_of = {sample.id: place for place, sample in enumerate(answered)}
    places = [next((place_of[one.id] for one in group if one.id in place_of), None) for group in groups]
    lacking = [number for number, group in enumerate(groups) for one in group if one.id not in place_of]
    return file_report(
        objects,
        suite,
        prompts,
        source,
        completions,
        Answered(firsts, by_metric, metrics, places, lacking, weights, _agreement(suite, groups, scored)),
        scores=scores.scores,
        num_abstained=scores.num_abstained,
        num_score_failed=scores.num_reward_failed,
    )


@dataclass(frozen=True)
class Answered:
    """What the answers to a suite's questions came to."""

    questions: Sequence[Sample]
    """A sample of each."""
    values: Mapping[str, Sequence[float | None]]
    """By metric, of each question."""
    metrics: Mapping[str, Metric | None]
    """What these come to; None of one that no question has a value of."""
    places: Sequence[int | None]
    """Of the completion that is shown of each; None where none is kept."""
    lacking: Sequence[int]
    """The question of each answer that could not be had."""
    weights: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By metric, of each question, where they do not count alike."""
    agreement: Sequence[Metric] = ()
    """Of the scorer and people."""


def file_report(
    objects: ObjectStore,
    suite: Suite,
    prompts: ContentId,
    source: ContentId | None,
    completions: Completions,
    answered: Answered,
    **figures: Any,
) -> SuiteReport:
    """File what was answered; ``figures`` are further fields of the report. Raises as `report_suite` does."""
    own = [sample.row_id for sample in answered.questions]
    ids = [name or str(number) for number, name in enumerate(own, start=1)]
    has_ids = None not in own and len(set(own)) == len(own)
    filed = {"ids": ids, "values": answered.values, "places": answered.places}
    if answered.weights:
        filed["weights"] = answered.weights
    return SuiteReport(
        suite=suite.name,
        suite_id=suite_id_of(suite, prompts, source),
        conditions=content_id("suite-conditions/1", suite.how_answered(source)) if has_ids else None,
        model=completions.model,
        samples=completions.samples,
        completions=completions.completions,
        questions=objects.put_json(filed),
        num_questions=len(ids),
        num_samples=completions.num_samples,
        num_tokens=completions.num_tokens,
        num_truncated=completions.finish_reasons.get("length", 0),
        num_failed=len(answered.lacking),
        failed=tuple(dict.fromkeys(ids[number] for number in answered.lacking)),
        metrics=(*(_known(name, answered.metrics[name]) for name in suite.chosen_metrics), *answered.agreement),
        **figures,
    )


def _named(suite: Suite) -> list[str]:
    """Metrics whose values are filed: by ``accuracy`` a comparison tells which questions flipped."""
    return list(dict.fromkeys([*suite.chosen_metrics, RIGHT_SHARE]))


def _agreement(
    suite: Suite, questions: Sequence[Sequence[Sample]], scored: Mapping[ContentId, float | None]
) -> list[Metric]:
    """Of a judge, the mean of whose values of a question's answers counts, and the people who judged some of them."""
    judge = suite.scorer
    if not isinstance(judge, JudgeReward) or judge.mode == "ranking":
        return []
    pairs: list[tuple[float, float]] = []
    for samples in questions:
        human, given = judge.human_judgement(samples[0].extras), [scored.get(one.id) for one in samples]
        known = [value for value in given if value is not None]
        if human is not None and known:
            pairs.append((statistics.fmean(known), human))
    return agreement(judge.mode, [mean for mean, _ in pairs], [human for _, human in pairs]) if pairs else []


def _answers(
    objects: ObjectStore, suite: Suite, completions: Completions, on_line: Callable[[str], None]
) -> list[str | None]:
    """The answer of each completion, where one of the metrics is a vote."""
    is_vote = any(name.startswith("maj@") for name in suite.chosen_metrics)
    if not is_vote or isinstance(suite.scorer, ChoiceScorer):
        return [None] * completions.num_samples
    texts = [row.text for row in decode_completions_blob(objects.get_bytes(completions.completions))]
    return read_answers(suite.scorer, texts, on_line)


def _known(name: str, found: Metric | None) -> Metric:
    if found is None:
        raise ConfigError(
            f"no question has enough answers with a score for {name}; look at the scorer, or leave that metric out"
        )
    return found


@dataclass(frozen=True)
class Flip:
    """A question with what two models made of it, most often one that one of them has right and the other has not."""

    question: str
    """Its id."""
    prompt: Any
    """The text, or the chat messages."""
    completions: tuple[str, str]
    """The first answer of each model."""
    shares: tuple[float, float]
    """Of right answers."""
    samples: tuple[int | None, int | None] = (None, None)
    """Numbers of the first answers among all of each model's."""

    @property
    def right(self) -> tuple[bool, bool]:
        """Whether each model has it right: at least half of its answers are."""
        first, second = self.shares
        return first >= 0.5, second >= 0.5


@dataclass(frozen=True)
class SuiteComparison:
    """Two models on one suite."""

    suite: str
    gains: Mapping[str, PairedGain]
    """By metric of the second report, what its model gains over the first; without those that no question has twice
    and those that are no mean of what questions have."""
    lost: tuple[Flip, ...]
    """Questions that the first model has right and the second has not, in order."""
    gained: tuple[Flip, ...]
    remark: str | None = None
    """What is to be known of the two, besides."""
    questions: tuple[Flip, ...] = ()
    """Every question that both have a score of, where they were asked for."""


def compare_reports(
    objects: ObjectStore,
    before: SuiteReport,
    after: SuiteReport,
    *,
    confidence: float = CONFIDENCE,
    every: bool = False,
) -> SuiteComparison:
    """The report ``after`` against ``before``, paired by the questions' ids; with ``every`` question, not only those
    that flipped. Their prompts may differ, such as in the examples before a question, where rows have ids of their own;
    the answers are drawn and scored alike.

    Raises ConfigError where that is not so, NotFound where what was filed is not kept any more.
    """
    is_same = before.suite_id == after.suite_id
    if not is_same and (before.conditions is None or before.conditions != after.conditions):
        raise ConfigError(
            f"suite {before.suite} was changed between the two evaluations ({before.suite_id.short} and "
            f"{after.suite_id.short}); evaluate both models by the suite as it is now"
        )
    try:
        sides = [_Side.of(objects, report) for report in (before, after)]
        common = [name for name in sides[0].number_of if name in sides[1].number_of]
        if not common:
            raise ConfigError(f"no question of suite {before.suite} was put to both models; evaluate both by the same")
        paired: dict[str, Sides] = {}
        means = [metric for metric in after.metrics if metric.name in sides[0].values and sides[1].is_mean(metric)]
        for name in [metric.name for metric in means]:
            values = [side.by_question(name, common) for side in sides]
            if any(values[0][question] and values[1][question] for question in common):
                paired[name] = Sides(values[0], values[1], sides[1].weights_of(name, common))
        gains = paired_gains(paired, confidence=confidence)
        asked = _questions(objects, (before, after), sides, common, every=every)
    except MissingObject as error:
        raise NotFound(
            f"the answers to {before.suite} are not in {objects.url} any more (object {error.content_id[:12]} is "
            "gone); evaluate the model again"
        ) from error
    remark = None
    if not is_same:
        remark = (
            f"suite {before.suite}: rows, template or examples changed between the two evaluations; {len(common)} "
            f"questions of {before.num_questions} and {after.num_questions} are paired by the ids of their rows"
        )
    return SuiteComparison(
        suite=before.suite,
        gains=gains,
        lost=tuple(flip for flip in asked if flip.right == (True, False)),
        gained=tuple(flip for flip in asked if flip.right == (False, True)),
        remark=remark,
        questions=tuple(asked) if every else (),
    )


@dataclass(frozen=True)
class _Side:
    """What a report filed of its questions."""

    ids: Sequence[str]
    values: Mapping[str, Sequence[float | None]]
    places: Sequence[int | None]
    number_of: Mapping[str, int]
    """Places of the questions by their ids, of which a further one of the same id has a number."""
    weights: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, objects: ObjectStore, report: SuiteReport) -> _Side:
        filed = objects.get_json(report.questions)
        each = report.num_samples // report.num_questions
        # Reports of the first version had no places; none of their answers was left out.
        places = filed.get("places") or [place * each for place in range(report.num_questions)]
        seen = Counter[str]()
        number_of = {}
        for number, name in enumerate(filed["ids"]):
            seen[name] += 1
            number_of[name if seen[name] == 1 else f"{name} ({seen[name]})"] = number
        return cls(filed["ids"], filed["values"], places, number_of, filed.get("weights", {}))

    def by_question(self, metric: str, names: Sequence[str]) -> dict[str, list[float]]:
        """Values of the metric, none of a question without."""
        values = ((name, self.values[metric][self.number_of[name]]) for name in names)
        return {name: [] if value is None else [value] for name, value in values}

    def is_mean(self, metric: Metric) -> bool:
        """Whether the figure is the mean of what questions have. Tasks of lm_eval have others, such as a perplexity,
        whose questions have log-likelihoods."""
        values, weights = self.values.get(metric.name, ()), self.weights.get(metric.name) or repeat(1.0)
        known = [(value, weight) for value, weight in zip(values, weights) if value is not None]  # noqa: B905
        total = math.fsum(weight for _, weight in known)
        mean = math.fsum(value * weight for value, weight in known) / total if total else math.nan
        return math.isclose(mean, metric.value, rel_tol=SAME, abs_tol=SAME)

    def weights_of(self, metric: str, names: Sequence[str]) -> dict[str, float] | None:
        """Of the questions, where they do not count alike."""
        weights = self.weights.get(metric)
        return None if weights is None else {name: weights[self.number_of[name]] for name in names}


def _questions(
    objects: ObjectStore,
    reports: Sequence[SuiteReport],
    sides: Sequence[_Side],
    common: Sequence[str],
    *,
    every: bool,
) -> list[Flip]:
    """Those that flipped, or every one."""
    chosen = []
    for name in common:
        first, second = (side.values[RIGHT_SHARE][side.number_of[name]] for side in sides)
        if first is not None and second is not None and (every or (first >= 0.5) != (second >= 0.5)):
            chosen.append((name, (first, second)))
    if not chosen:
        return []
    samples = decode_samples(objects.get_bytes(reports[0].samples))
    texts = [decode_completions_blob(objects.get_bytes(report.completions)) for report in reports]
    found = []
    for name, shares in chosen:
        places = [side.places[side.number_of[name]] for side in sides]
        first, second = ("" if place is None else of[place].text for place, of in zip(places, texts, strict=True))
        prompt = "" if places[0] is None else samples[places[0]].prompt
        found.append(
            Flip(sides[0].ids[sides[0].number_of[name]], prompt, (first, second), shares, (places[0], places[1]))
        )
    return found
