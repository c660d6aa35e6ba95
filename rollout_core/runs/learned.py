"""What an update made of a sample: the advantage of each of its tokens, as the update's loss had it.

The update keeps them with its figures. Nothing is computed here: where they are not known, it is said why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from rollout_core.base.errors import MissingObject, NotFound
from rollout_core.base.ids import ContentId
from rollout_core.config.on_policy import GROUP_KINDS
from rollout_core.config.variants import variant_of
from rollout_core.data.advantage_rows import decode_advantages
from rollout_core.runs.browsing import Lines, SampleBrowser, SampleList, SampleView
from rollout_core.runs.run_records import RunDetail, StageCall

LEVELS = (0.25, 1.0)
"""Of an advantage in root mean squares of its update's: where it begins to be one, and to be a large one."""
_WITHOUT = {
    "gkd": 'kind = "gkd" learns a teacher\'s distribution of each token, without advantages',
    "online_dpo": 'kind = "online_dpo" compares the best with the worst completion of a prompt, without advantages',
}


@dataclass(frozen=True)
class Learned:
    """Advantages of one sample."""

    update: str = ""
    """Stage and label of the update that learned from it."""
    advantages: Sequence[float] = ()
    """Of each token; none where ``why`` says so. What was given to the model has 0."""
    mean: float = 0.0
    """Over the tokens that the model wrote."""
    scale: float = 0.0
    """The root mean square over all samples of the update."""
    why: str = ""
    """Why there are none, as a sentence without its end."""

    def level(self, advantage: float) -> int:
        """From -2, much worse than expected, to 2."""
        size = abs(advantage) / self.scale if self.scale else 0.0
        return int(math.copysign(sum(size >= least for least in LEVELS), advantage))


@dataclass(frozen=True)
class _Kept:
    """The advantages of an update, read."""

    lines: Lines
    scale: float

    @property
    def num_bytes(self) -> int:
        """Of memory."""
        return self.lines.num_bytes


def learned_from(browser: SampleBrowser, detail: RunDetail, of: SampleList, view: SampleView) -> Learned:
    """What the run's record and its storage know of a sample of the list ``of``."""
    if of.is_held_out:
        return Learned(why="it is held out: nothing is learned from it")
    file, place = of.file_of(view.number)
    found = None if file.is_shard else _update_of(detail, of, file.completions)
    if found is None:
        return Learned(why="no update in the record of this run has learned from it")
    call, order = found
    name = f"{call.stage} {call.label}".rstrip()
    blob = call.result.get("advantages")
    if blob is None:
        return Learned(name, why=_WITHOUT.get(_kind_of(detail.config), "a version that kept no advantages trained it"))
    try:
        kept: _Kept = browser.read(ContentId(blob), "advantages", _read, file.blobs)
        if order != file.completions:
            ids = browser.ids(order, needed_with=file)
            if view.id not in ids:
                return Learned(name, why="it was drawn, and is not among the completions that the update learned from")
            place = ids.index(view.id)
        values = decode_advantages(kept.lines[place], len(view.token_ids)) if place < len(kept.lines) else None
    except MissingObject:
        return Learned(name, why="they are not in the storage any more")
    except NotFound as error:
        return Learned(name, why=str(error))
    if values is None:
        return Learned(name, why='it counts in no loss: it was cut at the length limit, and truncated is "mask"')
    written = range(len(values)) if view.written is None else [n for part in view.written for n in range(*part)]
    return Learned(name, values, math.fsum(values[n] for n in written) / max(1, len(written)), kept.scale)


def _read(data: bytes) -> _Kept:
    """The scale is a mean over samples, for one number may stand for all tokens of a sample."""
    squares, count = 0.0, 0
    for line in data.splitlines():
        values: Any = orjson.loads(line)
        if values is not None:
            row = np.atleast_1d(np.asarray(values, np.float64))
            row = row[row != 0] if len(row) > 1 else row
            squares, count = squares + float((row**2).mean() if len(row) else 0.0), count + 1
    return _Kept(Lines(data), math.sqrt(squares / count) if count else 0.0)


def _update_of(detail: RunDetail, of: SampleList, completions: ContentId) -> tuple[StageCall, ContentId] | None:
    """The update that learned from a file of completions, and the one in whose order it did: what was chosen from this
    file, or mixed with replayed ones."""
    orders = [completions]
    for call, result in detail.results("SelectedGroups"):
        if of.label.rpartition(", round ")[0] == call.label:
            orders.append(ContentId(result["completions"]))
    for call, result in detail.results("Replayed"):
        if orders[-1] in call.inputs:
            orders.append(ContentId(result["completions"]))
    for order in reversed(orders):
        for call, _ in detail.results("Checkpoint"):
            if order in call.inputs:
                return call, order
    return None


def _kind_of(config: dict[str, Any]) -> str:
    tables = (config.get(name) for name in ("algorithm", "grpo"))
    return next((str(variant_of(table, GROUP_KINDS)) for table in tables if isinstance(table, dict)), "")
