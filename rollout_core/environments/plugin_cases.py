"""Test cases of plugins of kind ``env-harness``: episodes whose answers are given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from rollout_core.base.errors import ConfigError
from rollout_core.base.locks import scratch_folder
from rollout_core.config.base import Settings
from rollout_core.config.environments import PluginEnvironment
from rollout_core.environments.checking import Transcript, act
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.episodes import Episode
from rollout_core.environments.hosts import Hosts, look_at
from rollout_core.environments.protocol import EnvironmentFailed, HostEnded
from rollout_core.environments.tools.toolbox import ToolResources
from rollout_core.environments.using import tools_of_episode
from rollout_core.plugins.cases import TEST_CASES, Case
from rollout_core.plugins.identity import PluginCode


class ToolCall(Settings):
    """What the model calls in place of saying something."""

    tool: str
    """Its name."""
    arguments: dict[str, Any] = Field(default={})
    """By their names."""


class EpisodeCase(Case):
    """A case of an environment."""

    row: dict[str, Any]
    """That the episode begins with."""
    answers: tuple[str | ToolCall, ...] = Field(min_length=1)
    """Of the model, in order: a text, or the call of a tool."""
    reward: float | dict[str, float]
    """What the episode earns."""


def start(code: PluginCode, config: Mapping[str, Any]) -> None:
    """Start a plugin with a configuration, have it say what it has, and end it. Raises ConfigError."""
    settings = _settings(code, config)
    look_at(EnvironmentCode.of_plugin(code, settings), settings)


def failed_cases(
    code: PluginCode, cases: Sequence[tuple[int, EpisodeCase]], on_line: Callable[[str], None]
) -> list[str]:
    """Play the episode of each test case, for which the plugin is started; what is wrong, a line for each."""
    failures: list[str] = []
    for number, case in cases:
        settings = _settings(code, case.config, max_turns=len(case.answers))
        transcript = Transcript()
        try:
            got: Any = asyncio.run(_play(EnvironmentCode.of_plugin(code, settings), settings, case, transcript))
        except (ConfigError, EnvironmentFailed, HostEnded) as error:
            got = error
        if got != case.reward:
            for line in transcript.lines:
                on_line(f"{TEST_CASES}:{number}: {line}")
            failures.append(f"{TEST_CASES}:{number}: got {got}; expected {json.dumps(case.reward)}")
    return failures


def _settings(code: PluginCode, config: Mapping[str, Any], **limits: Any) -> PluginEnvironment:
    return PluginEnvironment(kind="plugin", name=code.name, config=dict(config), **limits)


async def _play(code: EnvironmentCode, settings: PluginEnvironment, case: EpisodeCase, transcript: Transcript) -> Any:
    offer = await asyncio.to_thread(look_at, code, settings)

    def answering(turn: int, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        said = case.answers[turn]
        if isinstance(said, str):
            return {"role": "assistant", "content": said}
        function = {"name": said.tool, "arguments": json.dumps(said.arguments)}
        return {"role": "assistant", "content": None, "tool_calls": [{"id": f"call_{turn}", "function": function}]}

    hosts, episode = Hosts(code, settings), Episode("test case", case.row)
    try:
        with scratch_folder("episodes") as folder:
            resources = ToolResources((), index_folder=folder)
            async with (
                hosts.place(episode.rollout_id) as place,
                tools_of_episode(offer, place, resources, episode.row, Path(folder)) as tools,
            ):
                return await act(place, tools, episode, answering, settings, offer, transcript)
    finally:
        await hosts.close()
