"""What a bridge asks of a queue of a cloud."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout_core.base.errors import ConfigError
from rollout_core.base.queue_settings import QueueSettings


@dataclass(frozen=True)
class Message:
    """A message as it was received; received again it has the same id and another handle."""

    id: str
    """By which the queue's own service knows it."""
    body: bytes
    handle: str
    """Of this receipt: a receipt handle, an acknowledgement id."""
    times: int | None = None
    """How often it was received, this one included, where the queue counts that."""


class RefusedCall(ConfigError):
    """The service does not take this call, however often it is made: receipts that no longer hold, a message that is
    too large. Other calls are none the worse."""


class CloudQueue(Protocol):
    """A queue whose messages come at least once. Calls raise Recoverable for passing faults and ConfigError for what
    only people can mend."""

    name: str
    """For people."""
    settings: QueueSettings

    async def look(self) -> str:
        """Ask the service for the queue; what becomes of messages that are refused, for people.

        Raises ConfigError where there is no such queue, it may not be used, or refused messages would come back for
        ever.
        """
        ...

    async def receive(self) -> Sequence[Message]:
        """The next messages, held for `QueueSettings.lease_seconds`; none after some seconds without any."""
        ...

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        """Take them off the queue for good. A receipt that no longer holds is no fault: the message comes again."""
        ...

    async def hold(self, messages: Sequence[Message], seconds: int) -> Sequence[Message]:
        """Hold them for so long from now; 0 gives them back. Returns those whose receipt no longer holds."""
        ...

    async def bury(self, message: Message, reason: str) -> None:
        """Send a refused message to the dead letters of the settings, with the reason, a line of at most 1,000 bytes
        that can be printed; it stays on the queue. Raises RefusedCall where the service takes no such message."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
