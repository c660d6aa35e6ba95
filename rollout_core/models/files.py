"""Which files make a model folder, and how they are filed as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.base.scratch import scratch_folder
from rollout_core.models.model_folders import check_own_file
from rollout_core.models.tokenizers import TOKENIZER_FILES, tokenizer_files
from rollout_core.objects import ObjectStore, TreeFile, TreeManifest
from rollout_core.objects.folders import hash_file

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_OTHER_FILES = ("config.json", "generation_config.json")
MODEL_FILES: tuple[str, ...] = _WEIGHT_FILES + TOKENIZER_FILES + _OTHER_FILES
"""What belongs to a model folder. Pickled weights (``*.bin``, ``*.pt``) are left behind on purpose."""
DESCRIPTION_FILES: tuple[str, ...] = TOKENIZER_FILES + _OTHER_FILES
"""All of them but the weights; small."""


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
