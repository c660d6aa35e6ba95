"""`rollout nightly`: the nightly run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.cli.common import (
    ConfigPath,
    Debug,
    DryRun,
    Locked,
    Overrides,
    PluginPaths,
    Processes,
    held_to,
    one_line_errors,
    parse_overrides,
    plugins_at,
    print_plan,
)
from flows.cli.starting import load_run, look_ahead, run_flow
from rollout_core.config import NightlyConfig, apply_overrides, as_given, parse_config
from tasks.runtime.prefect_server import connections


def nightly(
    config: ConfigPath,
    nproc: Processes = None,
    dry_run: DryRun = False,
    set_: Overrides = None,
    plugin: PluginPaths = None,
    locked: Locked = None,
    debug: Debug = False,
) -> None:
    """Fine-tune, PPO, evaluate, promote, report."""
    with one_line_errors(debug), plugins_at(plugin):
        if dry_run:
            look_ahead()
        parsed = load_run(config, NightlyConfig, parse_overrides(set_) | held_to(locked, dry_run=dry_run))
        if nproc is not None:
            learners = [name for name in ("sft", "rm", "dpo", "ppo", "grpo") if getattr(parsed, name) is not None]
            several = {f"{name}.parallel.nproc": nproc for name in learners}
            # The file is read once: it may have been edited since.
            changed = apply_overrides(as_given(parsed), several)
            parsed = parse_config(changed, NightlyConfig, name="--nproc")
        from rollout_core.plans.learner_plan import plan_nightly  # while another process imports torch for a dry run

        facts = plan_nightly(parsed, Path.cwd(), connections(), keep=not dry_run)
        if dry_run:
            print_plan(facts)
            return
        _print_nightly(run_flow("flows.nightly:nightly", debug, parsed))


def _print_nightly(result: Mapping[str, Any]) -> None:
    table = Table(title="Stages", box=None, pad_edge=False)
    for column in ("stage", "label", "state", "seconds", "in", "out"):
        table.add_column(column, justify="right" if column == "seconds" else "left", no_wrap=column != "label")
    for row in result["stages"]:
        cells = (row["stage"], row["label"], row["state"], f"{row['seconds']:.2f}", _ids(row["in"]), _ids(row["out"]))
        table.add_row(*cells, style=None if row["state"] == "completed" else "dim")
    console = Console(width=max(Console().width, 110))
    console.print(table)
    counts = Counter(row["state"] for row in result["stages"])
    console.print(f"stages: {', '.join(f'{count} {state}' for state, count in counts.most_common())}")
    for moment, value in result["held_out"].items():
        console.print(f"held-out reward {moment}: {value:.3f}")
    console.print(f"model {result['model']}: {'promoted' if result['promoted'] else 'not promoted'}")
    console.print(f"report: {Path(result['report']) / 'index.html'}", soft_wrap=True)


def _ids(text: str) -> str:
    """Content ids short enough for a line: eight digits each, three at most."""
    ids = text.split()
    return " ".join(content_id[:8] for content_id in ids[:3]) + (f" +{len(ids) - 3}" if len(ids) > 3 else "")
