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
from rollout_core.base.settings import hot_reload
from rollout_core.config.judges import JudgeReward
from rollout_core.config.rewards import (
    CompositeReward,
    ExactMatchReward,
    ExpressionReward,
    FunctionReward,
    PluginReward,
    RewardSpec,
    plain_rewards,
)
from rollout_core.config.verifiers import CodeReward, SqlReward, VerifiedReward
from rollout_core.objects import ObjectStore
from rollout_core.objects.origins import SHOWN_FILES, Source, code_behind, record_import
from rollout_core.objects.plugin_files import file_plugin
from rollout_core.objects.trees import hash_file
from rollout_core.plugins.discovery import find_plugin
from rollout_core.plugins.identity import PluginCode
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
    plugins: Mapping[str, PluginCode] = field(default_factory=dict)
    """Of its plugins, by `PluginReward.address`."""

    def is_of(self, spec: RewardSpec) -> bool:
        """Whether it has the code of all functions and plugins of a reward."""
        return not _lacking(spec, self.codes, self.plugins)


def read_source(spec: RewardSpec, base: Path | None = None) -> RewardSource:
    """Read each file of a reward's code once. Runs none of it. Raises ConfigError if it cannot be found."""
    functions = [part.callable for part in plain_rewards(spec) if isinstance(part, FunctionReward)]
    codes = {name: read_code(name, base) for name in dict.fromkeys(functions)}
    plugins = {
        part.address: find_plugin(part.name, base or Path(), part.path, kind="reward-model")
        for part in plugin_parts(spec)
    }
    return _source(spec, codes, plugins, base)


def plugin_parts(spec: RewardSpec) -> list[PluginReward]:
    """The plugins that a reward is made of."""
    return [part for part in plain_rewards(spec) if isinstance(part, PluginReward)]


def _source(
    spec: RewardSpec, codes: Mapping[str, UserCode], plugins: Mapping[str, PluginCode], base: Path | None
) -> RewardSource:
    files = _files_of(spec, base)
    return RewardSource(_source_id(spec, codes, files, plugins), codes, files, plugins)


def _lacking(spec: RewardSpec, codes: Mapping[str, UserCode], plugins: Mapping[str, PluginCode]) -> list[str]:
    functions = [part.callable for part in plain_rewards(spec) if isinstance(part, FunctionReward)]
    wanted = [part.address for part in plugin_parts(spec)]
    return [*(name for name in functions if name not in codes), *(name for name in wanted if name not in plugins)]


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


def hold_source(spec: RewardSpec, filed: Mapping[str, UserCode | PluginCode], base: Path | None = None) -> ContentId:
    """Have this process run such code for a reward, as it was filed, wherever its files are now; the reward's id.

    Raises ConfigError where code of a function or plugin is not given.
    """
    codes = {name: code for name, code in filed.items() if isinstance(code, UserCode)}
    plugins = {name: code for name, code in filed.items() if isinstance(code, PluginCode)}
    if missing := _lacking(spec, codes, plugins):
        raise ConfigError(f"the code of reward {', '.join(missing)} is not filed; runs of earlier versions did not")
    source = _source(spec, codes, plugins, base)
    _hold(source)
    return source.id


def filed_codes(objects: ObjectStore, source: ContentId) -> dict[str, UserCode | PluginCode]:
    """What was filed of the code of a reward, by the names of functions and the addresses of plugins."""
    documents = {name: objects.get_json(blob) for name, blob in code_behind(objects, source).items()}
    return {
        name: (PluginCode if "plugin" in document else UserCode).from_document(document)
        for name, document in documents.items()
    }


def _hold(source: RewardSource) -> None:
    with _held_lock:
        _held.pop(source.id, None)
        _held[source.id] = source
        while len(_held) > HELD_SOURCES:
            del _held[next(iter(_held))]


def source_of(
    spec: RewardSpec, base: Path | None, wanted: ContentId, objects: ObjectStore | None = None
) -> RewardSource:
    """The code that ``wanted`` is the id of: as this process read it when it took the id; of a reward with plugins as
    it was filed in ``objects`` by who took it, so that no other machine needs the plugins; else as it is now.

    Raises ConfigError where that is other code.
    """
    with _held_lock:
        held = _held.get(wanted)
    if held is not None and held.is_of(spec):
        return held
    if objects is not None and plugin_parts(spec):
        filed = filed_codes(objects, wanted)
        if filed and hold_source(spec, filed, base) == wanted:
            return source_of(spec, base, wanted)
    source = read_source(spec, base)
    if source.id != wanted:
        names = ", ".join([*source.codes, *source.plugins]) or spec.kind
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
    for address, plugin in source.plugins.items():
        file_plugin(objects, source.id, address, plugin, "reward", hot_reloaded=hot_reload() is not None)
    if not source.codes and not source.plugins:
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


def _source_id(
    spec: RewardSpec,
    codes: Mapping[str, UserCode],
    files: Mapping[str, ContentId],
    plugins: Mapping[str, PluginCode],
) -> ContentId:
    if isinstance(spec, CompositeReward):
        parts = [[part.weight, _source_id(part.reward, codes, files, plugins)] for part in spec.parts]
        return content_id("reward/1", {"kind": spec.kind, "parts": parts})
    if isinstance(spec, ExpressionReward):
        rewards = {name: _source_id(reward, codes, files, plugins) for name, reward in spec.rewards.items()}
        return content_id("reward/1", {"kind": spec.kind, "expression": spec.expression, "rewards": rewards})
    if isinstance(spec, ExactMatchReward):
        return content_id("reward/2", spec)  # the meaning's version: 2 compares whole floats and after NFC
    if isinstance(spec, SqlReward):  # the file's content counts, and not where it lies
        return content_id("reward/1", {**spec.cache_identity(), "database": files[spec.database]})
    if isinstance(spec, VerifiedReward | CodeReward | JudgeReward):
        return content_id("reward/1", spec.cache_identity())
    if isinstance(spec, PluginReward):
        known = {"kind": spec.kind, "name": spec.name, "config": spec.config}
        if (token := hot_reload()) is not None:
            return content_id("reward/1", {**known, "address": spec.address, "hot_reload": token})
        return content_id("reward/1", {**known, "plugin": plugins[spec.address].id})
    if not isinstance(spec, FunctionReward):
        return content_id("reward/1", spec)
    function = spec.callable.rpartition(":")[2]
    identity = {"kind": spec.kind, "function": function, "kwargs": spec.kwargs}
    return content_id("reward/1", {**identity, **codes[spec.callable].identity()})
