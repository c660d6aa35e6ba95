"""How tools run what a model wrote: in a sandbox, with the episode's files, which come back as they are after it.

Each call takes what has changed in the episode's folder into the sandbox, and brings what the program changed out. In
between, and where a process of Python is kept, the files that programs see are a copy in memory, which goes with the
sandbox. `supervisor` is what runs in there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_core.base.errors import Recoverable
from rollout_core.config.tools import SandboxedTool
from rollout_core.environments.tools.folder import Entry, EpisodeFolder
from rollout_core.environments.tools.results import Output, ToolError
from rollout_core.rewards.verifiers.code_reward import sandbox_settings
from rollout_core.sandbox import Limits, Outcome, Program, Sandbox, Session

LENGTH_BYTES = 8
FLOOD_BYTES = 64 * 2**20
"""Written by a call: past this it is ended, however much of it is kept."""
MOST_FILES = 4_000
"""Files and folders in the folder of an episode whose tools run programs."""
EPISODE_SECONDS = 7 * 86_400.0
"""Of an interpreter that is kept. Who opened the tools closes them long before."""
GRACE_SECONDS = 10.0
"""Beyond a call's own limit for the supervisor to answer; past it, it is taken for hung."""
MOST_HEAD = 64 * 2**20
"""Bytes of an answer's names and figures."""
CONTINUATION = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that begin no character."""
_SOURCE = Path(__file__).with_name("supervisor.py")
_LIMITED = {
    "time": "took longer than {seconds:g} s, and was ended",
    "output": "wrote more than {flood:,} bytes, and was ended",
}


def sandbox_of(spec: SandboxedTool) -> Sandbox:
    """What a tool's programs run in; many episodes share it."""
    return Sandbox(sandbox_settings(spec.sandbox))


@dataclass(frozen=True)
class Reply:
    """How a call went."""

    ended: str
    """``done``, ``exit``, ``time`` or ``output``, as the supervisor has it; ``lost`` where the sandbox ended, too."""
    code: int
    output: Output
    notes: tuple[str, ...] = ()
    """What the model is to know besides."""


class SandboxedCalls:
    """Calls of one tool of one episode. They take turns: callers hold the folder's lock."""

    def __init__(self, spec: SandboxedTool, sandbox: Sandbox, folder: EpisodeFolder, *, keeps_state: bool) -> None:
        self._spec = spec
        self._sandbox = sandbox
        self._folder = folder
        self._keeps_state = keeps_state
        self._session: Session | None = None
        self._is_broken = False
        """A call was abandoned, and the session with it."""
        self._known: dict[str, Entry] = {}
        """Files and folders that the session has as they are in the folder."""

    @property
    def has_state(self) -> bool:
        """Whether an interpreter is kept."""
        return self._session is not None

    async def call(self, kind: str, source: str, programs: Sequence[str] | None = None) -> Reply:
        """Run it. Raises Recoverable and ConfigError for what the machine did, ToolError where the folder has too many
        files."""
        if self._is_broken:
            await self.close()
        head, blob = await asyncio.to_thread(self._asked)
        head |= {"kind": kind, "source": source, "programs": programs}
        try:
            if self._spec.sandbox_kind in ("docker", "gvisor", "command", "http"):
                answer, why = await self._once(head, blob)
            else:
                answer, why = await self._over_session(head, blob)
        except BaseException:
            self._stop()
            raise
        if answer is None:
            reply = Reply("lost", 0, Output(f"The program {why}; files that it wrote are lost."))
        else:
            reply = await asyncio.to_thread(self._taken, *answer)
        if not self._keeps_state or reply.ended != "done":
            await self.close()
        return reply

    async def close(self) -> None:
        """End the sandbox, with all that runs in it."""
        if self._session is not None:
            session, self._session = self._session, None
            self._known, self._is_broken = {}, False
            await asyncio.shield(asyncio.to_thread(_ended, session))

    def _stop(self) -> None:
        if self._session is not None:
            self._session.stop()
            self._is_broken = True

    # Over a session

    async def _over_session(self, head: dict[str, Any], blob: bytes) -> tuple[Any, str]:
        """The answer, or None and how the program ended."""
        if self._session is None:
            self._session = await asyncio.to_thread(self._sandbox.open, self._program(["channel"], EPISODE_SECONDS))
            self._session.channel.setblocking(False)
        channel, loop = self._session.channel, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._spec.seconds + GRACE_SECONDS):
                await loop.sock_sendall(channel, _message(head, blob))
                return await _received(channel, self._most_bytes), ""
        except TimeoutError:
            why = f"took longer than {self._spec.seconds:g} s, and was ended"
        except (ConnectionError, _NoAnswer):
            why = ""
        session, self._session = self._session, None
        self._known = {}
        outcome = await asyncio.shield(asyncio.to_thread(session.end))
        return None, why or _reason(outcome)

    # By one program for each call

    async def _once(self, head: dict[str, Any], blob: bytes) -> tuple[Any, str]:
        program = self._program(["once"], self._spec.seconds + GRACE_SECONDS, _message(head, blob))
        outcome = await self._sandbox.run_async(program)
        try:
            return _parsed(outcome.stdout, self._most_bytes), ""
        except _NoAnswer:
            return None, _reason(outcome)

    def _program(self, argv: list[str], wall_seconds: float, stdin: bytes = b"") -> Program:
        spec = self._spec
        limits = Limits(
            wall_seconds=wall_seconds,
            cpu_seconds=spec.cpu_seconds,
            memory_bytes=spec.memory_mb * 2**20,
            processes=spec.max_processes + 2,  # the supervisor, and what starts the model's
            output_bytes=self._most_bytes + MOST_HEAD,
            disk_bytes=spec.disk_mb * 2**20,
        )
        return Program(source=_SOURCE.read_text(encoding="utf-8"), argv=argv, stdin=stdin, limits=limits)

    @property
    def _kept_bytes(self) -> int:
        return 4 * self._spec.output_characters

    @property
    def _most_bytes(self) -> int:
        return 2 * self._kept_bytes + self._spec.disk_mb * 2**20

    # Files

    def _asked(self) -> tuple[dict[str, Any], bytes]:
        """What has changed in the folder since the session has seen it."""
        found = self._folder.entries()
        most_bytes = self._spec.disk_mb * 2**20
        size = sum(entry.size for entry in found.values())
        if len(found) > MOST_FILES or size > most_bytes:
            raise ToolError(
                f"the working folder holds {len(found):,} files and folders with {size:,} bytes, more than the "
                f"{MOST_FILES:,} with {most_bytes:,} bytes that programs can be given; remove some"
            )
        files, contents, folders = [], [], []
        for path, entry in found.items():
            if self._known.get(path) == entry:
                continue
            if entry.is_folder:
                folders.append(path)
                continue
            content = self._folder.read(path, most_bytes)
            mode = 0o755 if entry.is_executable else 0o644
            files.append([path, mode, len(content), entry.changed_ns])
            contents.append(content)
        removed = sorted((path for path in self._known if path not in found), reverse=True)
        self._known = found
        head = {
            "files": files,
            "folders": folders,
            "removed": removed,
            "seconds": self._spec.seconds,
            "keep": self._kept_bytes,
            "flood": FLOOD_BYTES,
            "most_files": MOST_FILES,
            "most_bytes": most_bytes,
        }
        return head, b"".join(contents)

    def _taken(self, head: Any, blob: bytes) -> Reply:
        """The reply, once the folder has what the program changed. The program may have written all of the answer."""
        if isinstance(head, dict) and isinstance(problem := head.get("problem"), str):
            return Reply("lost", 0, Output(problem[:500]))
        try:
            sizes = [_whole(head[name]) for name in ("head", "tail")]
            notes = self._changed(head, blob[sum(sizes) :])
            text, tail = blob[: sizes[0]], blob[sizes[0] : sum(sizes)]
            cut = _whole(head["cut"])
            if cut:
                tail = tail[:3].lstrip(CONTINUATION) + tail[3:]  # the rest of a character that counts as cut
            else:  # a character may lie on both sides
                text, tail = text + tail, b""
            output = Output(text.decode(errors="replace"), cut, tail.decode(errors="replace"))
            ended, code = str(head["ended"]), int(head["code"])
        except (KeyError, TypeError, ValueError, IndexError, OverflowError):
            return Reply("lost", 0, Output("The program has disturbed what runs it; files that it wrote are lost."))
        if ended in _LIMITED:
            limit = _LIMITED[ended].format(seconds=self._spec.seconds, flood=FLOOD_BYTES)
            notes = (f"The program {limit}.", *notes)
        return Reply(ended, code, output, notes)

    def _changed(self, head: Mapping[str, Any], blob: bytes) -> tuple[str, ...]:
        """Change the folder as the program's was changed."""
        left = [str(path) for path in head["left"]]
        num_left = max(_whole(head["num_left"]), len(left))
        total = len(self._known)
        for path in sorted(map(str, head["removed"]), reverse=True):  # what is in a folder before it
            self._folder.remove(path)
        kinds = {path: True for path in map(str, head["folders"])} | {str(path): False for path, *_ in head["files"]}
        for path, is_folder in kinds.items():
            if path in self._known and self._known[path].is_folder != is_folder:
                self._folder.remove(path)
        for path in map(str, head["folders"]):
            total += 1
            num_left += not self._kept(path, total, lambda path=path: self._folder.make_folder(path), left)
        offset = 0
        for path, mode, size, changed_ns in head["files"]:
            content = blob[offset : offset + _whole(size)]
            offset += len(content)
            total += path not in self._known
            options = {"is_executable": mode == 0o755, "changed_ns": min(_whole(changed_ns), 2**62)}
            num_left += not self._kept(
                str(path),
                total,
                lambda path=path, content=content, options=options: self._folder.write(path, content, **options),
                left,
            )
        self._known = self._folder.entries()
        if not num_left:
            return ()
        names = ", ".join(name[:80].encode(errors="backslashreplace").decode() for name in left[:5])
        return (
            f"{num_left} files are not kept, as they are links, not readable, too many or too large: {names}"
            + (", ..." if num_left > 5 else ""),
        )

    def _kept(self, path: str, total: int, keep: Any, left: list[str]) -> bool:
        try:
            if total > 2 * MOST_FILES:
                raise ToolError("too many")
            keep()
        except ToolError:
            left.append(path)
            return False
        return True


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def _ended(session: Session) -> None:
    with contextlib.suppress(Recoverable):  # the launcher is gone, and the program with it
        session.end()


def _reason(outcome: Outcome) -> str:
    if outcome.ended == "stopped":  # it closed the socket first
        return "ended what runs it"
    if outcome.ended == "time":
        return "took longer than it may, and was ended"
    return outcome.reason


# Messages, as `supervisor` has them


class _NoAnswer(Exception):
    """What came is no message."""


def _message(head: Mapping[str, Any], blob: bytes) -> bytes:
    text = json.dumps(head).encode()
    return b"".join((len(text).to_bytes(LENGTH_BYTES, "big"), len(blob).to_bytes(LENGTH_BYTES, "big"), text, blob))


def _sizes(lengths: bytes, most_bytes: int) -> tuple[int, int]:
    head, blob = (int.from_bytes(part, "big") for part in (lengths[:LENGTH_BYTES], lengths[LENGTH_BYTES:]))
    if head > MOST_HEAD or blob > most_bytes:
        raise _NoAnswer
    return head, blob


def _loaded(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _NoAnswer from None


def _parsed(message: bytes, most_bytes: int) -> tuple[Any, bytes]:
    if len(message) < 2 * LENGTH_BYTES:
        raise _NoAnswer
    head, blob = _sizes(message[: 2 * LENGTH_BYTES], most_bytes)
    rest = message[2 * LENGTH_BYTES :]
    if len(rest) != head + blob:
        raise _NoAnswer
    return _loaded(rest[:head]), rest[head:]


async def _received(channel: socket.socket, most_bytes: int) -> tuple[Any, bytes]:
    head, blob = _sizes(await _exactly(channel, 2 * LENGTH_BYTES), most_bytes)
    return _loaded(await _exactly(channel, head)), await _exactly(channel, blob)


async def _exactly(channel: socket.socket, size: int) -> bytes:
    loop, found = asyncio.get_running_loop(), bytearray()
    while len(found) < size:
        chunk = await loop.sock_recv(channel, min(size - len(found), 2**18))
        if not chunk:
            raise _NoAnswer
        found += chunk
    return bytes(found)


__all__ = ["Reply", "SandboxedCalls", "sandbox_of"]
