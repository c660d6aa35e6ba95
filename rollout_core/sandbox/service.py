"""The sandbox of this machine for others: ``python -m rollout_core.sandbox.service``.

It speaks the protocol of `remote`. Beyond loopback it listens only with a key. A machine for it alone is a further
wall: it needs no storage, no database, and no other key.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollout_core.base.errors import ConfigError, Conflict, NotFound
from rollout_core.sandbox.programs import Program
from rollout_core.sandbox.remote import MOST_BYTES, walls_json
from rollout_core.sandbox.sandbox import AUTO, Sandbox, SandboxSettings
from rollout_core.sandbox.walls import NoSandbox
from rollout_core.web.listening import (
    DEFAULT_HOST,
    BodyLimits,
    Gate,
    Gone,
    MainServer,
    listen,
    read_body,
    require_key,
    url_of,
    uvicorn_config,
)
from rollout_core.web.replies import error_reply
from rollout_core.web.threads import ServerThread

KINDS = ("auto", *AUTO)
WALLS = "/v1/walls"
LIMITS = BodyLimits(max_bytes=MOST_BYTES)


class SandboxService:
    """Serves a sandbox, which it closes in the end. ``url`` has the port that it got."""

    def __init__(self, sandbox: Sandbox, host: str = DEFAULT_HOST, port: int = 0, api_key: str | None = None) -> None:
        require_key(host, api_key)
        self._sandbox = sandbox
        self._pool = ThreadPoolExecutor(sandbox.parallel, thread_name_prefix="rollout-sandbox-service")
        self._app = Gate(self._serve, api_key)  # before a body is read
        self._listener = listen(host, port)
        self._thread: ServerThread | None = None
        self.url = url_of(host, self._listener.getsockname()[1])

    def start(self) -> SandboxService:
        """Serve in a thread, until `close`."""
        self._thread = ServerThread(
            lambda thread, listener: thread.serve(self._app, listener), self._listener, "sandbox service"
        )
        self._thread.started.result()
        return self

    def run(self, on_serving: Callable[[], None]) -> None:
        """Serve until SIGTERM or SIGINT."""
        config = uvicorn_config(self._app)
        config.lifespan = "off"
        MainServer(config, on_serving).run(sockets=[self._listener])

    def close(self) -> None:
        """End it and its sandbox."""
        if self._thread is not None:
            self._thread.ask_to_stop()
            self._thread.join()
        self._listener.close()
        self._pool.shutdown()
        self._sandbox.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = self._answers().get((scope["method"], scope["path"]))
            if answer is None:
                raise NotFound(f"{scope['method']} {scope['path'][:100]} is unknown to a sandbox service")
            body = await read_body(scope, receive, LIMITS)
            # Walls are reported while every place is taken.
            pool = None if scope["path"] == WALLS else self._pool
            content = await asyncio.get_running_loop().run_in_executor(pool, answer, body)
            reply = Response(content, media_type="application/json")
        except Gone:
            return
        except NoSandbox as error:
            reply = error_reply(Conflict(str(error)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets an answer
            reply = error_reply(error)
        await reply(scope, receive, send)

    def _answers(self) -> dict[tuple[str, str], Callable[[bytes], bytes]]:
        return {
            ("GET", WALLS): lambda _: _json(walls_json(self._sandbox.walls())),
            ("POST", "/v1/programs"): lambda body: _json(self._sandbox.run(Program.from_json(_parsed(body))).to_json()),
            ("POST", "/v1/linked"): self._linked,
        }

    def _linked(self, body: bytes) -> bytes:
        given = _parsed(body)
        if not isinstance(given, list) or len(given) != 2:
            raise ConfigError("linked programs are two")
        return _json([outcome.to_json() for outcome in self._sandbox.run_linked(*map(Program.from_json, given))])


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ConfigError("expected JSON") from None


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m rollout_core.sandbox.service", description=__doc__)
    parser.add_argument("--host", default=DEFAULT_HOST)
    parser.add_argument("--port", type=int, default=8321)
    parser.add_argument("--api-key-file", type=Path, help="file with the key that callers must send")
    parser.add_argument("--kind", default="auto", help=", ".join(KINDS))
    parser.add_argument("--parallel", type=int, help="programs at a time; default: one for each processor")
    asked = parser.parse_args()
    try:
        service = _service_of(asked)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    try:
        service.run(lambda: _say(service.url))
    finally:
        service.close()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _service_of(asked: argparse.Namespace) -> SandboxService:
    """Raises ConfigError where this machine has no sandbox, and for options that cannot be."""
    key = None if asked.api_key_file is None else _key_in(asked.api_key_file)
    if asked.kind not in KINDS:
        raise ConfigError(f"--kind {asked.kind}: a service has its own machine's sandbox; expected {', '.join(KINDS)}")
    sandbox = Sandbox(SandboxSettings(kind=asked.kind, parallel=asked.parallel))
    try:
        walls = sandbox.walls()
        if not walls.stand:
            raise ConfigError(f"this machine has no sandbox: {'; '.join(walls.missing())}")
        return SandboxService(sandbox, asked.host, asked.port, key)
    except BaseException:
        sandbox.close()
        raise


def _key_in(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"--api-key-file {path} cannot be read: {reason}") from None


if __name__ == "__main__":
    main()
