"""Traces of runs at a real OTLP/HTTP receiver: flow, stages, batches; across tries, ranks and Dask workers."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import UUID

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from rollout_core.algorithms.context import UpdateContext
from rollout_core.base import traces
from rollout_core.base.ids import hash_bytes
from rollout_core.config import Run, RunInfo, SFTSettings
from rollout_core.data.datasets import SftRow, to_jsonl
from rollout_core.launch import run_update
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Record
from tasks.runtime.events import EVENT, WorkerEnd, WorkerStart
from tests.conftest import PROJECT
from tests.flows.conftest import wait_for
from tests.flows.test_dask import Batch, finish

FAILING = "no way to postgresql://ann:hunter2@db/rollout"


@dataclass(frozen=True)
class Seen:
    """A span as it arrived."""

    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    failed: str | None
    seconds: float
    process: int
    links: list[str]


@dataclass
class Collector:
    """What came to a receiver on loopback."""

    address: str
    spans: list[Seen] = field(default_factory=list)

    def take(self, body: bytes) -> None:
        for of_process in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {item.key: item.value for item in of_process.resource.attributes}
            assert resource["service.name"].string_value == "rollout"
            for span in (span for scope in of_process.scope_spans for span in scope.spans):
                values = {item.key.removeprefix("rollout."): item.value for item in span.attributes}
                self.spans.append(
                    Seen(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        {key: getattr(value, str(value.WhichOneof("value"))) for key, value in values.items()},
                        span.status.message if span.status.code == 2 else None,
                        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                        resource["process.pid"].int_value,
                        [link.trace_id.hex() for link in span.links],
                    )
                )

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            found.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        found = Collector(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        use(monkeypatch, found.address)
        yield found
        server.shutdown()


def use(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Send this process's spans there."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    for name in ("_provider", "_exporter"):
        monkeypatch.setattr(traces, name, None)


class Counted(Record):
    num_samples: int
    num_tokens: int


@pytest.mark.server
def test_tries_of_a_run_are_one_trace_of_flow_stages_and_batches(prefect_server, collector, monkeypatch):
    from prefect import flow
    from prefect.context import FlowRunContext

    from rollout_core.base.errors import Fatal
    from tasks.runtime.events import SampleCount, Training
    from tasks.runtime.flow_run import recompute_missing
    from tasks.runtime.stage import stage

    tries: list[str] = []

    @stage(version=1)
    def generate_some(count: int, *, label: str = "") -> Counted:
        told = SampleCount("generate_some", interval=0.0)
        told.note(count, 10 * count)
        told.end(2 * count, 20 * count)
        return Counted(num_samples=2 * count, num_tokens=20 * count)

    @stage(version=1)
    def train_some(steps: int) -> Counted:
        told = Training("sft_update", "sft", "")
        told.start(0, steps)
        for step in range(1, steps + 1):
            told.step({"step": step, "loss": 1 / step, "num_tokens": 7})
        told.end()
        if len(tries) == 1:
            raise Fatal(FAILING)
        return Counted(num_samples=0, num_tokens=7 * steps)

    @flow(name="traced", retries=1)
    def traced() -> None:
        context = FlowRunContext.get()
        assert context is not None and context.flow_run is not None
        tries.append(str(context.flow_run.id))

        def body(journal: Any) -> None:
            generate_some(3, label="before")
            train_some(40)

        recompute_missing(body, Run(run=RunInfo(name="small")))

    outer = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    monkeypatch.setenv("TRACEPARENT", outer)
    traced()
    assert traces.flush(30)
    assert len(set(tries)) == 1 and {span.trace for span in collector.spans} == {UUID(tries[0]).hex}
    first, second = collector.named("traced")
    assert (first.parent, second.parent) == ("", "") and first.links == second.links == ["ab" * 16]
    assert [span.attributes["try"] for span in (first, second)] == [1, 2]
    assert first.failed is not None and second.failed is None and "hunter2" not in first.failed

    made, again = collector.named("generate_some")
    assert (made.parent, again.parent) == (first.id, second.id)
    assert made.attributes | {"key": ""} == {
        "stage": "generate_some",
        "label": "before",
        "state": "Completed",
        "cached": False,
        "samples": 6,
        "tokens": 60,
        "key": "",
    }
    assert again.attributes == made.attributes | {"state": "Cached", "cached": True}
    assert len(made.attributes["key"]) == 64
    failed, trained = collector.named("train_some")
    assert failed.failed is not None and failed.failed.endswith("no way to postgresql://ann:***@db/rollout")
    assert trained.failed is None and trained.attributes["state"] == "Completed"

    batches = collector.named("batch")
    samples = [span.attributes for span in batches if span.parent == made.id]
    assert samples == [{"samples": 3, "tokens": 30}, {"samples": 3, "tokens": 30}]
    steps = [span for span in batches if span.parent == trained.id]
    assert sum(span.attributes["steps"] for span in steps) == 40 and len(steps) < 40
    assert sum(span.attributes["tokens"] for span in steps) == 280
    assert steps[-1].attributes["last_step"] == 40 and steps[-1].attributes["loss"] == pytest.approx(1 / 40)
    assert not [span for span in batches if span.parent == again.id], "nothing is done for what is cached"


@pytest.mark.campaign
@pytest.mark.server
def test_dask_workers_go_on_with_the_trace_and_are_told(prefect_server, collector, tiny_model, tmp_path, start_process):
    dask = {"cluster": "distributed.LocalCluster", "options": {"n_workers": 1, "threads_per_worker": 2}}
    batch = Batch(tmp_path, tiny_model, 20, {"shard_size": 10, "dask": dask})
    told = tmp_path / "events.ndjson"
    environment = {"PREFECT_API_URL": prefect_server, "PYTHONPATH": str(PROJECT), "ROLLOUT_EVENTS": str(told)}
    rollout = ("-c", "from flows.cli import main; main()", "infer", "batch", "--config", batch.write())
    finish(start_process(*rollout, env=environment))
    batch.check_output()
    of_worker = [
        event
        for event in map(EVENT.validate_json, told.read_bytes().splitlines())
        if isinstance(event, WorkerStart | WorkerEnd)
    ]
    assert [(event.topic, event.kind) for event in of_worker] == [("worker_start", "dask"), ("worker_end", "dask")]
    [run] = collector.named("batch-inference")
    shards = {span.id: span for span in collector.named("infer_shard")}
    assert [span.attributes["samples"] for span in shards.values()] == [10, 10]
    assert {span.parent for span in shards.values()} == {run.id}
    of_workers = collector.named("batch")
    assert sum(span.attributes["samples"] for span in of_workers) == 20
    assert {span.parent for span in of_workers} <= shards.keys() and {span.trace for span in of_workers} == {run.trace}
    assert {span.process for span in of_workers}.isdisjoint({run.process}), "they ran in processes of their own"


def test_ranks_go_on_with_the_trace(collector, tiny_model, tmp_path):
    settings = SFTSettings.model_validate(
        {"dataset": {"path": "x"}, "budget": {"max_steps": 1}, "parallel": {"nproc": 2}, "optimizer": {"lr": 1e-3}}
    )
    objects = ObjectStore.from_url(str(tmp_path / "objects"))
    context = UpdateContext(
        objects=objects, cache=tmp_path / "cache", key=hash_bytes(b"key"), run_id="run", seed=1, num_threads=1
    )
    rows = objects.put_bytes(to_jsonl([SftRow(prompt="sort 2 1 =", completion=" 1 2")] * 4))
    with traces.trace_of_run("by hand", "0" * 31 + "7"):
        run_update("sft", context, model=objects.put_tree(tiny_model), dataset=rows, settings=settings)
    assert traces.current_traceparent() is None and traces.environment() == {}
    assert traces.flush(30)
    [run] = collector.named("by hand")
    ranks = collector.named("rank")
    assert run.trace == "0" * 31 + "7" and {span.parent for span in ranks} == {run.id}
    assert sorted(span.attributes["rank"] for span in ranks) == [0, 1]
    assert len({run.process, *(span.process for span in ranks)}) == 3


@pytest.mark.parametrize("answers", [False, True])
def test_a_collector_that_is_away_or_hangs_holds_nothing_up(monkeypatch, answers):
    """One refuses connections, the other takes them and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answers:
            listener.listen()
        use(monkeypatch, f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        for _ in range(5000):  # more than the queue holds
            traces.start_span("work", label="x").end()
        wait_for(lambda: not traces.flush(0.1) and traces._exporter.is_away, "the collector counts as away", seconds=60)
        assert not traces.flush(60), "it returns without a try"


def test_without_an_endpoint_nothing_is_imported_and_what_cannot_be_is_told_once(monkeypatch, caplog):
    program = """
import sys
import flows.nightly, flows.batch
from rollout_core.base import traces
traces.start_span("x").end()
assert traces.flush()
print(*[name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
"""
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setattr(traces, "_told", set())
    assert not traces.is_on() and not traces.is_on()
    assert [record.message for record in caplog.records].count(
        "traces are not sent: the OTLP protocol is set to 'grpc', and only 'http/protobuf' is spoken here"
    ) == 1
