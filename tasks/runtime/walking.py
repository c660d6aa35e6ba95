"""Walking through a flow's body in a dry run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blocks import ContentAddressedStorage
from rollout_core.base.errors import MissingObject
from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.base.locks import scratch_folder
from rollout_core.config import HuggingFaceDataset, ModelSource
from rollout_core.models.locating import locate_model, locate_tokenizer
from rollout_core.objects.overlay import overlaid
from tasks.runtime.connections import result_storage, working_folder
from tasks.runtime.dry_run import DryRun, StagesEnd, running_dry


def walk(body: Callable[[], object], *, is_cold: bool = False, fetches: bool = False) -> DryRun:
    """What calling ``body`` would do, on a copy of the object store that is thrown away; ``is_cold`` and ``fetches`` as
    of `DryRun`."""
    with scratch_folder("plan") as folder:
        copy = ContentAddressedStorage.over(overlaid(result_storage().objects(), folder))
        dry_run = DryRun(copy, _out_of_reach, is_cold=is_cold, fetches=fetches)
        with running_dry(dry_run):
            try:
                body()
            except StagesEnd:
                pass
            except MissingObject as error:
                if dry_run.is_placeholder(error.content_id):
                    dry_run.remarks.append("what follows depends on results that are not there yet")
                elif copy.objects().exists(ContentId(error.content_id)):  # noted, and not kept
                    dry_run.not_kept("what follows depends on large files, which a plan does not keep")
                else:
                    raise
    return dry_run


def _out_of_reach(inputs: dict[str, Any]) -> str | None:
    """Why an import would have to download something first."""
    source, base = inputs.get("source"), working_folder()
    if isinstance(source, HuggingFaceDataset) and not (base / source.uri).is_dir():
        return f"{source.uri}: read from the hub when the run starts; what is made of it counts as not cached"
    if not isinstance(source, ModelSource):
        return None
    found = is_content_id(source.uri) or locate_model(source, base, download=False)
    if found and source.tokenizer is not None:
        found = locate_tokenizer(source, base, download=False)
    if found and source.adapter is not None:
        found = is_content_id(source.adapter) or (base / source.adapter).is_dir()
    named = ", ".join(filter(None, (source.uri, source.tokenizer, source.adapter)))
    return None if found else f"{named}: downloaded when the run starts; what is made of it counts as not cached"
