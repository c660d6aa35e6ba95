"""Models filed in the object store, under the id of their content."""

from __future__ import annotations

from pathlib import Path

from rollout_core.base.errors import Conflict
from rollout_core.base.ids import ContentId
from rollout_core.config import ModelSource
from rollout_core.models.adapters import import_adapted
from rollout_core.models.bounded.inspecting import inspect_bounded
from rollout_core.models.facts import ModelFacts
from rollout_core.models.files import check_stored, file_tree, linked_files, model_files
from rollout_core.models.known_models import mark_of, recall, remember
from rollout_core.models.locating import locate_model, locate_tokenizer
from rollout_core.objects import ObjectStore


def import_model(source: ModelSource, objects: ObjectStore, base: Path) -> ContentId:
    """File the model of ``source``, its adapter merged in, in the object store and return its content id.

    Unchanged files are only hashed, not uploaded again. Raises ConfigError for a folder that is no usable model.
    """
    model = _import_folder(source, objects, base)
    return model if source.adapter is None else import_adapted(model, source.adapter, objects, base)


def recall_model(source: ModelSource, base: Path, objects: ObjectStore) -> ModelFacts | None:
    """What an earlier `import_model` found of ``source``, if it is a folder that has not changed since."""
    folder, tokenizer = base / source.uri, base / (source.tokenizer or source.uri)
    if source.adapter is not None or not folder.is_dir() or not tokenizer.is_dir():
        return None
    return recall(objects, mark_of(model_files(folder, tokenizer)))


def _import_folder(source: ModelSource, objects: ObjectStore, base: Path) -> ContentId:
    folder = locate_model(source, base)
    if folder is None:
        content_id = ContentId(source.uri)
        check_stored(content_id, objects)
        return content_id
    tokenizer = locate_tokenizer(source, base)
    assert tokenizer is not None, "what was downloaded has a folder"
    files = model_files(folder, tokenizer)
    mark = mark_of(files)
    facts = None
    if recall(objects, mark) is None:
        with linked_files(files) as linked:
            facts = inspect_bounded(linked, has_weights=True)
    filed = file_tree(objects, files)
    if mark_of(model_files(folder, tokenizer)) != mark:
        raise Conflict(f"model folder {folder} changed while it was read; run again when nobody writes to it")
    if facts is not None:
        remember(objects, mark, facts)
    return filed
