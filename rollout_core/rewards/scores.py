"""Rewards of completions as a run files them: a score each, those of the parts of a weighted sum, slices that several
workers share, and the groups of which an update can learn something."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId, canonical_json, content_id
from rollout_core.base.stopping import is_stopping, run_async
from rollout_core.config import DynamicSampling
from rollout_core.data.samples import decode_completions_blob, decode_samples
from rollout_core.inference.ledger import CHUNK, this_worker
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Completions, EvalReport, Scores, SelectedGroups
from rollout_core.rewards.loading import weighted_sum
from rollout_core.rewards.scoring import RewardFunction, RewardInput, Score, as_json, from_json, judge, within_share
from rollout_core.store import AttemptedRollout, Span
from rollout_core.store.reachable import OpenStore
from rollout_core.store.semconv import AGL_ANNOTATION, AGL_REWARD

SCORED_SLICES = 64
"""That completions are cut into where workers share them: each costs a reference in object storage."""


def compute_scores(
    objects: ObjectStore,
    completions: Completions,
    reward: RewardFunction,
    *,
    by_part: bool = False,
    shared_as: ContentId | None = None,
) -> tuple[Scores, list[Fatal]]:
    """Rewards of ``completions`` in order, filed as a JSON list; ``by_part`` those of a weighted sum's parts too.
    Completions on which the reward abstained or failed have none and are counted; the failures are returned, too.

    ``shared_as``: the key by which helpers know them. Raises Fatal where the reward failed on more than it may, or none
    has a score.
    """
    inputs, look = reward_inputs(objects, completions), partial(judged, reward, by_part)
    for judges in reward.judges:
        judges.take_judgements()  # of a scoring that failed
    if shared_as is not None and reward.separable:
        rows = SharedScores(objects, shared_as, inputs, look).finish()
    else:
        rows = look(inputs)
    found = [_of_parts(reward, row) if by_part else from_json(row) for row in rows]
    failures = within_share(reward, found)
    values: list[Score] = [None if isinstance(value, Fatal) else value for value in found]
    num_abstained, known = found.count(None), known_scores(values)
    if values and not known:
        raise Fatal(
            f"reward {reward.name} gave none of {len(values)} completions a score: it abstained on {num_abstained}"
            f"{f' and failed on {len(failures)}, such as: {failures[0]}' if failures else ''}; expected a number for "
            "some. Look at the rows' keys that it reads"
        )
    parts = None
    if by_part:
        parts = objects.put_json(
            {
                "names": [part.name for part in reward.parts],
                "weights": [part.weight for part in reward.parts],
                "values": [[None if isinstance(value, list) else value for value in row] for row in rows],
            }
        )
    scores = Scores(
        parts=parts,
        scores=objects.put_bytes(canonical_json(values)),
        completions=completions.completions,
        num_samples=len(values),
        mean=statistics.fmean(known),
        std=statistics.pstdev(known),
        num_left_out=completions.num_left_out,
        num_abstained=num_abstained,
        num_reward_failed=len(failures),
        judged=_file_judgements(objects, reward),
    )
    return scores, failures


def _file_judgements(objects: ObjectStore, reward: RewardFunction) -> ContentId | None:
    """What judges said of the completions that were just scored, and what it took."""
    found = [judgement.document() for judges in reward.judges for judgement in judges.take_judgements()]
    return objects.put_json(found) if found else None


def judged(reward: RewardFunction, by_part: bool, inputs: Sequence[RewardInput]) -> list[Any]:
    """What `judge` finds of each input, as JSON; with ``by_part`` the list of it by each part of a weighted sum."""
    if not by_part:
        return list(map(as_json, judge(reward, inputs)))
    columns = [list(map(as_json, judge(part.reward, inputs))) for part in reward.parts]
    return [list(row) for row in zip(*columns, strict=True)]


def _of_parts(reward: RewardFunction, row: Sequence[Any]) -> Score | Fatal:
    values = list(map(from_json, row))
    failures = [value for value in values if isinstance(value, Fatal)]
    known = [value for value in values if not isinstance(value, Fatal)]
    return failures[0] if failures else weighted_sum([part.weight for part in reward.parts], known)


def known_scores(values: Sequence[Score]) -> list[float]:
    """Those that are there."""
    return [value for value in values if value is not None]


def reward_inputs(objects: ObjectStore, completions: Completions) -> list[RewardInput]:
    """What a reward is given of each completion, in order."""
    samples = decode_samples(objects.get_bytes(completions.samples))
    generated = decode_completions_blob(objects.get_bytes(completions.completions))
    return [
        RewardInput(
            prompt=sample.prompt,
            completion=completion.text,
            extras=sample.extras,
            finish_reason=completion.finish_reason,
            num_tokens=len(completion.token_ids),
            id=sample.row_id or sample.id,
            prompt_token_ids=sample.prompt_token_ids,
            token_ids=completion.token_ids,
        )
        for sample, completion in zip(samples, generated, strict=True)
    ]


def record_rewards(
    objects: ObjectStore, open_store: OpenStore, completions: Completions, scores: Scores, reward_source: ContentId
) -> None:
    """Each score there is as a span of its sample's winning attempt, where agents' adapters look for it.

    The span's id follows from attempt and reward, so a retry adds none twice.
    """
    values: list[Score] = json.loads(objects.get_bytes(scores.scores))
    samples = decode_samples(objects.get_bytes(completions.samples))
    rewards = {str(sample.id): value for sample, value in zip(samples, values, strict=True) if value is not None}
    run_async(_record(open_store, rewards, reward_source))


async def _record(open_store: OpenStore, rewards: Mapping[str, float], reward_source: ContentId) -> None:
    ids = list(rewards)
    async with open_store() as store:
        for start in range(0, len(ids), CHUNK):
            rollouts = await store.query_rollouts(rollout_id_in=ids[start : start + CHUNK])
            ended = [rollout for rollout in rollouts if isinstance(rollout, AttemptedRollout)]
            spans = [_span(rollout, rewards[rollout.rollout_id], reward_source) for rollout in ended]
            await store.add_many_spans(spans)


def _span(rollout: AttemptedRollout, reward: float, reward_source: ContentId) -> Span:
    return Span.from_attributes(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        sequence_id=2,
        name=AGL_ANNOTATION,
        span_id=content_id("reward-span/1", [rollout.attempt.attempt_id, reward_source])[:16],
        attributes={f"{AGL_REWARD}.0.name": "primary", f"{AGL_REWARD}.0.value": reward},
    )


def report_of(completions: Completions, scores: Scores) -> EvalReport:
    """An evaluation of the model that wrote the completions."""
    return EvalReport(
        model=completions.model,
        completions=completions.completions,
        samples=completions.samples,
        scores=scores.scores,
        num_samples=scores.num_samples,
        mean_reward=scores.mean,
        num_tokens=completions.num_tokens,
        num_abstained=scores.num_abstained,
        num_reward_failed=scores.num_reward_failed,
        judged=scores.judged,
    )


def help_scoring(
    objects: ObjectStore, completions: Completions, reward: RewardFunction, shared_as: ContentId, *, by_part: bool
) -> int:
    """Score slices that nobody has filed under ``shared_as``, from a place of this worker's own on, until all are done;
    returns how many completions they had."""
    if not reward.separable:
        return 0
    shared = SharedScores(objects, shared_as, reward_inputs(objects, completions), partial(judged, reward, by_part))
    done, count = 0, len(shared.slices)
    first = random.Random(this_worker()).randrange(count)
    for number in [*range(first, count), *range(first)]:
        if shared.are_done or is_stopping():
            break
        if shared.known(number) is None:
            done += len(shared.score(number))
    return done


class SharedScores:
    """Completions that several workers score: each files the slices it did, and leaves those that are filed."""

    def __init__(
        self,
        objects: ObjectStore,
        key: ContentId,
        inputs: Sequence[RewardInput],
        judge: Callable[[Sequence[RewardInput]], list[Any]],
    ) -> None:
        self._objects = objects
        self._judge = judge
        self._refs = f"fan-out/scores/{key}"
        size = max(1, math.ceil(len(inputs) / SCORED_SLICES))
        self.slices = [inputs[start : start + size] for start in range(0, len(inputs), size)]

    @property
    def are_done(self) -> bool:
        return self._objects.get_ref(f"{self._refs}/all") is not None

    def known(self, number: int) -> list[Any] | None:
        """What was filed of a slice, by whomever."""
        return self._read(f"{self._refs}/{number}")

    def score(self, number: int) -> list[Any]:
        """Score a slice and file it."""
        rows = self._judge(self.slices[number])
        self._file(f"{self._refs}/{number}", rows)
        return rows

    def finish(self) -> list[Any]:
        """Of all inputs, in order."""
        # There where a worker died between the last slice and the stage's record.
        rows = self._read(f"{self._refs}/all")
        if rows is None:
            rows = []
            for number in range(len(self.slices)):
                known = self.known(number)
                rows += self.score(number) if known is None else known
            self._file(f"{self._refs}/all", rows)
        for number in range(len(self.slices)):
            self._objects.delete_ref(f"{self._refs}/{number}")
        return rows

    def _read(self, ref: str) -> list[Any] | None:
        data = self._objects.cached_bytes(ref)
        return None if data is None else json.loads(data)

    def _file(self, ref: str, rows: list[Any]) -> None:
        self._objects.set_ref(ref, self._objects.put_bytes(canonical_json(rows)))


def select_groups(
    objects: ObjectStore,
    rounds: Sequence[Scores],
    samples: Sequence[ContentId],
    *,
    group_size: int,
    wanted: int,
    min_spread: float,
) -> SelectedGroups:
    """The first ``wanted`` groups of completions whose rewards differ by more than ``min_spread``, from all rounds.

    ``samples`` are those of each round; completions of one prompt, ``group_size`` of them, stand side by side.
    Completions without a score do not count.
    """
    kept: list[tuple[list[Score], list[bytes], list[bytes], list[Any]]] = []
    drawn: list[float] = []
    num_groups = 0
    parts: dict[str, Any] = {}
    for scores, own in zip(rounds, samples, strict=True):
        values: list[Score] = json.loads(objects.get_bytes(scores.scores))
        lines = [objects.get_bytes(blob).splitlines(keepends=True) for blob in (scores.completions, own)]
        drawn += known_scores(values)
        num_groups += len(values) // group_size
        parts = parts if scores.parts is None else objects.get_json(scores.parts)
        by_part = parts.get("values", [None] * len(values))
        for start in range(0, len(values), group_size):
            group = slice(start, start + group_size)
            known = known_scores(values[group])
            if len(known) > 1 and max(known) - min(known) > min_spread:
                kept.append((values[group], lines[0][group], lines[1][group], by_part[group]))
    chosen = kept[:wanted]
    values = [value for group, *_ in chosen for value in group]
    known = known_scores(values)
    rows_by_part = [row for *_, group in chosen for row in group]
    return SelectedGroups(
        scores=objects.put_bytes(canonical_json(values)),
        completions=objects.put_bytes(b"".join(line for _, lines, *_ in chosen for line in lines)),
        samples=objects.put_bytes(b"".join(line for *_, lines, _ in chosen for line in lines)),
        num_samples=len(values),
        num_groups=len(kept),
        num_drawn=num_groups,
        mean=statistics.fmean(known) if known else 0.0,
        std=statistics.pstdev(known) if known else 0.0,
        mean_drawn=statistics.fmean(drawn),
        num_left_out=sum(scores.num_left_out for scores in rounds),
        num_abstained=sum(scores.num_abstained for scores in rounds),
        num_reward_failed=sum(scores.num_reward_failed for scores in rounds),
        parts=objects.put_json({**parts, "values": rows_by_part}) if parts else None,
    )


def num_to_draw(
    selected: SelectedGroups, wanted: int, settings: DynamicSampling, *, num_rounds: int, label: str
) -> int:
    """Groups that an iteration draws in the round after ``num_rounds``, so that it has ``wanted`` whose rewards differ:
    as many as the share of such groups so far lets expect; 0 where no round follows. Raises Fatal where the last one
    has left too few."""
    found = selected.num_groups
    if found >= wanted:
        return 0
    if num_rounds < settings.max_rounds:
        return min(wanted, math.ceil((wanted - found) * selected.num_drawn / max(1, found)))
    if settings.when_short == "stop" or not found:
        fewer = ', or set when_short = "fewer"' if found else ""
        raise Fatal(
            f"{label}: in {num_rounds} rounds {found} of {selected.num_drawn} groups have rewards that differ, and the "
            f"iteration needs {wanted}; take prompts of other difficulty, raise algorithm.samples_per_prompt or "
            f"dynamic_sampling.max_rounds{fewer}"
        )
    return 0
