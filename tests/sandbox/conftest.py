"""Sandboxes of this machine, one for each kind that it has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout_core.sandbox import Sandbox
from tests.support.machine import BUBBLEWRAP, require

KINDS = ("namespaces", "bubblewrap")


def opened(kind: str) -> Sandbox:
    """A sandbox of this kind; skips where this machine has none."""
    if kind == "bubblewrap":
        require(BUBBLEWRAP)
    sandbox = Sandbox(kind=kind)
    walls = sandbox.walls()
    if not walls.stand:
        sandbox.close()
        pytest.skip(f"this machine has no sandbox of kind {kind}: {'; '.join(walls.missing())}")
    return sandbox


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Of each kind that this machine has."""
    with opened(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def namespaces() -> Iterator[Sandbox]:
    """By namespaces made here."""
    with opened("namespaces") as made:
        yield made
