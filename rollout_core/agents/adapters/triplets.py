"""Adapters from spans to triplets of prompt, response and reward, one for each LLM call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan

from rollout_core.agents.adapters.adapter import TraceAdapter, Triplet, as_spans
from rollout_core.agents.adapters.calls import (
    PROXY_SPANS,
    CallNames,
    choices_of,
    has_tokens,
    model_id,
    prompt_token_ids,
    response_id,
)
from rollout_core.agents.adapters.chat import completion_content, image_urls, prompt_content
from rollout_core.agents.adapters.credit import RewardMatchPolicy, rewards_by_number, rewards_in_tree
from rollout_core.agents.adapters.tree import TraceTree
from rollout_core.agents.attributes import nested
from rollout_core.base.errors import ConfigError
from rollout_core.store import Span

LLM_CALL_MATCH = r"openai\.(chat|completion|response)|chat_model\.llm|rollout\.llm_call"
"""Names of LLM calls' spans: those of OpenTelemetry's and AgentOps' instrumentations of ``openai`` and LangChain, and
of our proxy."""


class TracerTraceToTriplet(TraceAdapter[list[Triplet]]):
    """Triplets of the LLM calls that a tracer saw, each before those that it led to, in the order they began.

    A call that our proxy recorded too is one triplet, with the token ids and log-probabilities of the proxy's span. A
    trace without LLM calls has no triplets.

    Args:
        repair_hierarchy: put spans that float at the top under the tightest span around them in time.
        llm_call_match: regular expression that finds names of LLM calls' spans.
        agent_match: regular expression that finds names of the agents whose calls are wanted; None: all calls.
        exclude_llm_call_in_reward: leave out calls inside reward spans, which are those of a judge.
        reward_match: see ``RewardMatchPolicy``. Only the primary dimension of a reward counts; calls without any have
            the reward None.
        _skip_empty_token_spans: leave out calls without token ids.

    Raises ConfigError for a malformed expression or an unknown policy.
    """

    def __init__(
        self,
        repair_hierarchy: bool = True,
        llm_call_match: str = LLM_CALL_MATCH,
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        reward_match: RewardMatchPolicy | str = RewardMatchPolicy.FIRST_OCCURRENCE,
        _skip_empty_token_spans: bool = False,
    ) -> None:
        _check_expression("llm_call_match", llm_call_match)
        _check_expression("agent_match", agent_match)
        self.repair_hierarchy = repair_hierarchy
        self.llm_call_match = llm_call_match
        self.agent_match = agent_match
        self.exclude_llm_call_in_reward = exclude_llm_call_in_reward
        self.reward_match = RewardMatchPolicy(reward_match)
        self._skip_empty_token_spans = _skip_empty_token_spans

    def adapt(self, source: Sequence[Span | ReadableSpan], /) -> list[Triplet]:
        """Triplets of the spans of one attempt."""
        source = as_spans(source)
        names = CallNames(source)
        spans, records = _without_proxy_records(source, names, self.llm_call_match)
        if not spans:
            return []
        tree = self.tree(spans)
        calls, triplets = [], []
        found = tree.find_llm_calls(
            llm_call_match=self.llm_call_match,
            agent_match=self.agent_match,
            exclude_llm_call_in_reward=self.exclude_llm_call_in_reward,
            names=names,
        )
        for node, agent in found:
            record = records.get(names.of(node.span) or "", {})
            triplet = _triplet({**node.span.attributes, **record}, agent)
            is_empty = not triplet.prompt["token_ids"] or not triplet.response["token_ids"]
            if not (self._skip_empty_token_spans and is_empty):
                calls.append(node)
                triplets.append(triplet)
        rewards = rewards_in_tree(tree, calls, self.reward_match)
        return [triplet.model_copy(update={"reward": rewards.get(place)}) for place, triplet in enumerate(triplets)]

    def tree(self, source: Sequence[Span | ReadableSpan], /) -> TraceTree:
        """The tree that triplets are found in. Raises ConfigError if there are no spans."""
        tree = TraceTree.from_spans(as_spans(source))
        if self.repair_hierarchy:
            tree.repair_hierarchy(self.llm_call_match)
        return tree


class LlmProxyTraceToTriplet(TraceAdapter[list[Triplet]]):
    """Triplets of the LLM calls that a proxy recorded with token ids, by sequence id and then time.

    Times are not compared with others, as the proxy's clock need not be the agent's, but to give rewards to calls
    where one clock is known to have seen both; see ``credit.rewards_by_number``.
    """

    def adapt(self, source: Sequence[Span | ReadableSpan], /) -> list[Triplet]:
        """Triplets of the spans of one attempt."""
        spans = as_spans(source)
        calls = proxy_calls(spans)
        rewards = rewards_by_number(calls, spans)
        triplets = [_triplet(call.attributes, None) for call in calls]
        return [triplet.model_copy(update={"reward": rewards.get(place)}) for place, triplet in enumerate(triplets)]


def proxy_calls(spans: Sequence[Span]) -> list[Span]:
    """The calls that a proxy recorded with the ids of prompt and answer, each once, in order."""
    found: dict[str, Span] = {}
    names = CallNames(spans)
    for span in sorted(spans, key=lambda span: (span.sequence_id, span.start_time or 0.0)):
        if span.name in PROXY_SPANS and has_tokens(span):
            found.setdefault(names.any_of(span), span)
    return list(found.values())


def _without_proxy_records(
    spans: Sequence[Span], names: CallNames, llm_call_match: str
) -> tuple[list[Span], dict[str, dict[str, Any]]]:
    """Spans without those of a proxy whose call a tracer saw as well; and the attributes of these by name."""
    traced = {names.of(span) for span in spans if span.name not in PROXY_SPANS and re.search(llm_call_match, span.name)}
    kept, records = [], {}
    for span in spans:
        name = names.of(span)
        if span.name in PROXY_SPANS and name is not None and name in traced:
            records[name] = {**span.attributes, **records.get(name, {})}
        else:
            kept.append(span)
    return kept, records


def _triplet(attributes: Mapping[str, Any], agent: str | None) -> Triplet:
    choices = choices_of(attributes)
    first = choices[0] if choices else None
    content = prompt_content(attributes)
    response: dict[str, Any] = {
        "token_ids": first.token_ids if first else [],
        "raw_content": completion_content(attributes),
    }
    if first and first.logprobs:
        response["logprobs"] = [{"logprob": value} for value in first.logprobs]
    metadata = {
        "request": _described(attributes, "gen_ai.request", "agentlightning.operation.input", {"messages"}),
        "response": _described(attributes, "gen_ai.response", "agentlightning.operation.output", _IN_RESPONSE),
        "response_id": response_id(attributes),
        "agent_name": agent,
        "finish_reason": first.finish_reason if first else None,
        "model_id": model_id(attributes),
    }
    return Triplet(
        prompt={"token_ids": prompt_token_ids(attributes), "raw_content": content, "image_urls": image_urls(content)},
        response=response,
        metadata=metadata,
    )


_IN_RESPONSE = {"choices", "prompt_token_ids", "response_token_ids"}
"""What a triplet holds elsewhere."""


def _described(attributes: Mapping[str, Any], prefix: str, weave_prefix: str, but: set[str]) -> Any:
    found = nested(attributes, prefix)
    if found is None:
        found = nested(attributes, weave_prefix)
    return {key: value for key, value in found.items() if key not in but} if isinstance(found, dict) else found


def _check_expression(name: str, expression: str | None) -> None:
    try:
        re.compile(expression or "")
    except re.error as error:
        raise ConfigError(f"{name} is {expression!r}, which is no regular expression: {error}") from error
