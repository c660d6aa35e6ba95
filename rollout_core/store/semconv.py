"""Names that spans carry: span names, resource keys and attribute keys, as users of the store know them.

The names of a reward, link or tag list are prefixes: the first reward is ``agentlightning.reward.0.name`` and
``agentlightning.reward.0.value``; the reward of index 0 is the primary one.
"""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel

AGL_ANNOTATION = "agentlightning.annotation"
"""Span name: rewards, tags and metadata about an event or a part of the rollout."""
AGL_MESSAGE = "agentlightning.message"
"""Span name: a text emitted by the agent."""
AGL_OBJECT = "agentlightning.object"
"""Span name: a value emitted by the agent."""
AGL_EXCEPTION = "agentlightning.exception"
"""Span name: an exception, described by OpenTelemetry's ``exception.*`` attributes."""
AGL_OPERATION = "agentlightning.operation"
"""Span name: a function call or code block that was wrapped as an operation."""
AGL_REWARD = "agentlightning.reward"
"""Span name of rewards before annotations existed; still read."""
AGL_VIRTUAL = "agentlightning.virtual"
"""Span name: a node that stands for something without an operation of its own, such as a root."""


class LightningResourceAttributes(Enum):
    """Keys of a span's resource."""

    ROLLOUT_ID = "agentlightning.rollout_id"
    ATTEMPT_ID = "agentlightning.attempt_id"
    SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"
    TRACER_NAME = "agentlightning.tracer.name"


class LightningSpanAttributes(Enum):
    """Keys, or prefixes of keys, of a span's attributes."""

    REWARD = "agentlightning.reward"
    LINK = "agentlightning.link"
    TAG = "agentlightning.tag"
    MESSAGE_BODY = "agentlightning.message.body"
    OBJECT_TYPE = "agentlightning.object.type"
    OBJECT_LITERAL = "agentlightning.object.literal"
    OBJECT_JSON = "agentlightning.object.json"
    OPERATION_NAME = "agentlightning.operation.name"
    OPERATION_INPUT = "agentlightning.operation.input"
    OPERATION_OUTPUT = "agentlightning.operation.output"


class RewardAttributes(Enum):
    """Last parts of a reward's keys, after ``agentlightning.reward.<index>.``."""

    REWARD_NAME = "name"
    REWARD_VALUE = "value"


class LinkAttributes(Enum):
    """Last parts of a link's keys, after ``agentlightning.link.<index>.``.

    A link points to every span whose attribute named by the key has the value; the keys ``trace_id`` and ``span_id``
    mean the ids themselves.
    """

    KEY_MATCH = "key_match"
    VALUE_MATCH = "value_match"


class RewardPydanticModel(BaseModel):
    """One dimension of a reward, as attributes of a span have it."""

    name: str
    value: float


class LinkPydanticModel(BaseModel):
    """One link, as attributes of a span have it."""

    key_match: str
    value_match: str


EPISODE_MEMORY = "rollout.episode.memory"
"""Attribute of a span: what an episode leaves for later ones, as JSON."""
EPISODE_TURN = "rollout.episode.turn"
"""Attribute of spans of an environment's episode that belong to a turn: its number, from 0."""

LLM_CALL = "rollout.llm_call"
"""Span name: one request to a language model, as the proxy saw it."""


class LlmCallAttributes(Enum):
    """Keys, or prefixes of keys, of an LLM call's attributes; ``gen_ai.*`` are OpenTelemetry's."""

    REQUEST = "gen_ai.request"
    """Prefix: the model asked for and the sampling settings."""
    REQUEST_MODEL = "gen_ai.request.model"
    RESPONSE_ID = "gen_ai.response.id"
    INPUT_MESSAGES = "gen_ai.input.messages"
    """JSON text: the messages as they were sent."""
    OUTPUT_MESSAGES = "gen_ai.output.messages"
    """JSON text: the message of each choice."""
    TOOLS = "rollout.tools"
    """JSON text: the tools as they were sent."""
    PROMPT_TOKEN_IDS = "rollout.prompt_token_ids"
    CHOICES = "rollout.choices"
    """Prefix: the first choice has ``rollout.choices.0.token_ids`` and so on, see ``ChoiceAttributes``."""
    MODEL_ID = "rollout.model_id"
    """Content id of the weights that answered."""
    SERVED_MODEL = "rollout.served_model"
    """What the upstream calls them."""


class ChoiceAttributes(Enum):
    """Last parts of a choice's keys, after ``rollout.choices.<index>.``."""

    TOKEN_IDS = "token_ids"
    LOGPROBS = "logprobs"
    """Of each token id as it was drawn, in nats."""
    FINISH_REASON = "finish_reason"
