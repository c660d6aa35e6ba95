"""Tags of spans, and links from one span to others, as attributes: ``emit_reward(1.0, attributes=make_tag_attributes([
"judge"]))``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import format_span_id, format_trace_id

from rollout_core.agents.attributes import nested
from rollout_core.base.errors import ConfigError
from rollout_core.store.semconv import LightningSpanAttributes, LinkAttributes, LinkPydanticModel

SpanLike = TypeVar("SpanLike")

_TAG, _LINK = LightningSpanAttributes.TAG.value, LightningSpanAttributes.LINK.value
_KEY, _VALUE = LinkAttributes.KEY_MATCH.value, LinkAttributes.VALUE_MATCH.value


def make_tag_attributes(tags: Sequence[str]) -> dict[str, Any]:
    """``agentlightning.tag.0`` and so on. Raises ConfigError for what is no list of texts."""
    if isinstance(tags, str) or not all(isinstance(tag, str) for tag in tags):
        raise ConfigError(f"the tags are {tags!r:.200}; expected a list of texts")
    return {f"{_TAG}.{place}": tag for place, tag in enumerate(tags)}


def extract_tags_from_attributes(attributes: Mapping[str, Any]) -> list[str]:
    """The tags in order; none where there are none. Raises ConfigError for attributes that name something else so."""
    found = nested(attributes, _TAG)
    if found is None:
        return []
    if not isinstance(found, Sequence) or isinstance(found, str) or not all(isinstance(tag, str) for tag in found):
        raise ConfigError(f"the attributes below {_TAG} are {found!r:.200}; expected texts numbered from 0")
    return list(found)


def make_link_attributes(links: Mapping[str, str]) -> dict[str, Any]:
    """Attributes that point to every span which has all of these values: of ``trace_id``, ``span_id`` or of attributes,
    such as ``gen_ai.response.id``. Raises ConfigError for values that are no texts."""
    made: dict[str, Any] = {}
    for place, (key, value) in enumerate(links.items()):
        if not isinstance(value, str):
            raise ConfigError(f"the link by {key!r} has the value {value!r:.200}; expected a text")
        made[f"{_LINK}.{place}.{_KEY}"], made[f"{_LINK}.{place}.{_VALUE}"] = key, value
    return made


def extract_links_from_attributes(attributes: Mapping[str, Any]) -> list[LinkPydanticModel]:
    """The links in order; none where there are none. Raises ValueError for attributes that name something else so."""
    found = nested(attributes, _LINK)
    if found is None:
        return []
    if not isinstance(found, list):
        raise ConfigError(f"the attributes below {_LINK} are {found!r:.200}; expected links numbered from 0")
    return [LinkPydanticModel.model_validate(link) for link in found]


def query_linked_spans(spans: Sequence[SpanLike], links: Sequence[LinkPydanticModel]) -> list[SpanLike]:
    """Those that all of the links point to, the store's spans or the SDK's."""
    return [span for span in spans if all(_value(span, link.key_match) == link.value_match for link in links)]


def _value(span: Any, key: str) -> Any:
    if key not in ("trace_id", "span_id"):
        return (span.attributes or {}).get(key)
    if not isinstance(span, ReadableSpan):
        return getattr(span, key)
    context = span.get_span_context()
    if context is None:
        return None
    return format_trace_id(context.trace_id) if key == "trace_id" else format_span_id(context.span_id)
