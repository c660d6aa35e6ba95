"""Everything on this machine, until Ctrl-C: server, work pools, all deployments, and a worker of the cpu pool.

Run: python -m deployments.serve   (what `make serve` does)
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

from flows.local_server import prefect_server
from rollout_core.errors import RolloutError

PROJECT = Path(__file__).resolve().parent.parent


def deploy_all() -> None:
    """Create the work pools and deploy what ``prefect.yaml`` lists."""
    from deployments.pools import create_pools

    create_pools()
    _prefect("--no-prompt", "deploy", "--all")


def _prefect(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "prefect", *arguments], check=True, cwd=PROJECT, env=_environment())


def _environment() -> dict[str, str]:
    # prefect.yaml's pull step takes the project's folder from here.
    return {**os.environ, "ROLLOUT_PROJECT": str(PROJECT), "PREFECT_LOGGING_LEVEL": "INFO"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pool", default="cpu", help="work pool whose runs this machine takes")
    parser.add_argument("--port", type=int, default=4200, help="of the server, when this starts one")
    arguments = parser.parse_args()
    pool = arguments.pool
    with prefect_server(Path("data/prefect"), port=arguments.port) as address:
        deploy_all()
        sys.stdout.write(
            f"\nPrefect UI: {address.removesuffix('/api')}\n"
            f"In another terminal: PREFECT_API_URL={address} {Path(sys.executable).parent / 'prefect'} "
            "deployment run nightly/nightly\n\n"
        )
        sys.stdout.flush()
        worker = subprocess.Popen(
            [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--name", f"{pool}-worker"],
            env=_environment(),
        )
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            worker.wait()
        except KeyboardInterrupt:
            worker.wait()  # Ctrl-C reached it too
        finally:
            worker.terminate()
            worker.wait()


if __name__ == "__main__":
    try:
        main()
    except RolloutError as error:
        sys.exit(f"serve: {error}")
