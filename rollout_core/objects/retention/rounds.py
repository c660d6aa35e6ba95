"""One round of housekeeping: give up what the rules do not keep, then delete what nothing names any more.

Giving up only takes names away, each noted before, so a round that is killed has done a part of its work and the next
one does the rest. While runs are under way, what they may have read stays below ``expired/`` until they have ended.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from pydantic import BaseModel, ConfigDict

from rollout_core.base.errors import ConfigError, CorruptObject, NotFound
from rollout_core.base.ids import ContentId, canonical_json, hash_bytes
from rollout_core.base.processes import size_text
from rollout_core.config.retention import Retention
from rollout_core.objects import ObjectStore, Snapshot, SnapshotStore, TreeFile, TreeManifest
from rollout_core.objects.files import EXPIRED_REFS, PRUNED_REFS, RESULT_REFS, RUN_RECORD_REFS, SNAPSHOT_REFS
from rollout_core.objects.lineage import trained_as
from rollout_core.objects.retention.garbage import GcReport, Scope, collect_garbage
from rollout_core.objects.retention.run_leases import live_leases, unused_before
from rollout_core.objects.snapshots import MODEL_FOLDER, PROGRESS_REFS, expire_ref

MIN_GRACE_HOURS = 7.0
"""With less, a blob that was put again without being touched might go."""
_DAY = 86400.0


class Cleaned(BaseModel):
    """What a round of housekeeping did, or would do."""

    model_config = ConfigDict(frozen=True)

    states: int
    """Training states that were given up."""
    states_kept: int
    results: int
    """Cached results that were given up."""
    models: int
    """Promoted models that were given up, though the history still names them."""
    runs: tuple[str, ...]
    """Under way, so that what they have used or made stays."""
    bytes_before: int
    garbage: GcReport

    @property
    def lines(self) -> list[str]:
        """For people."""
        would = "would be " if self.garbage.dry_run else ""
        freed = self.garbage.deleted_bytes
        found = [
            f"given up: {self.states} training states ({self.states_kept} stay), {self.results} results, "
            f"{self.models} models that were promoted before",
            f"{would}deleted: {self.garbage.deleted_blobs} blobs, {self.garbage.deleted_notes} notes, "
            f"{self.garbage.deleted_leftovers} leftovers",
            f"{would}freed: {size_text(freed)} of {size_text(self.bytes_before)}",
        ]
        if self.garbage.young_blobs:
            found.append(f"{self.garbage.young_blobs} more blobs stay for now, as they are young or may be in use")
        found += [f"under way: {run}" for run in self.runs]
        found += [f"nothing was deleted because of {what}" for what in self.garbage.unreadable]
        return found


@dataclass(frozen=True)
class _Choice:
    """What a round gives up."""

    states: tuple[Snapshot, ...]
    num_kept: int
    results: tuple[str, ...]
    progress: tuple[str, ...]
    records: tuple[str, ...]
    """Of runs."""
    models: tuple[ContentId, ...]
    """Promoted before those that stay, and not given up by an earlier round."""
    back: tuple[ContentId, ...]
    """Given up by an earlier round, and promoted again since."""
    entries: frozenset[str]
    """Refs in the history of models that do not stay."""

    @property
    def refs(self) -> frozenset[str]:
        return frozenset([*(state.ref for state in self.states), *self.results, *self.progress, *self.records])


History = Sequence[tuple[str, ContentId]]
"""Refs of the entries of one history of models, the oldest first, with the model that each made the latest."""


def clean(
    objects: ObjectStore,
    rules: Retention,
    *,
    histories: Collection[History],
    named_elsewhere: Collection[ContentId] = (),
    dry_run: bool = False,
) -> Cleaned:
    """Give up what ``rules`` do not keep, and delete what nothing names any more. Safe while runs and other rounds
    work; a round that was killed is finished by the next one.

    ``histories``: of the models that were the latest (`promotion.history.histories`); of each, the newest stay.
    ``named_elsewhere``: ids that the database names, which stay.

    Raises ConfigError for a grace of zero while runs are under way, or one that is too short to be safe.
    """
    grace = timedelta(hours=rules.grace_hours)
    if 0 < rules.grace_hours < MIN_GRACE_HOURS:
        raise ConfigError(f"grace_hours {rules.grace_hours:g}: expected at least {MIN_GRACE_HOURS:g}, or 0")
    leases = live_leases(objects, clear=not dry_run)
    if leases and not grace and not dry_run:
        names = ", ".join(lease.holder for lease in leases)
        raise ConfigError(
            f"grace_hours 0 is for when nothing runs; under way: {names}. Wait for them, or allow 24 hours"
        )
    bytes_before = sum(stat.size for _, stat in objects.blobs())
    chosen = _choose(objects, rules, histories, unused_before(leases, time.time()))
    if not dry_run:
        _give_up(objects, chosen)
    # A run that began after they were taken away has not read them; one that began before may have.
    first = min([lease.began for lease in live_leases(objects, clear=False)], default=float("inf"))
    expired = frozenset(_set_before(objects, EXPIRED_REFS, first))
    scope = Scope(
        extra_roots=named_elsewhere,
        absent=expired | (chosen.refs if not leases else frozenset()),
        closed=chosen.entries,
        weights_of_inputs=rules.weights_of_inputs,
    )
    if not dry_run:
        for name in expired:
            objects.delete_ref(name)
    garbage = collect_garbage(
        objects, min_age=grace, keep_notes=timedelta(days=rules.note_days), dry_run=dry_run, scope=scope
    )
    return Cleaned(
        states=len(chosen.states),
        states_kept=chosen.num_kept,
        results=len(chosen.results),
        models=len(chosen.models),
        runs=tuple(lease.holder for lease in leases),
        bytes_before=bytes_before,
        garbage=garbage,
    )


def _give_up(objects: ObjectStore, chosen: _Choice) -> None:
    snapshots = SnapshotStore(objects)
    for state in chosen.states:
        snapshots.expire(state)
    for name in (*chosen.results, *chosen.progress, *chosen.records):
        expire_ref(objects, name)
    for model in chosen.models:
        objects.set_ref(f"{PRUNED_REFS}/{model}", objects.put_json({"kind": "model/1"}))
    for model in chosen.back:
        objects.delete_ref(f"{PRUNED_REFS}/{model}")


def _choose(objects: ObjectStore, rules: Retention, histories: Collection[History], in_use_since: float) -> _Choice:
    now = time.time()
    before = min(now - rules.grace_hours * 3600.0, in_use_since)
    unused = min(before, now - rules.result_days * _DAY)
    results = _set_before(objects, RESULT_REFS, unused)
    progress = _set_before(objects, PROGRESS_REFS, unused)
    kept_models, entries = _latest_models(histories, rules.keep_promoted)
    in_states = kept_models | {trained_as(objects, model) for model in kept_models}
    pruned = {name.partition("/")[2] for name in objects.ref_names(PRUNED_REFS)}
    models = [model for model in sorted(set(entries.values())) if model not in pruned and objects.exists(model)]
    old = set(_set_before(objects, SNAPSHOT_REFS, before))
    resumed = {named for name, named in objects.list_refs(PROGRESS_REFS) if name not in progress}
    states = SnapshotStore(objects).list()
    kept = _kept_states(states, rules, now)
    states_to_go = [
        state
        for state in states
        if state.ref in old
        and state.ref not in kept
        and state.id not in resumed
        and not state.is_kept_by_label
        and (not kept_models or _model_of(objects, state) not in in_states)
    ]
    return _Choice(
        states=tuple(states_to_go),
        num_kept=len(states) - len(states_to_go),
        results=tuple(results),
        progress=tuple(progress),
        records=tuple(_set_before(objects, RUN_RECORD_REFS, min(before, now - rules.run_days * _DAY))),
        models=tuple(models),
        back=tuple(model for model in kept_models if model in pruned),
        entries=frozenset(entries),
    )


def _set_before(objects: ObjectStore, folder: str, moment: float) -> list[str]:
    """Refs below a folder that were last set, or renewed, before that time."""
    known = set(objects.ref_names(folder))
    dated = ((key.removeprefix("refs/"), stat) for key, stat in objects.files.list(f"refs/{folder}"))
    return sorted(name for name, stat in dated if stat.modified < moment and name in known)


def _kept_states(newest_first: Iterable[Snapshot], rules: Retention, now: float) -> set[str]:
    """Refs of the newest states of each run name and algorithm, and of the last one of each run of late. A state is of
    all runs that trained it, or found it trained."""
    kept: set[str] = set()
    counts: dict[tuple[str, str, str], int] = defaultdict(int)
    runs: set[tuple[str, str]] = set()
    for state in newest_first:
        groups = [(name, state.algorithm, state.kind) for name in state.runs or {state.run_id}]
        for group in groups:
            counts[group] += 1
        is_last = (state.run_id, state.kind) not in runs
        runs.add((state.run_id, state.kind))
        is_late = now - state.created_at.timestamp() < rules.state_days * _DAY
        if any(counts[group] <= rules.keep_states for group in groups) or (is_last and is_late):
            kept.add(state.ref)
    return kept


def _latest_models(histories: Collection[History], keep: int) -> tuple[set[ContentId], dict[str, ContentId]]:
    """Models of the histories that stay; and the refs of the entries of others, with their models."""
    kept: set[ContentId] = set()
    for history in histories:
        newest = dict.fromkeys(model for _, model in reversed(history))
        kept |= set(list(newest)[:keep])
    named = {ref: model for history in histories for ref, model in history}
    return kept, {ref: model for ref, model in named.items() if model not in kept}


def _model_of(objects: ObjectStore, state: Snapshot) -> ContentId | None:
    """Id of the model in a training state; None where it has none, or its manifest cannot be read."""
    below = f"{MODEL_FOLDER}/"
    try:
        files = objects.manifest(state.files).files
    except (NotFound, CorruptObject, ConfigError):
        return None
    inner = [file for file in files if file.path.startswith(below)]
    paths = [TreeFile(path=file.path.removeprefix(below), size=file.size, content_id=file.content_id) for file in inner]
    return hash_bytes(canonical_json(TreeManifest(files=tuple(paths)))) if inner else None
