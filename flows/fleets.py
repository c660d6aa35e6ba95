"""The workers that a configuration asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flows.fan_out import Fleet, local_fleet
from rollout_core.config import WorkersConfig


@contextmanager
def open_fleet(workers: WorkersConfig, run_id: str) -> Iterator[Fleet]:
    """The configured workers, for the length of the block."""
    if workers.dask is None:
        with local_fleet(workers.count) as fleet:
            yield fleet
    else:
        # Dask need not be installed for workers of this machine.
        from flows.dask.cluster import dask_fleet

        with dask_fleet(workers, workers.dask, run_id) as fleet:
            yield fleet
