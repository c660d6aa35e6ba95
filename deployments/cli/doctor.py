"""`rollout doctor`: what is not as it should be, and what to do; and its words under their earlier names."""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flows.cli.common import EXIT_FAILED, AsJson, Debug, one_line_errors
from rollout_core.base.errors import ConfigError

if TYPE_CHECKING:
    from deployments.probes import Check


class Word(StrEnum):
    """A section of the checks, or the report."""

    MACHINE = "machine"
    SERVER = "server"
    WORKERS = "workers"
    SCHEDULE = "schedule"
    STORAGE = "storage"
    STORE = "store"
    CLOUD = "cloud"
    STATUS = "status"


SECTIONS = frozenset(Word) - {Word.CLOUD, Word.STATUS}
Config = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file with a [cloud] table. Default: the settings of the environment."),
]


def doctor(
    words: Annotated[
        list[Word] | None,
        typer.Argument(
            metavar="SECTION",
            help="machine, server, workers, schedule, storage, store; or cloud, which tries storage, credentials, "
            "queue and secrets for real, and removes what it writes. Default: all but cloud. status: how scheduled "
            "runs fare now, as a report.",
        ),
    ] = None,
    as_json: AsJson = False,
    provider: Annotated[
        Literal["local", "aws", "gcp"] | None, typer.Option("--provider", help="Of cloud: where objects are kept.")
    ] = None,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Check machine, server, workers, schedule, storage, store and cloud, and say what to do.

    Exit code 0: no check failed, though some may warn; 1: one did; 2: they could not be made, such as for another
    provider's settings.
    """
    with one_line_errors(debug):
        wanted = frozenset(words or SECTIONS)
        if Word.STATUS in wanted:
            if len(wanted) > 1:
                raise ConfigError("status is a report of its own; give it alone, or sections without it")
            return _status(as_json, debug)
        if (provider or config) and Word.CLOUD not in wanted:
            raise ConfigError("--provider and --config are about the section cloud; name it: rollout doctor cloud")
        cloud = _examined_cloud(provider, config) if Word.CLOUD in wanted else []
        checks = [*(_examined(wanted, debug, now=True) if wanted & SECTIONS else []), *cloud]
        _show(checks, as_json)


def _examined(sections: Collection[str], debug: bool, *, now: bool) -> list[Check]:
    from deployments.probes import find_server

    server = find_server(debug=debug)
    from deployments.health import GROUPS, NOW, examine  # with Prefect, which takes its settings now

    groups = {name for name, group in GROUPS.items() if group.section in sections and (now or name not in NOW)}
    return examine(server, groups, debug=debug)


def _examined_cloud(provider: Literal["local", "aws", "gcp"] | None, config: Path | None) -> list[Check]:
    from deployments.cloud_doctor import examined

    return examined(provider, config)


def _show(checks: list[Check], as_json: bool) -> None:
    from deployments.probes import checks_text

    if as_json:
        listed = [check.model_dump(mode="json", exclude_none=True) for check in checks]
        document = {"checked_at": datetime.now(UTC).isoformat(), "checks": listed}
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        typer.echo(checks_text(checks))
    _exit_by(checks)


def _exit_by(checks: list[Check]) -> None:
    if any(check.level == "fail" for check in checks):
        raise typer.Exit(EXIT_FAILED)


def _status(as_json: bool, debug: bool) -> None:
    from deployments.probes import find_server

    server = find_server(debug=debug)
    from deployments.status import look, text  # with Prefect, which takes its settings now

    found = look(server, debug=debug)
    typer.echo(found.model_dump_json(indent=2) if as_json else text(found))
    if found.problems:
        raise typer.Exit(EXIT_FAILED)


# Earlier names, for one release


def ops_doctor(as_json: AsJson = False, debug: Debug = False) -> None:
    """The earlier name of `rollout doctor`, without checks of pools and runs."""
    with one_line_errors(debug):
        _show(_examined(SECTIONS, debug, now=False), as_json)


def ops_status(as_json: AsJson = False, debug: Debug = False) -> None:
    """The earlier name of `rollout doctor status`."""
    with one_line_errors(debug):
        _status(as_json, debug)


def cloud_doctor(
    provider: Annotated[Literal["local", "aws", "gcp"], typer.Option("--provider", help="Where objects are kept.")],
    config: Config = None,
    form: Annotated[Literal["human", "json"], typer.Option("--format", help="json: for programs.")] = "human",
    debug: Debug = False,
) -> None:
    """The earlier name of `rollout doctor cloud`."""
    with one_line_errors(debug):
        checks = _examined_cloud(provider, config)
        if form == "human":
            return _show(checks, as_json=False)
        from deployments.cloud_doctor import document

        failed = sum(check.level == "fail" for check in checks)
        total = sum(check.latency_ms or 0 for check in checks)
        summary = {"pass_count": len(checks) - failed, "fail_count": failed, "total_latency_ms": total}
        typer.echo(json.dumps({**document(checks), "summary": summary}, indent=2, ensure_ascii=False))
        _exit_by(checks)
