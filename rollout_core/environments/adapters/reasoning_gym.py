"""Data sets of reasoning-gym: questions that are made from a seed, and answers that its own functions score.

A row holds the seed and the size of its data set and its place there; the item is made again where it is scored.
"""

from __future__ import annotations

import dataclasses
import random
import re
import threading
from collections.abc import Mapping
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset  # pyright: ignore[reportMissingImports]

from rollout_core.base.errors import near
from rollout_core.environments.adapters.seeds import seeds_of
from rollout_core.environments.protocol import Done

_DRAWING = threading.Lock()
ROW_KEYS = ("dataset", "seed", "size", "index", "question")


class ReasoningGym:
    """One question, and the score of the answer."""

    def __init__(self, dataset: str, config: Mapping[str, Any], answer_tag: str) -> None:
        if dataset not in DATASETS:
            raise ValueError(f"reasoning-gym has no data set {dataset!r}; {near(dataset, DATASETS)}")
        known = [field.name for field in dataclasses.fields(DATASETS[dataset][1])]
        for name in config:
            if name not in known:
                raise ValueError(f"config.{name}: {dataset} has no such key; {near(name, known)}")
        checked = DATASETS[dataset][1](**config, seed=0, size=1)
        if hasattr(checked, "validate"):
            checked.validate()
        self._dataset, self._config = dataset, dict(config)
        self._tag = None if answer_tag == "none" else answer_tag
        self._score = 0.0

    def make_rows(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        """Questions that reasoning-gym makes of the seed; held-out ones of other seeds."""
        seeds = seeds_of(split, size, seed)
        first, count = seeds.start, len(seeds)
        about = {"dataset": self._dataset, "seed": first, "size": count}
        made = self._made(first, count)
        return [
            {
                "id": f"{self._dataset}-{first}-{index}",
                "question": _item(made, first, index)["question"],
                **about,
                "index": index,
            }
            for index in range(count)
        ]

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """The question, with how the answer is to be given."""
        if missing := [name for name in ROW_KEYS if name not in row]:
            raise ValueError(
                f'the row has no {missing[0]!r}; expected the keys of rows of kind "environment", {", ".join(ROW_KEYS)}'
            )
        if row["dataset"] != self._dataset:
            raise ValueError(f"the row is of {row['dataset']!r}, and the environment of {self._dataset!r}")
        # For each episode, as scoring some data sets changes them.
        self._items = self._made(row["seed"], row["size"])
        self._item = _item(self._items, row["seed"], row["index"])
        question = self._item["question"]
        if row["question"] != question:
            raise ValueError(
                "the row has another question than reasoning-gym makes now: it was made by another version or with "
                "another config; make the rows again"
            )
        if self._tag is None:
            return question
        return f"{question}\nGive the answer between <{self._tag}> and </{self._tag}>."

    def step(self, message: Mapping[str, Any]) -> Done:
        """The answer, which ends the episode."""
        self._score = float(self._items.score_answer(self._answer(message["content"]), self._item))
        return Done()

    def reward(self) -> float:
        """What reasoning-gym gives for it, from 0 to 1; 0 where there was none."""
        return self._score

    def _made(self, seed: int, size: int) -> Any:
        return create_dataset(self._dataset, **self._config, seed=seed, size=size)

    def _answer(self, text: str) -> str | None:
        """What stands between the last tags; None where nothing does."""
        if self._tag is None:
            return text.strip()
        found = re.findall(rf"<{self._tag}>(.*?)</{self._tag}>", text, re.DOTALL)
        return found[-1].strip() if found else None


def _item(items: Any, seed: int, index: int) -> dict[str, Any]:
    """Of a data set. Some of reasoning-gym's, such as ``list_functions``, draw from Python's own numbers, too."""
    with _DRAWING:
        random.seed(seed + index)
        return items[index]
