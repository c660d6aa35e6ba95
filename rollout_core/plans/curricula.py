"""What a plan says of a curriculum: rows have what it goes by, and what is open when."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rollout_core.config import Curriculum
from rollout_core.data.curriculum import difficulty, num_open
from rollout_core.data.datasets import Row


def check_keys(curriculum: Curriculum, rows: Iterable[Row], place: Callable[[int], str] | None = None) -> None:
    """Raises ConfigError naming the first row without a number under the curriculum's key. ``place`` names a row by its
    position, from 0."""
    if curriculum.key is None:
        return
    for position, row in enumerate(rows):
        difficulty(row, curriculum.key, f"row {position + 1}" if place is None else place(position))


def in_words(curriculum: Curriculum, num_items: int, total: int | None, unit: str) -> str:
    """Such as ``by length: 100 of 1,000 at first, all from iteration 9 of 16``."""
    by = curriculum.key or curriculum.by
    first = num_open(0, 1, num_items, curriculum)
    text = f"by {by}: {first:,} of {num_items:,} at first, all "
    if total is None:
        return text + f"after {curriculum.until:.0%} of the {unit}s"
    whole = (number for number in range(total) if num_open(number, total, num_items, curriculum) == num_items)
    number = next(whole, None)
    return text + (f"never in {total} {unit}s" if number is None else f"from {unit} {number + 1} of {total}")
