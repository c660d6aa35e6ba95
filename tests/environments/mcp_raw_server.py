"""A server that speaks the protocol by hand, so that it can break it: its one tool does what it is told to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]}
HOW = sys.argv[1] if len(sys.argv) > 1 else ""


def say(value: Any) -> None:
    sys.stdout.write((value if isinstance(value, str) else json.dumps(value)) + "\n")
    sys.stdout.flush()


def act(what: str) -> Any:
    if what == "garbage":
        for _ in range(100):
            say("Traceback: this is no message")
        return {"content": [{"type": "text", "text": "still here"}]}
    if what == "wrong":
        return {"content": 7}
    if what == "line":
        while True:
            sys.stdout.write("x" * 2**16)
    if what == "lines":
        while True:
            say({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": 1}})
    if what == "log":
        while True:
            os.write(2, b"x" * 2**16)
    if what == "closed":
        os.close(1)
        sys.stdin.read()
    if what == "hang":
        sys.stdin.read()
    if what == "killed":
        os.kill(os.getpid(), 9)
    return {"content": [{"type": "text", "text": "\udce9 " + what}]}


def answer(asked: dict[str, Any]) -> Any:
    if HOW == "mute":
        sys.stdin.read()
    if HOW == "ends":
        sys.exit("I need a database")
    match asked["method"]:
        case "initialize":
            info = {"name": "raw", "version": "1"}
            return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            if HOW == "listless":
                sys.stderr.write(f"my key is {os.environ.get('MCP_KEY')}\n")
                sys.stderr.flush()
                sys.stdin.read()
            return {"tools": json.loads(Path(HOW).read_text()) if HOW.endswith(".json") else [TOOL]}
        case "tools/call":
            return act(asked["params"]["arguments"]["what"])


TOOL = {"name": "act", "description": "Act.", "inputSchema": SCHEMA}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        found = answer(asked)
        error = {"error": {"code": -32601, "message": "there is no such method"}}
        say({"jsonrpc": "2.0", "id": asked["id"], **(error if found is None else {"result": found})})
