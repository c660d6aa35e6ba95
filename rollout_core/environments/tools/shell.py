"""The tool that runs commands of a shell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_core.config.tools import ShellTool
from rollout_core.environments.schemas import function_schema
from rollout_core.environments.tools.folder import EpisodeFolder
from rollout_core.environments.tools.python import with_notes
from rollout_core.environments.tools.results import Output, ToolError
from rollout_core.environments.tools.sandboxed import SandboxedCalls
from rollout_core.sandbox import Sandbox

MOST_COMMAND = 100_000
"""Bytes of a command line: Linux takes no argument of more than 128 KiB."""
RESTRICTED = (
    "The shell is restricted to the programs {programs}, by their names; it refuses paths in their place, > and cd."
)


class Shell:
    """A shell, in a sandbox; another one for each call."""

    def __init__(self, spec: ShellTool, sandbox: Sandbox, folder: EpisodeFolder) -> None:
        self.name = spec.name
        self.output_characters = spec.output_characters
        self._folder = folder
        self._programs = None if spec.commands == "any" else list(spec.commands)
        self._calls = SandboxedCalls(spec, sandbox, folder, keeps_state=False)
        base = function_schema(Shell.run)
        listed = "" if self._programs is None else f" {RESTRICTED.format(programs=', '.join(self._programs))}"
        self.schema: Mapping[str, Any] = base.schema(
            spec.name, f"{base.description}{listed} A call may take {spec.seconds:g} seconds."
        )

    async def run(self, command: str) -> Output:
        """Run a command line of a shell in the working folder and return what it writes. Files stay between calls;
        variables and processes do not.

        Args:
            command: The command line, such as 'ls | head'.
        """
        size = len(command.encode("utf-8", "surrogatepass"))
        if size > MOST_COMMAND:
            raise ToolError(
                f"the command line has {size:,} bytes; it may have {MOST_COMMAND:,}. Write a file, and run that"
            )
        if "\0" in command or command != command.encode(errors="replace").decode():
            raise ToolError("the command line holds a null character, or half of one of two parts; leave it out")
        async with self._folder.lock:
            reply = await self._calls.call("shell", command, self._programs)
        notes = list(reply.notes)
        if reply.ended == "exit" and reply.code:
            notes.insert(0, f"exit code {reply.code}")
        return with_notes(reply.output, notes, is_error=reply.ended != "exit" or reply.code != 0)

    async def call(self, arguments: Mapping[str, Any]) -> Output:
        return await self.run(**function_schema(Shell.run).checked(arguments))

    async def close(self) -> None:
        await self._calls.close()
