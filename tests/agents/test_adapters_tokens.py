"""Token samples of agents: exactly what was written, in as few sequences as can be, and learners that take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st

from rollout_core.agents.adapters.span_samples import adapt_rollouts
from rollout_core.agents.adapters.token_sequences import (
    NoLogprobs,
    SampleForm,
    TokenTrajectory,
    TokenTurn,
    token_turns,
    trajectories,
    transitions,
)
from rollout_core.algorithms.advantages import Groups, gae
from rollout_core.algorithms.experience import Trajectory, build_batch
from rollout_core.algorithms.on_policy import GRPO, assign_credit, compare_groups
from rollout_core.algorithms.on_policy_updates import grpo_update, load_trajectories, ppo_update
from rollout_core.algorithms.policy import Policy, zero_head
from rollout_core.base.errors import ConfigError
from rollout_core.config import GRPOSettings, JsonlDataset, OptimizerConfig, PPOSettings
from rollout_core.data.samples import decode_samples
from rollout_core.inference.training_samples import file_experience
from rollout_core.models.pretrained import load_causal_lm
from rollout_core.objects import ObjectStore
from rollout_core.store import InMemoryLightningStore, Span, TraceStatus
from rollout_core.store.semconv import AGL_ANNOTATION, LLM_CALL
from tests.algorithms.updates import update_context

CPU = torch.device("cpu")
COMMON: Any = {
    "prompts": JsonlDataset(path="x"),
    "optimizer": OptimizerConfig(lr=1e-3),
    "minibatch_size": 8,
    "gradient_accumulation": 1,
}


def turn(prompt: Sequence[int], response: Sequence[int], **more: Any) -> TokenTurn:
    return TokenTurn(list(prompt), list(response), [-0.1 * (token % 7 + 1) for token in response], **more)


def written(item: TokenTrajectory) -> list[tuple[list[int], list[int], list[float]]]:
    """Of each part: all tokens before it, those in it, and their log-probabilities."""
    ids, logprobs = list(item.token_ids), list(item.logprobs)
    return [(ids[: part.start], ids[part.start : part.stop], logprobs[part.start : part.stop]) for part in item.parts]


def test_turns_that_continue_each_other_are_one_sequence():
    one = turn([1, 2], [3, 4], model_id="w1", reward=0.5)
    two = turn([1, 2, 3, 4, 5], [6], model_id="w2", finish_reason="length")
    [made] = trajectories([one, two])
    assert made.token_ids == [1, 2, 3, 4, 5, 6]
    assert made.mask == [False, False, True, True, False, True]
    assert made.logprobs == [0.0, 0.0, *one.logprobs, 0.0, *two.logprobs]
    assert made.model_ids == ["w1", "w2"] and made.is_truncated
    assert [part.reward for part in made.parts] == [0.5, None]
    assert [item.token_ids for item in transitions([one, two])] == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]


def test_turns_that_do_not_stay_apart():
    rewritten = [turn([1, 2], [3, 4]), turn([1, 2, 4, 5], [6]), turn([1, 2, 3], [4])]
    assert [len(item.parts) for item in trajectories(rewritten)] == [1, 1, 1]
    # A retry from the first turn: the turn is trained where it went on first, and is a mere prompt for the other.
    branches = [turn([1], [2]), turn([1, 2, 3], [4]), turn([1, 2, 5], [6])]
    assert [item.token_ids for item in trajectories(branches)] == [[1, 2, 3, 4], [1, 2, 5, 6]]
    # Two agents take turns, and of two equal beginnings each is continued once.
    two = [turn([1], [2]), turn([7], [8]), turn([1], [2]), turn([7, 8, 9], [1]), turn([1, 2], [3]), turn([1, 2], [4])]
    assert [item.token_ids for item in trajectories(two)] == [[1, 2, 4], [7, 8, 9, 1], [1, 2, 3]]


conversations = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["continue", "repeat", "rewrite", "new"]),
        st.lists(st.integers(0, 2), max_size=3),
        st.lists(st.integers(0, 2), min_size=1, max_size=3),
    ),
    max_size=14,
)


@given(conversations)
@hypothesis_settings(max_examples=300, deadline=None)
def test_every_turn_is_in_one_trajectory_as_it_was(steps: list[tuple[int, str, list[int], list[int]]]):
    agents: dict[int, list[int]] = {}
    turns: list[TokenTurn] = []
    for number, (agent, how, given_ids, response) in enumerate(steps):
        before = agents.get(agent, [])
        prompt = {"continue": before + given_ids, "repeat": before, "rewrite": before[1:] + given_ids, "new": given_ids}
        turns.append(turn(prompt[how] or [9], response, model_id=str(number)))
        agents[agent] = [*turns[-1].prompt_ids, *response]
    made = trajectories(turns)
    places = [[int(str(name)) for name in item.model_ids] for item in made]
    assert sorted(place for rest in places for place in rest) == list(range(len(turns))), "each once"
    assert all(rest == sorted(rest) for rest in places) and places == sorted(places), "the order is kept"
    for item, rest in zip(made, places, strict=True):
        for place, (before, ids, logprobs) in zip(rest, written(item), strict=True):
            assert before == turns[place].prompt_ids, "the model was given just this"
            assert ids == turns[place].response_ids and logprobs == turns[place].logprobs
        assert sum(item.mask) == sum(len(turns[place].response_ids) for place in rest)
        assert all(is_set or logprob == 0.0 for is_set, logprob in zip(item.mask, item.logprobs, strict=True))
    for number, (first, *_) in enumerate(places):
        for item, rest in zip(made[:number], places, strict=False):
            begins_with_it = turns[first].prompt_ids[: len(item.token_ids)] == item.token_ids
            assert not (rest[-1] < first and begins_with_it), "it could have continued that one"
    assert [item.token_ids for item in transitions(turns)] == [[*t.prompt_ids, *t.response_ids] for t in turns]


def test_a_thousand_turns_of_one_conversation_beside_many_others_are_merged():
    turns, ids = [], [1]
    for number in range(1_000):
        turns.append(turn(ids, [number]))
        ids = [*ids, number, 2]
    turns += [turn([3, number], [4]) for number in range(2_000)]
    made = trajectories(turns)
    assert len(made) == 2_001 and len(made[0].parts) == 1_000


def test_turns_without_what_training_needs_are_refused():
    with pytest.raises(ConfigError, match="0 prompt tokens, 1 written ones; expected at least one of each"):
        turn([], [1])
    with pytest.raises(NoLogprobs, match="2 written ones and 1 log-probabilities"):
        TokenTurn([1], [2, 3], [-0.5])


# From spans


def llm_call(number: int, prompt: Sequence[int], *answers: Sequence[int], **more: Any) -> dict[str, Any]:
    """Attributes of a call as the proxy records it."""
    attributes: dict[str, Any] = {"gen_ai.response.id": f"r{number}", "rollout.prompt_token_ids": list(prompt)}
    attributes["rollout.model_id"] = "weights-1"
    for place, response in enumerate(answers):
        attributes[f"rollout.choices.{place}.token_ids"] = list(response)
        attributes[f"rollout.choices.{place}.logprobs"] = [-0.1 * (token % 7 + 1) for token in response]
        attributes[f"rollout.choices.{place}.finish_reason"] = "stop"
    return {**attributes, **more}


def reward(value: float) -> dict[str, Any]:
    return {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": value}


def spans_of(*parts: dict[str, Any], **ids: Any) -> list[Span]:
    return [
        Span.from_attributes(
            **ids,
            sequence_id=number,
            name=LLM_CALL if "rollout.prompt_token_ids" in attributes else AGL_ANNOTATION,
            attributes=attributes,
        )
        for number, attributes in enumerate(parts, start=1)
    ]


def test_turns_are_read_from_the_proxys_spans():
    spans = spans_of(
        llm_call(1, [1], [2], [3]), reward(0.5), llm_call(2, [1, 3, 4], [5], **{"rollout.model_id": "weights-2"})
    )
    failed = Span.from_attributes(
        name=LLM_CALL, sequence_id=2, attributes=llm_call(9, [1], [7]), status=TraceStatus(status_code="ERROR")
    )
    traced = Span.from_attributes(name="openai.chat", sequence_id=9, attributes={"gen_ai.response.id": "r1"})
    peers = {"gen_ai.response.id": "r2", "prompt_token_ids": [1], "response_token_ids": [2]}
    found = token_turns([*spans, failed, traced, Span.from_attributes(name="openai.chat", attributes=peers)])
    assert found == [
        turn([1], [2], model_id="weights-1", reward=0.5),
        turn([1], [3], model_id="weights-1", reward=0.5),
        turn([1, 3, 4], [5], model_id="weights-2"),
    ]
    assert [item.token_ids for item in trajectories(found)] == [[1, 2], [1, 3, 4, 5]]
    with pytest.raises(NoLogprobs):
        token_turns(spans_of(llm_call(1, [1], [2], **{"rollout.choices.0.logprobs": []})))
    assert token_turns([]) == []


def test_other_models_and_judges_are_not_trained():
    asked = [{"gen_ai.request.model": name} for name in ("policy", "critic", "policy")]
    calls = spans_of(*(llm_call(number, [number], [2], **more) for number, more in enumerate(asked, start=1)))
    assert len(token_turns(calls)) == 3
    assert [found.prompt_ids for found in token_turns(calls, model="policy")] == [[1], [3]]
    judge = {"agentlightning.operation.name": "agentlightning.reward"}
    traced = [
        Span.from_attributes(name="agentlightning.operation", span_id="aa", attributes=judge),
        Span.from_attributes(name="openai.chat", parent_id="aa", attributes={"gen_ai.response.id": "r3"}),
    ]
    assert [found.prompt_ids for found in token_turns([*calls, *traced])] == [[1], [2]]


async def stored(store: InMemoryLightningStore, task: Any, *parts: dict[str, Any]) -> str:
    rollout = await store.start_rollout(input=task)
    ids: dict[str, Any] = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    await store.add_many_spans(spans_of(*parts, **ids))
    await store.update_attempt(**ids, status="succeeded")
    return rollout.rollout_id


async def three_turns(store: InMemoryLightningStore, number: int, value: float) -> str:
    """A rollout of a task: two turns that continue each other, and one that starts anew."""
    return await stored(
        store,
        "task",
        llm_call(1, [5, 6], [10 + number, 20]),
        reward(0.25),
        llm_call(2, [5, 6, 10 + number, 20, 7], [30, 31, number]),
        llm_call(3, [8, 9], [40 + number]),
        reward(value),
    )


async def test_samples_of_both_forms_hold_the_same_tokens(tmp_path: Path):
    store, objects = InMemoryLightningStore(), ObjectStore.from_url(str(tmp_path / "objects"))
    rollout = await three_turns(store, 1, 1.0)
    [merged, alone] = (await adapt_rollouts(store, objects, [rollout], form="trajectory")).samples
    assert merged.prompt_token_ids == [5, 6] and merged.token_ids == [11, 20, 7, 30, 31, 1]
    assert merged.written == [(0, 2), (3, 6)] and alone.written is None
    assert merged.model_ids == ["weights-1", "weights-1"] and alone.model_ids == ["weights-1"]
    assert merged.part_rewards == [0.25, None] and alone.part_rewards == [1.0] and merged.reward == 1.0
    for form in ("trajectory", "transition"):
        assert (await adapt_rollouts(store, objects, [rollout], form=form)).num_turns == 3
    apart = (await adapt_rollouts(store, objects, [rollout])).samples
    assert [sample.token_ids for sample in apart] == [[11, 20], [30, 31, 1], [41]]
    assert [sample.prompt_token_ids for sample in apart] == [[5, 6], [5, 6, 11, 20, 7], [8, 9]]
    experience = file_experience(objects, await adapt_rollouts(store, objects, [rollout], form="trajectory"))
    [first, _] = decode_samples(objects.get_bytes(experience.samples))
    assert first.extras == {"model_ids": ["weights-1", "weights-1"], "part_rewards": [0.25, None]}
    [row, other] = map(json.loads, objects.get_bytes(experience.completions).splitlines())
    assert row["written"] == [[0, 2], [3, 6]] and "written" not in other
    [loaded, _] = load_trajectories(objects, experience.samples, experience.as_scores())
    batch = build_batch([loaded])
    assert batch.mask.tolist() == [[True, True, False, True, True, True]] and batch.num_actions == 5
    assert batch.columns["old_logprobs"][0].tolist() == pytest.approx(merged.logprobs)


def test_parts_outside_their_completion_are_refused():
    for parts in ([(0, 3)], [(1, 1)], [(1, 2), (0, 1)], [(-1, 1)], []):
        with pytest.raises(ConfigError, match="2 tokens has the written parts"):
            build_batch([Trajectory([1], [2, 3], [0.0, 0.0], 1.0, False, parts)])


# Learners


@pytest.mark.parametrize("correction", [False, True])
async def test_both_forms_give_grpo_one_gradient(tmp_path: Path, tiny_model: Path, correction: bool):
    """By token means, what a sequence of several turns is worth is the same as its turns are worth by themselves."""
    store, objects = InMemoryLightningStore(), ObjectStore.from_url(str(tmp_path / "objects"))
    ids = [await three_turns(store, number, float(number % 2)) for number in range(4)]
    found = {}
    for form in ("trajectory", "transition"):
        adapted = await adapt_rollouts(store, objects, ids, form=form)
        experience = file_experience(objects, adapted, group_size=4)
        options: Any = {"correction": {"mode": "truncate"}} if correction else {}
        settings = GRPOSettings(**COMMON | {"minibatch_size": 16}, samples_per_prompt=4, loss_type="dapo", **options)
        batch = build_batch(load_trajectories(objects, experience.samples, experience.as_scores()))
        groups = Groups(objects.get_json(experience.rollouts), 4)
        policy = Policy(load_causal_lm(tiny_model).eval())
        compared, figures = compare_groups(policy, None, batch, settings, device=CPU, groups=groups)
        algorithm = GRPO(policy, compared, settings, first_step=0, seed=0, device=CPU, groups=groups)
        [minibatch] = algorithm.minibatches(0)
        loss = algorithm.loss(minibatch, [minibatch]).loss
        loss.backward()
        gradient = torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None])
        found[form] = len(batch.mask), loss.detach(), gradient, figures["reward"], compared.num_tokens
    (few, one_loss, one, reward_a, tokens_a), (many, other_loss, other, reward_b, tokens_b) = found.values()
    assert (few, many) == (8, 12) and reward_a == reward_b and tokens_a < tokens_b
    assert one.abs().max() > 1e-4
    torch.testing.assert_close(one_loss, other_loss, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_ppo_credits_written_tokens_as_if_nothing_stood_between_them(tiny_model: Path):
    trained = load_causal_lm(tiny_model).eval()
    policy = Policy(trained, zero_head(trained))
    torch.nn.init.normal_(policy.values.weight)  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
    reference = Policy(load_causal_lm(tiny_model).eval())
    tokens, logprobs = [5, 9, 7, 7, 8, 6], [-1.0, -2.0, 0.0, 0.0, -0.5, -0.25]
    item = Trajectory([3, 4], tokens, logprobs, 2.0, False, [(0, 2), (4, 6)])
    settings = PPOSettings(**COMMON, whiten_advantages=False)
    batch = build_batch([item, Trajectory([3], [1, 2], [-1.0, -1.0], 0.0, False)])
    found, _, _ = assign_credit(policy, reference, batch, settings, kl_coef=0.0, device=CPU)
    at = torch.tensor([0, 1, 4, 5])
    values = found.columns["old_values"][:1, at]
    rewards = torch.tensor([[0.0, 0.0, 0.0, 2.0]])
    advantages, returns = gae(rewards, values, torch.ones(1, 4), gamma=settings.gamma, lam=settings.lam)
    assert values.abs().min() > 0
    torch.testing.assert_close(found.columns["advantages"][:1, at], advantages)
    torch.testing.assert_close(found.columns["returns"][:1, at], returns)
    assert found.columns["advantages"][0, 2:4].tolist() == [0.0, 0.0]
    assert found.columns["advantages"][1, 2:].abs().max() == 0


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
@pytest.mark.parametrize("form", ["trajectory", "transition"])
async def test_updates_train_on_either_form(tmp_path: Path, tiny_model: Path, kind: str, form: SampleForm):
    store, place = InMemoryLightningStore(), update_context(tmp_path)
    ids = [await three_turns(store, number, float(number % 2)) for number in range(4)]
    adapted = await adapt_rollouts(store, place.objects, ids, form=form)
    experience = file_experience(place.objects, adapted, group_size=4 if kind == "grpo" else 1)
    assert experience.num_samples == (8 if form == "trajectory" else 12)
    model = place.objects.put_tree(tiny_model)
    inputs = model, None, model, experience.as_scores(), experience.samples
    if kind == "ppo":
        checkpoint = ppo_update(*inputs, PPOSettings(**COMMON), place)
    else:
        checkpoint = grpo_update(*inputs, GRPOSettings(**COMMON, samples_per_prompt=4), place)
    assert checkpoint.model != model and checkpoint.summary["reward"] == 0.5
