"""`rollout lineage`: what made a result, back to where its inputs came from; and what came of it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flows.cli.common import Debug, one_line_errors
from flows.cli.storage import StoragePath
from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.objects import ObjectStore
from rollout_core.objects.addresses import complete_input_id, complete_lineage_id, is_short_id
from rollout_core.objects.lineage import Lineage, trace_descendants, trace_lineage
from rollout_core.objects.lineage_graph import as_mermaid, as_svg, as_text, lineage_graph
from rollout_core.objects.origins import Imported, ids_at, imports_behind
from tasks.runtime.prefect_server import object_store

if TYPE_CHECKING:
    from rollout_core.data.sample_lineage import Sighting

Origin = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="Content id, or its first digits, at least 8; or the path, URL or hub id that an input was read from.",
    ),
]


def lineage(
    content_id: Origin,
    down: Annotated[
        bool, typer.Option("--down", help="What was made from it instead, such as the checkpoints of a data file.")
    ] = False,
    form: Annotated[
        Literal["text", "json", "mermaid", "svg", "openlineage"],
        typer.Option(
            "--format",
            help="text: for a terminal; json: whole records; mermaid: a flow chart, as Markdown shows it; svg: an "
            "image, by graphviz's dot; openlineage: events of that standard, one a line, for catalogues (an extra).",
        ),
    ] = "text",
    samples: Annotated[
        bool, typer.Option("--samples", help="A line of JSON for each sample behind a checkpoint, with its reward.")
    ] = False,
    row: Annotated[
        int | None, typer.Option("--row", min=1, help="Which checkpoints saw this row of a data set, from 1.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="As --row, of the first row with this prompt.")] = None,
    storage: StoragePath = None,
    debug: Debug = False,
) -> None:
    """Print what made a checkpoint or any other result, back to where its inputs came from; or what came of it."""
    with one_line_errors(debug):
        if samples or row is not None or prompt is not None:
            _print_samples(content_id, samples, row, prompt, storage, as_text=form == "text")
            return

        with object_store(storage) as objects:
            found_id = _meant(objects, content_id, down)
            found = (trace_descendants if down else trace_lineage)(objects, found_id)
            imports = imports_behind(objects, found_id, found)
        if down:
            imports = [item for item in imports if item.outputs == (found_id,)]
        if not found and not imports:
            raise NotFound(f"no stage recorded that it {'used' if down else 'made'} {content_id}")
        if form == "svg":
            typer.echo(as_svg(lineage_graph(found, imports), asked=found_id))
        elif form == "openlineage":
            from rollout_core.objects.openlineage import events

            for event in events(found, imports):
                typer.echo(event)
        elif form == "mermaid":
            typer.echo(as_mermaid(lineage_graph(found, imports)))
        elif form == "text":
            typer.echo(as_text(found, imports, asked=found_id, down=down))
        else:
            # Upwards the first inputs come last, downwards what all else was made of comes first.
            items: list[Lineage | Imported] = [*imports, *found] if down else [*found, *imports]
            typer.echo(json.dumps([item.model_dump(mode="json") for item in items], indent=2))


def _print_samples(
    text: str, samples: bool, row: int | None, prompt: str | None, storage: str | None, *, as_text: bool
) -> None:
    """A line for each sample behind a checkpoint, of JSON, or for each checkpoint that saw a row."""
    from rollout_core.data.sample_lineage import number_of, samples_behind, who_saw
    from tasks.runtime.prefect_server import object_store

    if samples + (row is not None) + (prompt is not None) > 1:
        raise ConfigError("--samples, --row and --prompt each ask for something else; give one of them")
    with object_store(storage) as objects:
        if samples:
            out = sys.stdout.buffer
            for line in samples_behind(objects, _meant(objects, text, down=False)):
                out.write(line)
            out.flush()
            return
        data = _meant(objects, text, down=True)
        number = row if row is not None else number_of(objects, data, prompt or "")
        found = list(who_saw(objects, data, number))
        for item in found:
            typer.echo(_seen(item) if as_text else json.dumps(asdict(item)))
        if not found:
            sys.stderr.write(f"rollout: no checkpoint is recorded that saw row {number} of {data.short}\n")


def _seen(item: Sighting) -> str:
    """How a checkpoint saw a row, for a terminal."""
    saw = "took part, unknown how often" if item.times is None else f"{item.times} samples of it" if item.times else ""
    each = ["none" if reward is None else f"{reward:g}" for reward in item.rewards]
    rewards = f", rewards {' '.join(each)}" if each else ""
    named = item.checkpoint.short if item.checkpoint is not None else "none"
    known = f"{saw}{rewards}" or "by what it was trained from"
    return f"{named:13} {f'{item.stage} {item.label}'.strip():28} {known}{f'; {item.note}' if item.note else ''}"


def _meant(objects: ObjectStore, text: str, down: bool) -> ContentId:
    """The id that was given, or that of what was read from an address. Of several the last one that was brought in."""
    if is_content_id(text) or is_short_id(text):
        return (complete_input_id if down else complete_lineage_id)(objects, text)
    found = ids_at(objects, text, Path.cwd())
    if not found:
        try:
            return complete_lineage_id(objects, text)  # which says what an id looks like
        except ConfigError as error:
            raise ConfigError(f"{error}; and nothing in {objects.url} was read from there") from None
    if len(found) > 1:
        others = ", ".join(item.short for item in found[1:])
        sys.stderr.write(f"rollout: {found[0].short} was read from {text} last; earlier ones: {others}\n")
    return found[0]
