"""First plugins, of each kind and mode: files that work, with test cases that pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rollout_core.base.errors import ConfigError
from rollout_core.plugins.cases import TEST_CASES
from rollout_core.plugins.identity import PluginCode, read_plugin
from rollout_core.plugins.manifest import KINDS, MANIFEST, parse_manifest

_HEAD = """\
name = "{name}"
version = "0.1.0"
kind = "reward-model"
trait_id = "rollout_core::RewardModel"
mode = "{mode}"
network_allowlist = []    # ["*"]: it has the network
config_schema_path = "config.schema.json"
"""
_SCHEMA = """\
{
  "type": "object",
  "properties": {"word": {"type": "string", "minLength": 1}},
  "required": ["word"],
  "additionalProperties": false
}
"""
_CASES = """\
{"config": {"word": "four"}, "input": {"prompt": "2 + 2 =", "completion": "four"}, "reward": 1.0}
{"config": {"word": "four"}, "input": {"prompt": "2 + 2 =", "completion": "five"}, "reward": 0.0}
"""
_MODULE = '''\
"""1 where the completion has the configured word, else 0."""


def create_plugin(config):
    word = config["word"]

    def reward(sample):  # sample.prompt, .completion, .extras["answer"] of its row, and so on
        return 1.0 if word in sample.completion else 0.0

    return reward
'''
_PROGRAM = '''\
"""1 where the completion has the configured word, else 0. JSON in frames over a Unix socket."""

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


def main():
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[-1])
        listening.listen(1)
        connection, _ = listening.accept()
    config = {}
    while (request := read_frame(connection)) is not None:
        method, payload = request["method"], request["payload"]
        result = {}
        if method == "Init":
            config = payload["config"]
            result = {"protocol": 1, "name": payload["name"], "kind": payload["kind"]}
        elif method == "Call":
            found = [config["word"] in sample["completion"] for sample in payload["inputs"]]
            result = {"rewards": [1.0 if one else 0.0 for one in found]}
        write_frame(connection, {"result": result})
        if method == "Shutdown":
            break


if __name__ == "__main__":
    main()
'''
_IN_PROCESS = '\n[runtime]\npython_min = "3.11"\n\n[entry.in-process]\nmodule = "plugin"\nfactory = "create_plugin"\n'
_SIDECAR = '\n[limits]\ncall_seconds = 10\n\n[entry.sidecar]\ncommand = ["{python}", "main.py"]\n'
_MODES: Mapping[str, Mapping[str, str]] = {
    "in-process": {MANIFEST: _IN_PROCESS, "plugin.py": _MODULE},
    "sidecar": {MANIFEST: _SIDECAR, "main.py": _PROGRAM},
}


def write_plugin(kind: str, name: str, folder: Path, mode: str = "in-process") -> PluginCode:
    """Write the files of a first plugin into ``folder``, which is new, and read them. Raises ConfigError."""
    if kind not in KINDS:
        raise ConfigError(f"kind of plugin: got {kind!r}; expected one of {', '.join(map(repr, KINDS))}")
    if mode not in _MODES:
        raise ConfigError(f"--mode: got {mode!r}; expected one of {', '.join(map(repr, _MODES))}")
    if folder.exists():
        raise ConfigError(f"{folder}: got a folder that is there already; expected a new one")
    files = {"config.schema.json": _SCHEMA, TEST_CASES: _CASES, **_MODES[mode]}
    files[MANIFEST] = _HEAD.format(name=name, mode=mode) + files[MANIFEST]
    as_bytes = {path: text.encode() for path, text in files.items()}
    parse_manifest(as_bytes[MANIFEST], str(folder / MANIFEST), as_bytes)  # the name, before anything is written
    folder.mkdir(parents=True)
    for path, text in files.items():
        (folder / path).write_text(text, encoding="utf-8")
    return read_plugin(folder)
