"""What this machine has of the programs that tests need beside Python, and what is not tested without them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Tool:
    """A program, or a right, that some tests cannot do without."""

    name: str
    find: Callable[[], object]
    """Where it is; None where this machine has none."""
    tested: str
    """What is not tested without it."""
    remedy: str


def postgres_programs() -> Path | None:
    """The folder of the newest PostgreSQL server programs; None where there are none."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    on_path = shutil.which("initdb")
    for folder in [*folders, *([Path(on_path).parent] if on_path else [])]:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    return None


def chromium() -> str | None:
    """The browser."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def _root() -> bool | None:
    return True if os.geteuid() == 0 and shutil.which("mount") else None


POSTGRES = Tool(
    "PostgreSQL",
    postgres_programs,
    "the store over PostgreSQL, and machines that share one",
    "apt-get install postgresql",
)
CHROMIUM = Tool("Chromium", chromium, "pages of rollout ui in a browser", "apt-get install chromium")
ZSH = Tool("zsh", lambda: shutil.which("zsh"), "completion in zsh", "apt-get install zsh")
DOT = Tool("graphviz", lambda: shutil.which("dot"), "lineage as an image", "apt-get install graphviz")
FISH = Tool("fish", lambda: shutil.which("fish"), "completion in fish", "apt-get install fish")
SYSTEMD = Tool(
    "systemd-analyze", lambda: shutil.which("systemd-analyze"), "keys of the systemd units", "apt-get install systemd"
)
BUBBLEWRAP = Tool("bubblewrap", lambda: shutil.which("bwrap"), "sandboxes by bubblewrap", "apt-get install bubblewrap")
ROOT = Tool("root", _root, "a file system that is full", "run the tests as root")

TOOLS = (POSTGRES, CHROMIUM, DOT, ZSH, FISH, SYSTEMD, BUBBLEWRAP, ROOT)


def require(tool: Tool) -> None:
    """Skip the test where this machine lacks the tool."""
    if tool.find() is None:
        pytest.skip(f"no {tool.name} on this machine ({tool.remedy})")


def missing() -> list[str]:
    """A line for each tool that this machine lacks; none where it has all."""
    return [f"  {tool.name}: {tool.tested} ({tool.remedy})" for tool in TOOLS if tool.find() is None]
