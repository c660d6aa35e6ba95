"""Folders, contents and processes that the tests of the object store share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_core.base.ids import hash_bytes
from rollout_core.objects import ObjectStore

BUCKET = "objects"
"""On the servers of the tests."""
NOTHING = hash_bytes(b"nothing has these bytes")


def empty_store(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> ObjectStore:
    """A store of a kind: ``local``, ``memory``, ``s3`` or ``gcs``."""
    if kind == "local":
        return ObjectStore.from_url(f"file://{tmp_path}/store")
    if kind == "memory":
        return ObjectStore.from_url(f"memory://{tmp_path.name}")
    url = f"{'gs' if kind == 'gcs' else kind}://{BUCKET}/{tmp_path.name}"
    return ObjectStore.from_url(url, storage_options=request.getfixturevalue(kind))


def write_tree(folder: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    folder.mkdir(exist_ok=True, parents=True)
    return folder


def read_tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def keys(objects: ObjectStore, folder: str) -> list[str]:
    return [key for key, _ in objects.files.list(folder)]


def in_pieces(data: bytes, size: int) -> Iterator[bytes]:
    yield from (data[start : start + size] for start in range(0, len(data), size))


TREE = {"config.json": b"{}", "weights/a.bin": bytes(range(256)) * 40, "weights/ä 模型.bin": b"\x00", "empty": b""}


def python(code: str, *arguments: str, **options) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, **options)
