"""What all tests share: tiny models made here, one Prefect server, and clean settings for each test."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
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
from hypothesis import settings

from rollout_core.base.collector import collect_seldom
from tests.objects.object_files import BUCKET
from tests.support import forked, machine
from tests.support.gcp_server import GoogleCloud, google_cloud
from tests.support.leftovers import Leftovers, TemporaryFolder
from tests.support.server_logs import OF_SEVERAL_TESTS, ServerLogs

PROJECT = Path(__file__).resolve().parent.parent
# An example's usual time limit of 0.2 s is one for a quiet machine.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
sys.path[:0] = [str(PROJECT / "examples"), str(PROJECT / "examples" / "library")]


TEMPORARY, LEFTOVERS = pytest.StashKey[TemporaryFolder](), pytest.StashKey[Leftovers]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mix", metavar="SEED", help="run the files in an order mixed by this seed; 'new' draws one")


@pytest.hookimpl(tryfirst=True)  # before pytest makes its own folder
def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the tests are collected, which imports most of what there is
    if hasattr(config, "workerinput"):  # a process of pytest-xdist, whose controller has made the folder
        root = Path(config.workerinput["temporary"])
        TemporaryFolder.use(root, os.environ["PYTEST_XDIST_WORKER"])
        config.option.mix = config.workerinput["mix"]
    else:
        config.stash[TEMPORARY] = TemporaryFolder(config)
        root = config.stash[TEMPORARY].root
    if config.option.mix == "new":
        config.option.mix = str(random.SystemRandom().randrange(10**6))
    config.stash[LEFTOVERS] = Leftovers(root)
    config.pluginmanager.register(config.stash[LEFTOVERS])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist what its controller has chosen."""
    node.workerinput["temporary"] = str(node.config.stash[TEMPORARY].root)
    node.workerinput["mix"] = node.config.option.mix


SLOW = PROJECT / "tests" / "slow.txt"
"""Tests that took at least 0.2 s each, as `python -m tests.costs` measured them: `make test-fast` leaves them out."""
ONE_ENGINE = re.compile(r"tests/inference/test_vllm\w*\.py")
"""Files whose tests share the session's vLLM engine, so one process of pytest-xdist runs them all."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests run in one process, as with ``--dist loadfile``, and so do those that share an engine."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return ONE_ENGINE.pattern if ONE_ENGINE.fullmatch(file) else file

    return Scheduling(config, log)


def pytest_report_header(config: pytest.Config) -> list[str]:
    lacks = machine.missing()
    return [
        *([f"files in the order of --mix {config.option.mix}"] if config.option.mix else []),
        *(["this machine lacks programs, so some tests are skipped:", *lacks] if lacks else []),
    ]


@pytest.hookimpl(tryfirst=True)  # before items are chosen by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = set(SLOW.read_text().split())
    for item in items:
        if item.nodeid.split("[")[0] in slow:
            item.add_marker(pytest.mark.slow)
    if config.option.mix:
        files = sorted({item.path for item in items})
        random.Random(config.option.mix).shuffle(files)
        items.sort(key=lambda item: files.index(item.path))  # tests of one file keep their order


def pytest_collection_finish() -> None:
    collect_seldom()
    gc.collect()
    gc.freeze()
    gc.enable()
    forked.begin()  # some libraries set variables when they are imported


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show tables: tests record lines of them as properties named "table: " and the heading."""
    tables: dict[str, list[str]] = {}
    for report in (one for reports in terminalreporter.stats.values() for one in reports):
        for name, line in getattr(report, "user_properties", ()) if getattr(report, "when", "") == "call" else ():
            if name.startswith("table: "):
                tables.setdefault(name.removeprefix("table: "), []).append(line)
    for heading, lines in tables.items():
        terminalreporter.write_line("")
        for line in (heading, *sorted(lines)):
            terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    yield  # the processes of pytest-xdist have ended
    if TEMPORARY not in session.config.stash:
        return
    left = session.config.stash[LEFTOVERS].segments()
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        sys.stderr.write(f"\n{len(left)} segments of shared memory are left by tests:\n" + "\n".join(left) + "\n")
    passed = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    session.config.stash[TEMPORARY].keep = not passed or bool(left)
    if session.config.option.xmlpath:
        outcome = {"exit_status": int(exitstatus), "collected": session.testscollected}
        Path(session.config.option.xmlpath).with_suffix(".json").write_text(json.dumps(outcome), encoding="utf-8")


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # Triton prints what is left alone in the end
    if TEMPORARY in config.stash:
        config.stash[TEMPORARY].end()


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Made first, so it looks last: when the session's own servers have ended."""
    yield
    forked.close()
    left = request.config.stash[LEFTOVERS].found()
    assert not left, f"{OF_SEVERAL_TESTS}{len(left)} things are left by tests:\n" + "\n".join(left)


@pytest.fixture(scope="session", autouse=True)
def wardens_are_forked() -> Iterator[None]:
    """Child processes of this one that import much, too."""
    from rollout_core.base.isolation import child

    programs = SimpleNamespace(**{**vars(subprocess), "Popen": forked.start_warden})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "subprocess", programs)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of about 0.1 million random parameters with a tokenizer, in Hugging Face format."""
    from make_tiny import make_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(folder, hidden_size=64, num_layers=2, seed=1)
    return folder


@pytest.fixture(scope="session")
def half_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its weights in bfloat16, as most models on the hub have them."""
    from rollout_core.models.precision import cast_model

    folder = tmp_path_factory.mktemp("models") / "half"
    cast_model(tiny_model, folder, "bfloat16")
    return folder


@pytest.fixture(scope="session")
def other_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    from make_tiny import make_model

    folder = tmp_path_factory.mktemp("models") / "other"
    make_model(folder, hidden_size=64, num_layers=2, seed=2)
    return folder


@pytest.fixture(scope="session")
def chat_base(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with ChatML as its template, which ends turns by another token than its EOS."""
    from tests.models.chat_models import make_chat_base

    folder = tmp_path_factory.mktemp("models") / "chat-base"
    make_chat_base(tiny_model, folder)
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


SET_BY_NANNIES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
)
"""Variables that Dask's nannies set in the process that starts them, for good."""


@pytest.fixture(autouse=True)
def clean_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has its own storage, database and cache, draws what it draws whatever ran before it in its process,
    and leaves the environment that it found."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
    for name in SET_BY_NANNIES:
        value = os.environ.get(name, "")
        monkeypatch.setenv(name, value)  # so that it is put back
        if not value:
            monkeypatch.delenv(name)
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'objects'}")
    monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{tmp_path / 'rollout.db'}")
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def prefect_database(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Database of a Prefect server that has never run. Making its tables is half of a server's start."""
    from rollout_core.base.locks import exclusive
    from tasks.runtime.server_tables import kept_tables

    root = tmp_path_factory.getbasetemp()
    root = root if worker_id == "master" else root.parent  # which the workers share
    made = root / "rollout" / kept_tables().name
    with exclusive(root / "prefect-database.lock"):
        if not made.exists():
            home = root / "prefect-tables"
            home.mkdir(exist_ok=True)
            done = forked.run(
                [sys.executable, "-c", "from tasks.runtime.server_tables import make_tables; make_tables()"],
                env={**os.environ, "PREFECT_HOME": str(home), "XDG_CACHE_HOME": str(root), "PYTHONPATH": str(PROJECT)},
                cwd=root, timeout=300,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
    return made


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[str]:
    """Address of one real Prefect server for the whole session, whose log is free of errors at its end."""
    import prefect.main  # noqa: F401 - sets logging up, which would take a test's own handlers away

    from tasks.runtime.prefect_server import SERVER_SETTINGS
    from tests.support.prefect_servers import prefect_process

    home, logs = tmp_path_factory.mktemp("prefect"), ServerLogs()
    log = logs.watch(home / "server.log")
    with prefect_process(home, prefect_database, log) as address, pytest.MonkeyPatch.context() as patch:
        for name, value in {**SERVER_SETTINGS, "PREFECT_API_URL": address, "PREFECT_HOME": str(home)}.items():
            patch.setenv(name, value)
        from prefect.context import refresh_global_settings_context
        from prefect.events.worker import EventsWorker
        from prefect.logging.handlers import APILogWorker
        from prefect.settings import (
            PREFECT_API_URL,
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
            PREFECT_HOME,
            temporary_settings,
        )

        # Threads of Prefect's have no context, so for them it would start a server of their own.
        refresh_global_settings_context()
        # At the end of a flow that sends heartbeats Prefect waits up to a second for the thread that does.
        settings = {PREFECT_API_URL: address, PREFECT_HOME: home, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
        with temporary_settings(settings):
            yield address
        # What is not sent yet would be tried for a minute after the server's end, when this process ends.
        APILogWorker.drain_all()
        EventsWorker.drain_all()
    refresh_global_settings_context()
    logs.check(OF_SEVERAL_TESTS)


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
        process = forked.Process(
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
        # While processes of its group live, no other gets its number: one that has it then was started later.
        if process.poll() is None or not Path(f"/proc/{process.pid}").exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
