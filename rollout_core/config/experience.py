"""Settings of what learners on policy learn from: which completions, what they count, where a run ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from rollout_core.base.errors import Fatal
from rollout_core.config.base import DatasetSource, Settings
from rollout_core.config.rewards import RewardSpec


class ImportanceCorrection(Settings):
    """Truncated importance sampling for the difference between the distribution that drew the tokens (the engine's, or
    that of earlier weights) and the trainer's."""

    identity_without_default = frozenset({"floor"})

    level: Literal["token", "sequence"] = "token"
    """Whose probability ratio weighs a token: its own, or that of its whole completion."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Ratios above the cap are lowered to it and those below the floor raised to it, or their tokens left out."""
    cap: float = Field(default=2.0, ge=1)
    """Upper bound of the ratio."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Lower bound of the ratio."""


class OverlongPenalty(Settings):
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13): a reward falls with each token of the last
    ``cache`` ones before the limit, and by ``penalty`` in all."""

    cache: int = Field(ge=1)
    """Tokens before the limit in which the penalty grows from 0."""
    max_length: int | None = Field(default=None, ge=1)
    """The limit, in tokens that the policy wrote; default: sampling.max_tokens."""
    penalty: float = Field(default=1.0, gt=0)
    """Taken off the reward at the limit and beyond."""


class DynamicSampling(Settings):
    """Groups in which all rewards are alike teach nothing; others are drawn in their place (DAPO, arXiv:2503.14476,
    eq. 11), in further rounds of generation that are stages of their own."""

    max_rounds: int = Field(default=10, ge=1)
    """Rounds of generation in an iteration, the first included. An iteration has so many times
    ``prompts_per_iteration`` places in the order of prompts, and takes as many as it needs."""
    min_spread: float = Field(default=0.0, ge=0)
    """Groups count whose largest reward is above the smallest by more than this."""
    when_short: Literal["stop", "fewer"] = "stop"
    """Where max_rounds are not enough, the run ends, or learns from fewer groups. Without any it ends."""


class RewardHackingGuard(Settings):
    """Ends a run whose training reward rises while another falls: the policy has found what the training reward pays
    for, not what it stands for (over-optimization, arXiv:2210.10760).

    Every model that draws an iteration's completions also completes ``prompts``, greedily. Against the evaluation with
    the best of these rewards so far, an evaluation counts where the training reward is higher and this one lower by
    more than ``max_fall``.
    """

    prompts: DatasetSource
    """Held-out prompts."""
    reward: RewardSpec | None = None
    """What held-out completions are worth; default: what those of training are."""
    every: int = Field(default=1, ge=1)
    """Iterations from one evaluation to the next."""
    max_fall: float = Field(default=0.0, ge=0)
    """Fall of the held-out reward that is no sign of hacking."""
    evaluations: int = Field(default=3, ge=1)
    """The run ends where so many in a row count."""


class StopGuards(Settings):
    """Bounds of what a policy may come to. They are looked at before each update, on the completions that it would
    learn from; where one is passed the run ends, and says what it saw. A run that finds an update cached looks at what
    that one learned from."""

    max_kl: float | None = Field(default=None, gt=0)
    """Mean KL to the starting policy, nats per completion; with GRPO it needs a ``kl_coef``."""
    max_mean_length: float | None = Field(default=None, gt=0)
    """Mean length of completions, tokens."""
    reward_hacking: RewardHackingGuard | None = None
    """Held-out prompts that a rising training reward is held against."""

    def passed(self, figures: Mapping[str, float]) -> str | None:
        """Which bound an update's ``figures`` are past, in words, with what may be done about it."""
        bounds = {
            "max_kl": (self.max_kl, "objective/kl", "nats per completion to the starting policy"),
            "max_mean_length": (self.max_mean_length, "completions/mean_length", "tokens per completion"),
        }
        for name, (bound, figure, unit) in bounds.items():
            if bound is not None and figures.get(figure, 0.0) > bound:
                return (
                    f"guards.{name}: {figures[figure]:.4g} {unit}, above the bound of {bound:g}. Lower optimizer.lr, "
                    "hold the policy closer to its start, or look at what the reward pays for"
                )
        return None

    def check_done(self, figures: Mapping[str, float], label: str) -> None:
        """Raises Fatal where an update that was done before, perhaps without these bounds, is past one of them."""
        passed = self.passed(figures)
        if passed is not None:
            raise Fatal(f"{passed}. {label} was trained earlier, without this bound; checkpoints before it stay")


class Replay(Settings):
    """Learn from completions of earlier iterations again (prioritised experience replay, arXiv:1511.05952).

    Of an iteration's prompts so many come from a buffer instead of the engine, with all their completions: those whose
    rewards differ most are drawn most often. Importance weights (``correction``) make up for older weights having drawn
    them.
    """

    groups: int = Field(ge=1)
    """Prompts of an iteration that are replayed, once the buffer has so many."""
    capacity: int = Field(default=1024, ge=1)
    """Prompts that are kept, the newest."""
    max_age: int | None = Field(default=None, ge=1)
    """Iterations after which they are dropped."""
    priority_exponent: float = Field(default=0.6, ge=0)
    """Chances are priorities to this power, alpha in the paper; 0: all alike. The priority of a prompt is the mean
    distance of its rewards from their mean."""
    weight_exponent: float = Field(default=0.4, ge=0, le=1)
    """How far weights take back that some are drawn more often, beta in the paper, which raises it to 1 in the end."""

    @model_validator(mode="after")
    def _room_for_what_is_drawn(self) -> Replay:
        if self.capacity < self.groups:
            raise ValueError(f"capacity is {self.capacity}, fewer than the {self.groups} groups that are drawn from it")
        return self


class PartialRollouts(Settings):
    """Long completions are cut at the end of an iteration and go on in the next, drawn by its weights: no iteration
    waits for its longest completion (Kimi k1.5, arXiv:2501.12599, section 2.6.2; APRIL, arXiv:2509.18521).

    Groups are learned from once all their completions have ended. Importance weights (``correction``) make up for
    earlier weights having drawn the first parts.
    """

    max_tokens_per_iteration: int = Field(ge=1)
    """Tokens of a completion that an iteration draws, of which ``sampling.max_tokens`` is a multiple: that bounds how
    many iterations a completion takes."""
