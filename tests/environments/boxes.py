"""Toolboxes of tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout_core.config.tools import AnyTool
from rollout_core.environments.tools.toolbox import Toolbox, ToolResources, ToolResult


@contextmanager
def shared(*tools: AnyTool, base: Path, **options: Any) -> Iterator[ToolResources]:
    """What toolboxes of these tools share."""
    resources = ToolResources(tools, index_folder=base / "indexes", base=base, **options)
    try:
        yield resources
    finally:
        resources.close()


async def said(box: Toolbox, name: str, **arguments: Any) -> str:
    """What a call that goes well says."""
    result = await box.call(name, arguments)
    assert not result.is_error, result.text
    return result.text


async def failed(box: Toolbox, name: str, **arguments: Any) -> ToolResult:
    """A call that goes wrong."""
    result = await box.call(name, arguments)
    assert result.is_error, result.text
    return result
