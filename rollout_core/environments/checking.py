"""Environments tried without a model: the same episodes alone, again, in another process and at the same time, and
what differs, fails or is slow; and an episode whose answers a person gives."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_core.config.environments import EnvironmentConfig
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.episodes import Episode
from rollout_core.environments.hosts import Hosts, Offer, Place
from rollout_core.environments.protocol import EnvironmentFailed, HostEnded
from rollout_core.environments.tools.toolbox import ToolResources
from rollout_core.environments.using import EpisodeTools, tools_of_episode

SLOW_SECONDS = 1.0
"""Of one call: an engine on a GPU has drawn an answer by then."""
_EXAMPLES: Mapping[str, Any] = {
    "integer": 1,
    "number": 1.5,
    "boolean": True,
    "string": "text",
    "array": [],
    "null": None,
}
Answering = Callable[[int, Sequence[Mapping[str, Any]]], dict[str, Any]]
"""The assistant's message of a turn, to the messages before it."""


@dataclass
class Transcript:
    """What an environment said and gave in an episode."""

    lines: list[str] = field(default_factory=list)
    """Of its messages, in order, then of the reward or of what went wrong."""
    failure: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Longest call of each method."""


@dataclass(frozen=True)
class Checked:
    """What was found."""

    episodes: list[Transcript]
    """Of the rows, in order."""
    faults: list[str]
    remarks: list[str]


def scripted(tools: EpisodeTools, row: int) -> Answering:
    """A model that calls each tool once, with arguments by its schema, and says a text when it has none left."""

    def answer(turn: int, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if turn >= len(tools.schemas):
            return {"role": "assistant", "content": f"answer {turn - len(tools.schemas) + 1}"}
        function = tools.schemas[(turn + row) % len(tools.schemas)]["function"]
        arguments = json.dumps(example_of(function["parameters"]))
        call = {
            "id": f"call_{turn}",
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    return answer


def example_of(schema: Mapping[str, Any]) -> Any:
    """A value that fits a JSON Schema, as far as its types say."""
    if "enum" in schema or "const" in schema or "default" in schema:
        return schema.get("const", schema.get("default", (schema.get("enum") or [None])[0]))
    for kind in ("anyOf", "oneOf", "allOf"):
        if schema.get(kind):
            return example_of(schema[kind][0])
    if schema.get("type") == "object" or "properties" in schema:
        wanted = schema.get("required", ())
        return {name: example_of(schema["properties"][name]) for name in wanted}
    return _EXAMPLES.get(str(schema.get("type")), "text")


async def check_environment(
    code: EnvironmentCode,
    settings: EnvironmentConfig,
    offer: Offer,
    rows: Sequence[dict[str, Any]],
    resources: ToolResources,
    folder: Path,
) -> Checked:
    """Play an episode of each row, alone, alone again, in another process, and all at the same time. Raises
    ConfigError where the environment cannot be loaded. ``folder`` is for the files of tools, whose ``resources`` they
    share."""
    hosts = Hosts(code, settings)
    try:

        async def play(number: int, name: str, *, alone: bool = False) -> Transcript:
            transcript, episode = Transcript(), Episode(name, rows[number])
            try:
                async with (
                    hosts.place(name, alone=alone) as place,
                    tools_of_episode(offer, place, resources, episode.row, folder) as tools,
                ):
                    await act(place, tools, episode, scripted(tools, number), settings, offer, transcript)
            except (EnvironmentFailed, HostEnded) as error:
                transcript.failure = str(error)
                transcript.lines.append(f"failed: {error}")
            return transcript

        first = [await play(number, f"{number}") for number in range(len(rows))]
        again = [await play(number, f"{number} again") for number in range(len(rows))]
        elsewhere = [await play(number, f"{number} elsewhere", alone=True) for number in range(len(rows))]
        names = [(number, f"{number} of {copy}") for copy in range(2) for number in range(len(rows))]
        together = await asyncio.gather(*(play(*name) for name in names))
    finally:
        await hosts.close()
    faults = [
        f"row {number + 1}: {transcript.failure}" for number, transcript in enumerate(first) if transcript.failure
    ]
    for others, when in ((again, "played again"), (elsewhere, "played in another process")):
        faults += [
            f"row {number + 1} is another episode when it is {when}: {difference}; let what is drawn follow from seed"
            for number, pair in enumerate(zip(first, others, strict=True))
            if (difference := _difference(*pair)) is not None
        ]
    if not faults:
        faults += [
            f"row {number + 1} is another episode next to others: {difference}; keep what belongs to an episode on self"
            for (number, _), transcript in zip(names, together, strict=True)
            if (difference := _difference(first[number], transcript)) is not None
        ]
    return Checked(first, list(dict.fromkeys(faults)), _remarks(first, offer))


def _remarks(episodes: Sequence[Transcript], offer: Offer) -> list[str]:
    longest: dict[str, float] = {}
    for transcript in episodes:
        for method, seconds in transcript.seconds.items():
            longest[method] = max(seconds, longest.get(method, 0.0))
    slow = [f"{method} takes {seconds:.1f} s" for method, seconds in longest.items() if seconds > SLOW_SECONDS]
    return [*([offer.note] if offer.note else []), *slow]


def _difference(one: Transcript, other: Transcript) -> str | None:
    if one.lines == other.lines:
        return None
    pairs = zip([*one.lines, "nothing"], [*other.lines, "nothing"], strict=False)
    return next(f"{first!r:.100}, then {second!r:.100}" for first, second in pairs if first != second)


async def act(
    place: Place,
    tools: EpisodeTools,
    episode: Episode,
    answering: Answering,
    settings: EnvironmentConfig,
    offer: Offer,
    transcript: Transcript,
) -> Any:
    """An episode whose answers ``answering`` gives; what it earned. All that the environment says goes to
    ``transcript``."""

    async def call(method: str, *arguments: Any) -> Any:
        before = place.seconds
        found = await place.call(method, *arguments)
        transcript.seconds[method] = max(place.seconds - before, transcript.seconds.get(method, 0.0))
        return found

    messages = await call("reset", episode.row, episode.seed)
    transcript.lines += [f"[{message['role']}] {message['content']}" for message in messages]
    for turn in range(settings.max_turns):
        message = answering(turn, messages)
        calls, is_done = message.get("tool_calls", ()), False
        following: list[dict[str, Any]] | None = None
        if calls and offer.has_call_tools:
            following = await call("call_tools", {**message, "content": message["content"] or ""})
        elif calls:
            following = answers = []
            for asked in calls:
                name, began = asked["function"]["name"], time.monotonic()
                found = await tools.call(name, asked["function"]["arguments"])
                transcript.seconds[name] = max(time.monotonic() - began, transcript.seconds.get(name, 0.0))
                answers.append({"role": "tool", "name": name, "content": found["text"]})
                is_done = is_done or found["done"]
        elif offer.has_step:
            following = await call("step", message)
        transcript.lines += [f"[{said.get('name', said['role'])}] {said['content']}" for said in following or ()]
        if offer.has_turn_reward and (earned := await call("turn_reward")) is not None:
            transcript.lines.append(f"reward of turn {turn + 1}: {json.dumps(earned)}")
        if is_done or following is None:
            break
        messages = [*messages, message, *following]
    reward = await call("reward")
    transcript.lines.append(f"reward: {json.dumps(reward)}")
    if settings.episodic_memory and (note := await call("save_memory")) is not None:
        transcript.lines.append(f"left for later episodes: {note}")
    await call("close")
    return reward
