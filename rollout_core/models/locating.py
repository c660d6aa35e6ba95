"""Which files make a model, where one is (a folder, the hub, the object store), and how it is filed in the object store
under the id of its content, also with a LoRA adapter in peft's format merged in.

A run that is given an adapter uses a model of its own: base weights plus adapter, made once for each pair, filed
like any other model and known by the content of its weights. So an adapter works with every backend and in training,
sample ids need no second name for who answered, engines swap adapters as they swap weights, and nothing is paid per
token. Of vLLM's own way, adapters applied at run time, a batch has little: it uses one at a time; and its LoRA layers
would go around the linear layers that make vLLM on a CPU independent of its batches (`inference.vllm_worker`).
"""

from __future__ import annotations

import difflib
import re
import shutil
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from rollout_core.base.errors import ConfigError, Conflict, Recoverable
from rollout_core.base.ids import ContentId, content_id, is_content_id
from rollout_core.base.locks import scratch_folder
from rollout_core.base.settings import Redaction, read_secret, without_passwords
from rollout_core.base.watching import watched_downloads
from rollout_core.config import ModelSource
from rollout_core.models.bounded.inspecting import check_adapter_fit, inspect_bounded
from rollout_core.models.chat_templates import (
    REPLACED_FILES,
    template_files,
    with_template,
)
from rollout_core.models.facts import ModelFacts, mark_of, recall, remember
from rollout_core.models.gguf_header import ENDING, parts_of
from rollout_core.models.gguf_reading import DEFAULT_TYPE, READ_VERSION, ModelFromGGUF, WeightType, read_gguf
from rollout_core.models.pretrained import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MOST_FILE_BYTES,
    TOKENIZER_FILES,
    adapted,
    load_causal_lm,
    tokenizer_files,
    tokenizer_id,
)
from rollout_core.objects import ObjectStore, TreeManifest
from rollout_core.objects.addresses import is_short_id
from rollout_core.objects.lineage import record_derivation
from rollout_core.objects.origins import Source, hub_commit, record_import, source_of_files
from rollout_core.objects.retention.unstored import check_stored, keep_model
from rollout_core.objects.trees import hash_file

MERGE_STAGE, CONVERT_STAGE = "merge_adapter", "convert_gguf"
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
_NEAR = 0.7
"""Similarity of names, as difflib has it."""
_LOOKED_AT = 1000
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_OTHER_FILES = ("config.json", "generation_config.json")
MODEL_FILES: tuple[str, ...] = _WEIGHT_FILES + TOKENIZER_FILES + _OTHER_FILES
"""What belongs to a model folder. Pickled weights (``*.bin``, ``*.pt``) are left behind on purpose."""
DESCRIPTION_FILES: tuple[str, ...] = TOKENIZER_FILES + _OTHER_FILES
"""All of them but the weights; small."""


def check_entries(folder: Path) -> None:
    """Raise ConfigError where an entry of a folder is no file of its own, which would be read and stored as one.

    A link may stay within the folder. In the hub's cache it may lead to its repository's blobs.
    """
    for entry in sorted(folder.iterdir()):
        check_own_file(entry)


def check_own_file(path: Path) -> None:
    """Raise ConfigError for a link that leads elsewhere, and for what is neither a file nor a folder."""
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    except (OSError, RuntimeError) as error:  # a loop is either
        raise ConfigError(f"{path} is a link that leads nowhere; put the file in its place") from error
    if path.is_symlink() and not any(real.is_relative_to(home) for home in _homes(path.parent)):
        raise ConfigError(
            f"link {path} leads out of the model's folder, to {real}; put a copy of the file in its place"
        )
    if kind := _KINDS.get(stat.S_IFMT(mode)):
        raise ConfigError(f"{path} is {kind}; expected a file")


def _homes(folder: Path) -> list[Path]:
    """Folders that files of this one may really lie in."""
    folder = folder.resolve()
    repository = folder.parent.parent
    in_hub_cache = folder.parent.name == "snapshots" and repository.name.startswith(("models--", "datasets--"))
    return [folder, repository / "blobs"] if in_hub_cache else [folder]


def near_folder(uri: str, base: Path, file: str = "config.json") -> str | None:
    """The address of a folder with such a file that ``uri`` may have meant."""
    found = [base / "/" if uri.startswith("/") else base]
    for part in Path(uri).parts:
        if part != "/":
            found = [folder for place in found for folder in _folders_like(part, place)]
    near = next((folder for folder in found if (folder / file).is_file()), None)
    if near is None:
        return None
    return str(near) if uri.startswith("/") or not near.is_relative_to(base) else str(near.relative_to(base))


def _folders_like(name: str, place: Path) -> list[Path]:
    """Folders in a place under this name or a similar one, the most similar first."""
    if name in ("..", "."):
        return [place / name]
    # Not left to the listing, which ends early in a place with very many entries.
    same = [name] if (place / name).is_dir() else []
    try:
        names = [entry.name for entry, _ in zip(place.iterdir(), range(_LOOKED_AT), strict=False) if entry.is_dir()]
    except OSError:
        names = []
    like = difflib.get_close_matches(name, [other for other in names if other != name], n=3, cutoff=_NEAR)
    return [place / found for found in (*same, *like)]


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights, or says where they are."""
    return any(fnmatch(name, pattern) for pattern in _WEIGHT_FILES)


def model_files(model: Path, tokenizer: Path) -> dict[str, Path]:
    """Name to path of what makes a whole model: the model's files, with the tokenizer's in place of its own."""
    patterns = _WEIGHT_FILES + _OTHER_FILES
    own = [file for file in model.iterdir() if file.is_file() and any(fnmatch(file.name, item) for item in patterns)]
    files = [*own, *tokenizer_files(tokenizer)]
    for file in files:
        check_own_file(file)
    return dict(sorted((file.name, file) for file in files))


@contextmanager
def linked_files(files: Mapping[str, Path]) -> Iterator[Path]:
    """A temporary folder of links to the files."""
    with scratch_folder("model") as scratch:
        for name, file in files.items():
            (scratch / name).symlink_to(file.resolve())
        yield scratch


GATED_OWNERS = ("meta-llama", "mistralai")
"""Owners on the hub of whose repositories most ask for a token."""


class HubOutOfReach(ConfigError):
    """A model is not on this machine, and nobody answers at the hub's address."""


def is_gated(uri: str) -> bool:
    """Whether ``uri`` is a hub id that is known to ask for a token."""
    return looks_like_hub_id(uri) and uri.partition("/")[0] in GATED_OWNERS


def has_token() -> bool:
    """Whether this process can show the hub a token: ``ROLLOUT_SECRET_HF_TOKEN``, or the hub's own ways."""
    from huggingface_hub import get_token

    return (read_secret("HF_TOKEN") or get_token()) is not None


def looks_like_hub_id(uri: str) -> bool:
    """Whether ``uri`` has the form of a hub id (``name`` or ``owner/name``)."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", uri) is not None


def fetch_from_hub(
    uri: str, revision: str | None, what: str, patterns: Sequence[str], *, download: bool
) -> Path | None:
    """The cached folder with the repository's files that match ``patterns``; None where some are yet to be downloaded.

    With ``download`` they are fetched. Raises ConfigError when there is no such repository or revision, HubOutOfReach
    when nobody answers, Recoverable when the hub answers with an error. ``what`` stands for the repository in messages.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                uri,
                revision=revision,
                allow_patterns=list(patterns),
                local_files_only=not download,
                tqdm_class=watched_downloads(),
                token=read_secret("HF_TOKEN"),  # without one, that of the environment or of a login
            )
        )
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"{what} {uri!r} is neither a folder here nor a hub repository you may read") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{what} {uri!r} has no revision {revision!r} on the hub") from error
    except LocalEntryNotFoundError as error:
        if not download and not is_offline_mode():
            return None
        message = f"{what} {uri!r} is not a folder here, and the hub could not be reached to look for it there"
        raise (ConfigError if is_offline_mode() else HubOutOfReach)(message) from error
    except HfHubHTTPError as error:  # the chained one would be logged with the hub's own words
        raise Recoverable(f"{what} {uri!r}: the hub answered with an error: {without_token(error)}") from None


def without_token(error: Exception) -> str:
    """What a hub, or a mirror of it, says, which may repeat the token that it was shown."""
    text, token = without_passwords(str(error)), read_secret("HF_TOKEN")
    return " ".join((text if token is None else Redaction(token).hide(text)).split())


@dataclass(frozen=True)
class Description:
    """A folder with at least a model's configuration and tokenizer; the model's own, or a copy without the weights."""

    folder: Path
    has_weights: bool
    file: Path | None = None
    """The GGUF file that it was made of. The weights then have holes in place of their numbers."""

    def inspect(self) -> ModelFacts:
        """`inspect_model` under limits, or as much of it as there is."""
        with _named_as(self.file, self.folder):
            return inspect_bounded(self.folder, has_weights=self.has_weights)


@contextmanager
def _named_as(file: Path | None, folder: Path) -> Iterator[None]:
    """Errors name the file in place of the folder that was made of it."""
    try:
        yield
    except ConfigError as error:
        if file is None:
            raise
        raise ConfigError(str(error).replace(str(folder), str(file))) from error


def is_gguf(path: Path) -> bool:
    """Whether this is a file that is named as GGUF files are."""
    return path.name.lower().endswith(ENDING) and path.is_file()


def locate_model(source: ModelSource, base: Path, *, download: bool = True) -> Path | None:
    """Local folder or GGUF file of ``source``; None for a content id, or for what is yet to be downloaded from the hub.

    ``base`` is the folder relative paths start from. Raises ConfigError when there is nothing at that address.
    """
    if is_content_id(source.uri):
        _refuse_revision(source.uri, source.revision, "model", "a content id")
        if source.tokenizer is not None:
            raise ConfigError(
                f"model {source.uri} is a checkpoint with its own tokenizer; leave out tokenizer {source.tokenizer!r}"
            )
        return None
    return _locate(source.uri, source.revision, base, "model", download)


def locate_tokenizer(source: ModelSource, base: Path, *, download: bool = True) -> Path | None:
    """Local folder of the tokenizer that ``source`` names, else of the model; None and errors as `locate_model`."""
    if source.tokenizer is None:
        return locate_model(source, base, download=download)
    return _locate(source.tokenizer, None, base, "tokenizer", download)


def _locate(uri: str, revision: str | None, base: Path, what: str, download: bool) -> Path | None:
    folder = base / uri
    if folder.is_dir():
        _refuse_revision(uri, revision, what, f"the folder {folder}")
        check_entries(folder)
        held = sorted(file.name for file in folder.iterdir() if is_gguf(file))
        if what == "model" and held and not (folder / "config.json").is_file():
            raise ConfigError(f"model folder {folder} has no config.json, but GGUF files; give one: {folder / held[0]}")
        return folder
    if uri.lower().endswith(ENDING):
        return _locate_file(uri, revision, folder, what, download)
    if not looks_like_hub_id(uri) or uri.startswith((".", "/")):
        advice = _meant(uri, base) or "give a folder or a hub id"
        raise ConfigError(f"{what} folder {uri!r} does not exist (looked at {folder}); {advice}")
    try:
        return fetch_from_hub(uri, revision, what, MODEL_FILES, download=download)
    except ConfigError as error:
        raise _with_meant(error, uri, base) from error


def _refuse_revision(uri: str, revision: str | None, what: str, found: str) -> None:
    if revision is not None:
        raise ConfigError(
            f"{what} {uri!r} is {found}, which has no revisions; leave out revision {revision!r}, or give a hub id"
        )


def _locate_file(uri: str, revision: str | None, file: Path, what: str, download: bool) -> Path | None:
    """A GGUF file, here or (``owner/name/file.gguf``) in a repository on the hub."""
    if what != "model":
        raise ConfigError(f"{what} {uri!r} is a GGUF file; give a folder or a hub id")
    if is_gguf(file):
        _refuse_revision(uri, revision, what, f"the file {file}")
        return file
    on_hub = _FILE_ON_HUB.fullmatch(uri)
    if on_hub is None or file.parent.is_dir():
        raise ConfigError(
            f"{what} file {uri!r} does not exist (looked at {file}); give a GGUF file, a folder, a hub id, or "
            "OWNER/NAME/FILE.gguf for a file on the hub"
        )
    repository, name = on_hub.groups()
    parts = re.sub(r"-\d{5}-of-(\d{5})(?=\.gguf$)", r"-?????-of-\1", name, flags=re.IGNORECASE)
    folder = fetch_from_hub(repository, revision, what, [parts], download=download)
    if folder is None:
        return None
    if not is_gguf(folder / name):
        if not download:
            return None
        raise ConfigError(f"{what} {uri!r}: the repository {repository} has no file {name}")
    return folder / name


_FILE_ON_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)/([^/].*)")


def _meant(uri: str, base: Path) -> str:
    near = near_folder(uri, base)
    return f"did you mean the folder {near!r}?" if near else ""


def _with_meant(error: ConfigError, uri: str, base: Path) -> ConfigError:
    """The error, with the folder that may have been meant. Who is out of reach cannot say that it was none."""
    meant = _meant(uri, base)
    return ConfigError(f"{error}; {meant}") if meant else error


class Unchecked(Exception):
    """Something that a plan cannot reach, named for people; no fault of the configuration."""


@contextmanager
def describe(source: ModelSource, base: Path, objects: ObjectStore | None) -> Iterator[Description]:
    """Configuration and tokenizer of ``source``, from where it is: this machine, the object store, or the hub.

    Raises ConfigError when there is no such model or chat template, Unchecked when that is not known now.
    """
    with _described(source, base, objects) as found:
        if not source.changes_template:
            yield found
            return
        written = template_files(source, base, found.folder)
        files = model_files(found.folder, found.folder)
        replaced = {*REPLACED_FILES, *written}
        with linked_files({name: file for name, file in files.items() if name not in replaced}) as folder:
            for name, data in written.items():
                (folder / name).write_bytes(data)
            yield Description(folder, found.has_weights, found.file)


@contextmanager
def _described(source: ModelSource, base: Path, objects: ObjectStore | None) -> Iterator[Description]:
    if is_short_id(source.uri) and not (base / source.uri).is_dir():
        # Where the store can be reached it is a whole one by now.
        raise Unchecked(f"model {source.uri}, as the object store cannot be reached")
    model = locate_model(source, base, download=False)
    if model is None and is_content_id(source.uri):
        with _stored_description(ContentId(source.uri), objects) as folder:
            yield Description(folder, has_weights=False)
        return
    if model is None and source.uri.lower().endswith(ENDING):
        raise Unchecked(f"model {source.uri}, which is downloaded when the run starts")
    if model is not None and is_gguf(model):
        tokenizer = None
        if source.tokenizer is not None:
            tokenizer = locate_tokenizer(source, base, download=False) or _hub_description(
                source.tokenizer, None, base, "tokenizer"
            )
        with scratch_folder("gguf") as folder:
            read_gguf(model, folder, tokenizer=tokenizer)
            yield Description(folder, has_weights=True, file=model)
        return
    own = model or _hub_description(source.uri, source.revision, base, "model")
    if source.tokenizer is None:
        yield Description(own, has_weights=model is not None)
        return
    tokenizer = locate_tokenizer(source, base, download=False) or _hub_description(
        source.tokenizer, None, base, "tokenizer"
    )
    with linked_files(model_files(own, tokenizer)) as folder:
        yield Description(folder, has_weights=model is not None)


def _hub_description(uri: str, revision: str | None, base: Path, what: str) -> Path:
    """The small files of a repository that is not here yet. Raises Unchecked where the hub is out of reach, and
    ConfigError where a folder here was rather meant."""
    try:
        folder = fetch_from_hub(uri, revision, what, DESCRIPTION_FILES, download=True)
    except (HubOutOfReach, Recoverable) as error:
        if meant := _meant(uri, base):
            raise ConfigError(f"{what} {uri!r} is not a folder here, and the hub cannot be reached; {meant}") from error
        raise Unchecked(f"{what} {uri!r}, as the hub cannot be reached; there is no such folder here") from error
    except ConfigError as error:
        raise _with_meant(error, uri, base) from error
    assert folder is not None, "what was downloaded has a folder"
    check_entries(folder)
    return folder


@contextmanager
def _stored_description(content_id: ContentId, objects: ObjectStore | None) -> Iterator[Path]:
    if objects is None:
        raise Unchecked(f"model {content_id}, as the object store cannot be reached")
    check_stored(content_id, objects)
    files = objects.manifest(content_id).files
    small = tuple(file for file in files if not is_weights(file.path))
    with scratch_folder("model") as scratch:
        objects.get_files(TreeManifest(files=small), scratch)
        yield scratch


def import_model(source: ModelSource, objects: ObjectStore, base: Path) -> ContentId:
    """File the model of ``source``, its adapter merged in and its chat template chosen, in the object store and return
    its content id.

    Unchanged files are only hashed, not uploaded again. Raises ConfigError for a folder that is no usable model.
    """
    model = _import_folder(source, objects, base)
    if source.adapter is not None:
        model = import_adapted(model, source.adapter, objects, base)
    return templated(model, source, objects, base)


def known_model(source: ModelSource, objects: ObjectStore, base: Path) -> tuple[ContentId | None, str | None]:
    """What `import_model` gives, as far as it takes neither a download nor the time of a conversion or of a merge: the
    model's id, or None, and where it is None because only a run will know, why."""
    plain = source.model_copy(update={"adapter": None, "chat_template": None, "chat_template_kwargs": {}})
    found = locate_model(plain, base, download=False)
    later = "what is made of it counts as not cached"
    if found is None or not is_gguf(found):
        model = import_model(plain, objects, base)
    else:
        model = converted_before(plain, objects, base)
        if model is None:
            return None, f"{source.uri}: converted from GGUF when the run starts; {later}"
    if source.adapter is not None:
        model = merged_before(model, import_adapter(source.adapter, objects, base), objects)
        if model is None:
            return None, f"{source.uri}: the adapter {source.adapter} is merged in when the run starts; {later}"
    return templated(model, source, objects, base), None


def templated(model: ContentId, source: ModelSource, objects: ObjectStore, base: Path) -> ContentId:
    """The stored model ``model`` with the chat template and values that ``source`` gives it, if it gives any."""
    return with_template(model, source, objects, base) if source.changes_template else model


def recall_model(source: ModelSource, base: Path, objects: ObjectStore) -> ModelFacts | None:
    """What an earlier `import_model` found of ``source``, if it is a folder that has not changed since."""
    mark = mark_of_source(source, base)
    return None if mark is None else recall(objects, mark)


def mark_of_source(source: ModelSource, base: Path) -> ContentId | None:
    """`mark_of` the files of ``source``, which is then a folder here, as it is, without an adapter; None for others."""
    folder, tokenizer = base / source.uri, base / (source.tokenizer or source.uri)
    is_changed = source.adapter is not None or source.changes_template
    if is_changed or source.revision is not None or not folder.is_dir() or not tokenizer.is_dir():
        return None
    return mark_of(model_files(folder, tokenizer))


def _import_folder(source: ModelSource, objects: ObjectStore, base: Path) -> ContentId:
    folder = locate_model(source, base)
    if folder is None:
        content_id = ContentId(source.uri)
        if not keep_model(objects, content_id):
            check_stored(content_id, objects)
        return content_id
    if is_gguf(folder):
        return import_gguf(source, objects, base).model
    tokenizer = locate_tokenizer(source, base)
    assert tokenizer is not None, "what was downloaded has a folder"
    files = model_files(folder, tokenizer)
    mark = mark_of(files)
    facts = None
    if recall(objects, mark) is None:
        with linked_files(files) as linked:
            facts = inspect_bounded(linked, has_weights=True)
    filed = objects.put_paths(files)
    if not keep_model(objects, filed):  # of a run that gave it up while it was put
        objects.put_paths(files)
    if mark_of(model_files(folder, tokenizer)) != mark:
        raise Conflict(f"model folder {folder} changed while it was read; run again when nobody writes to it")
    if facts is not None:
        remember(objects, mark, facts)
    record_import(objects, filed, _source_of(folder, source.uri, files.values(), source.revision, "model"))
    if source.tokenizer is not None:
        own = tokenizer_files(tokenizer)
        record_import(objects, filed, _source_of(tokenizer, source.tokenizer, own, None, "tokenizer"))
    return filed


@dataclass(frozen=True)
class ImportedGGUF:
    """A model that is filed."""

    model: ContentId
    facts: ModelFromGGUF | None
    """None where it was converted before."""


@dataclass(frozen=True)
class _GGUFInput:
    """What decides over the model that is made of a file."""

    file: Path
    content: ContentId
    """Of the file; of several parts, of all their contents."""
    tokenizer: Path | None
    """A folder whose tokenizer takes the place of the file's."""
    dtype: WeightType

    def ref(self) -> str:
        named = None if self.tokenizer is None else tokenizer_id(self.tokenizer)
        return f"gguf-models/{content_id('gguf-model/1', [READ_VERSION, self.content, named, self.dtype])}"


def import_gguf(
    source: ModelSource, objects: ObjectStore, base: Path, dtype: WeightType = DEFAULT_TYPE
) -> ImportedGGUF:
    """File the model of a GGUF file as a model folder, unless that was done before. Needs scratch space for the whole
    model, and memory for some rows of it. Raises ConfigError for a file that is not understood."""
    given = _gguf_input(source, base, dtype, download=True)
    assert given is not None, "what was downloaded has a file"
    before = mark_of({part.name: part for part in parts_of(given.file)})
    filed, facts = _converted(given, objects), None
    if filed is None:
        with scratch_folder("gguf") as folder:
            facts, write_weights = read_gguf(given.file, folder, dtype, tokenizer=given.tokenizer)
            with _named_as(given.file, folder):
                inspect_bounded(folder, has_weights=True)
            write_weights()
            if mark_of({part.name: part for part in parts_of(given.file)}) != before:
                raise Conflict(f"{given.file} changed while it was read; run again when nobody writes to it")
            filed = objects.put_tree(folder)
        objects.set_ref(given.ref(), filed)
    _record_gguf(given, filed, source, objects)
    return ImportedGGUF(filed, facts)


def converted_before(source: ModelSource, objects: ObjectStore, base: Path) -> ContentId | None:
    """What `import_gguf` made of a file that is here, if it did and all of it is still there."""
    given = _gguf_input(source, base, DEFAULT_TYPE, download=False)
    return None if given is None else _converted(given, objects)


def _converted(given: _GGUFInput, objects: ObjectStore) -> ContentId | None:
    known = objects.cached_ref(given.ref())
    return known if known is not None and objects.tree_is_present(known) else None


def _gguf_input(source: ModelSource, base: Path, dtype: WeightType, *, download: bool) -> _GGUFInput | None:
    file = locate_model(source, base, download=download)
    tokenizer = None if source.tokenizer is None else locate_tokenizer(source, base, download=download)
    if file is None or (tokenizer is None and source.tokenizer is not None):
        return None
    hashes = [hash_file(part).content_id for part in parts_of(file)]
    content = hashes[0] if len(hashes) == 1 else content_id("gguf-parts/1", hashes)
    return _GGUFInput(file, content, tokenizer, dtype)


def _record_gguf(given: _GGUFInput, filed: ContentId, source: ModelSource, objects: ObjectStore) -> None:
    """The model is made of the file's content, and that was brought in from where the file is."""
    parts = parts_of(given.file)
    on_hub = _FILE_ON_HUB.fullmatch(source.uri) if hub_commit(given.file.parent) else None
    place = None if on_hub else str(given.file.resolve())
    found = source_of_files("model", source.uri, parts, place=place, hub_id=on_hub[1] if on_hub else None)
    commit = hub_commit(given.file.parent) if on_hub else None
    record_import(objects, given.content, found.model_copy(update={"revision": source.revision, "commit": commit}))
    inputs: dict[str, str] = {"file": given.content, "dtype": given.dtype}
    if given.tokenizer is not None and source.tokenizer is not None:
        own = tokenizer_files(given.tokenizer)
        inputs["tokenizer"] = objects.put_paths({file.name: file for file in own})
        named = _source_of(given.tokenizer, source.tokenizer, own, None, "tokenizer")
        record_import(objects, ContentId(inputs["tokenizer"]), named)
    record_derivation(objects, CONVERT_STAGE, inputs, (filed,))


def _source_of(
    folder: Path, uri: str, files: Iterable[Path], revision: str | None, kind: Literal["model", "tokenizer", "adapter"]
) -> Source:
    """Where files come from that were found in ``folder``, which ``uri`` names."""
    commit = hub_commit(folder)
    on_hub = commit is not None and looks_like_hub_id(uri)
    place = None if on_hub else str(folder.resolve())
    found = source_of_files(kind, uri, files, place=place, hub_id=uri if on_hub else None)
    return found.model_copy(update={"revision": revision, "commit": commit})


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
    Needs memory and scratch space for the whole model. Raises ConfigError where there is no adapter that fits."""
    adapter = import_adapter(uri, objects, base)
    filed = merged_before(model, adapter, objects)
    if filed is None:
        # What was filed is merged, not what its folder holds by now: the result is kept under the adapter's id.
        with _stored(adapter, objects) as folder, scratch_folder("merge") as scratch:
            whole, merged = scratch / "model", scratch / "merged"
            objects.get_tree(model, whole)
            check_adapter_fit(folder, whole, whole=True)
            _merge(whole, folder, merged)
            filed = objects.put_tree(merged)
        objects.set_ref(_merged_ref(model, adapter), filed)
    record_derivation(objects, MERGE_STAGE, {"model": model, "adapter": adapter}, (filed,))
    return filed


def import_adapter(uri: str, objects: ObjectStore, base: Path) -> ContentId:
    """File the adapter at ``uri``, without what else lies next to it. Raises ConfigError where there is none."""
    with _opened(uri, base, objects, whole=True) as folder:
        if is_content_id(uri):
            return ContentId(uri)
        files = {name: folder / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
        adapter = objects.put_paths(files)
        record_import(objects, adapter, _source_of(folder, uri, files.values(), None, "adapter"))
        return adapter


def merged_before(model: ContentId, adapter: ContentId, objects: ObjectStore) -> ContentId | None:
    """What `import_adapted` made of the two, if it did and all of it is still there."""
    known = objects.cached_ref(_merged_ref(model, adapter))
    return known if known is not None and objects.tree_is_present(known) else None


def _merged_ref(model: ContentId, adapter: ContentId) -> str:
    return f"merged-models/{content_id('merged-model/1', [model, adapter])}"


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
        wanted = (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if whole else (ADAPTER_CONFIG,)
        folder = fetch_from_hub(uri, None, "adapter", wanted, download=True)
        assert folder is not None, "what was downloaded has a folder"
        yield _with_files(folder, wanted)


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
    merged.save_pretrained(target, max_shard_size=MOST_FILE_BYTES)
    for file in [file for file in target.iterdir() if not is_weights(file.name)]:
        file.unlink()
    for file in model_folder.iterdir():
        if not is_weights(file.name):
            shutil.copyfile(file, target / file.name)
