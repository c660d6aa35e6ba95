"""What was said in an LLM call, as OpenAI's chat messages and tools, whichever form the span holds it in.

Forms: JSON text of OpenAI's own messages (our proxy), JSON text of OpenTelemetry's messages made of ``parts``
(``opentelemetry-instrumentation-openai`` since 0.60), and dotted keys below ``gen_ai.prompt`` and ``gen_ai.completion``
(AgentOps and older instrumentations) or below ``agentlightning.operation`` (Weave).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_core.agents.adapters.calls import parsed
from rollout_core.agents.attributes import nested
from rollout_core.store.semconv import LlmCallAttributes

Message = dict[str, Any]
"""An OpenAI chat message."""

_INPUT = "agentlightning.operation.input.messages"
_OUTPUT = "agentlightning.operation.output.choices"


def prompt_content(attributes: Mapping[str, Any]) -> Any:
    """The messages that went in. Dotted keys are only nested, so what a tracer wrote is what there is; None if nothing
    is recorded."""
    return _content(attributes, LlmCallAttributes.INPUT_MESSAGES.value, "gen_ai.prompt", _INPUT)


def completion_content(attributes: Mapping[str, Any]) -> Any:
    """The messages that came out, as ``prompt_content``."""
    return _content(attributes, LlmCallAttributes.OUTPUT_MESSAGES.value, "gen_ai.completion", _OUTPUT)


def _content(attributes: Mapping[str, Any], key: str, *prefixes: str) -> Any:
    value = parsed(attributes.get(key))
    if isinstance(value, list):
        return [_message(entry) for entry in value]
    if value is not None:
        return value  # the prompt of a text completion
    return next((found for prefix in prefixes if (found := nested(attributes, prefix)) is not None), None)


def _message(entry: Any) -> Any:
    if not isinstance(entry, dict) or not isinstance(entry.get("parts"), list):
        return entry
    message: Message = {"role": entry.get("role", "user"), "content": None}
    content: list[Any] = []
    for part in entry["parts"]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_call":
            message.setdefault("tool_calls", []).append(tool_call(part))
        elif kind == "tool_call_response":
            message["tool_call_id"] = part.get("id")
            content.append({"type": "text", "text": _text(part.get("response"))})
        elif kind == "refusal":
            message["refusal"] = part.get("content")
        elif kind == "reasoning":
            message["reasoning_content"] = part.get("content")
        else:
            content.append(_content_part(kind, part))
    message["content"] = content[0]["text"] if _is_one_text(content) else content or None
    return message


def _content_part(kind: str | None, part: Any) -> Any:
    if kind == "text":
        return {"type": "text", "text": _text(part.get("content"))}
    if kind == "uri":
        return {"type": "image_url", "image_url": {"url": part.get("uri", "")}}
    if kind == "blob":
        url = f"data:{part.get('mime_type')};base64,{part.get('content')}"
        return {"type": "image_url", "image_url": {"url": url}}
    return part


def _is_one_text(content: Sequence[Any]) -> bool:
    return len(content) == 1 and isinstance(content[0], dict) and content[0].get("type") == "text"


def tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call as OpenAI has it, from that or from a flat one with ``id``, ``name`` and ``arguments``."""
    inner = call.get("function")
    function = inner if isinstance(inner, Mapping) else call
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": str(function.get("name") or ""), "arguments": _text(function.get("arguments", "{}"))},
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def image_urls(content: Any) -> list[str]:
    """URLs of the images in a prompt's content, in order. Of messages whose content is text, JSON text is read."""
    urls = []
    for message in _entries(content):
        parts = parsed(message.get("content")) if isinstance(message, Mapping) else None
        for part in parts if isinstance(parts, list) else []:
            image = part.get("image_url") if isinstance(part, dict) and part.get("type") == "image_url" else None
            if isinstance(image, dict) and "url" in image:
                urls.append(image["url"])
    return urls


def _entries(content: Any) -> list[Any]:
    """The numbered entries, which may stand among others, as those of content filters do."""
    if isinstance(content, Mapping):
        numbers = sorted((key for key in content if isinstance(key, str) and key.isdigit()), key=int)
        return [content[key] for key in numbers] or [content]
    return content if isinstance(content, list) else []


def prompt_messages(attributes: Mapping[str, Any]) -> list[Message]:
    """The messages that went in, as OpenAI has them; the prompt of a text completion is a user's message."""
    content = prompt_content(attributes)
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return [message for entry in _entries(content) if (message := _openai_message(entry)) is not None]


def completion_messages(attributes: Mapping[str, Any]) -> list[Message]:
    """The assistant's messages that came out, one for each choice."""
    content = completion_content(attributes)
    if isinstance(content, str):
        return [{"role": "assistant", "content": content}]
    found = (_openai_message(_choice_message(entry), "assistant") for entry in _entries(content))
    return [message for message in found if message is not None and message["role"] == "assistant"]


def _choice_message(entry: Any) -> Any:
    return entry["message"] if isinstance(entry, dict) and isinstance(entry.get("message"), dict) else entry


def _openai_message(entry: Any, default_role: str | None = None) -> Message | None:
    """An entry as OpenAI's message. Some tracers omit the role; where nothing tells it, there is no message."""
    if isinstance(entry, str):
        return {"role": default_role or "user", "content": entry}
    if not isinstance(entry, Mapping):
        return None
    if entry.get("tool_call_id") is not None:
        default_role = "tool"
    elif entry.get("tool_calls"):
        default_role = "assistant"
    role = entry.get("role") or default_role
    if role is None:
        return None
    content = entry.get("content")
    message: Message = {"role": role, "content": "" if content is None and role != "assistant" else content}
    calls = parsed(entry.get("tool_calls"))
    if role == "assistant" and calls:
        message["content"] = content or None  # streams say nothing by an empty text
        message["tool_calls"] = [tool_call(call) for call in _entries(calls) if isinstance(call, Mapping)]
    if role == "tool":
        message["tool_call_id"] = str(entry.get("tool_call_id") or "")
    for key in ("name", "refusal", "reasoning_content"):
        if entry.get(key) is not None:
            message[key] = entry[key]
    return message


def tools(attributes: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that the model could call; None if none are recorded."""
    for key in (LlmCallAttributes.TOOLS.value, "gen_ai.tool.definitions", "agentlightning.operation.input.tools"):
        value = parsed(attributes[key]) if key in attributes else nested(attributes, key)
        if isinstance(value, list):
            return [_tool(entry) for entry in value if isinstance(entry, dict)]
    functions = nested(attributes, "gen_ai.request.functions") or nested(attributes, "llm.request.functions")
    return [_tool(entry) for entry in _entries(functions)] if functions else None


def _tool(entry: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(entry.get("function"), Mapping):
        return dict(entry)
    function = {key: value for key, value in entry.items() if key != "type"}
    function["parameters"] = parsed(function.get("parameters", {}))
    return {"type": "function", "function": function}
