"""Artifacts and events on their way to the Prefect server: a thread of its own sends them, and no stage waits for the
server.

While the server is away they wait, of a piece of work's progress its latest value only, and are sent in their order
once it answers again. What it refuses is logged and left out.
"""

from __future__ import annotations

import atexit
import contextvars
import threading
import time
from collections import deque
from contextlib import ExitStack
from typing import Any, Protocol
from uuid import UUID

import httpx
from prefect import get_client
from prefect.artifacts import Artifact
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.context import SettingsContext, get_settings_context
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, Settings
from prefect.utilities.context import get_task_and_flow_run_ids

from tasks.runtime.journal import stage_logger

CAPACITY = 1000
"""How many wait at most; beyond it the oldest is left out."""
REQUEST_TIMEOUT_SECONDS = 10.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 5.0
"""Between two tries while the server is away; doubled from one to the next."""
AT_EXIT_SECONDS = 2.0
_PASSING_STATUSES = {408, 429, 502, 503, 504}


class Sendable(Protocol):
    """What a server is to get."""

    data: Any
    """May be set again at any time; it is then sent again by `ArtifactSender.send`."""
    context: contextvars.Context
    """Of the run that it belongs to."""

    @property
    def key(self) -> str | None:
        """Its name."""
        ...

    def deliver(self, client: SyncPrefectClient, data: Any) -> None:
        """Bring ``data`` to the server; raises what the client raises."""
        ...


class Outgoing:
    """One artifact of the current run, as it is to be shown; made where the run's context is.

    ``only``: a flow run has one of this key, which another try of the run continues.
    """

    def __init__(self, artifact: Artifact, *, only: bool = False) -> None:
        task_run_id, flow_run_id = get_task_and_flow_run_ids()
        self._request = ArtifactCreate(
            type=artifact.type,
            key=artifact.key,
            description=artifact.description,
            task_run_id=task_run_id,
            flow_run_id=flow_run_id,
        )
        # _sync: the caller may be on a thread that runs an event loop, where this would only return a coroutine.
        self.data: Any = artifact.format(_sync=True)  # pyright: ignore[reportCallIssue]
        """What it shows; may be set again at any time, and is sent again by `ArtifactSender.send`."""
        self.context = contextvars.copy_context()
        self._only = only
        self._id: UUID | None = None

    @property
    def key(self) -> str | None:
        """Its name in the UI."""
        return self._request.key

    def deliver(self, client: SyncPrefectClient, data: Any) -> None:
        """Create it at the server, or update what was created.

        An answer that is lost with the server leaves a created artifact whose id nobody knows: the next try makes
        another version of it, unless it is to be the only one.
        """
        if self._id is None and self._only:
            self._id = self._find(client)
        if self._id is not None:
            try:
                client.update_artifact(self._id, ArtifactUpdate(data=data))
                return
            except ObjectNotFound:
                pass  # a server that came back without its database
        self._id = client.create_artifact(self._request.model_copy(update={"data": data})).id

    def _find(self, client: SyncPrefectClient) -> UUID | None:
        """The flow run's artifact of this key, where an earlier try made it."""
        request = self._request
        if request.flow_run_id is None or request.key is None:
            return None
        same = ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[request.flow_run_id]), key=ArtifactFilterKey(any_=[request.key])
        )
        return next((artifact.id for artifact in client.read_artifacts(artifact_filter=same)), None)


class ArtifactSender:
    """Sends artifacts in the order of `send`. Threads may share it."""

    def __init__(self) -> None:
        self._waiting: deque[Sendable] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._open = ExitStack()
        self._client: tuple[str, SyncPrefectClient] | None = None
        self._settings: tuple[Settings, Settings] | None = None
        """A run's, and the same without retries."""
        self._pause = 0.0
        self._num_left_out = 0

    def send(self, outgoing: Sendable) -> None:
        """Send it, or what it shows now, as soon as may be; returns at once."""
        with self._changed:
            if outgoing not in self._waiting:
                if len(self._waiting) == CAPACITY:
                    self._waiting.popleft()
                    self._num_left_out += 1
                self._waiting.append(outgoing)
            if self._thread is None or not self._thread.is_alive():
                # A daemon: a process that ends does not wait for a server that is away.
                self._thread = threading.Thread(target=self._run, name="rollout-artifacts", daemon=True)
                self._thread.start()
                atexit.register(self.flush, AT_EXIT_SECONDS)
            self._changed.notify_all()

    def flush(self, seconds: float) -> int:
        """Wait until all are sent, at most ``seconds``; returns how many are not."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, seconds)
            return len(self._waiting)

    @property
    def is_server_away(self) -> bool:
        """Whether the last try did not reach the server."""
        return self._pause > 0

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                outgoing = self._waiting[0]
                data = outgoing.data
            # The lines of the log belong to the run whose artifact it is.
            is_done = outgoing.context.run(self._try, outgoing, data)
            with self._changed:
                # It may have been given something new to show meanwhile, or been left out.
                if is_done and outgoing in self._waiting and outgoing.data is data:
                    self._waiting.remove(outgoing)
                self._changed.notify_all()
            time.sleep(self._pause)

    def _try(self, outgoing: Sendable, data: Any) -> bool:
        """Whether it was sent, or refused; not while the server is away."""
        try:
            with self._one_try_a_call():
                outgoing.deliver(self._client_of_context(), data)
        except Exception as error:  # noqa: BLE001 - whatever the client raises, a picture is not worth a run
            if _is_away(error):
                self._note_away(error)
                return False
            stage_logger().warning("%s could not be sent to the Prefect server: %s", outgoing.key, error)
        if self._pause:
            self._pause = 0.0
            stage_logger().info(
                "the Prefect server answers again; %d artifacts and events waited for it, %d were left out",
                len(self._waiting),
                self._num_left_out,
            )
            self._num_left_out = 0
        return True

    def _one_try_a_call(self) -> SettingsContext:
        """Prefect's settings without retries: the pauses are those of this thread.

        Kept as long as the settings are the same, for Prefect takes 50 ms to make them, more than sending takes.
        """
        context = get_settings_context()
        if self._settings is None or self._settings[0] is not context.settings:
            once = context.settings.copy_with_update(updates={PREFECT_CLIENT_MAX_RETRIES: 0})
            self._settings = context.settings, once
        return SettingsContext(profile=context.profile, settings=self._settings[1])

    def _note_away(self, error: Exception) -> None:
        if not self._pause:
            stage_logger().warning(
                "the Prefect server does not answer (%s: %s); the run continues, and what it shows there waits",
                type(error).__name__,
                error,
            )
        self._pause = min(max(FIRST_PAUSE_SECONDS, 2 * self._pause), LONGEST_PAUSE_SECONDS)

    def _client_of_context(self) -> SyncPrefectClient:
        """A client of this thread's own, for the server of the context's settings.

        That of the run is in use there, and retries for a minute.
        """
        address = PREFECT_API_URL.value() or ""
        if self._client is None or self._client[0] != address:
            self._open.close()
            client = get_client(sync_client=True, httpx_settings={"timeout": REQUEST_TIMEOUT_SECONDS})
            self._client = address, self._open.enter_context(client)
        return self._client[1]


def _is_away(error: Exception) -> bool:
    if isinstance(error, PrefectHTTPStatusError):
        return error.response.status_code in _PASSING_STATUSES
    return isinstance(error, httpx.TransportError)


SENDER = ArtifactSender()
"""Of this process."""
