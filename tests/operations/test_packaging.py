"""Units of systemd, the compose file, the Dockerfile and the job templates: each read by the program it is for, or by
one that knows its schema."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import compose_spec
import jsonschema
import pytest
import typer
import yaml
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import Flow, FlowRun
from prefect.exceptions import PrefectHTTPStatusError
from prefect.workers.base import BaseJobConfiguration

from deployments.cli import app
from deployments.cli.worker import EXIT_DRAINED
from deployments.serve import PROJECT
from tasks.runtime.prefect_server import SERVER_SETTINGS
from tests.support.machine import SYSTEMD, require

UNITS = sorted((PROJECT / "deployments" / "systemd").glob("*.service"))
TEMPLATES = sorted((PROJECT / "deployments" / "templates").glob("*.json"))


def unit(path: Path) -> configparser.RawConfigParser:
    found = configparser.RawConfigParser(strict=False, delimiters=["="])
    found.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    found.read_string(path.read_text())
    return found


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_knows_every_key_of_a_unit(path: Path, tmp_path: Path):
    require(SYSTEMD)
    copy = tmp_path / path.name
    program = shutil.which("true")
    copy.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={program}", path.read_text(), flags=re.MULTILINE))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, [line for line in done.stderr.splitlines() if path.stem in line]) == (0, [])


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_again_whatever_ends_it(path: Path):
    found = unit(path)
    assert (found["Service"]["Restart"], found["Unit"]["StartLimitIntervalSec"]) == ("always", "0")
    program, *arguments = shlex.split(found["Service"]["ExecStart"])
    assert Path(program).name in ("prefect", "rollout")
    if Path(program).name == "rollout":
        found_command = typer.main.get_command(app)
        for name in ("ops", "worker"):
            assert arguments.pop(0) == name
            found_command = found_command.commands[name]  # pyright: ignore[reportAttributeAccessIssue]
        given = found_command.make_context("worker", arguments).params
        assert float(found["Service"]["TimeoutStopSec"]) > given["drain_seconds"]
        assert int(found["Service"]["RestartPreventExitStatus"]) == EXIT_DRAINED


def test_the_settings_of_a_server_are_those_that_the_project_gives_its_own():
    lines = (PROJECT / "deployments" / "systemd" / "rollout-server.service").read_text().splitlines()
    given = dict(line.removeprefix("Environment=").split("=", 1) for line in lines if line.startswith("Environment="))
    service = yaml.safe_load((PROJECT / "compose.yaml").read_text())["services"]["server"]["environment"]
    for name in ("PREFECT_SERVER_API_KEEPALIVE_TIMEOUT", "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"):
        assert given[name] == service[name] == SERVER_SETTINGS[name], name
    assert given["PREFECT_SERVER_EVENTS_CAUSAL_ORDERING"] == service["PREFECT_SERVER_EVENTS_CAUSAL_ORDERING"]


def test_the_compose_file_is_whole():
    options = compose_spec.PyOptions()
    options.apply_merge = True
    found = options.from_yaml((PROJECT / "compose.yaml").read_text())
    found.validate()
    assert set(found.service_names()) == {"database", "server", "setup", "worker"}


def test_the_server_of_the_compose_file_is_of_the_version_of_the_deployments():
    version = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["prefect-version"]
    image = yaml.safe_load((PROJECT / "compose.yaml").read_text())["services"]["server"]["image"]
    assert image.partition(":")[2].startswith(f"{version}-")


def test_the_image_has_no_fault_that_its_linter_knows():
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, "Dockerfile"], cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_what_the_image_installs_is_what_the_project_asks_for(tmp_path: Path):
    """The step that reads the packages out of the project's file, with the extras that are the default."""
    text = (PROJECT / "Dockerfile").read_text()
    extras = re.search(r"^ARG EXTRAS=(\S+)", text, re.MULTILINE)
    step = re.search(r'python -c "(.*?)" "\$EXTRAS"', text, re.DOTALL)
    assert extras is not None and step is not None
    program = step[1].replace("\\\n", "")
    done = subprocess.run(
        [sys.executable, "-c", program, extras[1]], cwd=PROJECT, capture_output=True, text=True, timeout=300
    )
    needs = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert {"prefect", "torch", "vllm", "s3fs", "openai"} <= {re.split(r"[^\w-]", need)[0] for need in needs}
    assert not any(need.startswith("rollout") for need in needs)


async def rendered(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The job that Prefect's own code makes of a template, for a run."""

    class Configuration(BaseJobConfiguration):
        job_manifest: dict[str, Any] | None = None
        container_create_kwargs: dict[str, Any] | None = None
        image: str | None = None
        volumes: list[str] | None = None

    found = await Configuration.from_template_and_values(json.loads(path.read_text()), values)
    flow = Flow(name="nightly")
    found.prepare_for_flow_run(FlowRun(flow_id=flow.id, name="brave-newt"), flow=flow)
    return found.model_dump()


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_uses_every_variable_it_has_and_no_other(path: Path):
    template = json.loads(path.read_text())
    used = set(re.findall(r"{{ (\w+) }}", json.dumps(template["job_configuration"])))
    assert used == set(template["variables"]["properties"])
    jsonschema.Draft202012Validator.check_schema(template["variables"])
    defaults = {
        name: item["default"] for name, item in template["variables"]["properties"].items() if "default" in item
    }
    jsonschema.validate(defaults, template["variables"])


@pytest.mark.server
async def test_a_job_on_kubernetes_has_gpus_shared_memory_time_to_end_and_may_be_on_spot_machines(prefect_server: str):
    path = PROJECT / "deployments" / "templates" / "kubernetes.json"
    asked = {"gpus": 2, "node_selector": {"gpu": "h100"}, "grace_period_seconds": 25, "shared_memory": "16Gi"}
    job = (await rendered(path, asked))["job_manifest"]
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    # Prefect's worker refuses a container of another name, and a job that Kubernetes itself starts again.
    assert (container["name"], spec["restartPolicy"], job["spec"]["backoffLimit"]) == ("prefect-job", "Never", 0)
    assert container["resources"]["limits"] == {"memory": "32Gi", "nvidia.com/gpu": 2}
    assert container["resources"]["requests"]["nvidia.com/gpu"] == 2
    assert container["args"] == "python -m deployments.container"  # Prefect's worker splits it
    assert (spec["nodeSelector"], spec["terminationGracePeriodSeconds"]) == ({"gpu": "h100"}, 25)
    volumes = {item["name"]: item["emptyDir"] for item in spec["volumes"]}
    mounts = {item["mountPath"]: volumes[item["name"]] for item in container["volumeMounts"]}
    assert mounts["/dev/shm"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert {"spot", "cloud.google.com/gke-spot", "nvidia.com/gpu"} <= {item["key"] for item in spec["tolerations"]}
    assert container["envFrom"] == [{"secretRef": {"name": "rollout-settings"}}]

    without = (await rendered(path, {"gpus": 0, "tolerations": []}))["job_manifest"]["spec"]["template"]["spec"]
    assert without["tolerations"] == [] and without["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 0


@pytest.mark.server
async def test_a_job_in_docker_has_gpus_and_shared_memory(prefect_server: str):
    job = await rendered(PROJECT / "deployments" / "templates" / "docker.json", {"gpus": 1, "shared_memory": "2g"})
    (request,) = job["container_create_kwargs"]["device_requests"]
    assert (request["Count"], request["Capabilities"]) == (1, [["gpu"]])
    assert (job["container_create_kwargs"]["shm_size"], job["volumes"]) == ("2g", ["rollout-data:/data"])
    assert job["command"] == "python -m deployments.container"


@pytest.mark.server
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_server_takes_a_pool_with_the_template_and_refuses_values_of_other_types(path: Path, prefect_server: str):
    template = json.loads(path.read_text())
    with get_client(sync_client=True) as client:
        pool = client.create_work_pool(
            WorkPoolCreate(name=f"of-{path.stem}", type=path.stem, base_job_template=template)
        )
        try:
            flow = client.create_flow_from_name("templated")

            def deploy(variables: dict[str, Any]) -> None:
                client.create_deployment(
                    flow,
                    f"on-{path.stem}",
                    work_pool_name=pool.name,
                    job_variables=variables,
                    enforce_parameter_schema=False,
                )

            deploy({"gpus": 2})
            with pytest.raises(PrefectHTTPStatusError, match=r"gpus|integer"):
                deploy({"gpus": "two"})
        finally:
            client.delete_work_pool(pool.name)


async def test_the_workers_of_kubernetes_and_docker_read_their_templates():
    """Their packages bring clients that each server would load at its start, so they are not among the tests' own."""
    kubernetes = pytest.importorskip("prefect_kubernetes.worker")
    docker = pytest.importorskip("prefect_docker.worker")
    kinds = {
        "kubernetes": kubernetes.KubernetesWorkerJobConfiguration,
        "docker": docker.DockerWorkerJobConfiguration,
    }
    for path in TEMPLATES:
        await kinds[path.stem].from_template_and_values(json.loads(path.read_text()), {})
