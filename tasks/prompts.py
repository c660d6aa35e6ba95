"""The stages of tuning a prompt: templates are filed, criticized by what agents did with them, rewritten, published."""

from __future__ import annotations

from rollout_core.agents import prompt_writing
from rollout_core.agents.apo import read_source
from rollout_core.agents.prompt_writing import Critique, Rewriting
from rollout_core.base.stopping import run_async
from rollout_core.config import CriticConfig, TemplateSource
from rollout_core.objects.origins import record_import, source_of_files
from rollout_core.objects.records import AgentPrompt, AgentRollouts, Record
from tasks.runtime import artifacts, connections
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, stage


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
    store, objects = connections.open_store, current_stage().objects
    return run_async(prompt_writing.criticize(store, objects, prompt, rollouts, critic, seed))


@stage(version=1, time="generating")
def edit_prompt(
    prompt: AgentPrompt, critique: Critique, critic: CriticConfig, *, seed: int, label: str = ""
) -> Rewriting:
    """Have the editor rewrite a template by a critique."""
    found = run_async(prompt_writing.rewrite(current_stage().objects, prompt, critique, critic, seed))
    if not found.is_usable:
        stage_logger().warning("no usable rewriting in %d answers of the editor", critic.max_asks)
    return found


@stage(version=1, cached=False)
def promote_prompt(
    prompt: AgentPrompt, before: AgentRollouts, after: AgentRollouts, *, enabled: bool = True
) -> PromptPromotion:
    """Make a template the store's latest one if it earns more than the one before."""
    reason = f"held-out reward {before.mean_reward:.4f} -> {after.mean_reward:.4f}"
    reason = reason if enabled else f"promotion is switched off; {reason}"
    promoted = enabled and after.mean_reward > before.mean_reward
    if promoted:
        run_async(prompt_writing.set_latest(connections.open_store, current_stage().objects, prompt))
    stage_logger().info("%s: %s", "promoted" if promoted else "not promoted", reason)
    row = {"template": prompt.text.short, "promoted": promoted, "reason": reason}
    artifacts.table("prompt-promotion", [row], "Promotion of the new template")
    return PromptPromotion(promoted=promoted, reason=reason)
