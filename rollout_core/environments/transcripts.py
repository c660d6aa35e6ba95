"""Episodes as they were stored, read again: their turns, and what is filed of several as completions with scores."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from rollout_core.base.ids import ContentId, canonical_json
from rollout_core.data.samples import Completion, FinishReason, Sample, encode_completion, encode_samples
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Completions, Scores
from rollout_core.store import Span
from rollout_core.store.semconv import (
    AGL_ANNOTATION,
    AGL_OPERATION,
    EPISODE_TURN,
    LLM_CALL,
    ChoiceAttributes,
    LightningSpanAttributes,
    LlmCallAttributes,
    RewardAttributes,
)

_CHOICE = f"{LlmCallAttributes.CHOICES.value}.0."
_REWARD = f"{LightningSpanAttributes.REWARD.value}.0.{RewardAttributes.REWARD_VALUE.value}"


@dataclass(frozen=True)
class Turn:
    """An answer of the model."""

    messages: list[dict[str, Any]]
    """That it answers, behind those of the turn before."""
    message: dict[str, Any]
    prompt_ids: list[int]
    """All tokens before it."""
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    results: list[str]
    """What the tools that it called answered."""
    reward: float | None = None
    """What the turn earned by itself; None where nothing was given for it."""


def turns_of(spans: Sequence[Span]) -> list[Turn]:
    """The turns of an attempt, whose spans are in order."""
    turns: list[Turn] = []
    for span in spans:
        about: Mapping[str, Any] = span.attributes
        if span.name == LLM_CALL:
            turns.append(
                Turn(
                    json.loads(about[LlmCallAttributes.INPUT_MESSAGES.value]),
                    json.loads(about[LlmCallAttributes.OUTPUT_MESSAGES.value])[0],
                    list(about[LlmCallAttributes.PROMPT_TOKEN_IDS.value]),
                    list(about[_CHOICE + ChoiceAttributes.TOKEN_IDS.value]),
                    list(about[_CHOICE + ChoiceAttributes.LOGPROBS.value]),
                    str(about[_CHOICE + ChoiceAttributes.FINISH_REASON.value]),
                    [],
                )
            )
        elif span.name == AGL_OPERATION and turns:
            turns[-1].results.append(str(about[LightningSpanAttributes.OPERATION_OUTPUT.value]))
        elif span.name == AGL_ANNOTATION and EPISODE_TURN in about and turns:
            turns[-1] = replace(turns[-1], reward=float(about[_REWARD]))
    return turns


def text_of(turns: Sequence[Turn]) -> str:
    """All that was said behind the first messages, for people."""
    return "\n".join(line for number, turn in enumerate(turns) for line in _lines(turn, is_first=number == 0))


def _lines(turn: Turn, *, is_first: bool) -> Iterator[str]:
    for message in () if is_first else turn.messages:
        yield f"[{message['role']}] {message['content']}"
    if (said := turn.message.get("content")) or not turn.message.get("tool_calls"):
        yield f"[assistant] {said or ''}"
    for call in turn.message.get("tool_calls", ()):
        yield f"[assistant calls {call['function']['name']}] {call['function']['arguments']}"
    if turn.reward is not None:
        yield f"[reward of this turn] {turn.reward:g}"


@dataclass(frozen=True)
class Outcome:
    """What an episode came to."""

    rollout_id: str
    row: Mapping[str, Any]
    index: int
    """Among the episodes of its row."""
    spans: Sequence[Span]
    """Of the attempt that ended it."""
    reward: float | None
    """None: it failed."""


def file_episodes(
    objects: ObjectStore, model: ContentId, outcomes: Sequence[Outcome]
) -> tuple[Completions, Scores, ContentId]:
    """Completions of the episodes that succeeded, one each, with their rewards; and samples of all episodes. A
    completion has the tokens of all that the model wrote, and a text of all that was said."""
    asked, samples, lines, rewards = [], [], [], []
    reasons: Counter[str] = Counter()
    num_tokens = 0
    for outcome in outcomes:
        turns = turns_of(outcome.spans)
        name = outcome.row.get("id")
        sample = Sample(
            ContentId(outcome.rollout_id),
            turns[0].messages if turns else canonical_json(outcome.row).decode(),
            turns[0].prompt_ids if turns else [],
            outcome.index,
            None if name is None else str(name),
            dict(outcome.row),
        )
        asked.append(sample)
        if outcome.reward is None or not turns:
            continue
        reason = "length" if any(turn.finish_reason == "length" for turn in turns) else "stop"
        completion = Completion(
            outcome.rollout_id,
            [token for turn in turns for token in turn.token_ids],
            [value for turn in turns for value in turn.logprobs],
            text_of(turns),
            cast(FinishReason, reason),
        )
        samples.append(sample)
        lines.append(encode_completion(completion))
        rewards.append(outcome.reward)
        reasons[reason] += 1
        num_tokens += len(completion.token_ids)
    all_asked = objects.put_bytes(encode_samples(asked))
    completions = Completions(
        completions=objects.put_bytes(b"".join(lines)),
        samples=all_asked if len(samples) == len(asked) else objects.put_bytes(encode_samples(samples)),
        model=model,
        num_samples=len(samples),
        num_tokens=num_tokens,
        finish_reasons=dict(sorted(reasons.items())),
        num_left_out=len(asked) - len(samples),
    )
    scores = Scores(
        scores=objects.put_bytes(canonical_json(rewards)),
        completions=completions.completions,
        num_samples=len(rewards),
        mean=statistics.fmean(rewards) if rewards else 0.0,
        std=statistics.pstdev(rewards) if rewards else 0.0,
        num_left_out=completions.num_left_out,
    )
    return completions, scores, all_asked
