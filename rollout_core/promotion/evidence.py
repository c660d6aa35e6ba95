"""Evidence for a promotion: the new model against each rival on the same held-out prompts, and the guards.

`rewards_by_prompt` reads what an evaluation filed, `compare` and `guards.judge_guards` measure, `Evidence.objections`
decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_core.base.ids import ContentId, content_id
from rollout_core.config.promotion import MIN_PROMPTS, PromotionConfig
from rollout_core.data.samples import decode_samples
from rollout_core.evaluation.bootstrap import paired_gain
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import BlobId, EvalReport, Record
from rollout_core.promotion.guards import GuardFinding, Moment

SHOWN_CONFIDENCE = 0.95
"""Of intervals that nobody asked for."""


class Comparison(Record):
    """The new model and a rival on the same held-out prompts."""

    moment: Moment
    rival: ContentId
    report_of_rival: BlobId
    """Record of its evaluation."""
    report: BlobId
    """That of the new model."""
    num_prompts: int
    mean_before: float
    mean_after: float
    gain: float
    lower: float
    """Of the bootstrap interval of the gain, paired by prompt."""
    upper: float
    confidence: float
    num_unscored: int = 0
    """Prompts that are left out: a model's completions of them have no score."""

    @property
    def rewards(self) -> str:
        """Both means, for people."""
        return f"held-out reward {self.mean_before:.4f} -> {self.mean_after:.4f}"

    @property
    def interval(self) -> str:
        """The gain with its interval, for people."""
        left_out = f", {self.num_unscored} without a score left out" if self.num_unscored else ""
        return (
            f"gain {self.gain:.4f}, {self.confidence:.4g} interval {self.lower:.4f} to {self.upper:.4f} "
            f"over {self.num_prompts} prompts{left_out}"
        )

    @property
    def line(self) -> str:
        """All of it, for people."""
        rival = "the model before" if self.moment == "before" else "the latest model"
        return f"against {rival} ({self.rival.short}): {self.rewards}, {self.interval} (paired bootstrap)"


class Evidence(Record):
    """What a promotion was decided by."""

    comparisons: tuple[Comparison, ...]
    guards: tuple[GuardFinding, ...] = ()
    precision: str | None = None
    """For people: the dtypes of the weights that were evaluated, and what an engine computed in. None where nothing is
    known of them."""

    @property
    def lines(self) -> list[str]:
        """For people."""
        guards = [f"guard {'passed' if item.passed else 'refused'}: {item.line}" for item in self.guards]
        precision = [] if self.precision is None else [self.precision]
        return [*(item.line for item in self.comparisons), *precision, *guards]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The comparisons as a table, for people."""
        return [
            {
                "against": f"{item.moment} {item.rival.short}",
                "before": round(item.mean_before, 4),
                "after": round(item.mean_after, 4),
                "gain": round(item.gain, 4),
                "interval": f"{item.lower:.4f} to {item.upper:.4f} ({item.confidence:.4g})",
                "prompts": item.num_prompts,
            }
            for item in self.comparisons
        ]

    def objections(self, config: PromotionConfig) -> list[str]:
        """Why the model is not to be promoted; none where it is."""
        found = [objection for item in self.comparisons if (objection := _objection(item, config)) is not None]
        return [*found, *(f"a guard refused it: {item.line}" for item in self.guards if not item.passed)]


class Promotion(Record):
    """Whether a checkpoint became the latest one."""

    model: ContentId
    promoted: bool
    reason: str
    evidence: Evidence | None = None
    waits: bool = False
    """The evidence is what was asked for, and a person is to decide."""

    @property
    def lines(self) -> list[str]:
        """What it was decided by, for people."""
        return [] if self.evidence is None else self.evidence.lines


def _objection(item: Comparison, config: PromotionConfig) -> str | None:
    if config.accepts(item.gain):
        return _uncertainty(item, config)
    is_before = item.moment == "before"
    if item.gain < 0:
        why = "it fell" if is_before else "the latest model is better"
    elif item.gain == 0:
        why = "it did not rise" if is_before else "it is no better than the latest model"
    else:
        than = "" if is_before else " over the latest model"
        why = f"its gain{than}, {item.gain:.4g}, is not {config.asked} (promotion.min_gain)"
    return f"{why}: {item.rewards}"


def _uncertainty(item: Comparison, config: PromotionConfig) -> str | None:
    """Why a gain that is high enough is not sure enough."""
    if not config.confidence:
        return None
    if item.num_prompts < MIN_PROMPTS:
        return f"{item.num_prompts} prompts are too few for promotion.confidence; expected at least {MIN_PROMPTS}"
    if config.accepts(item.lower):
        return None
    over = "" if item.moment == "before" else " over the latest model"
    return f"the gain{over} is not sure: {item.rewards}, {item.interval}, whose lower end is not {config.asked}"


def rewards_by_prompt(objects: ObjectStore, report: EvalReport) -> dict[str, list[float]]:
    """Rewards of an evaluation's samples under the id of their prompt, which is the same for every model. A sample
    without a score adds none.

    Equal rows are one prompt. Raises MissingObject or CorruptObject.
    """
    rewards: dict[str, list[float]] = {}
    scores: list[float | None] = json.loads(objects.get_bytes(report.scores))
    for sample, score in zip(decode_samples(objects.get_bytes(report.samples)), scores, strict=True):
        prompt = content_id("held-out-prompt/1", [sample.row_id, sample.prompt, sample.extras])
        rewards.setdefault(prompt, []).extend([] if score is None else [score])
    return rewards


def same_prompts(objects: ObjectStore, one: EvalReport, other: EvalReport) -> bool:
    """Whether two evaluations are of the same prompts."""
    return rewards_by_prompt(objects, one).keys() == rewards_by_prompt(objects, other).keys()


def compare(
    moment: Moment,
    rival: tuple[ContentId, BlobId, Mapping[str, Sequence[float]]],
    after: tuple[BlobId, Mapping[str, Sequence[float]]],
    config: PromotionConfig,
) -> Comparison:
    """The new model against a rival: its id, the id of its report and its rewards by prompt; ``after`` likewise.

    Raises ConfigError where the prompts are not the same.
    """
    model, report_of_rival, rewards_before = rival
    report, rewards_after = after
    confidence = config.confidence or SHOWN_CONFIDENCE
    found = paired_gain(rewards_before, rewards_after, confidence=confidence)
    return Comparison(
        moment=moment,
        rival=model,
        report_of_rival=report_of_rival,
        report=report,
        num_prompts=found.num_prompts,
        mean_before=found.mean_before,
        mean_after=found.mean_after,
        gain=found.gain,
        lower=found.lower,
        upper=found.upper,
        confidence=confidence,
        num_unscored=len(rewards_before) - found.num_prompts,
    )
