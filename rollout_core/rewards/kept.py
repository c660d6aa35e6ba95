"""Rewards that a process keeps open from one call to the next: their code is loaded once, and so are their models."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from rollout_core.base.ids import ContentId
from rollout_core.base.settings import hot_reload
from rollout_core.config.rewards import RewardSpec
from rollout_core.objects import ObjectStore
from rollout_core.objects.retention.unstored import local_model
from rollout_core.rewards.judges.kept_answers import AnswerLedger
from rollout_core.rewards.loading import load_reward
from rollout_core.rewards.scoring import RewardFunction
from rollout_core.rewards.source_ids import record_code, source_of
from rollout_core.store.reachable import OpenStore

MOST_KEPT = 4
_kept: dict[tuple[ContentId, str, str], RewardFunction] = {}
_lock = threading.Lock()


def open_reward(
    reward: RewardSpec,
    reward_source: ContentId,
    *,
    objects: ObjectStore,
    open_store: OpenStore | None = None,
    base: Path,
    models: Path,
    on_line: Callable[[str], None],
    on_warning: Callable[[str], None],
) -> RewardFunction:
    """The reward, running the code that ``reward_source`` is the id of, whatever its files under ``base`` hold by now.

    Reward models are fetched into the folder ``models``, answers of judges kept in the store. ``on_line`` receives what
    the reward prints, ``on_warning`` that its file was changed. Raises ConfigError where the code is not to be had, and
    as `load_reward`.
    """
    source = source_of(reward, base, reward_source, objects)
    read = [*source.codes.values(), *(source.plugins.values() if hot_reload() is None else ())]
    changed = [path for code in read if (path := code.changed_file()) is not None]
    if changed:
        on_warning(
            f"{changed[0]} was changed or removed since this run began, and the run continues with the code it started "
            "with"
        )
    # What a process may take is no part of the id.
    key = reward_source, reward.model_dump_json(), str(base)
    with _lock:
        if key not in _kept:
            record_code(objects, reward, source)
            _kept[key] = load_reward(
                reward,
                base=base,
                source=source,
                model_folder=lambda model: local_model(objects, ContentId(model), models),
                ledger=None if open_store is None else AnswerLedger(objects, open_store),
                on_line=on_line,
            )
        found = _kept.pop(key)
        _kept[key] = found
        oldest = [_kept.pop(other) for other in list(_kept)[:-MOST_KEPT]]
    for other in oldest:
        other.close()
    return found


def close_rewards() -> None:
    """End the processes that rewards run in; scores that come later start their own."""
    with _lock:
        found = list(_kept.values())
        _kept.clear()
    for reward in found:
        reward.close()
