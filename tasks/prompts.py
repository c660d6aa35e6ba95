"""The stages of tuning a prompt: templates are filed, criticized by what agents did with them, rewritten, published."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import openai
from openai import AsyncOpenAI

from rollout_core.agents.adapters.chat_messages import TraceToMessages
from rollout_core.agents.adapters.ended import as_they_were, ended_rollouts, read_rollouts
from rollout_core.agents.apo import Experience, PromptWriter, read_source
from rollout_core.agents.task_rollouts import template_of
from rollout_core.base.errors import ConfigError, Recoverable, in_words
from rollout_core.base.ids import content_id
from rollout_core.base.settings import Redaction, require_secret
from rollout_core.base.stopping import run_async
from rollout_core.config import CriticConfig, TemplateSource
from rollout_core.objects.origins import record_import, source_of_files
from rollout_core.objects.records import AgentPrompt, AgentRollouts, BlobId, Record
from tasks.runtime import artifacts, connections
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, stage

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


class PromptPromotion(Record):
    """Whether a template became the latest one."""

    promoted: bool
    reason: str


@stage(version=1, cached=False, imports=True, time="importing")
def import_prompt(source: TemplateSource) -> AgentPrompt:
    """File the template to begin with."""
    base, objects = connections.working_folder(), current_stage().objects
    template = read_source(source, base)
    text = objects.put_bytes(template.template.encode())
    if source.path is not None:
        path = base / source.path
        record_import(objects, text, source_of_files("template", source.path, [path], place=str(path.resolve())))
    return AgentPrompt(name=source.name, engine=source.engine, text=text)


@stage(version=1, time="generating")
def critique_prompt(
    prompt: AgentPrompt, rollouts: AgentRollouts, critic: CriticConfig, *, seed: int, label: str = ""
) -> Critique:
    """Have the critic read what agents did with a template, and what it earned."""
    objects = current_stage().objects
    template = template_of(objects, prompt)

    async def write(writer: PromptWriter) -> str | None:
        return await writer.critique(template, await _experiences(rollouts), _chance(seed, "critique"))

    critique = run_async(_with_writer(critic, write))
    if critique is None:
        raise Recoverable(
            f"{critic.max_asks} answers of the critic {critic.model!r} were empty; "
            "expected a list of faults: look at what it does with a long prompt, or name another as critic.model"
        )
    return Critique(text=objects.put_bytes(critique.encode()))


@stage(version=1, time="generating")
def edit_prompt(
    prompt: AgentPrompt, critique: Critique, critic: CriticConfig, *, seed: int, label: str = ""
) -> Rewriting:
    """Have the editor rewrite a template by a critique."""
    objects = current_stage().objects
    template, notes = template_of(objects, prompt), objects.get_bytes(critique.text).decode()
    found = run_async(_with_writer(critic, lambda writer: writer.edit(template, notes, _chance(seed, "edit"))))
    if found is None:
        stage_logger().warning("no usable rewriting in %d answers of the editor", critic.max_asks)
        return Rewriting(text=prompt.text, is_usable=False)
    return Rewriting(text=objects.put_bytes(found.template.encode()), is_usable=True)


@stage(version=1, cached=False)
def promote_prompt(
    prompt: AgentPrompt, before: AgentRollouts, after: AgentRollouts, *, enabled: bool = True
) -> PromptPromotion:
    """Make a template the store's latest one if it earns more than the one before."""
    reason = f"held-out reward {before.mean_reward:.4f} -> {after.mean_reward:.4f}"
    promoted = enabled and after.mean_reward > before.mean_reward
    if promoted:
        run_async(_set_latest(prompt))
    elif not enabled:
        reason = f"promotion is switched off; {reason}"
    stage_logger().info("%s: %s", "promoted" if promoted else "not promoted", reason)
    row = {"template": prompt.text.short, "promoted": promoted, "reason": reason}
    artifacts.table("prompt-promotion", [row], "Promotion of the new template")
    return PromptPromotion(promoted=promoted, reason=reason)


async def _set_latest(prompt: AgentPrompt) -> None:
    template = template_of(current_stage().objects, prompt)
    async with connections.open_store() as store:
        latest = await store.get_latest_resources()
        if latest is None or latest.resources.get(prompt.name) != template:
            await store.add_resources({**(latest.resources if latest else {}), prompt.name: template})


async def _experiences(rollouts: AgentRollouts) -> list[Experience]:
    """What agents did in these rollouts, by the spans that they ended with."""
    adapter = TraceToMessages()
    ended = {row.rollout_id: row for row in ended_rollouts(current_stage().objects, rollouts)}
    async with connections.open_store() as store:
        return [
            Experience(ended[name].reward, ended[name].status, adapter.adapt(as_they_were(ended[name], spans)))
            async for name, _, spans in read_rollouts(store, list(ended))
        ]


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
