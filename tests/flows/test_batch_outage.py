"""Object storage that is away, or a full disk, in the middle of a batch: a clear end, and the next run goes on."""

from __future__ import annotations

import json
import os
import resource
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.flows.conftest import wait_for, write_toml
from tests.objects.object_files import BUCKET
from tests.support import forked

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]

NUM_PROMPTS = 120


class Wire:
    """A port that leads to another one until it is cut."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._is_up = True
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)  # which ends its thread's wait, too
        self._server.close()
        self.cut()

    def cut(self) -> None:
        self._is_up = False
        for end in list(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._is_up = True

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            if not self._is_up:
                near.close()
                continue
            far = socket.create_connection(self._target)
            self._open |= {near, far}
            threading.Thread(target=self._connect, args=(near, far), daemon=True).start()

    def _connect(self, near: socket.socket, far: socket.socket) -> None:
        back = threading.Thread(target=self._copy, args=(far, near), daemon=True)
        back.start()
        self._copy(near, far)
        back.join()
        for end in (near, far):
            self._open.discard(end)
            end.close()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Batch:
    """A set of prompts, its own database, and the command that completes it."""

    def __init__(self, folder: Path, model: Path, storage: dict[str, str]) -> None:
        self.folder = folder
        rows = ({"prompt": f"sort {number} =", "id": f"row-{number}"} for number in range(NUM_PROMPTS))
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_toml(
            folder / "batch.toml",
            {
                "model": {"uri": str(model)},
                "sampling": {"max_tokens": 8},
                "input": {"glob": "prompts.jsonl"},
                "output": {"dir": "out"},
                "workers": {"shard_size": 40, "claim_size": 8},
                "backend": {"kind": "scripted", "delay_seconds": 0.05},
            },
        )
        places = {"ROLLOUT_DATABASE": f"sqlite:///{folder / 'rollout.db'}", "ROLLOUT_CACHE": str(folder / "cache")}
        self._environment = {**os.environ, **places, **storage}

    def start(self) -> subprocess.Popen[str]:
        """`rollout infer batch`, which does not wait as long as it would before it tries again."""
        program = (
            "import rollout_core.base.errors as errors; errors.RetryHint.delay_for_try = lambda *_: 0.1;"
            "from flows.cli import main; main()"
        )
        return forked.Process(
            [sys.executable, "-c", program, "infer", "batch", "--config", "batch.toml"],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def num_done(self) -> int:
        """Samples complete."""
        if (self.folder / "rollout.db").exists():
            address = f"file:{self.folder / 'rollout.db'}?mode=ro"
            with suppress(sqlite3.OperationalError), closing(sqlite3.connect(address, uri=True)) as database:
                return database.execute("SELECT count(*) FROM rollouts WHERE status = 'succeeded'").fetchone()[0]
        return 0

    def fail_while(self, fault: Callable[[int], object]) -> int:
        """Start, call ``fault`` with the process's id amid the work, and see it fail; how many samples were done."""
        run = self.start()
        wait_for(lambda: self.num_done() >= 10, "some samples", process=run)
        fault(run.pid)
        said, _ = run.communicate(timeout=500)
        assert run.returncode == 1, said[-3000:]
        assert said.splitlines()[-1].startswith("rollout: "), said[-3000:]
        assert not (self.folder / "out" / "completions.jsonl").exists()
        done = self.num_done()
        assert 10 <= done < NUM_PROMPTS
        return done

    def finish_after(self, done: int) -> None:
        """Start again, and see the rest done."""
        run = self.start()
        said, _ = run.communicate(timeout=500)
        assert run.returncode == 0, said[-3000:]
        lines = (self.folder / "out" / "completions.jsonl").read_bytes().splitlines()
        assert [json.loads(line)["id"] for line in lines] == [f"row-{number}" for number in range(NUM_PROMPTS)]
        [row] = [line.split() for line in said.splitlines() if line.startswith("generated now ")]
        assert int(row[-1]) <= NUM_PROMPTS - done, "what was acknowledged is not generated again"


def test_a_batch_whose_storage_goes_away_fails_and_the_next_run_goes_on(
    tiny_model: Path, tmp_path: Path, s3: dict[str, Any], prefect_server: str
):
    address = urlsplit(s3["endpoint_url"])
    assert address.hostname is not None and address.port is not None
    with Wire((address.hostname, address.port)) as wire:
        storage = {
            "ROLLOUT_STORAGE": f"s3://{BUCKET}/outage",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{wire.port}",
            "AWS_ACCESS_KEY_ID": s3["key"],
            "AWS_SECRET_ACCESS_KEY": s3["secret"],
            "AWS_MAX_ATTEMPTS": "1",
            "PREFECT_API_URL": prefect_server,
        }
        batch = Batch(tmp_path, tiny_model, storage)
        done = batch.fail_while(lambda _: wire.cut())
        wire.mend()
        batch.finish_after(done)


@pytest.mark.campaign
def test_a_batch_whose_disk_is_full_fails_and_the_next_run_goes_on(
    tiny_model: Path, tmp_path: Path, prefect_server: str
):
    storage = {"ROLLOUT_STORAGE": f"file://{tmp_path / 'objects'}", "PREFECT_API_URL": prefect_server}
    batch = Batch(tmp_path, tiny_model, storage)

    def fill(process: int) -> None:
        # From now on no file of that process may grow, as on a disk that is full.
        resource.prlimit(process, resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))

    batch.finish_after(batch.fail_while(fill))
