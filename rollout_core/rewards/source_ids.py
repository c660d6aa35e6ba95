"""What scores depend on: the id of a reward and of its code, which is read once.

A user's function enters cache keys by the content of its source file, so editing it makes new scores.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, content_id
from rollout_core.config.rewards import (
    CompositeReward,
    ExpressionReward,
    FunctionReward,
    RewardSpec,
    plain_rewards,
)
from rollout_core.rewards.user_code import UserCode
from rollout_core.rewards.user_sources import read_code

HELD_SOURCES = 32
_held: dict[ContentId, RewardSource] = {}
_held_lock = threading.Lock()


@dataclass(frozen=True)
class RewardSource:
    """The code of a reward as it was read, and the id of what its scores depend on."""

    id: ContentId
    codes: Mapping[str, UserCode]
    """Of its functions, by their names."""


def read_source(spec: RewardSpec, base: Path | None = None) -> RewardSource:
    """Read each file of a reward's code once. Runs none of it. Raises ConfigError if it cannot be found."""
    functions = [part.callable for part in plain_rewards(spec) if isinstance(part, FunctionReward)]
    codes = {name: read_code(name, base) for name in dict.fromkeys(functions)}
    return RewardSource(_source_id(spec, codes), codes)


def source_id(spec: RewardSpec, base: Path | None = None) -> ContentId:
    """Content id of what scores depend on: the settings of ``spec``, the function's source file, and what of the user's
    own code that imports (`read_code`). What was read is held, so that this process runs it (`source_of`).

    Where the files lie does not matter. Installed packages, data files and services do not enter. A reward model counts
    by its address, so give its content id. Raises ConfigError if the source cannot be found; runs none of it.
    """
    source = read_source(spec, base)
    with _held_lock:
        _held.pop(source.id, None)
        _held[source.id] = source
        while len(_held) > HELD_SOURCES:
            del _held[next(iter(_held))]
    return source.id


def source_of(spec: RewardSpec, base: Path | None, wanted: ContentId) -> RewardSource:
    """The code that ``wanted`` is the id of: as this process read it when it took the id, else as it is now.

    Raises ConfigError where that is other code.
    """
    with _held_lock:
        held = _held.get(wanted)
    if held is not None and all(
        part.callable in held.codes for part in plain_rewards(spec) if isinstance(part, FunctionReward)
    ):
        return held
    source = read_source(spec, base)
    if source.id != wanted:
        names = ", ".join(source.codes) or spec.kind
        raise ConfigError(
            f"the code of reward {names} is not what it was when the run began (id {source.id.short}, expected "
            f"{wanted.short}): it was edited since, or differs between machines. No score was stored; start the run "
            "again to score with the code as it is now"
        )
    return source


def _source_id(spec: RewardSpec, codes: Mapping[str, UserCode]) -> ContentId:
    if isinstance(spec, CompositeReward):
        parts = [[part.weight, _source_id(part.reward, codes)] for part in spec.parts]
        return content_id("reward/1", {"kind": spec.kind, "parts": parts})
    if isinstance(spec, ExpressionReward):
        rewards = {name: _source_id(reward, codes) for name, reward in spec.rewards.items()}
        return content_id("reward/1", {"kind": spec.kind, "expression": spec.expression, "rewards": rewards})
    if not isinstance(spec, FunctionReward):
        return content_id("reward/1", spec)
    function = spec.callable.rpartition(":")[2]
    identity = {"kind": spec.kind, "function": function, "kwargs": spec.kwargs}
    return content_id("reward/1", {**identity, **codes[spec.callable].identity()})
