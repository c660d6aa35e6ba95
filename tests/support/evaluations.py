"""Held-out evaluations as they are filed, of prompts with known rewards."""

from __future__ import annotations

import math

from rollout_core.base.ids import ContentId, canonical_json, hash_bytes
from rollout_core.data.samples import Completion, Sample, encode_completion, encode_samples
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import EvalReport


def evaluation(objects: ObjectStore, model: ContentId, *rows: tuple[str, float | None, int, str]) -> EvalReport:
    """Of prompts with the reward, the number of tokens and how it ended."""
    ids = [hash_bytes(f"{model} {place}".encode()) for place in range(len(rows))]
    samples = [Sample(key, row[0], [1], 0, None, {"answer": row[0]}) for key, row in zip(ids, rows, strict=True)]
    made = [
        Completion(key, [3] * row[2], [-0.5] * row[2], "x", "length" if row[3] == "length" else "stop")
        for key, row in zip(ids, rows, strict=True)
    ]
    rewards = [row[1] for row in rows]
    known = [reward for reward in rewards if reward is not None]
    return EvalReport(
        model=model,
        completions=objects.put_bytes(b"".join(map(encode_completion, made))),
        samples=objects.put_bytes(encode_samples(samples)),
        scores=objects.put_bytes(canonical_json(rewards)),
        num_samples=len(rows),
        mean_reward=math.fsum(known) / len(known),
        num_tokens=sum(row[2] for row in rows),
    )
