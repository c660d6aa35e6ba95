"""What the ranks of an update are told: ids, settings and places in one JSON file, secrets in the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter

from rollout_core.base.ids import ContentId

UpdateName = Literal["sft", "rm", "preference", "ppo", "grpo"]
"""``preference`` is DPO, IPO or KTO, as its settings say."""

STORAGE_OPTIONS = "ROLLOUT_RANK_STORAGE_OPTIONS"
"""Environment variable: options of the object store, as JSON; they may hold secrets."""
RENDEZVOUS = "ROLLOUT_RANK_RENDEZVOUS"
"""Environment variable: where ranks of one machine meet; default: MASTER_ADDR and MASTER_PORT."""
LAUNCHER = "ROLLOUT_RANK_LAUNCHER"
"""Environment variable: process id of the launcher, without which there is no reason to live."""


class Job(BaseModel):
    """One update, for `rollout_core.launch.rank`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    update: UpdateName
    inputs: dict[str, Any]
    """Arguments of the update by name, as `encode_inputs` gives them."""
    storage: str
    """URL of the object store; its options are in the environment."""
    cache: Path
    key: ContentId
    run_id: str
    seed: int
    run_name: str
    start_from: ContentId | None
    tracking: Path | None
    series: ContentId | None
    base_model: ContentId | None
    num_threads: int | None
    """CPU threads of each rank."""
    nproc: int
    result: Path
    """Where the first rank writes the outcome."""


def update_function(name: UpdateName) -> Callable[..., Any]:
    """The update of that name."""
    from rollout_core.algorithms import dataset_updates, on_policy_updates

    return getattr(on_policy_updates if name in ("ppo", "grpo") else dataset_updates, f"{name}_update")


def encode_inputs(name: UpdateName, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an update as JSON values: of settings only what the update itself declares."""
    hints = get_type_hints(update_function(name))
    return {key: TypeAdapter(hints[key]).dump_python(value, mode="json") for key, value in inputs.items()}


def decode_inputs(name: UpdateName, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `encode_inputs`."""
    hints = get_type_hints(update_function(name))
    return {key: TypeAdapter(hints[key]).validate_python(value) for key, value in inputs.items()}


def encode_report(name: UpdateName, report: Any) -> Any:
    """What an update says of its rows before it trains, as JSON values."""
    return _report(name).dump_python(report, mode="json")


def decode_report(name: UpdateName, document: Any) -> Any:
    """Inverse of `encode_report`."""
    return _report(name).validate_python(document)


def encode_outcome(name: UpdateName, outcome: Any) -> bytes:
    """What an update returned, as JSON."""
    return _outcome(name).dump_json(outcome)


def decode_outcome(name: UpdateName, data: bytes) -> Any:
    """Inverse of `encode_outcome`."""
    return _outcome(name).validate_json(data)


def _outcome(name: UpdateName) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(update_function(name))["return"])


def _report(name: UpdateName) -> TypeAdapter[Any]:
    """The type of report that an update from a data set returns beside its checkpoint."""
    return TypeAdapter(get_args(get_type_hints(update_function(name))["return"])[1])
