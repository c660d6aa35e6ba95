"""Where inputs came from: files, hub repositories and code that runs brought into the object store.

The record of one source of content C is a blob that ref ``imports/<C>/<name>`` names. The name follows from the source
alone, so that bringing the same in every night makes one record, which says when it was first. A record is kept as long
as what it is about. None says how content was made: that is lineage (`rollout_core.objects.records`), and content can
have both, or several sources.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from rollout_core.base.ids import ContentId, content_id, is_content_id
from rollout_core.base.settings import without_password
from rollout_core.objects import ObjectStore
from rollout_core.objects.files import IMPORT_REFS, ref_key
from rollout_core.objects.lineage import Lineage

log = logging.getLogger(__name__)

MAX_SOURCES = 32
"""Of one content; what else it was brought in from is not recorded."""
SHOWN_FILES = 100
_ALIKE = ("kind", "address", "place", "hub_id", "revision", "commit")
"""What tells sources apart."""

Kind = Literal["data", "model", "tokenizer", "adapter", "reward", "agent", "environment", "template"]


class Source(BaseModel):
    """One place that content was brought in from. Passwords, keys and the options of web addresses are ``***``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    address: str
    """As the configuration has it: a path or pattern, a URL, a hub id, or ``module:function``."""
    place: str | None = None
    """The absolute path or URL that was read."""
    hub_id: str | None = None
    revision: str | None = None
    """Branch, tag or commit that was asked for."""
    commit: str | None = None
    """Of the repository on the hub, as far as it is known."""
    size_bytes: int
    """Of all files, as they were read."""
    num_files: int
    files: tuple[str, ...] = ()
    """Their names, the first `SHOWN_FILES`."""
    code: dict[str, ContentId] = {}
    """Code that was read, by name: blobs of JSON, as `rollout_core.rewards.user_code.UserCode.document`."""
    imported_at: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))
    """The first time."""


class Imported(BaseModel):
    """Content with its sources, as the trace of its lineage shows it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: Literal["import"] = "import"
    outputs: tuple[ContentId, ...]
    sources: tuple[Source, ...]
    """The first one first."""


def source_of_files(
    kind: Kind, address: str, files: Iterable[Path], *, place: str | None = None, hub_id: str | None = None
) -> Source:
    """The source of files on this machine. Raises OSError for one that is not there."""
    paths = list(files)
    return Source(
        kind=kind,
        address=without_password(address),
        place=place,
        hub_id=hub_id,
        size_bytes=sum(path.stat().st_size for path in paths),
        num_files=len(paths),
        files=tuple(path.name for path in paths[:SHOWN_FILES]),
    )


def hub_commit(folder: Path) -> str | None:
    """The commit whose files a folder has, where it is one of the hub's cache."""
    return folder.name if folder.parent.name == "snapshots" else None


def record_import(objects: ObjectStore, content: ContentId, source: Source) -> None:
    """Note that ``content`` was brought in from ``source``; the same source again changes nothing but the note's age.

    ``content`` may be a blob, or the id of something that has none, such as a reward's code. `MAX_SOURCES` are kept.
    """
    alike = content_id("import/1", source.model_dump(mode="json", include=set(_ALIKE)))
    ref = f"{IMPORT_REFS}/{ContentId(content)}/{alike.short}"
    known = objects.cached_bytes(ref)
    if known is not None and _parsed(ref, known) is not None:
        # Touched where it is old: garbage collection spares it while a run is under way that nothing names it for yet.
        stat = objects.files.stat(ref_key(ref))
        if stat is not None and objects.files.keep(ref_key(ref), stat):
            return
    elif len(objects.ref_names(f"{IMPORT_REFS}/{content}")) >= MAX_SOURCES:
        return
    objects.set_ref(ref, objects.put_json(source))


def sources_of(objects: ObjectStore, content: ContentId) -> list[Source]:
    """What ``content`` was brought in from, the first one first. A record that cannot be read is left out."""
    return _read(objects, objects.ref_names(f"{IMPORT_REFS}/{ContentId(content)}"))


def imported_ids(objects: ObjectStore) -> dict[ContentId, list[str]]:
    """Everything with a record of its source, with the names of the refs."""
    found: dict[ContentId, list[str]] = defaultdict(list)
    for ref in objects.ref_names(IMPORT_REFS):
        if is_content_id(named := ref.split("/")[1]):
            found[ContentId(named)].append(ref)
    return found


def imports_behind(objects: ObjectStore, content: ContentId, found: Sequence[Lineage]) -> list[Imported]:
    """The sources of ``content`` and of all inputs that the records ``found`` name, in the order of their naming."""
    known = imported_ids(objects)
    named = [content, *(one for lineage in found for one in lineage.inputs_named())]
    return [
        Imported(outputs=(one,), sources=tuple(sources))
        for one in dict.fromkeys(named)
        if one in known and (sources := _read(objects, known[one]))
    ]


def ids_at(objects: ObjectStore, address: str, base: Path) -> list[ContentId]:
    """What was brought in from an address, path, URL or hub id; the last one first."""
    wanted = without_password(address)
    path = str((base / address).resolve()) if "://" not in address else None
    dated: dict[ContentId, datetime] = {}
    for content, refs in imported_ids(objects).items():
        for source in _read(objects, refs):
            if wanted in (source.address, source.place, source.hub_id) or path == source.place:
                dated[content] = max(source.imported_at, dated.get(content, source.imported_at))
    return sorted(dated, key=lambda content: (dated[content], content), reverse=True)


def code_behind(objects: ObjectStore, content: ContentId) -> dict[str, ContentId]:
    """The filed code of a reward, by the names of its functions."""
    return {name: blob for source in sources_of(objects, content) for name, blob in source.code.items()}


def _read(objects: ObjectStore, refs: Collection[str]) -> list[Source]:
    def read(ref: str) -> Source | None:
        data = objects.cached_bytes(ref)
        return None if data is None else _parsed(ref, data)

    found = [source for source in objects.in_parallel(read, refs) if source is not None]
    return sorted(found, key=lambda source: (source.imported_at, source.address))


def _parsed(ref: str, data: bytes) -> Source | None:
    try:
        return Source.model_validate(json.loads(data))
    except (ValueError, ValidationError) as error:
        log.warning("ref %s is no record of a source (%s); it is left out", ref, " ".join(str(error).split())[:200])
        return None
