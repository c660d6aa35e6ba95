"""Stages placed on the workers of a real Dask cluster: each where its resources are, and the same bytes as without,
whoever is killed."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config import DaskCluster, InferBatchConfig, NightlyConfig, parse_config
from rollout_core.objects.snapshots import PROGRESS_REFS
from rollout_core.plans.cluster import check_cluster, check_reach
from rollout_core.plans.learner_plan import plan_nightly
from rollout_core.plans.plan import Plan
from rollout_core.store.reachable import plain_connections
from tests.conftest import PROJECT
from tests.flows.conftest import finished_samples, objects, wait_for, write_toml
from tests.flows.test_dask import Cluster, attempts, cluster, kill
from tests.flows.test_resume import ROLLOUT, finish

__all__ = ["cluster"]  # a fixture
SAMPLES = 240
SLOW_REWARD = """
import os, time
from pathlib import Path

def score(sample):
    time.sleep(0.02)
    with Path({log!r}).open("a") as log:
        log.write(f"{{os.getppid()}} {{sample.id}}\\n")
    return len(sample.completion) / 100
"""


@pytest.fixture
def small(small_nightly: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A nightly run whose samples and rewards each take their time, which no processor is needed for."""
    config = deepcopy(small_nightly)
    reward, log = tmp_path / "slow.py", tmp_path / "scored"
    log.touch()
    reward.write_text(SLOW_REWARD.format(log=str(log)))
    config["reward"] = {"kind": "function", "callable": f"{reward}:score"}
    config["backend"] = {"kind": "scripted", "text": "{prompt}", "delay_seconds": 0.02}
    config["sft"]["budget"]["max_steps"] = 40  # some seconds, to be killed in
    config["ppo"] |= {
        "iterations": 1, "prompts_per_iteration": SAMPLES, "epochs": 2, "minibatch_size": 20,
    }  # fmt: skip
    return config


@pytest.fixture
def run(start_process, prefect_server) -> Callable[..., subprocess.Popen[str]]:
    def start(config: Path, *command: str, **settings: str) -> subprocess.Popen[str]:
        environment = {"PREFECT_API_URL": prefect_server, "PYTHONPATH": str(PROJECT), "COLUMNS": "200", **settings}
        return start_process(*ROLLOUT, *(command or ("nightly",)), "--config", str(config), env=environment)

    return start


def num_workers(address: str) -> int:
    try:
        return int(check_cluster(DaskCluster(address=address)).split()[-2])
    except ConfigError:
        return 0


def trained(folder: Path) -> bool:
    """Whether the worker that logs there did an update."""
    return re.search(r"_update\b.*step \d|step \d+", (folder / "log").read_text()) is not None


def placement(address: str) -> dict[str, Any]:
    return {
        "dask": {"address": address},
        "generation": {"resources": {"GPU": 1}},
        "scoring": {"resources": {"CPU": 1}},
        "learning": {"resources": {"LEARNER": 1}},
    }


@pytest.mark.campaign
@pytest.mark.server
@pytest.mark.timeout(600)
def test_a_nightly_run_is_placed_stage_by_stage_loses_two_workers_and_ends_in_the_same_bytes(
    small, tmp_path, run, cluster: Cluster, server_logs, prefect_server
):
    alone = {
        "ROLLOUT_STORAGE": f"file://{tmp_path / 'alone'}",
        "ROLLOUT_DATABASE": f"sqlite:///{tmp_path / 'alone.db'}",
        "ROLLOUT_CACHE": str(tmp_path / "alone-cache"),
    }
    expected, _ = finish(run(write_toml(tmp_path / "alone.toml", small), **alone))
    (tmp_path / "scored").write_text("")

    def worker(name: str, resources: str) -> subprocess.Popen[str]:
        log = tmp_path / name / "log"
        log.parent.mkdir()
        server_logs.watch(log)
        return replace(cluster, log=log).worker(name, "--resources", resources)

    cluster.scheduler()
    first, second = worker("first", "GPU=1"), worker("second", "GPU=1 CPU=1")
    third, learner = worker("third", "CPU=1"), worker("learner", "LEARNER=1")
    wait_for(lambda: num_workers(cluster.address) == 4, "four workers")
    config = write_toml(tmp_path / "placed.toml", {**small, "placement": placement(cluster.address)})
    driver = run(config)
    wait_for(lambda: list(objects().list_refs(PROGRESS_REFS)), "a snapshot that SFT resumes from", process=driver)
    kill(learner)
    learner = worker("next-learner", "LEARNER=1")

    def first_has_shared() -> bool:
        done = {int(worker.split(":")[-2]) for _, _, status, worker in attempts() if status == "succeeded"}
        return first.pid in done and finished_samples() > 64 + SAMPLES // 4

    wait_for(first_has_shared, "samples of the iteration, some of them the first worker's", process=driver)
    kill(first)
    model, stages = finish(driver)
    assert model == expected
    assert stages

    by_worker = {int(worker.split(":")[-2]) for _, _, status, worker in attempts() if status == "succeeded"}
    assert by_worker == {first.pid, second.pid}, "generation is shared by those that offer a GPU"
    assert trained(tmp_path / "learner") and trained(tmp_path / "next-learner")
    assert not any(trained(tmp_path / name) for name in ("first", "second", "third"))
    scored = [(tmp_path / name / "log").read_text() for name in ("second", "third")]
    assert any(re.search(r"[1-9]\d* completions scored for another worker", log) for log in scored)
    assert any("score_rewards iteration 1" in log for log in scored)
    said = [row["message"] for row in asked(prefect_server, "logs/filter", {"sort": "TIMESTAMP_DESC", "limit": 200})]
    assert "SFT resumes at step" in " ".join(said), "what a worker logs is the flow run's"
    # Nothing is left to do, and so nobody is needed for it.
    for process in (second, third, learner):
        kill(process)
    again, states = finish(run(write_toml(tmp_path / "again.toml", {**small, "placement": {
        "dask": {"cluster": "distributed.LocalCluster"}, "learning": {},
    }})))  # fmt: skip
    assert again == expected
    assert {state for name, _, state in states if name in ("sft_update", "evaluate", "ppo_update")} == {"cached"}


def asked(api: str, path: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{api}/{path}", json.dumps(body).encode(), headers)) as answer:
        return json.loads(answer.read())


@pytest.mark.server
def test_what_no_worker_offers_and_what_workers_cannot_reach_is_said_before_the_run(
    small, cluster: Cluster, tmp_path, monkeypatch, server_logs
):
    cluster.scheduler()
    cluster.worker("plain", "--resources", "CPU=2")
    wait_for(lambda: num_workers(cluster.address) == 1, "a worker")
    config = {**small, "placement": placement(cluster.address)}
    with pytest.raises(ConfigError) as refused:
        plan_nightly(parse_config(config, NightlyConfig), tmp_path, plain_connections())
    assert len(refused.value.violations) == 2
    for kind, resources in (("generation", "GPU=1"), ("learning", "LEARNER=1")):
        assert re.search(
            rf"placement\.{kind}\.resources: none of the 1 workers of tcp://\S+ offers {resources}; they offer CPU=2; "
            rf'start one with `dask worker \.\.\. --resources "{resources}"`',
            str(refused.value),
        ), str(refused.value)

    config["placement"] = {"dask": {"address": cluster.address}, "scoring": {"resources": {"CPU": 2}}}
    facts = plan_nightly(parse_config(config, NightlyConfig), tmp_path, plain_connections())
    assert facts["placement"] == {"scoring": f"1 of 1 workers of {cluster.address} offer CPU=2"}
    assert "not checked" not in facts
    with monkeypatch.context() as patch:
        patch.setenv("ROLLOUT_STORAGE", "memory://here")
        with pytest.raises(ConfigError, match="the object store is in the memory of this process, which no worker"):
            plan_nightly(parse_config(config, NightlyConfig), tmp_path, plain_connections())

    # An address that is not one of this machine's (RFC 5737).
    plan = Plan(tmp_path, plain_connections())
    plan.places()
    check_reach(plan, ["tcp://127.0.0.1:1", "tcp://192.0.2.7:9999"])
    [violation] = plan.violations
    assert "a SQLite file, which workers of other machines (192.0.2.7) do not reach" in violation
    assert "has to be a folder that this machine shares with 192.0.2.7" in plan.unchecked[0]


def test_a_placement_that_cannot_be_is_one_error_each(small):
    def violations(placement: dict[str, Any], **tables: Any) -> str:
        with pytest.raises(ConfigError) as refused:
            parse_config({**small, **tables, "placement": placement}, NightlyConfig)
        assert len(refused.value.violations) == 1, refused.value
        return str(refused.value)

    dask = {"address": "tcp://127.0.0.1:9"}
    assert "at least one of the tables generation, scoring and learning" in violations({"dask": dask})
    assert "placement.learning.resources.GPU" in violations({"dask": dask, "learning": {"resources": {"GPU": 0}}})
    assert "placement.learning.workers" in violations({"dask": dask, "learning": {"workers": 2}})
    ahead = violations({"dask": dask, "learning": {}}, ppo={**small["ppo"], "async_depth": 1})
    assert "placement and async_depth: stages on workers are not drawn ahead" in ahead
    rare = violations({"dask": dask, "learning": {}}, ppo={**small["ppo"], "state_every": 2})
    assert "placement.learning and state_every = 2: workers have no common place" in rare
    apart = violations(
        {"dask": dask, "generation": {}},
        ppo={**small["ppo"], "iterations": 2, "state_every": 2, "store_models": "with_states"},
    )
    assert 'placement and store_models = "with_states": workers have no common cache' in apart
    batch = {
        "model": {"uri": "m"}, "sampling": {"max_tokens": 4}, "input": {"glob": "*"}, "output": {"dir": "out"},
    }  # fmt: skip
    placed = {"dask": dask, "generation": {"resources": {"GPU": 1}, "workers": 2}}
    with pytest.raises(ConfigError, match="both say where shards run"):
        parse_config({**batch, "placement": placed, "workers": {"dask": dask}}, InferBatchConfig)
    with pytest.raises(ConfigError, match="batch inference only generates"):
        parse_config({**batch, "placement": {"dask": dask, "learning": {}}}, InferBatchConfig)
    shards = parse_config({**batch, "placement": placed}, InferBatchConfig).shard_workers
    assert shards.dask is not None and shards.claimed_together == 256
    assert (shards.dask.wanted, shards.dask.max_workers) == ({"GPU": 1}, 2)


def test_placement_is_in_no_key_and_dask_that_is_not_installed_is_said_first(small, tmp_path, monkeypatch):
    config = {**small, "placement": placement("tcp://127.0.0.1:9")}
    assert parse_config(config, NightlyConfig).placement.cache_identity() is None  # pyright: ignore[reportOptionalMemberAccess]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "prefect_dask" else object())
    with pytest.raises(ConfigError, match=r"placement\.dask: Dask is not installed; install \S+\[dask\]"):
        plan_nightly(parse_config(config, NightlyConfig), tmp_path, plain_connections())
