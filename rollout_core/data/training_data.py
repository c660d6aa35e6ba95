"""Rows of a data set as training items: tokenised once for a data set, a tokenizer and settings, then kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from rollout_core.base.errors import ConfigError, Conflict, DataError
from rollout_core.base.ids import ContentId, content_id
from rollout_core.config import PreferenceSettings, SFTSettings
from rollout_core.data.dataset_sources import HashedRows, RowStream, hash_rows, stored_rows
from rollout_core.data.datasets import PairRow, Row, SftRow, UnpairedRow
from rollout_core.data.examples import EXAMPLES, Example, each_example
from rollout_core.data.preference_data import (
    PAIRS,
    UNPAIRED,
    Pair,
    PreferenceReport,
    UnpairedPreference,
    each_pair,
    each_unpaired,
)
from rollout_core.data.tokenized import DataReport, ItemForm, ItemTable, keep_items, kept_report, open_items
from rollout_core.models.pretrained import load_identified_tokenizer
from rollout_core.objects import ObjectStore

ItemT = TypeVar("ItemT")
ReportT = TypeVar("ReportT", bound=DataReport)


@dataclass(frozen=True)
class RowForm(Generic[ItemT, ReportT]):
    """How a learner takes its rows in."""

    kind: str
    row: type[Row]
    tokenize: Callable[..., ReportT]
    """Of a tokenizer and rows; hands each item to its third argument."""
    items: ItemForm[ItemT]
    report: type[ReportT]
    options: Mapping[str, Any]
    """What of the settings decides how rows are tokenised."""

    def key(self, dataset: ContentId, tokenizer: ContentId) -> ContentId:
        """Identity of a tokenised data set. Its version is raised when the same rows would give other items."""
        return content_id("tokenized/2", [self.kind, dataset, tokenizer, self.options])


def sft_form(settings: SFTSettings) -> RowForm[Example, DataReport]:
    """Rows of SFT; tokenising raises ConfigError as `each_example`."""
    sequence = settings.sequence
    options = {"loss_on": settings.loss_on, "max_seq_len": sequence.max_length, "turns": sequence.turns}
    return RowForm("sft", SftRow, each_example, EXAMPLES, DataReport, options)


def pair_form(settings: PreferenceSettings, *, need_prompts: bool) -> RowForm[Pair, PreferenceReport]:
    """Pairs; tokenising raises ConfigError as `each_pair`."""
    options = {"max_seq_len": settings.sequence.max_length, "need_prompts": need_prompts}
    return RowForm("pairs", PairRow, each_pair, PAIRS, PreferenceReport, options)


def unpaired_form(settings: PreferenceSettings) -> RowForm[UnpairedPreference, PreferenceReport]:
    """Labelled answers; tokenising raises ConfigError as `each_unpaired`."""
    options = {"max_seq_len": settings.sequence.max_length}
    return RowForm("judged", UnpairedRow, each_unpaired, UNPAIRED, PreferenceReport, options)


def training_items(
    objects: ObjectStore, cache: Path, dataset: ContentId, tokenizer_from: Path, form: RowForm[ItemT, ReportT]
) -> tuple[ItemTable[ItemT], ReportT]:
    """Items of the rows that blob ``dataset`` holds, and the rows by outcome."""
    rows = stored_rows(objects, dataset, form.row)
    tokenizer, tokenizer_id = load_identified_tokenizer(tokenizer_from)
    return open_items(
        objects,
        cache,
        form.key(dataset, tokenizer_id),
        form.items,
        form.report,
        lambda keep: form.tokenize(tokenizer, rows, keep, place=rows.place, **form.options),
    )


def look_at_rows(
    rows: RowStream[Any],
    tokenizer: Callable[[], Any],
    form: RowForm[Any, ReportT],
    *,
    objects: ObjectStore | None,
    tokenizer_id: ContentId,
    keep: bool,
) -> ReportT:
    """What becomes of rows that are not imported yet, or was found out when the same were tokenised before.

    ``tokenizer`` gives the tokenizer, and is not called where nothing is tokenised.
    With ``keep`` the items are kept in ``objects``, where `training_items` finds them.
    Raises DataError for malformed rows, all of them, and ConfigError as tokenising does.
    """

    def tokenize(take: Callable[[Any], None], place: Callable[[int], str]) -> ReportT:
        report = form.tokenize(tokenizer(), rows, take, place=place, **form.options)
        return replace(report, reading=rows.remarks())

    def tokenize_to_keep(take: Callable[[Any], None], dataset: ContentId) -> ReportT:
        hashed = HashedRows(rows)
        # Rows of one content may stand in many files, so what is kept of them numbers them.
        report = form.tokenize(tokenizer(), hashed, take, place=_numbered, **form.options)
        if hashed.id != dataset:
            raise Conflict(f"dataset {rows.address!r} changed while it was read; run again when nobody writes to it")
        return report

    try:
        if objects is None:
            return tokenize(lambda item: None, rows.place)
        dataset = hash_rows(rows)
        key = form.key(dataset, tokenizer_id)
        report = kept_report(objects, key, form.report)
        if report is None and not keep:
            return tokenize(lambda item: None, rows.place)
        if report is None:
            _, report = keep_items(objects, key, form.items, lambda take: tokenize_to_keep(take, dataset))
        return replace(report.placed(rows.place), reading=rows.remarks())
    except DataError:
        raise
    except ConfigError:
        rows.check()  # malformed rows come first, and all of them
        tokenize(lambda item: None, rows.place)  # raises it again, naming files and lines
        raise


def _numbered(row: int) -> str:
    return f"row {row + 1}"
