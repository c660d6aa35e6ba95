"""Work on the event loops of other threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any

from rollout_core.store.loops import LoopThread


async def on_thread(thread: LoopThread, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` on the thread's loop. Cancelled, it is cancelled there, and this waits until it has ended so; a
    second cancellation leaves it to itself."""
    here, there = asyncio.get_running_loop(), thread.start()
    ended: asyncio.Future[None] = here.create_future()
    tasks: list[asyncio.Task[None]] = []

    def report(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # nobody waits any more
            here.call_soon_threadsafe(lambda: ended.done() or ended.set_result(None))

    def begin() -> None:
        tasks.append(there.create_task(work))
        tasks[0].add_done_callback(report)

    there.call_soon_threadsafe(begin)
    try:
        await asyncio.shield(ended)
    except asyncio.CancelledError:
        there.call_soon_threadsafe(lambda: tasks[0].cancel())
        await asyncio.shield(ended)
    return tasks[0].result()


def leave(threads: Sequence[LoopThread], have_ended: bool) -> None:
    for thread in threads:
        if have_ended:
            thread.stop()
        elif thread.loop.is_running():
            thread.loop.call_soon_threadsafe(thread.loop.stop)  # what is left there cannot be ended
