"""From stored rollouts to token samples, whoever ran them: batch inference, or agents whose LLM calls were recorded.

Of each rollout the latest attempt counts. Nothing is tokenised again. What cannot be learnt from is counted by reason
and never silently dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rollout_core.agents.adapters.ended import EndedRollout, as_they_were, read_rollouts
from rollout_core.agents.adapters.token_sequences import (
    NoLogprobs,
    SampleForm,
    TokenTrajectory,
    token_turns,
    trajectories,
    transitions,
    turn_rewards,
)
from rollout_core.agents.emitters import find_final_reward
from rollout_core.base.errors import CorruptObject, MissingObject
from rollout_core.base.ids import ContentId
from rollout_core.data.samples import Sample, SampledCompletion, decode_completions_blob, decode_samples
from rollout_core.inference.ledger import BLOB_ATTRIBUTE, COMPLETION_SPAN, ROW_ATTRIBUTE, SAMPLE_KIND
from rollout_core.inference.training_samples import Adapted, TokenSample
from rollout_core.objects import ObjectStore
from rollout_core.store import LightningStore, Rollout, Span

_CHUNK = 5_000
"""Rollouts whose spans are asked for at once."""


async def adapt_rollouts(
    store: LightningStore,
    objects: ObjectStore,
    rollout_ids: Sequence[str],
    *,
    form: SampleForm = "transition",
    model: str | None = None,
) -> Adapted:
    """Token samples of rollouts, finished or not, of any store. With the form ``trajectory`` turns of an agent that
    continue each other are one sample; with ``transition`` each turn is one, with all before it as its prompt. With
    ``model`` only those of an agent's calls count that asked for this model."""
    adapted, blobs = Adapted(), _Blobs(objects)
    async for rollout_id, rollout, spans in read_rollouts(store, rollout_ids, chunk=_CHUNK):
        _adapt(adapted, rollout_id, _samples(blobs, rollout, spans, form, model))
    return adapted


async def adapt_ended(
    store: LightningStore,
    objects: ObjectStore,
    ended: Sequence[EndedRollout],
    *,
    form: SampleForm = "transition",
    model: str | None = None,
    by_turn: bool = False,
) -> Adapted:
    """As `adapt_rollouts`, of rollouts as they were when they were looked up. ``by_turn``: samples of an environment's
    episodes say which turns they are and what each turn earned. Raises Fatal where their spans are not the same any
    more."""
    adapted, blobs = Adapted(), _Blobs(objects)
    then = {row.rollout_id: row for row in ended}
    async for rollout_id, rollout, spans in read_rollouts(store, list(then)):
        row = then[rollout_id]
        had = as_they_were(row, spans)
        found = rollout if rollout is None else rollout.model_copy(update={"status": row.status})
        samples = _samples(blobs, found, had, form, model)
        if by_turn and not isinstance(samples, str):
            samples = [replace(sample, turn_rewards=turn_rewards(had)) for sample in samples]
        _adapt(adapted, rollout_id, samples)
    return adapted


def _adapt(adapted: Adapted, rollout_id: str, found: list[TokenSample] | str) -> None:
    if isinstance(found, str):
        adapted.leave_out(found, rollout_id)
    else:
        adapted.samples += found


def _samples(
    blobs: _Blobs, rollout: Rollout | None, spans: Sequence[Span], form: SampleForm, model: str | None
) -> list[TokenSample] | str:
    """Samples of one rollout, or why there are none."""
    if rollout is None:
        return "unknown"
    if rollout.status != "succeeded":
        return "failed" if rollout.status in ("failed", "cancelled") else "unfinished"
    reward = find_final_reward(spans)
    if reward is None or not math.isfinite(reward):
        return "no finite reward"
    try:
        found = _completions(blobs, rollout, spans, reward)
        found = found or agent_samples(rollout, spans, reward, form=form, model=model)
    except (CorruptObject, MissingObject):
        return "lost tokens"
    except NoLogprobs:
        return "no log-probabilities"
    if any(len(sample.logprobs) != len(sample.token_ids) for sample in found):
        return "no log-probabilities"
    return found or "no tokens"


def agent_samples(
    rollout: Rollout,
    spans: Sequence[Span],
    reward: float,
    *,
    form: SampleForm,
    model: str | None = None,
) -> list[TokenSample]:
    """Samples of an agent's LLM calls in the spans of one attempt. ``reward``, the rollout's final one, is that of
    every sample. ``model``: see ``token_turns``.

    Raises NoLogprobs where token ids were recorded without log-probabilities.
    """
    turns = token_turns(spans, model=model)
    made = trajectories(turns) if form == "trajectory" else transitions(turns)
    task = _task(rollout)
    return [_sample(item, rollout.rollout_id, reward, task) for item in made]


def _task(rollout: Rollout) -> Any:
    """Its input; that of batch inference also has the number of the sample, and the prompt alone is the task."""
    if (rollout.metadata or {}).get("kind") == SAMPLE_KIND and isinstance(rollout.input, dict):
        return rollout.input.get("prompt")
    return rollout.input


def _sample(item: TokenTrajectory, rollout_id: str, reward: float, task: Any) -> TokenSample:
    """What stands before the first part is the prompt, all that follows the completion."""
    start = item.parts[0].start
    is_one = len(item.parts) == 1
    is_plain = is_one and item.parts[0].model_id is None
    return TokenSample(
        rollout_id,
        list(item.token_ids[:start]),
        list(item.token_ids[start:]),
        list(item.logprobs[start:]),
        "length" if item.is_truncated else item.parts[-1].finish_reason,
        reward,
        task,
        written=None if is_one else [(part.start - start, part.stop - start) for part in item.parts],
        model_ids=None if is_plain else item.model_ids,
        part_rewards=None if is_plain else [part.reward for part in item.parts],
        turns=[part.number for part in item.parts if part.number is not None],
    )


def _completions(blobs: _Blobs, rollout: Rollout, spans: Sequence[Span], reward: float) -> list[TokenSample]:
    """What batch inference generated: a row of a blob, for a sample of another."""
    source = (rollout.metadata or {}).get("samples")
    if not isinstance(source, str):
        return []
    task, found = _task(rollout), []
    for span in spans:
        if span.name == COMPLETION_SPAN:
            prompt = blobs.prompts(source)[ContentId(rollout.rollout_id)].prompt_token_ids
            row = blobs.completions(str(span.attributes[BLOB_ATTRIBUTE]))[int(span.attributes[ROW_ATTRIBUTE])]
            found.append(
                TokenSample(rollout.rollout_id, prompt, row.token_ids, row.logprobs, row.finish_reason, reward, task)
            )
    return found


class _Blobs:
    """Blobs of samples and completions, each read once."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._prompts: dict[str, dict[ContentId, Sample]] = {}
        self._completions: dict[str, list[SampledCompletion]] = {}

    def prompts(self, blob: str) -> dict[ContentId, Sample]:
        if blob not in self._prompts:
            samples = decode_samples(self._objects.get_bytes(ContentId(blob)))
            self._prompts[blob] = {sample.id: sample for sample in samples}
        return self._prompts[blob]

    def completions(self, blob: str) -> list[SampledCompletion]:
        if blob not in self._completions:
            self._completions[blob] = decode_completions_blob(self._objects.get_bytes(ContentId(blob)))
        return self._completions[blob]
