"""Machines that share a Prefect server, a store and a bucket, and nothing else, as docs/operations.md has them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tests.operations.conftest import PROJECT, Machine


@dataclass
class OneOfSeveral(Machine):
    """A machine that has the settings of all and a cache of its own."""

    settings: dict[str, str]

    @property
    def environment(self) -> dict[str, str]:
        own = {"ROLLOUT_CACHE": str(self.folder / "cache"), "PREFECT_HOME": str(self.folder / "home")}
        return {**super().environment, **self.settings, **own}

    def named(self, name: str) -> OneOfSeveral:
        folder = self.folder.parent / name
        folder.mkdir()
        return replace(self, folder=folder)


def exported(page: Path) -> dict[str, str]:
    """The settings of a Prefect server that a page of the documents gives."""
    lines = (line.strip() for line in page.read_text().splitlines())
    pairs = (line.removeprefix("export ").split("=", 1) for line in lines if line.startswith("export PREFECT_SERVER_"))
    return dict(pair for pair in pairs if len(pair) == 2)


def server_settings(database: str) -> dict[str, str]:
    """Those that the document gives a Prefect server, with this database of PostgreSQL."""
    given = exported(PROJECT / "docs" / "operations.md")
    address = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
    assert given[address].startswith("postgresql+asyncpg://")
    return {**given, address: database.replace("postgresql://", "postgresql+asyncpg://")}
