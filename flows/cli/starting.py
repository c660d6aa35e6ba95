"""What the commands share that start a flow: its configuration, and a Prefect server to run against."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from rollout_core.base.determinism import hold_numerics
from rollout_core.base.stopping import watching
from rollout_core.config import Run
from rollout_core.config.base import apply_overrides, parse_config, read_toml
from rollout_core.config.cloud import take_cloud
from rollout_core.models.bounded.inspecting import prepare
from rollout_core.objects.addresses import with_whole_ids
from rollout_core.plans.lock import read_lock
from tasks.runtime.prefect_server import PREFECT_HOME, connections, prefect_server

RunT = TypeVar("RunT", bound=Run)

EVENTS_SECONDS = 5.0
"""Longest wait for the states of task runs to reach the Prefect server when a command ends."""


def look_ahead() -> None:
    """For a dry run, before its configuration is read: the process that inspects models begins to import torch and
    transformers, which takes longer than all the rest."""
    prepare()


def load_run(
    path: Path,
    model: type[RunT],
    overrides: Mapping[str, Any],
    options: Mapping[str, str] | None = None,
    *,
    is_held: bool = True,
) -> RunT:
    """The configuration of a run, in a process that computes as it asks. ``options`` as of `parse_config`. Raises
    ConfigError where it is held to a plan that cannot be read, unless it only asks (``is_held``)."""
    return load_tables(read_toml(path), str(path), model, overrides, options, is_held=is_held)


def load_tables(
    tables: Mapping[str, Any],
    name: str,
    model: type[RunT],
    overrides: Mapping[str, Any],
    options: Mapping[str, str] | None = None,
    *,
    is_held: bool = True,
) -> RunT:
    """`load_run` of tables that were read from ``name``."""
    tables = take_cloud(tables, name)
    # Before anything is validated, which may import torch.
    hold_numerics(apply_overrides(tables, overrides).get("numerics"))
    config = _whole_ids(parse_config(tables, model, name=name, overrides=overrides, options=options))
    if config.run.locked is not None and is_held:
        read_lock(Path.cwd() / config.run.locked)  # what is wrong with it is said before anything starts
    return config


def _whole_ids(config: RunT) -> RunT:
    """``config`` with whole content ids, unless the object store is a block of a server that is not running yet."""
    known = connections()
    return config if known is None else with_whole_ids(config, Path.cwd(), known.open_objects)


def run_flow(flow: str, debug: bool, *arguments: Any, **options: Any) -> Any:
    """Run the flow at ``flow``, such as ``"flows.nightly:nightly"``, with these arguments, against the configured
    Prefect API, or the server of this folder.

    Unless ``debug``, log lines in the terminal show no tracebacks of our own errors, whose messages say what to do.
    """
    module, _, name = flow.partition(":")

    def load() -> None:
        # Not before: Prefect takes the server's address when it is imported.
        import_module(module)

    with watching(ends_process=True), prefect_server(PREFECT_HOME, meanwhile=load):
        from tasks.runtime.prefect_logs import without_known_traces

        try:
            with nullcontext() if debug else without_known_traces():
                return getattr(import_module(module), name)(*arguments, **options)
        finally:
            from prefect.events.worker import EventsWorker
            from prefect.logging.handlers import APILogHandler

            # The last lines and states are sent in the background; a server of this folder is gone a moment later.
            APILogHandler().flush()
            EventsWorker.drain_all(timeout=EVENTS_SECONDS)
