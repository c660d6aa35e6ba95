"""The wheel, in an environment of its own: it is complete, works from a stranger's folder, and is typed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from rollout_core import __version__
from tests.conftest import PROJECT

PACKAGES = ("rollout_core", "blocks", "tasks", "flows", "deployments")
SCRIPT = """
import asyncio

from rollout_core.algorithms import Algorithm, UpdateContext, dpo_loss, gae
from rollout_core.config import PPOSettings
from rollout_core.data import SftRow, pack
from rollout_core.inference import Request
from rollout_core.models import load_tokenizer
from rollout_core.objects import Checkpoint, ObjectStore
from rollout_core.rewards import RewardInput
from rollout_core.store import SqlLightningStore
from tasks import sft_update


async def main() -> None:
    async with SqlLightningStore.from_url("sqlite:///own.db") as store:
        rollout = await store.enqueue_rollout({"number": 1}, rollout_id="one")
        print(rollout.status)
        reveal_type(store)
        reveal_type(rollout.config.max_attempts)
    objects = ObjectStore.from_url("objects")
    reveal_type(objects.put_bytes(b"kept"))
    reveal_type(dpo_loss)
    reveal_type(sft_update.name)
    SftRow(prompt="a", completion="b")
    gae(1)


if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel"))


def build_wheel(source: Path, target: Path) -> Path:
    """Built from the files that git knows, or will: what an earlier build left in the folder stays out."""
    for name in tracked_files(*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, source / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", ".", *options, "-w", str(target)], cwd=source, check=True)
    [built] = target.glob("*.whl")
    return built


def tracked_files(*paths: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in listed if (PROJECT / name).is_file()]


@pytest.fixture(scope="module")
def stranger(wheel, tmp_path_factory) -> Path:
    """A folder with a script, and an environment into which pip has installed the wheel. Our dependencies are found
    there, and this checkout is not."""
    folder = tmp_path_factory.mktemp("stranger")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], check=True)
    [site] = (folder / "venv" / "lib").glob("python*/site-packages")
    # Files of a folder that a .pth names count, but not the .pth files in it, such as this checkout's own.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "project").mkdir()
    (folder / "project" / "own.py").write_text(SCRIPT)
    return folder


def test_the_wheel_holds_every_file_of_the_packages(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == set(tracked_files(*PACKAGES))
    assert {f"{package}/py.typed" for package in PACKAGES} <= held


def test_a_strangers_script_runs_on_the_wheel(stranger):
    script = (
        SCRIPT.replace("        reveal_type", "        str")
        .replace("    reveal_type", "    str")
        .replace("    gae(1)\n", "")
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [
            str(stranger / "venv" / "bin" / "python"),
            "-c",
            f"{script}\nimport rollout_core; print(rollout_core.__file__)",
        ],
        cwd=stranger / "project",
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    status, file = done.stdout.split()
    assert status == "queuing" and Path(file).is_relative_to(stranger / "venv")
    assert (stranger / "project" / "own.db").is_file(), "the migrations are in the wheel"


def test_the_installed_command_is_of_this_version(stranger):
    """pip has the version of the module, and the changelog has a section of it."""
    command = [str(stranger / "venv" / "bin" / "rollout"), "--version"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=stranger / "project", env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, f"rollout {__version__}\n"), done.stderr
    [info] = stranger.glob("venv/lib/python*/site-packages/*.dist-info/METADATA")
    assert f"Version: {__version__}" in info.read_text().splitlines()
    assert f"\n## {__version__}\n" in (PROJECT / "CHANGELOG.md").read_text()


def test_a_strangers_script_is_type_checked_against_the_wheel(stranger):
    python = stranger / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(python), "own.py"]
    done = subprocess.run(command, cwd=stranger / "project", capture_output=True, text=True, timeout=400, check=False)
    report = json.loads(done.stdout)
    notes = [item["message"] for item in report["generalDiagnostics"] if item["severity"] == "information"]
    errors = [item["message"] for item in report["generalDiagnostics"] if item["severity"] == "error"]
    assert notes[:3] == [
        'Type of "store" is "SqlLightningStore"',
        'Type of "rollout.config.max_attempts" is "int"',
        'Type of "objects.put_bytes(b"kept")" is "ContentId"',
    ]
    assert "beta: float" in notes[3] and notes[3].endswith('-> Tensor"')
    assert notes[4] == 'Type of "sft_update.name" is "str"'
    assert len(errors) == 1 and '"values", "mask", "gamma", "lam"' in errors[0], errors
