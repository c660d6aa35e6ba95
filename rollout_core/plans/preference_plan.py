"""Plans of runs on preference data: rows, tokenizer, model and reference held against each other before any work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_core.config import (
    DPOAlgorithm,
    IPOAlgorithm,
    KTOAlgorithm,
    PreferenceConfig,
    PreferenceSettings,
    TrainDPOConfig,
    TrainIPOConfig,
    TrainKTOConfig,
    TrainRMConfig,
)
from rollout_core.models.facts import check_reference
from rollout_core.models.locating import describe
from rollout_core.plans.learner_plan import DATA_REPORT, LearnerPlan
from rollout_core.plans.resources import row_tokens
from rollout_core.store.connections import Connections

if TYPE_CHECKING:  # imports torch, which --help need not wait for
    from rollout_core.data.data_report import DataReport
    from rollout_core.data.training_data import RowForm


def plan_pairs(
    config: TrainRMConfig | TrainDPOConfig | TrainIPOConfig,
    base: Path,
    connections: Connections | None = None,
    *,
    keep: bool = False,
) -> dict[str, Any]:
    """Check a run on pairs: a reward model, DPO or IPO; ``keep`` what was tokenised. Raises ConfigError naming all that
    is wrong."""
    from rollout_core.data.training_data import pair_form

    rows = pair_form(config.algorithm, need_prompts=not isinstance(config, TrainRMConfig))
    return _plan(LearnerPlan(base, connections, keeps_tokens=keep), config, rows)


def plan_kto(
    config: TrainKTOConfig, base: Path, connections: Connections | None = None, *, keep: bool = False
) -> dict[str, Any]:
    """Check a KTO run; ``keep`` what was tokenised. Raises ConfigError naming all that is wrong."""
    from rollout_core.data.training_data import unpaired_form

    return _plan(LearnerPlan(base, connections, keeps_tokens=keep), config, unpaired_form(config.algorithm))


def plan_preferences(
    plan: LearnerPlan, what: str, kind: str, settings: PreferenceSettings, rows: RowForm[Any, Any]
) -> DataReport | None:
    """Check the settings and rows of one learner, under the key ``what``; the plan knows the model already."""
    plan.sequence_length(what, settings.sequence)
    plan.learner(what, settings)
    report = plan.training_rows(f"{what}.dataset", settings.dataset, rows)
    plan.held_out_rows(f"{what}.evaluation.dataset", settings.evaluation, rows)
    sequences = 1 if kind == "kto" else 2
    tokens = row_tokens(report, settings.sequence.max_length)
    plan.resources(what, kind, settings, tokens, rows=sequences)
    return report


def _plan(plan: LearnerPlan, config: PreferenceConfig, rows: RowForm[Any, Any]) -> dict[str, Any]:
    settings = config.algorithm
    plan.places()
    plan.resume(config.run, settings.kind)
    plan.model("algorithm.base_model", settings.base_model, may_be_reward_model=settings.kind == "rm")
    _reference(plan, settings)
    report = plan_preferences(plan, "algorithm", settings.kind, settings, rows)
    if report is not None:
        plan.facts |= {"rows": report.num_rows, "examples": report.num_examples, DATA_REPORT: report.figures()}
    return plan.done()


def _reference(plan: LearnerPlan, settings: PreferenceSettings) -> None:
    """The reference is there, of the model's architecture, and reads the same token ids."""
    if not isinstance(settings, DPOAlgorithm | IPOAlgorithm | KTOAlgorithm) or settings.reference is None:
        return
    source, own = settings.reference, settings.base_model

    def look() -> None:
        with describe(own, plan.base, plan.objects) as model, describe(source, plan.base, plan.objects) as reference:
            check_reference(model.folder, reference.folder)

    plan.check("algorithm.reference", look)
