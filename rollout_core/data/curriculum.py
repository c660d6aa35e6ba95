"""Competence-based curricula (Platanios and others, arXiv:1903.09848): what is open to training, and in which order.

What a step or an iteration draws is a pure function of its number, so a resumed run needs nothing else. Where all rows
are open it is what a run without a curriculum draws.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.config import Curriculum, OnPolicySettings
from rollout_core.data.dataset_sources import stored_rows
from rollout_core.data.datasets import PromptRow, Row, parse_rows, to_line
from rollout_core.data.examples import positions_between
from rollout_core.data.text import tokenize_prompts
from rollout_core.models.pretrained import borrowed_tokenizer
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import BlobId, Record, Scores
from rollout_core.objects.retention.unstored import local_model

log = logging.getLogger(__name__)


def competence(progress: float, curriculum: Curriculum) -> float:
    """Share of the rows that is open at ``progress``, the share of training that is done.

    c(t) = min(1, (t / T (1 - c0^p) + c0^p)^(1/p)) with c0 = ``initial``, T = ``until``, p = ``power``; eq. 7 of
    arXiv:1903.09848 for p = 2, eq. 6 for p = 1.
    """
    start = curriculum.initial**curriculum.power
    return min(1.0, (progress / curriculum.until * (1.0 - start) + start) ** (1.0 / curriculum.power))


def num_open(number: int, total: int, num_items: int, curriculum: Curriculum) -> int:
    """Of ``num_items``, those open in step or iteration ``number`` (from 0) of ``total``; at least one."""
    share = competence(number / max(1, total), curriculum)
    return min(num_items, max(1, math.ceil(share * num_items)))


def open_positions(first: int, last: int, *, order: Sequence[int], num_open: int, seed: int) -> list[int]:
    """Places ``first`` up to ``last`` of endless passes over the ``num_open`` easiest items; ``order`` has the
    positions of all, the easiest first."""
    return [order[rank] for rank in positions_between(first, last, num_items=num_open, seed=seed)]


def easiest_first(difficulties: Iterable[float]) -> list[int]:
    """Positions of items by how hard they are; equal ones as they stand."""
    return [position for _, position in sorted((value, position) for position, value in enumerate(difficulties))]


def difficulty(row: Row, key: str, where: str) -> float:
    """The number that a row has under ``key``. Raises ConfigError, naming the row, where it has none."""
    value = row.extras.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        found = "nothing" if value is None else repr(value)
        raise ConfigError(f"{where} has {found} as {key!r}, and a curriculum by key needs a number there")
    return float(value)


def sorted_rows(objects: ObjectStore, dataset: ContentId, row: type[Row], key: str) -> ContentId:
    """The same rows by what they have under ``key``, the smallest first; in memory while they are sorted."""
    rows = stored_rows(objects, dataset, row)
    keyed = [(difficulty(one, key, rows.place(position)), position, to_line(one)) for position, one in enumerate(rows)]
    return objects.put_stream(line for _, _, line in sorted(keyed))


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


# Of prompts, from which iterations draw


class OpenPrompts(Record):
    """What a curriculum has opened up to an iteration."""

    order: BlobId
    """As of `PromptOrder`."""
    places: int
    """Of an iteration in the order of prompts."""
    num_open: tuple[int, ...]
    """Of each iteration, the prompts it draws from."""

    def positions(self, objects: ObjectStore, last: int, *, seed: int) -> list[int]:
        """Positions of the prompts at places 0 up to ``last``, those of all iterations."""
        order: Sequence[int] = objects.get_json(self.order)
        found: list[int] = []
        for number, opened in enumerate(self.num_open):
            end = min(last, (number + 1) * self.places)
            found += open_positions(number * self.places, end, order=order, num_open=opened, seed=seed)
        return found


class PromptOrder(Record):
    """Prompts by how hard they are."""

    order: BlobId
    """JSON list of positions in the file of prompts, the easiest first."""
    num_prompts: int
    easiest: float
    hardest: float

    def opened(self, number: int, settings: OnPolicySettings) -> OpenPrompts:
        """What ``settings.curriculum`` opens up to iteration ``number``, from 0."""
        assert settings.curriculum is not None, "the prompts are ordered for it"
        bounds = settings.iterations, self.num_prompts, settings.curriculum
        opened = tuple(num_open(each, *bounds) for each in range(number + 1))
        return OpenPrompts(order=self.order, places=settings.places_per_iteration, num_open=opened)


def order_prompts(
    objects: ObjectStore,
    prompts: ContentId,
    model: ContentId,
    *,
    by: Literal["length", "key", "reward"],
    key: str | None,
    scores: Scores | None,
    models: Path,
    warn: Callable[..., None] = log.warning,
) -> PromptOrder:
    """File the order of ``prompts`` by length in the tokens of ``model``, by a key of theirs, or by ``scores`` of
    equally many completions of each, in the order of the prompts. Raises ConfigError where a prompt has none.

    ``models``: local folder for fetched models."""
    rows = parse_rows(objects.get_bytes(prompts), f"prompts {prompts.short}", PromptRow)
    if by == "key":
        assert key is not None, "validated"
        found = [difficulty(row, key, f"prompt {number}") for number, row in enumerate(rows, start=1)]
    elif by == "reward":
        assert scores is not None, "given for a curriculum by reward"
        found = by_reward(objects.get_json(scores.scores), len(rows), warn)
    else:
        with borrowed_tokenizer(local_model(objects, model, models)) as tokenizer:
            found = [float(len(ids)) for ids in tokenize_prompts(tokenizer, rows)]
    order = easiest_first(found)
    ends = {"easiest": round(found[order[0]], 6), "hardest": round(found[order[-1]], 6)}
    return PromptOrder(order=objects.put_json(order), num_prompts=len(rows), **ends)


def by_reward(values: Sequence[float | None], num_prompts: int, warn: Callable[..., None] = log.warning) -> list[float]:
    """How hard prompts are: the less their completions earn, the harder. Completions without a score do not count;
    a prompt that has no other is as hard as the hardest."""
    each = len(values) // num_prompts
    if each * num_prompts != len(values):
        raise ConfigError(
            f"{len(values)} completions of {num_prompts} prompts were scored, not equally many of each, so that they "
            "cannot be ordered by reward; look at those that failed, or order by length or a key"
        )
    groups = [values[start : start + each] for start in range(0, len(values), each)]
    known = [[value for value in group if value is not None] for group in groups]
    found = [-statistics.fmean(group) if group else None for group in known]
    hardest = max(value for value in found if value is not None)
    if unknown := sum(value is None for value in found):
        warn("%d prompts have no completion with a score; they count as the hardest", unknown)
    return [hardest if value is None else value for value in found]
