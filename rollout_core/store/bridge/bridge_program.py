"""A bridge as a program: its queue and store by their addresses, until a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from rollout_core.base.errors import ConfigError, Recoverable, Stopped
from rollout_core.base.logs import configure
from rollout_core.base.queue_settings import QueueSettings
from rollout_core.base.settings import BLOCK_PREFIX, locations, stop_seconds
from rollout_core.store.bridge.bridge import Bridge, Tally
from rollout_core.store.bridge.queues import CloudQueue
from rollout_core.store.contract import LightningStore
from rollout_core.store.http.client import LightningStoreClient
from rollout_core.store.sql.sql_store import SqlLightningStore


def open_queue(settings: QueueSettings) -> CloudQueue:
    """Its client; nothing is asked yet. Raises ConfigError where its package is missing."""
    if settings.kind == "pubsub":
        from rollout_core.store.bridge.pubsub import PubSubQueue

        return PubSubQueue(settings)
    from rollout_core.store.bridge.sqs import SQSQueue

    return SQSQueue(settings)


async def look_at_queue(settings: QueueSettings) -> str:
    """What the service says of a queue, for people; raises as `CloudQueue.look`."""
    queue = open_queue(settings)
    try:
        return f"{queue.name}: {await queue.look()}"
    finally:
        await queue.close()


async def run_bridge(
    settings: QueueSettings, store: LightningStore, say: Callable[[str], None], wait_seconds: float
) -> Tally:
    """Carry messages into ``store`` until SIGTERM or Ctrl-C. Raises as `Bridge.begin` and `Bridge.run`.

    Queue and store may be away for ``wait_seconds`` at the start, and for ever later.
    After the signal it has ``ROLLOUT_STOP_SECONDS`` to store or give back what it holds. A second one ends it at once.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    queue = open_queue(settings)

    def asked(number: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(number)  # the next one is Python's own: it ends the process

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked, number)
    try:
        async with store:
            bridge = Bridge(queue, store, stop)
            try:
                say(f"{queue.name}: {await bridge.begin(wait_seconds)}")
            except Stopped:
                return bridge.tally
            carrying = asyncio.create_task(bridge.run())
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait([carrying, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            try:
                async with asyncio.timeout(stop_seconds() if stop.is_set() else None):
                    return await carrying
            except TimeoutError:
                raise Recoverable(
                    f"the bridge did not stop within {stop_seconds():g} s (ROLLOUT_STOP_SECONDS); what it held comes "
                    "again when its lease ends"
                ) from None
    finally:
        await queue.close()


def bridge_forever(
    settings: QueueSettings,
    store: str | None,
    api_key: str | None,
    say: Callable[[str], None],
    wait_seconds: float,
) -> Tally:
    """`run_bridge` as a process of its own, whose log goes to stderr.

    ``store`` is the URL of a server (``http://``) or a database; None: the database of the settings.
    """
    configure(logging.INFO, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    for client in ("botocore", "aiobotocore", "google", "urllib3", "alembic"):
        logging.getLogger(client).setLevel(logging.WARNING)
    address = store or locations().database
    if address.startswith(("http://", "https://")):
        opened: LightningStore = LightningStoreClient(address, api_key=api_key)
    elif address.startswith(BLOCK_PREFIX):
        raise ConfigError(f"{address} is a block of a Prefect server; give its address by --database")
    else:
        opened = SqlLightningStore.from_url(address)
    return asyncio.run(run_bridge(settings, opened, say, wait_seconds))
