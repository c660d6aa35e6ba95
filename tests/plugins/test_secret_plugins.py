"""Secrets of plugins: asked for what is listed, kept in memory, and in no log and no message."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import blocks  # which has plugins asked  # noqa: F401
from rollout_core.base import secret_sources
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.settings import read_secret, require_secret
from rollout_core.plugins.scaffold import write_plugin

VALUE = "sk-of-the-vault-42"
ANSWERS = {
    "value": "return VALUE if id == 'team/key' else None",
    "hang": "print(VALUE, flush=True); import time; time.sleep(3600)",
    "crash": "print(VALUE, flush=True); import os; os._exit(3)",
    "raise": "raise KeyError(VALUE)",
    "list": "return [VALUE]",
    "long": "return VALUE * 100_000",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("ROLLOUT_SECRETS", "SERVER_KEY=team/key, OTHER=team/other")
    monkeypatch.setenv("ROLLOUT_SECRETS_FROM", "environment,plugin:vault")
    monkeypatch.setattr(secret_sources, "_kept", {})
    write_plugin("secret-source", "vault", tmp_path / "plugins/vault")
    return tmp_path / "plugins/vault"


def answering(folder: Path, how: str) -> None:
    body = f"    with open({str(folder / '.asked')!r}, 'a') as asked:\n            asked.write(id + '\\n')\n        "
    code = f"VALUE = {VALUE!r}\n\n\ndef create_plugin(config):\n    def secret(name, id):\n    {body}{ANSWERS[how]}\n\n"
    (folder / "plugin.py").write_text(code + "    return secret\n")
    manifest = folder / "rollout-plugin.toml"
    text = manifest.read_text().replace("limits = { call_seconds = 2.0 }\n", "")
    manifest.write_text(text.replace("[runtime]", "limits = { call_seconds = 2.0 }\n[runtime]"))


def test_a_plugin_is_asked_once_for_what_is_listed(folder: Path):
    answering(folder, "value")
    assert [read_secret("SERVER_KEY"), read_secret("SERVER_KEY"), read_secret("OTHER")] == [VALUE, VALUE, None]
    assert read_secret("HF_TOKEN") is None
    assert (folder / ".asked").read_text().split() == ["team/key", "team/other"]
    with pytest.raises(ConfigError, match=r"set it in .* or what plugin vault knows as team/other"):
        require_secret("OTHER")


@pytest.mark.parametrize("how", ["hang", "crash", "raise", "list", "long"])
def test_what_a_plugin_does_wrong_says_nothing_of_what_it_wrote(
    folder: Path, caplog: pytest.LogCaptureFixture, how: str
):
    answering(folder, how)
    with caplog.at_level(logging.DEBUG), pytest.raises(Recoverable, match="plugin vault did not tell secret") as error:
        read_secret("SERVER_KEY")
    assert error.value.__cause__ is None and error.value.__context__ is None
    assert VALUE not in str(error.value) + caplog.text


def test_the_last_answer_holds_while_a_plugin_fails(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLOUT_SECRETS_SECONDS", "0")
    answering(folder, "value")
    assert read_secret("SERVER_KEY") == VALUE
    answering(folder, "raise")
    assert read_secret("SERVER_KEY") == VALUE


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (
            "plugin:",
            "expected some of environment, prefect, aws, gcp, block:rollout-secrets/NAME, and plugin:NAME of a plugin",
        ),
        (
            "vault",
            "expected some of environment, prefect, aws, gcp, block:rollout-secrets/NAME, and plugin:NAME of a plugin",
        ),
        ("plugin:other", "no plugin is named 'other'"),
    ],
)
def test_a_source_that_is_none_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, sources: str, said: str):
    monkeypatch.setenv("ROLLOUT_SECRETS_FROM", sources)
    with pytest.raises(ConfigError, match=said):
        read_secret("SERVER_KEY")
