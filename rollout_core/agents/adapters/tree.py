"""The spans of an attempt as a tree, by parent and, where tracers lost the parent, by time."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_core.agents.adapters.calls import CallNames, has_failed
from rollout_core.agents.adapters.containment import tightest_containers
from rollout_core.agents.emitters import is_reward_span
from rollout_core.base.errors import ConfigError
from rollout_core.store import Span
from rollout_core.store.semconv import AGL_OPERATION, AGL_REWARD, AGL_VIRTUAL, LightningSpanAttributes

logger = logging.getLogger(__name__)

VIRTUAL_ROOT = "virtual-root"
_ANY_AGENT = "*"
_AGENT_NAMES = ("recipient_agent_type", "langchain.chain.type", "executor.id")


@dataclass(eq=False)
class TraceTree:
    """A span and what happened inside it, children in the order in which they began."""

    id: str
    """The span's id; of a second span with the same id ``<id>#2``."""
    span: Span
    children: list[TraceTree] = field(default_factory=list)

    @property
    def start_time(self) -> float:
        """Infinite if the span has neither start nor end: nothing is known to come after it."""
        return _known(self.span.start_time, self.span.end_time)

    @property
    def end_time(self) -> float:
        """As ``start_time``."""
        return _known(self.span.end_time, self.span.start_time)

    @property
    def order(self) -> tuple[float, int]:
        """By which spans are compared: when they began, then their number."""
        return self.start_time, self.span.sequence_id

    @classmethod
    def from_spans(cls, spans: Sequence[Span]) -> TraceTree:
        """The tree of these spans. A parent that is missing becomes a virtual node; above several roots there is a
        virtual root. A span that is there twice counts once, and spans that are each other's parents are cut apart at
        the one that began first.

        Raises ConfigError if there are no spans.
        """
        if not spans:
            raise ConfigError("got no spans; a tree needs one at least")
        nodes = _nodes(cls, spans)
        roots, lost = [], {}
        for node in nodes.values():
            parent_id = node.span.parent_id
            if parent_id is None:
                roots.append(node)
                continue
            parent = nodes.get(parent_id) or lost.get(parent_id)
            if parent is None:
                parent = lost[parent_id] = cls(parent_id, node.span)
            parent.children.append(node)
        roots += [*lost.values(), *_cut_loops(nodes, [*roots, *lost.values()])]
        for node in nodes.values():
            node.children.sort(key=lambda child: child.order)
        for node in lost.values():
            _make_virtual(node, AGL_VIRTUAL)
        roots.sort(key=lambda root: root.order)
        if len(roots) == 1:
            return roots[0]
        return _make_virtual(cls(VIRTUAL_ROOT, roots[0].span, roots), VIRTUAL_ROOT)

    def traverse(self) -> list[TraceTree]:
        """This node and all below, each before its children."""
        found: list[TraceTree] = []
        waiting: list[TraceTree] = [self]
        while waiting:
            node = waiting.pop()
            found.append(node)
            waiting.extend(reversed(node.children))
        return found

    def find_id(self, id: str) -> TraceTree | None:
        """The node with this id, here or below; None if there is none."""
        return next((node for node in self.traverse() if node.id == id), None)

    def add_child(self, child: TraceTree) -> None:
        """Put ``child`` after the other children."""
        self.children.append(child)

    def agent_name(self) -> str | None:
        """The agent whose work the span is, as OpenAI's agents, AgentOps, AutoGen, LangGraph, agent-framework, Weave
        and OpenTelemetry name it; None if it is no agent's."""
        attributes = self.span.attributes
        candidates = [
            attributes.get("agent.name"),
            attributes.get("operation.name") if attributes.get("agentops.span.kind") == "agent" else None,
            *(attributes.get(key) for key in _AGENT_NAMES),
            attributes.get("agentlightning.operation.input.name") if attributes.get("type") == "agent" else None,
            attributes.get("lc_name") if self.span.name.startswith("langchain.Chain.") else None,
            attributes.get("gen_ai.agent.name"),
        ]
        return next((str(name) for name in candidates if name is not None), None)

    def is_reward_span(self) -> bool:
        """Whether the span carries a reward, or is an operation that finds one."""
        return is_reward(self.span)

    def repair_hierarchy(self, leaf_match: str | None = None) -> None:
        """Move each top-level span under the tightest one that contains it in time; top-level are the children of the
        first node that has several.

        Some frameworks are traced by several systems, and the spans of one float next to the agent of the other. Of
        equal containers the innermost is taken. Spans with a name that ``leaf_match`` (a regular expression) finds
        contain nothing but what they came with: one of two concurrent LLM calls may well cover the other.
        """
        top = self
        while len(top.children) == 1:
            top = top.children[0]
        moved = tightest_containers(
            [child.traverse() for child in top.children],
            lambda node: leaf_match is None or re.search(leaf_match, node.span.name) is None,
        )
        for child, container in moved:
            container.children.append(child)
        floating = {id(child) for child, _ in moved}
        top.children = [child for child in top.children if id(child) not in floating]
        for container in {id(container): container for _, container in moved}.values():
            container.children.sort(key=lambda child: child.order)

    def find_llm_calls(
        self,
        *,
        llm_call_match: str,
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        names: CallNames | None = None,
    ) -> list[tuple[TraceTree, str]]:
        """Nodes of LLM calls, and the agent that made each (``*`` if none is named), each before those below it.

        A call is a span whose name ``llm_call_match`` finds, once for each of ``names`` (of the spans here and below);
        one without a server's id inside another call is the same call seen by another tracer, and one that failed
        without any answer is none. With ``agent_match``, the nearest agent around it must have a name that this finds.
        """
        names = names or CallNames(node.span for node in self.traverse())
        found: list[tuple[TraceTree, str]] = []
        known_ids: set[str] = set()
        waiting: list[tuple[TraceTree, _Place]] = [(self, _Place(_ANY_AGENT if agent_match is None else None))]
        while waiting:
            node, place = waiting.pop()
            agent, in_call = place.agent, place.in_call
            name = names.of(node.span)
            if (
                agent is not None
                and not (place.in_reward and exclude_llm_call_in_reward)
                and re.search(llm_call_match, node.span.name)
                and (name not in known_ids if name is not None else not in_call and not has_failed(node.span))
            ):
                found.append((node, agent))
                known_ids |= {name} if name is not None else set()
                in_call = True
            own = node.agent_name()
            if own is not None:
                agent = own if agent_match is None or re.search(agent_match, own) else None
            below = _Place(agent, in_call, place.in_reward or node.is_reward_span())
            waiting.extend((child, below) for child in reversed(node.children))
        return found

    def names_tuple(self) -> tuple[str, list[Any]]:
        """The span's name with its agent's in brackets, and the same of each child."""
        made: dict[int, tuple[str, list[Any]]] = {}
        for node in reversed(self.traverse()):
            made[id(node)] = node._label(), [made.pop(id(child)) for child in node.children]
        return made[id(self)]

    def to_json(self) -> dict[str, Any]:
        """The node with its ``id``, its ``span`` as JSON values, and its ``children`` likewise."""
        made: dict[int, dict[str, Any]] = {}
        for node in reversed(self.traverse()):
            children = [made.pop(id(child)) for child in node.children]
            made[id(node)] = {"id": node.id, "span": node.span.model_dump(mode="json"), "children": children}
        return made[id(self)]

    def draw(self) -> str:
        """The tree as lines of text, each level two spaces further in, with durations in milliseconds."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        waiting: list[tuple[TraceTree, str]] = [(self, "")]
        while waiting:
            node, indent = waiting.pop()
            duration = node.end_time - node.start_time
            took = f" {1000 * duration:.0f} ms" if math.isfinite(duration) and duration > 0 else ""
            yield f"{indent}{node._label()}{took}"
            waiting.extend((child, f"{indent}  ") for child in reversed(node.children))

    def _label(self) -> str:
        agent = self.agent_name()
        return self.span.name if agent is None else f"{self.span.name} [{agent}]"


def is_reward(span: Span) -> bool:
    """Whether the span carries a reward, or is an operation that finds one."""
    operation = (
        span.attributes.get(LightningSpanAttributes.OPERATION_NAME.value) if span.name == AGL_OPERATION else None
    )
    return operation == AGL_REWARD or is_reward_span(span)


@dataclass(frozen=True)
class _Place:
    """What is around a node."""

    agent: str | None
    """The agent whose calls are wanted here; None where they are not."""
    in_call: bool = False
    in_reward: bool = False


def _known(*times: float | None) -> float:
    return next((time for time in times if time is not None), math.inf)


def _nodes(kind: type[TraceTree], spans: Sequence[Span]) -> dict[str, TraceTree]:
    """A node for each span, by id. The same span again is left out; another one of the same id gets a new one."""
    nodes: dict[str, TraceTree] = {}
    counts: Counter[str] = Counter()
    seen: dict[tuple[Any, ...], Span] = {}
    for span in spans:
        what = (span.span_id, span.name, span.start_time, span.end_time)
        if what in seen and seen[what].attributes == span.attributes:
            continue
        seen.setdefault(what, span)
        counts[span.span_id] += 1
        count = counts[span.span_id]
        name = span.span_id if count == 1 else f"{span.span_id}#{count}"
        nodes[name] = kind(name, span)
    reused = [name for name, count in counts.items() if count > 1]
    if reused:
        logger.warning("Rollout %s has several spans of one id, such as %s", spans[0].rollout_id, reused[0])
    return nodes


def _cut_loops(nodes: dict[str, TraceTree], roots: Sequence[TraceTree]) -> list[TraceTree]:
    """Nodes that become roots, because they and others were each other's parents, and no root was above them."""
    reached = {id(node) for root in roots for node in root.traverse()}
    made = []
    for node in nodes.values():
        if id(node) in reached:
            continue
        path: dict[str, TraceTree] = {}
        while node.id not in path:
            path[node.id] = node
            node = nodes[str(node.span.parent_id)]
        loop = list(path.values())[list(path).index(node.id) :]
        first = min(loop, key=lambda item: item.order)
        nodes[str(first.span.parent_id)].children.remove(first)
        logger.warning("Rollout %s: spans are each other's parents, such as %s", first.span.rollout_id, first.id)
        made.append(first)
        reached |= {id(below) for below in first.traverse()}
    return made


def _make_virtual(node: TraceTree, name: str) -> TraceTree:
    """Give ``node`` a span that covers its children."""
    first = node.children[0].span
    times = [(child.start_time, child.end_time) for child in node.children if math.isfinite(child.end_time)]
    node.children.sort(key=lambda child: child.order)
    node.span = Span.from_attributes(
        rollout_id=first.rollout_id,
        attempt_id=first.attempt_id,
        sequence_id=first.sequence_id,
        trace_id=first.trace_id,
        span_id=None if node.id == VIRTUAL_ROOT else node.id,
        name=name,
        attributes={},
        start_time=min((start for start, _ in times), default=None),
        end_time=max((end for _, end in times), default=None),
    )
    return node
