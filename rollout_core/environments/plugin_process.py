"""The process of a plugin of kind ``env-harness``: in it a Python plugin's environment plays as a user's own does, and
a sidecar is asked one call after another.

What a call asks, and what its answer is, are in `docs/plugins.md`. A program that serves several episodes tells them
apart by ``episode``, which is another one at each attempt.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from rollout_core.base.errors import ConfigError, Fatal, shown
from rollout_core.environments.host_process import maker
from rollout_core.environments.object_host import CLOSING_SECONDS, ONE_TURN, Serving, answer
from rollout_core.environments.protocol import (
    EnvironmentFailed,
    clean_text,
    described_tools,
    messages_of,
    reward_of,
    turn_reward_of,
)
from rollout_core.environments.tools.results import ToolError
from rollout_core.plugins.in_process import load
from rollout_core.plugins.sidecar import Sidecar

_plugin: Any = None
"""What a Python plugin's factory made, or a `_Program`."""
_answer_bytes = 0


def handle(given: dict[str, Any], report: Callable[[int], None]) -> dict[str, Any]:
    """Start the plugin by the first request; then as `host_process.handle`."""
    global _plugin, _answer_bytes
    if "start" in given:
        start, _answer_bytes = given["start"], given["answer_bytes"]
        if "command" in start:
            _plugin = _Program(Sidecar(**start, answer_bytes=_answer_bytes), start["name"])
        else:
            _plugin = load(**start)
        return {}
    if not isinstance(_plugin, _Program):
        return answer(given, maker(_plugin, given["name"], given["config"]), report, _answer_bytes)
    try:
        if given["memory"] is not None:
            raise ConfigError(f"plugin {_plugin.name} is a sidecar, which has no memory; leave out episodic_memory")
        if given["rows"] is not None:
            return {"rows": _plugin.rows(**given["rows"])}
        if given["socket"] is None:
            return _plugin.offer()
        asyncio.run(_Turns(_plugin, report).serve(given["socket"]))
        return {}
    finally:
        _plugin.shut_down()


class _Program:
    """A sidecar, greeted, and what it answers to calls."""

    def __init__(self, sidecar: Sidecar, name: str) -> None:
        """Raises ConfigError where it is not what its manifest says, or describes what no environment has."""
        self._sidecar, self.name = sidecar, name
        sidecar.greet()
        said = self._before_episodes("describe")
        self.tools = described_tools(said.get("tools", []), f"plugin {name}: at describe")
        self._has = {name: said.get(name, False) for name in ("has_step", "has_turn_reward")}
        if wrong := [name for name, value in self._has.items() if not isinstance(value, bool)]:
            self._refuse("describe", wrong[0], self._has[wrong[0]], "true or false")

    def offer(self) -> dict[str, Any]:
        """What it has for a model, as `hosts.Offer`."""
        found = {"tools": [tool.schema() for tool in self.tools.values()], **self._has}
        return found if self.tools or self._has["has_step"] else {**found, "note": ONE_TURN}

    def rows(self, **asked: Any) -> list[dict[str, Any]]:
        """Rows of its own. Raises ConfigError."""
        rows = self._before_episodes("make_rows", **asked).get("rows")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            self._refuse(
                "make_rows", "rows", rows, "a list of objects; where it has none of its own, give a file of rows"
            )
        return rows

    def ask(self, method: str, **about: Any) -> dict[str, Any]:
        """Its result, an object. Raises EnvironmentFailed for its own error, and for what is no result; Fatal where it
        does not answer as its protocol has it, and cannot be asked any more."""
        found = self._sidecar.ask("Call", {"method": method, **about})
        if "error" in found:
            raise EnvironmentFailed(f"plugin {self.name}: at {method} it says: {found['error']}")
        if not isinstance(found["result"], dict):
            said = shown(found["result"])
            raise EnvironmentFailed(f"plugin {self.name}: at {method} it answered with {said}; expected an object")
        return found["result"]

    def ended(self) -> str | None:
        """How it ended, if it has."""
        return self._sidecar.ended()

    def shut_down(self) -> None:
        """Ask it to end, for which it has a moment."""
        self._sidecar.shut_down()

    def _before_episodes(self, method: str, **about: Any) -> dict[str, Any]:
        try:
            return self.ask(method, **about)
        except Fatal as error:
            is_its_own = isinstance(error, EnvironmentFailed)
            raise ConfigError(str(error) if is_its_own else f"plugin {self.name}: at {method} it {error}") from error

    def _refuse(self, method: str, key: str, got: Any, expected: str) -> NoReturn:
        raise ConfigError(f"plugin {self.name}: at {method}, {key}: got {shown(got)}; expected {expected}")


class _Turns(Serving):
    """One call of a sidecar after another. One that it does not answer as it should costs the episode that it is of,
    and ends this process; the other episodes begin again for nothing."""

    def __init__(self, program: _Program, report: Callable[[int], None]) -> None:
        super().__init__(report)
        self._program = program
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._broken: str | None = None
        """Why nothing more can be asked."""
        self._known: set[str] = set()
        """Episodes whose `reset` the sidecar got."""

    @property
    def is_busy(self) -> bool:
        return super().is_busy or self._broken is not None

    async def _handle(self, asked: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        self._num_waiting += 1
        has_turn = False
        try:
            # An episode that is given up waits for nothing that may never end.
            async with asyncio.timeout(CLOSING_SECONDS if asked["method"] == "give_up" else None):
                has_turn = await self._turn.acquire()
            self._broken = self._broken or self._program.ended()
            found = {"ended": self._broken} if self._broken is not None else await self._answered(asked)
            await self._write(asked, found, writer)
        except TimeoutError:
            self._lost += 1
            await self._write(asked, {"late": True}, writer)
        finally:
            self._num_waiting -= 1
            if has_turn:
                self._turn.release()
        if self._broken is not None and not self._num_waiting:
            sys.stderr.write(f"the sidecar is ended: {self._broken}\n")
            sys.stderr.flush()
            os._exit(1)

    async def _call(self, key: str, method: str, arguments: list[Any]) -> Any:
        match method:
            case "reset":
                self._known.add(key)
                row, seed = arguments
                return messages_of((await self._ask(method, key, row=row, seed=seed)).get("messages"), method)
            case "step":
                found = await self._ask(method, key, message=arguments[0])
                return None if found.get("done") is True else messages_of(found.get("messages"), method)
            case "turn_reward":
                return turn_reward_of((await self._ask(method, key)).get("reward"))
            case "reward":
                return reward_of((await self._ask(method, key)).get("reward"))
            case "close" | "give_up":
                if key in self._known:
                    self._known.discard(key)
                    await self._ask("close", key)
                return None
            case _:
                return await self._use_tool(key, method.removeprefix("tool:"), arguments[0])

    async def _use_tool(self, key: str, name: str, arguments: Any) -> dict[str, Any]:
        if (tool := self._program.tools.get(name)) is None:
            raise EnvironmentFailed(f"plugin {self._program.name} describes no tool {name!r} any more")
        try:
            checked = tool.checked(arguments)
        except ToolError as error:
            return {"text": clean_text(str(error)), "is_error": True, "done": False}
        found = await self._ask("tool", key, name=name, arguments=checked)
        marks = {mark: found.get(mark, False) for mark in ("is_error", "done")}
        if not isinstance(found.get("text"), str) or not all(isinstance(value, bool) for value in marks.values()):
            raise EnvironmentFailed(
                f"tool {name} of plugin {self._program.name} answered with {shown(found)}; expected text, and is_error "
                "and done, true or false"
            )
        return {"text": clean_text(found["text"]), **marks}

    async def _ask(self, method: str, episode: str, **about: Any) -> dict[str, Any]:
        # Until it has answered: whatever ends this before, what it answers later would be taken for another answer.
        self._broken = f"it did not answer to {method}"
        try:
            found = await asyncio.to_thread(self._program.ask, method, episode=episode, **about)
        except EnvironmentFailed:
            self._broken = None
            raise
        except Fatal as error:
            self._broken = f"plugin {self._program.name}: at {method} it {error}"
            raise EnvironmentFailed(self._broken) from error
        self._broken = None
        return found
