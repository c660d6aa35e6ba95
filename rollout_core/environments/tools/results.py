"""What a tool is, and what a call of one gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollout_core.base.errors import RolloutError


class ToolError(RolloutError):
    """What the model did wrong, or what came of it, in words that go back to the model."""


@dataclass(frozen=True)
class ToolResult:
    """The answer to one call, for the model."""

    text: str
    is_error: bool
    seconds: float
    """Of the call, on the wall clock."""
    truncated: bool
    """Whether characters are missing in the text, which says how many."""


@dataclass(frozen=True)
class Output:
    """Text of which the tool has kept the beginning and the end alone."""

    head: str
    num_cut: int = 0
    """Characters that are missing."""
    tail: str = ""
    is_error: bool = False
    """Whether it is what came of a fault of the model's."""


class Tool(Protocol):
    """One tool of one episode. Its methods run in one event loop, and calls may overlap."""

    name: str
    schema: Mapping[str, Any]
    """As a chat API takes it: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""
    output_characters: int
    """Of a result at most."""

    async def call(self, arguments: Mapping[str, Any]) -> str | Output:
        """The result, for the model. Raises ToolError for what the model did wrong, and other errors of this project
        for what the machine or the configuration did."""
        ...

    async def close(self) -> None:
        """End what it holds."""
        ...


def shortened(output: Output, most: int) -> tuple[str, bool]:
    """The beginning and the end of the text, with at most ``most`` of its characters, and whether some are missing."""
    size = len(output.head) + len(output.tail)
    if not output.num_cut and size <= most:
        return output.head + output.tail, False
    half = most // 2
    if output.num_cut:
        head, tail = output.head[: most - half], output.tail[-half:]
    else:
        whole = output.head + output.tail
        head, tail = whole[: most - half], whole[len(whole) - half :]
    num_cut = output.num_cut + size - len(head) - len(tail)
    return f"{head}\n[... {num_cut:,} characters left out ...]\n{tail}", True
