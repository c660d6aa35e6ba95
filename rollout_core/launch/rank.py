"""One rank of an update: ``python -m rollout_core.launch.rank JOB.json``.

Which rank of how many is in the environment, as torchrun and ``accelerate launch`` set it too (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT). The first one writes the outcome to the file that the job names.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollout_core.algorithms.context import HeldStates, UpdateContext
from rollout_core.base import traces
from rollout_core.base.collector import collect_seldom
from rollout_core.base.determinism import prepare_environment, probe_device, release_gpu_memory
from rollout_core.base.errors import ConfigError, RolloutError, error_message
from rollout_core.base.logs import configure
from rollout_core.base.process_tree import signal_at_parents_end
from rollout_core.launch.launcher import (
    IDENTITY,
    LAUNCHER,
    PIPE,
    RENDEZVOUS,
    STAYS,
    STORAGE_OPTIONS,
    Job,
    decode_inputs,
    outcome_type,
    report_type,
    update_function,
)
from rollout_core.launch.own_loss import load_own_loss
from rollout_core.objects import ObjectStore

PATIENCE = timedelta(hours=2)
"""For the other ranks: a launcher ends all when one dies; who waits may wait for a large upload by the first."""


def main() -> None:
    """Run the job named on the command line. Exit codes: 0 done, 1 it failed, 2 bad job or configuration."""
    end_with_launcher()
    stopping = _heed_sigterm()
    prepare_environment()
    messenger = Messenger()
    rank = int(os.environ.get("RANK", "0"))
    configure(logging.WARNING if rank else logging.INFO, "%(levelname)s %(message)s", stream=sys.stderr)
    try:
        if len(sys.argv) != 2:
            raise ConfigError("expected one argument: the path of a job file")
        options = json.loads(os.environ.pop(STORAGE_OPTIONS, "{}"))
        for file, traceparent in _jobs():
            job = Job.model_validate_json(file.read_bytes())
            with traces.part_of(traceparent):
                span = traces.start_span("rank", rank=rank, algorithm=job.algorithm)
                with span.as_current():
                    run(job, messenger, options, is_stopping=stopping.is_set)
                span.end()
            release_gpu_memory()
            if STAYS in os.environ:
                messenger.send("done", None)
    except Exception as error:  # noqa: BLE001 - reported to the launcher, whatever it is
        messenger.send("error", error_message(error))
        traces.flush(1.0)
        text = f"ERROR {error}" if isinstance(error, RolloutError) else traceback.format_exc()
        sys.stderr.write(text.rstrip() + "\n")
        sys.stderr.flush()
        # Not by way of destructors: those of a communicator wait for ranks that will not answer any more.
        os._exit(2 if isinstance(error, ConfigError) else 1)
    traces.flush()


def _jobs() -> Iterator[tuple[Path, str | None]]:
    """The file of the job on the command line and then of those that come by standard input, each with the trace that
    it is part of."""
    yield Path(sys.argv[1]), os.environ.get(traces.TRACEPARENT)
    if STAYS in os.environ:
        for line in sys.stdin:
            job = json.loads(line)
            yield Path(job["job"]), job["traceparent"]


def _heed_sigterm() -> threading.Event:
    """What SIGTERM sets from now on, instead of ending the process: the update ends after its step, with a snapshot."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    return asked


def end_with_launcher() -> None:
    """Ask the kernel to end this process when its launcher dies, also by ``kill -9``."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before it could be asked for
        os._exit(1)


def run(job: Job, messenger: Messenger, storage_options: Mapping[str, Any], *, is_stopping: Callable[[], bool]) -> None:
    """Take part in the update, until ``is_stopping`` says otherwise. Raises what the update raises, and ConfigError
    where the ranks are not as many."""
    import torch.distributed as dist

    from rollout_core.algorithms.parallel import is_first

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes != job.nproc:
        raise ConfigError(f"this job is for {job.nproc} processes, and {processes} were started")
    join()
    inputs = decode_inputs(job.update, job.inputs)
    context = UpdateContext(
        objects=ObjectStore.from_url(job.storage, storage_options=storage_options),
        cache=job.cache,
        tracking=job.tracking,
        **{field: getattr(job, field) for field in IDENTITY},
        num_threads=job.num_threads,
        held=job.held and _held_states(job.held),
        stores_state=job.stores_state,
        own_loss=load_own_loss(inputs["settings"]),
        is_stopping=is_stopping,
        on_start=lambda first, last: messenger.send("start", [first, last]) if is_first() else None,
        on_step=lambda row: messenger.send("step", row) if is_first() else None,
    )
    function = update_function(job.update)
    callbacks = {}
    if "on_data" in inspect.signature(function).parameters and is_first():
        report = report_type(job.update)
        callbacks["on_data"] = lambda found: messenger.send("data", report.dump_python(found, mode="json"))
    outcome = function(**inputs, **callbacks, context=context)
    if is_first():
        job.result.write_bytes(outcome_type(job.update).dump_json(outcome))
    if dist.is_initialized():
        dist.destroy_process_group()


@lru_cache(maxsize=1)
def _held_states(folder: Path) -> HeldStates:
    """The same for all jobs of a run that this process works on one after the other."""
    return HeldStates(folder)


def join() -> None:
    """Meet the other ranks, by NCCL where each has a GPU and by gloo elsewhere. A single rank has nothing to do."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return
    import torch
    import torch.distributed as dist

    device = None
    if probe_device() == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device is not None else "gloo",  # what is offloaded is summed on the host
        init_method=os.environ.get(RENDEZVOUS, "env://"),
        rank=int(os.environ["RANK"]),
        world_size=processes,
        timeout=PATIENCE,
        device_id=device,
    )


class Messenger:
    """Writes messages, or none where no launcher listens."""

    def __init__(self) -> None:
        number = os.environ.get(PIPE)
        self._file = os.fdopen(int(number), "w", encoding="utf-8") if number else None
        self._lock = threading.Lock()

    def send(self, kind: str, content: Any) -> None:
        """One message, out when this returns."""
        if self._file is None:
            return
        with self._lock:
            self._file.write(json.dumps([kind, content]) + "\n")
            self._file.flush()


if __name__ == "__main__":
    collect_seldom()
    main()
