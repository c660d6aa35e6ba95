"""What the learners train on: completions of a sample set, or token samples of stored rollouts, whoever ran them.

Of a set, samples that failed for good may be left out together with those that they are compared with. Stored rollouts
become token samples in ``rollout_core.agents.adapters.span_samples``; what cannot be learnt from is counted by reason
and never silently dropped.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import orjson

from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.base.ids import ContentId, canonical_json, content_id
from rollout_core.config import SamplingParams
from rollout_core.data.samples import (
    TURN_REWARDS,
    TURNS,
    Completion,
    Sample,
    decode_samples,
    encode_completion,
    encode_samples,
)
from rollout_core.inference.batch import BatchOptions, Engine, Progress, Work, complete_samples
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Completions, Experience
from rollout_core.store import LightningStore

Failed = Literal["stop", "leave_out"]
"""What to do where samples or rollouts gave nothing to learn from: end with an error, or continue without them."""


@dataclass(frozen=True)
class FailedSamples:
    """What becomes of a set in which samples failed for good."""

    policy: Failed = "stop"
    group_size: int = 1
    """So many samples that follow each other are left out together."""


async def complete_batch(
    store: LightningStore,
    objects: ObjectStore,
    engine: Engine,
    samples_id: ContentId,
    params: SamplingParams,
    *,
    worker_id: str,
    failed: FailedSamples | None = None,
    options: BatchOptions | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Completions, Work]:
    """Generate what is missing of the samples in blob ``samples_id`` and file all completions, in order, as one blob.

    The samples are those of the engine's model. Raises Recoverable where samples failed and another try may help, Fatal
    where they failed for good, unless ``failed`` has them left out with their groups: what is left is then filed as a
    set of its own, and Fatal raised only where nothing is.
    """
    failed = failed or FailedSamples()
    samples = decode_samples(objects.get_bytes(samples_id))
    completed = await complete_samples(
        store,
        objects,
        engine,
        samples,
        params,
        source=samples_id,
        worker_id=worker_id,
        options=options,
        on_progress=on_progress,
    )
    rows = list(map(orjson.loads, completed.lines))
    errors = [row for row in rows if row.get("error")]
    kept = whole_groups([not row.get("error") for row in rows], failed.group_size)
    if errors and (completed.passing_failures or failed.policy == "stop" or not kept):
        consequence = ", which leaves no whole group" if failed.policy == "leave_out" and not kept else ""
        problem = f"{len(errors)} of {len(rows)} samples failed{consequence}; first {errors[0]['id'][:12]}: "
        raise (Recoverable if completed.passing_failures else Fatal)(problem + errors[0]["error"])
    chosen = [rows[place] for place in kept]
    record = Completions(
        completions=await asyncio.to_thread(objects.put_bytes, b"".join(completed.lines[place] for place in kept)),
        samples=_filed(objects, samples_id, samples, [samples[place] for place in kept]),
        model=engine.model_id,
        num_samples=len(chosen),
        # Of an endpoint whose tokens have no ids here, by its own count.
        num_tokens=sum(len(row["token_ids"]) or row.get("usage", (0, 0))[1] for row in chosen),
        finish_reasons=dict(sorted(Counter(row["finish_reason"] for row in chosen).items())),
        num_left_out=len(rows) - len(chosen),
    )
    return record, completed.work


def whole_groups(succeeded: Sequence[bool], group_size: int) -> list[int]:
    """Places of the samples in groups of which all succeeded."""
    return [
        place
        for start in range(0, len(succeeded), group_size)
        if all(succeeded[start : start + group_size])
        for place in range(start, min(start + group_size, len(succeeded)))
    ]


def _filed(objects: ObjectStore, whole: ContentId, samples: Sequence[Sample], chosen: Sequence[Sample]) -> ContentId:
    return whole if len(chosen) == len(samples) else objects.put_bytes(encode_samples(chosen))


@dataclass(frozen=True)
class TokenSample:
    """One generation of a rollout, or several of which each continues the one before."""

    rollout_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    """What follows the prompt: what the model wrote and, between its parts, what it was given."""
    logprobs: list[float]
    """Of each of ``token_ids`` as it was drawn, nats; 0 for those that were given."""
    finish_reason: str
    """``length``: cut at the limit."""
    reward: float
    """The rollout's; every generation of it has the same."""
    task: Any
    """What the rollout was asked to do; its prompts differ from turn to turn, and from rollout to rollout."""
    written: list[tuple[int, int]] | None = None
    """Parts of ``token_ids`` that the model wrote, from the first token to one past the last; None: all of them."""
    model_ids: list[str | None] | None = None
    """Content ids of the weights that wrote each part; None: one part, of weights that are not known."""
    part_rewards: list[float | None] | None = None
    """What was given for each part by itself; None as above."""
    turns: list[int] = field(default_factory=list)
    """Of an environment's episode: the turn that each part is, from 0."""
    turn_rewards: list[float | None] | None = None
    """Where credit goes by turn: what each turn of the episode earned by itself, None where nothing was given."""

    @property
    def extras(self) -> dict[str, Any]:
        """What is known of the parts, to be kept with the tokens."""
        parts = {} if self.model_ids is None else {"model_ids": self.model_ids, "part_rewards": self.part_rewards}
        by_turn = {} if self.turn_rewards is None else {TURNS: self.turns, TURN_REWARDS: self.turn_rewards}
        return {**parts, **by_turn}


@dataclass
class Adapted:
    """Samples in the order of the rollouts asked for, then of their spans; and why there are no others."""

    samples: list[TokenSample] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Rollouts by reason: unknown, failed, unfinished, no finite reward, no tokens, lost tokens, no log-probabilities.
    """

    @property
    def num_turns(self) -> int:
        """Of all samples; as many as these where no turns were merged."""
        return sum(len(sample.written or [1]) for sample in self.samples)

    def leave_out(self, reason: str, rollout_id: str) -> None:
        self.left_out.setdefault(reason, []).append(rollout_id)


def file_experience(
    objects: ObjectStore, adapted: Adapted, *, failed: Failed = "stop", group_size: int = 1
) -> Experience:
    """File samples as what the updates take. With ``group_size`` rollouts of one task stand together in groups of it,
    each with all its samples.

    ``leave_out`` leaves an incomplete group out as a whole, for its rollouts are judged by each other. Raises
    ConfigError when nothing is left, or with ``stop`` when anything is left out.
    """
    left_out = {reason: len(ids) for reason, ids in adapted.left_out.items()}
    groups, incomplete = _groups(adapted.samples, group_size)
    left_out |= {"incomplete group": incomplete} if incomplete else {}
    samples, rollouts = _side_by_side(groups)
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    if left_out and failed == "stop":
        first = next(iter(adapted.left_out.values()), [""])[0]
        raise ConfigError(
            f"rollouts that cannot be learnt from: {reasons}{f' (such as {first})' if first else ''}; run them again, "
            "or collect with failed = 'leave_out'"
        )
    if not samples:
        raise ConfigError(f"none of the rollouts can be learnt from: {reasons or 'none was given'}")
    ids = [content_id("stored-sample/1", [sample.rollout_id, number]) for number, sample in enumerate(samples)]
    prompts = [
        Sample(name, "", sample.prompt_token_ids, 0, sample.rollout_id, sample.extras)
        for name, sample in zip(ids, samples, strict=True)
    ]
    completions = [
        Completion(
            key=str(name),
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            text="",
            finish_reason="length" if sample.finish_reason == "length" else "stop",
            written=sample.written,
        )
        for name, sample in zip(ids, samples, strict=True)
    ]
    rewards = [sample.reward for sample in samples]
    return Experience(
        samples=objects.put_bytes(encode_samples(prompts)),
        completions=objects.put_bytes(b"".join(map(encode_completion, completions))),
        scores=objects.put_bytes(canonical_json(rewards)),
        rollouts=objects.put_bytes(canonical_json(rollouts)),
        group_size=group_size,
        num_samples=len(samples),
        num_truncated=sum(sample.finish_reason == "length" for sample in samples),
        left_out=left_out,
        mean=statistics.fmean(rewards),
        std=statistics.pstdev(rewards),
    )


_Rollout = list[TokenSample]
"""The samples of one."""


def _groups(samples: Sequence[TokenSample], group_size: int) -> tuple[list[list[_Rollout]], int]:
    """Whole groups of rollouts of one task, in order of their first, and the number of rollouts in no such group."""
    by_id: dict[str, _Rollout] = {}
    for sample in samples:
        by_id.setdefault(sample.rollout_id, []).append(sample)
    by_task: dict[str, list[_Rollout]] = {}
    for name, rollout in by_id.items():
        task = content_id("task/1", rollout[0].task) if group_size > 1 else name
        by_task.setdefault(task, []).append(rollout)
    groups, incomplete = [], 0
    for rollouts in by_task.values():
        whole = len(rollouts) // group_size * group_size
        groups += [rollouts[start : start + group_size] for start in range(0, whole, group_size)]
        incomplete += len(rollouts) - whole
    return groups, incomplete


def _side_by_side(groups: Sequence[Sequence[_Rollout]]) -> tuple[list[TokenSample], list[int]]:
    """All samples, those of a group with one prompt as neighbours, which then share it; and the rollout of each."""
    samples, rollouts = [], []
    for number, group in enumerate(groups):
        by_prompt: dict[tuple[int, ...], list[tuple[TokenSample, int]]] = {}
        for place, rollout in enumerate(group, start=number * len(group)):
            for sample in rollout:
                by_prompt.setdefault(tuple(sample.prompt_token_ids), []).append((sample, place))
        for sample, place in chain.from_iterable(by_prompt.values()):
            samples.append(sample)
            rollouts.append(place)
    return samples, rollouts
