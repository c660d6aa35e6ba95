"""A plugin as it was read: its files, and the id of what it does. What was read is what counts in ids and what is run,
however the files change meanwhile, on whatever machine.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, content_id, hash_bytes
from rollout_core.base.processes import size_text
from rollout_core.plugins.manifest import MANIFEST, Manifest, parse_manifest

MAX_FILES = 2000
MAX_BYTES = 16 * 2**20
"""Of all files of a plugin: they are held in memory, filed with each run, and written to a folder for each process."""
_MADE_BY_RUNNING = {"__pycache__"}


@dataclass(frozen=True)
class PluginCode:
    """A plugin's files, and what its manifest says."""

    manifest: Manifest
    folder: Path
    """Where it was read, which does not count."""
    files: Mapping[str, bytes]
    """By paths relative to the folder, with forward slashes; those that are hidden or made by running it are none."""
    executable: frozenset[str] = frozenset()
    """Those files that are programs."""
    package: str | None = None
    """Name of the Python package that the folder is, where its modules are imported by that."""

    @property
    def name(self) -> str:
        """By which configurations know it."""
        return self.manifest.name

    @cached_property
    def id(self) -> ContentId:
        """Of its files, with the manifest and its version among them; where they lie does not count."""
        files = {path: [hash_bytes(content), path in self.executable] for path, content in self.files.items()}
        return content_id("plugin/1", {"files": files, "package": self.package})

    def changed_file(self) -> Path | None:
        """One that is no longer as it was read; None where there is no such folder, as on another machine."""
        if not self.folder.is_dir():
            return None
        for path, content in self.files.items():
            try:
                now = (self.folder / path).read_bytes()
            except OSError:
                now = None
            if now != content:
                return self.folder / path
        return None

    def write(self, folder: Path) -> Path:
        """Write the files below ``folder``, as they were read; returns the folder that has the manifest."""
        own = folder / (self.package or "plugin")
        for path, content in self.files.items():
            file = own / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)  # an earlier one is read-only, and may be open
            file.write_bytes(content)
            file.chmod(0o500 if path in self.executable else 0o400)
        return own

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "plugin": self.name,
            "folder": str(self.folder),
            "files": {path: base64.b64encode(content).decode() for path, content in self.files.items()},
            "executable": sorted(self.executable),
            "package": self.package,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> PluginCode:
        """Inverse of `document`."""
        files = {path: base64.b64decode(content) for path, content in document["files"].items()}
        for path in files:  # which `write` follows
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise ConfigError(f"filed plugin {document['plugin']}: got the path {path!r}; expected one inside it")
        package = document["package"]
        if package is not None and not all(part.isidentifier() for part in package.split(".")):
            raise ConfigError(f"filed plugin {document['plugin']}: got the package {package!r}; expected a dotted name")
        folder = Path(document["folder"])
        manifest = parse_manifest(files[MANIFEST], str(folder / MANIFEST), files, document["package"])
        return cls(manifest, folder, files, frozenset(document["executable"]), document["package"])


def read_plugin(folder: Path, *, package: str | None = None) -> PluginCode:
    """Read a plugin's files, each once. Runs none of them. Raises ConfigError for what is wrong with the manifest."""
    files: dict[str, bytes] = {}
    executable, size = set(), 0
    for path in _paths(folder):
        name = path.relative_to(folder).as_posix()
        try:
            status = path.stat()
            size += status.st_size
            if len(files) == MAX_FILES or size > MAX_BYTES:
                raise ConfigError(
                    f"plugin folder {folder}: got more than {MAX_FILES} files or {size_text(MAX_BYTES)}; expected "
                    "less: keep weights and data elsewhere"
                )
            files[name] = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"plugin file {path} cannot be read: {error.strerror}") from error
        if status.st_mode & stat.S_IXUSR:
            executable.add(name)
    if MANIFEST not in files:
        raise ConfigError(f"plugin folder {folder}: got no {MANIFEST}; expected one")
    manifest = parse_manifest(files[MANIFEST], str(folder / MANIFEST), files, package)
    return PluginCode(manifest, folder, files, frozenset(executable), package)


def file_times(folder: Path) -> list[tuple[str, int, int]]:
    """Of the files that `read_plugin` reads, when each was last written and its size: whether it is worth reading them
    again. Raises ConfigError as it does."""
    times: list[tuple[str, int, int]] = []
    for path in _paths(folder):
        with suppress(FileNotFoundError):  # removed meanwhile, as an editor does that writes another in its place
            status = path.stat()
            times.append((str(path), status.st_mtime_ns, status.st_size))
    return times


def _paths(folder: Path) -> Iterator[Path]:
    """Regular files, sorted. Raises ConfigError for a link, whose target may change where nothing sees it,
    and for a folder that cannot be read."""

    def refuse(error: OSError) -> None:
        if not folder.is_dir():
            return  # it has no manifest, which is said better
        raise ConfigError(f"plugin folder {error.filename} cannot be read: {error.strerror}") from error

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _MADE_BY_RUNNING)
        for name in [*folders, *names]:
            path = Path(place, name)
            if path.is_symlink() and not name.startswith("."):
                raise ConfigError(f"plugin file {path}: got a link; expected a file")
        for name in sorted(names):
            path = Path(place, name)
            if not name.startswith(".") and not name.endswith(".pyc") and path.is_file():
                yield path
