"""A run's ``[placement]``: which of its stages run on which workers of a Dask cluster. Flows read the same either way.

The cluster is opened with the first stage that needs it, so a run that finds everything cached needs none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout_core.config import PlacedRun, PlacementConfig, Run, WorkersConfig
from rollout_core.config.inference import StagePlace
from rollout_core.inference.batch import Progress
from rollout_core.inference.batch_runs import forget_tally, tally
from rollout_core.objects.records import Completions, PromptSet
from rollout_core.objects.snapshots import SnapshotStore, progress_ref
from tasks.runtime import connections
from tasks.runtime.placement import FanOut, Fleet, RunsTasks, Submitted, local_fleet, placing
from tasks.runtime.stage import Stage

if TYPE_CHECKING:
    from tasks.runtime.dask.fleet import DaskFleet, OpenCluster

CLAIMS_PER_WORKER = 4
"""Blocks that a worker's share of a sample set is claimed in: what is claimed is not shared any more."""
MOST_CLAIMED = 256


@contextmanager
def placed(config: Run, flow_run_id: str) -> Iterator[None]:
    """Stages called inside the block run where ``config`` says."""
    if not isinstance(config, PlacedRun) or config.placement is None:
        yield
        return
    with _Placement(config.placement, flow_run_id) as placement:
        with placing({kind: placement.place(kind) for kind in config.placement.kinds}):
            yield


@contextmanager
def open_fleet(workers: WorkersConfig, run_id: str, *, in_turn: bool = False) -> Iterator[Fleet]:
    """The workers of a run that fans out, on this machine or a cluster, for the length of the block. ``in_turn``: as of
    `local_fleet`, and only there."""
    if workers.dask is None:
        with local_fleet(workers.count, in_turn=in_turn) as fleet:
            yield fleet
    else:
        # Dask need not be installed for workers of this machine.
        from tasks.runtime.dask.fleet import dask_fleet

        with dask_fleet(workers, workers.dask, run_id) as fleet:
            yield fleet


@dataclass(frozen=True)
class _Call:
    """A stage with its arguments."""

    stage: Stage[..., Any]
    inputs: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.stage.name} {self.inputs.get('label', '')}".rstrip()

    @property
    def num_samples(self) -> int | None:
        """How many samples workers may share; None: they share nothing."""
        sets = [value for value in self.inputs.values() if isinstance(value, PromptSet | Completions)]
        return sets[0].num_samples if sets else None

    def submit(self, runner: RunsTasks) -> Submitted[Any]:
        """Start it on a worker."""
        return self.stage.submit(runner, **self.inputs)

    def alone(self) -> FanOut[_Call, Any]:
        """How one worker runs it. One that died is followed by another as long as there are new snapshots."""

        def steps_done(call: _Call) -> Progress:
            objects = connections.objects()
            snapshot = objects.get_ref(progress_ref(call.stage.key(call.inputs)))
            return Progress(SnapshotStore(objects).get(snapshot).step if snapshot is not None else 0, 0, 0)

        return self._fan_out(None, steps_done)

    def shared(self, run_id: str) -> FanOut[_Call, Any]:
        """How several run it together."""
        num_samples, known = self.num_samples or 0, tally(run_id)

        def samples_done(call: _Call) -> Progress:
            # Before its worker has reported, all of it is there to be helped with.
            noted = known.of(call.inputs["prompts"].samples) if "prompts" in call.inputs else Progress(0, 0, 0)
            return noted if noted.total else Progress(0, num_samples, 0)

        return self._fan_out(lambda runner, call: call.help(runner), samples_done)

    def _fan_out(
        self, assist: Callable[[RunsTasks, _Call], Submitted[Any]] | None, progress: Callable[[_Call], Progress]
    ) -> FanOut[_Call, Any]:
        return FanOut(
            lambda runner, call: call.submit(runner),
            assist,
            progress=progress,
            name=lambda call: call.name,
            on_result=lambda call, record: None,
        )

    def help(self, runner: RunsTasks) -> Submitted[Any]:
        """What another worker does for it meanwhile."""
        return self.stage.help(runner, self.inputs)


class _Placement:
    """The cluster of a run, once a stage needs it."""

    def __init__(self, config: PlacementConfig, flow_run_id: str) -> None:
        self._config = config
        self._flow_run_id = flow_run_id
        self._stack = ExitStack()
        self._cluster: OpenCluster | None = None
        self._fleets: dict[StagePlace, DaskFleet] = {}

    def __enter__(self) -> _Placement:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        forget_tally(self._flow_run_id)

    def place(self, kind: StagePlace) -> Callable[[Stage[..., Any], dict[str, Any]], Any]:
        """What runs stages of this kind."""
        return lambda stage, inputs: self._run(kind, _Call(stage, inputs))

    def _run(self, kind: StagePlace, call: _Call) -> Any:
        config, fleet = self._config.of(kind), self._fleet(kind)
        if call.num_samples is None or config.max_workers == 1:
            fleet.share(None)
            return fleet.run_all([call], call.alone())[0]
        share = math.ceil(call.num_samples / max(1, fleet.num_workers()))
        claim_size = min(MOST_CLAIMED, math.ceil(share / CLAIMS_PER_WORKER))
        fleet.share(WorkersConfig(dask=config, claim_size=claim_size))
        return fleet.run_all([call], call.shared(self._flow_run_id))[0]

    def _fleet(self, kind: StagePlace) -> DaskFleet:
        if kind not in self._fleets:
            config = self._config.of(kind)
            self._fleets[kind] = self._opened().fleet(WorkersConfig(dask=config), config, at_once=1)
        return self._fleets[kind]

    def _opened(self) -> OpenCluster:
        if self._cluster is None:
            # Dask is an extra.
            from tasks.runtime.dask.fleet import dask_cluster

            self._cluster = self._stack.enter_context(
                dask_cluster(self._config.dask, self._flow_run_id, key="placement.dask")
            )
        return self._cluster
