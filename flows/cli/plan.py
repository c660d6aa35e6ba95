"""`rollout plan`: what a run would do, which of it is cached, and what the rest takes, without doing anything."""

from __future__ import annotations

import json
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from flows.cli.common import (
    AsJson,
    ConfigPath,
    Debug,
    Overrides,
    PluginPaths,
    one_line_errors,
    parse_overrides,
    plugins_at,
    print_facts,
)
from flows.cli.results import duration, print_table
from flows.cli.starting import load_run
from rollout_core.base.errors import ConfigError
from rollout_core.config import CONFIG_KINDS, apply_overrides
from rollout_core.config.base import read_toml
from rollout_core.config.cloud import take_cloud
from rollout_core.config.kinds import kind_of
from rollout_core.plans.lock import PlanLock, differences, read_lock
from tasks.runtime.prefect_server import storage_and_database

if TYPE_CHECKING:
    from tasks.runtime.planning import RunPlan, StagePlan

_MOST_KEYS = 4
_STATES = {"cached": "cached", "continued": "resumes", "computed": "to compute", "checked": "checked"}
_STATES_IN_JSON = {"cached": "cached", "continued": "goes on", "computed": "to compute", "checked": "looked at"}
"""Keys that programs read, which stay as they were."""
"""By the state of a call in a dry run, the column of the table."""


def plan(
    config: ConfigPath,
    kind: Annotated[
        str | None, typer.Option("--kind", help="Kind of the run, such as train-sft, where the file fits several.")
    ] = None,
    set_: Overrides = None,
    plugin: PluginPaths = None,
    lock: Annotated[
        Path | None, typer.Option("--lock", help="Write the plan to a file that runs can be held to, with its id.")
    ] = None,
    locked: Annotated[
        Path | None, typer.Option("--locked", help="Refuse what differs from the plan in this file of --lock.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Print what a run would do: its checks, its stages and which are cached, time, memory, disk and cost.

    It makes the checks that the run makes at its beginning, then walks through the run's own code with every stage
    looked up instead of computed. Nothing is changed. Times are those of earlier runs. With ``--lock`` it also writes
    what the run would compute with, inputs by their content, to a file; with ``--locked`` it compares with such a file.
    """
    with one_line_errors(debug), plugins_at(plugin):
        overrides = parse_overrides(set_)
        if kind is None:
            kind = kind_of(apply_overrides(take_cloud(read_toml(config), str(config)), overrides), str(config))
        if kind not in CONFIG_KINDS:
            raise ConfigError(f"--kind {kind}: expected one of {', '.join(CONFIG_KINDS)}")
        parsed = load_run(config, CONFIG_KINDS[kind], overrides, is_held=False)
        if locked is None and lock is None and parsed.run.locked is not None:
            locked = Path(parsed.run.locked)
        with storage_and_database():
            from tasks.runtime.planning import lock_plan, plan_run

            found = plan_run(kind, parsed)
            made = None if lock is None and locked is None else lock_plan(kind, parsed)
        if locked is not None and made is not None:
            _compare(made, locked)
        if lock is not None and made is not None:
            made.write(lock)
        if as_json:
            typer.echo(
                json.dumps(_document(found) | ({} if made is None else {"plan": made.id}), indent=2, default=str)
            )
        else:
            _print(found)
            if made is not None:
                typer.echo(f"plan id:     {made.id}")


def _compare(made: PlanLock, locked: Path) -> None:
    planned = read_lock(locked)
    if lines := differences(planned, made):
        lines = [f"{locked}: {line}" for line in lines]
        raise ConfigError("\n".join(lines), lines)


def _print(found: RunPlan) -> None:
    print_facts("plan", {"kind": found.kind, **found.facts})
    shown = [state for state in _STATES if any(state in stage.counts for stage in found.stages)]
    table = Table(box=None, pad_edge=False)
    for column in ("stage", *(_STATES[state] for state in shown), "seconds each", "seconds"):
        table.add_column(column, justify="left" if column == "stage" else "right", no_wrap=True)
    for stage in found.stages:
        counts = (str(stage.counts.get(state, "")) for state in shown)
        table.add_row(stage.stage, *counts, *_times(stage))
    typer.echo("stages:")
    print_table(table)
    for name, value in _estimates(found).items():
        typer.echo(f"{name + ':':12} {value}")
    for remark in found.remarks:
        typer.echo(f"{'not known:':12} {remark}")


def _times(stage: StagePlan) -> tuple[str, str]:
    if not stage.num_to_compute:
        return "", ""
    if stage.time is None:
        return "?", "?"
    return f"{stage.time.seconds:.1f}", f"{stage.num_to_compute * stage.time.seconds:.1f}"


def _estimates(found: RunPlan) -> dict[str, str]:
    totals, untimed = found.totals, found.untimed
    to_compute = totals["computed"] + totals["continued"]
    lines = {
        "calls": ", ".join(f"{totals[state]} {name}" for state, name in _STATES.items() if totals[state]),
    }
    resuming = [call for call in found.calls if call.step is not None]
    if resuming:
        lines["resumes"] = "; ".join(
            f"{call.stage} {call.label}".rstrip() + f" at step {call.step}" for call in resuming
        )
    if found.is_open:
        lines["time"] = "not known: later stages are not known yet"
    elif not to_compute:
        lines["time"] = "nothing to compute"
    elif len(untimed) == len([stage for stage in found.stages if stage.num_to_compute]):
        lines["time"] = "not known: no earlier run of this name, or of this model, computed these stages"
    else:
        without = f" without {', '.join(untimed)}, which no earlier run computed" if untimed else ""
        lines["time"] = f"about {duration(found.seconds)}{without} (estimate, by {_sources(found)})"
    if found.price is None:
        lines["cost"] = "not known: set per_hour or per_gpu_hour in the table [cost]"
    elif found.seconds:
        lines["cost"] = f"about {found.price:.4f} {found.currency} for that time"
    return lines


def _sources(found: RunPlan) -> str:
    """The runs that times were taken from, and where their configurations differ."""
    runs = {stage.time.run.id: stage.time for stage in found.stages if stage.time is not None}
    texts = []
    for time in runs.values():
        keys = ", ".join(time.differing[:_MOST_KEYS]) + (
            f" and {len(time.differing) - _MOST_KEYS} more keys" if len(time.differing) > _MOST_KEYS else ""
        )
        differs = f", which differed in {keys}" if keys else ""
        texts.append(f"run {time.short_id} {time.run.name} of {time.run.began.astimezone(UTC):%m-%d %H:%M}{differs}")
    return "; ".join(texts)


def _document(found: RunPlan) -> dict[str, Any]:
    totals = found.totals
    return {
        "kind": found.kind,
        "facts": dict(found.facts),
        "calls": [
            {
                "stage": call.stage,
                "label": call.label,
                "state": _STATES_IN_JSON[call.state],
                "goes_on_at_step": call.step,
            }
            for call in found.calls
        ],
        "counts": {name: totals[state] for state, name in _STATES_IN_JSON.items()},
        "stages": [
            {
                "stage": stage.stage,
                **{_STATES_IN_JSON[state]: count for state, count in stage.counts.items()},
                "seconds_each": None if stage.time is None else stage.time.seconds,
                "by_run": None if stage.time is None else stage.time.run.id,
                "configuration_differs_in": None if stage.time is None else stage.time.differing,
            }
            for stage in found.stages
        ],
        "seconds": found.seconds,
        "stages_without_a_time": found.untimed,
        "price": found.price,
        "currency": found.currency,
        "not_known": list(found.remarks),
        "stages_follow": found.is_open,
    }
