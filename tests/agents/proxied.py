"""What the tests of the proxy share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from openai import AsyncOpenAI

from rollout_core.agents.proxy.proxy_server import LLMProxy
from rollout_core.agents.proxy.upstreams import ModelEntry, Upstream
from rollout_core.store import LightningStore, Span
from rollout_core.store.semconv import LLM_CALL
from tests.store.patience import LONG, until

__all__ = ["LONG", "asked", "attempt", "calls", "client", "close_clients", "ids_of", "proxy_of", "until"]

_clients: list[tuple[AsyncOpenAI, asyncio.AbstractEventLoop]] = []
"""With the event loop of the test that made them."""


@asynccontextmanager
async def proxy_of(store: LightningStore, *upstreams: Upstream, **options) -> AsyncIterator[LLMProxy]:
    """A running proxy with one model, ``m``."""
    proxy = LLMProxy(0, [ModelEntry("m", upstreams)], store, **options)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
        await close_clients()


async def attempt(store: LightningStore) -> tuple[str, str]:
    """Ids of a rollout under way and its attempt."""
    rollout = await store.start_rollout({"task": 1})
    return rollout.rollout_id, rollout.attempt.attempt_id


def client(proxy: LLMProxy, ids: tuple[str, str] | None = None, **options) -> AsyncOpenAI:
    """An agent's client, which tries once."""
    llm = proxy.as_resource(*(ids or ()))
    made = AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key, **{"max_retries": 0, **options})
    _clients.append((made, asyncio.get_running_loop()))
    return made


async def close_clients() -> None:
    """Close what `client` has made: collected later, it would close its connections on another test's event loop."""
    while _clients:
        made, loop = _clients.pop()
        if loop is asyncio.get_running_loop():
            await made.close()


def asked(text: str) -> list:
    """Messages of a chat."""
    return [{"role": "user", "content": text}]


def ids_of(letters: str) -> list[int]:
    """The scripted upstream's tokens."""
    return [ord(letter) for letter in letters]


async def calls(store: LightningStore, proxy: LLMProxy, rollout_id: str) -> list[Span]:
    """What was recorded."""
    await proxy.flush(rollout_id)
    spans = list(await store.query_spans(rollout_id))
    assert {span.name for span in spans} <= {LLM_CALL}
    return spans
