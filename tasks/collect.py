"""The stage between rollouts and learners: what agents did, or what happened in episodes, becomes token samples."""

from __future__ import annotations

from typing import Literal

from rollout_core.agents.adapters.calls import POLICY
from rollout_core.agents.adapters.ended import ended_rollouts
from rollout_core.agents.adapters.span_samples import adapt_ended
from rollout_core.agents.adapters.token_sequences import SampleForm
from rollout_core.base.stopping import run_async
from rollout_core.inference.training_samples import Adapted, Failed, file_experience
from rollout_core.objects.records import AgentRollouts, Experience
from tasks.runtime import artifacts, connections
from tasks.runtime.stage import current_stage, stage


@stage(version=3, optional=("credit",))
def collect_samples(
    rollouts: AgentRollouts,
    *,
    failed: Failed = "stop",
    group_size: int = 1,
    form: SampleForm = "transition",
    served: str | None = POLICY,
    credit: Literal["turn"] | None = None,
    label: str = "",
) -> Experience:
    """Token-level samples and rewards of rollouts, from the spans they ended with, for `ppo_update` and `grpo_update`:
    one for each turn of an agent, or with ``form = "trajectory"`` one for turns that continue each other. With
    ``served`` only calls count that asked for the model of this name. With ``credit = "turn"`` samples of episodes keep
    what each turn earned. What cannot be learnt from is counted in the
    result, or with ``failed = "stop"`` an error."""
    objects = current_stage().objects

    async def adapt() -> Adapted:
        ended = ended_rollouts(objects, rollouts)
        async with connections.open_store() as store:
            return await adapt_ended(store, objects, ended, form=form, model=served, by_turn=credit == "turn")

    adapted = run_async(adapt())
    experience = file_experience(objects, adapted, failed=failed, group_size=group_size)
    figures = {
        "samples": experience.num_samples,
        "turns, merged or not": adapted.num_turns,
        "truncated": experience.num_truncated,
        "mean reward": experience.mean,
        **{f"left out: {reason}": count for reason, count in experience.left_out.items()},
    }
    artifacts.figures("experience", figures, f"Samples of stored rollouts {label}")
    return experience
