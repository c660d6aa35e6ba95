"""An MCP server for tests: over its input and output, or with the argument ``http`` over HTTP, at the port that it
writes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import uvicorn
from mcp.server import MCPServer

server = MCPServer("counter", version="1.2")
total = 0


@server.tool()
def add(number: int) -> str:
    """Add to the total."""
    global total
    total += number
    return f"{total}"


@server.tool()
def write(path: str, text: str) -> str:
    """Write a file."""
    with open(path, "w") as file:
        file.write(text)
    return os.getcwd()


@server.tool()
def variable(which: str = os.environ.get("MCP_KEY", "PATH")) -> str:
    """What a variable of the environment holds."""
    return os.environ.get(which, "nothing")


@server.tool()
def refuse() -> str:
    """Fail."""
    raise ValueError("not today")


@server.tool()
def sleep() -> str:
    """Take long."""
    time.sleep(3600)
    return ""


@server.tool()
def leave(code: int) -> str:
    """End the server."""
    sys.stderr.write("it is over\n")
    os._exit(code)


@server.tool()
def many(characters: int) -> str:
    """Answer much."""
    return "a" * characters


@server.tool()
def start() -> str:
    """Start a process that stays."""
    process = subprocess.Popen(["sleep", "3600"], start_new_session=True, stdin=subprocess.DEVNULL)
    return f"{process.pid} {os.getpid()}"


if __name__ == "__main__":
    if sys.argv[1:] == ["http"]:
        listening = socket.create_server(("127.0.0.1", 0))
        sys.stdout.write(f"{listening.getsockname()[1]}\n")
        sys.stdout.flush()
        uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error")).run([listening])
    else:
        server.run("stdio")
