"""The simplest algorithm: run every task, say what came of it, learn nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Literal

from rollout_core.agents.algorithm import Algorithm, Dataset
from rollout_core.agents.emitters import find_final_reward
from rollout_core.base.errors import ConfigError, in_words
from rollout_core.store import AttemptedRollout, EnqueueRolloutRequest, LightningStore, Rollout, RolloutMode, Span
from rollout_core.store.lifecycle import FINISHED

logger = logging.getLogger(__name__)

_INITIAL_RESOURCES_ID = "default"
_CLIENT_POLL_SECONDS = 0.1


class FastAlgorithm(Algorithm):
    """One that ends soon and needs no GPU, so that ``Trainer.dev`` may run it."""


class Baseline(FastAlgorithm):
    """Runs the training tasks, then the validation tasks, ``n_epochs`` times, and logs statuses, rewards and spans.

    Args:
        n_epochs: how often.
        train_split: not used, for the datasets come apart; accepted for programs written for agentlightning.
        polling_interval: longest time between looks, in seconds.
        max_queue_length: tasks that may wait at a time; what is under way is not counted.
        span_verbosity: whether spans are logged by their names and attributes' keys, whole, or not at all.
    """

    def __init__(
        self,
        *,
        n_epochs: int = 1,
        train_split: float = 0.5,
        polling_interval: float = 5.0,
        max_queue_length: int = 4,
        span_verbosity: Literal["keys", "key_values", "none"] = "keys",
    ) -> None:
        if n_epochs < 1 or max_queue_length < 1 or polling_interval <= 0:
            raise ConfigError(
                f"n_epochs is {n_epochs}, max_queue_length {max_queue_length}, polling_interval {polling_interval}; "
                "expected 1 or more, 1 or more, and seconds above 0"
            )
        if not 0 < train_split < 1:
            raise ConfigError(f"train_split is {train_split}; expected a share between 0 and 1")
        self._n_epochs = n_epochs
        self._polling_interval = polling_interval
        self._max_queue_length = max_queue_length
        self._verbosity = span_verbosity

    async def run(self, train_dataset: Dataset | None = None, val_dataset: Dataset | None = None) -> None:
        store = self.get_store()
        resources = self.get_initial_resources()
        if resources is not None:
            await store.update_resources(_INITIAL_RESOURCES_ID, resources)
        tasks: list[tuple[Any, RolloutMode]] = [
            *((task, "train") for task in _items(train_dataset)),
            *((task, "val") for task in _items(val_dataset)),
        ]
        if not tasks:
            logger.error("There are no tasks: give fit a train_dataset or a val_dataset")
        for epoch in range(self._n_epochs):
            await self._run_epoch(store, tasks, epoch)

    async def _run_epoch(self, store: LightningStore, tasks: Sequence[tuple[Any, RolloutMode]], epoch: int) -> None:
        waiting = list(tasks)
        under_way: list[str] = []
        rewards: list[float] = []
        while waiting or under_way:
            queued = await store.query_rollouts(status_in=["queuing", "requeuing"], limit=0)
            room = max(0, self._max_queue_length - queued.total)
            batch = [EnqueueRolloutRequest(input=task, mode=mode) for task, mode in waiting[:room]]
            waiting = waiting[room:]
            under_way += [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(batch)]
            for rollout in await self._wait(store, under_way):
                under_way.remove(rollout.rollout_id)
                reward = await self._report(store, rollout)
                if reward is not None:
                    rewards.append(reward)
        mean = f"{sum(rewards) / len(rewards):.4f}" if rewards else "none"
        logger.info("Epoch %d: %d rollouts, %d with a reward, mean %s", epoch + 1, len(tasks), len(rewards), mean)

    async def _wait(self, store: LightningStore, rollout_ids: Sequence[str]) -> Sequence[Rollout]:
        """Those that have finished when the oldest one has, or after a short time, as others may overtake it."""
        timeout = min(self._polling_interval, _CLIENT_POLL_SECONDS)
        if not rollout_ids:  # others fill the queue
            await asyncio.sleep(timeout)
            return []
        await store.wait_for_rollouts(rollout_ids=rollout_ids[:1], timeout=timeout)
        found = await store.query_rollouts(rollout_id_in=rollout_ids)
        return [rollout for rollout in found if rollout.status in FINISHED]

    async def _report(self, store: LightningStore, rollout: Rollout) -> float | None:
        attempt = rollout.attempt.attempt_id if isinstance(rollout, AttemptedRollout) else "latest"
        spans = await store.query_spans(rollout.rollout_id, attempt)
        reward = find_final_reward(spans)
        logger.info(
            "Rollout %s (%s) %s, %d spans, reward %s",
            rollout.rollout_id,
            rollout.mode,
            rollout.status,
            len(spans),
            reward,
        )
        self._log_spans(spans)
        if self._adapter is not None and spans:
            try:
                adapted = self._adapter.adapt(spans)
                logger.info("Rollout %s: the adapter made %d items", rollout.rollout_id, len(adapted))
            except Exception as error:  # noqa: BLE001 - a user's adapter; the other rollouts are worth seeing
                logger.error("Rollout %s: the adapter failed: %s", rollout.rollout_id, in_words(error))
        return reward

    def _log_spans(self, spans: Sequence[Span]) -> None:
        if self._verbosity == "none":
            return
        for span in spans:
            shown = span.attributes if self._verbosity == "key_values" else sorted(span.attributes)
            logger.info("  %s: %s", span.name, shown)


def _items(dataset: Dataset | None) -> list[Any]:
    return [] if dataset is None else [dataset[place] for place in range(len(dataset))]
