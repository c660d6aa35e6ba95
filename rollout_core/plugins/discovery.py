"""Where plugins are found: in this order, an earlier one in place of a later one of the same name.

1. the ``path`` that a configuration gives,
2. ``--plugin PATH``, which is ``ROLLOUT_PLUGINS``,
3. ``./plugins`` of the working folder,
4. ``rollout/plugins`` of the user's data folder (``XDG_DATA_HOME``, by default ``~/.local/share``),
5. packages that are installed with an entry point of the group ``rollout.plugins``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollout_core.base.errors import ConfigError, near
from rollout_core.base.settings import plugin_paths
from rollout_core.plugins.identity import PluginCode, read_plugin
from rollout_core.plugins.manifest import MANIFEST

log = logging.getLogger(__name__)

GROUP = "rollout.plugins"
FOLDER = "plugins"
_told: set[tuple[Path, Path]] = set()
"""Pairs of places of which it was said that one is in the place of the other."""


@dataclass(frozen=True)
class Candidate:
    """A folder that has a manifest, or is named as if it had."""

    name: str
    """As the manifest has it, as far as that can be read; else of the folder."""
    folder: Path
    origin: str
    """Where it was found, for people."""
    package: str | None = None


def candidates(base: Path) -> Iterator[Candidate]:
    """All that there are, in order. Raises ConfigError where ``ROLLOUT_PLUGINS`` names what is no plugin."""
    for path in plugin_paths():
        yield from _given(base / path)
    yield from _inside(base / FOLDER, f"./{FOLDER}")
    yield from _inside(user_folder(), "the user's folder")
    yield from _installed()


@dataclass(frozen=True)
class Listed:
    """A plugin as a list of all shows it."""

    candidate: Candidate
    code: PluginCode | None
    """None where it cannot be read."""
    problem: str | None = None
    shadowed_by: Candidate | None = None
    """The one of the same name that is taken in its place."""


def list_plugins(base: Path) -> list[Listed]:
    """All that there are, in the order in which they are found."""
    first: dict[str, Candidate] = {}
    found: list[Listed] = []
    for candidate in candidates(base):
        before = first.setdefault(candidate.name, candidate)
        shadowed_by = None if before is candidate else before
        try:
            code = read_plugin(candidate.folder, package=candidate.package)
        except ConfigError as error:
            found.append(Listed(candidate, None, str(error), shadowed_by))
        else:
            found.append(Listed(candidate, code, shadowed_by=shadowed_by))
    return found


def user_folder() -> Path:
    """Where a user's plugins lie."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share"
    return Path(data) / "rollout" / FOLDER


def find_plugin(name: str, base: Path, path: str | None = None, *, kind: str | None = None) -> PluginCode:
    """The plugin of this name, and of ``kind`` where that is given, in the folder ``path`` where the configuration
    gives one; relative folders start at ``base``. One that is in the place of another says so, once. Raises ConfigError
    where there is none, and for what is wrong with its manifest."""
    others = [found for found in candidates(base) if found.name == name]
    if path is not None:
        found = _candidate(base / path, "the configuration")
        if found.name != name:
            raise ConfigError(f"plugin {name}: got the path {path}, whose plugin is {found.name!r}; expected {name!r}")
        others = [found, *others]
    if not others:
        known = {found.name for found in candidates(base)}
        raise ConfigError(
            f"no plugin is named {name!r} in the folders of --plugin, in ./{FOLDER}, in {user_folder()}, and among "
            f"entry points of {GROUP}; {near(name, known)}"
        )
    first = others[0]
    for other in others[1:]:
        _tell(first, other)
    code = read_plugin(first.folder, package=first.package)
    if kind is not None and code.manifest.kind != kind:
        raise ConfigError(f"plugin {name} of {first.folder}: got one of kind {code.manifest.kind!r}; expected {kind!r}")
    return code


def _tell(first: Candidate, other: Candidate) -> None:
    pair = first.folder, other.folder
    if first.folder.resolve() == other.folder.resolve() or pair in _told:
        return
    _told.add(pair)
    log.warning(
        "plugin %s of %s (%s) is taken in place of the one of %s (%s)",
        first.name,
        first.folder,
        first.origin,
        other.folder,
        other.origin,
    )


def _given(path: Path) -> Iterator[Candidate]:
    """A plugin's own folder, or one of several plugins."""
    if (path / MANIFEST).is_file():
        yield _candidate(path, "--plugin")
        return
    found = list(_inside(path, "--plugin"))
    if not found:
        raise ConfigError(
            f"--plugin {path}: got {'a folder' if path.is_dir() else 'no folder'}; expected one with {MANIFEST}, or of "
            "such folders"
        )
    yield from found


def _inside(folder: Path, origin: str) -> Iterator[Candidate]:
    for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
        yield _candidate(manifest.parent, origin)


def _candidate(folder: Path, origin: str, package: str | None = None) -> Candidate:
    try:
        name = tomllib.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("name")
    except FileNotFoundError:
        raise ConfigError(f"plugin folder {folder} ({origin}): got no {MANIFEST}; expected one") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        name = None  # said in full when it is read
    return Candidate(name if isinstance(name, str) else folder.name, folder, origin, package)


def _installed() -> Iterator[Candidate]:
    points = importlib.metadata.entry_points(group=GROUP)
    for point in sorted(points, key=lambda point: (point.name, point.value)):
        origin = f"entry point {point.name} = {point.value}"
        # Found and not imported: nothing of a plugin runs in this process.
        spec = importlib.util.find_spec(point.value) if point.value.isidentifier() else None
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        if not places:
            log.warning("%s of %s is no plugin: expected the name of an installed package", origin, GROUP)
            continue
        try:
            yield _candidate(Path(places[0]), origin, point.value)
        except ConfigError as error:
            log.warning("%s", error)
