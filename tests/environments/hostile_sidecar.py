"""A sidecar with an environment of three turns, that does what an episode's row says at the turn that it says, the
first time that it comes to it, and what its configuration says at ``describe``. Of another kind, its tool alone, which
counts its uses."""

import json
import os
import pathlib
import signal
import socket
import struct
import sys
import time

TOOL = {"name": "echo", "description": "Say it again.", "parameters": {"type": "object", "required": ["text"]}}


def frame(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text


def wrong(how: str, connection: socket.socket) -> object:
    """What it answers, where it still does."""
    if how == "hang":
        time.sleep(3600)
    elif how == "crash":
        os._exit(3)
    elif how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "garbage":
        connection.sendall(frame(b"\xff not JSON"))
    elif how == "long":
        connection.sendall(struct.pack(">I", 2**32 - 1))
    elif how == "flood":
        while True:
            sys.stderr.write("x" * 65536 + "\n")
    elif how == "close":
        connection.shutdown(socket.SHUT_RDWR)
        time.sleep(3600)
    return {"text": {}, "no messages": {}, "no object": [1]}.get(how, {})


def main() -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[-1])
        listening.listen(1)
        connection, _ = listening.accept()
    config: dict = {}
    episodes: dict = {}
    while len(head := connection.recv(4, socket.MSG_WAITALL)) == 4:
        request = json.loads(connection.recv(struct.unpack(">I", head)[0], socket.MSG_WAITALL))
        method, asked = request["method"], request["payload"]
        answer: dict = {"result": {}}
        if method == "Init":
            config = asked["config"]
            about = {"name": asked["name"], "kind": asked["kind"]}
            answer = {"result": {"protocol": 1, **about}}
        elif method == "Call":
            answer = called(asked, episodes, config, connection)
        connection.sendall(frame(json.dumps(answer).encode()))
        if method == "Shutdown":
            return


def called(asked: dict, episodes: dict, config: dict, connection: socket.socket) -> dict:
    match asked["method"]:
        case "describe":
            if "hang" in config:
                time.sleep(3600)
            return {"result": {"tools": [TOOL], "has_step": True, **config.get("describes", {})}}
        case "reset":
            episodes[asked["episode"]] = [asked["row"], 0]
            return {"result": {"messages": asked["row"]["task"]}}
        case "step":
            row, turn = episodes[asked["episode"]]
            turn = episodes[asked["episode"]][1] = turn + 1
            mark = pathlib.Path(config["marks"]) / f"{row['task']}-{turn}"
            if turn == row["at"] and row["how"] not in ("none", "nan") and not mark.exists():
                mark.touch()
                if row["how"] == "says":
                    return {"error": "no more cards"}
                return {"result": wrong(row["how"], connection)}
            return {"result": {"done": True} if turn == 3 else {"messages": f"turn {turn}"}}
        case "tool":
            text = asked["arguments"]["text"]
            mark = pathlib.Path(config["marks"]) / "tool"
            if text.startswith("do ") and not mark.exists():
                mark.touch()
                return {"result": wrong(text.removeprefix("do "), connection)}
            uses = episodes.setdefault(asked["episode"], [None, 0])
            uses[1] += 1
            return {"result": {"text": f"{uses[1]} {text}"}}
        case "reward":
            row, turn = episodes[asked["episode"]]
            return {"result": {"reward": float("nan") if row["how"] == "nan" else turn}}
        case "close":
            del episodes[asked["episode"]]
            with open(pathlib.Path(config["marks"]) / "closed", "a") as closed:
                closed.write(asked["episode"] + "\n")
            return {"result": {}}
    return {"error": f"no method {asked['method']}"}


if __name__ == "__main__":
    main()
