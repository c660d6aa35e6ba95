"""The whole `rollout` command: that of `flows.cli`; `rollout ops`, which looks after deployments; and `rollout ui`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from flows.cli import app, main as run_app
from flows.cli.common import EXIT_FAILED, Debug, one_line_errors
from flows.cli.storage import DatabaseURL, store_app

if TYPE_CHECKING:
    from deployments.automations import Change
    from deployments.spot import Kind

AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]

EXIT_DRAINED = 75
"""After a spot notice: a supervisor need not start the worker again on a machine that goes away."""
WEBHOOK_VARIABLE = "ROLLOUT_WEBHOOK_URL"
SPOT = ("aws", "gce", "auto", "none")

ops_app = typer.Typer(
    no_args_is_help=True, help="Look after scheduled runs: how they fare, what heals them, and who is told."
)
app.add_typer(ops_app, name="ops")
cloud_app = typer.Typer(no_args_is_help=True, help="Look at the cloud, or the machine, that runs count on.")
app.add_typer(cloud_app, name="cloud")


@ops_app.command("install")
def install(
    webhook: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            # Not as its `envvar`: typer would take that as given beside the other two.
            help=f"Tell this address, by POST of JSON, of failed and late runs. Default: {WEBHOOK_VARIABLE}.",
        ),
    ] = None,
    notify: Annotated[
        str | None,
        typer.Option(
            "--notify", metavar="SLUG/NAME", help="Tell by this block of the server, such as slack-webhook/team."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--no-notify", help="Tell nobody any more.")] = False,
    silent_after: Annotated[
        float | None,
        typer.Option(
            help="Seconds without a heartbeat after which a run's machine counts as lost; at least three heartbeats "
            "(PREFECT_FLOWS_HEARTBEAT_FREQUENCY of the workers, 180 s by default). Default: 600, at first."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what differs; change nothing.")] = False,
    debug: Debug = False,
) -> None:
    """Install the automations that try crashed runs again and tell of failed and late ones.

    A second time changes nothing. What the last installation was told by options holds until an option says otherwise.
    """
    with one_line_errors(debug):
        from rollout_core.base.errors import ConfigError
        from tasks.runtime.prefect_server import PREFECT_HOME, prefect_server

        if sum([webhook is not None, notify is not None, quiet]) > 1:
            raise ConfigError("give one of --webhook, --notify and --no-notify")
        if webhook is None and notify is None and not quiet:
            webhook = os.environ.get(WEBHOOK_VARIABLE) or None
        if webhook is not None and not webhook.startswith(("http://", "https://")):
            raise ConfigError("--webhook: expected an address that begins with http:// or https://")
        with prefect_server(PREFECT_HOME):
            # Not before: Prefect takes the server's address when it is imported.
            from deployments.automations import MIN_SILENT_SECONDS

            if silent_after is not None and silent_after < MIN_SILENT_SECONDS:
                raise ConfigError(
                    f"--silent-after {silent_after:g}: expected at least {MIN_SILENT_SECONDS}, three heartbeats"
                )
            if webhook is not None and dry_run:
                typer.echo("(whom to tell is not looked at by --dry-run --webhook)")
            for change in _install(webhook, notify, quiet, silent_after, dry_run):
                typer.echo(f"{change.action:6}  {change.name}")
                for line in change.diff:
                    typer.echo(f"    {line}")


def _install(
    webhook: str | None, notify: str | None, quiet: bool, silent_after: float | None, dry_run: bool
) -> list[Change]:
    from prefect import get_client

    from deployments import automations

    with get_client(sync_client=True) as client:
        there = automations.present(client)
        installed, told = automations.silence(there), automations.telling(there)
        seconds = silent_after or max(installed or automations.SILENT_SECONDS, automations.MIN_SILENT_SECONDS)
        wanted = automations.healing(seconds)
        if webhook is not None and not dry_run:
            notify = automations.save_webhook(webhook)
        if notify is not None:
            told = automations.block_of(client, notify)
        elif webhook is not None or quiet:
            told = None
        if told is not None:
            wanted += automations.notifying(*told)
        found = automations.changes(client, wanted, keeps_notifications=not (quiet or notify))
        if not dry_run:
            automations.install(client, found)
        return found


@ops_app.command("deploy")
def deploy(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Default: all.")] = None,
    pool: Annotated[str, typer.Option(help="Work pool that takes their runs.")] = "cpu",
    project: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="In which runs work on the workers' machines. Default: where prefect.yaml is."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="What the nightly run and the canary run by, a TOML file. Default: what prefect.yaml has for them."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Bring the deployments of this folder's prefect.yaml to the server, on a work pool.

    Pools and block types are made where they are not there. Deployments that are there move to the pool.
    """
    with one_line_errors(debug):
        from tasks.runtime.prefect_server import PREFECT_HOME, prefect_server

        with prefect_server(PREFECT_HOME):
            # Not before: Prefect takes the server's address when it is imported.
            from deployments import pools

            if pools.deploy(Path.cwd(), pool, names or (), project=project, config=config):
                typer.echo(f"no worker of pool {pool} is online; start one: rollout ops worker --pool {pool}")


@ops_app.command("worker")
def worker(
    pool: Annotated[str, typer.Option(help="Work pool of type process whose runs this machine takes.")] = "cpu",
    name: Annotated[str | None, typer.Option(help="Of the worker. Default: machine, user and pool.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Runs at the same time. Default: any number.")] = None,
    spot: Annotated[
        str,
        typer.Option(metavar="aws|gce|auto|none", help="Drain at the notice that the cloud takes the machine back."),
    ] = "none",
    drain_seconds: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="From SIGTERM to the end, at the latest. Default: 120 on aws, 30 on gce, else what a run may "
            "take to stop (ROLLOUT_STOP_SECONDS), and 15.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Take runs of a pool until SIGTERM, Ctrl-C or a spot notice, and then drain.

    Draining: no run is taken any more, runs under way keep what they have and are handed back to the server. The worker
    is started again when it dies, and after an outage of the server. Exit code 0; 75 after a spot notice.
    """
    with one_line_errors(debug):
        from deployments import pools, supervision
        from rollout_core.base.errors import ConfigError

        server = os.environ.get("PREFECT_API_URL")
        if not server:
            raise ConfigError(
                "PREFECT_API_URL is not set: give the address of the Prefect server's API, or use make serve"
            )
        if spot not in SPOT:
            raise ConfigError(f"--spot {spot}: expected one of {', '.join(SPOT)}")
        pools.require_process_pool(pool)
        with suppress(KeyboardInterrupt):
            supervision.work(
                pool,
                name or supervision.worker_name(pool),
                os.environ,
                keep_server=supervision.Outages(server).is_over,
                say=lambda line: typer.echo(f"worker: {line}", err=True),
                spot=cast("Kind", spot),
                drain_seconds=drain_seconds,
                limit=limit,
            )
            raise typer.Exit(EXIT_DRAINED)


@ops_app.command("status")
def status(as_json: AsJson = False, debug: Debug = False) -> None:
    """Report on the server, pools, workers, scheduled runs, storage and database. Starts nothing.

    Exit code 0: all is well; 1: something needs a person, in lines that begin with "!".
    """
    with one_line_errors(debug):
        from deployments import probes
        from tasks.runtime.prefect_server import PREFECT_HOME

        server = probes.find_server(PREFECT_HOME, debug=debug)
        from deployments.status import look, text  # with Prefect, which takes its settings now

        found = look(server, debug=debug)
        typer.echo(found.model_dump_json(indent=2) if as_json else text(found))
        if found.problems:
            raise typer.Exit(EXIT_FAILED)


@ops_app.command("doctor")
def doctor(as_json: AsJson = False, debug: Debug = False) -> None:
    """Check versions, schedules, clock, disks, automations and access, and say what to do. Starts and changes nothing.

    Exit code 0: no check failed, though some may warn; 1: one did.
    """
    with one_line_errors(debug):
        from deployments import probes
        from tasks.runtime.prefect_server import PREFECT_HOME

        server = probes.find_server(PREFECT_HOME, debug=debug)
        from deployments.doctor import Level, examine, text  # with Prefect, which takes its settings now

        found = examine(server, debug=debug)
        typer.echo(found.model_dump_json(indent=2) if as_json else text(found))
        if any(check.level is Level.FAIL for check in found.checks):
            raise typer.Exit(EXIT_FAILED)


@ops_app.command("metrics")
def metrics(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 9464,
    every: Annotated[float, typer.Option(min=1.0, help="Seconds between looks at server, storage, database.")] = 15.0,
    debug: Debug = False,
) -> None:
    """Serve figures to Prometheus until Ctrl-C: pipeline and store, and learners and engines from ROLLOUT_EVENTS.

    deployments/grafana.json is a dashboard of them. Starts and changes nothing.
    """
    with one_line_errors(debug):
        from deployments import probes
        from rollout_core.base.errors import ConfigError
        from rollout_core.base.settings import locations
        from tasks.runtime.prefect_server import PREFECT_HOME

        server = probes.find_server(PREFECT_HOME, debug=debug)
        if server.address is None:
            raise ConfigError(server.trouble or "no Prefect server")
        from deployments.metrics import serve  # with Prefect, which takes its settings now
        from deployments.status import look
        from tasks.runtime.events import STDERR

        events = locations().events
        file = None if events in (None, STDERR) else Path(events)
        found = serve(host, port, lambda: look(probes.find_server(PREFECT_HOME)), every, file)
        followed = f"events of {file}" if file is not None else "no events: ROLLOUT_EVENTS names no file"
        typer.echo(f"metrics at http://{host}:{found}/metrics; {followed}")
        with suppress(KeyboardInterrupt):
            Event().wait()


@cloud_app.command("doctor")
def cloud_doctor(
    provider: Annotated[Literal["local", "aws", "gcp"], typer.Option("--provider", help="Where objects are kept.")],
    config: Annotated[
        Path | None,
        typer.Option("--config", help="TOML file with a [cloud] table. Default: the settings of the environment."),
    ] = None,
    form: Annotated[Literal["human", "json"], typer.Option("--format", help="json: for programs.")] = "human",
    debug: Debug = False,
) -> None:
    """Try storage, credentials, queue, secrets and machine for real, and say what to do. Leaves nothing behind.

    Exit code 0: all checks passed; 1: one did not; 2: they could not be made, such as for another provider's settings.
    """
    with one_line_errors(debug):
        from deployments.cloud_doctor import examined, text

        report = examined(provider, config)
        typer.echo(report.as_json() if form == "json" else text(report, coloured=sys.stdout.isatty()))
        if not report.is_healthy:
            raise typer.Exit(EXIT_FAILED)


def main() -> None:
    """Entry point of the `rollout` command."""
    run_app()


@app.command("ui")
def ui(
    host: Annotated[str, typer.Option("--host", help="Address to listen on; beyond loopback only with a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 4300,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Environment variable that holds the key that pages ask for.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Show runs, comparisons, samples, rollouts and models in the browser, until SIGTERM or Ctrl-C.

    The pages read the storage and the database of the settings, and change nothing. Logs come from the Prefect server
    of PREFECT_API_URL, or the one that runs in this folder.
    """
    with one_line_errors(debug):
        from rollout_core.base.errors import ConfigError
        from tasks.runtime.prefect_server import storage_and_database

        api_key = None if api_key_env is None else os.environ.get(api_key_env)
        if api_key_env is not None and not api_key:
            raise ConfigError(f"--api-key-env {api_key_env}: expected an environment variable that holds the key")

        with storage_and_database() as known:
            from deployments.ui.server import serve_ui

            objects = known.try_objects()
            try:
                known.try_database()
                database = known.database_url()
            except ConfigError as error:
                typer.echo(f"without the pages of the database: {error}", err=True)
                database = None
            serve_ui(objects, database, host=host, port=port, api_key=api_key, announce=typer.echo)


@store_app.command("serve")
def store_serve(
    database: DatabaseURL,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; beyond loopback only with a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 4747,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Server processes.")] = 1,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Environment variable that holds the API key.")
    ] = None,
    cors_allow_origin: Annotated[
        list[str] | None, typer.Option("--cors-allow-origin", help="Origin of web pages to let in; *: all. Repeatable.")
    ] = None,
    pages: Annotated[bool, typer.Option("--ui/--no-ui", help="Whether there are pages below /ui.")] = True,
    debug: Debug = False,
) -> None:
    """Serve a store over HTTP, and below /ui the pages of `rollout ui`, until SIGTERM or Ctrl-C."""
    with one_line_errors(debug):
        from deployments.ui.beside import PAGES
        from rollout_core.store.http.serve import ServeSettings, serve

        origins = tuple(cors_allow_origin or ())
        settings = ServeSettings(database, host, port, workers, api_key_env, origins, PAGES if pages else None)
        serve(settings, typer.echo)
