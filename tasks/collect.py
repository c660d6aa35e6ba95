"""The stage that brings rollouts of the store to the learners, whoever ran them."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_core.base.stopping import run_async
from rollout_core.inference.token_samples import Adapted, Failed, adapt_rollouts, file_experience
from rollout_core.objects.records import Experience
from tasks import artifacts, connections
from tasks.stage import current_stage, stage


@stage(version=1, cached=False)
def collect_samples(
    rollout_ids: Sequence[str], *, failed: Failed = "stop", group_size: int = 1, label: str = ""
) -> Experience:
    """Token-level samples and rewards of rollouts, from the spans of their latest attempts, for `ppo_update` and
    `grpo_update`. What cannot be learnt from is counted in the result, or with ``failed = "stop"`` an error."""
    objects = current_stage().objects

    async def adapt() -> Adapted:
        async with connections.open_store() as store:
            return await adapt_rollouts(store, objects, rollout_ids)

    experience = file_experience(objects, run_async(adapt()), failed=failed, group_size=group_size)
    rows = [
        {"figure": "samples", "value": experience.num_samples},
        {"figure": "truncated", "value": experience.num_truncated},
        {"figure": "mean reward", "value": experience.mean},
        *({"figure": f"left out: {reason}", "value": count} for reason, count in experience.left_out.items()),
    ]
    artifacts.table("experience", rows, f"Samples of stored rollouts {label}".strip())
    return experience
