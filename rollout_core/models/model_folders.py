"""Folders that hold a model: which files make one, which of them are its own, what a mistyped name may have meant."""

from __future__ import annotations

import difflib
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.base.scratch import scratch_folder
from rollout_core.models.tokenizers import TOKENIZER_FILES, tokenizer_files
from rollout_core.objects import ObjectStore, TreeFile, TreeManifest
from rollout_core.objects.folders import hash_file

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


def check_stored(content_id: ContentId, objects: ObjectStore) -> None:
    """Raise ConfigError where the object store does not have all of this model."""
    if not objects.tree_is_present(content_id):
        raise ConfigError(f"model {content_id} is not in the object store {objects.url}")


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights, or says where they are."""
    return any(fnmatch(name, pattern) for pattern in _WEIGHT_FILES)


def file_tree(objects: ObjectStore, files: Mapping[str, Path]) -> ContentId:
    """File ``files`` under their names as one folder, wherever they lie and whatever links lead there."""
    hashes = objects.in_parallel(hash_file, files.values())
    manifest = TreeManifest(
        files=tuple(
            TreeFile(path=name, size=size, content_id=content_id)
            for name, (size, content_id) in zip(files, hashes, strict=True)
        )
    )
    return objects.put_files(manifest, files)


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
