"""`rollout runs`, `show`, `compare`, `samples` and `tail`: what runs did and what came of them, from their records."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.common import EXIT_FAILED, Debug, one_line_errors
from flows.cli.completion import recorded_runs
from flows.cli.storage import StoragePath

if TYPE_CHECKING:
    from rich.table import Table

    from rollout_core.objects import ObjectStore
    from rollout_core.runs.browsing import SampleView
    from rollout_core.runs.records import RunDetail, RunHead, RunRecords
    from rollout_core.runs.samples import HeldOut

AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="First digits of its id, at least 4; its name, for the last such; or latest.",
        autocompletion=recorded_runs,
    ),
]
POLL_SECONDS = 2.0
_BLOCKS = " ▁▂▃▄▅▆▇█"
_WIDTH = 40
_LONGEST_NAME = 48
_FIGURES_WIDTH = 28
_SAMPLES = 20


def runs(
    flow: Annotated[
        str | None, typer.Option("--flow", help="Only of this flow, such as nightly or train-grpo.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Only those whose name contains this.")] = None,
    state: Annotated[
        str | None, typer.Option("--state", help="Only running, completed, failed, stopped or lost ones.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most this many, the newest first.")] = 20,
    storage: StoragePath = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Print runs, the newest first: state, held-out reward, promotion, time and cost."""
    with one_line_errors(debug):
        from rich.table import Table

        from rollout_core.base.errors import ConfigError
        from rollout_core.runs.records import SHOWN_STATES, RunRecords, runs_under_way, shown_state
        from tasks.runtime.prefect_server import object_store

        if state is not None and state not in SHOWN_STATES:
            raise ConfigError(f"--state {state}: expected one of {', '.join(SHOWN_STATES)}")
        with object_store(storage) as objects:
            alive = runs_under_way(objects)

            def wanted(head: RunHead) -> bool:
                return (
                    (flow is None or head.flow == flow)
                    and (name is None or name in head.name)
                    and (state is None or shown_state(head, alive) == state)
                )

            records = RunRecords(objects)
            found = records.heads(wanted, limit=limit)
        if as_json:
            rows = [{**head.model_dump(mode="json"), "state": shown_state(head, alive)} for head in found]
            typer.echo(json.dumps(rows, indent=2))
            return
        if not found:
            typer.echo("no run is recorded here yet" if flow is name is state is None else "no run is like that")
            return
        table = Table(box=None, pad_edge=False)
        rows = [_cells(records.short(head.id), head, shown_state(head, alive)) for head in found]
        names = (
            "run",
            "began (UTC)",
            "name",
            "flow",
            "state",
            "at work",
            "held-out reward",
            "promoted",
            "time",
            "cost",
        )
        # What no run has needs no room; of the rest only names may be cut.
        shown = [place for place, name in enumerate(names) if any(row[place] for row in rows)]
        for place in shown:
            width = None if names[place] in ("name", "flow") else max(len(row[place]) for row in rows)
            justify = "right" if names[place] in ("time", "cost") else "left"
            table.add_column(names[place], justify=justify, no_wrap=True, min_width=width)
        for row in rows:
            _add_row(table, [row[place] for place in shown])
        print_table(table)


def _cells(short: str, head: RunHead, state: str) -> tuple[str, ...]:
    from rollout_core.runs.records import shown_seconds, state_in_words, work_in_words

    promoted = "" if head.promoted is None else "yes" if head.promoted else "no"
    cost = f"{head.price:.2f} {head.currency}" if head.currency else ""
    return (
        short,
        f"{head.began.astimezone(UTC):%m-%d %H:%M}",
        head.name,
        head.flow,
        state_in_words(head, state),
        work_in_words(head, state),
        _rewards(head),
        promoted,
        duration(shown_seconds(head, state)),
        cost,
    )


def _rewards(head: RunHead) -> str:
    rewards, gain = [moment.reward for moment in head.held_out], head.gain
    if gain is None:
        return "".join(f"{reward:.3f}" for reward in rewards)
    return f"{rewards[0]:.3f} to {rewards[-1]:.3f} ({gain:+.3f})"


def duration(seconds: float) -> str:
    """Of a run, for a table."""
    return str(timedelta(seconds=round(seconds)))


def show(run: RunName = "latest", storage: StoragePath = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Print one run: what came of it, its curves, its stages."""
    with one_line_errors(debug):
        from rollout_core.runs.figures import curves_of
        from rollout_core.runs.records import RunRecords, runs_under_way, shown_state
        from tasks.runtime.prefect_server import object_store

        with object_store(storage) as objects:
            records = RunRecords(objects)
            head, detail = records.detail(records.find(run))
            state = shown_state(head, runs_under_way(objects))
            curves = curves_of(objects, head, detail)
        if as_json:
            shown = {name: {"x": curve.x, "y": curve.y} for name, curve in curves.items()}
            document = {
                **head.model_dump(mode="json"),
                "state": state,
                **detail.model_dump(mode="json"),
                "curves": shown,
            }
            typer.echo(_as_json(document))
            return
        for name, value in _facts(head, detail, state).items():
            typer.echo(f"{name + ':':22} {visible(value)}")
        print_curves({curve.name: [curve.y] for curve in curves.values()})
        print_table(_stages(detail))


def _facts(head: RunHead, detail: RunDetail, state: str) -> dict[str, str]:
    from rollout_core.runs.records import next_step, shown_seconds, state_in_words, work_in_words

    cost = f"{head.computed_seconds:.1f} s computed" + (f", {head.price:.4f} {head.currency}" if head.currency else "")
    return {
        "run": f"{head.name} ({head.id})",
        "flow": f"{head.flow}, called {head.flow_run_name}" + (f", try {head.tries}" if head.tries > 1 else ""),
        "state": state_in_words(head, state) + (f": {head.error}" if head.error else ""),
        **({"next": todo} if (todo := next_step(head, state)) else {}),
        **({"at work": work} if (work := work_in_words(head, state)) else {}),
        "began": f"{head.began.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC, took {duration(shown_seconds(head, state))}",
        **{name: value for name in ("model", "algorithm", "data") if (value := getattr(head, name))},
        **{f"held out {moment.name}": f"{moment.reward:.4f}" for moment in head.held_out},
        **({} if head.promoted is None else {"promoted": f"{'yes' if head.promoted else 'no'}: {head.reason}"}),
        **detail.facts,
        "stages": ", ".join(f"{count} {kind}" for kind, count in head.counts.items()) or "none yet",
        "cost": cost,
    }


def _stages(detail: RunDetail) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("stage", "label", "state", "seconds"):
        table.add_column(column, justify="right" if column == "seconds" else "left", no_wrap=column != "label")
    for call in detail.calls:
        style = {"Completed": None, "Cached": "dim", "Checked": "dim"}.get(call.state, "red")
        _add_row(table, (call.stage, call.label, call.state.lower(), f"{call.seconds:.2f}"), style)
    return table


def print_curves(curves: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """A line for each curve: name, course, first and last value. Several of a name have a common scale."""
    names = {name: visible(name) for name in curves}
    column = min(max(map(len, names.values()), default=0), _LONGEST_NAME)
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    width = max(_WIDTH, room - column - _FIGURES_WIDTH)
    for name, series in curves.items():
        lines = sparklines(series, width)
        for place, (line, values) in enumerate(zip(lines, series, strict=True)):
            shown = names[name][:column] if place == 0 else ""
            typer.echo(
                f"{shown:{column}} {line:{min(width, max(map(len, lines)))}} {values[0]:.4g} to {values[-1]:.4g}"
            )


def sparklines(series: Sequence[Sequence[float]], width: int = _WIDTH) -> list[str]:
    """Curves in one line of text each, on a common scale: means of as many equal parts as there is room for."""
    means = [_means([value for value in values if math.isfinite(value)], width) for values in series]
    every = [value for values in means for value in values]
    low, high = min(every, default=0.0), max(every, default=0.0)
    if math.isclose(low, high, rel_tol=1e-9):  # means of equal values differ in last bits
        return [_BLOCKS[4] * len(values) for values in means]
    # Halves, whose difference no two floats can overflow.
    scale = high / 2 - low / 2
    return ["".join(_BLOCKS[1 + round((value / 2 - low / 2) / scale * 7)] for value in values) for values in means]


def _means(values: Sequence[float], width: int) -> list[float]:
    parts = min(width, len(values))
    ends = [round(place * len(values) / parts) for place in range(parts + 1)] if parts else []
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(ends)]


def compare(
    first: RunName,
    second: RunName,
    storage: StoragePath = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Samples that changed most to print.")] = 5,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Print how two runs differ: configuration, figures, held-out samples that changed."""
    with one_line_errors(debug):
        from rollout_core.base.errors import NotFound
        from rollout_core.runs.figures import curves_of
        from rollout_core.runs.records import RunRecords, differences
        from rollout_core.runs.samples import compare_held_out
        from tasks.runtime.prefect_server import object_store

        with object_store(storage) as objects:
            records = RunRecords(objects)
            both = [records.detail(records.find(run)) for run in (first, second)]
            keys = differences([detail.config for _, detail in both])
            curves = [curves_of(objects, head, detail) for head, detail in both]
            held_out, gone = None, ""
            try:
                held_out = compare_held_out(objects, both)
            except NotFound as error:  # their record stays for longer
                gone = str(error)
        names = [name for name in curves[0] if name in curves[1]]
        figures = {name: (curves[0][name].last, curves[1][name].last) for name in names}
        if as_json:
            document = {
                "runs": [head.id for head, _ in both],
                "configuration": {row.key: row.values for row in keys},
                "figures": figures,
                "held_out": None if held_out is None else _held_out_json(held_out, limit),
            }
            typer.echo(_as_json(document))
            return
        typer.echo("runs: " + " and ".join(f"{head.name} ({records.short(head.id)})" for head, _ in both))
        print_table(_side_by_side("configuration", [(row.key, *map(str, row.values)) for row in keys]))
        last = [(name, f"{a:.4g}", f"{b:.4g}", f"{b - a:+.4g}") for name, (a, b) in figures.items()]
        print_table(_side_by_side("last value of", last, "difference"))
        both_y = {name: [list(of[name].y) for of in curves] for name in names}
        changed = [name for name, (a, b) in both_y.items() if a != b and len({*a, *b}) > 1]
        if changed:
            typer.echo("curves that differ, the first run's above the second's:")
            print_curves({name: both_y[name] for name in changed})
        if held_out is not None:
            _print_held_out(held_out, limit)
        elif gone:
            typer.echo(gone)


def _side_by_side(title: str, rows: Sequence[tuple[str, ...]], *more: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in (title, "first", "second", *more):
        table.add_column(column)
    for row in rows or [("(nothing differs)" if title == "configuration" else "(no figure that both have)", "", "")]:
        _add_row(table, row)
    return table


def _held_out_json(held_out: HeldOut, limit: int) -> dict[str, Any]:
    from dataclasses import asdict

    document = asdict(held_out)
    return {**document, "pairs": document["pairs"][:limit]}


def _print_held_out(held_out: HeldOut, limit: int) -> None:
    labels = " and ".join(f"{label!r} {mean:.4f}" for label, mean in zip(held_out.labels, held_out.means, strict=True))
    typer.echo(f"held-out reward: {labels}")
    gain = held_out.gain
    if gain is not None:
        typer.echo(
            f"gain: {gain.gain:+.4f}, 95 % interval {gain.lower:+.4f} to {gain.upper:+.4f} "
            f"(paired bootstrap over {gain.num_prompts} prompts)"
        )
    elif held_out.labels[0] != held_out.labels[1]:
        typer.echo("no gain is given: the two are evaluations of different moments")
    elif not held_out.pairs:
        typer.echo("the two were evaluated on different prompts")
    worse = [pair for pair in held_out.pairs if pair.change < 0][:limit]
    better = [pair for pair in reversed(held_out.pairs) if pair.change > 0][:limit]
    for title, pairs in (("worse", worse), ("better", better)):
        for pair in pairs:
            typer.echo(f"{title} {pair.rewards[0]:.3g} to {pair.rewards[1]:.3g}: {_line(pair.prompt)}")
            for completion in pair.completions:
                typer.echo(f"    {_line(completion)}")


def samples(
    run: RunName = "latest",
    label: Annotated[
        str | None,
        typer.Option("--label", help="Which, such as 'before' or 'iteration 3'; default: the last held out."),
    ] = None,
    worse_than: Annotated[float | None, typer.Option("--worse-than", help="Only rewards below this.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="Only where prompt or completion contains this.")] = None,
    start: Annotated[int, typer.Option("--from", min=0, help="Begin with the sample of this number.")] = 0,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help=f"At most this many; default: {_SAMPLES}, with --json all.")
    ] = None,
    storage: StoragePath = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each.")] = False,
    debug: Debug = False,
) -> None:
    """Print samples of a run, also of a batch of millions: prompt, completion, reward."""
    with one_line_errors(debug):
        from rollout_core.runs.browsing import SampleBrowser, Search, find_list, sample_lists
        from rollout_core.runs.records import RunRecords
        from rollout_core.runs.tokens import TokenTexts
        from tasks.runtime.prefect_server import object_store

        limit = limit or (None if as_json else _SAMPLES)
        with object_store(storage) as objects:
            records = RunRecords(objects)
            _, detail = records.detail(records.find(run))
            chosen = find_list(sample_lists(objects, detail), detail, label)
            if not as_json:
                scored = "without rewards" if chosen.mean is None else f"mean reward {chosen.mean:.4f}"
                typer.echo(f"{visible(chosen.label)}: {chosen.num_samples:,} samples, {scored}")
            texts, found = TokenTexts(objects), SampleBrowser(objects, kept_bytes=0)
            rows = found.matching(chosen, Search(text or "", worse_than), start=start)
            for row in itertools.islice(rows, limit):
                _print_sample(texts.readable(chosen.model, row), as_json)
            following = None if as_json else next(rows, None)
        if following is not None:
            typer.echo(f"more fit: --from {following.number} goes on, --limit prints more, --json all")


def _print_sample(row: SampleView, as_json: bool) -> None:
    reward, num_tokens = None if math.isnan(row.reward) else row.reward, len(row.token_ids)
    if as_json:
        shown = {name: getattr(row, name) for name in ("number", "prompt", "completion")}
        shown |= {"reward": reward, "finish_reason": row.finish_reason, "num_tokens": num_tokens}
        typer.echo(json.dumps(shown | ({} if row.error is None else {"error": row.error}), ensure_ascii=False))
        return
    typer.echo(
        f"{row.number:>6}  {'-' if reward is None else f'{reward:.4g}'}  {row.finish_reason}, {num_tokens} tokens"
    )
    typer.echo(f"        {_line(row.prompt)}")
    typer.echo(f"        {_line(row.completion if row.error is None else row.error)}")


def tail(run: RunName = "latest", storage: StoragePath = None, debug: Debug = False) -> None:
    """Follow a run: a line for each stage that ends and for the step under way, until the run has ended.

    Ends with 1 where the run failed, was stopped, or its process is gone.
    """
    with one_line_errors(debug):
        from rollout_core.runs.records import RunRecords
        from tasks.runtime.prefect_server import object_store

        with object_store(storage) as objects:
            records = RunRecords(objects)
            state = _follow(objects, records, records.find(run))
        if state != "completed":
            raise typer.Exit(EXIT_FAILED)


def _follow(objects: ObjectStore, records: RunRecords, head: RunHead) -> str:
    from rollout_core.runs.records import runs_under_way, shown_state

    told, step = 0.0, ""
    while True:
        head, detail = records.detail(head)
        for call in (call for call in detail.calls if call.ended > told):
            at = datetime.fromtimestamp(call.ended, UTC)
            told = call.ended
            done = f"{call.stage} {call.label}: {call.state.lower()}, {call.seconds:.2f} s"
            typer.echo(f"{at:%H:%M:%S}  {visible(done)}")
        if detail.live is not None and detail.live.rows:
            row = detail.live.rows[-1]
            figures = ", ".join(f"{name} {value:.4g}" for name, value in list(row.items())[:4] if value is not None)
            line = f"{visible(detail.live.title)} of {detail.live.num_steps}: {figures}"
            if line != step:
                typer.echo(f"          {line}")
            step = line
        state = shown_state(head, runs_under_way(objects))
        if state != "running":
            typer.echo(
                f"{head.name} ({records.short(head.id)}) {state}" + (f": {visible(head.error)}" if head.error else "")
            )
            return state
        sys.stdout.flush()
        time.sleep(POLL_SECONDS)
        head = records.find(head.id)


def visible(text: str) -> str:
    """In one line, and without characters that would command the terminal."""
    return "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))


def _line(text: str, width: int = 200) -> str:
    shown = visible(text)
    return shown if len(shown) <= width else shown[: width - 3] + "..."


def _as_json(document: Any) -> str:
    """What is no number in JSON is null."""

    def finite(value: Any) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, dict):
            return {name: finite(item) for name, item in value.items()}
        return [finite(item) for item in value] if isinstance(value, list | tuple) else value

    return json.dumps(finite(document), indent=2)


def _add_row(table: Table, cells: Sequence[str], style: str | None = None) -> None:
    from rich.text import Text

    # Not as markup: "[INST]" would be taken for a style.
    table.add_row(*(Text(visible(cell)) for cell in cells), style=style)


def print_table(table: Table) -> None:
    from rich.console import Console

    # Piped, a line stays one: other programs read it.
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    console.print(table)
