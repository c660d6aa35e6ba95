from .adapters.adapter import (
    Adapter as Adapter,
    TraceAdapter as TraceAdapter,
    Triplet as Triplet,
)
from .adapters.chat_messages import (
    OpenAIMessages as OpenAIMessages,
    TraceToMessages as TraceToMessages,
)
from .adapters.credit import (
    RewardMatchPolicy as RewardMatchPolicy,
)
from .adapters.drawing import (
    draw_trace as draw_trace,
    trace_lines as trace_lines,
)
from .adapters.span_samples import (
    adapt_rollouts as adapt_rollouts,
    agent_samples as agent_samples,
)
from .adapters.token_sequences import (
    TokenTrajectory as TokenTrajectory,
    TokenTurn as TokenTurn,
    token_turns as token_turns,
    trajectories as trajectories,
    transitions as transitions,
)
from .adapters.tree import (
    TraceTree as TraceTree,
)
from .adapters.triplets import (
    LlmProxyTraceToTriplet as LlmProxyTraceToTriplet,
    TracerTraceToTriplet as TracerTraceToTriplet,
)
from .agent_calls import (
    ExecutionEvent as ExecutionEvent,
)
from .algorithm import (
    Algorithm as Algorithm,
    Dataset as Dataset,
    FunctionalAlgorithm as FunctionalAlgorithm,
    algo as algo,
    with_llm_proxy as with_llm_proxy,
    with_store as with_store,
)
from .apo import (
    APO as APO,
)
from .attributes import (
    flat as flat,
    nested as nested,
)
from .baseline import (
    Baseline as Baseline,
    FastAlgorithm as FastAlgorithm,
)
from .components import (
    ComponentSpec as ComponentSpec,
    build_component as build_component,
)
from .emitters import (
    emit_annotation as emit_annotation,
    emit_exception as emit_exception,
    emit_message as emit_message,
    emit_object as emit_object,
    emit_reward as emit_reward,
    find_final_reward as find_final_reward,
    find_reward_spans as find_reward_spans,
    get_message_value as get_message_value,
    get_object_value as get_object_value,
    get_reward_value as get_reward_value,
    get_rewards_from_span as get_rewards_from_span,
    is_reward_span as is_reward_span,
)
from .execution import (
    ClientServerExecutionStrategy as ClientServerExecutionStrategy,
    ExecutionStrategy as ExecutionStrategy,
    SharedMemoryExecutionStrategy as SharedMemoryExecutionStrategy,
)
from .hooks import (
    Hook as Hook,
)
from .links import (
    extract_links_from_attributes as extract_links_from_attributes,
    extract_tags_from_attributes as extract_tags_from_attributes,
    make_link_attributes as make_link_attributes,
    make_tag_attributes as make_tag_attributes,
    query_linked_spans as query_linked_spans,
)
from .lit_agent import (
    FunctionalLitAgent as FunctionalLitAgent,
    LitAgent as LitAgent,
    RolloutRawResult as RolloutRawResult,
    llm_rollout as llm_rollout,
    prompt_rollout as prompt_rollout,
    rollout as rollout,
)
from .online_learning import (
    OnlineLearning as OnlineLearning,
)
from .operation_spans import (
    operation as operation,
)
from .otel import (
    AgentOpsTracer as AgentOpsTracer,
    LightningSpanProcessor as LightningSpanProcessor,
    OtelTracer as OtelTracer,
)
from .policy_algorithms import (
    GRPO as GRPO,
    PPO as PPO,
)
from .policy_session import (
    PolicyLearner as PolicyLearner,
    PolicyOptions as PolicyOptions,
)
from .proxy.proxy_server import (
    LLMProxy as LLMProxy,
)
from .proxy.upstreams import (
    ModelEntry as ModelEntry,
    Upstream as Upstream,
)
from .runner import (
    LitAgentRunner as LitAgentRunner,
    Runner as Runner,
)
from .tracing import (
    DummyTracer as DummyTracer,
    SpanRecordingContext as SpanRecordingContext,
    Trace as Trace,
    Tracer as Tracer,
    active_trace as active_trace,
    active_tracer as active_tracer,
)
from .trainer import (
    Trainer as Trainer,
)
