"""Settings of the learners from preference data: reward model, DPO, IPO and KTO."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollout_core.config.datasets import DatasetSource
from rollout_core.config.learning import BudgetConfig, HeldOutRows, LearnerSettings, SequenceConfig


class PreferenceSettings(LearnerSettings):
    """What learners from preference data share. ``minibatch_size`` counts pairs, or labelled answers.

    Steps of 8 are TRL's default, too; DPO's paper (arXiv:2305.18290, appendix B) has steps of 64 pairs.
    """

    identity_without_default = frozenset({"evaluation"})

    dataset: DatasetSource
    sequence: SequenceConfig = SequenceConfig()
    budget: BudgetConfig = BudgetConfig()
    evaluation: HeldOutRows | None = None


class RewardModelSettings(PreferenceSettings):
    """A reward model from pairs (Bradley-Terry; arXiv:2203.02155, eq. 1)."""

    dataset: DatasetSource
    """Rows ``{prompt, chosen, rejected}``, or whole sequences ``{chosen, rejected}``; optional ``margin``."""
    head: Literal["bradley_terry", "pairwise_logistic"] = "bradley_terry"
    """Two names of one loss, -log sigmoid(r_chosen - r_rejected); rows' margins count with bradley_terry only."""
    center_coef: float = Field(default=0.0, ge=0)
    """Weight of (r_chosen + r_rejected)^2 in the loss, which keeps rewards around 0 (arXiv:2312.09244)."""


class _ReferencedSettings(PreferenceSettings):
    beta: float = Field(default=0.1, gt=0)
    """How closely the policy keeps to the reference: larger is closer."""


class DPOSettings(_ReferencedSettings):
    """Direct preference optimization (arXiv:2305.18290)."""

    kind: Literal["dpo"] = "dpo"
    dataset: DatasetSource
    """Rows ``{prompt, chosen, rejected}``."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs whose preference is taken to be flipped."""


class IPOSettings(_ReferencedSettings):
    """Identity preference optimization (arXiv:2310.12036); ``beta`` is the paper's tau."""

    kind: Literal["ipo"] = "ipo"
    dataset: DatasetSource
    """Rows ``{prompt, chosen, rejected}``."""


class KTOSettings(_ReferencedSettings):
    """Kahneman-Tversky optimization (arXiv:2402.01306)."""

    kind: Literal["kto"] = "kto"
    dataset: DatasetSource
    """Rows ``{prompt, completion, label}``; label true = desirable."""
    desirable_weight: float = Field(default=1.0, gt=0)
    undesirable_weight: float = Field(default=1.0, gt=0)
    """With the desirable one it should make up for unequal counts: weight times count in a ratio of 1:1 to 4:3."""
