"""Google Cloud Pub/Sub by its REST API and google-auth: a bridge needs four calls, and Google's own client would bring
gRPC along for them.

https://cloud.google.com/pubsub/docs/reference/rest
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import aiohttp

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError, Recoverable, RetryHint
from rollout_core.base.queue_settings import QueueSettings
from rollout_core.store.bridge.queues import CloudQueue, Message, RefusedCall

try:
    import google.auth
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.auth.transport.requests import Request
except ImportError as error:
    raise ConfigError(f"Pub/Sub needs a package: pip install '{DISTRIBUTION}[pubsub]'") from error

EMULATOR = "PUBSUB_EMULATOR_HOST"
SERVICE = "https://pubsub.googleapis.com"
SCOPE = "https://www.googleapis.com/auth/pubsub"
MOST_MESSAGES = 100
MOST_HANDLES = 1_000
"""In one call; a request may have 512 KiB, and a handle has about 200 bytes."""
PULL_SECONDS = 5.0
"""An empty subscription is asked for so long, which is also how long a stop may take."""
CONNECT_SECONDS = 5.0
CALL_SECONDS = 15.0
"""For an answer to begin, and again for it to end."""
_ROLES = "roles/pubsub.subscriber and roles/pubsub.viewer on it, and roles/pubsub.publisher on its dead letters"
_PASSING = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT}


class PubSubQueue(CloudQueue):
    """A subscription of Pub/Sub."""

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        self.name = f"Pub/Sub subscription {settings.address.rpartition('/')[2]}"
        emulator = os.environ.get(EMULATOR)
        self._base = f"http://{emulator}/v1" if emulator else f"{SERVICE}/v1"
        self._credentials: Any = None
        self._session: aiohttp.ClientSession | None = None
        self._login = asyncio.Lock()

    async def look(self) -> str:
        found = await self._call("GET", self.settings.address)
        topic = found.get("topic")
        if self.settings.topic not in (None, topic):
            raise ConfigError(f"{self.name} is one of topic {topic}, and the settings say {self.settings.topic}")
        if self.settings.dead_letter is not None:
            await self._call("GET", self.settings.dead_letter)
            return f"of {topic}; refused messages go to {self.settings.dead_letter}"
        if "deadLetterPolicy" not in found:
            raise ConfigError(
                f"{self.name} has no dead letters, so a message that is refused would come back for ever; give it a "
                "dead-letter policy, or set dead_letter_topic in [cloud.pubsub]"
            )
        return f"of {topic}; refused messages go to {found['deadLetterPolicy'].get('deadLetterTopic')}"

    async def receive(self) -> list[Message]:
        wanted = {"maxMessages": MOST_MESSAGES}
        answer = await self._call("POST", f"{self.settings.address}:pull", wanted, empty_after=PULL_SECONDS)
        received = [
            Message(
                found["message"]["messageId"],
                base64.b64decode(found["message"].get("data", "")),
                found["ackId"],
                found.get("deliveryAttempt"),
            )
            for found in answer.get("receivedMessages", ())
        ]
        if received:
            # The subscription's own deadline is what they are held for until now.
            await self.hold(received, self.settings.lease_seconds)
        return received

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        await self._in_batches("acknowledge", messages, {})

    async def hold(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        return await self._in_batches("modifyAckDeadline", messages, {"ackDeadlineSeconds": seconds})

    async def bury(self, message: Message, reason: str) -> None:
        attributes = {"reason": reason, "message_id": message.id}
        sent = {"data": base64.b64encode(message.body).decode(), "attributes": attributes}
        await self._call("POST", f"{self.settings.dead_letter}:publish", {"messages": [sent]})

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _in_batches(self, method: str, messages: Sequence[Message], more: dict[str, Any]) -> list[Message]:
        """Call for many at a time. Lost receipts are reported by subscriptions with exactly-once delivery
        only, for the whole call."""
        lost: list[Message] = []
        for start in range(0, len(messages), MOST_HANDLES):
            batch = messages[start : start + MOST_HANDLES]
            body = {"ackIds": [message.handle for message in batch], **more}
            try:
                await self._call("POST", f"{self.settings.address}:{method}", body)
            except RefusedCall:
                lost += batch
        return lost

    async def _call(
        self, method: str, place: str, body: dict[str, Any] | None = None, *, empty_after: float | None = None
    ) -> dict[str, Any]:
        """The answer. Where ``empty_after`` is given, one that has not begun after so many seconds is an empty one."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        patience = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=empty_after or CALL_SECONDS)
        renewed = False
        while True:
            headers = await self._headers(renew=renewed)
            answer = None
            try:
                answer = await self._session.request(
                    method, f"{self._base}/{place}", json=body, headers=headers, timeout=patience
                )
                async with answer, asyncio.timeout(CALL_SECONDS):
                    text = await answer.text()
            except TimeoutError as error:
                # Only then is it known that somebody was asked and says nothing.
                if empty_after is not None and answer is None and isinstance(error, aiohttp.SocketTimeoutError):
                    return {}
                raise Recoverable(
                    f"{self.name} does not answer in time: {error or 'the answer was cut off'}"
                ) from error
            except aiohttp.ClientError as error:
                raise Recoverable(f"{self.name} cannot be reached: {error}") from error
            if answer.status == HTTPStatus.UNAUTHORIZED and not renewed and headers:
                renewed = True  # it may have been withdrawn before its time
                continue
            if answer.status == HTTPStatus.OK:
                return _parsed(text, self.name)
            raise self._fault(answer.status, text, place)

    async def _headers(self, *, renew: bool) -> dict[str, str]:
        if os.environ.get(EMULATOR):
            return {}
        async with self._login:
            try:
                if self._credentials is None:
                    self._credentials, _ = await asyncio.to_thread(google.auth.default, scopes=[SCOPE])
                if renew or not self._credentials.valid:
                    await asyncio.to_thread(self._credentials.refresh, Request())
            except TransportError as error:
                raise Recoverable(f"Google's login cannot be reached: {error}") from error
            except GoogleAuthError as error:
                raise ConfigError(f"Google Cloud refuses these credentials ({error}); log in again") from error
        return {"Authorization": f"Bearer {self._credentials.token}"}

    def _fault(self, status: int, text: str, place: str) -> Exception:
        said = " ".join(_message(text).split())[:300]
        if status == HTTPStatus.UNAUTHORIZED:
            return ConfigError(f"{self.name} refuses these credentials ({said}); log in again")
        if status == HTTPStatus.FORBIDDEN:
            return ConfigError(f"{self.name} may not be used ({said}); grant {_ROLES}")
        if status == HTTPStatus.NOT_FOUND:
            return ConfigError(f"there is no {place.partition(':')[0]}; create it, or correct the settings")
        if status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return Recoverable(f"{self.name} answers {status}: {said}", RetryHint(0.2, 30.0))
        return RefusedCall(f"{self.name} answers {status}: {said}")


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        return json.loads(text or "{}")
    except ValueError:
        raise Recoverable(f"{name} gave an answer that is no JSON; it was cut off") from None


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text
