"""A project with its own ``tasks.py`` and ``flows/``: rollout runs in its folder, or names what is in the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.base.own_packages import ROOT, require_own
from tests.flows.conftest import write_toml

COMMAND = ("-P", "-c", "from rollout_core.__main__ import main; main()")
"""What the installed script `rollout` runs; as there, the working folder is not on Python's path."""


@pytest.fixture
def project(tmp_path) -> Path:
    """A folder whose modules have names of ours and of our dependencies, and must not be imported."""
    folder = tmp_path / "project"
    (folder / "flows").mkdir(parents=True)
    for file in ("tasks.py", "flows/__init__.py", "blocks.py", "accelerate.py", "rollout_core.py"):
        (folder / file).write_text('raise RuntimeError("the project\'s own module")\n')
    return folder


def rollout(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    return subprocess.run(
        [sys.executable, *COMMAND, *arguments],
        cwd=folder,
        env={**plain, **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.campaign
@pytest.mark.server
def test_a_run_with_a_server_and_two_processes_of_its_own_works_in_the_projects_folder(
    project, tiny_model, sorting_task
):
    config = {
        "schema_version": 1,
        "num_threads": 1,
        "numerics": "native",
        "run": {"name": "foreign"},
        "algorithm": {
            "kind": "sft",
            "base_model": {"uri": str(tiny_model)},
            "dataset": {"path": str(sorting_task.sft)},
            "budget": {"max_steps": 2},
            "optimizer": {"lr": 1e-3},
            "sequence": {"max_length": 64},
        },
    }
    file = write_toml(project / "mine.toml", config)
    done = rollout(project, "train", "sft", "--config", str(file), "--nproc", "2")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "the project's own module" not in done.stdout + done.stderr


@pytest.mark.parametrize(("module", "found"), [("tasks", "tasks.py"), ("flows", "flows"), ("blocks", "blocks.py")])
def test_where_it_comes_first_on_the_path_the_command_names_the_file(project, module, found):
    for other in {"tasks.py", "flows", "blocks.py", "rollout_core.py", "accelerate.py"} - {found}:
        path = project / other
        path.rename(path.with_name(f"not-{other}"))
    refused = rollout(project, "schema", PYTHONPATH=str(project))
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"rollout: `import {module}` finds {project / found}, which is not rollout's")
    assert str(ROOT / module) in refused.stderr and "PYTHONPATH" in refused.stderr


def test_installed_files_may_be_links(tmp_path):
    """As some installers make them, each to a place of its own."""
    for package in ("rollout_core", "flows", "tasks", "blocks"):
        for file in (ROOT / package).rglob("*.py*"):
            link = tmp_path / file.relative_to(ROOT)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    script = (
        "import rollout_core.base.own_packages as own; own.require_own('flows', 'tasks', 'blocks'); print(own.ROOT)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == str(tmp_path), done.stderr


def test_a_flow_started_beside_a_foreign_tasks_module_names_it(project):
    (project / "tasks.py").write_text("")
    script = "import sys; sys.path.insert(0, sys.argv[1]); sys.modules.pop('flows', None)\nimport flows\n"
    for other in ("flows", "blocks.py", "rollout_core.py"):
        (project / other).rename(project / f"not-{other}")
    refused = subprocess.run(
        [sys.executable, "-P", "-c", script, str(project)], capture_output=True, text=True, timeout=300, check=False
    )
    assert refused.returncode == 1 and f"`import tasks` finds {project / 'tasks.py'}" in refused.stderr


def test_our_own_packages_are_ours():
    require_own("blocks", "tasks", "flows", "deployments")
    with pytest.raises(ConfigError, match="there is no package 'no_such_package'"):
        require_own("no_such_package")
    with pytest.raises(ConfigError, match="is not rollout's package"):
        require_own("json")
