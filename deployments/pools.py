"""The deployments of a ``prefect.yaml``, and the work pools and blocks that they count on.

Run: python -m deployments.pools   (pools and blocks alone, against the configured Prefect API)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import yaml
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from blocks import ContentAddressedStorage, RolloutDatabase
from rollout_core.base.errors import ConfigError, RolloutError
from rollout_core.config import NightlyConfig, parse_config
from rollout_core.config.base import read_toml

POOLS = {
    "cpu": "Flows that need no GPU, and everything on a machine without one.",
    "gpu": "Flows that generate or train on GPUs.",
}
POOL_TYPE = "process"
FILE = "prefect.yaml"
OF_THE_NIGHT = ("flows/nightly.py:nightly", "flows/canary.py:canary")
"""Flows that run by the configuration of the nightly run."""
_MOST_DEPLOYMENTS = 200
"""Prefect gives no more at once."""
_HINT, _END_OF_HINT, _MOST_OF_A_HINT = "To execute flow runs from these deployments", "prefect worker start", 6
"""How Prefect says that a worker is needed, wrapped to the width of the terminal."""


def deploy(
    folder: Path, pool: str, names: Sequence[str] = (), *, project: str | None = None, config: Path | None = None
) -> bool:
    """Create what is needed and deploy what the ``prefect.yaml`` in ``folder`` lists, or of it ``names``, on ``pool``;
    whether Prefect says that the pool needs a worker.

    Deployments that are there already move to the pool. Runs work in the folder ``project`` of the worker's machine, by
    default in ``folder``. ``config`` as of `listed_deployments`. Raises ConfigError for a name or pool that there is
    not, or a wrong configuration, RolloutError where Prefect refuses.

    What a person has paused stays paused, a schedule or a whole deployment, and a line says so.
    """
    document = listed_deployments(folder / FILE, config)
    listed = [str(item["name"]) for item in document["deployments"]]
    unknown = [name for name in names if name not in listed]
    if unknown:
        raise ConfigError(f"{folder / FILE} has no deployment {', '.join(unknown)}; it has {', '.join(listed)}")
    create_pools()
    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(pool)
        except ObjectNotFound as error:
            raise ConfigError(
                f"the server has no work pool {pool!r}; give one of {', '.join(POOLS)}, or create it: "
                f"prefect work-pool create {pool} --type process"
            ) from error
        asked_for = [item for item in document["deployments"] if not names or item["name"] in names]
        for line in _keep_paused(client, asked_for):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    asked = [f"--name={name}" for name in names] or ["--all"]
    with tempfile.NamedTemporaryFile("w", suffix=f"-{FILE}", encoding="utf-8") as file:
        yaml.safe_dump(document, file, sort_keys=False)
        file.flush()
        with subprocess.Popen(
            [sys.executable, "-m", "prefect", "--no-prompt", "deploy", f"--prefect-file={file.name}", *asked],
            cwd=folder,
            env={**os.environ, "ROLLOUT_PROJECT": project or str(folder), "ROLLOUT_POOL": pool},
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as deploying:
            assert deploying.stdout is not None, "asked for"
            needs_worker = False
            for line, is_hint in marked(deploying.stdout):
                needs_worker = needs_worker or is_hint
                sys.stdout.write("" if is_hint else line)
                sys.stdout.flush()
    if deploying.returncode:
        raise RolloutError(f"`prefect deploy` ended with {deploying.returncode} in {folder}; what it said is above")
    return needs_worker


def marked(lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """What `prefect deploy` prints, each line with whether it is of the hint that a worker is needed, which comes again
    for each deployment."""
    left = 0
    for line in lines:
        if line.startswith(_HINT):
            left = _MOST_OF_A_HINT
        yield line, left > 0
        left = 0 if _END_OF_HINT in line else max(0, left - 1)


def _keep_paused(client: SyncPrefectClient, items: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Write into deployments that are about to be deployed what of them is paused on the server; a line for each."""
    by_name = {str(item["name"]): item for item in items}
    known = client.read_deployments(
        deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=list(by_name))), limit=_MOST_DEPLOYMENTS
    )
    for deployment in known:
        item = by_name[deployment.name]
        if deployment.paused:
            item["paused"] = True
            yield f"deployment {deployment.name} is paused as a whole, and stays so"
        paused = [_rhythm(one.schedule.model_dump()) for one in deployment.schedules if not one.active]
        # Who gives a schedule another time while all are paused has not switched it on.
        are_all = len(paused) == len(deployment.schedules)
        kept = [own for own in item.get("schedules") or () if paused and (are_all or _rhythm(own) in paused)]
        for own in kept:
            own["active"] = False
        if kept:
            when = ", ".join(str(_rhythm(own)) for own in kept)
            yield (
                f"deployment {deployment.name}: its schedule ({when}) is paused, and stays so: "
                "prefect deployment schedule resume"
            )


def _rhythm(schedule: Mapping[str, Any]) -> Any:
    """When a schedule starts runs, without where and since when."""
    return next((schedule[kind] for kind in ("cron", "rrule", "interval") if schedule.get(kind)), None)


def require_process_pool(pool: str) -> None:
    """Raises ConfigError where the server has the pool and its runs are no processes; a server may be away."""
    with (
        suppress(httpx.HTTPError, ObjectNotFound),
        get_client(sync_client=True, httpx_settings={"timeout": 5.0}) as client,
    ):
        kind = client.read_work_pool(pool).type
        if kind != POOL_TYPE:
            raise ConfigError(
                f"work pool {pool!r} is of type {kind}, and this worker is for pools of type {POOL_TYPE}; start "
                f"Prefect's own for it: prefect worker start --pool {pool}"
            )


def listed_deployments(file: Path, config: Path | None = None) -> dict[str, Any]:
    """The tables of a ``prefect.yaml``, in which ``config``, a TOML file, takes the place of the nightly run's and the
    canary's configuration. Raises ConfigError where either is wrong."""
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
        of_the_night = [item for item in document["deployments"] if item["entrypoint"] in OF_THE_NIGHT]
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; call this in the project folder") from error
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} lists no deployments as Prefect reads them: {error}") from error
    if config is not None:
        tables = read_toml(config)
        if "cloud" in tables:
            raise ConfigError(
                f"{config}: a table [cloud] is for runs by command; a worker has ROLLOUT_STORAGE and what else it "
                "stands for in its own environment (docs/clouds.md)"
            )
        parse_config(tables, NightlyConfig, name=str(config))
        for item in of_the_night:
            item["parameters"] = {**item.get("parameters", {}), "config": tables}
    return document


def create_pools() -> None:
    """Create the work pools and register the block types."""
    with get_client(sync_client=True) as client:
        for name, description in POOLS.items():
            try:
                client.create_work_pool(WorkPoolCreate(name=name, type=POOL_TYPE, description=description))
            except ObjectAlreadyExists:
                continue
    for block in (ContentAddressedStorage, RolloutDatabase):
        block.register_type_and_schema()


if __name__ == "__main__":
    create_pools()
