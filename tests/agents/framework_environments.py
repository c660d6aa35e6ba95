"""An environment for each framework that agents are written in: they do not resolve together with this project's pins.

In each is the framework at one version, what `rollout agent work` needs, and this checkout's wheel without its
dependencies. They stay in ``build/frameworks`` of the project, by framework and versions, for the next time.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

from rollout_core.base.locks import exclusive
from tests.conftest import PROJECT

REQUIREMENTS = PROJECT / "requirements-agents.txt"
CACHE = PROJECT / "build" / "frameworks"
SHOWN_LINES = 20


class NotInstalled(Exception):
    """pip could not install it; its last lines."""


def environment(requirements: tuple[str, ...], wheel: Path) -> Path:
    """The programs of an environment with these, the framework first, and the wheel. Raises NotInstalled."""
    asked = "\n".join([sys.version, REQUIREMENTS.read_text(encoding="utf-8"), *requirements])
    name = re.split(r"[\[=]", requirements[0])[0]
    folder = CACHE / f"{name}@{hashlib.sha256(asked.encode()).hexdigest()[:12]}"
    is_whole = folder / "is-whole"
    ours = hashlib.sha256(wheel.read_bytes()).hexdigest()
    # Several agents share one, and several processes of tests.
    with exclusive(CACHE / f"{name}.lock"):
        if not is_whole.exists():
            for old in CACHE.glob(f"{name}@*"):
                shutil.rmtree(old)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            _pip(folder, "install", "-r", str(REQUIREMENTS), *requirements)
            is_whole.touch()
        if is_whole.read_text() != ours:
            _pip(folder, "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
            is_whole.write_text(ours)
    return folder / "bin"


def _pip(folder: Path, *arguments: str) -> None:
    command = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        last = (done.stdout + done.stderr).splitlines()[-SHOWN_LINES:]
        raise NotInstalled("\n".join([f"pip {' '.join(arguments)}", *last]))
