"""Pages of models: those that were promoted, and one result with what it was made from and what came of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deployments.ui.auth import base_of
from deployments.ui.pages import Pages
from rollout_core.base.errors import ConfigError, NotFound, RolloutError
from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import trace_descendants, trace_lineage
from rollout_core.objects.lineage_graph import LineageGraph, as_mermaid, as_svg, lineage_graph
from rollout_core.objects.origins import imports_behind
from rollout_core.objects.trees import TreeManifest
from rollout_core.promotion.history import Entry, history_of, resources_with_history, served_model

LAST_ENTRIES = 200
"""Of a history that are looked at."""
MOST_DRAWN = 150
"""Stages of a lineage that are drawn; of more there is the table. The time grows by more than their square."""
KEPT_DRAWINGS = 64
"""Of some 100 KiB each."""


def routes(pages: Pages) -> list[Route]:
    """Of these pages."""
    own = ModelPages(pages)
    return [Route("/models", own.table), Route("/models/{id}", own.one)]


@dataclass(frozen=True)
class _History:
    """Of one resource, the newest first."""

    entries: list[Entry]
    sizes: dict[str, int]
    """Bytes of the models that are here."""


class ModelPages:
    """What answers."""

    def __init__(self, pages: Pages) -> None:
        self._pages, self._sources = pages, pages.sources

    async def table(self, request: Request) -> Response:
        """Models that were promoted, and why."""
        objects, store = self._sources.objects, self._sources.store

        def histories() -> dict[str, _History]:
            found = {
                name: history_of(objects, name, last=LAST_ENTRIES)[::-1] for name in resources_with_history(objects)
            }
            return {name: _History(entries, _sizes(objects, entries)) for name, entries in found.items()}

        found = await run_in_threadpool(histories)
        served = {name: None if store is None else await served_model(store, objects, name) for name in found}
        return self._pages.show(
            "models.html", request, histories=found, served=served, no_database=store is None, run_in=_run_in
        )

    def one(self, request: Request) -> Response:
        """A model, or any other result: its files and its lineage, up or down."""
        objects, text = self._sources.objects, request.path_params["id"]
        if not is_content_id(text):
            raise ConfigError(f"got the id {text!r:.80}; expected 64 hexadecimal digits")
        result, down = ContentId(text), request.query_params.get("way") == "down"
        found = (trace_descendants if down else trace_lineage)(objects, result)
        imports = imports_behind(objects, result, found)
        if down:
            imports = [item for item in imports if item.outputs == (result,)]
        graph = lineage_graph(found, imports) if (found or imports) and len(found) <= MOST_DRAWN else None
        drawing, no_drawing = _drawing(graph, result, base_of(request.scope)) if graph is not None else (None, None)
        manifest, size = _manifest(objects, result), _size(objects, result)
        if not found and not imports and size is None:
            raise NotFound(f"{objects.url} has no object {text[:12]}, and no stage recorded that it made or used it")
        resources = [
            name
            for name in resources_with_history(objects)
            if any(entry.model == result for entry in history_of(objects, name, last=LAST_ENTRIES))
        ]
        return self._pages.show(
            "model.html",
            request,
            result=result,
            down=down,
            found=found,
            imports=imports,
            drawing=drawing,
            no_drawing=no_drawing,
            flow_chart=None if graph is None or drawing else as_mermaid(graph),
            manifest=manifest,
            is_whole=manifest is not None and objects.tree_is_present(result),
            bytes=manifest.size_bytes if manifest is not None else size,
            resources=resources,
        )


def _drawing(graph: LineageGraph, result: ContentId, base: str) -> tuple[Markup | None, str | None]:
    """The image, or why there is none, such as on a machine without `dot`."""
    try:
        return _drawn(graph, result, base), None
    except RolloutError as error:
        return None, str(error)


@lru_cache(KEPT_DRAWINGS)
def _drawn(graph: LineageGraph, result: ContentId, base: str) -> Markup:
    # `as_svg` escapes what comes from records.
    return Markup(as_svg(graph, asked=result, link=lambda one: f"{base}/models/{one}", styled=False))


def _manifest(objects: ObjectStore, result: ContentId) -> TreeManifest | None:
    """Of a folder; None for other things, and where it is gone."""
    try:
        return objects.manifest(result)
    except RolloutError:
        return None


def _size(objects: ObjectStore, result: ContentId) -> int | None:
    try:
        return objects.size(result)
    except RolloutError:
        return None


def _sizes(objects: ObjectStore, entries: Sequence[Entry]) -> dict[str, int]:
    models = list(dict.fromkeys(entry.model for entry in entries))
    manifests = objects.in_parallel(lambda model: _manifest(objects, ContentId(model)), models)
    return {model: found.size_bytes for model, found in zip(models, manifests, strict=True) if found is not None}


def _run_in(text: str) -> str | None:
    """Id of the flow run that a text names."""
    found = re.search(r"flow run ([0-9a-f-]{36})", text)
    return None if found is None else found[1]
