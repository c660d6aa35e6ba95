"""`rollout serve`: a model online."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.common import Debug, one_line_errors, parse_overrides
from flows.cli.storage import StoragePath
from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.base.logs import say
from rollout_core.base.settings import locations
from rollout_core.config import ModelSource, VLLMBackend
from rollout_core.config.base import Settings, parse_config
from rollout_core.models.locating import import_model
from rollout_core.objects import ObjectStore
from rollout_core.objects.addresses import complete_folder_id, is_short_id
from rollout_core.objects.local_trees import hold_local_tree
from rollout_core.objects.retention.unstored import local_model
from rollout_core.promotion.history import served_model
from rollout_core.serving.following import Follow
from rollout_core.serving.program import ServingSettings, serve_vllm
from rollout_core.serving.recording import RecordSettings, parse_share
from rollout_core.serving.weights import Weights, examine_apart
from rollout_core.store import SqlLightningStore
from tasks.runtime.prefect_server import object_store, storage_and_database

POLICY = "policy"
"""What promotion calls a model by default."""


class _Engine(Settings):
    """Under this name, so that errors name keys as they were given."""

    backend: VLLMBackend = VLLMBackend()


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Folder, hub id, or content id or its first digits, at least 8. Default: what --follow says.",
        ),
    ] = None,
    follow: Annotated[
        str | None,
        typer.Option(
            "--follow",
            metavar="RESOURCE",
            help="Serve what is the latest of this resource, and change to what is promoted or gone back to; "
            f"default without a MODEL: {POLICY}.",
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; beyond loopback only with a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 8000,
    api_key_env: Annotated[
        list[str] | None,
        typer.Option("--api-key-env", help="Environment variable that holds a key for clients. Repeatable."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="What clients call the model; default: the last part of MODEL, or RESOURCE."),
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
    record: Annotated[
        str | None,
        typer.Option(
            "--record",
            metavar="SHARE",
            help="Share of the requests that are stored as rollouts, such as 0.1 or 10%; 0: only feedback is taken.",
        ),
    ] = None,
    no_canary: Annotated[
        bool,
        typer.Option(
            "--no-canary", help="Do not compare the engine with the trainer's log-probabilities before weights answer."
        ),
    ] = False,
    storage: StoragePath = None,
    debug: Debug = False,
) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's APIs, until SIGTERM or Ctrl-C.

    Other servers of this project: rollout store serve has the rollouts and spans of agents, over HTTP; make serve has
    the deployments, so that a Prefect server can start runs.
    """
    with one_line_errors(debug):
        engine = _engine(set_)
        recorded = None if record is None else RecordSettings(parse_share(record), _database())
        settings = ServingSettings(host, port, tuple(api_key_env or ()), max_queue, drain_seconds, recorded)
        settings.keys()  # before a model is fetched
        resource = None if model is not None and follow is None else follow or POLICY
        with ExitStack() as stack:
            if resource is None:
                assert model is not None
                objects = stack.enter_context(object_store(storage))
                model_id, following = _content_id(model, objects), None
            else:
                _refuse_with_follow(model=model, storage=storage)
                known = stack.enter_context(storage_and_database())
                known.try_database()
                objects, address = known.open_objects(), known.database_url()
                model_id = asyncio.run(_latest(resource, objects, address))
                following = _following(resource, objects, address)
            weights = Weights(_fetching(objects), examine_apart(engine, canary=not no_canary))
            weights.fetch(model_id)  # what is wrong with it is said before an engine starts
            called = name or resource or _name_of(model or "")
            say(f"starting {backend} with model {model_id}")
            serve_vllm(
                called,
                model_id,
                weights,
                engine,
                settings,
                typer.echo,
                tool_call_parser=tool_call_parser,
                follow=following,
            )


def _refuse_with_follow(*, model: str | None, storage: str | None) -> None:
    if model is not None:
        raise ConfigError(f"MODEL {model} and --follow are given, and one model answers; give one of the two")
    if storage is not None:
        raise ConfigError(
            "--storage goes with a MODEL; what is followed is in the object store and the database of the settings, "
            "ROLLOUT_STORAGE and ROLLOUT_DATABASE"
        )


async def _latest(resource: str, objects: ObjectStore, database: str) -> ContentId:
    async with SqlLightningStore.from_url(database) as store:
        found = await served_model(store, objects, resource)
    if found is None:
        raise NotFound(
            f"{resource!r} names no model of ours to serve; `rollout promotions` lists what does, and `rollout promote "
            "ID` makes a model the latest"
        )
    return found


@asynccontextmanager
async def _following(resource: str, objects: ObjectStore, database: str) -> AsyncIterator[Follow]:
    async with SqlLightningStore.from_url(database) as store:
        yield Follow(resource, lambda: served_model(store, objects, resource))


def _fetching(objects: ObjectStore) -> Callable[[ContentId], Path]:
    """A model's folder in the local cache, its files compared with its id, where it stays while it is served."""
    cache = locations().cache

    def fetch(model_id: ContentId) -> Path:
        folder = local_model(objects, model_id, cache)
        hold_local_tree(model_id, cache)
        return folder

    return fetch


def _database() -> str:
    """Address of the store's database, which answers."""
    with storage_and_database() as known:
        known.try_database()
        return known.database_url()


def _engine(overrides: list[str] | None) -> VLLMBackend:
    values = parse_overrides(overrides)
    for key in values:
        if not key.startswith("backend."):
            raise ConfigError(f"--set {key}: only keys of backend are set here, such as backend.max_model_len")
    return parse_config({}, _Engine, overrides=values).backend


def _content_id(model: str, objects: ObjectStore) -> ContentId:
    if (is_content_id(model) or is_short_id(model)) and not Path(model).exists():
        return complete_folder_id(objects, model)
    return import_model(ModelSource(uri=model), objects, Path.cwd())


def _name_of(model: str) -> str:
    return Path(model).resolve().name if Path(model).exists() else model
