"""Events of runs as lines of JSON, and `rollout ops metrics`, which Prometheus reads."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deployments.exporter import MOST_RUNS, Events, Followed, _keep_following
from tasks.runtime import events
from tests.flows.conftest import wait_for
from tests.operations.own_server import PROJECT, ROLLOUT, rollout
from tests.support import forked

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(text: str) -> Samples:
    found = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}


def value(found: Samples, name: str, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))


def counted(path: Path) -> tuple[Followed, CollectorRegistry, Events]:
    registry = CollectorRegistry()
    return Followed(path), registry, Events(registry)


def read(followed: Followed, registry: CollectorRegistry, counts: Events) -> Samples:
    for line in followed.lines():
        counts.take(line)
    return samples_of(generate_latest(registry).decode())


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "logs" / "events.ndjson"
    monkeypatch.setenv("ROLLOUT_EVENTS", str(path))
    return path


def test_lines_are_counted_once_also_halves_and_those_of_a_new_file(file: Path):
    source = counted(file)
    assert read(*source), "no file yet, and nothing counted"
    done = events.SamplesDone(stage="evaluate", samples=3, tokens=40, seconds=2.0, running=5, waiting=7)
    events.emit(done)
    line = done.model_dump_json().encode()
    with file.open("ab") as output:
        output.write(line[:20])
    assert value(read(*source), "rollout_engine_tokens_total", stage="evaluate") == 40
    with file.open("ab") as output:
        output.write(line[20:] + b"\n" + b'{"topic": "of a later version"}\n')
    found = read(*source)
    assert value(found, "rollout_engine_tokens_total", stage="evaluate") == 80
    assert value(found, "rollout_engine_samples_total", stage="evaluate") == 6
    assert value(found, "rollout_events_unreadable_total") == 1
    assert value(found, "rollout_engine_tokens_per_second", stage="evaluate") == 20
    assert value(found, "rollout_engine_running_requests", stage="evaluate") == 5
    assert value(found, "rollout_engine_waiting_samples", stage="evaluate") == 7
    events.emit(events.WorkerStart(worker="tcp://a:1", kind="dask", slots=2))
    events.emit(events.WorkerLost(worker="tcp://a:1", kind="dask", shards=1))
    found = read(*source)
    assert value(found, "rollout_worker_starts_total", kind="dask") == 1
    assert value(found, "rollout_workers_lost_total", kind="dask") == 1
    events.emit(events.PluginLoaded(plugin="words", version="1", mode="sidecar", seconds=0.2))
    figures = {"calls": 4, "failed": 1, "seconds": 2.5, "slowest_seconds": 2.0}
    events.emit(events.PluginCall(plugin="words", stage="score_rewards", **figures))
    about = {"plugin": "words", "version": "1", "mode": "sidecar", "id": "ab", "seconds": 0.3}
    events.emit(events.PluginReloaded(**about))
    events.emit(events.PluginReloaded(**about, problem="its manifest is wrong"))
    events.emit(events.PluginCallError(plugin="words", stage="score_rewards", error="it hangs"))
    found = read(*source)
    assert value(found, "rollout_plugin_loads_total", plugin="words") == 1
    assert value(found, "rollout_plugin_reloads_total", plugin="words") == 1, "what was refused is none"
    assert value(found, "rollout_plugin_calls_total", plugin="words") == 4
    assert value(found, "rollout_plugin_call_errors_total", plugin="words") == 1
    assert value(found, "rollout_plugin_call_seconds_total", plugin="words") == 2.5
    file.rename(file.with_suffix(".1"))  # as logrotate does
    assert value(read(*source), "rollout_engine_tokens_total", stage="evaluate") == 80
    events.emit(done)
    assert value(read(*source), "rollout_engine_tokens_total", stage="evaluate") == 120
    events.emit(done)  # after the last look, and before the file is renamed
    file.rename(file.with_suffix(".2"))
    events.emit(done)
    assert value(read(*source), "rollout_engine_tokens_total", stage="evaluate") == 200
    file.write_bytes(b"")  # emptied where it is, as logrotate's copytruncate does
    events.emit(done.model_copy(update={"tokens": 1}))
    assert value(read(*source), "rollout_engine_tokens_total", stage="evaluate") == 201


def test_a_file_that_cannot_be_read_for_a_while_is_told_of_once_and_read_again(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    followed, registry, counts = counted(file)
    events.emit(events.SamplesSkipped(stage="evaluate", samples=1, reason="they failed"))
    real, looks = Path.open, count()

    def opened(path: Path, *arguments: Any) -> Any:
        if path == file and next(looks) in (1, 2):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments)

    def pause(seconds: float) -> None:
        events.emit(events.SamplesSkipped(stage="evaluate", samples=1, reason="they failed"))
        if next(pauses) == 3:
            raise KeyboardInterrupt

    pauses = count()
    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr("deployments.exporter.time", SimpleNamespace(sleep=pause))
    with pytest.raises(KeyboardInterrupt):
        _keep_following(followed, counts)
    assert value(samples_of(generate_latest(registry).decode()), "rollout_samples_skipped_total", stage="evaluate") == 4
    assert capsys.readouterr().err.count("Permission denied") == 1


def test_figures_of_old_runs_are_forgotten_and_those_that_are_no_numbers_left_out(file: Path):
    source = counted(file)
    for number in range(MOST_RUNS + 3):
        events.emit(events.RunStart(flow_run=f"id-{number}", flow="nightly", run="night"))
        row = {"loss": 0.5, "kl": float("nan"), "grad_norm": float("inf")}
        step = events.TrainStep(flow_run=f"id-{number}", algorithm="sft", label="", step=1, num_steps=2, figures={})
        events.emit(step.model_copy(update={"figures": events._figures({"step": 1.0, **row})}))
    found = read(*source)
    shown = [dict(labels) for name, labels in found if name == "rollout_learner_figure"]
    assert {labels["flow_run"] for labels in shown} == {f"id-{number}" for number in range(3, MOST_RUNS + 3)}
    assert {labels["figure"] for labels in shown} == {"loss"}
    assert value(found, "rollout_learner_steps_total", algorithm="sft") == MOST_RUNS + 3


def test_lines_of_several_threads_stay_whole_and_a_file_that_cannot_be_written_stops_nobody(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def write() -> None:
        for _ in range(200):
            events.emit(events.SamplesSkipped(stage="x" * 200, samples=1, reason="y" * 500))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [events.EVENT.validate_json(line).topic for line in file.read_bytes().splitlines()] == [
        "samples_skipped"
    ] * 800

    monkeypatch.setenv("ROLLOUT_EVENTS", str(file / "no-folder"))
    for _ in range(3):
        events.emit(events.WorkStart(stage="sft_update"))
    assert [record.message for record in caplog.records if "ROLLOUT_EVENTS" in record.message] != []
    assert len([record for record in caplog.records if "ROLLOUT_EVENTS" in record.message]) == 1


@contextmanager
def serving(api: str, file: Path) -> Iterator[str]:
    """Address of the metrics, served by a process of its own."""
    process = forked.Process(
        [sys.executable, *ROLLOUT, "ops", "metrics", "--port", "0", "--every", "1"],
        env={**os.environ, "PREFECT_API_URL": api, "ROLLOUT_EVENTS": str(file), "PYTHONPATH": str(PROJECT)},
        cwd=file.parent, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert f"events of {file}" in line, line
        yield line.split()[2].rstrip(";")
    finally:
        process.terminate()
        process.communicate(timeout=120)


@pytest.mark.server
def test_a_night_is_told_and_served_and_the_dashboard_asks_for_nothing_else(
    prefect_server: str, small_nightly: dict[str, Any], file: Path
):
    from flows.nightly import nightly
    from rollout_core.config import NightlyConfig, parse_config

    small_nightly["sft"]["budget"] = {"max_steps": 3}
    small_nightly["ppo"] |= {"iterations": 1, "prompts_per_iteration": 32, "epochs": 1, "minibatch_size": 16}
    small_nightly["promotion"] = {"resource": "told", "tolerance": 1.0}
    small_nightly["cost"] = {"per_hour": 3600.0, "currency": "EUR"}
    result = nightly(parse_config(small_nightly, NightlyConfig))
    told = [events.EVENT.validate_json(line) for line in file.read_bytes().splitlines()]
    topics = [event.topic for event in told]
    assert topics[0] == "run_start" and topics[-1] == "run_done"
    assert len({event.flow_run for event in told}) == 1 and told[0].flow_run
    inventory = told[1]
    assert isinstance(inventory, events.Inventory) and inventory.machine.memory_bytes > 0
    assert "temporary" in inventory.machine.disks and inventory.machine.spot is None
    steps = [(event.algorithm, event.step) for event in told if isinstance(event, events.TrainStep)]
    assert steps[:3] == [("sft", 1), ("sft", 2), ("sft", 3)] and {name for name, _ in steps[3:]} == {"ppo"}
    assert topics.count("train_start") == topics.count("train_end") == 2
    started = [event.stage for event in told if isinstance(event, events.WorkStart)]
    ended = [event.stage for event in told if isinstance(event, events.WorkEnd)]
    assert sorted(set(started)) == sorted(set(ended)) and "sft_update" in started
    [promoted] = [event for event in told if isinstance(event, events.Promoted)]
    assert (promoted.resource, promoted.model) == ("told", result["model"])
    done = told[-1]
    assert isinstance(done, events.RunDone)
    assert (done.state, done.promoted, done.currency, done.error) == ("completed", True, "EUR", None)
    assert done.price == pytest.approx(done.computed_seconds) and 0 < done.computed_seconds <= done.seconds
    tokens = sum(event.tokens for event in told if isinstance(event, events.SamplesDone))
    assert sum(event.samples for event in told if isinstance(event, events.SamplesDone)) > 32 and tokens > 32

    def look() -> str | None:
        with urllib.request.urlopen(address, timeout=10) as answer:
            text = answer.read().decode()
        return (
            text
            if 'rollout_up{part="server"}' in text and 'rollout_promotions_total{resource="told"}' in text
            else None
        )

    with serving(prefect_server, file) as address:
        text = wait_for(look, "both sources")
    found = samples_of(text)
    assert value(found, "rollout_up", part="server") == value(found, "rollout_up", part="storage") == 1
    assert value(found, "rollout_store_queue_length") == 0
    rollouts = sum(count for (name, _), count in found.items() if name == "rollout_store_rollouts")
    assert value(found, "rollout_store_attempts") == rollouts > 0 and value(found, "rollout_store_spans") is not None
    assert value(found, "rollout_runs_total", run="small", state="completed") == 1
    assert value(found, "rollout_price_total", run="small", currency="EUR") == pytest.approx(done.price)
    assert value(found, "rollout_learner_steps_total", algorithm="sft") == 3
    assert value(found, "rollout_held_out_reward", run="small", moment="before") is not None
    assert sum(count for (name, _), count in found.items() if name == "rollout_engine_tokens_total") == tokens
    learner = {"run": "small", "algorithm": "sft", "flow_run": done.flow_run}
    assert value(found, "rollout_learner_step", **learner) == value(found, "rollout_learner_steps_planned", **learner)
    last = next(event for event in reversed(told) if isinstance(event, events.TrainStep) and event.algorithm == "sft")
    assert value(found, "rollout_learner_figure", **learner, figure="loss") == last.figures["loss"]

    served = set(re.findall(r"^# HELP (\w+)", text, re.MULTILINE))
    panels = json.loads((PROJECT / "deployments" / "grafana.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(r"rollout_\w+", expression)}
    assert asked == {name for name in served if not name.endswith("_created")}


@pytest.mark.server
def test_the_prefect_server_is_told_of_what_is_rare_and_its_automations_act(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch
):
    from prefect import flow, get_client, tags
    from prefect.events.actions import DoNothing
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
    from prefect.runtime import flow_run

    from tasks.runtime.artifact_sender import SENDER

    model = "ab" * 32

    @flow(name="tells")
    def tells() -> str:
        events.emit(events.Promoted(resource="policy", model=model, reason="it rose"))
        events.emit(events.SamplesSkipped(stage="batch_inference", samples=2, reason="they failed"))
        events.emit(events.TrainStep(algorithm="sft", label="", step=1, num_steps=2, figures={}))
        return str(flow_run.id)

    def told(client: Any, prefix: str, resource: str) -> list[dict[str, Any]]:
        wanted = {"event": {"prefix": [prefix]}, "any_resource": {"id": [resource]}}
        answer = client.request("POST", "/events/filter", json={"filter": wanted, "limit": 50})
        return sorted(answer.json()["events"], key=lambda event: event["occurred"])

    trigger = EventTrigger(
        expect={"rollout.promoted"},
        match={"prefect.resource.id": "rollout.model.*"},  # pyright: ignore[reportArgumentType]
        match_related={"prefect.resource.id": "prefect.tag.night"},  # pyright: ignore[reportArgumentType]
        posture=Posture.Reactive,
        threshold=1,
    )
    with get_client(sync_client=True) as client:
        acting = client.create_automation(AutomationCore(name="seen", trigger=trigger, actions=[DoNothing()]))
        try:
            with tags("night"):
                run = tells()
            assert SENDER.flush(30) == 0
            promoted, skipped = wait_for(
                lambda: len(found := told(client, "rollout.", f"prefect.flow-run.{run}")) == 2 and found, "both events"
            )
            acted = wait_for(
                lambda: told(client, "prefect.automation.triggered", f"prefect.automation.{acting}"), "the automation"
            )
        finally:
            client.delete_automation(acting)
        assert promoted["event"] == "rollout.promoted" and len(acted) == 1
        assert promoted["resource"] == {
            "prefect.resource.id": f"rollout.model.{model}",
            "prefect.resource.name": "policy",
        }
        assert promoted["payload"] == {"resource": "policy", "model": model, "reason": "it rose"}
        assert skipped["event"] == "rollout.samples_skipped" and skipped["payload"]["samples"] == 2
        assert skipped["resource"]["prefect.resource.id"] == f"prefect.flow-run.{run}"
        monkeypatch.setenv("ROLLOUT_PREFECT_EVENTS", "off")
        quiet = tells()
        assert SENDER.flush(30) == 0 and told(client, "rollout.", f"prefect.flow-run.{quiet}") == []


def test_without_a_server_or_a_free_port_it_says_so(tmp_path: Path):
    done = rollout(tmp_path, "ops", "metrics", PREFECT_HOME=str(tmp_path / "home"))
    assert done.returncode == 2 and "no Prefect server: PREFECT_API_URL is not set" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "data").exists()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment = {"PREFECT_API_URL": "http://127.0.0.1:9/api"}
        done = rollout(tmp_path, "ops", "metrics", "--port", str(port), **environment)
    assert done.returncode == 2 and f"127.0.0.1:{port} cannot be listened on" in done.stderr, done.stderr
