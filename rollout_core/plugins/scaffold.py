"""First plugins, of each kind and mode: files that work, with test cases that pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollout_core.base.errors import ConfigError
from rollout_core.plugins.cases import TEST_CASES
from rollout_core.plugins.identity import PluginCode, read_plugin
from rollout_core.plugins.manifest import KINDS, MANIFEST, TRAITS, Manifest, parse_manifest

MODES = ("in-process", "sidecar")
_HEAD = """\
name = "{name}"
version = "0.1.0"
kind = "{kind}"
trait_id = "{trait}"
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
_PROGRAM = '''\
"""{doc} JSON in frames over a Unix socket."""

import json
{imports}import socket
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


{functions}def main():
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
{call}        write_frame(connection, {"result": result})
        if method == "Shutdown":
            break


if __name__ == "__main__":
    main()
'''
_IN_PROCESS = '\n[runtime]\npython_min = "3.11"\n\n[entry.in-process]\nmodule = "plugin"\nfactory = "create_plugin"\n'
_SIDECAR = '\n[limits]\n{limit} = 10\n\n[entry.sidecar]\ncommand = ["{python}", "main.py"]\n'


@dataclass(frozen=True)
class _First:
    """A first plugin of a kind."""

    doc: str
    module: str
    """What follows it in a Python plugin."""
    call: str
    """What a sidecar does at a call."""
    cases: str
    usage: str
    """In a configuration, with ``NAME`` for the plugin's."""
    limit: str = "call_seconds"
    """Of the manifest of a sidecar."""
    schema: str = _SCHEMA
    """Of its configuration."""
    imports: str = ""
    """Of a sidecar, besides."""
    functions: str = ""
    """Of a sidecar, besides."""


_FIRST: Mapping[str, _First] = {
    "reward-model": _First(
        doc="1 where the completion has the configured word, else 0.",
        module="""

def create_plugin(config):
    word = config["word"]

    def reward(sample):  # sample.prompt, .completion, .extras["answer"] of its row, and so on
        return 1.0 if word in sample.completion else 0.0

    return reward
""",
        call="""\
            found = [config["word"] in sample["completion"] for sample in payload["inputs"]]
            result = {"rewards": [1.0 if one else 0.0 for one in found]}
""",
        cases="""\
{"config": {"word": "four"}, "input": {"prompt": "2 + 2 =", "completion": "four"}, "reward": 1.0}
{"config": {"word": "four"}, "input": {"prompt": "2 + 2 =", "completion": "five"}, "reward": 0.0}
""",
        usage='reward = {kind = "plugin", name = "NAME", config = {word = "four"}}',
    ),
    "data-source": _First(
        doc="Prompts that ask for the configured word, once and twice.",
        module="""

def create_plugin(config):
    def rows():  # any objects: with "prompt" for training on prompts, "prompt" and "completion" for SFT
        for count in (1, 2):
            yield {"prompt": f"{config['word']}, {count} times:", "answer": " ".join([config["word"]] * count)}

    return rows
""",
        call="""\
            word, counts = config["word"], range(payload["start"] + 1, min(2, payload["start"] + payload["count"]) + 1)
            rows = [{"prompt": f"{word}, {count} times:", "answer": " ".join([word] * count)} for count in counts]
            result = {"rows": rows, "end": payload["start"] + len(rows) == 2}
""",
        cases="""\
{"config": {"word": "four"}, "max_rows": 1, "rows": [{"prompt": "four, 1 times:", "answer": "four"}]}
{"config": {"word": "a"}, "rows": [{"prompt": "a, 1 times:", "answer": "a"}, {"prompt": "a, 2 times:", \
"answer": "a a"}]}
""",
        usage='prompts = {kind = "plugin", name = "NAME", config = {word = "four"}}',
    ),
    "tool-harness": _First(
        doc="Tells the letters of the configured word, one call after another.",
        module="""

class Letters:  # one for each episode; each public method is a tool
    def __init__(self, word):
        self.word, self.count = word, 0

    def next_letter(self) -> str:
        \"\"\"Tell the next letter of the word.\"\"\"
        self.count += 1
        return self.word[self.count - 1 : self.count] or "there is none"


def create_plugin(config):
    return lambda: Letters(config["word"])
""",
        call="""\
            result = use(payload, config["word"])
""",
        functions="""\
COUNTS = {}  # of letters, by episode
TOOL = {
    "name": "next_letter",
    "description": "Tell the next letter of the word.",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}


def use(asked, word):
    if asked["method"] == "describe":
        return {"tools": [TOOL]}
    if asked["method"] == "tool":
        COUNTS[asked["episode"]] = count = COUNTS.get(asked["episode"], 0) + 1
        return {"text": word[count - 1 : count] or "there is none"}
    COUNTS.pop(asked["episode"], None)  # close
    return {}


""",
        cases="""\
{"config": {"word": "an"}, "calls": [{"tool": "next_letter", "text": "a"}, {"tool": "next_letter", "text": "n"}]}
{"config": {"word": "a"}, "calls": [{"tool": "next_letter", "text": "a"}, {"tool": "next_letter", "text": \
"there is none"}]}
""",
        usage='[[environment.tools]] with kind = "plugin", name = "NAME", config = {word = "four"}',
    ),
    "tracker": _First(
        doc="Writes figures to a file, a line of JSON for each step.",
        module="""
import json
import os


class Lines:
    def __init__(self, file):
        self.file = file

    def open(self, series, title, run):  # the last step that is there already
        if not os.path.exists(self.file):
            return 0
        with open(self.file) as file:
            rows = [json.loads(line) for line in file]
        return max((row["step"] for row in rows if row["series"] == series), default=0)

    def log(self, series, step, figures):
        with open(self.file, "a") as file:
            file.write(json.dumps({"series": series, "step": step, "figures": figures}) + "\\n")


def create_plugin(config):
    return Lines(config["file"])
""",
        call="""\
            result = track(payload, config["file"])
""",
        functions="""\
def track(asked, name):
    if asked["method"] == "log":
        with open(name, "a") as file:
            file.write(json.dumps({key: asked[key] for key in ("series", "step", "figures")}) + "\\n")
        return {}
    with open(name, "a+") as file:  # open: the last step that is there already
        file.seek(0)
        rows = [json.loads(line) for line in file]
    return {"step": max((row["step"] for row in rows if row["series"] == asked["series"]), default=0)}


""",
        schema="""\
{
  "type": "object",
  "properties": {"file": {"type": "string", "minLength": 1}},
  "required": ["file"],
  "additionalProperties": false
}
""",
        cases="""\
{"config": {"file": "figures.jsonl"}, "rows": [{"step": 1, "figures": {"loss": 0.5}}], "last_step": 1}
{"config": {"file": "figures.jsonl"}, "rows": [], "last_step": 0}
""",
        usage='trackers = [{kind = "plugin", name = "NAME", config = {file = "/path/to/figures.jsonl"}}]',
    ),
    "secret-source": _First(
        doc="Secrets by name, from a file that only this user can read; no secret lies in the plugin itself.",
        module="""
import json
from pathlib import Path

FILE = Path.home() / ".rollout-secrets.json"


def create_plugin(config):
    def secret(name, id):  # None: there is none of this name
        if not FILE.exists():
            return None
        if FILE.stat().st_mode & 0o077:
            raise PermissionError(f"{FILE} can be read by others; chmod 600 it")
        return json.loads(FILE.read_text()).get(id)

    return secret
""",
        call="""\
            result = {"value": secret(payload["id"])}
""",
        imports="import os\n",
        functions="""\
def secret(name):  # None: there is none of this name
    path = os.path.expanduser("~/.rollout-secrets.json")
    if not os.path.exists(path):
        return None
    if os.stat(path).st_mode & 0o077:
        raise PermissionError(f"{path} can be read by others; chmod 600 it")
    with open(path) as file:
        return json.load(file).get(name)


""",
        schema='{"type": "object", "additionalProperties": false}\n',
        cases="""\
{"name": "NO_SECRET_OF_THIS_NAME", "value": null}
{"name": "NEITHER_OF_THIS", "value": null}
""",
        usage="ROLLOUT_SECRETS_FROM=environment,plugin:NAME in the environment of the worker",
    ),
    "env-harness": _First(
        doc="Asks for the configured word, which a tool spells; 1 where it is said, in two answers at most.",
        module="""
from rollout_core.environments import Done


class Word:  # one for each episode; docs/environments.md has the methods that it may have
    def __init__(self, word):
        self.word, self.left, self.is_right = word, 2, False

    def reset(self, row, seed):
        return row.get("question", "Which word is meant?")

    def letter(self, number: int) -> str:
        \"\"\"Tell a letter of the word, by its number from 1 on.\"\"\"
        return self.word[number - 1 : number] or "there is none"

    def step(self, message):
        self.is_right, self.left = self.word in message["content"], self.left - 1
        return Done() if self.is_right or not self.left else "No. Once more?"

    def reward(self):
        return float(self.is_right)


def create_plugin(config):
    return lambda: Word(config["word"])
""",
        call="""\
            result = play(payload, config["word"])
""",
        limit="start_seconds",
        functions="""\
EPISODES = {}  # of each that is under way: answers that are left, and whether the last one was right
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOL = {"name": "letter", "description": "Tell a letter of the word, by its number from 1 on.", "parameters": NUMBER}


def play(asked, word):
    method, episode = asked["method"], asked.get("episode")
    if method == "describe":
        return {"tools": [TOOL], "has_step": True}
    if method == "reset":
        EPISODES[episode] = 2, False
        return {"messages": asked["row"].get("question", "Which word is meant?")}
    if method == "tool":
        number = asked["arguments"]["number"]
        return {"text": word[number - 1 : number] or "there is none"}
    if method == "step":
        left, is_right = EPISODES[episode][0] - 1, word in asked["message"]["content"]
        EPISODES[episode] = left, is_right
        return {"done": True} if is_right or not left else {"messages": "No. Once more?"}
    if method == "reward":
        return {"reward": float(EPISODES[episode][1])}
    EPISODES.pop(episode, None)  # close
    return {}


""",
        cases="""\
{"config": {"word": "four"}, "row": {}, "answers": [{"tool": "letter", "arguments": {"number": 1}}, "four"], \
"reward": 1.0}
{"config": {"word": "four"}, "row": {"question": "2 + 2 ="}, "answers": ["five", "six"], "reward": 0.0}
""",
        usage='[environment] with kind = "plugin", name = "NAME", config = {word = "four"}',
    ),
}


def usage(manifest: Manifest) -> str:
    """How a configuration names a first plugin."""
    return _FIRST[manifest.kind].usage.replace("NAME", manifest.name)


def _files(first: _First, mode: str) -> dict[str, str]:
    if mode == "in-process":
        return {MANIFEST: _IN_PROCESS, "plugin.py": f'"""{first.doc}"""\n{first.module}'}
    program = _PROGRAM.replace("{doc}", first.doc).replace("{call}", first.call)
    program = program.replace("{functions}", first.functions).replace("{imports}", first.imports)
    return {MANIFEST: _SIDECAR.replace("{limit}", first.limit), "main.py": program}


def write_plugin(kind: str, name: str, folder: Path, mode: str = "in-process") -> PluginCode:
    """Write the files of a first plugin into ``folder``, which is new, and read them. Raises ConfigError."""
    if kind not in KINDS:
        raise ConfigError(f"kind of plugin: got {kind!r}; expected one of {', '.join(map(repr, KINDS))}")
    if mode not in MODES:
        raise ConfigError(f"--mode: got {mode!r}; expected one of {', '.join(map(repr, MODES))}")
    if folder.exists():
        raise ConfigError(f"{folder}: got a folder that is there already; expected a new one")
    known = KINDS[kind]
    files = {"config.schema.json": _FIRST[known].schema, TEST_CASES: _FIRST[known].cases, **_files(_FIRST[known], mode)}
    files[MANIFEST] = _HEAD.format(name=name, mode=mode, kind=known, trait=TRAITS[known][-1]) + files[MANIFEST]
    as_bytes = {path: text.encode() for path, text in files.items()}
    parse_manifest(as_bytes[MANIFEST], str(folder / MANIFEST), as_bytes)  # the name, before anything is written
    folder.mkdir(parents=True)
    for path, text in files.items():
        (folder / path).write_text(text, encoding="utf-8")
    return read_plugin(folder)
