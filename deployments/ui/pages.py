"""The application: its templates, with what every page has, and which page answers what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jinja2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from deployments.ui.auth import LOGIN, STATIC, base_of, page_path
from rollout_core import __version__
from rollout_core.agents.adapters.drawing import STYLE as TRACE_STYLE
from rollout_core.base.errors import ConfigError, NotFound, RolloutError
from rollout_core.base.processes import size_text
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage_graph import STYLE as LINEAGE_STYLE
from rollout_core.runs.run_records import RunRecords, next_step, state_in_words, work_in_words
from rollout_core.store import LightningStore

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Sources:
    """What the pages show."""

    objects: ObjectStore
    records: RunRecords
    store: LightningStore | None
    """None where the settings name no database that can be read."""
    find_prefect: Callable[[], str | None]
    """Address of the Prefect API now, such as ``http://127.0.0.1:4200/api``; None where none is known. The server of a
    folder comes and goes with the commands that use it."""

    def require_store(self) -> LightningStore:
        """Raises ConfigError where there is none."""
        if self.store is None:
            raise ConfigError(
                "no database could be read when rollout ui was started; a run makes the one that ROLLOUT_DATABASE "
                "names: start rollout ui again once it is there"
            )
        return self.store

    @property
    def prefect_ui(self) -> str | None:
        """Address of Prefect's pages."""
        address = self.find_prefect()
        return None if address is None else address.rstrip("/").removesuffix("/api")


class Pages:
    """Templates, with what every page has."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "when": _when,
            "span": lambda seconds: str(timedelta(seconds=round(seconds))),
            "size": size_text,
            "short": sources.records.short,
            "words": state_in_words,
            "work": work_in_words,
            "next_step": next_step,
            "moment": lambda seconds: _when(datetime.fromtimestamp(seconds, UTC)),
        }
        self._templates.globals |= {
            "version": __version__,
            "storage": sources.objects.url,
        }

    def show(self, template: str, request: Request, *, status: int = 200, **values: Any) -> Response:
        """A page."""
        query = dict(request.query_params)
        base, path = base_of(request.scope), page_path(request.scope)
        shared = {"base": base, "path": path, "query": query, "prefect_ui": self.sources.prefect_ui}
        text = self._templates.get_template(template).render(**shared, **values)
        return HTMLResponse(text, status)

    async def error(self, request: Request, error: Exception) -> Response:
        """A page for what does not exist, or cannot be read."""
        status = 404 if isinstance(error, NotFound) else 400 if isinstance(error, ConfigError) else 503
        return self.show("error.html", request, status=status, message=str(error))

    async def not_found(self, request: Request, error: Exception) -> Response:
        """A page for an address that is none; below those that need no key it says nothing of this server."""
        if page_path(request.scope).startswith(STATIC):
            return Response("there is no such file", 404, media_type="text/plain")
        return self.show("error.html", request, status=404, message=f"there is no page {request.scope['path']}")

    async def login(self, request: Request) -> Response:
        """Where the key is asked for."""
        wanted = request.query_params.get("next", f"{base_of(request.scope)}/")
        return self.show("login.html", request, failed="failed" in request.query_params, next=wanted)


def _when(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def number_of(text: str | None, default: int) -> int:
    """A parameter of an address; the default where it is none."""
    return min(int(text), 10**9) if text and text.isascii() and text.isdigit() and len(text) < 12 else default


def figure_of(text: str | None) -> float | None:
    """A parameter of an address; None where it is none."""
    try:
        return float(text) if text else None
    except ValueError:
        return None


def link_of(query: Mapping[str, str], **several: Sequence[str]) -> Callable[..., str]:
    """For templates: the address of this page with some of its parameters changed."""

    def link(**changes: object) -> str:
        kept = {name: value for name, value in query.items() if value and name not in several}
        changed = {name: str(value) for name, value in changes.items()}
        return "?" + urlencode([*((n, v) for n, vs in several.items() for v in vs), *{**kept, **changed}.items()])

    return link


def create_app(
    routes: Sequence[Route],
    pages: Pages,
    lifespan: Callable[[Any], AbstractAsyncContextManager[None]] | None = None,
) -> Starlette:
    """The application over ``routes``, to stand behind the login."""
    own = [
        Route(LOGIN, pages.login, methods=["GET"]),
        Route("/static/trace.css", lambda request: Response(TRACE_STYLE, media_type="text/css")),
        Route("/static/lineage.css", lambda request: Response(LINEAGE_STYLE, media_type="text/css")),
        Mount("/static", StaticFiles(directory=_FOLDER / "static")),
    ]
    handlers: Any = {RolloutError: pages.error, ConfigError: pages.error, 404: pages.not_found}
    return Starlette(routes=[*routes, *own], exception_handlers=handlers, lifespan=lifespan)
