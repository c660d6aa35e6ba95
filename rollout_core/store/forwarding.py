"""A store that hands every call on to another one, chosen at each call."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar, cast

from rollout_core.store.base import LightningStore

Method = TypeVar("Method", bound=Callable[..., Any])


def _forwarded(method: Method) -> Method:
    name = method.__name__

    @functools.wraps(method)
    async def forward(self: ForwardingLightningStore, *args: Any, **kwargs: Any) -> Any:
        return await self.forward(name, *args, **kwargs)

    # Taken over by ``wraps`` from the contract, where the method is abstract.
    forward.__dict__.pop("__isabstractmethod__", None)
    return cast(Method, forward)


class ForwardingLightningStore(LightningStore):
    """Every coroutine of the contract but ``close``, forwarded to ``backend()``."""

    @abstractmethod
    def backend(self) -> LightningStore:
        """The store that is to serve the present call."""

    async def forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method of this name of ``backend()``. Overridden where something is to be done around each call."""
        return await getattr(self.backend(), name)(*args, **kwargs)

    statistics = _forwarded(LightningStore.statistics)
    enqueue_many_rollouts = _forwarded(LightningStore.enqueue_many_rollouts)
    enqueue_rollout = _forwarded(LightningStore.enqueue_rollout)
    dequeue_many_rollouts = _forwarded(LightningStore.dequeue_many_rollouts)
    dequeue_rollout = _forwarded(LightningStore.dequeue_rollout)
    claim_rollouts = _forwarded(LightningStore.claim_rollouts)
    release_rollouts = _forwarded(LightningStore.release_rollouts)
    start_rollout = _forwarded(LightningStore.start_rollout)
    start_many_rollouts = _forwarded(LightningStore.start_many_rollouts)
    start_many_attempts = _forwarded(LightningStore.start_many_attempts)
    start_attempt = _forwarded(LightningStore.start_attempt)
    update_rollout = _forwarded(LightningStore.update_rollout)
    update_many_attempts = _forwarded(LightningStore.update_many_attempts)
    update_attempt = _forwarded(LightningStore.update_attempt)
    add_many_spans = _forwarded(LightningStore.add_many_spans)
    add_span_fields = _forwarded(LightningStore.add_span_fields)
    add_encoded_spans = _forwarded(LightningStore.add_encoded_spans)
    end_attempts = _forwarded(LightningStore.end_attempts)
    add_span = _forwarded(LightningStore.add_span)
    add_otel_span = _forwarded(LightningStore.add_otel_span)
    get_many_span_sequence_ids = _forwarded(LightningStore.get_many_span_sequence_ids)
    get_next_span_sequence_id = _forwarded(LightningStore.get_next_span_sequence_id)
    query_rollouts = _forwarded(LightningStore.query_rollouts)
    get_rollout_by_id = _forwarded(LightningStore.get_rollout_by_id)
    query_attempts = _forwarded(LightningStore.query_attempts)
    get_latest_attempt = _forwarded(LightningStore.get_latest_attempt)
    query_spans = _forwarded(LightningStore.query_spans)
    query_spans_json = _forwarded(LightningStore.query_spans_json)
    query_many_spans = _forwarded(LightningStore.query_many_spans)
    wait_for_rollouts = _forwarded(LightningStore.wait_for_rollouts)
    add_resources = _forwarded(LightningStore.add_resources)
    update_resources = _forwarded(LightningStore.update_resources)
    query_resources = _forwarded(LightningStore.query_resources)
    get_resources_by_id = _forwarded(LightningStore.get_resources_by_id)
    get_latest_resources = _forwarded(LightningStore.get_latest_resources)
    update_worker = _forwarded(LightningStore.update_worker)
    query_workers = _forwarded(LightningStore.query_workers)
    get_worker_by_id = _forwarded(LightningStore.get_worker_by_id)
