"""The sandbox of this machine for others: ``python -m rollout_core.sandbox.service``.

It speaks the protocol of `remote`. Beyond loopback it listens only with a key. A machine for it alone is a further
wall: it needs no storage, no database, and no other key.
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import json
import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.sandbox.programs import Program
from rollout_core.sandbox.remote import MOST_BYTES, walls_json
from rollout_core.sandbox.sandbox import Sandbox, SandboxSettings

log = logging.getLogger(__name__)


class SandboxService:
    """Serves a sandbox until `close`. ``url`` has the port that it got."""

    def __init__(self, sandbox: Sandbox, host: str = "127.0.0.1", port: int = 0, api_key: str | None = None) -> None:
        if not api_key and not _is_loopback(host):
            raise ConfigError(f"a sandbox service without a key is to listen at {host}; expected a key, or 127.0.0.1")
        self._sandbox = sandbox
        handler = type("Handler", (_Handler,), {"sandbox": sandbox, "api_key": api_key})
        self._server = ThreadingHTTPServer((host, port), handler)
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="rollout-sandbox-service", daemon=True)

    def start(self) -> SandboxService:
        """Serve in a thread."""
        self._thread.start()
        return self

    def wait(self) -> None:
        """Until it is closed, or the process is interrupted."""
        self._thread.join()

    def close(self) -> None:
        """End it and its sandbox."""
        self._server.shutdown()
        self._server.server_close()
        self._sandbox.close()


class _Handler(BaseHTTPRequestHandler):
    sandbox: Sandbox
    api_key: str | None
    protocol_version = "HTTP/1.1"
    timeout = 120

    def do_GET(self) -> None:
        self._answer(lambda _: walls_json(self.sandbox.walls()), "/v1/walls")

    def do_POST(self) -> None:
        if self.path == "/v1/linked":
            self._answer(self._linked, self.path)
        else:
            self._answer(lambda body: self.sandbox.run(Program.from_json(body)).to_json(), "/v1/programs")

    def _linked(self, body: Any) -> list[dict[str, Any]]:
        if not isinstance(body, list) or len(body) != 2:
            raise ConfigError("linked programs are two")
        return [outcome.to_json() for outcome in self.sandbox.run_linked(*map(Program.from_json, body))]

    def _answer(self, make: Any, path: str) -> None:
        body = self._read()
        if body is None:
            return self._send(413, {"error": f"expected a body of at most {MOST_BYTES} bytes, with its length"})
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        if self.api_key and not hmac.compare_digest(given, self.api_key.encode()):
            return self._send(401, {"error": "expected the service's key: Authorization: Bearer KEY"})
        if self.path != path:
            return self._send(404, {"error": f"{self.path[:100]} is unknown; expected {path}"})
        try:
            return self._send(200, make(json.loads(body) if body else None))
        except ConfigError as error:
            return self._send(400, {"error": str(error)})
        except ValueError:
            return self._send(400, {"error": "expected JSON"})
        except Recoverable as error:
            return self._send(503, {"error": str(error)})

    def _read(self) -> bytes | None:
        length = self.headers.get("Content-Length", "0")
        if not length.isdigit() or int(length) > MOST_BYTES or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            return None
        return self.rfile.read(int(length))

    def _send(self, status: int, message: Any) -> None:
        content = json.dumps(message).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        log.debug(format, *arguments)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m rollout_core.sandbox.service", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8321)
    parser.add_argument("--api-key-file", type=Path, help="file with the key that callers must send")
    parser.add_argument("--kind", default="auto", help="auto, namespaces or bubblewrap")
    parser.add_argument("--parallel", type=int, help="programs at a time; default: one for each processor")
    asked = parser.parse_args()
    key = asked.api_key_file.read_text(encoding="utf-8").strip() if asked.api_key_file else None
    sandbox = Sandbox(SandboxSettings(kind=asked.kind, parallel=asked.parallel))
    try:
        walls = sandbox.walls()
        if not walls.stand:
            raise ConfigError(f"this machine has no sandbox: {'; '.join(walls.missing())}")
        service = SandboxService(sandbox, asked.host, asked.port, key).start()
    except (ConfigError, OSError) as error:
        sandbox.close()
        sys.exit(f"error: {error}")
    sys.stdout.write(f"{service.url}\n")
    sys.stdout.flush()
    try:
        service.wait()
    except KeyboardInterrupt:
        service.close()


if __name__ == "__main__":
    main()
