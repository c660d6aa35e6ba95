"""Models taken out: as a Hugging Face folder with a model card written from lineage, and from there to the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of the client that the installed version is built on
    LocalTokenNotFoundError,
)

from rollout_core.base.errors import ConfigError, CorruptObject, NotFound, Recoverable
from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.base.settings import read_secret
from rollout_core.data.turn_ends import all_ends, turn_ends
from rollout_core.exports.adapter import base_of_adapter, write_adapter
from rollout_core.exports.model_card import ModelHistory, history_of_model, model_card
from rollout_core.models.facts import end_ids
from rollout_core.models.gguf_writing import FILE as GGUF, write_gguf
from rollout_core.models.locating import without_token
from rollout_core.models.precision import DTYPES, cast_model, stored_dtype
from rollout_core.models.pretrained import load_tokenizer, read_object
from rollout_core.objects import ObjectStore, SnapshotStore, TreeManifest
from rollout_core.objects.addresses import complete_id, is_short_id
from rollout_core.objects.files import SNAPSHOT_REFS
from rollout_core.objects.retention.unstored import find_model
from rollout_core.objects.snapshots import MODEL_FOLDER
from rollout_core.objects.trees import appearing_folder

CARD, RECORDS, METRICS = "README.md", "lineage.json", "training-metrics.jsonl"
REFUSED = (401, 403)
ExportDtype = Literal["base", "stored", "float32", "bfloat16", "float16"]


def model_to_export(objects: ObjectStore, digits: str) -> ContentId:
    """The model of that id: a model's own, or that of a training state, whose model it is then; by their first digits.

    Raises ConfigError or NotFound where the object store has none that is whole.
    """
    states = {name.split("/")[1] for name in objects.ref_names(SNAPSHOT_REFS)}
    found = {state for state in states if state.startswith(digits)}
    if found and (is_content_id(digits) or is_short_id(digits)):
        state = complete_id(digits, found, "snapshot")
        if not SnapshotStore(objects).is_present(state):
            raise NotFound(f"files of the snapshot {state} are missing in the object store {objects.url}")
        return find_model(objects, SnapshotStore(objects).subtree(state, MODEL_FOLDER))
    return find_model(objects, digits)


def export_model(
    objects: ObjectStore,
    model: ContentId,
    folder: Path,
    *,
    name: str | None = None,
    as_gguf: bool = False,
    as_adapter: bool = False,
    dtype: ExportDtype = "base",
) -> ModelHistory:
    """Write a model's files to ``folder``, with a card, the records of its lineage and its figures; what the card says.

    ``folder`` must not exist, or be empty; it appears whole and verified, or not at all. ``name`` is the card's title.
    ``as_gguf`` adds the model as one file, `gguf_writing.FILE`. ``as_adapter`` writes what LoRA trained alone, for
    peft, instead of the model (`write_adapter`). ``dtype`` is that of the weights: ``base``, as the model has it that
    training began with; ``stored``, as they are; or one of `precision.DTYPES`.
    Raises Conflict, MissingObject or CorruptObject, ConfigError as `write_gguf`, and where the dtype cannot hold a
    weight.
    """
    if as_adapter:
        return _export_adapter(objects, model, folder, name or folder.resolve().name)
    manifest = objects.manifest(model)
    own = (CARD, RECORDS, METRICS, *([GGUF] if as_gguf else []))
    title = name or folder.resolve().name
    manifest = TreeManifest(files=tuple(file for file in manifest.files if file.path not in own))
    history = history_of_model(objects, model)
    history = replace(history, dtype=_other_dtype(objects, history, dtype))
    with appearing_folder(folder) as temporary:
        objects.get_files(manifest, temporary)
        if history.dtype is not None:
            # As `round_weights` does it, so that the files are those of the model that is served.
            cast_model(temporary, temporary, history.dtype, stochastic=bool(history.updates))
        _name_ends(temporary)
        _write_history(history, model_card(history, title), temporary)
        if as_gguf:
            write_gguf(temporary, temporary / GGUF, name=title)
    return history


def _export_adapter(objects: ObjectStore, model: ContentId, folder: Path, title: str) -> ModelHistory:
    history = history_of_model(objects, model)
    card = model_card(history, title, adapter_of=base_of_adapter(history))
    with appearing_folder(folder) as temporary:
        write_adapter(objects, history, temporary)
        _write_history(history, card, temporary)
    return history


def _write_history(history: ModelHistory, card: str, folder: Path) -> None:
    """The card, the records of lineage and the figures of steps."""
    (folder / CARD).write_text(card, encoding="utf-8")
    (folder / RECORDS).write_text(json.dumps(_records(history), indent=2), encoding="utf-8")
    lines = "".join(json.dumps(row) + "\n" for row in history.metrics)
    if lines:
        (folder / METRICS).write_text(lines, encoding="utf-8")


def _name_ends(folder: Path) -> None:
    """Have generation_config.json name the token by which the chat template ends a turn, where it is no end of the
    model yet: other engines stop at no other ones than these."""
    if "ForSequenceClassification" in str(read_object(folder / "config.json").get("architectures")):
        return  # a reward model writes nothing
    try:
        tokenizer = load_tokenizer(folder)
        end_ids(folder, tokenizer)
    except ConfigError:  # without a tokenizer, or with a damaged generation_config.json: exported as it is
        return
    if turn_ends(folder, tokenizer):
        file = folder / "generation_config.json"
        document = read_object(file) if file.is_file() else {}
        document["eos_token_id"] = sorted(all_ends(folder, tokenizer))
        file.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _other_dtype(objects: ObjectStore, history: ModelHistory, asked: ExportDtype) -> str | None:
    """What the weights are to become; None where they stay as they are stored."""
    stored = stored_dtype(objects, history.model)
    if asked == "base":
        wanted = None
        if stored is not None and history.updates:
            with suppress(NotFound, CorruptObject, ConfigError):  # a base of which nothing is left
                wanted = stored_dtype(objects, ContentId(history.updates[0].inputs["model"]))
    elif asked == "stored":
        wanted = None
    elif stored is None:
        raise ConfigError(
            f"the weights of model {history.model.short} are quantized, or none of {', '.join(DTYPES)}; export them "
            "with --dtype stored, as they are"
        )
    else:
        wanted = asked
    return None if wanted == stored else wanted


def _records(history: ModelHistory) -> list[Mapping[str, Any]]:
    """The trace, without where files lay on somebody's machine."""
    imports = [item.model_dump(mode="json", exclude={"sources": {"__all__": {"place"}}}) for item in history.imports]
    return [*(item.model_dump(mode="json", exclude={"arguments"}) for item in history.made), *imports]


def push_to_hub(
    folder: Path, repository: str, *, private: bool = True, revision: str | None = None, message: str = "Upload model"
) -> str:
    """Upload an exported folder to a repository on the hub, which is made where there is none; the commit's address.

    The token is that of ``ROLLOUT_SECRET_HF_TOKEN``, or the hub's own. Raises ConfigError for a name or token that the
    hub refuses, Recoverable where it cannot be reached or answers with an error.
    """
    api = HfApi(token=read_secret("HF_TOKEN"), library_name="rollout")
    try:
        made = api.create_repo(repository, private=private, exist_ok=True, repo_type="model")
        done = api.upload_folder(
            repo_id=made.repo_id, folder_path=folder, commit_message=message, revision=revision, repo_type="model"
        )
    except HFValidationError as error:
        raise ConfigError(f"{repository!r} is no name of a repository on the hub: {without_token(error)}") from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        text = f"{repository!r}: the hub answered with an error: {without_token(error)}"
        if status in REFUSED:
            raise ConfigError(f"{text}; set ROLLOUT_SECRET_HF_TOKEN to a token that may write there") from None
        raise Recoverable(text) from None
    except LocalTokenNotFoundError:
        raise ConfigError(f"{repository!r}: the hub asks for a token; set ROLLOUT_SECRET_HF_TOKEN") from None
    except (HTTPError, OSError) as error:  # what the client raises where nobody answers
        raise Recoverable(f"{repository!r}: the hub cannot be reached: {without_token(error)}") from None
    return str(done.commit_url)
