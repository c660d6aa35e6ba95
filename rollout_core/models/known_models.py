"""Models that were found good before: what is known of them, for plans that need not load a tokenizer to say more.

A folder is known again by its files' names, sizes, times and places on disk. That spares looking into it, never
hashing it: results depend on content alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import orjson

from rollout_core.base.ids import ContentId, content_id
from rollout_core.models.facts import ModelFacts
from rollout_core.objects import ObjectStore

log = logging.getLogger(__name__)

MODEL_NOTES = "model-facts"


def mark_of(files: Mapping[str, Path]) -> ContentId:
    """Differs after any of the files was written, replaced or renamed."""
    marks = []
    for name, path in sorted(files.items()):
        stat = path.stat()
        marks.append([name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino])
    return content_id("model-facts/2", [version("transformers"), marks])


def recall(objects: ObjectStore, mark: ContentId) -> ModelFacts | None:
    """What `remember` noted of a folder of files of this mark, without its tokenizer; None where they are new or
    changed."""
    ref = _ref(mark)
    kept = objects.cached_bytes(ref)
    if kept is None:
        return None
    try:
        return ModelFacts.from_document(orjson.loads(kept))
    except (ValueError, TypeError, KeyError, AttributeError):
        log.warning("what ref %s stands for is no note of a model; the model is looked at again", ref)
        return None


def remember(objects: ObjectStore, mark: ContentId, facts: ModelFacts) -> None:
    """Note what was found of a folder of files of this mark."""
    objects.set_ref(_ref(mark), objects.put_bytes(orjson.dumps(facts.document())))


def _ref(mark: ContentId) -> str:
    return f"{MODEL_NOTES}/{mark}"
