"""Plans of runs on preference data: rows, tokenizer, model and reference held against each other before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from rollout_core.plan import Plan
from rollout_core.preferences import parse_judged, parse_pairs


def plan_pairs(
    config: TrainRMConfig | TrainDPOConfig | TrainIPOConfig, base: Path, connections: Connections | None = None
) -> dict[str, Any]:
    """Check a run on pairs: a reward model, DPO or IPO. Raises ConfigError naming all that is wrong."""
    from rollout_core.algorithms.preference_data import tokenize_pairs

    need_prompts = not isinstance(config, TrainRMConfig)
    max_seq_len = config.algorithm.packing.max_seq_len

    def tokenize(tokenizer: Any, rows: Any) -> Any:
        return tokenize_pairs(tokenizer, rows, max_seq_len=max_seq_len, need_prompts=need_prompts)

    return _plan(Plan(base, connections), config, parse_pairs, tokenize)


def plan_kto(config: TrainKTOConfig, base: Path, connections: Connections | None = None) -> dict[str, Any]:
    """Check a KTO run. Raises ConfigError naming all that is wrong."""
    from rollout_core.algorithms.preference_data import tokenize_judged

    max_seq_len = config.algorithm.packing.max_seq_len

    def tokenize(tokenizer: Any, rows: Any) -> Any:
        return tokenize_judged(tokenizer, rows, max_seq_len=max_seq_len)

    return _plan(Plan(base, connections), config, parse_judged, tokenize)


def _plan(
    plan: Plan, config: PreferenceConfig, parse: Callable[[bytes, str], Any], tokenize: Callable[[Any, Any], Any]
) -> dict[str, Any]:
    settings = config.algorithm
    plan.places()
    plan.resume(config.run, settings.kind)
    plan.model("algorithm.base_model", settings.base_model)
    plan.sequence_length("algorithm", settings.packing)
    _reference(plan, settings)
    rows = plan.rows("algorithm.dataset.path", settings.dataset, parse)
    if rows is not None and plan.tokenizer is not None:
        tokenized = plan.check("algorithm.dataset.path", lambda: tokenize(plan.tokenizer, rows))
        if tokenized is not None:
            report = tokenized[1]
            named = {name.removeprefix("num_"): value for name, value in vars(report).items() if value is not None}
            plan.facts |= {name.replace("_", " "): value for name, value in named.items()}
    if settings.evaluation is not None:
        held_out = plan.rows("algorithm.evaluation.dataset.path", settings.evaluation.dataset, parse)
        if held_out is not None and plan.tokenizer is not None:
            plan.check("algorithm.evaluation.dataset.path", lambda: tokenize(plan.tokenizer, held_out))
            plan.facts["held-out rows"] = len(held_out)
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
