"""Amazon SQS, by aiobotocore, which finds region, credentials and endpoint as AWS's own tools do.

https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.queue_settings import QueueSettings
from rollout_core.base.settings import without_password
from rollout_core.objects.files import storage_faults
from rollout_core.store.bridge.queues import CloudQueue, Message, RefusedCall

try:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import get_session
    from botocore.exceptions import ClientError, NoRegionError
except ImportError as error:
    raise ConfigError(f"SQS needs a package: pip install '{DISTRIBUTION}[sqs]'") from error

WAIT_SECONDS = 5
"""An empty queue is asked for so long. A request is never given up, since its answer may be on its way with messages
that nobody would see until their lease ends; so this is also how long a stop may take."""
MOST_MESSAGES = 10
_NO_QUEUE = {"AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist", "InvalidAddress"}
_LOST_RECEIPT = {"ReceiptHandleIsInvalid", "MessageNotInflight", "AWS.SimpleQueueService.MessageNotInflight"}
_REFUSED = {"AccessDenied", "AccessDeniedException", "KmsAccessDenied", "AWS.SimpleQueueService.AccessDenied"}
_THROTTLED = {"RequestThrottled", "ThrottlingException", "Throttling", "KmsThrottled", "OverLimit"}
_ACTIONS = "sqs:GetQueueAttributes, sqs:ReceiveMessage, sqs:DeleteMessage, sqs:ChangeMessageVisibility"


class SQSQueue(CloudQueue):
    """A queue of SQS, first in, first out or not."""

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        self.name = f"SQS queue {without_password(settings.address).rpartition('/')[2]}"
        self._stack = AsyncExitStack()
        self._client: Any = None

    async def look(self) -> str:
        wanted = ["RedrivePolicy", "ApproximateNumberOfMessages"]
        with self._faults("ask"):
            client = await self._opened()
            answer = await client.get_queue_attributes(QueueUrl=self.settings.address, AttributeNames=wanted)
        if self.settings.dead_letter is not None:
            with self._faults("ask for the dead letters of", self.settings.dead_letter):
                await client.get_queue_attributes(QueueUrl=self.settings.dead_letter, AttributeNames=["QueueArn"])
        attributes = answer.get("Attributes", {})
        waiting = f"{int(attributes.get('ApproximateNumberOfMessages', 0)):,} messages wait"
        if self.settings.dead_letter is not None:
            return f"{waiting}; refused ones go to {without_password(self.settings.dead_letter)}"
        if "RedrivePolicy" not in attributes:
            raise ConfigError(
                f"{self.name} has no dead letters, so a message that is refused would come back for ever; give it a "
                "redrive policy, or set dead_letter_url in [cloud.sqs]"
            )
        return f"{waiting}; refused ones go where its redrive policy says"

    async def receive(self) -> list[Message]:
        with self._faults("receive from"):
            client = await self._opened()
            answer = await client.receive_message(
                QueueUrl=self.settings.address,
                MaxNumberOfMessages=MOST_MESSAGES,
                WaitTimeSeconds=WAIT_SECONDS,
                VisibilityTimeout=self.settings.lease_seconds,
                MessageSystemAttributeNames=["ApproximateReceiveCount"],
            )
        return [
            Message(
                found["MessageId"],
                found["Body"].encode(),
                found["ReceiptHandle"],
                int(found.get("Attributes", {}).get("ApproximateReceiveCount", 0)) or None,
            )
            for found in answer.get("Messages", ())
        ]

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        await self._in_batches("delete_message_batch", messages, {})

    async def hold(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        return await self._in_batches("change_message_visibility_batch", messages, {"VisibilityTimeout": seconds})

    async def bury(self, message: Message, reason: str) -> None:
        assert self.settings.dead_letter is not None, "asked for only where it is set"
        more: dict[str, Any] = {}
        if self.settings.dead_letter.endswith(".fifo"):
            more = {"MessageGroupId": "refused", "MessageDeduplicationId": message.id}
        attached = {"reason": reason, "message_id": message.id}
        attributes = {name: {"DataType": "String", "StringValue": value} for name, value in attached.items()}
        try:
            with self._faults("send a refused message of", self.settings.dead_letter):
                client = await self._opened()
                await client.send_message(
                    QueueUrl=self.settings.dead_letter,
                    MessageBody=message.body.decode(),
                    MessageAttributes=attributes,
                    **more,
                )
        except Recoverable as error:
            if isinstance(error.__cause__, ClientError) and _is_refusal(error.__cause__):
                raise RefusedCall(f"{self.name}: {error.__cause__}") from error.__cause__
            raise

    async def close(self) -> None:
        await self._stack.aclose()
        self._client = None

    async def _opened(self) -> Any:
        if self._client is None:
            # Tries, and pauses between them, are the bridge's.
            patience = AioConfig(connect_timeout=5, read_timeout=WAIT_SECONDS + 15, retries={"total_max_attempts": 1})
            created = get_session().create_client("sqs", region_name=self._region(), config=patience)
            self._client = await self._stack.enter_async_context(created)
        return self._client

    def _region(self) -> str | None:
        """The queue's address says it, where it is one of AWS: the variables may be about a bucket elsewhere."""
        found = re.match(r"https://sqs\.([a-z0-9-]+)\.amazonaws\.com", self.settings.address)
        return found[1] if found else os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION")

    async def _in_batches(self, method: str, messages: Sequence[Message], more: dict[str, Any]) -> list[Message]:
        """Call for ten at a time; the messages whose receipts no longer hold."""
        lost: list[Message] = []
        with self._faults("tell"):
            client = await self._opened()
            for start in range(0, len(messages), MOST_MESSAGES):
                batch = messages[start : start + MOST_MESSAGES]
                entries = [
                    {"Id": str(place), "ReceiptHandle": message.handle, **more} for place, message in enumerate(batch)
                ]
                answer = await getattr(client, method)(QueueUrl=self.settings.address, Entries=entries)
                lost += _lost(batch, answer.get("Failed", ()), self.name)
        return lost

    @contextmanager
    def _faults(self, action: str, address: str | None = None) -> Iterator[None]:
        with storage_faults(action, self.name):
            try:
                yield
            except NoRegionError as error:
                raise ConfigError(f"{self.name}: no region is set; set AWS_DEFAULT_REGION") from error
            except ClientError as error:
                code = error.response.get("Error", {}).get("Code", "")
                if code in _NO_QUEUE:
                    named = without_password(address or self.settings.address)
                    raise ConfigError(f"there is no queue {named}; create it, or correct address and region") from error
                if code in _REFUSED:
                    raise ConfigError(
                        f"cannot {action} {self.name}: {code}; allow {_ACTIONS} on it, and sqs:SendMessage on its dead "
                        "letters"
                    ) from error
                raise


def _is_refusal(error: ClientError) -> bool:
    """Whether the service says that the fault is the sender's, and not that it came too often."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return 400 <= status < 500 and error.response.get("Error", {}).get("Code") not in _THROTTLED


def _lost(batch: Sequence[Message], failed: Iterable[dict[str, Any]], name: str) -> list[Message]:
    """Raises Recoverable where an entry failed for another reason than that its receipt no longer holds."""
    lost = []
    for entry in failed:
        # Of a receipt that has run out SQS says so in several ways, all of them the sender's fault.
        if entry.get("Code") not in _LOST_RECEIPT and not entry.get("SenderFault"):
            raise Recoverable(f"{name} did not take a batch as a whole: {entry.get('Code')} {entry.get('Message', '')}")
        lost.append(batch[int(entry["Id"])])
    return lost
