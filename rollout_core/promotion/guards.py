"""Guards of a promotion: what each looks at, and what it finds in a new model.

A guard is a settings class in `rollout_core.config.promotion`, and here a function that judges and a row of `GUARDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

from rollout_core.base.errors import ConfigError
from rollout_core.config.promotion import (
    ROUNDING,
    FinishGuard,
    Guard,
    KLGuard,
    LengthGuard,
    PromptsGuard,
    RewardGuard,
    SuiteGuard,
)
from rollout_core.data.samples import decode_completions_blob
from rollout_core.evaluation.moments import change_of
from rollout_core.evaluation.reports import CONFIDENCE, SuiteReport
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Divergence, EvalReport, Record

Moment = Literal["before", "latest"]
"""Which rival: the model that the run started from, or the one that is latest now."""
Subject = Literal["held-out evaluation", "own reward", "own prompts", "divergence", "suite"]
"""What a guard looks at: the evaluation that decides about the promotion; the same completions by a reward of the
guard's own; an evaluation on prompts of its own; the KL divergence from each rival; reports of a suite."""
Judged = Iterable[tuple[bool, str]]
"""Whether the guard lets the model pass, and for people: what was measured and what is allowed."""


class GuardFinding(Record):
    """What a guard found."""

    kind: str
    passed: bool
    line: str
    """For people: what was measured and what is allowed."""


class GuardReports(Record):
    """Evaluations that a guard looks at: those of its own prompts, of its own reward, or of a suite."""

    guard: int
    """Its place in the configuration."""
    before: EvalReport | SuiteReport
    latest: EvalReport | SuiteReport | None
    after: EvalReport | SuiteReport


ReportT = TypeVar("ReportT", EvalReport, SuiteReport)


@dataclass(frozen=True)
class Measured(Generic[ReportT]):
    """What a guard looks at."""

    objects: ObjectStore
    rivals: Mapping[Moment, ReportT]
    after: ReportT
    divergences: Mapping[Moment, Divergence] = field(default_factory=dict)
    """From each rival, of a guard whose subject it is."""


@dataclass(frozen=True)
class GuardKind:
    """A row of `GUARDS`."""

    settings: type[Guard]
    """With its thresholds."""
    looks_at: Subject
    judge: Callable[[Any, Measured[Any]], Judged]
    """Of the settings."""


def _length(guard: LengthGuard, found: Measured[EvalReport]) -> Judged:
    new = found.after.num_tokens / max(1, found.after.num_samples)
    for moment, rival in found.rivals.items():
        old = rival.num_tokens / max(1, rival.num_samples)
        line = f"mean completion {old:.1f} ({moment}) -> {new:.1f} tokens, may grow by {guard.max_growth:.0%}"
        yield new <= old * (1 + guard.max_growth), line


def _finish(guard: FinishGuard, found: Measured[EvalReport]) -> Judged:
    rows = decode_completions_blob(found.objects.get_bytes(found.after.completions))
    share = sum(row.finish_reason == "length" for row in rows) / max(1, len(rows))
    line = f"{share:.1%} of completions are cut at max_tokens, at most {guard.max_truncated:.1%} may be"
    yield share <= guard.max_truncated, line


def _reward(guard: RewardGuard, found: Measured[EvalReport]) -> Judged:
    yield from _drop(guard.max_drop, f"the held-out prompts by the reward {guard.reward.kind}", found)


def _prompts(guard: PromptsGuard, found: Measured[EvalReport]) -> Judged:
    what, mean = f"the prompts {guard.prompts.address}", found.after.mean_reward
    yield from _drop(guard.max_drop, what, found)
    if guard.floor is not None:
        yield mean >= guard.floor, f"mean reward {mean:.4f} on {what}, at least {guard.floor:g} is asked for"


def _drop(max_drop: float, what: str, found: Measured[EvalReport]) -> Judged:
    for moment, rival in found.rivals.items():
        line = f"mean reward {rival.mean_reward:.4f} ({moment}) -> {found.after.mean_reward:.4f} on {what}"
        yield _at_most(rival.mean_reward - found.after.mean_reward, max_drop), f"{line}, may fall by {max_drop:g}"


def _kl(guard: KLGuard, found: Measured[EvalReport]) -> Judged:
    for moment, apart in found.divergences.items():
        rival = f"the {'model before' if moment == 'before' else 'latest model'} ({apart.rival.short})"
        value: float | None = getattr(apart, guard.estimator)
        if value is None:
            yield False, f"no KL divergence from {rival} can be had: {apart.problem}"
            continue
        per_completion = value * apart.num_tokens / max(1, apart.num_completions)
        yield (
            _at_most(value, guard.max_kl),
            f"KL divergence from {rival} {value:.4g} nats a token ({guard.estimator}; {per_completion:.4g} a "
            f"completion) over {apart.num_tokens} held-out tokens, at most {guard.max_kl:g} is allowed",
        )


def _suite(guard: SuiteGuard, found: Measured[SuiteReport]) -> Judged:
    metric, confidence = guard.metric or found.after.headline.name, guard.confidence or CONFIDENCE
    for moment, rival in found.rivals.items():
        change = change_of(found.objects, rival, found.after, metric, confidence=confidence)
        if change is None:
            why = f"no question has {metric} in both models ({moment} and after), or it is no mean over questions"
            yield False, f"suite {guard.name}: {why}"
            continue
        asked = max(report.num_asked(metric) for report in (rival, found.after))
        least = guard.min_questions or math.ceil(asked / 2)
        if change.gain.num_prompts < least:
            few = f"{change.gain.num_prompts} of {asked} questions have a score in both models; at least {least} must"
            yield False, f"{change.line(moment)}: too few to tell a drop, as {few} (min_questions)"
            continue
        falls = [change.fall, *([change.largest_fall] if guard.confidence else [])]
        way, end = ("rise", "upper") if change.is_less_better else ("fall", "lower")
        sure = f", and so may the interval's {end} end" if guard.confidence else ""
        yield (
            all(_at_most(fall, guard.max_drop) for fall in falls),
            f"{change.line(moment)}, may {way} by {guard.max_drop:g}{sure}",
        )


def _at_most(value: float, bound: float) -> bool:
    return value <= bound or math.isclose(value, bound, abs_tol=ROUNDING)


GUARDS: Mapping[str, GuardKind] = {
    "length": GuardKind(LengthGuard, "held-out evaluation", _length),
    "finish": GuardKind(FinishGuard, "held-out evaluation", _finish),
    "reward": GuardKind(RewardGuard, "own reward", _reward),
    "prompts": GuardKind(PromptsGuard, "own prompts", _prompts),
    "kl": GuardKind(KLGuard, "divergence", _kl),
    "suite": GuardKind(SuiteGuard, "suite", _suite),
}
"""By ``kind`` of the settings."""


def subject_of(guard: Guard) -> Subject:
    """What a guard looks at."""
    return GUARDS[guard.kind].looks_at


def judge_guard(guard: Guard, found: Measured[Any]) -> list[GuardFinding]:
    """What a guard says of the new model, against each rival; ``found`` has what it looks at."""
    judged = GUARDS[guard.kind].judge(guard, found)
    return [GuardFinding(kind=guard.kind, passed=passed, line=line) for passed, line in judged]


def judge_guards(
    guards: Sequence[Guard],
    evaluated: Measured[EvalReport] | None,
    reports: Sequence[GuardReports],
    divergences: Sequence[Divergence],
) -> list[GuardFinding]:
    """What all guards say. ``evaluated``: the evaluation that decides about the promotion, None where it has no
    completions; ``reports``: those that guards look at besides; ``divergences``: from each rival.

    Raises ConfigError where one has nothing to look at.
    """
    own = {item.guard: item for item in reports}
    found: list[GuardFinding] = []
    for number, guard in enumerate(guards):
        subject = subject_of(guard)
        if subject in ("own reward", "own prompts", "suite"):
            looked_at = None if evaluated is None or number not in own else _of_reports(evaluated.objects, own[number])
        elif subject == "divergence" and evaluated is not None:
            looked_at = _with_divergences(evaluated, divergences)
        else:
            looked_at = evaluated
        if looked_at is None:
            what = "KL divergence" if subject == "divergence" else "evaluation"
            raise ConfigError(
                f"promotion.guards.{number} ({guard.kind}) has no {what} to look at; measure it first, or leave the "
                "guard out"
            )
        found += judge_guard(guard, looked_at)
    return found


def _of_reports(objects: ObjectStore, reports: GuardReports) -> Measured[Any]:
    latest: dict[Moment, Any] = {} if reports.latest is None else {"latest": reports.latest}
    return Measured[Any](objects, {"before": reports.before, **latest}, reports.after)


def _with_divergences(
    evaluated: Measured[EvalReport], divergences: Sequence[Divergence]
) -> Measured[EvalReport] | None:
    """None where that from a rival was not measured."""
    from_rival = {item.rival: item for item in divergences if item.model == evaluated.after.model}
    if any(rival.model not in from_rival for rival in evaluated.rivals.values()):
        return None
    measured: dict[Moment, Divergence] = {moment: from_rival[rival.model] for moment, rival in evaluated.rivals.items()}
    return replace(evaluated, divergences=measured)
