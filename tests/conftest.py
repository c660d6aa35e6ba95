"""What all tests share: tiny models made here, one Prefect server, and clean settings for each test."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before prefect or torch is imported anywhere.
os.environ.update(
    {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONHASHSEED": "0",
        # As `RemoteFiles` has it: otherwise gcsfs asks Google for the kind of a bucket, and the first write stalls.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        # See flows/__init__.py: tests run beside servers and each other's processes.
        "OMP_WAIT_POLICY": "passive",
    }
)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has what it starts in the background ignore it, and so would all processes that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

from tests.gcp_server import GoogleCloud, google_cloud
from tests.object_files import BUCKET
from tests.server_logs import ServerLogs

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT / "examples"), str(PROJECT / "examples" / "library")]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of about 0.1 million random parameters with a tokenizer, in Hugging Face format."""
    from make_tiny import make_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(folder, hidden_size=64, num_layers=2, seed=1)
    return folder


@pytest.fixture(scope="session")
def other_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    from make_tiny import make_model

    folder = tmp_path_factory.mktemp("models") / "other"
    make_model(folder, hidden_size=64, num_layers=2, seed=2)
    return folder


@pytest.fixture
def weights_stay_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may be built on the meta device, where tensors have no bytes; any other load fails the test.

    Every model class, the automatic ones included, comes to this method of transformers.
    """
    from transformers import PreTrainedModel

    load = PreTrainedModel.from_pretrained.__func__

    def refuse(cls: Any, *arguments: Any, **options: Any) -> Any:
        assert options.get("device_map") == "meta", "no weights may be loaded here"
        return load(cls, *arguments, **options)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(refuse))


@pytest.fixture(autouse=True)
def clean_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has its own storage, database and cache."""
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'objects'}")
    monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{tmp_path / 'rollout.db'}")
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def prefect_database(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Database of a Prefect server that has never run. Making its tables is half of a server's start."""
    from rollout_core.base.locks import exclusive

    root = tmp_path_factory.getbasetemp()
    root = root if worker_id == "master" else root.parent  # which the workers share
    made, home = root / "prefect.db", root / "prefect-tables"
    with exclusive(root / "prefect-database.lock"):
        if not made.exists():
            subprocess.run(
                [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"],
                env={**os.environ, "PREFECT_HOME": str(home)}, cwd=root, check=True, capture_output=True, timeout=300,
            )  # fmt: skip
            (home / "prefect.db").rename(made)
    return made


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[str]:
    """Address of one real Prefect server for the whole session, whose log is free of errors at its end."""
    from flows.connections import LOG, prefect_server as running_server

    home = tmp_path_factory.mktemp("prefect")
    shutil.copy(prefect_database, home)
    logs = ServerLogs()
    logs.watch(home / LOG)
    before = {name: os.environ.get(name) for name in ("PREFECT_HOME", "PREFECT_API_URL")}
    os.environ.pop("PREFECT_API_URL", None)
    with running_server(home) as address:
        from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

        with temporary_settings({PREFECT_API_URL: address, PREFECT_HOME: home}):
            yield address
    for name, value in before.items():
        if value is not None:
            os.environ[name] = value
    logs.check()


@pytest.fixture
def server_logs() -> Iterator[ServerLogs]:
    """Logs of servers and workers that the test starts; an unexpected error in one fails it."""
    logs = ServerLogs()
    yield logs
    logs.check()


@dataclass(frozen=True)
class SortingTask:
    """A few rows of the example's task."""

    folder: Path
    sft: Path
    prompts: Path
    held_out: Path


@pytest.fixture(scope="session")
def sorting_task(tmp_path_factory: pytest.TempPathFactory) -> SortingTask:
    """Data files of a small sorting task."""
    import json

    from make_tiny import make_problems

    folder = tmp_path_factory.mktemp("data")
    problems = make_problems(96, random.Random(3))

    def write(name: str, rows: list[dict[str, str]]) -> Path:
        path = folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return SortingTask(
        folder,
        write("sft.jsonl", [{"prompt": prompt, "completion": answer} for prompt, answer in problems[:64]]),
        write("prompts.jsonl", [{"prompt": prompt, "answer": answer} for prompt, answer in problems[:64]]),
        write("held-out.jsonl", [{"prompt": prompt, "answer": answer} for prompt, answer in problems[64:]]),
    )


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, Any]]:
    """Storage options for a moto server with one bucket, in a process of its own."""
    import s3fs

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    options: dict[str, Any] = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "test", "secret": "test"}
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        s3fs.S3FileSystem(**options).call_s3("create_bucket", Bucket=BUCKET)
        yield options
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="session")
def google() -> Iterator[GoogleCloud]:
    """A stand-in for Google Cloud, with one bucket."""
    with google_cloud(BUCKET) as server:
        yield server


@pytest.fixture(scope="session")
def gcs(google: GoogleCloud) -> dict[str, Any]:
    """Storage options for its buckets."""
    return {"endpoint_url": google.url, "token": "anon"}


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python processes in the test's environment; all are killed at the end, with what they started."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **options) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=options.pop("stdout", subprocess.PIPE),
            stderr=subprocess.STDOUT,
            text=True,
            cwd=options.pop("cwd", PROJECT),
            env={**os.environ, **options.pop("env", {})},
            start_new_session=True,
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
