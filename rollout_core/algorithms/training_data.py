"""Rows of the object store as training items: tokenised once for a data set, a tokenizer and settings, then kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_core.algorithms.data import EXAMPLES, Example, each_example
from rollout_core.algorithms.data_report import DataReport
from rollout_core.algorithms.item_table import ItemTable, kept_items
from rollout_core.algorithms.preference_data import (
    JUDGED,
    PAIRS,
    Judged,
    Pair,
    PreferenceReport,
    each_judged,
    each_pair,
)
from rollout_core.config import PreferenceSettings, SFTSettings
from rollout_core.dataset_sources import stored_rows
from rollout_core.datasets import SftRow
from rollout_core.ids import ContentId, content_id
from rollout_core.models import load_tokenizer, tokenizer_id
from rollout_core.objects import ObjectStore
from rollout_core.preferences import JudgedRow, PairRow


def sft_options(settings: SFTSettings) -> dict[str, Any]:
    """What of the settings decides how SFT rows are tokenised."""
    return {"loss_on": settings.loss_on, "max_seq_len": settings.packing.max_seq_len}


def pair_options(settings: PreferenceSettings, *, need_prompts: bool) -> dict[str, Any]:
    """What of the settings decides how pairs are tokenised."""
    return {"max_seq_len": settings.packing.max_seq_len, "need_prompts": need_prompts}


def judged_options(settings: PreferenceSettings) -> dict[str, Any]:
    """What of the settings decides how judged answers are tokenised."""
    return {"max_seq_len": settings.packing.max_seq_len}


def tokenized_key(kind: str, dataset: ContentId, tokenizer: ContentId, options: Mapping[str, Any]) -> ContentId:
    """Identity of a tokenised data set. Its version is raised when the same rows would give other items."""
    return content_id("tokenized/1", [kind, dataset, tokenizer, options])


def sft_examples(
    objects: ObjectStore, cache: Path, dataset: ContentId, tokenizer_from: Path, settings: SFTSettings
) -> tuple[ItemTable[Example], DataReport]:
    """Examples of SFT rows. Raises ConfigError as `each_example`."""
    options, rows = sft_options(settings), stored_rows(objects, dataset, SftRow)
    tokenizer = load_tokenizer(tokenizer_from)
    return kept_items(
        objects,
        cache,
        tokenized_key("sft", dataset, tokenizer_id(tokenizer_from), options),
        EXAMPLES,
        DataReport,
        lambda keep: each_example(tokenizer, rows, keep, place=rows.place, **options),
    )


def preference_pairs(
    objects: ObjectStore,
    cache: Path,
    dataset: ContentId,
    tokenizer_from: Path,
    settings: PreferenceSettings,
    *,
    need_prompts: bool,
) -> tuple[ItemTable[Pair], PreferenceReport]:
    """Pairs. Raises ConfigError as `each_pair`."""
    options, rows = pair_options(settings, need_prompts=need_prompts), stored_rows(objects, dataset, PairRow)
    tokenizer = load_tokenizer(tokenizer_from)
    return kept_items(
        objects,
        cache,
        tokenized_key("pairs", dataset, tokenizer_id(tokenizer_from), options),
        PAIRS,
        PreferenceReport,
        lambda keep: each_pair(tokenizer, rows, keep, place=rows.place, **options),
    )


def judged_answers(
    objects: ObjectStore, cache: Path, dataset: ContentId, tokenizer_from: Path, settings: PreferenceSettings
) -> tuple[ItemTable[Judged], PreferenceReport]:
    """Judged answers. Raises ConfigError as `each_judged`."""
    options, rows = judged_options(settings), stored_rows(objects, dataset, JudgedRow)
    tokenizer = load_tokenizer(tokenizer_from)
    return kept_items(
        objects,
        cache,
        tokenized_key("judged", dataset, tokenizer_id(tokenizer_from), options),
        JUDGED,
        PreferenceReport,
        lambda keep: each_judged(tokenizer, rows, keep, place=rows.place, **options),
    )
