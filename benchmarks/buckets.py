"""How fast files go to S3 and Google Cloud Storage and back beside the clouds' own clients, and what memory it takes.

Each case is a process of its own; both sides take turns, and of each figure the median counts. The services are moto's
and the tests' stand-in, on this machine and its processors: what counts is the ratio of two rows, not the speed. What
the client's and the service's process had of the processors is told beside it: where the service's takes most of the
time, the service is what bounds. ``--endpoint-s3`` measures another service that speaks S3.

Run: python benchmarks/buckets.py [--mib 256] [--records 1000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

from rollout_core.objects import ObjectStore

BUCKET = "bench"
RECORD_BYTES = 2_000
THREADS = 16
KINDS = ("S3", "GCS")

T = TypeVar("T")
Figures = dict[str, tuple[float, float, float]]
"""Of each thing that was measured: seconds, and seconds of processors of the client and of the service."""


class Clock:
    """Seconds that pass, and seconds of processors that this process and the service had meanwhile."""

    def __init__(self, service: int) -> None:
        self._service = psutil.Process(service) if service else None
        self.taken: dict[str, tuple[float, float, float]] = {}

    def time(self, what: str, action: Callable[[], T]) -> T:
        began = self._now()
        done = action()
        wall, own, service = (now - then for now, then in zip(self._now(), began, strict=True))
        self.taken[what] = wall, own, service
        return done

    def _now(self) -> tuple[float, float, float]:
        served = self._service.cpu_times() if self._service is not None else None
        return time.perf_counter(), time.process_time(), served.user + served.system if served else 0.0


def ours(kind: str, endpoint: str) -> ObjectStore:
    if kind == "S3":
        options = {"endpoint_url": endpoint, "key": "k", "secret": "s"}
        return ObjectStore.from_url(f"s3://{BUCKET}/ours", storage_options=options)
    return ObjectStore.from_url(f"gs://{BUCKET}/ours", storage_options={"endpoint_url": endpoint, "token": "anon"})


def measure_ours(kind: str, endpoint: str, source: Path, num_records: int, clock: Clock) -> None:
    objects = ours(kind, endpoint)
    objects.exists(objects.put_bytes(b"warm"))
    content_id = clock.time("put", lambda: objects.put_file(source))
    clock.time("get", lambda: objects.get_file(content_id, source.with_suffix(".back")))
    peak(clock)
    with ThreadPoolExecutor(THREADS) as pool:
        found = clock.time("records put", lambda: list(pool.map(objects.put_bytes, records(num_records))))
        clock.time("records get", lambda: list(pool.map(objects.get_bytes, found)))


def measure_client(kind: str, endpoint: str, source: Path, num_records: int, clock: Clock) -> None:
    upload, download, put, get = (boto3_client if kind == "S3" else google_client)(endpoint)
    put("warm", b"warm")
    clock.time("put", lambda: upload("file", source))
    clock.time("get", lambda: download("file", source.with_suffix(".back")))
    peak(clock)
    with ThreadPoolExecutor(THREADS) as pool:
        clock.time("records put", lambda: list(pool.map(lambda one: put(*one), enumerate(records(num_records)))))
        clock.time("records get", lambda: list(pool.map(get, range(num_records))))


def peak(clock: Clock) -> None:
    clock.taken["MiB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 0.0, 0.0)


def boto3_client(endpoint: str) -> tuple[Callable[..., Any], ...]:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id="k", aws_secret_access_key="s", region_name="us-east-1",
        config=Config(max_pool_connections=THREADS),
    )  # fmt: skip
    return (
        lambda name, path: client.upload_file(str(path), BUCKET, f"plain/{name}"),
        lambda name, path: client.download_file(BUCKET, f"plain/{name}", str(path)),
        lambda name, data: client.put_object(Bucket=BUCKET, Key=f"plain/{name}", Body=data),
        lambda name: client.get_object(Bucket=BUCKET, Key=f"plain/{name}")["Body"].read(),
    )


def google_client(endpoint: str) -> tuple[Callable[..., Any], ...]:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    client = storage.Client(
        project="bench", credentials=AnonymousCredentials(), client_options={"api_endpoint": endpoint}
    )
    bucket = client.bucket(BUCKET)
    return (
        lambda name, path: bucket.blob(f"plain/{name}", chunk_size=16 * 2**20).upload_from_filename(str(path)),
        lambda name, path: bucket.blob(f"plain/{name}").download_to_filename(str(path)),
        lambda name, data: bucket.blob(f"plain/{name}").upload_from_string(data),
        lambda name: bucket.blob(f"plain/{name}").download_as_bytes(),
    )


def records(count: int) -> list[bytes]:
    draw = random.Random(os.getpid())
    return [draw.randbytes(RECORD_BYTES) for _ in range(count)]


def in_a_process(which: str, kind: str, endpoint: str, source: Path, num_records: int, service: int) -> Figures:
    command = [sys.executable, __file__, "--case", which, kind, endpoint, str(source), str(num_records), str(service)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def serve(kind: str) -> tuple[subprocess.Popen[str], str]:
    """A service in a process of its own, with one bucket."""
    command = [sys.executable, __file__, "--serve", kind]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().strip()


def serve_here(kind: str) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if kind == "GCS":
        from tests.support.gcp_server import google_cloud

        with google_cloud(BUCKET) as server:
            print(server.url, flush=True)
            time.sleep(10**6)
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    import botocore.session

    url = "http://{}:{}".format(*moto.get_host_and_port())
    client = botocore.session.get_session().create_client(
        "s3", endpoint_url=url, aws_access_key_id="k", aws_secret_access_key="s", region_name="us-east-1"
    )
    client.create_bucket(Bucket=BUCKET)
    print(url, flush=True)
    time.sleep(10**6)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Files to S3 and Google Cloud Storage and back, beside the clouds' own clients."
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--endpoint-s3", help="of a service with a bucket 'bench' and the keys k and s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--case", nargs=6, help=argparse.SUPPRESS)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve_here(options.serve)
    if options.case:
        which, kind, endpoint, source, num_records, service = options.case
        clock = Clock(int(service))
        (measure_ours if which == "ours" else measure_client)(kind, endpoint, Path(source), int(num_records), clock)
        print(json.dumps(clock.taken))
        return None
    title = f"{options.mib} MiB, and {options.records:,} records of {RECORD_BYTES:,} bytes by {THREADS} threads"
    table = Table(title=f"{title}; medians of {options.rounds}, in brackets seconds of processors: client, service")
    for column in ("service", "by", "put MiB/s", "get MiB/s", "put records/s", "get records/s", "peak MiB"):
        table.add_column(column, justify="left" if column in ("service", "by") else "right")
    for kind in options.kinds:
        found = measured(kind, options)
        for name, rounds in found.items():
            sizes = {
                "put": options.mib,
                "get": options.mib,
                "records put": options.records,
                "records get": options.records,
            }
            cells = [cell(size, [figures[what] for figures in rounds]) for what, size in sizes.items()]
            table.add_row(kind, name, *cells, f"{max(figures['MiB'][0] for figures in rounds):,.0f}")
        first, second = found.values()
        ratios = [ratio([one[what] for one in first], [one[what] for one in second]) for what in sizes]
        table.add_row(kind, "ratio", *ratios, "")
    Console(width=140).print(table)
    return None


def measured(kind: str, options: argparse.Namespace) -> dict[str, list[Figures]]:
    """By client; each in turn has a fresh process, a fresh service and a fresh file."""
    names = {"client": "boto3" if kind == "S3" else "google-cloud-storage", "ours": "rollout"}
    found: dict[str, list[Figures]] = {name: [] for name in names.values()}
    for which in [*names] * options.rounds:
        service, endpoint = (None, options.endpoint_s3) if kind == "S3" and options.endpoint_s3 else serve(kind)
        try:
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder) / "file"
                with source.open("wb") as file:
                    for _ in range(options.mib):
                        file.write(os.urandom(2**20))
                pid = service.pid if service is not None else 0
                found[names[which]].append(in_a_process(which, kind, endpoint, source, options.records, pid))
        finally:
            if service is not None:
                service.kill()
                service.wait()
    return found


def cell(size: int, rounds: list[tuple[float, float, float]]) -> str:
    wall, own, service = (statistics.median(column) for column in zip(*rounds, strict=True))
    return f"{size / wall:,.0f} ({own:.1f}, {service:.1f})"


def ratio(first: list[tuple[float, float, float]], second: list[tuple[float, float, float]]) -> str:
    """How much of the first's speed the second has."""
    return f"{statistics.median(one[0] for one in first) / statistics.median(one[0] for one in second):.2f}"


if __name__ == "__main__":
    main()
