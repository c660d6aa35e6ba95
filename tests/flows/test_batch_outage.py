"""Object storage that is away in the middle of a batch: a clear end, and the next run goes on."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.conftest import BUCKET
from tests.flows.conftest import wait_for, write_toml

pytestmark = pytest.mark.server

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

    def cut(self) -> None:
        self._is_up = False
        for end in list(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._is_up = True

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            if not self._is_up:
                near.close()
                continue
            far = socket.create_connection(self._target)
            self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_a_batch_whose_storage_goes_away_fails_and_the_next_run_goes_on(
    tiny_model: Path, tmp_path: Path, s3: dict[str, Any], prefect_server: str
):
    address = urlsplit(s3["endpoint_url"])
    assert address.hostname is not None and address.port is not None
    wire = Wire((address.hostname, address.port))
    rows = ({"prompt": f"sort {number} =", "id": f"row-{number}"} for number in range(NUM_PROMPTS))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_toml(
        tmp_path / "batch.toml",
        {
            "model": {"uri": str(tiny_model)},
            "sampling": {"max_tokens": 8},
            "input": {"glob": "prompts.jsonl"},
            "output": {"dir": "out"},
            "workers": {"shard_size": 40, "claim_size": 8},
            "backend": {"kind": "scripted", "delay_seconds": 0.05},
        },
    )
    environment = {
        **os.environ,
        "ROLLOUT_STORAGE": f"s3://{BUCKET}/outage",
        "ROLLOUT_DATABASE": f"sqlite:///{tmp_path / 'rollout.db'}",
        "ROLLOUT_CACHE": str(tmp_path / "cache"),
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{wire.port}",
        "AWS_ACCESS_KEY_ID": s3["key"],
        "AWS_SECRET_ACCESS_KEY": s3["secret"],
        "AWS_MAX_ATTEMPTS": "1",
        "PREFECT_API_URL": prefect_server,
    }

    def start() -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-c",
            "from flows.cli import main; main()",
            "infer",
            "batch",
            "--config",
            "batch.toml",
        ]
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def num_done() -> int:
        if not (tmp_path / "rollout.db").exists():
            return 0
        with suppress(sqlite3.OperationalError):
            database = sqlite3.connect(f"file:{tmp_path / 'rollout.db'}?mode=ro", uri=True)
            return database.execute("SELECT count(*) FROM rollouts WHERE status = 'succeeded'").fetchone()[0]
        return 0

    first = start()
    wait_for(lambda: num_done() >= 10, "some samples", process=first)
    wire.cut()
    said, _ = first.communicate(timeout=240)
    assert first.returncode == 1, said[-3000:]
    assert said.splitlines()[-1].startswith("rollout: "), said[-3000:]
    assert not (tmp_path / "out" / "completions.jsonl").exists()
    done = num_done()
    assert 10 <= done < NUM_PROMPTS
    wire.mend()
    second = start()
    said, _ = second.communicate(timeout=240)
    assert second.returncode == 0, said[-3000:]
    lines = (tmp_path / "out" / "completions.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [f"row-{number}" for number in range(NUM_PROMPTS)]
    [row] = [line.split() for line in said.splitlines() if line.startswith("generated now ")]
    assert int(row[-1]) <= NUM_PROMPTS - done, "what was acknowledged is not generated again"
