"""Rows and tokenised items as plain lists, where a test looks at all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rollout_core.config import InputGlob, LossOn
from rollout_core.data.dataset_sources import open_prompts
from rollout_core.data.datasets import PairRow, PromptRow, SftRow, UnpairedRow, parse_rows
from rollout_core.data.examples import Example, each_example
from rollout_core.data.preference_data import Pair, PreferenceReport, UnpairedPreference, each_pair, each_unpaired
from rollout_core.data.tokenized import DataReport


def iter_prompts(pattern: str | Path, *, base: Path | None = None) -> Iterator[PromptRow]:
    return open_prompts(InputGlob(glob=str(pattern)), base or Path()).rows()


def read_prompts(pattern: str | Path, *, base: Path | None = None) -> list[PromptRow]:
    return list(iter_prompts(pattern, base=base))


def parse_prompts(data: bytes, name: str) -> list[PromptRow]:
    return parse_rows(data, name, PromptRow)


def parse_sft(data: bytes, name: str) -> list[SftRow]:
    return parse_rows(data, name, SftRow)


def parse_pairs(data: bytes, name: str) -> list[PairRow]:
    return parse_rows(data, name, PairRow)


def parse_unpaired(data: bytes, name: str) -> list[UnpairedRow]:
    return parse_rows(data, name, UnpairedRow)


def tokenize_sft(
    tokenizer: Any, rows: Iterable[SftRow], *, loss_on: LossOn, max_seq_len: int
) -> tuple[list[Example], DataReport]:
    examples: list[Example] = []
    return examples, each_example(tokenizer, rows, examples.append, loss_on=loss_on, max_seq_len=max_seq_len)


def tokenize_pairs(
    tokenizer: Any, rows: Iterable[PairRow], *, max_seq_len: int, need_prompts: bool
) -> tuple[list[Pair], PreferenceReport]:
    pairs: list[Pair] = []
    return pairs, each_pair(tokenizer, rows, pairs.append, max_seq_len=max_seq_len, need_prompts=need_prompts)


def tokenize_unpaired(
    tokenizer: Any, rows: Iterable[UnpairedRow], *, max_seq_len: int
) -> tuple[list[UnpairedPreference], PreferenceReport]:
    items: list[UnpairedPreference] = []
    return items, each_unpaired(tokenizer, rows, items.append, max_seq_len=max_seq_len)
