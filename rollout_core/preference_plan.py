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
from rollout_core.connections import Connections
from rollout_core.models import check_reference, describe
from rollout_core.plan import DATA_REPORT, Plan, TrainingRows
from rollout_core.preferences import JudgedRow, PairRow
from rollout_core.resources import row_tokens

if TYPE_CHECKING:  # imports torch, which --help need not wait for
    from rollout_core.algorithms.data_report import DataReport


def plan_pairs(
    config: TrainRMConfig | TrainDPOConfig | TrainIPOConfig, base: Path, connections: Connections | None = None
) -> dict[str, Any]:
    """Check a run on pairs: a reward model, DPO or IPO. Raises ConfigError naming all that is wrong."""
    rows = pair_rows(config.algorithm, need_prompts=not isinstance(config, TrainRMConfig))
    return _plan(Plan(base, connections), config, rows)


def plan_kto(config: TrainKTOConfig, base: Path, connections: Connections | None = None) -> dict[str, Any]:
    """Check a KTO run. Raises ConfigError naming all that is wrong."""
    from rollout_core.algorithms.preference_data import PreferenceReport, each_judged
    from rollout_core.algorithms.training_data import judged_options

    rows = TrainingRows("judged", JudgedRow, each_judged, PreferenceReport, judged_options(config.algorithm))
    return _plan(Plan(base, connections), config, rows)


def pair_rows(settings: PreferenceSettings, *, need_prompts: bool) -> TrainingRows:
    """How a learner takes pairs in."""
    from rollout_core.algorithms.preference_data import PreferenceReport, each_pair
    from rollout_core.algorithms.training_data import pair_options

    options = pair_options(settings, need_prompts=need_prompts)
    return TrainingRows("pairs", PairRow, each_pair, PreferenceReport, options)


def plan_preferences(
    plan: Plan, what: str, kind: str, settings: PreferenceSettings, rows: TrainingRows
) -> DataReport | None:
    """Check the settings and rows of one learner, under the key ``what``; the plan knows the model already."""
    plan.sequence_length(what, settings.packing)
    plan.learner(what, settings)
    report = plan.training_rows(f"{what}.dataset", settings.dataset, rows)
    plan.held_out_rows(f"{what}.evaluation.dataset", settings.evaluation, rows)
    sequences = 1 if kind == "kto" else 2
    tokens = row_tokens(report, settings.packing.max_seq_len)
    plan.resources(what, kind, settings, tokens, rows=sequences)
    return report


def _plan(plan: Plan, config: PreferenceConfig, rows: TrainingRows) -> dict[str, Any]:
    settings = config.algorithm
    plan.places()
    plan.resume(config.run, settings.kind)
    plan.model("algorithm.base_model", settings.base_model, may_be_reward_model=settings.kind == "rm")
    _reference(plan, settings)
    report = plan_preferences(plan, "algorithm", settings.kind, settings, rows)
    if report is not None:
        plan.facts |= {"rows": report.num_rows, "examples": report.num_examples, DATA_REPORT: report.figures()}
    return plan.done()


def _reference(plan: Plan, settings: PreferenceSettings) -> None:
    """The reference is there, of the model's architecture, and reads the same token ids."""
    if not isinstance(settings, DPOAlgorithm | IPOAlgorithm | KTOAlgorithm) or settings.reference is None:
        return
    source, own = settings.reference, settings.base_model

    def look() -> None:
        with describe(own, plan.base, plan.objects) as model, describe(source, plan.base, plan.objects) as reference:
            check_reference(model.folder, reference.folder)

    plan.check("algorithm.reference", look)
