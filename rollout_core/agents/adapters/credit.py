"""Which LLM call a reward belongs to: the latest that was over before it and has none yet.

So of two rewards in a row the second goes to the call before.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from rollout_core.agents.adapters.calls import PROXY_SPANS, CallNames
from rollout_core.agents.adapters.tree import TraceTree
from rollout_core.agents.emitters import get_reward_value
from rollout_core.base.errors import ConfigError
from rollout_core.store import Span

_Key = tuple[float, ...]


class RewardMatchPolicy(StrEnum):
    """Among which LLM calls the one that a reward belongs to is looked for."""

    FIRST_OCCURRENCE = "first_occurrence"
    """All of the attempt."""
    FIRST_SIBLING = "first_sibling"
    """Those that have the same parent as the reward."""

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ConfigError(f"reward_match is {value!r}; expected one of {', '.join(item.value for item in cls)}")


def rewards_in_tree(tree: TraceTree, calls: Sequence[TraceTree], policy: RewardMatchPolicy) -> dict[int, float]:
    """Rewards of those ``calls`` that have one, by place among them. Order is by time, and of equal times by number."""
    places = {id(call): place for place, call in enumerate(calls)}
    if policy is RewardMatchPolicy.FIRST_OCCURRENCE:
        return _match_nodes(tree.traverse(), places)
    found: dict[int, float] = {}
    for node in tree.traverse():
        found |= _match_nodes(node.children, places)
    return found


def _match_nodes(nodes: Sequence[TraceTree], places: dict[int, int]) -> dict[int, float]:
    calls = sorted((node for node in nodes if id(node) in places), key=lambda node: node.order)
    rewards = [(node, value) for node in nodes if (value := get_reward_value(node.span)) is not None]
    rewards.sort(key=lambda item: item[0].order)
    matched: dict[int, float] = {}
    _match(
        [((node.start_time, *node.order), value) for node, value in rewards],
        [((call.end_time, *call.order), rank) for rank, call in enumerate(calls)],
        matched,
    )
    return {places[id(calls[rank])]: value for rank, value in matched.items()}


def _match(rewards: Sequence[tuple[_Key, float]], calls: Sequence[tuple[_Key, int]], matched: dict[int, float]) -> None:
    """Add to ``matched`` for each reward, in order, the highest rank that is not in it among calls with a lesser key.
    Keys of rewards rise."""
    coming, over = sorted(calls, reverse=True), []
    for key, value in rewards:
        while coming and coming[-1][0] < key:
            heapq.heappush(over, -coming.pop()[1])
        while over:
            rank = -heapq.heappop(over)
            if rank not in matched:
                matched[rank] = value
                break


def rewards_by_number(calls: Sequence[Span], spans: Sequence[Span]) -> dict[int, float]:
    """Rewards among ``spans`` of those ``calls`` that have one, by place among them; calls are in order.

    A call is before a reward if its sequence id is less. But numbers are given when spans are delivered, in batches,
    and so a reward may be numbered after a call that it was given before. Where both times are by one clock, time
    decides. For a call that the agent's tracer has recorded too, it is the end of that record. Otherwise it is the
    start of the proxy's, if both are of one host (``host.id`` or ``host.name`` in their resources): the proxy may note
    the end when the agent has the answer already.
    """
    times = _times_of_calls(calls, spans)
    rewards: dict[str | None, list[tuple[Span, float]]] = {}
    for span in spans:
        value = get_reward_value(span)
        if value is not None:
            rewards.setdefault(_clock(span), []).append((span, value))
    matched: dict[int, float] = {}
    for clock in sorted(rewards, key=lambda clock: (clock is None, clock or "")):
        known = [] if clock is None else [(since[clock], rank) for rank, since in enumerate(times) if clock in since]
        _match(*_on_one_axis(rewards[clock], calls, known), matched)
    return matched


def _on_one_axis(
    rewards: Sequence[tuple[Span, float]], calls: Sequence[Span], times: Sequence[tuple[float, int]]
) -> tuple[list[tuple[_Key, float]], list[tuple[_Key, int]]]:
    """Rewards of one clock, in order, and calls, with keys to compare them by: the number of the reward in that order.

    ``times``: since when calls count as before a reward by that clock, and their ranks; the others are compared by
    sequence id.
    """
    if times:
        ordered = sorted(rewards, key=lambda item: (item[0].start_time or 0.0, item[0].sequence_id))
    else:
        ordered = sorted(rewards, key=lambda item: (item[0].sequence_id, item[0].start_time or 0.0))
    begins = [span.start_time or 0.0 for span, _ in ordered]
    # What came later by the clock is numbered as if it had come later.
    numbers = list(itertools.accumulate((span.sequence_id for span, _ in ordered), max))
    keys: list[tuple[_Key, int]] = [((bisect.bisect_left(begins, since) - 0.5,), rank) for since, rank in times]
    known = {rank for _, rank in times}
    for rank, call in enumerate(calls):
        if rank not in known:
            keys.append(((bisect.bisect_right(numbers, call.sequence_id) - 0.5,), rank))
    return [((float(place),), value) for place, (_, value) in enumerate(ordered)], keys


def _clock(span: Span) -> str | None:
    """Whose clock a span's times are by; None if it is not known, or there are no times."""
    if span.start_time is None:
        return None
    attributes: dict[str, Any] = span.resource.attributes
    host = attributes.get("host.id") or attributes.get("host.name")
    if host:
        return f"host {host}"
    return None if span.name in PROXY_SPANS else "agent"


def _times_of_calls(calls: Sequence[Span], spans: Sequence[Span]) -> list[dict[str, float]]:
    """Since when each call counts as before a reward, by every clock that recorded it."""
    by_response: dict[str, dict[str, float]] = {}
    names = CallNames([*spans, *calls])
    for span in spans:
        name, clock = names.of(span), _clock(span)
        is_tracers = span.name not in PROXY_SPANS
        if is_tracers and name is not None and clock is not None and span.end_time is not None:
            ends = by_response.setdefault(name, {})
            # Of spans inside each other the innermost is the call.
            ends[clock] = min(span.end_time, ends.get(clock, span.end_time))
    found = []
    for call in calls:
        name, clock = names.of(call), _clock(call)
        own = {clock: call.start_time} if clock is not None and call.start_time is not None else {}
        found.append({**own, **by_response.get(name or "", {})})
    return found
