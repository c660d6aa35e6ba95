"""Folders and buckets that tests of input and output write to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.objects.object_files import BUCKET
from tests.support.gcp_server import GoogleCloud


def use_s3(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Let clients of S3 find the tests' server as they find any: by the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def use_gcs(monkeypatch: pytest.MonkeyPatch, google: GoogleCloud) -> None:
    """As `use_s3`, of the stand-in for Google Cloud."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", google.url)
    monkeypatch.setenv("NO_GCE_CHECK", "true")


def address_of(kind: str, folder: Path) -> str:
    """A place of that kind which no other test uses."""
    name = f"{folder.parent.name}-{folder.name}"
    return {
        "path": str(folder / "place"),
        "file": f"file://{folder}/place",
        "memory": f"memory://{name}/place",
        "s3": f"s3://{BUCKET}/{name}/place",
        "gcs": f"gs://{BUCKET}/{name}/place",
    }[kind]
