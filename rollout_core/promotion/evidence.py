"""Evidence for a promotion: the new model against each rival on the same held-out prompts, and the guards.

`rewards_by_prompt` reads what an evaluation filed, `compare` and `judge_guard` measure, `Evidence.objections` decides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rollout_core.base.ids import ContentId, content_id
from rollout_core.config.promotion import (
    MIN_PROMPTS,
    ROUNDING,
    FinishGuard,
    KLGuard,
    LengthGuard,
    PromotionConfig,
    PromptsGuard,
    RewardGuard,
)
from rollout_core.data.samples import decode_completions_blob, decode_samples
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import BlobId, EvalReport, Record
from rollout_core.promotion.bootstrap import paired_gain

SHOWN_CONFIDENCE = 0.95
"""Of intervals that nobody asked for."""

Moment = Literal["before", "latest"]
"""Who a rival is: the model that the run started from, or the one that is latest now."""


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


class GuardFinding(Record):
    """What a guard found."""

    kind: str
    passed: bool
    line: str
    """For people: what was measured and what is allowed."""


class GuardReports(Record):
    """Evaluations that a guard looks at: those of its own prompts, or of its own reward."""

    guard: int
    """Its place in the configuration."""
    before: EvalReport
    latest: EvalReport | None
    after: EvalReport


class Divergence(Record):
    """How far the new model's distribution is from a rival's on its own held-out completions.

    Means over their tokens, nats a token, as of `rollout_core.algorithms.divergence.MeanKL`; None where the two do not
    read the same token ids, for the reason that ``problem`` gives.
    """

    model: ContentId
    rival: ContentId
    num_tokens: int
    num_completions: int
    exact: float | None = None
    k1: float | None = None
    k3: float | None = None
    problem: str | None = None


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

    def objections(self, config: PromotionConfig) -> list[str]:
        """Why the model is not to be promoted; none where it is."""
        found = [objection for item in self.comparisons if (objection := _objection(item, config)) is not None]
        return [*found, *(f"a guard refused it: {item.line}" for item in self.guards if not item.passed)]


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


def judge_kl(guard: KLGuard, moment: Moment, found: Divergence) -> GuardFinding:
    """What a guard says of how far the new model is from a rival."""
    rival = f"the {'model before' if moment == 'before' else 'latest model'} ({found.rival.short})"
    value: float | None = getattr(found, guard.estimator)
    if value is None:
        line = f"no KL divergence from {rival} can be had: {found.problem}"
        return GuardFinding(kind=guard.kind, passed=False, line=line)
    per_completion = value * found.num_tokens / max(1, found.num_completions)
    line = (
        f"KL divergence from {rival} {value:.4g} nats a token ({guard.estimator}; {per_completion:.4g} a completion) "
        f"over {found.num_tokens} held-out tokens, at most {guard.max_kl:g} is allowed"
    )
    passed = value <= guard.max_kl or math.isclose(value, guard.max_kl, abs_tol=ROUNDING)
    return GuardFinding(kind=guard.kind, passed=passed, line=line)


def judge_guard(
    objects: ObjectStore,
    guard: LengthGuard | FinishGuard | RewardGuard | PromptsGuard,
    rivals: Mapping[Moment, EvalReport],
    after: EvalReport,
) -> list[GuardFinding]:
    """What a guard says of the new model, against each rival. The reports are those of what the guard looks at."""
    if isinstance(guard, LengthGuard):
        return [_judge_length(guard, moment, rival, after) for moment, rival in rivals.items()]
    if isinstance(guard, FinishGuard):
        share = _truncated(objects, after)
        line = f"{share:.1%} of completions are cut at max_tokens, at most {guard.max_truncated:.1%} may be"
        return [GuardFinding(kind=guard.kind, passed=share <= guard.max_truncated, line=line)]
    found = [_judge_drop(guard, moment, rival, after) for moment, rival in rivals.items()]
    if isinstance(guard, PromptsGuard) and guard.floor is not None:
        line = f"mean reward {after.mean_reward:.4f} on {_what(guard)}, at least {guard.floor:g} is asked for"
        found.append(GuardFinding(kind=guard.kind, passed=after.mean_reward >= guard.floor, line=line))
    return found


def _judge_length(guard: LengthGuard, moment: Moment, rival: EvalReport, after: EvalReport) -> GuardFinding:
    old, new = (report.num_tokens / max(1, report.num_samples) for report in (rival, after))
    line = f"mean completion {old:.1f} ({moment}) -> {new:.1f} tokens, may grow by {guard.max_growth:.0%}"
    return GuardFinding(kind=guard.kind, passed=new <= old * (1 + guard.max_growth), line=line)


def _judge_drop(
    guard: RewardGuard | PromptsGuard, moment: Moment, rival: EvalReport, after: EvalReport
) -> GuardFinding:
    drop = rival.mean_reward - after.mean_reward
    passed = drop <= guard.max_drop or math.isclose(drop, guard.max_drop, abs_tol=ROUNDING)
    line = (
        f"mean reward {rival.mean_reward:.4f} ({moment}) -> {after.mean_reward:.4f} on {_what(guard)}, may fall by "
        f"{guard.max_drop:g}"
    )
    return GuardFinding(kind=guard.kind, passed=passed, line=line)


def _what(guard: RewardGuard | PromptsGuard) -> str:
    if isinstance(guard, PromptsGuard):
        return f"the prompts {guard.prompts.address}"
    return f"the held-out prompts by the reward {guard.reward.kind}"


def _truncated(objects: ObjectStore, report: EvalReport) -> float:
    rows = decode_completions_blob(objects.get_bytes(report.completions))
    return sum(row.finish_reason == "length" for row in rows) / max(1, len(rows))


@dataclass(frozen=True)
class PolicyRewards:
    """What one model of a run on policy earned."""

    iteration: int
    """From 1: the one whose completions it drew."""
    model: ContentId
    training: float
    """Mean reward of these completions."""
    held_out: float
    """Mean reward of its completions of held-out prompts."""


def reward_hacking(found: Sequence[PolicyRewards], *, max_fall: float, evaluations: int) -> str | None:
    """What speaks for reward hacking: the last ``evaluations`` of ``found`` have each, against the best held-out reward
    before them, a higher training reward and a held-out reward lower by more than ``max_fall``. None where they have
    not. As in Gao, Schulman and Hilton, arXiv:2210.10760, figure 1: the proxy rises on while the gold reward falls.
    """
    in_a_row = 0
    best = found[0]
    for point in found:
        hacks = point.training > best.training and point.held_out < best.held_out - max_fall
        in_a_row = in_a_row + 1 if hacks else 0
        if point.held_out > best.held_out:
            best = point
    if in_a_row < evaluations:
        return None
    seen = "; ".join(f"{point.iteration}: {point.training:.4g}, {point.held_out:.4g}" for point in found)
    return (
        f"in the last {in_a_row} evaluations the training reward is above that of iteration {best.iteration} "
        f"({best.training:.4g}), whose held-out reward was the best ({best.held_out:.4g}, model {best.model}), and the "
        f"held-out reward is lower than that by more than {max_fall:g}. Training and held-out reward by iteration: "
        f"{seen}"
    )
