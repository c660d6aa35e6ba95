"""A sidecar that does to its host what the configuration says, at the calls whose prompts ask for it."""

import json
import os
import signal
import socket
import struct
import sys
import time

# The text of a prompt that is an attack, what is done at it.
HANG, CRASH, KILL, GARBAGE, FLOOD, NO_OBJECT, TWICE, LONG, TEXT, NAN, UNASKED, CLOSE, SAYS, LEAVE = (
    "hang", "crash", "kill", "garbage", "flood", "no object", "twice", "long", "text", "nan", "unasked", "close",
    "says", "leave",
)  # fmt: skip


def frame(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[-1])
        listening.listen(1)
        connection, _ = listening.accept()
    init: dict = {}
    while len(head := connection.recv(4, socket.MSG_WAITALL)) == 4:
        request = json.loads(connection.recv(struct.unpack(">I", head)[0], socket.MSG_WAITALL))
        method, payload = request["method"], request["payload"]
        result: object = {}
        if method == "Init":
            init = payload["config"]
            say(f"pid {os.getpid()}")
            result = {"protocol": 1, "name": payload["name"], "kind": payload["kind"], **init.get("lie", {})}
        elif method == "Preflight" and "refuse" in init:
            connection.sendall(frame(json.dumps({"error": init["refuse"]}).encode()))
            continue
        elif method == "Call":
            result = {"rewards": [1.0] * len(payload["inputs"])}
            what = payload["inputs"][0]["prompt"]
            say(f"asked to {what}")
            attack(what, connection)
            if what == TWICE:
                result = {"rewards": [1.0, 1.0]}
            elif what == TEXT:
                result = {"rewards": ["1.0"]}
            elif what == NAN:
                result = {"rewards": [float("nan")]}
            elif what == SAYS:
                connection.sendall(frame(json.dumps({"error": "no such word"}).encode()))
                continue
        connection.sendall(frame(json.dumps({"result": result}).encode()))
        if method == "Shutdown":
            return
        if method == "Call" and what == LEAVE:
            while not connection.recv(1, socket.MSG_PEEK):  # until the next request is there
                time.sleep(0.01)
            return
        if method == "Call" and what == UNASKED:
            connection.sendall(frame(b'{"result": {"rewards": [5.0]}}'))


def attack(what: str, connection: socket.socket) -> None:
    if what == HANG:
        time.sleep(3600)
    elif what == CRASH:
        os._exit(3)
    elif what == KILL:
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == GARBAGE:
        connection.sendall(frame(b"\xff not JSON"))
    elif what == NO_OBJECT:
        connection.sendall(frame(b"[1.0]"))
    elif what == LONG:
        connection.sendall(struct.pack(">I", 2**32 - 1))
    elif what == CLOSE:
        connection.shutdown(socket.SHUT_RDWR)
        time.sleep(3600)
    elif what == FLOOD:
        while True:
            sys.stderr.write("x" * 65536 + "\n")


if __name__ == "__main__":
    main()
