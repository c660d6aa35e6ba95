"""What a model may call in an episode: the environment's methods, and the tools that its settings add."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from rollout_core.base.errors import ConfigError
from rollout_core.environments.hosts import Offer, Place
from rollout_core.environments.protocol import EnvironmentFailed
from rollout_core.environments.tools.toolbox import Toolbox, ToolResources

ROW_KEY = "tools"
"""Of a row that says which of the settings' tools its episodes have."""


class EpisodeTools:
    """The calls of one episode."""

    def __init__(self, offer: Offer, place: Place, toolbox: Toolbox | None) -> None:
        self._place, self._toolbox = place, toolbox
        self._own = [str(tool["function"]["name"]) for tool in offer.tools]
        self.schemas: list[dict[str, Any]] = [*offer.tools, *([] if toolbox is None else toolbox.schemas)]
        """As OpenAI's API describes them."""

    @property
    def names(self) -> list[str]:
        """Of all that may be called."""
        return [str(tool["function"]["name"]) for tool in self.schemas]

    async def call(self, name: str, arguments: str) -> dict[str, Any]:
        """What a call with these arguments, as JSON, gives: ``text`` for the model, whether it ``is_error``, and
        whether the episode is ``done``. Raises EnvironmentFailed, HostEnded, and what machine or configuration did."""
        if name in self._own:
            return await self._place.call(f"tool:{name}", json.loads(arguments))
        if self._toolbox is None or name not in self.names:
            text = f"there is no tool {name!r}; expected {', '.join(self.names)}"
            return {"text": text, "is_error": True, "done": False}
        began = time.monotonic()
        try:
            found = await self._toolbox.call(name, json.loads(arguments))
        finally:
            self._place.spend(time.monotonic() - began)
        return {"text": found.text, "is_error": found.is_error, "done": False}


def check_names(offer: Offer, resources: ToolResources) -> None:
    """Raise ConfigError where a tool of the settings has the name of a method, or of another one."""
    names = resources.tool_names()
    for tool in offer.tools:
        name = tool["function"]["name"]
        if name in names:
            raise ConfigError(f"environment.tools has {name!r}, which is a method of the environment, too; rename it")


@asynccontextmanager
async def tools_of_episode(
    offer: Offer, place: Place, resources: ToolResources, row: Mapping[str, Any], folder: Path
) -> AsyncIterator[EpisodeTools]:
    """Inside the block an episode has its tools, those with files in a folder of their own in ``folder``. Raises
    EnvironmentFailed where the row names one that there is not."""
    wanted = _wanted(row, resources)
    if not wanted:
        yield EpisodeTools(offer, place, None)
        return
    own = folder / uuid4().hex
    own.mkdir()
    try:
        async with Toolbox(resources.tools, own, resources=resources, only=wanted) as toolbox:
            yield EpisodeTools(offer, place, toolbox)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _wanted(row: Mapping[str, Any], resources: ToolResources) -> Sequence[str]:
    names = [spec.name for spec in resources.tools]
    given = row.get(ROW_KEY) if names else None
    if given is None:
        return names
    if not isinstance(given, list | tuple) or not set(given) <= set(names):
        raise EnvironmentFailed(f"the row's {ROW_KEY} is {given!r:.80}; expected some of {', '.join(names)}")
    return list(given)
