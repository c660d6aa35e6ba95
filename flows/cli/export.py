"""`rollout export`: a model taken out, with the records of what made it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flows.cli.common import Debug, one_line_errors
from flows.cli.promotion import served_id
from flows.cli.storage import StoragePath
from rollout_core.base.errors import ConfigError
from rollout_core.base.locks import scratch_folder
from tasks.runtime.prefect_server import object_store


def export(
    model: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="Id of a model or training state, or its first digits, at least 8; latest: the served model.",
        ),
    ],
    folder: Annotated[
        Path | None, typer.Argument(help="A new folder; it appears whole and verified, or not at all.")
    ] = None,
    resource: Annotated[
        str, typer.Option("--resource", help="Resource whose latest model is meant, where ID is latest.")
    ] = "policy",
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
        if folder is None and push is None:
            raise ConfigError("nowhere to export to; give a FOLDER, or --push-to-hub REPO")
        if adapter and (gguf or dtype != "base"):
            raise ConfigError("--adapter writes an adapter alone, in float32; leave out --gguf and --dtype")
        from rollout_core.exports.hugging_face import export_model, model_to_export, push_to_hub  # with torch

        digits = served_id(resource) if model == "latest" else model
        with object_store(storage) as objects, scratch_folder("export") as scratch:
            target = folder if folder is not None else scratch / "model"
            options: Any = {"as_gguf": gguf, "as_adapter": adapter, "dtype": dtype}
            found = export_model(objects, model_to_export(objects, digits), target, name=name or push, **options)
            precision = "" if found.dtype is None else f", weights in {found.dtype}"
            typer.echo(f"{'exported' if folder is None else folder}: model {found.model}{precision}")
            if push is not None:
                message = f"Model {found.model.short}"
                typer.echo(push_to_hub(target, push, private=not public, revision=revision, message=message))
