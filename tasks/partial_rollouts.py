"""The stages of completions that go on from one iteration to the next."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from rollout_core.base.ids import ContentId
from rollout_core.config import SamplingParams
from rollout_core.data.partial_rollouts import decode_carried, encode_carried, join_parts, unfinished
from rollout_core.data.samples import decode_completions_blob, decode_samples, encode_samples
from rollout_core.data.text import decode_completions, text_tokens
from rollout_core.models.pretrained import load_tokenizer
from rollout_core.objects.records import Completions, PromptSet
from rollout_core.objects.retention.unstored import local_model
from tasks.runtime import artifacts, connections
from tasks.runtime.generation import enqueue
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, stage


class JoinedCompletions(Completions):
    """Completions of whole groups, each of which says which weights drew which of its tokens, and what is carried
    over. ``model`` is the weights that drew the last parts."""

    num_carried: int
    """Completions that go on."""
    num_groups_carried: int
    carried: Annotated[ContentId | None, "blob"] = None
    """Of groups that are not whole, see `rollout_core.data.partial_rollouts`."""

    def as_completions(self) -> Completions:
        """What is scored and learned from."""
        return Completions.model_validate(self.model_dump(include=set(Completions.model_fields)))


@stage(version=1, optional=("fresh",))
def continue_samples(
    carried: ContentId,
    model: ContentId,
    sampling: SamplingParams,
    *,
    fresh: PromptSet | None = None,
    label: str = "",
) -> PromptSet:
    """Samples of ``model`` that go on with the completions of ``carried``, enqueued, and behind them ``fresh`` ones."""
    objects = current_stage().objects
    waiting = unfinished(decode_carried(objects.get_bytes(carried)))
    samples = [partial.next_part(model, sampling) for partial in waiting]
    others = [] if fresh is None else decode_samples(objects.get_bytes(fresh.samples))
    blob = objects.put_bytes(encode_samples([*samples, *others]))
    enqueue(samples, source=blob, mode="train")
    stage_logger().info("%d completions go on with model %s, %d are new", len(waiting), model.short, len(others))
    return PromptSet(
        samples=blob,
        model=model,
        num_samples=len(samples) + len(others),
        num_prompt_tokens=sum(len(sample.prompt_token_ids) for sample in (*samples, *others)),
    )


@stage(version=1, optional=("carried",))
def join_completions(
    completions: Completions,
    sampling: SamplingParams,
    *,
    carried: ContentId | None,
    number: int,
    group_size: int,
    label: str = "",
) -> JoinedCompletions:
    """Add what iteration ``number`` drew to what was carried into it. Groups that are whole are learned from, the
    others are carried on. ``sampling`` is that of whole completions."""
    objects = current_stage().objects
    tokenizer = load_tokenizer(local_model(objects, completions.model, connections.cache_folder()))
    joined = join_parts(
        [] if carried is None else decode_carried(objects.get_bytes(carried)),
        decode_samples(objects.get_bytes(completions.samples)),
        decode_completions_blob(objects.get_bytes(completions.completions)),
        model=completions.model,
        number=number,
        group_size=group_size,
        max_tokens=sampling.max_tokens,
        decode=lambda prompts, ids: decode_completions(tokenizer, prompts, [text_tokens(one, sampling) for one in ids]),
    )
    going_on = len(unfinished(joined.carried))
    older = sum(len(partial.model_ids) > 1 for partial in joined.whole)
    rows = {
        "whole completions": len(joined.whole),
        "of them drawn by several weights": older,
        "completions that go on": going_on,
        "groups carried over": len(joined.carried) // group_size,
    }
    artifacts.table("partial-rollouts", [{"figure": name, "value": value} for name, value in rows.items()], label)
    stage_logger().info("%s: %s", label, ", ".join(f"{name} {value}" for name, value in rows.items()))
    return JoinedCompletions(
        completions=objects.put_bytes(joined.completions),
        samples=objects.put_bytes(joined.samples),
        model=completions.model,
        num_samples=len(joined.whole),
        num_tokens=sum(len(partial.token_ids) for partial in joined.whole),
        finish_reasons=dict(sorted(Counter(str(partial.finish_reason) for partial in joined.whole).items())),
        num_carried=going_on,
        num_groups_carried=len(joined.carried) // group_size,
        carried=objects.put_bytes(encode_carried(joined.carried)) if joined.carried else None,
    )
