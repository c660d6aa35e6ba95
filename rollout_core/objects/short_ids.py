"""Content ids as people type them: the first digits of one, as tables show it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.objects import ObjectStore
from rollout_core.objects.self_named import LINEAGE_REFS, SNAPSHOT_REFS
from rollout_core.objects.trees import TREE_BEGINS

MIN_DIGITS = 8
"""Tables show no fewer."""
_SHORT = re.compile(f"[0-9a-f]{{{MIN_DIGITS},63}}")


def complete_snapshot_id(objects: ObjectStore, digits: str) -> ContentId:
    """The snapshot whose id begins with ``digits``; raises as `complete_id` does."""
    return complete_id(digits, _names_below(objects, SNAPSHOT_REFS), "snapshot")


def complete_lineage_id(objects: ObjectStore, digits: str) -> ContentId:
    """The id with a record of lineage that begins with ``digits``; raises as `complete_id` does."""
    return complete_id(digits, _names_below(objects, LINEAGE_REFS), "record of lineage")


def complete_object_id(objects: ObjectStore, digits: str) -> ContentId:
    """The blob whose id begins with ``digits``; raises as `complete_id` does."""
    return complete_id(digits, objects.blobs_beginning(digits), "object")


def complete_folder_id(objects: ObjectStore, digits: str) -> ContentId:
    """The folder, such as a model's, whose id begins with ``digits``; raises as `complete_id` does."""
    found = list(objects.blobs_beginning(digits)) if not is_content_id(digits) else []
    # Reading is expensive, so only where there is a choice.
    folders = [content_id for content_id in found if is_folder(objects, content_id)] if len(found) > 1 else found
    return complete_id(digits, folders, "folder")


def is_folder(objects: ObjectStore, content_id: ContentId) -> bool:
    """Whether a blob is the manifest of a folder. Only the start of a blob that is none is read."""
    if not next(iter(objects.stream(content_id)), b"").startswith(TREE_BEGINS):
        return False
    try:
        objects.manifest(content_id)
    except ConfigError:
        return False
    return True


def is_short_id(text: str) -> bool:
    """Whether ``text`` may be the first digits of a content id, and is not a whole one."""
    return _SHORT.fullmatch(text) is not None


def complete_id(digits: str, known: Iterable[str], what: str) -> ContentId:
    """The one id of ``known`` that begins with ``digits``. A whole id is taken as it is; ``known`` is then not read.

    Raises ConfigError for fewer than 8 digits and where several ids begin with them, NotFound where none does.
    """
    if is_content_id(digits):
        return ContentId(digits)
    if not is_short_id(digits):
        raise ConfigError(
            f"not a content id: {digits!r}; expected 64 lower-case hex digits, or the first of them, "
            f"at least {MIN_DIGITS}"
        )
    found = sorted({name for name in known if name.startswith(digits)})
    if not found:
        raise NotFound(f"no {what} has an id that begins with {digits}")
    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} ids begin with {digits}, {found[0]} and {found[1]} among them; give more digits"
        )
    return ContentId(found[0])


def _names_below(objects: ObjectStore, refs: str) -> Iterator[str]:
    """The id after ``refs`` of each ref below it; read when it is asked for. Files of somebody else are left out."""
    for name in objects.ref_names(refs):
        if is_content_id(below := name.split("/")[1]):
            yield below
