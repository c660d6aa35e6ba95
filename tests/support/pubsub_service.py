"""A stand-in for Google Cloud Pub/Sub: topics, subscriptions, deadlines, redelivery and dead-letter policies, as far as
a bridge goes. https://cloud.google.com/pubsub/docs/reference/rest
"""

from __future__ import annotations

import base64
import itertools
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

PULL_SECONDS = 0.3
"""Google holds an empty pull for longer."""


@dataclass
class Pending:
    message: dict[str, Any]
    visible_at: float = 0.0
    attempts: int = 0

    @property
    def ack_id(self) -> str:
        return f"{self.message['messageId']}:{self.attempts}"


@dataclass
class Subscription:
    topic: str
    deadline: float = 10.0
    dead_letter: tuple[str, int] | None = None
    """Topic, and after how many deliveries."""
    pending: list[Pending] = field(default_factory=list)


class PubSub:
    """What is published, and who is to get it."""

    def __init__(self) -> None:
        self.topics: set[str] = set()
        self.subscriptions: dict[str, Subscription] = {}
        self.most_bytes = 10_000_000
        """Of a message that is published, its attributes included."""
        self._lock = threading.Lock()
        self._ids = itertools.count(1000)

    def add(self, project: str, name: str, dead_letter: tuple[str, int] | None = None) -> str:
        """A topic with a subscription of its own; the subscription's name."""
        topic, subscription = f"projects/{project}/topics/{name}", f"projects/{project}/subscriptions/{name}"
        self.topics.add(topic)
        self.subscriptions[subscription] = Subscription(topic, dead_letter=dead_letter)
        return subscription

    def publish(self, topic: str, data: bytes, attributes: dict[str, str] | None = None) -> str:
        with self._lock:
            return self._publish(topic, {"data": base64.b64encode(data).decode(), "attributes": attributes or {}})

    def bodies(self, subscription: str) -> list[bytes]:
        with self._lock:
            return [base64.b64decode(one.message["data"]) for one in self.subscriptions[subscription].pending]

    def call(self, name: str, method: str | None, body: dict[str, Any]) -> dict[str, Any]:
        """One call of the REST API. Raises KeyError for what is not there, and ValueError for what it does not take."""
        if "/topics/" in name:
            if name not in self.topics:
                raise KeyError(name)
            if method is None:
                return {"name": name}
            if any(len(json.dumps(message)) > self.most_bytes for message in body["messages"]):
                raise ValueError("The value for message is too large.")
            with self._lock:
                return {"messageIds": [self._publish(name, message) for message in body["messages"]]}
        subscription = self.subscriptions[name]
        if method is None:
            policy = subscription.dead_letter
            told = (
                {"deadLetterPolicy": {"deadLetterTopic": policy[0], "maxDeliveryAttempts": policy[1]}} if policy else {}
            )
            about = {"name": name, "topic": subscription.topic, "ackDeadlineSeconds": subscription.deadline}
            return about | told
        if method == "pull":
            return self._pull(subscription, body["maxMessages"])
        with self._lock:
            now, known = time.monotonic(), set(body["ackIds"])
            named = [one for one in subscription.pending if one.ack_id in known and one.visible_at > now]
            if method == "acknowledge":
                subscription.pending = [one for one in subscription.pending if one not in named]
            else:
                for one in named:
                    one.visible_at = now + body["ackDeadlineSeconds"]
        return {}

    def _publish(self, topic: str, message: dict[str, Any]) -> str:
        made = {**message, "messageId": str(next(self._ids))}
        for subscription in self.subscriptions.values():
            if subscription.topic == topic:
                subscription.pending.append(Pending(made))
        return made["messageId"]

    def _pull(self, subscription: Subscription, most: int) -> dict[str, Any]:
        until = time.monotonic() + PULL_SECONDS
        while True:
            with self._lock:
                found = self._delivered(subscription, most)
            if found or time.monotonic() > until:
                return {"receivedMessages": found} if found else {}
            time.sleep(0.02)

    def _delivered(self, subscription: Subscription, most: int) -> list[dict[str, Any]]:
        now, found = time.monotonic(), []
        for one in list(subscription.pending):
            if one.visible_at > now or len(found) == most:
                continue
            if subscription.dead_letter is not None and one.attempts >= subscription.dead_letter[1]:
                subscription.pending.remove(one)
                self._publish(subscription.dead_letter[0], {key: one.message[key] for key in ("data", "attributes")})
                continue
            one.attempts, one.visible_at = one.attempts + 1, now + subscription.deadline
            found.append({"ackId": one.ack_id, "message": one.message, "deliveryAttempt": one.attempts})
        return found
