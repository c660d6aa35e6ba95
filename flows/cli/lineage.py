"""`rollout lineage` and `export`: what made a result, back to where its inputs came from; what came of it; models taken
out with all that."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flows.cli.common import EXIT_FAILED, Debug, one_line_errors, run_flow
from flows.cli.storage import StoragePath

if TYPE_CHECKING:
    from rollout_core.base.ids import ContentId
    from rollout_core.data.sample_lineage import Sighting
    from rollout_core.objects import ObjectStore
    from rollout_core.objects.imports import Imported
    from rollout_core.objects.lineage import Lineage

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
            "image, for a file or a page; openlineage: events of that standard, one a line, for catalogues (an extra).",
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
        from rollout_core.base.errors import NotFound
        from rollout_core.objects.imports import imports_behind
        from rollout_core.objects.lineage import trace_descendants, trace_lineage
        from rollout_core.objects.lineage_graph import as_mermaid, as_svg, as_text, lineage_graph
        from tasks.runtime.prefect_server import object_store

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
    from rollout_core.base.errors import ConfigError
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
    told = f"{saw}{rewards}" or "by what it was trained from"
    return f"{named:13} {f'{item.stage} {item.label}'.strip():28} {told}{f'; {item.note}' if item.note else ''}"


def export(
    model: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="Of a model or training state, or the first digits, at least 8; latest: what is served."
        ),
    ],
    folder: Annotated[
        Path | None, typer.Argument(help="A new folder; it appears whole and verified, or not at all.")
    ] = None,
    resource: Annotated[str, typer.Option("--resource", help="Whose latest model, where ID is latest.")] = "policy",
    push: Annotated[
        str | None, typer.Option("--push-to-hub", metavar="REPO", help="Upload it there, such as my-team/my-model.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public; default: private.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch of the repository.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Title of the model card.")] = None,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Also as one file, model.gguf, for llama.cpp and its kin (an extra).")
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="What LoRA trained alone, as peft loads it, instead of the model.")
    ] = False,
    dtype: Annotated[
        Literal["base", "stored", "float32", "bfloat16", "float16"],
        typer.Option(
            "--dtype",
            help="Of the weights. base: as the model has it that training began with; stored: as they are, float32 of "
            "what was trained.",
        ),
    ] = "base",
    storage: StoragePath = None,
    debug: Debug = False,
) -> None:
    """Write a model as a Hugging Face folder, with a model card and the records of its lineage; or upload it."""
    with one_line_errors(debug):
        from rollout_core.base.errors import ConfigError
        from rollout_core.base.locks import scratch_folder
        from rollout_core.promotion.export import export_model, model_to_export, push_to_hub
        from tasks.runtime.prefect_server import object_store

        if folder is None and push is None:
            raise ConfigError("nowhere to export to; give a FOLDER, or --push-to-hub REPO")
        if adapter and (gguf or dtype != "base"):
            raise ConfigError("--adapter writes an adapter alone, in float32; leave out --gguf and --dtype")
        digits = _served(resource) if model == "latest" else model
        with object_store(storage) as objects, scratch_folder("export") as scratch:
            target = folder if folder is not None else scratch / "model"
            options: Any = {"as_gguf": gguf, "as_adapter": adapter, "dtype": dtype}
            found = export_model(objects, model_to_export(objects, digits), target, name=name or push, **options)
            precision = "" if found.dtype is None else f", weights in {found.dtype}"
            typer.echo(f"{'exported' if folder is None else folder}: model {found.model}{precision}")
            if push is not None:
                message = f"Model {found.model.short}"
                typer.echo(push_to_hub(target, push, private=not public, revision=revision, message=message))


def reproduce(
    content_id: Annotated[str, typer.Argument(metavar="ID", help="Of a checkpoint or any other result of stages.")],
    into: Annotated[
        Path | None, typer.Option("--into", help="Folder for an object store, database and cache of its own.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say whether all that it takes is there; run nothing.")
    ] = False,
    storage: StoragePath = None,
    debug: Debug = False,
) -> None:
    """Make a result again elsewhere, from the records of its lineage, and say at which stage its ids first differ.

    Exit code 0: all ids are the same; 1: some stage made others.
    """
    with one_line_errors(debug):
        from rollout_core.base.determinism import hold_numerics
        from rollout_core.base.errors import ConfigError
        from rollout_core.objects.addresses import complete_lineage_id
        from rollout_core.objects.lineage import trace_lineage
        from tasks.runtime.prefect_server import object_store

        if into is None and not check:
            raise ConfigError("give --into FOLDER, where it is made again, or --check")
        with object_store(storage) as objects:
            found = complete_lineage_id(objects, content_id)
            asked = {item.arithmetic.get("numerics", "native") for item in trace_lineage(objects, found)}
            hold_numerics("portable" if asked == {"portable"} else None)  # before anything imports torch
            url = objects.url
        if check:
            _check_reproduction(url, found)
        else:
            assert into is not None, "checked"
            _reproduce(url, found, into.resolve(), debug)


def _check_reproduction(url: str, content: ContentId) -> None:
    from flows.reproduce import numerics_of, plan_reproduction
    from rollout_core.objects import ObjectStore

    plan = plan_reproduction(ObjectStore.from_url(url), content)
    typer.echo(f"{len(plan.steps)} stages, {len(plan.first_inputs)} inputs, {numerics_of(plan)} numerics")
    for step in plan.steps:
        typer.echo(f"  {step.title}")
    for note in plan.notes:
        typer.echo(f"may make other ids: {note}")
    for problem in plan.problems:
        typer.echo(f"cannot be made again: {problem}")
    if plan.problems:
        raise typer.Exit(EXIT_FAILED)


def _reproduce(url: str, content: ContentId, folder: Path, debug: bool) -> None:
    # Read when a stage asks for them, so that nothing of the settings' own is written to.
    os.environ["ROLLOUT_STORAGE"] = f"file://{folder / 'objects'}"
    os.environ["ROLLOUT_DATABASE"] = f"sqlite:///{folder / 'rollout.db'}"
    os.environ["ROLLOUT_CACHE"] = str(folder / "cache")
    folder.mkdir(parents=True, exist_ok=True)
    numerics = os.environ.get("ROLLOUT_NUMERICS", "native")

    def start() -> Any:
        from flows.reproduce import reproduce as run

        return run(content, url, numerics)

    done = run_flow(start, debug, "flows.reproduce")
    for title in done["same"]:
        typer.echo(f"same ids: {title}")
    if done["difference"] is None:
        typer.echo(f"{content} was made again, byte for byte")
        return
    differing = done["difference"]
    typer.echo(f"first difference: {differing['stage']}")
    for there, here in zip(differing["there"], differing["here"], strict=True):
        typer.echo(f"  {there} there, {here} here{'' if there != here else ' (the same)'}")
    typer.echo("`rollout reproduce ID --check` says what is not here as it was there")
    raise typer.Exit(EXIT_FAILED)


def _served(resource: str) -> str:
    """The model that the latest resources serve under this name."""
    from rollout_core.base.errors import NotFound
    from rollout_core.promotion.history import served_model
    from rollout_core.store import SqlLightningStore
    from tasks.runtime.prefect_server import storage_and_database

    with storage_and_database() as known:
        known.try_database()
        objects = known.open_objects()

        async def look() -> str | None:
            async with SqlLightningStore.from_url(known.database_url()) as store:
                return await served_model(store, objects, resource)

        found = asyncio.run(look())
    if found is None:
        raise NotFound(f"{resource!r} serves no model of ours; `rollout promotions` lists what does")
    return found


def _meant(objects: ObjectStore, text: str, down: bool) -> ContentId:
    """The id that was given, or that of what was read from an address. Of several the last one that was brought in."""
    from rollout_core.base.errors import ConfigError
    from rollout_core.base.ids import is_content_id
    from rollout_core.objects.addresses import complete_input_id, complete_lineage_id, is_short_id
    from rollout_core.objects.imports import ids_at

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
