"""Benchmarks run seldom: each can still be imported, says its help, and finds what of ours its functions import."""

from __future__ import annotations

import ast
import importlib
import os
import runpy
import sys
from pathlib import Path

from tests.support import forked

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((PROJECT / "benchmarks").glob("*.py"))
OWN = {"rollout_core", "tasks", "flows", "deployments", "blocks", "tests", "examples", *(path.stem for path in SCRIPTS)}


def test_benchmarks_say_their_help_and_find_what_they_import():
    command = [sys.executable, "-m", "tests.suite.test_benchmarks"]
    done = forked.run(command, cwd=PROJECT, env={**os.environ, "PYTHONPATH": str(PROJECT)}, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("usage: ") > 20


def try_out(script: Path) -> None:
    """Raises where it cannot be run, or imports what is not there."""
    text = script.read_text()
    if "argparse" in text or "quick_asked" in text:
        sys.argv = [str(script), "--help"]
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            assert not ended.code, script
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in OWN:
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


if __name__ == "__main__":
    sys.path.insert(0, str(PROJECT / "benchmarks"))
    for script in SCRIPTS:
        try_out(script)
