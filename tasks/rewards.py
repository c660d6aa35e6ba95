"""The rewards of this process: loaded for the first scores of a run, kept for the next, closed with the run."""

from __future__ import annotations

import threading

from rollout_core.base.ids import ContentId
from rollout_core.config.rewards import RewardSpec
from rollout_core.rewards.loading import load_reward
from rollout_core.rewards.scoring import RewardFunction
from rollout_core.rewards.source_ids import source_of
from tasks import connections
from tasks.logs import stage_logger
from tasks.stage import current_stage

KEPT_REWARDS = 4
_kept: dict[tuple[ContentId, str, str], RewardFunction] = {}
_lock = threading.Lock()


def open_reward(reward: RewardSpec, reward_source: ContentId) -> RewardFunction:
    """The reward, running the code that ``reward_source`` is the id of. Raises ConfigError where that is not to be had,
    and as `load_reward`."""
    base, objects = connections.working_folder(), current_stage().objects
    source = source_of(reward, base, reward_source)
    changed = [path for code in source.codes.values() if (path := code.changed_file()) is not None]
    if changed:
        stage_logger().warning(
            "%s was changed or removed since this run began, and the run goes on with the code it began with",
            changed[0],
        )
    # What a process may take is no part of the id.
    key = reward_source, reward.model_dump_json(), str(base)
    with _lock:
        if key not in _kept:
            _kept[key] = load_reward(
                reward,
                base=base,
                source=source,
                model_folder=lambda model: objects.local_tree(ContentId(model), connections.cache_folder()),
                on_line=lambda line: stage_logger().info("%s", line),
            )
        kept = _kept.pop(key)
        _kept[key] = kept
        oldest = [_kept.pop(other) for other in list(_kept)[:-KEPT_REWARDS]]
    for other in oldest:
        other.close()
    return kept


def close_rewards() -> None:
    """End the processes that rewards run in; scores that come later start their own."""
    with _lock:
        kept = list(_kept.values())
        _kept.clear()
    for reward in kept:
        reward.close()
