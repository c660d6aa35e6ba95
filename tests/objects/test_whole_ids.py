"""Content ids by their first digits, wherever a configuration names a model: made whole once, before the plan."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import hash_bytes
from rollout_core.config import InferBatchConfig, TrainDPOConfig, TrainPPOConfig, parse_config
from rollout_core.models.locating import Unchecked
from rollout_core.objects import ObjectStore
from rollout_core.objects.addresses import with_whole_ids
from rollout_core.plans.plan import check_model


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{tmp_path / 'objects'}")


def batch(uri: str, **model: str) -> InferBatchConfig:
    document = {"model": {"uri": uri, **model}, "sampling": {}, "input": {"glob": "x"}, "output": {"dir": "y"}}
    return parse_config(document, InferBatchConfig)


def test_the_first_digits_of_a_models_id_are_the_model(tiny_model, objects, tmp_path):
    model = objects.put_tree(tiny_model)
    for digits in (model[:8], model.short, model[:63], model):
        whole = with_whole_ids(batch(digits, adapter=digits), tmp_path, lambda: objects)
        assert whole == batch(model, adapter=model)


def test_rewards_and_references_are_models_too(tiny_model, objects, tmp_path):
    model = objects.put_tree(tiny_model)
    learner = {"optimizer": {"lr": 1e-3}, "base_model": {"uri": model.short}}
    rewards = {"judge": {"kind": "model", "model": model.short}, "answer": {"kind": "exact_match"}}
    composite = {"kind": "composite", "parts": [{"reward": rewards["judge"]}, {"reward": rewards["answer"]}]}
    expression = {"kind": "expression", "expression": "judge + answer", "rewards": rewards}
    for reward in (rewards["judge"], composite, expression):
        ppo = {"algorithm": {**learner, "prompts": {"path": "p"}, "reward": reward}}
        whole = with_whole_ids(parse_config(ppo, TrainPPOConfig), tmp_path, lambda: objects).model_dump_json()
        assert whole.count(model) == 2 and whole.count(model.short) == 2
    dpo = {"algorithm": {**learner, "reference": {"uri": model.short}, "dataset": {"path": "p"}}}
    algorithm = with_whole_ids(parse_config(dpo, TrainDPOConfig), tmp_path, lambda: objects).algorithm
    assert algorithm.reference is not None and algorithm.base_model.uri == algorithm.reference.uri == model


def test_digits_of_nothing_or_of_two_folders_are_refused_with_their_keys(objects, tmp_path):
    with pytest.raises(ConfigError) as caught:
        with_whole_ids(batch("deadbeef", adapter="0123456789ab"), tmp_path, lambda: objects)
    first, second = caught.value.violations
    assert first.startswith("model.uri: no folder has an id that begins with deadbeef in the object store file://")
    assert first.endswith("and there is no folder 'deadbeef'")
    assert second.startswith("model.adapter: no folder has an id that begins with 0123456789ab ")


def test_of_two_blobs_with_the_same_digits_the_folder_is_meant_and_two_folders_are_refused(tmp_path, monkeypatch):
    """Eight digits in common are too rare to be made here, so the store is asked for fewer."""
    monkeypatch.setattr("rollout_core.objects.addresses.is_short_id", lambda text: len(text) == 4)
    monkeypatch.setattr("rollout_core.objects.addresses.is_short_id", lambda text: len(text) == 4)
    objects = ObjectStore.from_url(f"memory://{tmp_path.name}")
    known: dict[str, str] = {}
    for number in itertools.count():
        folder = tmp_path / f"folder-{number}"
        folder.mkdir()
        (folder / "a").write_text(str(number))
        tree = objects.put_tree(folder)
        if tree[:4] in known:
            break
        known[tree[:4]] = tree
    with pytest.raises(ConfigError, match=rf"model\.uri: 2 ids begin with {tree[:4]}, .* give more digits"):
        with_whole_ids(batch(tree[:4]), tmp_path, lambda: objects)
    digits, one = next(item for item in known.items() if item[0] != tree[:4])
    blobs = (f"blob {number}".encode() for number in itertools.count())
    objects.put_bytes(next(blob for blob in blobs if hash_bytes(blob).startswith(digits)))
    assert with_whole_ids(batch(digits), tmp_path, lambda: objects).model.uri == one


def test_a_folder_of_that_name_comes_first_and_no_store_is_opened_without_need(tmp_path):
    def refuse() -> ObjectStore:
        raise AssertionError("nothing to look up")

    (tmp_path / "deadbeef").mkdir()
    for uri in ("deadbeef", "Qwen/Qwen2.5-0.5B", "0" * 64, "models/tiny", "abc123"):
        assert with_whole_ids(batch(uri), tmp_path, refuse) == batch(uri)


def test_without_an_object_store_digits_are_left_unchecked(tmp_path):
    with pytest.raises(Unchecked, match="model deadbeef, as the object store cannot be reached"):
        check_model(batch("deadbeef").model, tmp_path)
