"""The plan of the house holds: no circles, and imports at the top of files but where a reason is given."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from types import ModuleType

import pytest

import deployments
import flows
import rollout_core
import tasks
from rollout_core.base.moved import Moved
from tests.structure import PACKAGES, PROJECT, House, Import, read_house

INSIDE_FUNCTIONS = {
    "deployments.cli.deploy": "Prefect reads its server's address when it is imported",
    "deployments.cli.doctor": "Prefect reads its server's address when it is imported; the help is quick",
    "deployments.cli.install": "Prefect reads its server's address when it is imported",
    "deployments.cli.metrics": "Prefect reads its server's address when it is imported",
    "deployments.cli.worker": "Prefect reads its server's address when it is imported",
    "deployments.container": "it hears no signal while it imports",
    "deployments.serve": "Prefect reads its server's address when it is imported",
    "deployments.supervision": "Prefect reads its server's address when it is imported",
    "deployments.ui.mounted": "a store's server starts without pages",
    "flows.cli.agents": "a dry run first has another process begin to import torch",
    "flows.cli.evaluate": "a dry run first has another process begin to import torch",
    "flows.cli.export": "imports torch",
    "flows.cli.infer_batch": "a dry run first has another process begin to import torch",
    "flows.cli.lineage": "most lineages need neither samples' rows nor OpenLineage, an extra",
    "flows.cli.nightly": "a dry run first has another process begin to import torch",
    "flows.cli.plan": "Prefect reads its server's address when it is imported",
    "flows.cli.reproduce": "Prefect reads its server's address when it is imported",
    "flows.cli.starting": "Prefect reads its server's address when it is imported",
    "flows.cli.train": "a dry run first has another process begin to import torch",
    "tasks.runtime.prefect_server": "commands that need no server do without Prefect",
    "tasks.runtime.dask.placed_stages": "Dask is an extra",
    "rollout_core.agents.runner_fleet": "Dask is an extra",
    "rollout_core.base.isolation.warden": "a child that meets no error starts without it",
    "rollout_core.environments.protocol": "a Python of another project, which hosts its environment, has no blake3",
    "rollout_core.environments.tools.mcp": "imports mcp, an extra, where there is such a tool",
    "rollout_core.inference.engine_process": "imports vLLM, in the engine's own process only",
    "rollout_core.inference.engines": "each backend has libraries of its own, some of them extras",
    "rollout_core.inference.vllm_backend": "imports vLLM, an extra",
    "rollout_core.inference.vllm_worker": "imports vLLM's kernels, where they are asked for",
    "rollout_core.launch.rank": "a rank sets its environment before torch is imported",
    "rollout_core.models.bounded.inspecting": "imports torch, once the child has hidden the GPUs",
    "rollout_core.plans.learner_plan": "imports torch; only a plan with a judge asks one",
    "rollout_core.plans.plan": "only a plan with an endpoint asks one",
    "rollout_core.rewards.loading": "imports torch, for reward models only, and aiohttp, for judges only",
    "rollout_core.rewards.user_code": "a child starts without it",
    "rollout_core.store.bridge.bridge_program": "each cloud's client is an extra",
    "rollout_core.store.sql.by_url": "PostgreSQL's driver is an extra",
    "tasks.score": "imports torch, for the KL divergence only",
}
"""Modules that import others of this project inside functions, and why."""


@pytest.fixture(scope="module")
def house() -> House:
    return read_house()


def test_nothing_imports_itself_by_others(house: House):
    assert house.circle() == []


def test_imports_inside_functions_have_a_reason(house: House):
    assert {item.importer for item in house.inside_functions()} == set(INSIDE_FUNCTIONS)


def test_the_map_has_the_rooms_in_the_order_of_the_layers():
    contracts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    core = next(contract["layers"] for contract in contracts if contract.get("containers") == ["rollout_core"])
    rooms = ["deployments", "flows/cli", "flows", "tasks", "tasks/runtime", "blocks"]
    shown = re.findall(r"^\| `([a-z_/]+)/` \|", (PROJECT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert shown == [*rooms, *(f"rollout_core/{room}" for room in core)]


@pytest.mark.parametrize("package", [tasks, flows, deployments, rollout_core])
def test_modules_that_moved_are_found_under_their_old_names(package: ModuleType):
    finder = next(found for found in sys.meta_path if isinstance(found, Moved) and found.package == package.__name__)
    assert finder.moved
    for old, new in finder.moved.items():
        with pytest.warns(FutureWarning, match=f"^{old} is {new} now"):
            sys.modules.pop(old, None)
            found = importlib.import_module(old)
        assert found is importlib.import_module(new)
        assert found.__spec__ is not None and found.__spec__.name == found.__name__ == new


def test_the_product_does_without_its_tests():
    """A checkout has them on Python's path, an installation has not."""
    files = [file for package in PACKAGES for file in (PROJECT / package).rglob("*.py*") if file.suffix != ".pyc"]
    naming = [file.name for file in files if re.search(r"^\s*(from|import) tests\b", file.read_text(), re.MULTILINE)]
    assert files
    assert naming == []


def test_a_circle_is_found():
    circle = frozenset({Import("a", "b", None), Import("b", "c", "late"), Import("c", "a", None)})
    assert set(House({"a": 1, "b": 1, "c": 1}, circle).circle()) == {"a", "b", "c"}


def test_flows_are_imported_without_the_heavy_libraries():
    """A command that finds everything in its caches needs none of them."""
    modules = [f"flows.{path.stem}" for path in (PROJECT / "flows").glob("*.py") if path.stem != "__init__"]
    program = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
print(*sorted({{"torch", "vllm", "transformers", "matplotlib"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
