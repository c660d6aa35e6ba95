"""Steps of tuning a prompt, filed: what a critic finds in a template, an editor's rewriting, which is the latest."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import openai
from openai import AsyncOpenAI

from rollout_core.agents.adapters.chat_messages import TraceToMessages
from rollout_core.agents.adapters.ended import as_they_were, ended_rollouts, read_rollouts
from rollout_core.agents.apo import Experience, PromptWriter
from rollout_core.agents.task_rollouts import template_of
from rollout_core.base.errors import ConfigError, Recoverable, in_words
from rollout_core.base.ids import content_id
from rollout_core.base.settings import Redaction, require_secret
from rollout_core.config import CriticConfig
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import AgentPrompt, AgentRollouts, BlobId, Record
from rollout_core.store.reachable import OpenStore

T = TypeVar("T")


class Critique(Record):
    """What a critic wrote of a template."""

    text: BlobId


class Rewriting(Record):
    """What an editor made of a template."""

    text: BlobId
    """The new template, or the old one."""
    is_usable: bool
    """False where no answer could be used, and the template is the old one."""


async def criticize(
    open_store: OpenStore,
    objects: ObjectStore,
    prompt: AgentPrompt,
    rollouts: AgentRollouts,
    critic: CriticConfig,
    seed: int,
) -> Critique:
    """What the critic finds wrong with a template, by what agents did with it. Raises Recoverable where its answers are
    empty."""
    template, adapter = template_of(objects, prompt), TraceToMessages()
    ended = {row.rollout_id: row for row in ended_rollouts(objects, rollouts)}
    async with open_store() as store:
        seen = [
            Experience(ended[name].reward, ended[name].status, adapter.adapt(as_they_were(ended[name], spans)))
            async for name, _, spans in read_rollouts(store, list(ended))
        ]
    found = await _with_writer(critic, lambda writer: writer.critique(template, seen, _chance(seed, "critique")))
    if found is None:
        raise Recoverable(
            f"{critic.max_asks} answers of the critic {critic.model!r} were empty; "
            "expected a list of faults: look at what it does with a long prompt, or name another as critic.model"
        )
    return Critique(text=objects.put_bytes(found.encode()))


async def rewrite(
    objects: ObjectStore, prompt: AgentPrompt, critique: Critique, critic: CriticConfig, seed: int
) -> Rewriting:
    """What the editor makes of a template by a critique."""
    template, notes = template_of(objects, prompt), objects.get_bytes(critique.text).decode()
    found = await _with_writer(critic, lambda writer: writer.edit(template, notes, _chance(seed, "edit")))
    if found is None:
        return Rewriting(text=prompt.text, is_usable=False)
    return Rewriting(text=objects.put_bytes(found.template.encode()), is_usable=True)


async def set_latest(open_store: OpenStore, objects: ObjectStore, prompt: AgentPrompt) -> None:
    """Make a template the store's latest one of its name, unless it is."""
    template = template_of(objects, prompt)
    async with open_store() as store:
        latest = await store.get_latest_resources()
        if latest is None or latest.resources.get(prompt.name) != template:
            await store.add_resources({**(latest.resources if latest else {}), prompt.name: template})


async def _with_writer(config: CriticConfig, write: Callable[[PromptWriter], Awaitable[T]]) -> T:
    """What ``write`` gives. Raises ConfigError for calls that the endpoint refuses; the key is in no message."""
    key = None if config.api_key is None else require_secret(config.api_key)
    client = AsyncOpenAI(base_url=config.url, api_key=key or "none", max_retries=0, timeout=config.timeout_seconds)

    def hidden(error: Exception) -> str:
        return in_words(error) if key is None else Redaction(key).hide(in_words(error))

    try:
        async with client:
            editor = config.editor or config.model
            return await write(
                PromptWriter(client, config.model, editor, config.temperature, config.max_asks, "critic")
            )
    except Recoverable as error:
        raise Recoverable(hidden(error)) from None
    except openai.APIError as error:
        raise ConfigError(f"{config.url} refuses the call: {hidden(error)}; look at [critic]") from None


def _chance(seed: int, what: str) -> random.Random:
    return random.Random(content_id("prompt-seeds/1", [seed, what]))
