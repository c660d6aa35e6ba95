"""`rollout import`: a model brought into the object store, from a GGUF file, a folder or the hub."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.common import Debug, one_line_errors
from flows.cli.storage import StoragePath
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.base.processes import size_text
from rollout_core.config import ModelSource
from rollout_core.models.gguf_header import ENDING
from rollout_core.models.gguf_reading import DEFAULT_TYPE, WeightType
from rollout_core.models.locating import import_gguf, import_model as file_model
from rollout_core.objects import ObjectStore
from tasks.runtime.prefect_server import object_store


def import_model(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A GGUF file, a folder, a hub id, or OWNER/NAME/FILE.gguf on the hub."),
    ],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option("--dtype", help="What the numbers of a GGUF file become; default: bfloat16."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Folder or hub id of another tokenizer than the model's own.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a hub id.")] = None,
    storage: StoragePath = None,
    debug: Debug = False,
) -> None:
    """Bring a model into the object store and print its content id. What was read is reported on stderr.

    A GGUF file becomes a Hugging Face folder: its numbers dequantized, its tokenizer and chat template rebuilt.
    """
    with one_line_errors(debug):
        source = ModelSource(uri=model, revision=revision, tokenizer=tokenizer)
        with object_store(storage) as objects:
            typer.echo(_import(source, dtype, objects))


def _import(source: ModelSource, dtype: WeightType | None, objects: ObjectStore) -> ContentId:
    started = time.monotonic()
    if not source.uri.lower().endswith(ENDING) or (Path.cwd() / source.uri).is_dir():
        if dtype is not None:
            raise ConfigError(f"--dtype is for GGUF files; {source.uri} keeps the type of its weights")
        found = file_model(source, objects, Path.cwd())
        _tell(source, f"{_size(objects, found)} of files", started)
        return found
    done = import_gguf(source, objects, Path.cwd(), dtype or DEFAULT_TYPE)
    _tell(source, "converted before; nothing to do" if done.facts is None else str(done.facts), started)
    return done.model


def _tell(source: ModelSource, what: str, started: float) -> None:
    sys.stderr.write(f"rollout: {source.uri}: {what}; {time.monotonic() - started:.1f} s\n")


def _size(objects: ObjectStore, model: ContentId) -> str:
    return size_text(objects.manifest(model).size_bytes)
