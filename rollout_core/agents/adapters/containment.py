"""Which span contains another in time: for many at once in n log n."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar


class _Timed(Protocol):
    @property
    def start_time(self) -> float: ...
    @property
    def end_time(self) -> float: ...


Node = TypeVar("Node", bound=_Timed)

_Candidate = tuple[float, int, int]
"""Duration, minus the place in its family, family: the least is the tightest and, of equals, the innermost."""


def tightest_containers(
    families: Sequence[Sequence[Node]], may_contain: Callable[[Node], bool]
) -> list[tuple[Node, Node]]:
    """For the first of each family, the shortest node of another family that begins no later and ends no earlier, and
    not both at once; only those that have one. A family is a node and all below it, parents first.

    No family comes below itself by way of others: what would close such a loop is left out.
    """
    # Whatever contains an interval comes before it in this order, but for those that are equal to it.
    ordered = sorted(
        (node.start_time, -node.end_time, place, family)
        for family, nodes in enumerate(families)
        for place, node in enumerate(nodes)
        if node.start_time <= node.end_time < math.inf
    )
    tightest = _TightestByEnd(sorted({-item[1] for item in ordered}))
    below = list(range(len(families)))
    found = []
    for equals in _runs(ordered):
        for _, minus_end, place, family in equals:
            if place == 0:
                _, minus_place, other = tightest.at_least(-minus_end, besides=family)
                if other >= 0 and _root(below, other) != family:
                    below[family] = other
                    found.append((families[family][0], families[other][-minus_place]))
        for start, minus_end, place, family in equals:
            if may_contain(families[family][place]):
                tightest.add(-minus_end, (-minus_end - start, -place, family))
    return found


def _runs(ordered: Sequence[tuple[float, float, int, int]]) -> Iterator[Sequence[tuple[float, float, int, int]]]:
    """Items of equal times, together."""
    start = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or ordered[end][:2] != ordered[start][:2]:
            yield ordered[start:end]
            start = end


def _root(below: list[int], family: int) -> int:
    while below[family] != family:
        below[family] = below[below[family]]
        family = below[family]
    return family


_NONE: _Candidate = (math.inf, 0, -1)


class _TightestByEnd:
    """A Fenwick tree over end times: in each cell the two tightest candidates, of different families."""

    def __init__(self, ends: Sequence[float]) -> None:
        self._ends = ends
        self._cells: list[tuple[_Candidate, _Candidate]] = [(_NONE, _NONE)] * (len(ends) + 1)

    def _rank(self, end: float) -> int:
        """From 1 for the latest end."""
        return len(self._ends) - bisect.bisect_left(self._ends, end)

    def add(self, end: float, candidate: _Candidate) -> None:
        rank = self._rank(end)
        while rank <= len(self._ends):
            self._cells[rank] = _best_two(self._cells[rank], candidate)
            rank += rank & -rank

    def at_least(self, end: float, *, besides: int) -> _Candidate:
        """The tightest that ends at ``end`` or later, of any family but ``besides``."""
        rank, best = self._rank(end), _NONE
        while rank:
            first, second = self._cells[rank]
            best = min(best, second if first[2] == besides else first)
            rank -= rank & -rank
        return best


def _best_two(cell: tuple[_Candidate, _Candidate], new: _Candidate) -> tuple[_Candidate, _Candidate]:
    first, second = cell
    if new < first:
        return (new, second) if new[2] == first[2] else (new, first)
    if new[2] != first[2] and new < second:
        return first, new
    return cell
