"""Plugins in the object store: the files of those that a run used, by what they made."""

from __future__ import annotations

from typing import Literal

from rollout_core.base.ids import ContentId
from rollout_core.objects import ObjectStore
from rollout_core.objects.origins import SHOWN_FILES, Source, record_import, sources_of
from rollout_core.plugins.identity import PluginCode

_HOT_RELOADED = "hot reload"
"""In the address of a plugin's source: its files may have been edited while the run went."""


def file_plugin(
    objects: ObjectStore,
    content: ContentId,
    address: str,
    plugin: PluginCode,
    kind: Literal["data", "reward", "environment"],
    *,
    hot_reloaded: bool = False,
) -> ContentId:
    """File a plugin's files as a document, and note where they were read for ``content``; the document's id. A run with
    ``--hot-reload`` does so for each state of them that it used."""
    filed = objects.put_json(plugin.document())
    state = f" ({_HOT_RELOADED}, {plugin.id.short})" if hot_reloaded else ""
    found = Source(
        kind=kind,
        address=f"plugin {address} {plugin.manifest.version}{state}",
        place=str(plugin.folder.resolve()),
        size_bytes=sum(map(len, plugin.files.values())),
        num_files=len(plugin.files),
        files=tuple(sorted(plugin.files)[:SHOWN_FILES]),
        code={address: filed},
    )
    record_import(objects, content, found)
    return filed


def is_hot_reloaded(objects: ObjectStore, content: ContentId) -> bool:
    """Whether scores of this reward are of a run with ``--hot-reload``, so that no code is known to make them again."""
    return any(f"({_HOT_RELOADED}, " in source.address for source in sources_of(objects, content))
