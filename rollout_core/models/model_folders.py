"""Folders that may hold a model: which of their files are their own, and what a mistyped name may have meant."""

from __future__ import annotations

import difflib
import stat
from pathlib import Path

from rollout_core.base.errors import ConfigError

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
_NEAR = 0.7
"""Similarity of names, as difflib has it."""
_LOOKED_AT = 1000


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
