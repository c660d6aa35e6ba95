"""Prompts that get better: the search by itself, and with a trainer, rollouts and a scripted critic and editor."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from typing import Any

import pytest
from openai import AsyncOpenAI

from rollout_core.agents import apo as apo_module
from rollout_core.agents.apo import (
    APO,
    Beam,
    Candidate,
    Experience,
    MalformedAnswer,
    PromptWriter,
    critic_messages,
    different,
    editor_messages,
    keep_best,
    placeholders,
    read_template,
)
from rollout_core.agents.execution import SharedMemoryExecutionStrategy
from rollout_core.agents.lit_agent import prompt_rollout
from rollout_core.agents.otel import OtelTracer
from rollout_core.agents.runner import LitAgentRunner
from rollout_core.agents.trainer import Trainer
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.store import InMemoryLightningStore, NamedResources, PromptTemplate
from rollout_core.store.lifecycle import FINISHED
from tests.agents.scripted_chat import completion, scripted_chat

SEED = PromptTemplate(template="Do {task}.", engine="f-string")
TASKS = [f"task {number}" for number in range(6)]
HELD_OUT = [f"held out {number}" for number in range(5)]


@prompt_rollout
def polite(task, prompt_template):
    """Rewarded for each "please", up to four."""
    return min(4, prompt_template.format(task=task).count("please")) / 4


class Endpoint:
    """Critic and editor: the editor adds a "please" or takes one away, now and then badly."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.mishaps: list[dict | int] = []

    def __call__(self, request: dict) -> dict | int:
        self.requests.append(request)
        number = len(self.requests)
        if self.mishaps:
            return self.mishaps.pop(0)
        if request["model"] == "critic":
            return completion(number, {"content": "It is not polite enough."})
        template = re.findall(r"<template>\n(.*?)\n</template>", request["messages"][1]["content"], re.DOTALL)[-1]
        better = f"{template} please" if request["seed"] % 5 else template.replace(" please", "", 1) + " now"
        return completion(number, {"content": f"Here it is:\n<template>\n{better}\n</template>"})


def optimize(url: str, store=None, *, agent=polite, seed_template=SEED, **changes) -> APO:
    settings = {"gradient_batch_size": 2, "val_batch_size": 3, "beam_width": 2, "branch_factor": 2, "beam_rounds": 3}
    client = AsyncOpenAI(base_url=url, api_key="k", max_retries=0)
    apo = APO(client, gradient_model="critic", apply_edit_model="editor", **{**settings, **changes})
    Trainer(
        algorithm=apo,
        store=store or InMemoryLightningStore(),
        initial_resources={"prompt": seed_template},
        strategy=SharedMemoryExecutionStrategy(4, join_timeout=1.0, graceful_delay=1.0),
        runner={"type": LitAgentRunner, "poll_interval": 0.02, "heartbeat_interval": 0},
        tracer=OtelTracer(instrument=[]),
    ).fit(agent, TASKS, val_dataset=HELD_OUT)
    return apo


def test_a_template_gets_better_round_by_round(caplog):
    endpoint, store = Endpoint(), InMemoryLightningStore()
    with caplog.at_level(logging.INFO), scripted_chat(endpoint) as url:
        apo = optimize(url, store)
    best = apo.get_best_prompt()
    assert best.template.count("please") == 3 and best.engine == "f-string" and "{task}" in best.template
    scores = [entry.best.score for entry in apo.history]
    assert scores == sorted(scores) and scores[0] == 0.0 and scores[-1] == 0.75
    assert [entry.number for entry in apo.history] == [0, 1, 2, 3] and len(apo.history[-1].beam) == 2
    assert Counter(request["model"] for request in endpoint.requests) == {"critic": 12, "editor": 12}
    assert "not polite" in endpoint.requests[-1]["messages"][1]["content"]
    assert "please" not in caplog.text and "Do {task}" not in caplog.text, "the log has no prompts"
    latest = asyncio.run(store.get_latest_resources())
    assert latest is not None and latest.resources == {"prompt": best}


def test_started_again_it_makes_the_same_choices_and_runs_nothing_twice():
    endpoint, store = Endpoint(), InMemoryLightningStore()
    with scripted_chat(endpoint) as url:
        first = optimize(url, store)
        asked = [(request["model"], request["messages"], request["seed"]) for request in endpoint.requests]
        rollouts = {item.rollout_id: item.end_time for item in asyncio.run(store.query_rollouts())}
        endpoint.requests.clear()
        second = optimize(url, store)
    again = [(request["model"], request["messages"], request["seed"]) for request in endpoint.requests]
    assert sorted(map(repr, again)) == sorted(map(repr, asked))
    assert first.history == second.history
    assert {item.rollout_id: item.end_time for item in asyncio.run(store.query_rollouts())} == rollouts


def test_bad_answers_are_asked_again_and_failing_calls_retried():
    endpoint = Endpoint()
    endpoint.mishaps = [
        503,
        completion(1, {"content": " "}),  # no critique
        completion(2, {"content": "More please."}),
        completion(3, {"content": "<template>Do it please</template>"}),  # lost the task
        completion(4, {"content": "no template"}),
    ]
    with scripted_chat(endpoint) as url:
        apo = optimize(url, beam_width=1, branch_factor=1, beam_rounds=1, run_initial_validation=False, seed=1)
    models = [request["model"] for request in endpoint.requests]
    assert models == ["critic"] * 3 + ["editor"] * 3
    assert "exactly ['task']" in endpoint.requests[-1]["messages"][3]["content"]
    assert "0 templates" in endpoint.requests[-1]["messages"][5]["content"]
    assert apo.history[0].number == 1 and "{task}" in apo.get_best_prompt().template


@pytest.mark.parametrize(
    "mishap",
    [
        408,
        425,
        429,
        502,
        "<html>try later</html>",
        '{"choices": [',
        "[]",
        '{"error": {"message": "busy"}}',
        '{"choices": [{}]}',
    ],
)
def test_what_a_gateway_says_on_a_bad_day_is_asked_again(mishap, monkeypatch):
    monkeypatch.setattr(apo_module, "_FIRST_WAIT_SECONDS", 0.01)
    said = [mishap, completion(1, {"content": "Be polite."})]

    async def ask(said: list[Any], max_asks: int = 2) -> str:
        with scripted_chat(lambda request: said.pop(0)) as url:
            async with AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
                writer = PromptWriter(client, "critic", "editor", 0.0, max_asks, "apo")
                return await writer.ask("critic", [{"role": "user", "content": "well?"}], 1)

    assert asyncio.run(ask(said)) == "Be polite." and not said
    with pytest.raises(Recoverable, match="critic did not answer in 2 calls"):
        asyncio.run(ask([mishap] * 2))


@pytest.mark.parametrize(
    "choices", [[], [{"index": 0, "finish_reason": "content_filter", "message": {"content": None}}]]
)
def test_an_endpoint_that_answers_nothing_loses_one_rewriting_and_not_the_search(choices):
    with scripted_chat(lambda request: {**completion(1, {}), "choices": choices}) as url:
        apo = optimize(url, beam_rounds=1)
    assert apo.get_best_prompt() == SEED


def test_without_one_usable_answer_the_seed_stays():
    with scripted_chat(lambda request: completion(1, {"content": "Make it {shorter}"})) as url:
        apo = optimize(url, beam_rounds=1)
    assert apo.get_best_prompt() == SEED


def test_an_endpoint_that_is_away_ends_the_run_and_a_wrong_call_at_once():
    with (
        scripted_chat(lambda request: 500) as url,
        pytest.raises(Recoverable, match="critic did not answer in 2 calls"),
    ):
        optimize(url, max_asks=2)
    endpoint = Endpoint()
    endpoint.mishaps = [401] * 99
    with scripted_chat(endpoint) as url, pytest.raises(Exception, match="401"):
        optimize(url, beam_width=1, branch_factor=1)
    assert len(endpoint.requests) == 1


def test_rollouts_that_fail_count_as_missing_and_late_ones_are_cancelled(monkeypatch):
    wait = apo_module.wait_until_finished

    async def once_the_others_have_ended(store, ids, timeout):
        """So that they are not late, however busy the machine is."""
        found = []
        while not all(item.status in FINISHED or item.input == HELD_OUT[1] for item in found) or not found:
            await asyncio.sleep(0.02)
            found = await store.query_rollouts(rollout_id_in=ids)
        return await wait(store, ids, timeout)

    monkeypatch.setattr(apo_module, "wait_until_finished", once_the_others_have_ended)

    @prompt_rollout
    async def slow(task, prompt_template):
        if task == HELD_OUT[0]:
            raise ValueError("no")
        if task == HELD_OUT[1]:
            await asyncio.Event().wait()
        return 1.0

    store = InMemoryLightningStore()
    with scripted_chat(Endpoint()) as url:
        apo = optimize(
            url,
            store,
            agent=slow,
            beam_width=1,
            branch_factor=1,
            beam_rounds=1,
            rollout_batch_timeout=0.5,
            missing_reward=-1.0,
        )
    assert apo.history[0].best.score == pytest.approx((3 - 2) / 5)
    rollouts = asyncio.run(store.query_rollouts())
    statuses = Counter(item.status for item in rollouts if item.input in HELD_OUT[:2])
    assert set(statuses) == {"failed", "cancelled"}
    assert {(item.config.timeout_seconds, item.config.max_attempts) for item in rollouts} == {(600.0, 3)}
    tried = [item.attempt.sequence_id for item in rollouts if item.input == HELD_OUT[0]]  # type: ignore[union-attr]
    assert set(tried) == {3}, "what fails is tried again"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("nothing", "0 templates"),
        ("<template></template>", "1 templates"),
        ("<template>{task}</template><template>{task}</template>", "2 templates"),
        ("<template>no place</template>", "exactly"),
        ("<template>{task} {other}</template>", "cannot be used"),
        ("<template>{task.__class__}</template>", "cannot be used"),
        ("<template>{task</template>", "cannot be used"),
        ("<template>{task:>1000000000}</template>", "cannot be used"),
        ("<template>{task[0]}</template>", "cannot be used"),
    ],
)
def test_answers_that_are_no_template_are_refused(answer, reason):
    with pytest.raises(MalformedAnswer, match=reason):
        read_template(answer, SEED)


def test_templates_of_both_engines_keep_their_placeholders():
    assert read_template("x <template>\nBe {{kind}}: {task}\n</template>", SEED).template == "Be {{kind}}: {task}"
    jinja = PromptTemplate(template="{% for item in items %}{{ item }}{% endfor %} {{ task }}", engine="jinja")
    assert placeholders(jinja) == {"items", "task"}
    found = read_template("<template>{{ task }}: {{ items }}</template>", jinja)
    assert found.engine == "jinja" and found.format(task="a", items=[1]) == "a: [1]"
    for bomb in ("{% for i in range(10**9) %}{{ task }}{{ items }}{% endfor %}", "{{ task * 10 }}{{ items }}"):
        with pytest.raises(MalformedAnswer, match="cannot be used"):
            read_template(f"<template>{bomb}</template>", jinja)
    with pytest.raises(ConfigError, match="poml"):
        placeholders(PromptTemplate(template="<p/>", engine="poml"))


def test_the_search_by_itself():
    one, two, twin = (
        Candidate(number, SEED.model_copy(update={"template": text}), score=score)
        for number, text, score in ((0, "a", 0.5), (1, "b", 0.5), (2, "b", 0.9))
    )
    assert keep_best([twin, two, one], 1) == [one], "of equal scores the older, of equal templates the oldest"
    assert different([twin, two, one]) == [two, one]
    beam = Beam(SEED, 2, 2)
    assert [item.number for item in beam.parents()] == [0] * 4
    children = beam.children([two.template, None, None, one.template])
    assert [(item.number, item.parent) for item in children] == [(1, 0), (2, 0)]
    beam.keep([one, two, twin])
    assert beam.best == one and [item.number for item in beam.parents()] == [0, 0, 1, 1]
    messages = critic_messages(SEED, [Experience(0.25, "succeeded"), Experience(None, "failed")])
    assert "Do {task}." in messages[1]["content"] and "failed, reward none" in messages[1]["content"]
    assert "Its placeholders: task" in editor_messages(SEED, "Shorter.")[1]["content"]


def test_what_cannot_be_meant_is_refused():
    client = AsyncOpenAI(api_key="k", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="beam_width is 0"):
        APO(client, beam_width=0)
    with pytest.raises(ConfigError, match="max_attempts 0"):
        APO(client, max_attempts=0)
    with pytest.raises(ConfigError, match="no template has been evaluated"):
        APO(client).get_best_prompt()
    two: NamedResources = {"a": SEED, "b": SEED}
    for resources in (None, two):
        apo = APO(client)
        apo.set_initial_resources(resources)
        with pytest.raises(ConfigError, match="prompt templates"):
            apo.get_seed_prompt_template()
