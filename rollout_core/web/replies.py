"""The reply that says an error; apart from `http_errors`, which clients import where no server library is."""

from __future__ import annotations

import logging

from starlette.responses import Response

from rollout_core.base.errors import Recoverable
from rollout_core.web.http_errors import error_body, status_of

logger = logging.getLogger(__name__)


def error_reply(error: Exception) -> Response:
    """The reply that says ``error``; what nobody foresaw is logged."""
    status = status_of(error)
    if status >= 500:
        logger.error("a request failed: %s", error, exc_info=error if status == 500 else None)
    headers: dict[str, str] = {}
    if isinstance(error, Recoverable):
        headers["retry-after"] = str(max(1, round(error.hint.delay_seconds)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error), status, headers, media_type="application/json")
