"""Who works on a batch: threads of this machine, or the workers of a Dask cluster."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from rollout_core.config.base import Address, Settings


class AdaptConfig(Settings):
    """A cluster that grows and shrinks with the work there is."""

    minimum: int = Field(default=0, ge=0)
    maximum: int = Field(ge=1)

    @model_validator(mode="after")
    def _in_order(self) -> AdaptConfig:
        if self.minimum > self.maximum:
            raise ValueError(f"minimum is {self.minimum} and maximum {self.maximum}; give minimum <= maximum")
        return self


class DaskConfig(Settings):
    """Shards run on the workers of a Dask cluster, one engine a worker process. Give ``address`` or ``cluster``."""

    address: Address | None = Field(default=None, pattern=r"^(tcp|tls|ws|wss|ucx|ucxx)://\S+$")
    """Of a running scheduler, such as ``tcp://scheduler:8786``, or ``tls://...``."""
    cluster: str | None = Field(default=None, pattern=r"^\w+(\.\w+)+$")
    """Import path of a cluster class, such as ``distributed.LocalCluster``: a cluster for the length of this run."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the cluster class. Secrets do not belong here: the run's parameters show them."""
    adapt: AdaptConfig | None = None
    """Let the cluster have as many workers as the work needs."""
    gpus_per_worker: float | None = Field(default=None, gt=0)
    """What each worker offers as its Dask resource ``GPU`` (``dask worker --resources GPU=1``). A shard asks for half
    of it, since two are under way on a worker, and workers that offer less get none. Default: every worker works."""
    wait_seconds: float = Field(default=600.0, gt=0)
    """A run that has had no worker for this long fails."""

    @model_validator(mode="after")
    def _one_cluster(self) -> DaskConfig:
        if (self.address is None) == (self.cluster is None):
            got = "neither" if self.address is None else "both"
            raise ValueError(f"give either address, of a running scheduler, or cluster, a class; got {got}")
        if self.address is not None and (self.options or self.adapt is not None):
            raise ValueError("options and adapt are for a cluster class; a running scheduler has its own")
        return self


class WorkersConfig(Settings):
    """Fan-out. Changes speed only."""

    count: int = Field(default=1, ge=1)
    """Shards worked on at the same time. One more is made ready meanwhile, so that the engine never waits for it."""
    shard_size: int = Field(default=4096, ge=1)
    """Prompts of a shard, which is one retryable, cached task."""
    claim_size: int | None = Field(default=None, ge=1)
    """Samples a worker claims at a time. Default: 256 on a cluster, where an idle worker may take what a busy one has
    not claimed, and 1024 on one machine."""
    stale_after_seconds: float = Field(default=30.0, ge=1)
    """The claims of a worker of another machine that was silent for so long are taken over. Workers give a sign of life
    every fifth of it."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """What a worker costs in an hour; the closing table then tells what a million tokens cost."""
    dask: DaskConfig | None = None
    """Many machines instead of threads of this one."""

    @model_validator(mode="after")
    def _count_is_of_threads(self) -> WorkersConfig:
        if self.dask is not None and self.count != 1:
            raise ValueError(
                f"count is {self.count}, but it is for threads of one machine; a Dask cluster has the workers it has "
                "(dask.options.n_workers, dask.adapt, or as many as were started)"
            )
        return self

    @property
    def claimed_together(self) -> int:
        """``claim_size``, or its default."""
        return self.claim_size or (1024 if self.dask is None else 256)

    def cache_identity(self) -> Any:
        return None
