"""The stage that orders prompts by how hard they are, and which of them are open when."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Literal

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.data.curriculum import difficulty, easiest_first, open_positions
from rollout_core.data.datasets import PromptRow, parse_rows
from rollout_core.data.text import tokenize_prompts
from rollout_core.models.pretrained import load_tokenizer
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import BlobId, Record, Scores
from rollout_core.objects.retention.unstored import local_model
from tasks.runtime import connections
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, stage


class PromptOrder(Record):
    """Prompts by how hard they are."""

    order: BlobId
    """JSON list of positions in the file of prompts, the easiest first."""
    num_prompts: int
    easiest: float
    hardest: float


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


@stage(version=1, optional=("scores",))
def order_prompts(
    prompts: ContentId,
    model: ContentId,
    *,
    by: Literal["length", "key", "reward"],
    key: str | None = None,
    scores: Scores | None = None,
    label: str = "",
) -> PromptOrder:
    """Order prompts by length in the tokens of ``model``, by a key of theirs, or by ``scores`` of equally many
    completions of each, which stand in the order of the prompts. Raises ConfigError where a prompt has none."""
    objects = current_stage().objects
    rows = parse_rows(objects.get_bytes(prompts), f"prompts {prompts.short}", PromptRow)
    if by == "key":
        assert key is not None, "validated"
        found = [difficulty(row, key, f"prompt {number}") for number, row in enumerate(rows, start=1)]
    elif by == "reward":
        assert scores is not None, "given for a curriculum by reward"
        found = by_reward(json.loads(objects.get_bytes(scores.scores)), len(rows))
    else:
        tokenizer = load_tokenizer(local_model(objects, model, connections.cache_folder()))
        found = [float(len(ids)) for ids in tokenize_prompts(tokenizer, rows)]
    order = easiest_first(found)
    easiest, hardest = found[order[0]], found[order[-1]]
    stage_logger().info("%d prompts ordered by %s, from %.4g to %.4g", len(rows), key or by, easiest, hardest)
    return PromptOrder(
        order=objects.put_json(order), num_prompts=len(rows), easiest=round(easiest, 6), hardest=round(hardest, 6)
    )


def by_reward(values: Sequence[float | None], num_prompts: int) -> list[float]:
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
        stage_logger().warning("%d prompts have no completion with a score; they count as the hardest", unknown)
    return [hardest if value is None else value for value in found]
