"""The adapter of a model that was trained with LoRA, by itself, in the files that peft loads onto the base model.

A checkpoint has the merged weights. The adapter that was merged is in the training state that holds the checkpoint.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from rollout_core.base.errors import ConfigError, CorruptObject, NotFound
from rollout_core.base.ids import ContentId
from rollout_core.base.locks import scratch_folder
from rollout_core.config import LoRAConfig
from rollout_core.exports.model_card import ModelHistory, hub_source
from rollout_core.models.architecture import check_fit, peft_config, peft_names
from rollout_core.models.deferred import stored_tensors
from rollout_core.models.pretrained import ADAPTER_WEIGHTS
from rollout_core.objects import ObjectStore, SnapshotStore, TreeManifest
from rollout_core.objects.files import SNAPSHOT_REFS
from rollout_core.objects.lineage import Lineage

_ON_REFERENCE = ("ppo_update", "grpo_update")
"""Stages that put adapters into the reference; the model they begin with has those of the iteration before merged."""


def base_of_adapter(history: ModelHistory) -> ContentId:
    """The model that the adapter of a model with this history was put into. Raises ConfigError where there is none."""
    last = history.updates[-1] if history.updates else None
    if last is None or _lora(last) is None:
        how = "no stage trained it" if last is None else f"{last.stage} trained its own weights"
        raise ConfigError(f"model {history.model.short} has no adapter: {how}; export it without --adapter")
    return ContentId(last.inputs["reference" if last.stage in _ON_REFERENCE else "model"])


def write_adapter(objects: ObjectStore, history: ModelHistory, folder: Path) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` to a folder that is there.

    Raises ConfigError for a model without an adapter, or of an architecture into which peft would not put it; NotFound
    where its training state was deleted.
    """
    base, last = base_of_adapter(history), history.updates[-1]
    is_reward_model = last.stage == "rm_update"
    with scratch_folder("adapter") as scratch:
        objects.get_files(_adapter_files(objects, last), scratch)
        tensors = peft_names(stored_tensors(scratch, "adapter"))
    source = hub_source(history, base)
    options: dict[str, Any] = {"task_type": "SEQ_CLS" if is_reward_model else "CAUSAL_LM"}
    if source is not None:
        options |= {"base_model_name_or_path": source.hub_id, "revision": source.commit or source.revision}
    config = LoRAConfig.model_validate(_lora(last))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_config(config, tensors, **options).save_pretrained(str(folder))
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    if not is_reward_model:
        _check(objects, base, folder)


def _lora(update: Lineage) -> Any:
    settings = update.inputs.get("settings")
    return settings.get("lora") if isinstance(settings, dict) else None


def _adapter_files(objects: ObjectStore, update: Lineage) -> TreeManifest:
    snapshots = SnapshotStore(objects)
    known = {name.split("/")[1] for name in objects.ref_names(SNAPSHOT_REFS)}
    for output in update.outputs:
        if output in known and snapshots.is_present(output):
            files = objects.manifest(snapshots.get(output).files).files
            return TreeManifest(files=tuple(file for file in files if file.path.startswith("adapter")))
    raise NotFound(
        f"the training state of this {update.stage} is not in the object store {objects.url} any more, and the adapter "
        "was in it; export the model whole, or train with run.keep_states = 'all'"
    )


def _check(objects: ObjectStore, base: ContentId, folder: Path) -> None:
    """peft puts the adapter into the layers that it was trained in."""
    with scratch_folder("base") as scratch, suppress(NotFound, CorruptObject):  # a base of which nothing is left
        files = objects.manifest(base).files
        objects.get_files(TreeManifest(files=tuple(file for file in files if file.path == "config.json")), scratch)
        try:
            check_fit(folder, scratch, whole=True)
        except ConfigError as error:
            raise ConfigError(
                "peft would not put this adapter into the layers that it was trained in, as where experts "
                "are one tensor; export the model whole, without --adapter"
            ) from error
