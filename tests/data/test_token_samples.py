"""Stored spans become token-level samples, and PPO and GRPO train on them; what is missing is counted by reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_core.agents.adapters.span_samples import adapt_rollouts
from rollout_core.algorithms.advantages import Groups
from rollout_core.algorithms.experience import build_batch
from rollout_core.algorithms.on_policy import compare_groups
from rollout_core.algorithms.on_policy_updates import grpo_update, load_groups, load_trajectories, ppo_update
from rollout_core.algorithms.policy import Policy
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.config import GRPOSettings, JsonlDataset, OptimizerConfig, PPOSettings
from rollout_core.data.samples import Completion, Sample, encode_completion, encode_samples
from rollout_core.inference.ledger import Answer, SampleLedger
from rollout_core.inference.training_samples import TokenSample, file_experience
from rollout_core.models.pretrained import load_causal_lm
from rollout_core.objects import ObjectStore
from rollout_core.store import InMemoryLightningStore, Span
from rollout_core.store.semconv import AGL_ANNOTATION, AGL_REWARD
from tests.algorithms.updates import update_context

COMMON: Any = {
    "prompts": JsonlDataset(path="x"),
    "optimizer": OptimizerConfig(lr=1e-3),
    "minibatch_size": 2,
    "gradient_accumulation": 1,
}


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(str(tmp_path / "objects"))


@pytest.fixture
def store() -> InMemoryLightningStore:
    return InMemoryLightningStore()


def llm_call(prompt: Sequence[int], response: Sequence[int], **changes: Any) -> dict[str, Any]:
    """Attributes of a span as tracers and the proxy write them."""
    logprobs = [{"token": "t", "logprob": -0.5} for _ in response]
    return {
        "prompt_token_ids": list(prompt),
        "response_token_ids": list(response),
        "logprobs.content": json.dumps(logprobs),
        "gen_ai.completion.0.finish_reason": "stop",
        **changes,
    }


def reward(value: float) -> dict[str, Any]:
    return {f"{AGL_REWARD}.0.name": "primary", f"{AGL_REWARD}.0.value": value}


async def run_rollout(
    store: Any, *spans: dict[str, Any], status: Any = "succeeded", task: Any = "task", first: str = ""
) -> str:
    """An attempt that wrote spans of these attributes, in order, and ended so. ``first`` is the first one's name."""
    rollout = await store.start_rollout(input=task)
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    for number, attributes in enumerate(spans, start=1):
        name = AGL_ANNOTATION if f"{AGL_REWARD}.0.value" in attributes else "openai.chat.completion"
        name = first if first and number == 1 else name
        await store.add_span(Span.from_attributes(**ids, sequence_id=number, name=name, attributes=attributes))
    if status:
        await store.update_attempt(**ids, status=status)
    return rollout.rollout_id


async def test_calls_of_agents_become_samples_with_the_rollouts_last_reward(
    store: InMemoryLightningStore, objects: ObjectStore
):
    one = await run_rollout(store, llm_call([1, 2], [3, 4]), reward(0.25), reward(1.0))
    two = await run_rollout(
        store,
        llm_call([1], [5], **{"gen_ai.completion.0.finish_reason": "length"}),
        llm_call([1, 5, 6], [7]),
        reward(-1.0),
    )
    adapted = await adapt_rollouts(store, objects, [two, one])
    assert adapted.left_out == {} and adapted.samples == [
        TokenSample(two, [1], [5], [-0.5], "length", -1.0, "task"),
        TokenSample(two, [1, 5, 6], [7], [-0.5], "stop", -1.0, "task"),
        TokenSample(one, [1, 2], [3, 4], [-0.5, -0.5], "stop", 1.0, "task"),
    ]


async def test_a_call_recorded_twice_counts_once_and_json_texts_are_read(
    store: InMemoryLightningStore, objects: ObjectStore
):
    call = llm_call([1], [2], **{"gen_ai.response.id": "r1"})
    texts = {**call, "prompt_token_ids": "[1]", "response_token_ids": "[[2]]", "logprobs.content": "[-0.5]"}
    rollout = await run_rollout(
        store, texts, call, reward(1.0), first="raw_gen_ai_request"
    )  # a proxy's, and a tracer's
    adapted = await adapt_rollouts(store, objects, [rollout])
    assert adapted.samples == [TokenSample(rollout, [1], [2], [-0.5], "stop", 1.0, "task")]


async def test_samples_of_batch_inference_come_back_as_the_engine_gave_them(
    store: InMemoryLightningStore, objects: ObjectStore
):
    samples = [Sample(hash_bytes(b"%d" % number), "text", [7, number], 0, None, {}) for number in range(3)]
    blob = objects.put_bytes(encode_samples(samples))
    ledger = SampleLedger(store, objects, worker_id="w", stale_after_seconds=1.0)
    await ledger.enqueue(samples, mode="train", source=blob)
    ids = [sample.id for sample in samples]
    claimed: dict = {}
    await ledger.claim(ids, await ledger.shard_status(ids, exclusive=True), claimed)
    made = [Completion(name, [1, 2], [-0.1, -0.2], "x", "length") for name in ids]
    await ledger.commit([Answer(claimed[ContentId(item.key)], encode_completion(item)) for item in made])
    for number, name in enumerate(ids[:2]):
        attempt = claimed[name].attempt_id
        attributes = reward(float(number))
        await store.add_span(
            Span.from_attributes(
                rollout_id=name, attempt_id=attempt, sequence_id=2, name=AGL_ANNOTATION, attributes=attributes
            )
        )
    adapted = await adapt_rollouts(store, objects, ids)
    assert adapted.left_out == {"no finite reward": [ids[2]]}
    [first, second] = adapted.samples
    assert first.prompt_token_ids == [7, 0] and second.reward == 1.0 and second.finish_reason == "length"
    assert first.task == second.task == "text", "the prompt, and not which of its samples"
    assert first.logprobs == pytest.approx([-0.1, -0.2])
    objects.delete(objects.put_bytes(b"".join(map(encode_completion, made))))
    assert (await adapt_rollouts(store, objects, ids[:2])).left_out == {"lost tokens": ids[:2]}


async def test_what_cannot_be_learnt_from_is_counted_by_reason(store: InMemoryLightningStore, objects: ObjectStore):
    call = llm_call([1], [2])
    rollouts = {
        "failed": await run_rollout(store, call, reward(1.0), status="failed"),
        "unfinished": await run_rollout(store, call, reward(1.0), status=None),
        "no finite reward": await run_rollout(store, call),
        "no tokens": await run_rollout(store, reward(1.0)),
        "no log-probabilities": await run_rollout(store, {**call, "logprobs.content": "[]"}, reward(1.0)),
        "unknown": "ro-none",
    }
    good = await run_rollout(store, call, reward(1.0))
    adapted = await adapt_rollouts(store, objects, [*rollouts.values(), good])
    assert adapted.left_out == {reason: [rollout] for reason, rollout in rollouts.items()}
    assert [sample.rollout_id for sample in adapted.samples] == [good]
    with pytest.raises(ConfigError, match=r"cannot be learnt from: 1 failed, 1 unfinished, .* \(such as ro-"):
        file_experience(objects, adapted)
    experience = file_experience(objects, adapted, failed="leave_out")
    assert experience.left_out == dict.fromkeys(rollouts, 1) and experience.num_samples == 1
    adapted.samples.clear()
    with pytest.raises(ConfigError, match="none of the rollouts can be learnt from: 1 failed"):
        file_experience(objects, adapted, failed="leave_out")


async def test_groups_are_whole_or_left_out(store: InMemoryLightningStore, objects: ObjectStore):
    ids = [
        await run_rollout(store, llm_call([prompt], [9]), reward(float(prompt)), task={"question": prompt})
        for prompt in (1, 2, 1, 2, 3)
    ]
    adapted = await adapt_rollouts(store, objects, ids)
    with pytest.raises(ConfigError, match=r"cannot be learnt from: 1 incomplete group; run them again"):
        file_experience(objects, adapted, group_size=2)
    experience = file_experience(objects, adapted, failed="leave_out", group_size=2)
    assert experience.left_out == {"incomplete group": 1}
    trajectories = load_trajectories(objects, experience.samples, experience.as_scores())
    assert [item.prompt_token_ids for item in trajectories] == [[1], [1], [2], [2]]
    assert [item.score for item in trajectories] == [1.0, 1.0, 2.0, 2.0]


def agent_turns(number: int, turns: int) -> list[dict[str, Any]]:
    """Calls of an agent whose later prompts hold its own earlier words."""
    prompt = [5, 6]
    calls = []
    for turn in range(turns):
        calls.append(llm_call(prompt, [10 + number, 20 + turn]))
        prompt = [*prompt, 10 + number, 20 + turn, 7]
    return calls


async def test_every_turn_of_the_rollouts_of_a_task_is_in_its_group(
    store: InMemoryLightningStore, objects: ObjectStore
):
    """Prompts of later turns differ from rollout to rollout, and equal prompts may belong to two tasks."""
    turns, tasks = (3, 1, 2, 2), ("a", "b", "a", "b")
    ids = [
        await run_rollout(store, *agent_turns(number, count), reward(float(number)), task={"task": task})
        for number, (count, task) in enumerate(zip(turns, tasks, strict=True))
    ]
    experience = file_experience(objects, await adapt_rollouts(store, objects, ids), group_size=2)
    assert experience.left_out == {} and experience.num_samples == sum(turns) and experience.group_size == 2
    rollouts = objects.get_json(experience.rollouts)
    assert rollouts == [0, 1, 0, 0, 1, 2, 3, 3], "equal first prompts stand side by side"
    assert objects.get_json(experience.scores) == [[0.0, 2.0, 1.0, 3.0][rollout] for rollout in rollouts]


async def test_all_turns_have_the_advantage_of_their_rollout_whatever_their_number(
    store: InMemoryLightningStore, tiny_model: Path, tmp_path: Path
):
    """The mean of a group is one over rollouts: rewards 0 and 2 with 3 and 1 turns have the mean 1."""
    place = update_context(tmp_path)
    ids = [
        await run_rollout(store, *agent_turns(number, turns), reward(value))
        for number, (turns, value) in enumerate(((3, 0.0), (1, 2.0)))
    ]
    experience = file_experience(place.objects, await adapt_rollouts(store, place.objects, ids), group_size=2)
    settings = GRPOSettings(**COMMON, samples_per_prompt=2, advantage_scaling="none")
    groups = load_groups(place.objects, experience.as_scores(), settings)
    batch = build_batch(load_trajectories(place.objects, experience.samples, experience.as_scores()))
    policy = Policy(load_causal_lm(tiny_model).eval())
    compared, figures = compare_groups(policy, None, batch, settings, device=torch.device("cpu"), groups=groups)
    assert compared.columns["advantages"][:, 0].tolist() == [-1.0, 1.0, -1.0, -1.0]
    assert figures["reward"] == 1.0 and figures["reward_std"] == pytest.approx(2**0.5)

    model = place.objects.put_tree(tiny_model)
    inputs = model, None, model, experience.as_scores(), experience.samples
    assert grpo_update(*inputs, settings, place).model != model
    with pytest.raises(ConfigError, match=r"collected in groups of 2, and samples_per_prompt is 4"):
        grpo_update(*inputs, GRPOSettings(**COMMON, samples_per_prompt=4), place)


def test_a_cut_turn_costs_its_whole_rollout_the_penalty_once():
    groups = Groups([0, 0, 1], 2)
    scores = torch.tensor([1.0, 0.75, 1.0])
    assert groups.of_rollouts(scores).tolist() == [0.75, 1.0]
    with pytest.raises(ConfigError, match="3 rollouts cannot be compared in groups of samples_per_prompt = 2"):
        Groups([0, 1, 2], 2)


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
async def test_ppo_and_grpo_train_on_what_a_store_holds(
    store: InMemoryLightningStore, tiny_model: Path, tmp_path: Path, kind: str
):
    ids = [
        await run_rollout(
            store,
            llm_call([5, 6 + number // 4], [10 + number, 20], **{"gen_ai.completion.0.finish_reason": "length"}),
            reward(float(number % 2)),
            task=number // 4,
        )
        for number in range(8)
    ]
    place = update_context(tmp_path)
    adapted = await adapt_rollouts(store, place.objects, ids)
    experience = file_experience(place.objects, adapted, group_size=4 if kind == "grpo" else 1)
    assert (experience.num_samples, experience.num_truncated, experience.mean) == (8, 8, 0.5)
    model = place.objects.put_tree(tiny_model)
    inputs = model, None, model, experience.as_scores(), experience.samples
    if kind == "ppo":
        checkpoint = ppo_update(*inputs, PPOSettings(**COMMON), place)
    else:
        checkpoint = grpo_update(*inputs, GRPOSettings(**COMMON, samples_per_prompt=4), place)
    assert checkpoint.model != model and checkpoint.summary["reward"] == 0.5
    assert checkpoint.summary["completions/clipped_ratio"] == 1.0
