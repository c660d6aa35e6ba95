"""A run's id, and the refusal to go on with a run under other parameters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import hash_bytes, new_run_id
from rollout_core.config import InferBatchConfig, parse_config
from rollout_core.inference.batch_runs import begin_run, check_run, parameters_of, resolve_run_id
from rollout_core.inference.folders import LocalFolder
from rollout_core.objects import ObjectStore

MODEL, OTHER = hash_bytes(b"model"), hash_bytes(b"other")


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(str(tmp_path / "objects"))


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    return LocalFolder(tmp_path / "out")


def configured(**changes: Any) -> InferBatchConfig:
    document = {
        "model": {"uri": "models/tiny"},
        "sampling": {"temperature": 0.7, "max_tokens": 8},
        "input": {"glob": "x"},
        "output": {"dir": "out"},
        "backend": {"kind": "scripted"},
    }
    return parse_config(document, InferBatchConfig, overrides=changes)


# Ids


def test_a_folder_keeps_its_run_id(tmp_path: Path, folder: LocalFolder):
    first = resolve_run_id(folder, None)
    assert len(first) == 26 and resolve_run_id(folder, None) == first
    assert (tmp_path / "out" / "run-id").read_text() == first + "\n"
    assert resolve_run_id(LocalFolder(tmp_path / "other"), None) != first


def test_the_run_id_asked_for_counts_and_is_not_written(tmp_path: Path, folder: LocalFolder):
    asked = new_run_id()
    assert resolve_run_id(folder, asked) == asked and not (tmp_path / "out").exists()
    own = resolve_run_id(folder, None)
    assert resolve_run_id(folder, asked) == asked and resolve_run_id(folder, None) == own


def test_processes_that_begin_at_once_share_one_run(folder: LocalFolder):
    with ThreadPoolExecutor(16) as pool:
        ids = set(pool.map(lambda _: resolve_run_id(folder, None), range(64)))
    assert len(ids) == 1


@pytest.mark.parametrize("wrong", ["", "../../etc", "01ARZ3NDEKTSV4RRFFQ69G5FA", "01arz3ndektsv4rrffq69g5fav"])
def test_what_is_no_run_id_is_refused(tmp_path: Path, wrong: str):
    with pytest.raises(ConfigError, match=r"run id: .* is no run id; expected a ULID"):
        resolve_run_id(LocalFolder(tmp_path), wrong)
    (tmp_path / "run-id").write_text(wrong)
    with pytest.raises(ConfigError, match=r"/run-id: .* is no run id; expected a ULID"):
        resolve_run_id(LocalFolder(tmp_path), None)


# Parameters


def begin(objects: ObjectStore, folder: LocalFolder, model: Any = MODEL, asked: str | None = None, **changes: Any):
    run_id = resolve_run_id(folder, asked)
    return begin_run(objects, run_id, parameters_of(configured(**changes), model), folder, asked)


def test_a_run_goes_on_with_the_same_parameters(objects: ObjectStore, folder: LocalFolder):
    assert begin(objects, folder) is False
    assert begin(objects, folder) is True
    assert begin(objects, folder, asked=resolve_run_id(folder, None)) is True


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sampling.temperature": 0.5}, "sampling.temperature: got 0.5, expected 0.7."),
        ({"sampling.n": 2}, "sampling.n: got 2, expected 1."),
        (
            {"sampling.stop": ["x"], "sampling.seed": 3},
            'sampling.seed: got 3, expected null; sampling.stop: got ["x"],',
        ),
        ({"backend.text": "y"}, 'backend.text: got "y", expected "SCRIPTED:{prompt}".'),
        ({"backend": {"kind": "transformers"}}, 'backend.kind: got "transformers", expected "scripted"'),
    ],
)
def test_other_parameters_are_refused_and_each_is_named(
    objects: ObjectStore, folder: LocalFolder, changes: dict[str, Any], expected: str
):
    begin(objects, folder)
    run_id = resolve_run_id(folder, None)
    with pytest.raises(ConfigError) as caught:
        begin(objects, folder, **changes)
    message = str(caught.value)
    assert message.startswith(f"run {run_id} was started with other parameters: ") and expected in message
    assert message.endswith(f"start a new run: give another output.dir, or remove {folder.where('run-id')}")
    with pytest.raises(ConfigError, match=r"give another output.dir, or leave out --resume"):
        begin(objects, folder, asked=run_id, **changes)
    # As far as the configuration tells, without the model: what a dry run sees.
    with pytest.raises(ConfigError, match="was started with other parameters"):
        check_run(objects, run_id, parameters_of(configured(**changes)), folder, None)
    assert begin(objects, folder) is True, "nothing was changed by the refusal"


def test_another_model_is_refused_by_its_content(objects: ObjectStore, folder: LocalFolder):
    begin(objects, folder)
    with pytest.raises(ConfigError, match=f'model: got "{OTHER}", expected "{MODEL}"'):
        begin(objects, folder, model=OTHER)
    check_run(objects, resolve_run_id(folder, None), parameters_of(configured()), folder, None)
    assert begin(objects, folder, **{"model.uri": "the/same/elsewhere"}) is True


def test_what_changes_speed_place_form_or_input_is_no_parameter(objects: ObjectStore, folder: LocalFolder):
    begin(objects, folder)
    for name, value in (
        ("workers.count", 7),
        ("workers.claim_size", 3),
        ("backend.delay_seconds", 1.0),
        ("input.glob", "more/*.jsonl"),
        ("output.format", "parquet"),
        ("failures.max_share", 0.5),
        ("run.name", "other"),
    ):
        assert begin(objects, folder, **{name: value}) is True, name


def test_a_run_that_nobody_began_cannot_be_gone_on_with(objects: ObjectStore, folder: LocalFolder):
    with pytest.raises(ConfigError, match=r"is unknown to the object store file://.*: leave out --resume"):
        begin(objects, folder, asked=new_run_id())
    assert objects.ref_names("runs") == []


def test_a_folder_of_a_run_that_the_object_store_lost_begins_it_anew(objects: ObjectStore, folder: LocalFolder):
    begin(objects, folder)
    for blob in list(dict(objects.blobs())):
        objects.delete(blob)
    with pytest.raises(ConfigError, match="is unknown to the object store"):
        begin(objects, folder, asked=resolve_run_id(folder, None))
    begin(objects, folder, **{"sampling.n": 2})
    with pytest.raises(ConfigError, match=r"sampling.n: got 1, expected 2"):
        begin(objects, folder)
