"""What a manifest says is checked whole before anything runs: each fault is one sentence with file, key, what was got
and what was expected, and nothing is accepted that has no effect."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config.base import apply_overrides
from rollout_core.plugins.identity import read_plugin
from rollout_core.plugins.manifest import KINDS, MANIFEST, check_config, parse_manifest

GOOD = """
name = "brevity"
version = "0.1.0"
kind = "reward-model"
trait_id = "rollout_core::Plugin"
mode = "in-process"
network_allowlist = []
config_schema_path = "config.json"

[runtime]
python_min = "3.11"

[entry.in-process]
module = "plugin"
factory = "create_plugin"
"""
FILES = {
    MANIFEST: GOOD.encode(),
    "plugin.py": b"",
    "config.json": b'{"type": "object", "properties": {"limit": {"type": "integer"}}, "additionalProperties": false}',
    "text.json": b"no JSON",
    "list.json": b"[]",
    "wrong.json": b'{"type": "text"}',
}
GONE = object()
SIDECAR = {"mode": "sidecar", "runtime": {}, "entry": {"sidecar": {"command": ["main"]}}}


def manifest_text(changes: dict[str, Any]) -> bytes:
    """The good manifest with dotted keys changed, as TOML."""
    tables = apply_overrides(tomllib.loads(GOOD), {key: value for key, value in changes.items() if value is not GONE})
    for key in [key for key, value in changes.items() if value is GONE]:
        *parents, leaf = key.split(".")
        table = tables
        for parent in parents:
            table = table[parent]
        del table[leaf]
    return "\n".join(f"{key} = {inline(value)}" for key, value in tables.items()).encode()


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


LISTED = ", ".join(map(repr, KINDS))
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no name": ({"name": GONE}, "name: required, but not given"),
    "blank name": ({"name": ""}, r"name: String should match pattern '\S+'; got ''"),
    "name with a slash": ({"name": "a/b"}, r"name: String should match pattern '\S+'; got 'a/b'"),
    "no version": ({"version": GONE}, "version: required, but not given"),
    "blank version": ({"version": " "}, r"version: String should match pattern '\S+'; got ' '"),
    "version that is a number": ({"version": 1.0}, "version: Input should be a valid string; got 1.0"),
    "unknown kind": (
        {"kind": "rewards"},
        f"kind: expected one of {LISTED}; got 'rewards'",
    ),
    "kind with capitals": (
        {"kind": "RewardModel"},
        f"kind: expected one of {LISTED}; got 'RewardModel'",
    ),
    "kind of later": (
        {"kind": "storage"},
        f"kind: plugins of kind 'storage' are not supported yet; expected one of {LISTED}; got 'storage'",
    ),
    "kind of one's own": (
        {"kind": {"custom": "x"}},
        f"kind: plugins of kind 'custom' are not supported yet; expected one of {LISTED}",
    ),
    "no trait": ({"trait_id": GONE}, "trait_id: required, but not given"),
    "other trait": (
        {"trait_id": "rollout_core::Storage"},
        "trait_id: got 'rollout_core::Storage'; expected 'rollout_core::Plugin' or 'rollout_core::RewardModel' for "
        "kind 'reward-model'",
    ),
    "no mode": ({"mode": GONE}, "mode: required, but not given"),
    "unknown mode": (
        {"mode": "thread"},
        r"mode: expected 'in-process' \(also called 'pyo3'\) or 'sidecar'; got 'thread'",
    ),
    "native mode": (
        {"mode": "rust-cdylib"},
        "mode: a native library would run inside the run's own process, .* expected 'in-process' or 'sidecar', .*; got "
        "'rust-cdylib'",
    ),
    "native entry": (
        {"entry": {"cdylib": {"path": "a.so", "symbol": "s"}}},
        "entry: got 'cdylib': a native library would run inside .* expected 'in-process' or 'sidecar'.*",
    ),
    "no entry": ({"entry": GONE}, "entry: required, but not given"),
    "entry of the other mode": (
        {"entry": SIDECAR["entry"]},
        "entry.in-process: got no such table; expected one for mode 'in-process'",
    ),
    "both entries": (
        {"entry.sidecar": {"command": ["main"]}},
        "entry.sidecar: got a table; expected none, as mode is 'in-process'",
    ),
    "one entry by two names": (
        {"entry.pyo3": {"module": "plugin", "factory": "f"}},
        "entry: got 'in-process', 'pyo3', which are the same table; expected one of them",
    ),
    "no module": ({"entry.in-process.module": GONE}, "entry.in-process.module: required, but not given"),
    "module that is a file": (
        {"entry.in-process.module": "plugin-a.py"},
        "entry.in-process.module: expected a name of Python, .*; got 'plugin-a.py'",
    ),
    "module that is not there": (
        {"entry.in-process.module": "plugins"},
        "entry.in-process.module: got 'plugins'; expected a module of the folder, plugins.py",
    ),
    "no factory": ({"entry.in-process.factory": GONE}, "entry.in-process.factory: required, but not given"),
    "empty command": (
        {**SIDECAR, "entry": {"sidecar": {"command": []}}},
        r"entry.sidecar.command: Tuple should have at least 1 item .*; got \[\]",
    ),
    "command that is a text": (
        {**SIDECAR, "entry": {"sidecar": {"command": "main --fast"}}},
        "entry.sidecar.command: Input should be a valid tuple; got 'main --fast'",
    ),
    "program that is not there": (
        {**SIDECAR, "entry": {"sidecar": {"command": ["./main"]}}},
        "entry.sidecar.command: got './main'; expected a program that the folder has",
    ),
    "unknown protocol": (
        {**SIDECAR, "entry": {"sidecar": {"command": ["main"], "protocol": "grpc-uds"}}},
        "entry.sidecar.protocol: Input should be 'framed-json-uds' or 'framed-json-stdio'; got 'grpc-uds'",
    ),
    "template of sockets": (
        {**SIDECAR, "entry": {"sidecar": {"command": ["main"], "socket_template": "x"}}},
        "entry.sidecar.socket_template: unknown key",
    ),
    "Python of a sidecar": (
        {**SIDECAR, "runtime": {"python_min": "3.11"}},
        "runtime.python_min: got '3.11'; expected none for a sidecar, whose command says what runs it",
    ),
    "no Python": ({"runtime": {}}, "runtime.python_min: got none; expected the oldest Python that runs it, .*"),
    "old Python": ({"runtime.python_min": "3.9"}, "runtime.python_min: got '3.9'; expected '3.11' or later"),
    "Python of later": ({"runtime.python_min": "3.99"}, r"runtime.python_min: got '3.99'; expected at most 3\.\d+, .*"),
    "Python in words": ({"runtime.python_min": "three"}, "runtime.python_min: String should match .*; got 'three'"),
    "little memory": ({"runtime.memory_mib": 1}, "runtime.memory_mib: .* greater than or equal to 32; got 1"),
    "no list of hosts": ({"network_allowlist": GONE}, "network_allowlist: required, but not given"),
    "single hosts": (
        {"network_allowlist": ["example.org"]},
        r"network_allowlist: single hosts cannot be allowed yet; expected \[\] for no network or \['\*'\] for all of "
        r"it; got \['example.org'\]",
    ),
    "endless calls": ({"limits": {"call_seconds": 0}}, "limits.call_seconds: .* greater than 0; got 0"),
    "limits of all": ({"limits": {"batch_size": "all"}}, "limits.batch_size: .* valid integer.*; got 'all'"),
    "limits of another name": ({"limits": {"fds": 64}}, "limits.fds: unknown key"),
    "unknown key": ({"descripton": "x"}, "descripton: unknown key"),
    "schema that is not there": (
        {"config_schema_path": "schema.json"},
        "config_schema_path: got 'schema.json'; expected a file that the folder has",
    ),
    "schema outside": (
        {"config_schema_path": "../config.json"},
        "config_schema_path: expected a path inside the plugin's folder, relative to it; got '../config.json'",
    ),
    "schema that is no JSON": (
        {"config_schema_path": "text.json"},
        r"config_schema_path: got 'text.json', which is no JSON \(.*\); expected a JSON Schema",
    ),
    "schema that is a list": (
        {"config_schema_path": "list.json"},
        r"config_schema_path: got 'list.json', which holds \[\]; expected a JSON Schema, an object",
    ),
    "schema that is none": (
        {"config_schema_path": "wrong.json"},
        r"config_schema_path: got 'wrong.json', whose type is wrong \(.*\); expected a JSON Schema",
    ),
}


def refused(text: bytes) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(text, "mine/rollout-plugin.toml", FILES)
    return caught.value


@pytest.mark.parametrize("case", BAD)
def test_a_bad_manifest_is_refused_in_one_sentence(case: str):
    changes, sentence = BAD[case]
    error = str(refused(manifest_text(changes)))
    assert "\n" not in error
    begin, _, said = error.partition(": ")
    assert begin == "mine/rollout-plugin.toml"
    assert re.fullmatch(sentence, said), said


@pytest.mark.parametrize("text", [b"name = ", b"\xff\xfe"])
def test_what_is_no_toml_is_refused_in_one_sentence(text: bytes):
    assert str(refused(text)).startswith("mine/rollout-plugin.toml: (top level): not readable as TOML: ")


def test_all_that_is_wrong_is_said_together():
    assert len(refused(manifest_text({"name": "", "kind": "x", "mode": "thread"})).violations) == 3


def test_the_names_of_the_source_documents_are_known():
    first = parse_manifest(GOOD.encode(), "m", FILES)
    text = GOOD.replace("in-process", "pyo3").replace('"reward-model"', '"reward"')
    assert parse_manifest(text.encode(), "m", FILES) == first


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"limit": "much"}, "plugin brevity: config.limit: 'much' is not of type 'integer'; expected what config.json"),
        ({"limits": 1}, "plugin brevity: config: Additional properties are not allowed .*; expected what config.json"),
    ],
)
def test_a_configuration_is_held_against_the_schema(config: dict[str, Any], sentence: str):
    manifest = parse_manifest(GOOD.encode(), "m", FILES)
    check_config(manifest, {"limit": 3}, FILES)
    with pytest.raises(ConfigError, match=sentence):
        check_config(manifest, config, FILES)


def test_a_plugin_without_a_schema_takes_no_configuration():
    manifest = parse_manifest(manifest_text({"config_schema_path": GONE}), "m", FILES)
    check_config(manifest, {}, FILES)
    with pytest.raises(
        ConfigError, match="config: got 'limit'; expected none, as the plugin's manifest has no config_"
    ):
        check_config(manifest, {"limit": 3}, FILES)


# -- the id ------------------------------------------------------------------------------------------------------------


def write(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def test_the_id_is_that_of_the_files_wherever_they_lie(tmp_path: Path):
    first = read_plugin(write(tmp_path / "a"))
    second = read_plugin(write(tmp_path / "b/c"))
    assert first.id == second.id
    (tmp_path / "a/__pycache__").mkdir()
    (tmp_path / "a/__pycache__/plugin.pyc").write_bytes(b"made by running it")
    (tmp_path / "a/.git").mkdir()
    (tmp_path / "a/.git/HEAD").write_bytes(b"hidden")
    assert read_plugin(tmp_path / "a").id == first.id


@pytest.mark.parametrize("change", ["code", "version", "data", "mode of a file"])
def test_the_id_follows_every_file(tmp_path: Path, change: str):
    folder = write(tmp_path / "a")
    first = read_plugin(folder)
    if change == "code":
        (folder / "plugin.py").write_text("# edited\n")
    elif change == "version":
        (folder / MANIFEST).write_text(GOOD.replace("0.1.0", "0.1.1"))
    elif change == "data":
        (folder / "words.txt").write_text("new\n")
    else:
        (folder / "plugin.py").chmod(0o755)
    assert read_plugin(folder).id != first.id


def test_a_plugin_is_filed_and_comes_back_as_it_was(tmp_path: Path):
    code = read_plugin(write(tmp_path / "a"))
    again = type(code).from_document(code.document())
    assert (again.id, again.manifest) == (code.id, code.manifest)
    written = again.write(tmp_path / "unpacked")
    assert {file.name: file.read_bytes() for file in written.iterdir()} == FILES
    assert read_plugin(written).id == code.id


def test_links_are_refused(tmp_path: Path):
    folder = write(tmp_path / "a")
    (folder / "linked.py").symlink_to(folder / "plugin.py")
    with pytest.raises(ConfigError, match=r"linked\.py: got a link; expected a file"):
        read_plugin(folder)
