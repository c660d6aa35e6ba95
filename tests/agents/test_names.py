"""The names that programs written for Agent-lightning import are here, under the same names."""

from __future__ import annotations

import importlib.util
from typing import get_type_hints

import pytest

import rollout_core.agents
import rollout_core.store
from rollout_core.agents import AgentOpsTracer, Dataset
from rollout_core.base.errors import ConfigError
from rollout_core.store import semconv

# Of the source documents: the bird's eye view, "Understanding Store", and the agents' part of the API reference.
AGENTS = """
with_store with_llm_proxy make_tag_attributes make_link_attributes query_linked_spans extract_tags_from_attributes
extract_links_from_attributes
Adapter Algorithm AgentOpsTracer APO Baseline ClientServerExecutionStrategy Dataset DummyTracer ExecutionStrategy
FastAlgorithm FunctionalLitAgent GRPO Hook LLMProxy LitAgent LitAgentRunner LlmProxyTraceToTriplet OnlineLearning
OtelTracer PPO Runner SharedMemoryExecutionStrategy TraceAdapter TraceToMessages TraceTree Tracer TracerTraceToTriplet
Trainer Triplet algo emit_annotation emit_exception emit_message emit_object emit_reward find_final_reward
find_reward_spans get_message_value get_object_value get_reward_value get_rewards_from_span is_reward_span llm_rollout
operation prompt_rollout rollout
""".split()  # noqa: SIM905 - a line for each name hides what belongs together
STORE = """
Attempt AttemptedRollout InMemoryLightningStore LLM LightningStore LightningStoreCapabilities LightningStoreClient
LightningStoreServer LightningStoreThreaded NamedResources PromptTemplate ProxyLLM Resource ResourcesUpdate Rollout
RolloutConfig Span SqlLightningStore TaskInput Worker
""".split()  # noqa: SIM905 - as above


@pytest.mark.parametrize("name", AGENTS)
def test_names_of_agents_are_in_rollout_core_agents(name):
    assert getattr(rollout_core.agents, name) is not None


@pytest.mark.parametrize("name", STORE)
def test_names_of_the_store_are_in_rollout_core_store(name):
    assert getattr(rollout_core.store, name) is not None


def test_models_of_rewards_and_links_are_in_semconv():
    assert semconv.RewardPydanticModel(name="a", value=1).value == 1.0
    assert semconv.LinkPydanticModel(key_match="span_id", value_match="b").key_match == "span_id"


def test_a_dataset_may_say_what_its_tasks_are():
    def run(tasks: Dataset[dict[str, str]]) -> str:
        return tasks[0]["question"]

    assert get_type_hints(run)["tasks"] == Dataset[dict[str, str]]
    assert run([{"question": "?"}]) == "?"


@pytest.mark.skipif(importlib.util.find_spec("agentops") is not None, reason="agentops is installed")
def test_a_tracer_whose_package_is_missing_says_so():
    with pytest.raises(ConfigError, match=r"rollout-post-training\[agentops\]"):
        AgentOpsTracer().init()
