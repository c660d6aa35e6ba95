"""Everything on this machine, until Ctrl-C: server, work pools, all deployments, and a worker of the cpu pool.

Server and worker are started again when they die, and the runs of a worker that died are tried again.

Run: python -m deployments.serve   (what `make serve` does)
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from deployments.supervision import Outages, work, worker_name
from rollout_core.base.errors import RolloutError
from rollout_core.base.logs import require_form, say
from tasks.runtime.prefect_server import PREFECT_HOME, keep_server, prefect_server

PROJECT = Path(__file__).resolve().parent.parent


def _environment() -> dict[str, str]:
    # prefect.yaml's pull step takes the project's folder from here.
    return {**os.environ, "ROLLOUT_PROJECT": str(PROJECT), "PREFECT_LOGGING_LEVEL": "INFO"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pool", default="cpu", help="work pool whose runs this machine takes")
    parser.add_argument("--port", type=int, default=4200, help="of the server, when this starts one")
    parser.add_argument("--config", type=Path, help="what the nightly run and the canary run by, a TOML file")
    arguments = parser.parse_args()
    require_form()
    is_configured = bool(os.environ.get("PREFECT_API_URL"))
    with prefect_server(PREFECT_HOME, port=arguments.port, say=_say) as address:
        _say("deploying what prefect.yaml lists ...")
        # Not before: Prefect takes the server's address when it is imported.
        from deployments.listed import deploy_all, unready_schedules

        deploy_all(PROJECT, arguments.pool, arguments.config)
        for line in unready_schedules(PROJECT, arguments.config):
            _say(line)
        sys.stdout.write(
            f"\nPrefect UI: {address.removesuffix('/api')}\n"
            f"In another terminal: PREFECT_API_URL={address} {Path(sys.executable).parent / 'prefect'} "
            "deployment run nightly/nightly\n\n"
        )
        sys.stdout.flush()
        _work(arguments.pool, None if is_configured else address)


def _work(pool: str, own_server: str | None) -> None:
    """Take runs of a pool, until Ctrl-C or SIGTERM, and keep the folder's server running, if that is used."""
    port = urlsplit(own_server or "").port
    outages = Outages(os.environ["PREFECT_API_URL"])
    keep = outages.is_over if port is None else lambda: keep_server(PREFECT_HOME, port, _say)
    try:
        work(pool, worker_name(pool), _environment(), keep_server=keep, say=_say)
    except KeyboardInterrupt:
        _say("ending ...")


def _say(line: str) -> None:
    say(line, name="serve")


if __name__ == "__main__":
    try:
        main()
    except RolloutError as error:
        sys.exit(f"serve: {error}")
