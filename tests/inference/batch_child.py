"""What the child processes of ``test_batch`` do: ``python batch_child.py FOLDER MODEL SAMPLES_ID JSON-OPTIONS``.

Completes a batch with the scripted engine. ``asked KEY`` is printed before a sample is generated, ``kept KEY`` once its
commit has been acknowledged, ``record JSON`` at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from batches import Ready

from rollout_core.base.ids import ContentId
from rollout_core.config import SamplingParams, ScriptedBackend
from rollout_core.data.samples import Completion
from rollout_core.inference.backend import ModelRef, Request, ScriptedEngine
from rollout_core.inference.batch import BatchOptions
from rollout_core.inference.ledger import SampleLedger
from rollout_core.inference.training_samples import complete_batch
from rollout_core.objects import ObjectStore
from rollout_core.store import SqlLightningStore


def say(*words: object) -> None:
    # One write a line: a kill cuts between lines.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class SayingEngine(ScriptedEngine):
    hold_after: int | None = None
    """Completions, after which nothing more comes of it."""

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        def seen() -> Iterator[Request | None]:
            for request in requests:
                if request is not None:
                    say("asked", request.key)
                yield request

        for count, completion in enumerate(super().stream(seen())):
            if count == self.hold_after:
                threading.Event().wait()
            yield completion


class SayingLedger(SampleLedger):
    async def commit(self, group):
        kept = await super().commit(group)
        for answer, won in zip(group, kept, strict=True):
            say("kept" if won else "lost", answer.attempt.rollout_id)
        return kept


async def main(folder: Path, model_folder: Path, samples_id: str, options: dict) -> None:
    import rollout_core.inference.batch as module

    module.SampleLedger = SayingLedger
    objects = ObjectStore.from_url(f"file://{folder / 'objects'}")
    model = ModelRef(ContentId(options.pop("model_id")), model_folder)
    engine = SayingEngine(ScriptedBackend(delay_seconds=options.pop("delay_seconds", 0.0)), model)
    engine.hold_after = options.pop("hold_after", None)
    if options.pop("wait_for_go", False):
        say("ready")
        sys.stdin.readline()
    async with SqlLightningStore.from_url(f"sqlite:///{folder / 'rollout.db'}") as store:
        record, _ = await complete_batch(
            store,
            objects,
            Ready(engine),
            ContentId(samples_id),
            SamplingParams(max_tokens=64),
            worker_id=f"w{os.getpid()}",
            options=BatchOptions(**options),
        )
    say("record", record.model_dump_json())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])))
