"""Batches of samples for tests, and scripted engines that can be watched and made to fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from rollout_core.base.ids import ContentId
from rollout_core.config import SamplingParams, ScriptedBackend
from rollout_core.data.datasets import PromptRow
from rollout_core.data.samples import Completion, Sample, encode_samples, make_samples
from rollout_core.inference.backend import ModelRef, Request, ScriptedEngine
from rollout_core.inference.batch import BatchOptions, Progress, Work
from rollout_core.inference.lanes import Lanes
from rollout_core.inference.training_samples import complete_batch
from rollout_core.models.pretrained import load_tokenizer
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Completions
from rollout_core.store import AttemptedRollout, SqlLightningStore

PARAMS = SamplingParams(max_tokens=64)


def ref(folder: Path) -> ModelRef:
    """A model folder with the content id it really has."""
    return ModelRef(ObjectStore.from_url("memory://models").put_tree(folder), folder)


class WatchedEngine(ScriptedEngine):
    """A scripted engine that answers out of order, remembers what it was asked for, and fails when told to."""

    def __init__(self, model: ModelRef, text: str = "SCRIPTED:{prompt}", **config: Any) -> None:
        super().__init__(ScriptedBackend(text=text, **config), model)
        self.asked: list[str] = []
        """Keys of all requests, in order of arrival."""
        self.fail_after: int | None = None
        """Completions of a stream before it raises."""
        self.at: dict[int, Callable[[], object]] = {}
        """What to do before completion number so and so of all."""
        self.closed_streams = 0
        self.batch_invariant = True
        self._made = 0

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        waiting, position = iter(requests), 0
        try:
            while group := list(takewhile(bool, waiting)):
                self.asked += [request.key for request in group]
                for completion in super().stream(random.Random(len(group)).sample(group, len(group))):
                    if position == self.fail_after:
                        raise RuntimeError("the engine broke")
                    position += 1
                    self._made += 1
                    self.at.get(self._made, lambda: None)()
                    yield self.finish(completion)
        finally:
            self.closed_streams += 1

    def finish(self, completion: Completion) -> Completion:
        return completion


class MoodyEngine(WatchedEngine):
    """Its answers depend on the batch they are made in, as on a GPU without batch-invariant kernels."""

    def __init__(self, model: ModelRef, **config: Any) -> None:
        super().__init__(model, **config)
        self.batch_invariant = False

    def finish(self, completion: Completion) -> Completion:
        return replace(completion, text=f"{completion.text} in stream {self.closed_streams}")


class Ready:
    """A backend that already runs, as batch inference is given it."""

    def __init__(self, backend: Any) -> None:
        self.model_id = backend.model_id
        self.batch_invariant = backend.batch_invariant
        self._lanes = Lanes(backend)

    def open(self) -> Any:
        return nullcontext(self._lanes)


@dataclass
class Batch:
    """A set of samples, the places where it is kept, and how to complete it."""

    objects: ObjectStore
    database: str
    samples: Sequence[Sample]
    samples_id: ContentId
    progress: list[Progress] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    """Of each `complete` that ended."""

    @property
    def ids(self) -> list[str]:
        return [str(sample.id) for sample in self.samples]

    async def complete(self, backend: Any, *, worker: str = "w1", **options: Any) -> Completions:
        async with SqlLightningStore.from_url(self.database) as store:
            record, work = await complete_batch(
                store,
                self.objects,
                Ready(backend),
                self.samples_id,
                PARAMS,
                worker_id=worker,
                # Groups are committed when they are full, and not because the machine is slow.
                options=BatchOptions(**{"commit_size": 3, "commit_seconds": 3600.0, "wait_seconds": 0.05, **options}),
                on_progress=self.progress.append,
            )
            self.works.append(work)
            return record

    async def rollouts(self) -> dict[str, AttemptedRollout]:
        async with SqlLightningStore.from_url(self.database) as store:
            return {rollout.rollout_id: rollout for rollout in await store.query_rollouts()}  # type: ignore[misc]

    async def statuses(self) -> dict[str, int]:
        """Number of samples by status."""
        found = [rollout.status for rollout in (await self.rollouts()).values()]
        return {status: found.count(status) for status in sorted(set(found))}

    async def successes(self) -> dict[str, int]:
        """Number of attempts that succeeded, by sample."""
        async with SqlLightningStore.from_url(self.database) as store:
            return {
                sample: sum(attempt.status == "succeeded" for attempt in await store.query_attempts(sample))
                for sample in self.ids
            }


def make_batch(folder: Path, model: ModelRef, prompts: Sequence[str], **sampling: Any) -> Batch:
    """Samples of ``prompts`` with storage and database in ``folder``."""
    objects = ObjectStore.from_url(f"file://{folder / 'objects'}")
    samples = make_samples(
        load_tokenizer(model.folder),
        [PromptRow(prompt=prompt) for prompt in prompts],
        model=model.content_id,
        params=PARAMS,
        **sampling,
    )
    return Batch(objects, f"sqlite:///{folder / 'rollout.db'}", samples, objects.put_bytes(encode_samples(samples)))
