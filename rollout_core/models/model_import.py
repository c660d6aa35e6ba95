"""Models filed in the object store under the id of their content, also with a LoRA adapter in peft's format merged in.

A run that is given an adapter uses a model of its own: base weights plus adapter, made once for each pair, filed like
any other model and known by the content of its weights. So an adapter works with every backend and in training, sample
ids need no second name for who answered, engines swap adapters as they swap weights, and nothing is paid per token. Of
vLLM's own way, adapters applied at run time, a batch has little: it uses one at a time; and its LoRA layers would go
around the linear layers that make vLLM on a CPU independent of its batches (`inference.vllm_worker`).
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_core.base.errors import ConfigError, Conflict, Recoverable
from rollout_core.base.ids import ContentId, content_id, is_content_id
from rollout_core.base.locks import scratch_folder
from rollout_core.config import ModelSource
from rollout_core.models.bounded.inspecting import check_adapter_fit, inspect_bounded
from rollout_core.models.facts import ModelFacts, mark_of, recall, remember
from rollout_core.models.locating import (
    HubOutOfReach,
    Unchecked,
    check_own_file,
    check_stored,
    fetch_from_hub,
    linked_files,
    locate_model,
    locate_tokenizer,
    looks_like_hub_id,
    model_files,
)
from rollout_core.models.pretrained import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapted, load_causal_lm
from rollout_core.objects import ObjectStore, TreeManifest


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
    filed = objects.put_paths(files)
    if mark_of(model_files(folder, tokenizer)) != mark:
        raise Conflict(f"model folder {folder} changed while it was read; run again when nobody writes to it")
    if facts is not None:
        remember(objects, mark, facts)
    return filed


def check_adapter(uri: str, model_folder: Path, base: Path, objects: ObjectStore | None) -> None:
    """Raise ConfigError unless there is a LoRA adapter at ``uri`` that fits the model, of which configuration and
    tokenizer are enough; of an adapter on the hub, too. Raises Unchecked where that is not known now."""
    try:
        with _opened(uri, base, objects, whole=False) as folder:
            check_adapter_fit(folder, model_folder, whole=(folder / ADAPTER_WEIGHTS).is_file())
    except (HubOutOfReach, Recoverable) as error:
        raise Unchecked(f"adapter {uri!r}, as the hub cannot be reached") from error


def import_adapted(model: ContentId, uri: str, objects: ObjectStore, base: Path) -> ContentId:
    """File the model ``model`` with the adapter at ``uri`` merged in, unless that was done before; its content id.

    Needs memory and scratch space for the whole model. Raises ConfigError where there is no adapter that fits.
    """
    with _opened(uri, base, objects, whole=True) as folder:
        files = {name: folder / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
        # Without what else may lie beside them.
        adapter = ContentId(uri) if is_content_id(uri) else objects.put_paths(files)
    ref = f"merged-models/{content_id('merged-model/1', [model, adapter])}"
    known = objects.cached_ref(ref)
    if known is not None and objects.tree_is_present(known):
        return known
    # What was filed is merged, not what its folder holds by now: the result is kept under the adapter's id.
    with _stored(adapter, objects) as folder, scratch_folder("merge") as scratch:
        whole, merged = scratch / "model", scratch / "merged"
        objects.get_tree(model, whole)
        check_adapter_fit(folder, whole, whole=True)
        _merge(whole, folder, merged)
        filed = objects.put_tree(merged)
    objects.set_ref(ref, filed)
    return filed


@contextmanager
def _opened(uri: str, base: Path, objects: ObjectStore | None, *, whole: bool) -> Iterator[Path]:
    """A folder with the adapter's files; without ``whole``, of one on the hub with its configuration alone."""
    if is_content_id(uri):
        with _stored(ContentId(uri), objects) as folder:
            yield _with_files(folder)
    elif (base / uri).is_dir():
        yield _with_files(base / uri)
    elif not looks_like_hub_id(uri):
        raise ConfigError(f"adapter folder {uri!r} does not exist (looked at {base / uri}); give a folder or a hub id")
    else:
        folder = fetch_from_hub(
            uri, None, "adapter", (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if whole else (ADAPTER_CONFIG,), download=True
        )
        assert folder is not None, "what was downloaded has a folder"
        yield _with_files(folder, (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if whole else (ADAPTER_CONFIG,))


@contextmanager
def _stored(adapter: ContentId, objects: ObjectStore | None) -> Iterator[Path]:
    if objects is None:
        raise Unchecked(f"adapter {adapter}, as the object store cannot be reached")
    if not objects.tree_is_present(adapter):
        raise ConfigError(f"adapter {adapter} is not in the object store {objects.url}")
    wanted = tuple(file for file in objects.manifest(adapter).files if file.path in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    with scratch_folder("adapter") as scratch:
        objects.get_files(TreeManifest(files=wanted), scratch)
        yield scratch


def _with_files(folder: Path, names: tuple[str, ...] = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)) -> Path:
    for name in names:
        if not (folder / name).is_file():
            raise ConfigError(
                f"adapter folder {folder} has no {name}; expected a LoRA adapter as peft saves it (pickled weights are "
                "not read)"
            )
        check_own_file(folder / name)
    return folder


def _merge(model_folder: Path, adapter_folder: Path, target: Path) -> None:
    """Write the model with the adapter's changes added to its weights, in their own type; all else is the model's."""
    model = load_causal_lm(model_folder, "auto")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            merged = adapted(model, adapter_folder).merge_and_unload(safe_merge=True)  # pyright: ignore[reportCallIssue]
    except ValueError as error:
        raise ConfigError(f"adapter {adapter_folder} cannot be merged: {' '.join(str(error).split())}") from error
    merged.save_pretrained(target)
    for file in target.iterdir():
        if not file.name.endswith((".safetensors", ".safetensors.index.json")):
            file.unlink()
    for file in model_folder.iterdir():
        if not file.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copyfile(file, target / file.name)
