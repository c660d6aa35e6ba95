"""The tool that reads and writes files of the episode's folder."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

from rollout_core.config.tools import FilesTool
from rollout_core.environments.schemas import function_schema
from rollout_core.environments.tools.folder import EpisodeFolder, parts_of
from rollout_core.environments.tools.results import ToolError


class Files:
    """Files of the episode's folder, which programs of other tools see, too."""

    def __init__(self, spec: FilesTool, folder: EpisodeFolder) -> None:
        self.name = spec.name
        self.output_characters = spec.output_characters
        self._spec = spec
        self._folder = folder
        self._function = function_schema(Files.change if spec.writable else Files.look)
        self.schema: Mapping[str, Any] = self._function.schema(spec.name)

    async def change(self, action: Literal["list", "read", "write"], path: str = ".", content: str = "") -> str:
        """List a folder, read a file, or write one. Writing replaces the file and makes the folders above it.

        Args:
            action: What to do.
            path: Path of the file or folder, relative to the working folder.
            content: The whole text to write; for 'write' alone.
        """
        if action == "write":
            async with self._folder.lock:
                return await asyncio.to_thread(self._write, path, content)
        if content:
            raise ToolError(f"content is for the action 'write', and not for {action!r}; leave it out")
        return await self.look(action, path)

    async def look(self, action: Literal["list", "read"], path: str = ".") -> str:
        """List a folder, or read a file.

        Args:
            action: What to do.
            path: Path of the file or folder, relative to the working folder.
        """
        async with self._folder.lock:
            return await asyncio.to_thread(self._list if action == "list" else self._read, path)

    def _list(self, path: str) -> str:
        found = self._folder.entries()
        name = "/".join(parts_of(path))
        if name and name not in found:
            raise ToolError(f"{path} does not exist")
        if name and not found[name].is_folder:
            return f"{name} ({found[name].size:,} bytes)"
        prefix = f"{name}/" if name else ""
        lines = [
            f"{below}/" if entry.is_folder else f"{below} ({entry.size:,} bytes)"
            for below, entry in sorted(found.items())
            if below.startswith(prefix)
        ]
        return "\n".join(lines) or "the folder is empty"

    def _read(self, path: str) -> str:
        content = self._folder.read(path, self._spec.file_bytes)
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise ToolError(f"{path} is no text in UTF-8, so that it cannot be shown") from None

    def _write(self, path: str, text: str) -> str:
        spec = self._spec
        content = text.encode(errors="replace")
        if len(content) > spec.file_bytes:
            raise ToolError(f"the content has {len(content):,} bytes; a file may have {spec.file_bytes:,}")
        name, found = "/".join(parts_of(path)), self._folder.entries()
        total = sum(entry.size for other, entry in found.items() if other != name)
        if total + len(content) > spec.folder_bytes:
            raise ToolError(
                f"the folder would hold {total + len(content):,} bytes; it may hold {spec.folder_bytes:,}. Write less, "
                "or shorten other files"
            )
        parts = parts_of(path)
        made = {"/".join(parts[:end]) for end in range(1, len(parts) + 1)} - found.keys()
        if len(found) + len(made) > spec.max_files:
            raise ToolError(f"the folder may hold {spec.max_files:,} files and folders, and has {len(found):,}")
        self._folder.write(path, content)
        return f"{name} written ({len(content):,} bytes)"

    async def call(self, arguments: Mapping[str, Any]) -> str:
        values = self._function.checked(arguments)
        return await (self.change(**values) if self._spec.writable else self.look(**values))

    async def close(self) -> None:
        """Nothing is held."""
