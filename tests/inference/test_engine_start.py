"""An engine starts within its time or not at all, and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.base.locks import SCRATCH_PREFIX, sweep
from rollout_core.inference.engines import start_in_time
from tests.store.patience import LONG, wait_until

ENGINE = """
import os, sys
from pathlib import Path
import flows
from rollout_core.config import VLLMBackend
from rollout_core.base.ids import hash_bytes
from rollout_core.inference.backend import ModelRef
from rollout_core.inference.engines import engine

if __name__ == "__main__":
    {before}
    model = ModelRef(hash_bytes(b"any"), Path(sys.argv[1]))
    with engine(VLLMBackend(max_model_len=64, max_num_seqs=8, num_threads=2), model) as running:
        print("started", flush=True)
"""

GENERATES = """
        import itertools
        from rollout_core.config import SamplingParams
        from rollout_core.inference.backend import Request

        params = SamplingParams(max_tokens=40)
        requests = (Request(f"r{number}", [5, 6, 7], params, number) for number in itertools.count())
        for count, _ in enumerate(running.stream(requests)):
            if count == 20:
                os.write(1, b"generating\\n")  # at once, as other processes write here too
"""

A_HANDLER_THAT_WAITS = """
    import logging, traceback

    class WaitsForAnotherThread(logging.Handler):
        # As Prefect's does, whose other thread may want logging's lock: then neither goes on.
        def emit(self, record):
            pass

        def flush(self):
            if logging._lock._is_owned():
                print("flushed with logging's lock held:", *traceback.format_stack(), flush=True)
                os._exit(3)

    logging.getLogger().addHandler(WaitsForAnotherThread())
"""


def program(tmp_path, before: str = "pass"):
    file = tmp_path / "program.py"
    file.write_text(ENGINE.format(before=before.strip()), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def ended(small, tmp_path_factory) -> Iterator[tuple[subprocess.CompletedProcess[str], list[Path]]]:
    """A program that has used an engine beside such a handler and come to its end, and the scratch folders it left."""
    file = program(tmp_path_factory.mktemp("ended"), A_HANDLER_THAT_WAITS)
    temporary = Path(tempfile.gettempdir(), "e")  # short, for paths of sockets
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, str(file), str(small.folder)],
        capture_output=True, text=True, timeout=500, env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    yield done, list(temporary.glob(f"{SCRATCH_PREFIX}*"))
    shutil.rmtree(temporary)


@pytest.mark.engine
def test_starting_vllm_flushes_no_handler_of_this_process_with_the_lock_of_logging_held(ended):
    done, _ = ended
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stdout + done.stderr


@pytest.mark.engine
def test_a_program_that_used_an_engine_ends_without_a_word_of_shared_memory_and_leaves_no_files(ended):
    """Python's tracker of shared memory would say that segments leaked, and that it did not find them."""
    done, left = ended
    assert "resource_tracker" not in done.stderr and "psm_" not in done.stderr, done.stderr
    assert left == []


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For the temporary files of one that is killed: vLLM's own rendezvous file stays there. Paths of sockets below it
    are short enough."""
    folder = Path(tempfile.gettempdir(), "k")
    folder.mkdir()
    yield folder
    sweep(folder, f"{SCRATCH_PREFIX}*")  # as the next process does; the names of segments are in there
    shutil.rmtree(folder)


@pytest.mark.engine
def test_ctrl_c_while_an_engine_starts_ends_the_program_and_its_engine(small, tmp_path, start_process, short_folder):
    process = start_process(str(program(tmp_path)), str(small.folder), env={"TMPDIR": str(short_folder)})
    owner = psutil.Process(process.pid)
    wait_until(lambda: process.poll() is not None or engines_of(owner))
    engine = engines_of(owner)
    assert len(engine) == 1
    # It has begun to import what it runs, and leaves Ctrl-C to its owner.
    wait_until(lambda: "vllm" in " ".join(part.path for part in memory_of(engine[0])) or not engine[0].is_running())
    for each in (*engine, owner):
        each.send_signal(signal.SIGINT)
    process.wait(timeout=LONG)
    assert process.returncode != 0
    assert psutil.wait_procs(engine, timeout=LONG)[1] == []


def engines_of(owner: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [each for each in spawned_by(owner) if "resource_tracker" not in " ".join(each.cmdline())]
    return []


@pytest.mark.engine
def test_an_owner_killed_while_its_engine_starts_leaves_no_process(small, tmp_path, start_process, short_folder):
    process = start_process(str(program(tmp_path)), str(small.folder), env={"TMPDIR": str(short_folder)})
    owner = psutil.Process(process.pid)
    deadline = time.monotonic() + LONG
    while not (engine := spawned_by(owner)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    # It has begun to import what it runs; from then on it is tied to its owner.
    while "vllm" not in " ".join(part.path for part in memory_of(engine[0])) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(engine, timeout=LONG)
    assert not alive


def spawned_by(owner: psutil.Process) -> list[psutil.Process]:
    """The engine's process, and the tracker of its semaphores, which ends by itself when nobody uses it."""
    spawned: list[psutil.Process] = []
    for child in owner.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper that has ended meanwhile
            if "spawn_main" in " ".join(child.cmdline()):
                spawned.append(child)
    return spawned


SWEEP = "from rollout_core.base.locks import sweep_scratch; sweep_scratch()"


@pytest.mark.engine
def test_an_owner_killed_while_it_generates_leaves_no_process_nor_memory_and_sockets_once_the_next_one_has_looked(
    small, tmp_path, start_process, short_folder
):
    generates = program(tmp_path)
    generates.write_text(generates.read_text() + GENERATES, encoding="utf-8")
    temporary = {"TMPDIR": str(short_folder)}
    process = start_process(str(generates), str(small.folder), env=temporary)
    assert process.stdout is not None
    while process.stdout.readline() not in ("generating\n", ""):
        pass
    engine = [child for child in psutil.Process(process.pid).children(recursive=True) if name_of(child)[:4] == "VLLM"]
    assert len(engine) == 2, "the engine and its worker"
    [folder] = [Path(path) for path in open_files(process.pid) if "rollout-scratch-engine-" in path]
    segments = [Path("/dev/shm", name) for name in (folder / "shared-memory").read_text().split()]
    assert any(segment.name.startswith("psm_") and segment.exists() for segment in segments)
    assert any(file.is_socket() for file in folder.iterdir())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(engine, timeout=LONG)
    assert not alive, "the engine outlives its owner"
    assert folder.exists()
    subprocess.run([sys.executable, "-c", SWEEP], check=True, env={**os.environ, **temporary})
    assert not folder.exists()
    assert not [segment for segment in segments if segment.exists()]


def name_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):  # a helper that has ended meanwhile
        return process.name()
    return ""


def open_files(pid: int) -> set[str]:
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found.add(os.readlink(file))
    return found


def memory_of(process: psutil.Process) -> list:
    try:
        return process.memory_maps()
    except psutil.Error:
        return []


def test_a_start_that_hangs_ends_with_the_stacks_of_all_threads_and_without_its_children(caplog, capfd):
    children: list[subprocess.Popen] = []
    may_end = threading.Event()

    def hang_in_a_native_call() -> None:
        children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]))
        may_end.wait()

    try:
        with caplog.at_level(logging.ERROR), pytest.raises(Fatal, match="start_timeout_seconds"):
            start_in_time(hang_in_a_native_call, 2.0)
        assert children[0].wait(timeout=LONG) == -signal.SIGKILL
    finally:
        may_end.set()
    for told in (caplog.text, capfd.readouterr().err):
        assert "hang_in_a_native_call" in told


def test_a_start_says_where_it_hangs_even_when_logging_is_what_hangs(capfd):
    may_end = threading.Event()

    def hang_with_the_lock() -> None:
        with logging._lock:
            may_end.wait()

    try:
        with pytest.raises(Fatal):
            start_in_time(hang_with_the_lock, 1.0)
        assert "hang_with_the_lock" in capfd.readouterr().err
    finally:
        may_end.set()
        with logging._lock:  # free again
            pass


def test_a_start_raises_what_it_raises_and_gives_what_it_gives():
    def fail() -> None:
        raise ValueError("as it is")

    assert start_in_time(lambda: 5, 10.0) == 5
    with pytest.raises(ValueError, match="as it is"):
        start_in_time(fail, 10.0)


def test_an_engine_process_that_vllm_does_not_take_ends():
    from rollout_core.inference.engine_process import EngineProcess, started_ahead

    def running() -> list[EngineProcess]:
        return [child for child in multiprocessing.active_children() if isinstance(child, EngineProcess)]

    with pytest.raises(ConfigError), started_ahead({}):
        [process] = running()
        raise ConfigError("no such model")
    assert running() == [] and process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(("cores", "own", "threads"), [(1, None, "1"), (2, None, "1"), (3, None, None), (2, "0", None)])
def test_an_engine_of_one_thread_is_bound_to_no_core(monkeypatch, cores, own, threads):
    """vLLM would bind those of all runs of a machine to its first core."""
    from rollout_core.config import VLLMBackend, inference
    from rollout_core.inference.vllm_backend import BINDING, THREADS, thread_environment

    monkeypatch.setattr(inference, "bound_cores", lambda: cores)
    for name in (BINDING, THREADS):
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(BINDING, own)
    found = thread_environment(VLLMBackend())
    assert (found.get(THREADS), found.get(BINDING)) == (threads, threads and "nobind")
    assert thread_environment(VLLMBackend(num_threads=2))[THREADS] == "2"


@pytest.mark.engine
def test_on_a_cpu_an_engine_process_that_waits_for_the_other_sleeps(monkeypatch, tmp_path):
    import zmq
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

    from rollout_core.inference.engine_waits import LONGEST_SLEEP_MS, sleep_while_waiting

    monkeypatch.setattr(SpinCondition, "__init__", SpinCondition.__init__)
    interval = "SHM_READER_RECHECK_INTERVAL_MS"
    monkeypatch.setattr(shm_broadcast, interval, getattr(shm_broadcast, interval))
    sleep_while_waiting()
    for may_wait_for_ever in (True, False):  # a worker for its next step, an engine for its worker's answer
        wait = MessageQueue.ReadTimeoutWithWarnings(timeout=None, should_warn=not may_wait_for_ever)
        assert wait.timeout_ms() == LONGEST_SLEEP_MS, "a notification that is lost costs no more"
    with zmq.Context() as context:
        address = f"ipc://{tmp_path}/notify"
        writer = SpinCondition(is_reader=False, context=context, notify_address=address)
        reader = SpinCondition(is_reader=True, context=context, notify_address=address)
        try:
            reader.wait(timeout_ms=1)  # spins, as its socket may not be connected yet
            assert not reader.poller.poll(timeout=0)
            wait_until(lambda: time.monotonic() > reader.last_read + reader.busy_loop_s)
            reader.record_read()
            wait_until(lambda: time.monotonic() > reader.last_read + reader.busy_loop_s)
            has_written = threading.Event()

            def write() -> None:
                has_written.set()
                writer.notify()

            later = threading.Timer(0.1, write)
            later.start()
            reader.wait(timeout_ms=round(1000 * LONG))
            has_waited = has_written.is_set()  # one that spins returns before
            later.join()  # a socket is closed by nobody while another thread sends
            assert has_waited
        finally:
            for end in (writer, reader):
                end.local_notify_socket.close(0)
            reader.read_cancel_socket.close(0)
            reader.write_cancel_socket.close(0)


def test_on_a_cpu_no_notification_is_lost_of_two_messages_that_follow_each_other_at_once(monkeypatch, tmp_path):
    import zmq
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    from rollout_core.inference.engine_waits import sleep_while_waiting

    monkeypatch.setattr(SpinCondition, "__init__", SpinCondition.__init__)
    interval = "SHM_READER_RECHECK_INTERVAL_MS"
    monkeypatch.setattr(shm_broadcast, interval, getattr(shm_broadcast, interval))
    sleep_while_waiting()
    with zmq.Context() as context:
        address = f"ipc://{tmp_path}/notify"
        writer = SpinCondition(is_reader=False, context=context, notify_address=address)
        reader = SpinCondition(is_reader=True, context=context, notify_address=address)
        reader.last_read = 0.0
        try:
            while not reader.poller.poll(timeout=1):
                writer.notify()  # until it is connected
            while reader.poller.poll(timeout=50):
                reader.wait(timeout_ms=0)
            for _ in range(300):
                writer.notify()
                assert reader.poller.poll(timeout=10_000), "it was dropped, as it came soon after another one"
                reader.wait(timeout_ms=0)
        finally:
            for end in (writer, reader):
                end.local_notify_socket.close(0)
            reader.read_cancel_socket.close(0)
            reader.write_cancel_socket.close(0)


@pytest.mark.engine
@pytest.mark.parametrize("which", [pytest.param("VLLM::EngineCor", marks=pytest.mark.campaign), "VLLM::Worker"])
def test_an_engine_killed_while_it_starts_is_started_again_with_the_stage(small, tmp_path, which):
    """As the kernel does where memory runs out. A fault of the configuration would end the night."""
    from rollout_core.config import VLLMBackend
    from rollout_core.inference.vllm_backend import VLLMEngine

    killed = threading.Event()

    def kill() -> None:
        owner = psutil.Process()
        while not killed.is_set():
            for child in owner.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.name().startswith(which):
                        child.kill()
                        killed.set()
            time.sleep(0.01)

    killing = threading.Thread(target=kill, daemon=True)
    killing.start()
    try:
        with pytest.raises(
            Recoverable, match=r"of vLLM's engine was killed while it started .*; it is started anew when"
        ):
            VLLMEngine(VLLMBackend(max_model_len=64, max_num_seqs=8, num_threads=1), small)
        assert killed.is_set()
    finally:
        killed.set()
        killing.join()


def test_only_who_kills_makes_a_start_that_is_tried_again(tmp_path, monkeypatch):
    """An engine that raises before vLLM logs it says why, and so does one whose native code fails each time."""
    from rollout_core.inference import engine_process
    from rollout_core.inference.vllm_backend import _crash

    monkeypatch.setenv(engine_process._FILES, str(tmp_path))
    assert engine_process.engine_failure(tmp_path) is None
    for error in (RuntimeError("WorkerProc initialization failed due to an exception"), ImportError("no kernel")):
        with pytest.raises(type(error)), engine_process.noting_reason(engine_process.ENGINES):
            raise error
    assert engine_process.engine_failure(tmp_path) == "ImportError: no kernel"
    assert _crash([0, 1, -signal.SIGKILL, -signal.SIGTERM]) is None
    assert "SIGABRT" in str(_crash([1, -signal.SIGABRT]))


@pytest.mark.engine
def test_a_start_that_fails_says_why_in_the_engines_own_words(small, tmp_path):
    from rollout_core.config import VLLMBackend
    from rollout_core.inference.backend import ModelRef
    from rollout_core.inference.vllm_backend import VLLMEngine

    folder = tmp_path / "model"
    shutil.copytree(small.folder, folder)
    [weights] = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ConfigError) as caught:
        VLLMEngine(VLLMBackend(max_model_len=64, max_num_seqs=8, num_threads=1), ModelRef(small.content_id, folder))
    assert "could not start with model" in str(caught.value) and "See root cause" not in str(caught.value)
    assert "SafetensorError" in str(caught.value), str(caught.value)
