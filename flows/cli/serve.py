"""`rollout serve`: a model online."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.common import Debug, one_line_errors, parse_overrides
from flows.cli.storage import StoragePath
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.base.logs import say
from rollout_core.base.settings import locations
from rollout_core.config import ModelSource, VLLMBackend
from rollout_core.config.base import parse_config
from rollout_core.models.locating import import_model
from rollout_core.objects import ObjectStore
from rollout_core.objects.addresses import complete_folder_id, is_short_id
from rollout_core.objects.local_trees import hold_local_tree
from rollout_core.objects.retention.unstored import local_model
from rollout_core.serving.front import ServedModel
from rollout_core.serving.program import ServingSettings, serve_vllm
from tasks.runtime.prefect_server import object_store


def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder, hub id, or content id or its first digits, at least 8.")
    ],
    host: Annotated[str, typer.Option("--host", help="Address to listen on; beyond loopback only with a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 8000,
    api_key_env: Annotated[
        list[str] | None,
        typer.Option("--api-key-env", help="Environment variable that holds a key for clients. Repeatable."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What clients call the model; default: the last part of MODEL.")
    ] = None,
    backend: Annotated[Literal["vllm"], typer.Option("--backend", help="What runs the model.")] = "vllm",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A value of the backend, such as --set backend.max_model_len=4096. Repeatable."),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option("--tool-call-parser", help="vLLM's parser of the model's calls, for a tool_choice of auto."),
    ] = None,
    max_queue: Annotated[
        int, typer.Option("--max-queue", min=0, help="Most requests that wait for their turn; more get 429.")
    ] = 256,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", min=0, help="How long requests may finish after SIGTERM.")
    ] = 30.0,
    storage: StoragePath = None,
    debug: Debug = False,
) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's APIs, until SIGTERM or Ctrl-C.

    Other servers of this project: rollout store serve has the rollouts and spans of agents, over HTTP; make serve has
    the deployments, so that a Prefect server can start runs.
    """
    with one_line_errors(debug):
        engine = _engine(set_)
        settings = ServingSettings(host, port, tuple(api_key_env or ()), max_queue, drain_seconds)
        settings.keys()  # before a model is fetched
        with object_store(storage) as objects:
            content_id = _content_id(model, objects)
            cache = locations().cache
            folder = local_model(objects, content_id, cache)
            hold_local_tree(content_id, cache)
        served = ServedModel(name or _name_of(model), content_id)
        say(f"starting {backend} with model {content_id}")
        serve_vllm(served, folder, engine, settings, typer.echo, tool_call_parser=tool_call_parser)


def _engine(overrides: list[str] | None) -> VLLMBackend:
    values = parse_overrides(overrides)
    for key in values:
        if not key.startswith("backend."):
            raise ConfigError(f"--set {key}: only keys of backend are set here, such as backend.max_model_len")
    given = {key.removeprefix("backend."): value for key, value in values.items()}
    return parse_config({}, VLLMBackend, name="backend", overrides=given)


def _content_id(model: str, objects: ObjectStore) -> ContentId:
    if (is_content_id(model) or is_short_id(model)) and not Path(model).exists():
        return complete_folder_id(objects, model)
    return import_model(ModelSource(uri=model), objects, Path.cwd())


def _name_of(model: str) -> str:
    return Path(model).resolve().name if Path(model).exists() else model
