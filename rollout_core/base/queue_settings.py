"""Which queue of a cloud feeds the store's, by the settings of this process.

``ROLLOUT_QUEUE`` is the URL of an SQS queue or ``projects/PROJECT/subscriptions/NAME`` of Pub/Sub,
``ROLLOUT_QUEUE_LEASE_SECONDS`` how long a message that was received stays out of others' sight unless that is renewed,
``ROLLOUT_QUEUE_DEAD_LETTER`` the URL of the queue, or the topic, that refused messages are sent to, and
``ROLLOUT_QUEUE_TOPIC`` the topic that the subscription has to be one of. The table ``[cloud]`` of a file sets them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from rollout_core.base.errors import ConfigError

QUEUE = "ROLLOUT_QUEUE"
QUEUE_LEASE = "ROLLOUT_QUEUE_LEASE_SECONDS"
QUEUE_DEAD_LETTER = "ROLLOUT_QUEUE_DEAD_LETTER"
QUEUE_TOPIC = "ROLLOUT_QUEUE_TOPIC"
LEASES = {"sqs": (10, 43_200, 300), "pubsub": (10, 600, 30)}
"""Least, most and default seconds of a lease. SQS holds a message for 12 hours in all."""
_SUBSCRIPTION = re.compile(r"projects/[^/]+/subscriptions/[^/]+")
_TOPIC = re.compile(r"projects/[^/]+/topics/[^/]+")


@dataclass(frozen=True)
class QueueSettings:
    """Which queue, and how its messages are held."""

    kind: str
    """``sqs`` or ``pubsub``."""
    address: str
    lease_seconds: int
    dead_letter: str | None = None
    topic: str | None = None


def queue_settings(address: str | None = None) -> QueueSettings:
    """By the environment; ``address`` stands for `QUEUE`. Raises ConfigError for what is no queue."""
    address = address or os.environ.get(QUEUE) or ""
    kind = "pubsub" if _SUBSCRIPTION.fullmatch(address) else "sqs" if re.match(r"https?://[^/]+/.+", address) else None
    if kind is None:
        raise ConfigError(
            f"the queue is {address!r}; expected the URL of an SQS queue or projects/PROJECT/subscriptions/NAME of "
            f"Pub/Sub, in {QUEUE} or a table [cloud.sqs] or [cloud.pubsub]"
        )
    dead_letter, topic = os.environ.get(QUEUE_DEAD_LETTER) or None, os.environ.get(QUEUE_TOPIC) or None
    if kind == "pubsub":
        for name, value in ((QUEUE_DEAD_LETTER, dead_letter), (QUEUE_TOPIC, topic)):
            if value is not None and not _TOPIC.fullmatch(value):
                raise ConfigError(f"{name} is {value!r}; expected projects/PROJECT/topics/NAME")
    elif dead_letter is not None and not re.match(r"https?://[^/]+/.+", dead_letter):
        raise ConfigError(f"{QUEUE_DEAD_LETTER} is {dead_letter!r}; expected the URL of an SQS queue")
    if dead_letter == address:
        raise ConfigError(f"{QUEUE_DEAD_LETTER} is the queue itself; refused messages would come back for ever")
    return QueueSettings(kind, address, _lease(kind), dead_letter, topic)


def _lease(kind: str) -> int:
    least, most, default = LEASES[kind]
    text = os.environ.get(QUEUE_LEASE) or str(default)
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ConfigError(f"{QUEUE_LEASE} is {text!r}; expected {least} to {most} whole seconds")
    return int(text)
