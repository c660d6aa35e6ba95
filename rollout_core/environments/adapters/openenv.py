"""Environments that an OpenEnv server has: each episode is a session of it, a web socket.

What the environment shows is a message, and the model's answer an action: a call of the tool `ACT`, whose schema is
that of the server's actions, or the text of one of an action's fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import aiohttp

from rollout_core.base.errors import ConfigError, near
from rollout_core.environments.adapters.seeds import HELD_OUT_SEEDS, seed_rows
from rollout_core.environments.protocol import Done, Tool
from rollout_core.environments.tools.results import ToolError

ACT = "act"
SECONDS = 30.0
"""For the server to say what it has."""
MESSAGE_BYTES = 2**26
NOT_SHOWN = ("metadata", "done", "reward")
"""Of an observation."""


class OpenEnv:
    """One episode on a server."""

    def __init__(
        self,
        url: str,
        revision: str,
        text_field: str | None,
        observation_field: str | None,
        instructions: str,
        reward: str,
    ) -> None:
        self._url, self._text_field, self._shown_field = url.rstrip("/"), text_field, observation_field
        self._instructions, self._counts = instructions, reward
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._rewards: list[float] = []

    def make_rows(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        """Seeds; held-out ones are others."""
        return seed_rows(split, size, seed)

    async def further_tools(self) -> list[Tool]:
        """The action, unless it is a text."""
        schema = dict((await self._described())["action"])
        fields = {name: about for name, about in schema.get("properties", {}).items() if name != "metadata"}
        if self._text_field is None:
            return [Tool(ACT, schema.get("description", "Act."), {**schema, "properties": fields}, self._act)]
        if self._text_field not in fields:
            raise ValueError(
                f"an action of {self._url} has no {self._text_field!r} (text_field); {near(self._text_field, fields)}"
            )
        return []

    async def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """What the environment shows first. The row's keys are arguments of the server's own reset."""
        self._session = aiohttp.ClientSession()
        address = f"ws{self._url.removeprefix('http')}/ws"
        self._socket = await self._session.ws_connect(address, max_msg_size=MESSAGE_BYTES)
        asked = {"seed": seed % HELD_OUT_SEEDS, **{name: value for name, value in row.items() if name != "id"}}
        shown = self._shown(await self._ask("reset", asked))
        return f"{self._instructions}\n\n{shown}" if self._instructions else shown

    async def step(self, message: Mapping[str, Any]) -> str | Done:
        """What follows an action that is a text. Where actions are calls, an answer without one ends the episode."""
        if self._text_field is None:
            return Done()
        return self._after(await self._ask("step", {self._text_field: message["content"]}))

    def reward(self) -> float:
        """The sum of what actions earned, or what the last one did."""
        if self._counts == "last":
            return self._rewards[-1] if self._rewards else 0.0
        return sum(self._rewards)

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()
        if self._session is not None:
            await self._session.close()

    async def _act(self, /, **action: Any) -> str | Done:
        return self._after(await self._ask("step", action))

    def _after(self, found: Mapping[str, Any]) -> str | Done:
        if found.get("reward") is not None:
            self._rewards.append(float(found["reward"]))
        return Done(self._shown(found)) if found.get("done") else self._shown(found)

    def _shown(self, found: Mapping[str, Any]) -> str:
        observation = found["observation"]
        if self._shown_field is None:
            return json.dumps({name: value for name, value in observation.items() if name not in NOT_SHOWN})
        if self._shown_field not in observation:
            hint = near(self._shown_field, observation)
            raise ValueError(f"an observation has no {self._shown_field!r} (observation_field); {hint}")
        value = observation[self._shown_field]
        return value if isinstance(value, str) else json.dumps(value)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        assert self._socket is not None, "reset comes first"
        await self._socket.send_json({"type": kind, "data": dict(data)})
        said = await self._socket.receive()
        if said.type is not aiohttp.WSMsgType.TEXT:
            raise RuntimeError(f"the OpenEnv server ended the session ({said.type.name}) at {kind}")
        found = json.loads(said.data)
        if found["type"] != "error":
            return found["data"]
        problem = found["data"]
        if problem.get("code") == "VALIDATION_ERROR" and kind == "step":
            raise ToolError(f"{problem['message']}: {json.dumps(problem.get('errors', []))[:500]}")
        if problem.get("code") == "CAPACITY_REACHED":
            raise RuntimeError(
                f"the OpenEnv server has {problem.get('max_sessions')} sessions at most (max_concurrent_envs); lower "
                "environment.episodes_at_once"
            )
        raise RuntimeError(f"the OpenEnv server answered {kind} with {problem.get('code')}: {problem.get('message')}")

    async def _described(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(f"{self._url}/schema") as answer:
            answer.raise_for_status()
            return await answer.json()


def server_identity(url: str) -> dict[str, Any]:
    """What a server says that it has. Raises ConfigError where none answers."""
    found = {}
    for name in ("schema", "metadata"):
        address = f"{url.rstrip('/')}/{name}"
        try:
            with urlopen(address, timeout=SECONDS) as answer:
                found[name] = json.load(answer)
        except (URLError, OSError, ValueError) as error:
            raise ConfigError(
                f"no OpenEnv server answers at {address}: {error}; start it, as with uvicorn PACKAGE.server.app:app"
            ) from error
    return found
