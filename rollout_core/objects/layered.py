"""Where the boxes of a directed graph stand, and how its arrows run: downwards, in layers, with few crossings.

The method of Sugiyama, Tagawa and Toda (1981): layers by the longest way from a source; arrows over several layers pass
through points of their own; barycenters order each layer; then each box goes as near to its neighbours' mean as the
order allows, which is isotonic regression. The same graph is always drawn alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

SWEEPS = 8
GAP = 24.0
POINT_WIDTH = 8.0
"""Of an arrow that passes through a layer."""
STRAIGHTNESS = 4.0
"""How much more the points of a long arrow keep in line than boxes do."""

Place = tuple[str, int]
"""A box (0), or the point of an arrow in a layer."""


@dataclass(frozen=True)
class Layout:
    """Places of boxes and ways of arrows, in pixels."""

    centres: Mapping[str, float]
    """Of each box from the left."""
    layers: Mapping[str, int]
    """Of each box from above, beginning at 0."""
    ways: Mapping[tuple[str, str], Sequence[float]]
    """For each arrow where it is from the left, in each layer from its start to its end."""
    width: float


def layers_of(names: Iterable[str], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The layers of `lay_out`, which take a small part of its time."""
    widths = dict.fromkeys(names, 0.0)
    return _layers(widths, _without_circles(widths, edges))


def lay_out(widths: Mapping[str, float], edges: Sequence[tuple[str, str]]) -> Layout:
    """A layout of boxes of these widths. Of arrows that make a circle one counts as none here, and points upwards."""
    forward = _without_circles(widths, edges)
    layers = _layers(widths, forward)
    ways = {edge: _places(edge, layers) for edge in edges if edge in forward}
    rows: list[list[Place]] = [[] for _ in range(max(layers.values(), default=-1) + 1)]
    for name, layer in layers.items():
        rows[layer].append((name, 0))
    above: dict[Place, list[Place]] = defaultdict(list)
    below: dict[Place, list[Place]] = defaultdict(list)
    for (start, _), way in ways.items():
        for step, place in enumerate(way[1:-1], 1):
            rows[layers[start] + step].append(place)
        for upper, lower in pairwise(way):
            below[upper].append(lower)
            above[lower].append(upper)
    rows = _ordered(rows, above, below)
    centres = _centres(rows, widths, above, below)
    left = min((centres[place] - _width(place, widths) / 2 for row in rows for place in row), default=0.0)
    right = max((centres[place] + _width(place, widths) / 2 for row in rows for place in row), default=0.0)
    return Layout(
        centres={name: centres[name, 0] - left for name in widths},
        layers=layers,
        ways={
            (start, end): [centres[place] - left for place in ways[start, end]]
            if (start, end) in ways
            else [centres[start, 0] - left, centres[end, 0] - left]
            for start, end in edges
        },
        width=right - left,
    )


def _width(place: Place, widths: Mapping[str, float]) -> float:
    return POINT_WIDTH if place[1] else widths[place[0]]


def _places(edge: tuple[str, str], layers: Mapping[str, int]) -> list[Place]:
    start, end = edge
    through = range(1, layers[end] - layers[start])
    return [(start, 0), *((f"{start}\0{end}", step) for step in through), (end, 0)]


def _without_circles(widths: Mapping[str, float], edges: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    """Arrows but for those that lead back to where a walk along them came from."""
    following: dict[str, list[str]] = defaultdict(list)
    for start, end in edges:
        following[start].append(end)
    kept, open_now, done = set(), set(), set()
    for first in widths:
        stack = [] if first in done else [(first, iter(following[first]))]
        open_now.update(name for name, _ in stack)
        while stack:
            name, rest = stack[-1]
            for end in rest:
                if end in open_now:
                    continue
                kept.add((name, end))
                if end not in done:
                    open_now.add(end)
                    stack.append((end, iter(following[end])))
                    break
            else:
                stack.pop()
                open_now.discard(name)
                done.add(name)
    return kept


def _layers(widths: Mapping[str, float], edges: set[tuple[str, str]]) -> dict[str, int]:
    """One below the lowest that leads there; what leads to as much as leads to it then sinks to above the first of
    that."""
    into: dict[str, list[str]] = defaultdict(list)
    out_of: dict[str, list[str]] = defaultdict(list)
    for start, end in edges:
        into[end].append(start)
        out_of[start].append(end)
    layers = dict.fromkeys(widths, 0)
    missing = {name: len(into[name]) for name in widths}
    ready = [name for name in widths if not missing[name]]
    for name in ready:  # grows while it is walked through
        for end in sorted(out_of[name]):
            layers[end] = max(layers[end], layers[name] + 1)
            missing[end] -= 1
            if not missing[end]:
                ready.append(end)
    for name in reversed(ready):
        if out_of[name] and len(into[name]) <= len(out_of[name]):
            layers[name] = min(layers[end] for end in out_of[name]) - 1
    return layers


def _ordered(
    rows: list[list[Place]], above: Mapping[Place, list[Place]], below: Mapping[Place, list[Place]]
) -> list[list[Place]]:
    """Each row by the mean place of what its members hang on, downwards and upwards in turn; the best order seen."""
    best, fewest = rows, _crossings(rows, below)
    for sweep in range(SWEEPS):
        if not fewest:
            break
        neighbours, order = (above, range(1, len(rows))) if sweep % 2 == 0 else (below, range(len(rows) - 2, -1, -1))
        rows = [list(row) for row in rows]
        for number in order:
            neighbour_row = rows[number - 1 if sweep % 2 == 0 else number + 1]
            at = {place: index for index, place in enumerate(neighbour_row)}
            # What hangs on nothing keeps its share of the row.
            own = {place: index * len(neighbour_row) / len(rows[number]) for index, place in enumerate(rows[number])}
            means = {place: _mean([at[other] for other in neighbours.get(place, ())], own[place]) for place in own}
            rows[number].sort(key=means.__getitem__)
        crossings = _crossings(rows, below)
        if crossings < fewest:
            best, fewest = rows, crossings
    return best


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _crossings(rows: Sequence[Sequence[Place]], below: Mapping[Place, list[Place]]) -> int:
    """How many pairs of arrows cross: inversions among their ends, sorted by their starts."""
    total = 0
    for row, next_row in pairwise(rows):
        at = {place: index for index, place in enumerate(next_row)}
        seen = [0] * (len(next_row) + 1)  # a Fenwick tree of ends
        count = 0
        for place in row:
            ends = sorted(at[end] for end in below.get(place, ()))
            for end in ends:
                index, not_beyond = end + 1, 0
                while index:
                    not_beyond += seen[index]
                    index &= index - 1
                total += count - not_beyond
            for end in ends:
                index = end + 1
                while index <= len(next_row):
                    seen[index] += 1
                    index += index & -index
            count += len(ends)
    return total


def _centres(
    rows: Sequence[Sequence[Place]],
    widths: Mapping[str, float],
    above: Mapping[Place, list[Place]],
    below: Mapping[Place, list[Place]],
) -> dict[Place, float]:
    centres: dict[Place, float] = {}
    for row in rows:
        _settle(row, widths, [0.0] * len(row), centres)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            near = above if down else below
            wanted = [_mean([centres[other] for other in near.get(place, ())], centres[place]) for place in row]
            _settle(row, widths, wanted, centres)
    return centres


def _settle(
    row: Sequence[Place], widths: Mapping[str, float], wanted: Sequence[float], centres: dict[Place, float]
) -> None:
    """Put a row as near to ``wanted`` as order and gaps allow, by least squares (pooling of adjacent violators)."""
    shifts, shift, before = [], 0.0, 0.0
    for place in row:
        width = _width(place, widths)
        shift += (before + width) / 2 + GAP if shifts else 0.0
        shifts.append(shift)
        before = width
    blocks: list[tuple[float, float, int]] = []  # mean, weight, members
    for place, target, shift in zip(row, wanted, shifts, strict=True):
        block = (target - shift, STRAIGHTNESS if place[1] else 1.0, 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, weight, members = blocks.pop()
            both = weight + block[1]
            block = ((mean * weight + block[0] * block[1]) / both, both, members + block[2])
        blocks.append(block)
    means = [mean for mean, _, members in blocks for _ in range(members)]
    centres.update({place: mean + shift for place, mean, shift in zip(row, means, shifts, strict=True)})
