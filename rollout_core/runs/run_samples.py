"""Samples of runs: what a model made of each prompt and what that was rewarded with; of one run, or side by side."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_core.base.errors import MissingObject, NotFound
from rollout_core.base.ids import ContentId
from rollout_core.data.samples import decode_completions_blob, decode_samples
from rollout_core.evaluation.bootstrap import PairedGain, paired_gain
from rollout_core.evaluation.moments import LABEL as SUITE
from rollout_core.objects import ObjectStore
from rollout_core.runs.run_records import RunDetail, RunHead

_NOT_OWN = ("guard ", "latest", "held out, ", SUITE)
"""Labels of evaluations that promotion's guards ask for, of the model that was latest, of guards of training, and by
suites."""


@dataclass(frozen=True)
class SampleSet:
    """Completions of a run with their rewards, by content ids."""

    label: str
    """Of the stage's call, such as ``after PPO`` or ``iteration 3``."""
    is_held_out: bool
    samples: ContentId
    completions: ContentId
    scores: ContentId
    num_samples: int
    mean: float
    model: ContentId | None = None
    """That made them."""
    parts: ContentId | None = None
    """Of the rewards of a composite, as of `Scores`."""
    judged: ContentId | None = None
    """What judges said, as of `Scores`."""


@dataclass(frozen=True)
class SampleRow:
    """A prompt with its completion."""

    number: int
    """Its place in the set, from 0."""
    prompt: str
    completion: str
    reward: float
    """NaN where it has none."""
    finish_reason: str
    num_tokens: int


@dataclass(frozen=True)
class Pair:
    """A prompt with what each run made of it, and what that got."""

    prompt: str
    completions: tuple[str, ...]
    rewards: tuple[float, ...]

    @property
    def change(self) -> float:
        """Reward of the last less that of the first."""
        return self.rewards[-1] - self.rewards[0]


@dataclass(frozen=True)
class HeldOut:
    """Held-out samples of several runs, side by side."""

    labels: tuple[str, ...]
    """Which evaluation of each run is compared."""
    means: tuple[float, ...]
    pairs: tuple[Pair, ...]
    """Of the prompts that all have, those that lost most from the first run to the last one first."""
    gain: PairedGain | None
    """Of the second over the first, where there are two, of the same label, with the same prompts."""


def sample_sets(detail: RunDetail) -> list[SampleSet]:
    """The held-out evaluations of a run, then the scored completions it learned from, each in order; of agents those of
    their model's calls, which have tokens and no text. Without those of promotion's guards, and without batches."""
    sets = [
        SampleSet(
            call.label,
            True,
            ContentId(result["samples"]),
            ContentId(result["completions"]),
            ContentId(result["scores"]),
            result["num_samples"],
            result["mean_reward"],
            ContentId(result["model"]) if "model" in result else None,
            judged=_judged(result),
        )
        for call, result in detail.results("EvalReport")
        if not call.label.startswith("guard ")
    ]
    made = {
        result["completions"]: result
        for kind in ("Completions", "JoinedCompletions")
        for _, result in detail.results(kind)
    }
    for call, result in detail.results("Scores"):
        of = made.get(result["completions"])
        if of is not None:
            ids = (ContentId(of["samples"]), ContentId(result["completions"]), ContentId(result["scores"]))
            model, parts = of.get("model"), result.get("parts")
            sets.append(
                SampleSet(
                    call.label,
                    call.label.startswith(SUITE),
                    *ids,
                    result["num_samples"],
                    result["mean"],
                    None if model is None else ContentId(model),
                    None if parts is None else ContentId(parts),
                    _judged(result),
                )
            )
    scored = {each.completions for each in sets}
    for call, result in detail.results("SuiteReport"):  # of choices, and of lm_eval: no stage scores them before
        if ContentId(result["completions"]) not in scored:
            ids = (ContentId(result["samples"]), ContentId(result["completions"]), ContentId(result["scores"]))
            is_suite, mean = call.label.startswith(SUITE), result["metrics"][0]["value"]
            sets.append(SampleSet(call.label, is_suite, *ids, result["num_samples"], mean, ContentId(result["model"])))
    served = {result["rollouts"]: result.get("model") for _, result in detail.results("AgentRollouts")}
    for call, result in detail.results("Experience"):
        ids = (ContentId(result["samples"]), ContentId(result["completions"]), ContentId(result["scores"]))
        model = next((model for rollouts, model in served.items() if rollouts in call.inputs), None)
        own = None if model is None else ContentId(model)
        sets.append(SampleSet(call.label, False, *ids, result["num_samples"], result["mean"], own))
    return sets


def _judged(result: Mapping[str, Any]) -> ContentId | None:
    found = result.get("judged")
    return None if found is None else ContentId(found)


def own_evaluations(detail: RunDetail) -> list[SampleSet]:
    """The held-out evaluations of a run's own models, in order."""
    return [each for each in sample_sets(detail) if each.is_held_out and not each.label.startswith(_NOT_OWN)]


def final_evaluation(detail: RunDetail) -> SampleSet | None:
    """The last of `own_evaluations`; None where there is none."""
    return next(reversed(own_evaluations(detail)), None)


def read_set(objects: ObjectStore, of: SampleSet) -> list[SampleRow]:
    """Rows of a set, in order. Raises NotFound where they are not kept any more."""
    try:
        samples = decode_samples(objects.get_bytes(of.samples))
        completions = decode_completions_blob(objects.get_bytes(of.completions))
        scores: list[float | None] = json.loads(objects.get_bytes(of.scores))
    except MissingObject as error:
        raise NotFound(
            f"the samples {of.label!r} are not in {objects.url} any more (object {error.content_id[:12]} is gone): "
            "housekeeping keeps them for `result_days` after their last use"
        ) from error
    by_id = {sample.id: sample for sample in samples}
    rows = zip(completions, scores, strict=True)
    return [
        SampleRow(
            number,
            shown_prompt(by_id[completion.id].prompt if completion.id in by_id else ""),
            completion.text,
            float("nan") if score is None else score,
            completion.finish_reason,
            len(completion.token_ids),
        )
        for number, (completion, score) in enumerate(rows)
    ]


def shown_prompt(prompt: Any) -> str:
    """A text as it is; of a chat a paragraph for each message, its role first."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return "\n\n".join(f"{message.get('role', '')}: {_text_of(message)}" for message in prompt)
    return json.dumps(prompt, ensure_ascii=False)


def _text_of(message: Mapping[str, Any]) -> str:
    """What a message says, and then the tools that it calls."""
    said = [message.get("content"), message.get("tool_calls")]
    return "\n".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in said if part)


def compare_held_out(
    objects: ObjectStore,
    runs: Sequence[tuple[RunHead, RunDetail]],
    rows_of: Callable[[SampleSet], list[SampleRow]] | None = None,
) -> HeldOut | None:
    """The final evaluation of each run, side by side; None where one of them has none. ``rows_of`` may keep what
    `read_set` gives. Raises NotFound where samples are not kept any more."""
    found = [final_evaluation(detail) for _, detail in runs]
    chosen = [each for each in found if each is not None]
    if len(chosen) < len(runs):
        return None
    by_prompt = [_by_prompt(read_set(objects, each) if rows_of is None else rows_of(each)) for each in chosen]
    common = [prompt for prompt in by_prompt[0] if all(prompt in each for each in by_prompt)]
    pairs = [pair for prompt in common for pair in _pairs(prompt, [each[prompt] for each in by_prompt])]
    gain = None
    # A run that ended early has only its start to show, which says nothing of what it would have come to.
    if len(runs) == 2 and chosen[0].label == chosen[1].label and by_prompt[0].keys() == by_prompt[1].keys():
        before, after = ({prompt: _scored(rows) for prompt, rows in each.items()} for each in by_prompt)
        if any(before[prompt] and after[prompt] for prompt in before):
            gain = paired_gain(before, after, confidence=0.95)
    return HeldOut(
        labels=tuple(each.label for each in chosen),
        means=tuple(each.mean for each in chosen),
        pairs=tuple(sorted(pairs, key=lambda pair: 0.0 if math.isnan(pair.change) else pair.change)),
        gain=gain,
    )


def _scored(rows: Sequence[SampleRow]) -> list[float]:
    return [row.reward for row in rows if not math.isnan(row.reward)]


def _by_prompt(rows: Sequence[SampleRow]) -> dict[str, list[SampleRow]]:
    found: dict[str, list[SampleRow]] = defaultdict(list)
    for row in rows:
        found[row.prompt].append(row)
    return dict(found)


def _pairs(prompt: str, of_runs: Sequence[Sequence[SampleRow]]) -> Iterator[Pair]:
    for rows in zip(*of_runs, strict=False):
        yield Pair(prompt, tuple(row.completion for row in rows), tuple(row.reward for row in rows))
