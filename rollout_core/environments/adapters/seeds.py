"""Seeds of rows that are generated: those to learn from, and others that are held out."""

from __future__ import annotations

from typing import Any

HELD_OUT_SEEDS = 2**30
"""Added to the seed of rows that are held out."""
DEFAULT_SIZE = 1_000


def seeds_of(split: str, size: int | None, seed: int) -> range:
    """Of so many rows, as `make_rows` gets them; none of one split is of the other."""
    first = seed + (HELD_OUT_SEEDS if split == "eval" else 0)
    return range(first, first + (size or DEFAULT_SIZE))


def seed_rows(split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
    """Rows that are seeds and nothing else."""
    return [{"id": f"seed-{number}", "seed": number} for number in seeds_of(split, size, seed)]
