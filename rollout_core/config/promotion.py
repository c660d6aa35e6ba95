"""`[promotion]`: what a new checkpoint must show before it becomes the latest one."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from rollout_core.config.base import DatasetSource, Settings
from rollout_core.config.rewards import RewardSpec

MIN_PROMPTS = 10
"""Of fewer held-out prompts a bootstrap interval is far narrower than its confidence says."""
ROUNDING = 1e-12
"""Means of the same rewards in another order may differ by this much."""


class LengthGuard(Settings):
    """`kind = "length"`: held-out completions may not grow much longer."""

    kind: Literal["length"]
    max_growth: float = Field(default=0.2, ge=0)
    """Share by which the mean number of tokens may grow."""


class FinishGuard(Settings):
    """`kind = "finish"`: held-out completions come to an end."""

    kind: Literal["finish"]
    max_truncated: float = Field(default=0.1, ge=0, le=1)
    """Largest share of them that may be cut at ``max_tokens``."""


class RewardGuard(Settings):
    """`kind = "reward"`: another reward of the same held-out completions may not fall."""

    kind: Literal["reward"]
    reward: RewardSpec
    """The reward that must not fall."""
    max_drop: float = Field(default=0.0, ge=0)
    """Amount by which its mean may fall."""


class PromptsGuard(Settings):
    """`kind = "prompts"`: a regression set, prompts of something else that the model must go on doing well."""

    kind: Literal["prompts"]
    prompts: DatasetSource
    """Prompts on which the reward must not fall."""
    reward: RewardSpec | None = None
    """Default: the run's ``reward``."""
    max_drop: float = Field(default=0.0, ge=0)
    """Amount by which the mean reward may fall."""
    floor: float | None = None
    """The mean reward may not be lower than this, whatever it was."""


class KLGuard(Settings):
    """`kind = "kl"`: on its own held-out completions the model stays close to each model it is compared with."""

    kind: Literal["kl"]
    max_kl: float = Field(gt=0)
    """Largest mean KL divergence from that model, nats a completion token."""
    estimator: Literal["exact", "k1", "k3"] = "exact"
    """``exact``: of the whole distribution at each token. ``k1`` and ``k3``: from the drawn tokens alone (Schulman,
    "Approximating KL Divergence", 2020), for which they must be drawn from the model's plain distribution."""


class SuiteGuard(Settings):
    """`kind = "suite"`: a suite of `[[evaluation.suites]]` that the model must go on doing well at."""

    identity_without_default: ClassVar[frozenset[str]] = frozenset({"min_questions"})

    kind: Literal["suite"]
    name: str
    """The suite's name."""
    metric: str | None = None
    """One of the suite's metrics. Default: the first that counts right answers, else the first."""
    max_drop: float = Field(default=0.0, ge=0)
    """Amount by which it may fall, or rise where less is better: the mean over the questions of both models, paired by
    question."""
    confidence: float = Field(default=0.0, ge=0, lt=1)
    """Such as 0.95: the lower end of this bootstrap interval of the gain, paired by question, may not be below
    ``-max_drop`` either. 0: not asked for."""
    min_questions: int | None = Field(default=None, ge=1)
    """Questions that must have the metric in both models: fewer would say nothing about a drop. Default: half of those
    that should have it."""


Guard = LengthGuard | FinishGuard | RewardGuard | PromptsGuard | KLGuard | SuiteGuard


class PromotionConfig(Settings):
    """When the new checkpoint becomes the ``latest`` resources of the store: if on the held-out prompts it earns more
    than the model the run started from, and than the one that is latest now, and every guard lets it pass."""

    enabled: bool = True
    """Whether a checkpoint may become the latest."""
    resource: str = Field(default="policy", pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the model among the resources."""
    min_gain: float = Field(default=0.0, ge=0)
    """The mean held-out reward must rise by more than this; so a tie is never promoted."""
    confidence: float = Field(default=0.0, ge=0, lt=1)
    """Such as 0.95: the lower end of this bootstrap interval of the gain, paired by prompt, must also be above
    ``min_gain``. 0: not asked for."""
    tolerance: float = Field(default=0.0, ge=0)
    """Instead of ``min_gain``: the held-out reward may stay as it is, or be lower by this much, and still be promoted.
    0: it must rise."""
    guards: tuple[Guard, ...] = ()
    """What else must hold, each a table `[[promotion.guards]]`. In the nightly flow only."""

    approval: Literal["evidence", "person"] = "evidence"
    """``person``: what the evidence accepts is a candidate, about which a run of `promote-candidate` asks somebody."""
    approval_hours: float = Field(default=72.0, gt=0, le=600)
    """For which a candidate waits."""
    undecided: Literal["reject", "promote"] = "reject"
    """The decision after that, if nobody has decided."""

    @model_validator(mode="after")
    def _one_bound(self) -> PromotionConfig:
        if self.tolerance and self.min_gain:
            raise ValueError(
                f"tolerance {self.tolerance:g} accepts a loss and min_gain {self.min_gain:g} asks for a gain; give one "
                "of them"
            )
        return self

    def refuse_guards(self) -> None:
        """Raise ValueError where there are guards, for a run whose evaluation does not have what they look at."""
        if self.guards:
            kinds = ", ".join(dict.fromkeys(guard.kind for guard in self.guards))
            raise ValueError(
                f"promotion.guards ({kinds}) look at completions of held-out prompts, and an agent is evaluated by "
                "what it earns on tasks; leave them out, or have the agent's own reward count what they guard"
            )

    def accepts(self, gain: float) -> bool:
        """Whether a gain, or the lower end of its interval, is as high as asked for."""
        if self.tolerance:
            return gain > -self.tolerance or math.isclose(gain, -self.tolerance, abs_tol=ROUNDING)
        return gain > self.min_gain and not math.isclose(gain, self.min_gain, abs_tol=ROUNDING)

    @property
    def asked(self) -> str:
        """The bound of `accepts`, in words."""
        return f"at least {-self.tolerance:g}" if self.tolerance else f"above {self.min_gain:g}"
