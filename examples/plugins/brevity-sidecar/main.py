"""The reward of `brevity` as a program: JSON in frames over a Unix socket, with Python's standard library."""

import json
import socket
import struct
import sys


def read_frame(connection):
    head = connection.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        return None
    (size,) = struct.unpack(">I", head)
    return json.loads(connection.recv(size, socket.MSG_WAITALL))


def write_frame(connection, value):
    text = json.dumps(value).encode()
    connection.sendall(struct.pack(">I", len(text)) + text)


def score(sample, limit):
    excess = len(sample["completion"]) - limit
    return max(0.0, min(1.0, 1.0 - excess / limit))


def main():
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[-1])
        listening.listen(1)
        connection, _ = listening.accept()
    limit = 100
    while (request := read_frame(connection)) is not None:
        method, payload = request["method"], request["payload"]
        result = {}
        if method == "Init":
            limit = payload["config"].get("limit", 100)
            result = {"protocol": 1, "name": payload["name"], "kind": "reward-model"}
        elif method == "Call":
            result = {"rewards": [score(sample, limit) for sample in payload["inputs"]]}
        write_frame(connection, {"result": result})
        if method == "Shutdown":
            break


if __name__ == "__main__":
    main()
