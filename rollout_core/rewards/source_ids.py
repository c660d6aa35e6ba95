"""What scores depend on: the id of a reward and of its code, which is read once, without running it.

A user's function enters cache keys by the content of its source file, so editing it makes new scores.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, content_id
from rollout_core.config.judges import JudgeReward
from rollout_core.config.rewards import (
    CompositeReward,
    ExactMatchReward,
    ExpressionReward,
    FunctionReward,
    RewardSpec,
    plain_rewards,
)
from rollout_core.config.verifiers import CodeReward, SqlReward, VerifiedReward
from rollout_core.objects import ObjectStore
from rollout_core.objects.origins import SHOWN_FILES, Source, record_import
from rollout_core.objects.trees import hash_file
from rollout_core.rewards.user_code import UserCode, read_code

HELD_SOURCES = 32
_held: dict[ContentId, RewardSource] = {}
_held_lock = threading.Lock()


@dataclass(frozen=True)
class RewardSource:
    """The code of a reward as it was read, and the id of what its scores depend on."""

    id: ContentId
    codes: Mapping[str, UserCode]
    """Of its functions, by their names."""
    files: Mapping[str, ContentId] = field(default_factory=dict)
    """Content ids of the databases that it reads, by their paths."""


def read_source(spec: RewardSpec, base: Path | None = None) -> RewardSource:
    """Read each file of a reward's code once. Runs none of it. Raises ConfigError if it cannot be found."""
    functions = [part.callable for part in plain_rewards(spec) if isinstance(part, FunctionReward)]
    codes = {name: read_code(name, base) for name in dict.fromkeys(functions)}
    files = _files_of(spec, base)
    return RewardSource(_source_id(spec, codes, files), codes, files)


def _files_of(spec: RewardSpec, base: Path | None) -> dict[str, ContentId]:
    databases = {part.database: None for part in plain_rewards(spec) if isinstance(part, SqlReward)}
    return {name: _file_id(name, base) for name in databases}


def _file_id(database: str, base: Path | None) -> ContentId:
    return hash_file((base or Path()) / database).content_id


def source_id(spec: RewardSpec, base: Path | None = None) -> ContentId:
    """Content id of what scores depend on: the settings of ``spec``, the function's source file, and what of the user's
    own code that imports (`read_code`). What was read is held, so that this process runs it (`source_of`).

    Where the files lie does not matter. Installed packages, data files and services do not enter. A reward model counts
    by its address, so give its content id. Raises ConfigError if the source cannot be found; runs none of it.
    """
    source = read_source(spec, base)
    _hold(source)
    return source.id


def hold_source(spec: RewardSpec, codes: Mapping[str, UserCode], base: Path | None = None) -> ContentId:
    """Have this process run such code for a reward, as it was filed, wherever its files are now; the reward's id.

    Raises ConfigError where code of a function is not given.
    """
    functions = [part.callable for part in plain_rewards(spec) if isinstance(part, FunctionReward)]
    if missing := [name for name in functions if name not in codes]:
        raise ConfigError(f"the code of reward {', '.join(missing)} is not filed; runs of earlier versions did not")
    files = _files_of(spec, base)
    source = RewardSource(_source_id(spec, codes, files), codes, files)
    _hold(source)
    return source.id


def _hold(source: RewardSource) -> None:
    with _held_lock:
        _held.pop(source.id, None)
        _held[source.id] = source
        while len(_held) > HELD_SOURCES:
            del _held[next(iter(_held))]


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


def record_code(objects: ObjectStore, spec: RewardSpec, source: RewardSource) -> None:
    """File the code of a reward, and note where it was read. A reward without code of its own is noted by its kind."""
    for code in source.codes.values():
        file_code(objects, source.id, code, "reward")
    if not source.codes:
        record_import(objects, source.id, Source(kind="reward", address=spec.kind, size_bytes=0, num_files=0))


def file_code(
    objects: ObjectStore, content: ContentId, code: UserCode, kind: Literal["reward", "agent", "environment"]
) -> ContentId:
    """File the files of some code as a document, and note where they were read for ``content``; the document's id."""
    filed = objects.put_json(code.document())
    files = [*([code.main] if code.main else []), *code.imported.values()]
    found = Source(
        kind=kind,
        address=code.callable,
        place=str(code.main.path) if code.main else None,
        size_bytes=sum(len(file.code) for file in files),
        num_files=len(files),
        files=tuple(file.path.name for file in files[:SHOWN_FILES]),
        code={code.callable: filed},
    )
    record_import(objects, content, found)
    return filed


def _source_id(spec: RewardSpec, codes: Mapping[str, UserCode], files: Mapping[str, ContentId]) -> ContentId:
    if isinstance(spec, CompositeReward):
        parts = [[part.weight, _source_id(part.reward, codes, files)] for part in spec.parts]
        return content_id("reward/1", {"kind": spec.kind, "parts": parts})
    if isinstance(spec, ExpressionReward):
        rewards = {name: _source_id(reward, codes, files) for name, reward in spec.rewards.items()}
        return content_id("reward/1", {"kind": spec.kind, "expression": spec.expression, "rewards": rewards})
    if isinstance(spec, ExactMatchReward):
        return content_id("reward/2", spec)  # the meaning's version: 2 compares whole floats and after NFC
    if isinstance(spec, SqlReward):  # the file's content counts, and not where it lies
        return content_id("reward/1", {**spec.cache_identity(), "database": files[spec.database]})
    if isinstance(spec, VerifiedReward | CodeReward | JudgeReward):
        return content_id("reward/1", spec.cache_identity())
    if not isinstance(spec, FunctionReward):
        return content_id("reward/1", spec)
    function = spec.callable.rpartition(":")[2]
    identity = {"kind": spec.kind, "function": function, "kwargs": spec.kwargs}
    return content_id("reward/1", {**identity, **codes[spec.callable].identity()})
