"""Changes of the store as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

Each event has the change's position as its id. A reader that was cut off names the last one that it has seen
(``Last-Event-ID``, which browsers send by themselves) and gets what came after it: the store keeps changes, the server
none. Nothing piles up for a reader that is slow, as it is only read on when it has taken what was sent.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rollout_core.base.errors import NotFound, Recoverable, RolloutError
from rollout_core.base.loops import until_stop
from rollout_core.store.changes import Change, ChangeKind, check_kinds
from rollout_core.store.contract import LightningStore
from rollout_core.web.http_errors import error_body
from rollout_core.web.replies import error_reply

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
"""After so long without a change a comment is sent, by which a reader sees that the server lives."""
RETRY_MILLISECONDS = 1_000
"""After which a browser connects again."""


async def watch(store: LightningStore, request: Request) -> Response:
    """Changes of the kinds that the request names (``kind``, any number of times; none: all), after its
    ``Last-Event-ID`` or ``after``, or from now on."""
    kinds = cast("Sequence[ChangeKind] | None", request.query_params.getlist("kind") or None)
    after = request.headers.get("last-event-id") or request.query_params.get("after")
    try:
        check_kinds(kinds)
        found = await store.wait_for_changes(after, kinds=kinds, limit=1)  # what is wrong is answered by a status
        position = found.position if after is None else after
    except Exception as error:  # noqa: BLE001 - said to the client
        return error_reply(error)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    events = _events(store, kinds, position, _name_of(request))
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


async def _events(
    store: LightningStore, kinds: Sequence[ChangeKind] | None, position: str, reader: str
) -> AsyncIterator[str]:
    # An id without data is remembered and shows nothing: who is cut off before the first change loses none.
    yield f"retry: {RETRY_MILLISECONDS}\nid: {position}\n\n"
    while True:
        wait = store.wait_for_changes(position, kinds=kinds, timeout=HEARTBEAT_SECONDS)
        try:
            page = await until_stop(wait, None)
        except Recoverable as error:
            logger.warning("changes cannot be read for %s, which connects again: %s", reader, error)
            return
        except RolloutError as error:
            if isinstance(error, NotFound):
                logger.warning("%s is too slow for the changes of this store and is cut off: %s", reader, error)
            yield f"event: error\ndata: {error_body(error).decode()}\n\n"
            return
        if page is None:  # the server is to stop
            return
        position = page.position
        yield "".join(map(_event, page.items)) or f": nothing new\nid: {position}\n\n"


def _event(change: Change) -> str:
    data = change.model_dump_json(exclude_none=True)
    return f"id: {change.id}\nevent: {change.kind}\ndata: {data}\n\n"


def _name_of(request: Request) -> str:
    client: Any = request.client
    return "a reader" if client is None else f"the reader at {client.host}:{client.port}"
