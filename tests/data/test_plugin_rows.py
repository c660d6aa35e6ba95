"""Rows of plugins are rows as of any data set; a plugin that gives none that are right ends the import, named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config import TrainGRPOConfig, parse_config
from rollout_core.config.base import FilesDataset, PluginDataset
from rollout_core.data import plugin_rows
from rollout_core.data.dataset_sources import import_dataset, read_dataset, record_origin
from rollout_core.data.datasets import PromptRow, to_line
from rollout_core.objects import ObjectStore
from rollout_core.objects.origins import sources_of
from rollout_core.plugins.scaffold import write_plugin

CONFIG = {"word": "four"}


def source(name: str = "words", **options: Any) -> PluginDataset:
    return PluginDataset(kind="plugin", name=name, **{"config": CONFIG, **options})


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize("mode", ["in-process", "sidecar"])
def test_rows_count_by_their_content_wherever_they_come_from(tmp_path: Path, mode: str):
    write_plugin("data-source", "words", tmp_path / "plugins/words", mode)
    objects = ObjectStore.from_url(f"file://{tmp_path / 'objects'}")
    stream = read_dataset(source(), PromptRow, base=tmp_path)
    found = import_dataset(objects, stream)
    record_origin(objects, found, source(), tmp_path, stream)
    (tmp_path / "same.jsonl").write_text(
        '{"prompt": "four, 1 times:", "answer": "four"}\n{"prompt": "four, 2 times:", "answer": "four four"}\n'
    )
    assert import_dataset(objects, read_dataset(FilesDataset(path="same.jsonl"), PromptRow, base=tmp_path)) == found
    [origin] = sources_of(objects, found.data)
    assert (origin.kind, origin.address, list(origin.code)) == ("data", "plugin words 0.1.0", ["words"])
    first = read_dataset(source(max_rows=1, columns={"gold": "answer"}), PromptRow, base=tmp_path)
    assert [json.loads(to_line(row)) for row in first] == [{"gold": "four", "prompt": "four, 1 times:"}]
    assert len(list(stream)) == 2, "it is read anew each time"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("raise KeyError('gone')", r"plugin words: it failed: KeyError: 'gone', asked for rows from 1 on"),
        ("yield {'prompt': 'a'}; import os; os._exit(3)", r"plugin words: it ended its process with exit code 3.*"),
        ("import time; time.sleep(60); yield", r"plugin words: it took longer than 1 s.*"),
        ("return 3", r"plugin words: it failed: TypeError: 'int' object is not iterable.*"),
        ("yield None", r"plugin words: it answered with the row None; expected an object.*"),
        ("yield 'text'", r"plugin words: it answered with the row 'text'; expected an object.*"),
        ("yield {'prompt': 'a' * 2000000}", r"plugin words: it answered with \d+ bytes; 1048576 are allowed.*"),
        ("yield {'prompt': object()}", r"plugin words: it failed: TypeError: Object of type object is not JSON.*"),
        ("yield from ()", r"dataset 'words' has no rows"),
        ("yield {'question': 'a'}", r"plugin words, row 1: .*prompt.*"),
    ],
)
def test_a_python_source_that_gives_no_rows_is_named(tmp_path: Path, rows: str, said: str):
    folder = tmp_path / "plugins/words"
    write_plugin("data-source", "words", folder)
    edit(folder / "rollout-plugin.toml", "\n[runtime]", "\n[limits]\ncall_seconds = 1\n\n[runtime]")
    start, end = "        for count in (1, 2):\n", "\n    return rows"
    text = (folder / "plugin.py").read_text()
    (folder / "plugin.py").write_text(f"{text.partition(start)[0]}        {rows}\n{end}\n")
    with pytest.raises(ValueError) as caught:  # ConfigError, and DataError of rows
        list(read_dataset(source(), PromptRow, base=tmp_path))
    assert re.fullmatch(said, str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('{"rows": []}', r"it answered with {'rows': \[\]}; expected rows, a list, and end, true or false"),
        ('{"rows": [], "end": False}', r"it answered with no rows, and that more follow; expected a row, or end"),
        ('{"rows": [{}] * 9, "end": True}', r"it answered with 9 rows; expected at most 1, as it was asked for"),
        ('{"rows": [1], "end": True}', r"it answered with the row 1; expected an object"),
    ],
)
def test_a_sidecar_that_answers_otherwise_is_named(tmp_path: Path, answer: str, said: str):
    folder = tmp_path / "plugins/words"
    write_plugin("data-source", "words", folder, "sidecar")
    edit(folder / "main.py", 'result = {"rows": rows, "end": payload["start"] + len(rows) == 2}', f"result = {answer}")
    with pytest.raises(ConfigError, match=f"plugin words: {said}, asked for rows from 1 on"):
        list(read_dataset(source(), PromptRow, base=tmp_path))


def test_a_sidecar_that_ends_between_two_calls_is_asked_for_the_rows_that_follow(tmp_path: Path):
    folder = tmp_path / "plugins/words"
    write_plugin("data-source", "words", folder, "sidecar")
    ends = 'write_frame(connection, {"result": result})\n        if result.get("rows"):\n            break\n'
    edit(folder / "main.py", 'write_frame(connection, {"result": result})\n', ends)
    found = [row.prompt for row in read_dataset(source(), PromptRow, base=tmp_path)]
    assert found == ["four, 1 times:", "four, 2 times:"]


def test_an_endless_source_ends_at_max_rows(tmp_path: Path):
    folder = tmp_path / "plugins/words"
    write_plugin("data-source", "words", folder)
    edit(folder / "plugin.py", "for count in (1, 2):", "import itertools\n        for count in itertools.count(1):")
    assert len(list(read_dataset(source(max_rows=7), PromptRow, base=tmp_path))) == 7


def test_a_plugin_of_another_kind_and_a_wrong_configuration_are_refused(tmp_path: Path):
    write_plugin("data-source", "words", tmp_path / "plugins/words")
    write_plugin("reward", "graded", tmp_path / "plugins/graded")
    for given, said in (
        (source("graded"), r"plugin graded of .*: got one of kind 'reward-model'; expected 'data-source'"),
        (source(config={}), r"plugin words: config: 'word' is a required property"),
    ):
        with pytest.raises(ConfigError, match=said):
            list(read_dataset(given, PromptRow, base=tmp_path))


def test_what_a_configuration_says_of_it_and_does_not(tmp_path: Path):
    prompts = {"kind": "plugin", "name": "words", "config": CONFIG}

    def algorithm(**changes: Any) -> TrainGRPOConfig:
        tables = {"base_model": {"uri": "m"}, "optimizer": {"lr": 1.0}, "prompts": prompts | changes}
        return parse_config({"algorithm": tables}, TrainGRPOConfig)

    assert algorithm().algorithm.prompts == source()
    with pytest.raises(ConfigError, match=r"algorithm\.prompts\.max_row: unknown key; did you mean 'max_rows'\?"):
        algorithm(max_row=2)


def test_an_endless_source_that_nobody_bounds_is_refused_and_says_that_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(plugin_rows, "MOST_ROWS", 50)
    monkeypatch.setattr(plugin_rows, "REMINDER_SECONDS", 0.0)
    folder = tmp_path / "plugins/words"
    write_plugin("data-source", "words", folder)
    edit(folder / "plugin.py", "for count in (1, 2)", "for count in __import__('itertools').count()")
    with pytest.raises(ConfigError, match=r"plugin words: got 50 rows and no end; expected max_rows in its table"):
        list(read_dataset(source(), PromptRow, base=tmp_path))
    assert "plugin words: 1 rows and no end yet; max_rows in its table ends an endless source" in caplog.text
    assert len(list(read_dataset(source(max_rows=60), PromptRow, base=tmp_path))) == 60
