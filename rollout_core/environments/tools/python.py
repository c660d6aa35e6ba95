"""The tool that runs Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollout_core.config.tools import PythonTool
from rollout_core.environments.schemas import function_schema
from rollout_core.environments.tools.folder import EpisodeFolder
from rollout_core.environments.tools.results import Output
from rollout_core.environments.tools.sandboxed import Reply, SandboxedCalls
from rollout_core.sandbox import Sandbox

_KEPT = "Variables, functions and imports stay for later calls."
_FRESH = "Each call begins anew: variables of earlier calls are gone, and files stay."
LOST = "The interpreter was ended: variables, functions and imports of earlier calls are gone. Files stay."


class Python:
    """Python code, in a sandbox."""

    def __init__(self, spec: PythonTool, sandbox: Sandbox, folder: EpisodeFolder) -> None:
        self.name = spec.name
        self.output_characters = spec.output_characters
        self._keeps_state = spec.keeps_state
        self._folder = folder
        self._calls = SandboxedCalls(spec, sandbox, folder, keeps_state=spec.keeps_state)
        how = _KEPT if spec.keeps_state else _FRESH
        base = function_schema(Python.run)
        self.schema: Mapping[str, Any] = base.schema(
            spec.name, f"{base.description} {how} A call may take {spec.seconds:g} seconds."
        )

    async def run(self, code: str) -> Output:
        """Run Python code and return what it writes. The value of a last line that is an expression is written, too.

        Args:
            code: Python source, of one or many lines.
        """
        async with self._folder.lock:
            before = self._calls.has_state
            reply = await self._calls.call("python", code)
        return self._told(reply, before)

    def _told(self, reply: Reply, had_state: bool) -> Output:
        notes = list(reply.notes)
        failed = reply.ended != "done" or reply.code != 0
        if reply.ended == "exit":
            notes.insert(0, f"The interpreter ended with code {reply.code}.")
        if reply.ended != "done" and self._keeps_state and (had_state or reply.ended != "lost"):
            notes.append(LOST)
        return with_notes(reply.output, notes, is_error=failed)

    async def call(self, arguments: Mapping[str, Any]) -> Output:
        return await self.run(**function_schema(Python.run).checked(arguments))

    async def close(self) -> None:
        await self._calls.close()


def with_notes(output: Output, notes: list[str], *, is_error: bool) -> Output:
    """The output with a line for each note below it."""
    if not notes:
        return replace(output, is_error=is_error)
    last = output.tail or output.head
    text = ("\n" if last and not last.endswith("\n") else "") + "\n".join(notes)
    if output.num_cut:
        return replace(output, tail=output.tail + text, is_error=is_error)
    return replace(output, head=output.head + text, is_error=is_error)
