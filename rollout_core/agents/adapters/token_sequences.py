"""From the spans of a rollout to the tokens that train: as the engine read and wrote them, never tokenised again.

An agent's conversation grows turn by turn, and each request repeats it from the start. Turns whose prompt begins with
all the tokens of an earlier turn become one sequence with it, which a learner computes once, with a mask over what the
model wrote. Where a chat template drops or rewrites earlier words (thoughts, say), prompts do not begin so, and turns
stay apart.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rollout_core.agents.adapters.calls import (
    PROXY_SPANS,
    CallNames,
    choices_of,
    has_tokens,
    model_id,
    prompt_token_ids,
)
from rollout_core.agents.adapters.credit import rewards_by_number
from rollout_core.agents.adapters.tree import TraceTree, is_reward
from rollout_core.agents.emitters import get_reward_value
from rollout_core.base.errors import ConfigError
from rollout_core.store import Span
from rollout_core.store.semconv import AGL_ANNOTATION, EPISODE_TURN, LlmCallAttributes

SampleForm = Literal["trajectory", "transition"]
"""Whether turns that continue each other are one sample, or each turn is one."""


class NoLogprobs(ConfigError):
    """A call was recorded with token ids, but without a log-probability for each that was written."""


@dataclass(frozen=True)
class TokenTurn:
    """One answer of the model: the N tokens it was given and the M that it wrote.

    Raises ConfigError if either is empty or the log-probabilities are not M.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    """[M] of each token as it was drawn, nats."""
    model_id: str | None = None
    """Content id of the weights that answered; None if it is not known."""
    reward: float | None = None
    """Given for this turn; None if none was."""
    finish_reason: str = "stop"
    """``length``: cut at the limit."""
    number: int | None = None
    """In an environment's episode, from 0; None elsewhere."""

    def __post_init__(self) -> None:
        counts = f"{len(self.prompt_ids)} prompt tokens, {len(self.response_ids)} written ones"
        if not self.prompt_ids or not self.response_ids:
            raise ConfigError(f"a turn has {counts}; expected at least one of each")
        if len(self.logprobs) != len(self.response_ids):
            raise NoLogprobs(
                f"a turn has {counts} and {len(self.logprobs)} log-probabilities; expected one for each written token"
            )


@dataclass(frozen=True)
class WrittenPart:
    """What one turn wrote, as a part of a trajectory."""

    start: int
    """First token, counted from the trajectory's first."""
    stop: int
    """One past the last token."""
    model_id: str | None
    reward: float | None
    finish_reason: str
    number: int | None = None
    """As of `TokenTurn`."""


@dataclass(frozen=True)
class TokenTrajectory:
    """T tokens of turns that continue each other. Starts with the first prompt and ends with the last answer."""

    token_ids: Sequence[int]
    """[T]."""
    logprobs: Sequence[float]
    """[T], nats; 0 where the model did not write."""
    parts: Sequence[WrittenPart]
    """Of each turn, in order."""

    @cached_property
    def mask(self) -> list[bool]:
        """[T], True = the model wrote this token."""
        mask = [False] * len(self.token_ids)
        for part in self.parts:
            mask[part.start : part.stop] = [True] * (part.stop - part.start)
        return mask

    @property
    def model_ids(self) -> list[str | None]:
        """Content ids of the weights that wrote each part."""
        return [part.model_id for part in self.parts]

    @property
    def is_truncated(self) -> bool:
        """Whether any part was cut at the length limit."""
        return any(part.finish_reason == "length" for part in self.parts)


def token_turns(spans: Sequence[Span], *, model: str | None = None) -> list[TokenTurn]:
    """The turns of one attempt, by sequence id and then time; several choices of a call are a turn each.

    A call that a proxy and a tracer recorded counts once. One that failed, has no token ids, or was made inside a
    reward span, as a judge's are, does not count, nor with ``model`` one that asked for another model. Each turn has
    the reward that was given for its call, see ``credit.rewards_by_number``; what an environment gave for a turn by
    itself is in `turn_rewards`. Raises NoLogprobs where token ids were recorded without log-probabilities.
    """
    calls = _calls_with_tokens(spans)
    if model is not None:
        calls = [call for call in calls if call.attributes.get(LlmCallAttributes.REQUEST_MODEL.value) == model]
    rewards = rewards_by_number(calls, [span for span in spans if not _is_turn_reward(span)])
    turns = []
    for place, call in enumerate(calls):
        prompt_ids = prompt_token_ids(call.attributes)
        for choice in choices_of(call.attributes):
            if choice.token_ids:
                turns.append(
                    TokenTurn(
                        prompt_ids,
                        choice.token_ids,
                        choice.logprobs,
                        model_id(call.attributes),
                        rewards.get(place),
                        choice.finish_reason or "stop",
                        call.attributes.get(EPISODE_TURN),  # type: ignore[arg-type]
                    )
                )
    return turns


def turn_rewards(spans: Sequence[Span]) -> list[float | None]:
    """What an environment gave for each turn of an episode by itself, in order; None where it gave nothing."""
    numbers = [int(span.attributes[EPISODE_TURN]) for span in spans if EPISODE_TURN in span.attributes]  # type: ignore[arg-type]
    found: list[float | None] = [None] * (max(numbers, default=-1) + 1)
    for span in spans:
        if _is_turn_reward(span):
            found[int(span.attributes[EPISODE_TURN])] = get_reward_value(span)  # type: ignore[arg-type]
    return found


def _is_turn_reward(span: Span) -> bool:
    return span.name == AGL_ANNOTATION and EPISODE_TURN in span.attributes


def _calls_with_tokens(spans: Sequence[Span]) -> list[Span]:
    """Whoever recorded them; a proxy's record of a call before others of the same."""
    found: dict[str, Span] = {}
    names = CallNames(spans)
    for span in sorted(spans, key=lambda span: span.name not in PROXY_SPANS):
        if has_tokens(span):
            found.setdefault(names.any_of(span), span)
    for name in _inside_rewards(spans, names):
        found.pop(name, None)
    return sorted(found.values(), key=lambda span: (span.sequence_id, span.start_time or 0.0))


def _inside_rewards(spans: Sequence[Span], names: CallNames) -> set[str]:
    """What was called to find a reward. A proxy does not know that, but the tracer's record of the call does."""
    parents = {span.parent_id for span in spans}
    if not any(span.span_id in parents and is_reward(span) for span in spans):
        return set()
    judges = (node for node in TraceTree.from_spans(spans).traverse() if is_reward(node.span))
    return {names.any_of(node.span) for judge in judges for node in judge.traverse()[1:]}


def transitions(turns: Sequence[TokenTurn]) -> list[TokenTrajectory]:
    """Each turn by itself."""
    return [_Growing(turn).trajectory() for turn in turns]


def trajectories(turns: Sequence[TokenTurn]) -> list[TokenTrajectory]:
    """Turns merged where they continue each other, in the order of their first turns.

    A turn continues the one sequence, of those so far, that its prompt begins with; of several the longest, and of
    equal ones the latest. Every turn is in one trajectory.
    """
    made: list[_Growing] = []
    # Sequences that may still grow, by length and content; the longer ones are tried first.
    growing: dict[int, dict[bytes, list[_Growing]]] = {}
    for turn in turns:
        prompt = array("q", turn.prompt_ids).tobytes()
        found = None
        for length in sorted((length for length in growing if length <= len(prompt)), reverse=True):
            if equal := growing[length].get(prompt[:length]):
                found = _taken(growing, length, prompt[:length], equal)
                break
        if found is None:
            found = _Growing(turn)
            made.append(found)
        else:
            found.continue_with(turn)
        whole = prompt + array("q", turn.response_ids).tobytes()
        growing.setdefault(len(whole), {}).setdefault(whole, []).append(found)
    return [item.trajectory() for item in made]


class _Growing:
    """A trajectory to which turns are added."""

    def __init__(self, turn: TokenTurn) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._parts: list[WrittenPart] = []
        self.continue_with(turn)

    def continue_with(self, turn: TokenTurn) -> None:
        """Add a turn whose prompt begins with all tokens so far."""
        self._token_ids += turn.prompt_ids[len(self._token_ids) :]
        self._logprobs += [0.0] * (len(self._token_ids) - len(self._logprobs))
        start = len(self._token_ids)
        self._token_ids += turn.response_ids
        self._logprobs += turn.logprobs
        self._parts.append(
            WrittenPart(start, len(self._token_ids), turn.model_id, turn.reward, turn.finish_reason, turn.number)
        )

    def trajectory(self) -> TokenTrajectory:
        return TokenTrajectory(self._token_ids, self._logprobs, self._parts)


def _taken(
    growing: dict[int, dict[bytes, list[_Growing]]], length: int, content: bytes, equal: list[_Growing]
) -> _Growing:
    """The latest of ``equal``, which is no longer among those that may grow from there."""
    found = equal.pop()
    if not equal:
        del growing[length][content]
        if not growing[length]:
            del growing[length]
    return found
