"""Models in the dtype of those that their training began with."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollout_core.base.ids import hash_bytes
from rollout_core.models.precision import OutOfRange, cast_model, in_precision_of, stored_dtype
from rollout_core.objects import ObjectStore


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{tmp_path / 'objects'}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cast_model_is_what_transformers_saves_in_that_dtype(tiny_model: Path, tmp_path: Path, dtype: str):
    cast_model(tiny_model, tmp_path / "ours", dtype)
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=getattr(torch, dtype)).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / side / "model.safetensors") for side in ("ours", "theirs"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == dtype
    with safe_open(tmp_path / "ours" / "model.safetensors", framework="pt") as stored:
        assert stored.metadata() == {"format": "pt"}
    unchanged = {file.name for file in tiny_model.iterdir()} - {"config.json", "model.safetensors"}
    assert unchanged and all(
        (tmp_path / "ours" / name).read_bytes() == (tiny_model / name).read_bytes() for name in unchanged
    )


def test_several_files_stay_several_and_their_index_tells_their_size(tiny_model: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    before = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(before) > 2
    cast_model(tmp_path / "model", tmp_path / "model", "bfloat16")  # in place, as an export does it
    assert sorted((tmp_path / "model").glob("*.safetensors")) == before
    [index] = (tmp_path / "model").glob("*.index.json")
    held = sum(tensor.nbytes for file in before for tensor in load_file(file).values())
    assert json.loads(index.read_text())["metadata"]["total_size"] == held
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    torch.testing.assert_close(found.state_dict(), model.bfloat16().state_dict(), rtol=0, atol=0)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.sampled_from(["bfloat16", "float16"]))
def test_a_weight_is_rounded_or_refused_and_what_is_not_finite_stays(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[float], dtype: str
):
    folder = tmp_path_factory.mktemp("folder")
    (folder / "config.json").write_text('{"torch_dtype": "float32"}')
    weights, counts = torch.tensor(numbers), torch.arange(3)
    save_file({"weights": weights, "counts": counts}, folder / "model.safetensors")
    before = (folder / "model.safetensors").read_bytes()
    expected = weights.to(getattr(torch, dtype))
    if weights.isfinite().equal(expected.isfinite()):
        cast_model(folder, folder, dtype)
        found = load_file(folder / "model.safetensors")
        torch.testing.assert_close(found["weights"], expected, rtol=0, atol=0, equal_nan=True)
        assert found["counts"].equal(counts)
        assert json.loads((folder / "config.json").read_text()) == {"dtype": dtype}
    else:
        with pytest.raises(OutOfRange, match=f"{dtype} cannot hold .* which tensor weights has"):
            cast_model(folder, folder, dtype)
        assert (folder / "model.safetensors").read_bytes() == before
    shutil.rmtree(folder)


def cast(folder: Path, numbers: torch.Tensor, dtype: str, name: str = "weights") -> torch.Tensor:
    """What `cast_model` makes of the tensor ``name``, by chance."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({name: numbers}, folder / "model.safetensors")
    cast_model(folder, folder, dtype, stochastic=True)
    return load_file(folder / "model.safetensors")[name]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.sampled_from(["bfloat16", "float16"]))
def test_by_chance_a_number_becomes_one_of_the_two_beside_it(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[float], dtype: str
):
    kind = getattr(torch, dtype)
    weights = torch.tensor(numbers)
    if not weights.isfinite().equal(weights.to(kind).isfinite()):
        return  # refused as without chance, which is tested above
    folder = tmp_path_factory.mktemp("folder") / "model"
    found = cast(folder, weights, dtype)
    assert found.dtype == kind
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(kind).float()
    every = every[every.isfinite()].unique()  # sorted
    for number, rounded in zip(weights, found.float(), strict=True):
        if number.isfinite():
            below, above = every[every <= number], every[every >= number]
            assert rounded.item() in {*below[-1:].tolist(), *above[:1].tolist()}, (number, rounded)
        else:
            assert rounded.equal(number) or (number.isnan() and rounded.isnan())
    shutil.rmtree(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_by_chance_the_mean_is_what_was_trained(tmp_path: Path, dtype: str, sign: float):
    """Weights of 0.1 that training moved by a tenth of the distance to the next number: the nearest is none of it."""
    start = torch.full((200_000,), 0.1).to(getattr(torch, dtype)).float() * sign
    step = 2.0 ** (-4 - {"bfloat16": 7, "float16": 10}[dtype])
    for number, share in enumerate((0.1, -0.1, 0.5, 0.9, 0.0)):
        found = cast(tmp_path / str(number), start + share * step, dtype).float()
        moved = (found - start) / step
        assert set(moved.unique().tolist()) <= {0.0, 1.0, -1.0}
        assert float(moved.mean()) == pytest.approx(share, abs=0.005), "4 standard deviations"
    nothing = torch.zeros(1_000)
    assert cast(tmp_path / "zeros", nothing, dtype).float().equal(nothing)


def test_over_many_nights_the_mean_stays_what_was_trained(tmp_path: Path):
    """Each night goes on from the rounded weights: were the same ones moved each time, they alone would be trained."""
    start, nights = torch.full((20_000,), 0.1).bfloat16().float(), 16
    step = 2.0**-11
    weights = start
    for night in range(nights):
        weights = cast(tmp_path / str(night), weights + 0.25 * step, "bfloat16").float()
    moved = (weights - start) / step
    assert float(moved.mean()) == pytest.approx(nights / 4, abs=0.07), "5 standard deviations"
    assert float(moved.std()) == pytest.approx((nights * 0.25 * 0.75) ** 0.5, rel=0.05), "of draws apart; else 6.9"


def test_by_chance_is_the_same_every_time_and_another_for_each_tensor(tmp_path: Path):
    numbers = torch.arange(1, 5_001) / 5_000
    first = cast(tmp_path / "first", numbers, "bfloat16", "a")
    assert cast(tmp_path / "again", numbers, "bfloat16", "a").equal(first)
    assert not cast(tmp_path / "other", numbers, "bfloat16", "b").equal(first)
    assert hash_bytes(first.view(torch.int16).numpy().tobytes()).startswith("b6946e85f6bf"), "on any machine"


def test_what_has_nothing_to_be_rounded_to_stays_as_it_is(
    objects: ObjectStore, tiny_model: Path, half_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    plain, half = objects.put_tree(tiny_model), objects.put_tree(half_model)
    cache = tmp_path / "cache"

    def with_config(**changes: object) -> Path:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tiny_model, folder)
        config = json.loads((folder / "config.json").read_text())
        config.pop("dtype")
        (folder / "config.json").write_text(json.dumps(config | changes))
        return folder

    untold = objects.put_tree(with_config())
    quantized = objects.put_tree(with_config(dtype="bfloat16", quantization_config={"quant_method": "fp8"}))
    assert [stored_dtype(objects, one) for one in (plain, half, untold, quantized)] == [
        "float32", "bfloat16", "float32", None,
    ]  # fmt: skip
    for base in (plain, untold, quantized):
        assert in_precision_of(plain, base, objects, cache) == plain
    assert in_precision_of(half, half, objects, cache) == half
    cast_model(tiny_model, tmp_path / "by chance", "bfloat16", stochastic=True)
    rounded_model = objects.put_tree(tmp_path / "by chance")
    assert in_precision_of(plain, half, objects, cache) == rounded_model
    assert in_precision_of(untold, half, objects, cache) == rounded_model
    # Where only the small files are left, config.json has to do.
    [weights] = [file.content_id for file in objects.manifest(half).files if file.path.endswith(".safetensors")]
    kept = objects.get_bytes(weights)
    objects.delete(weights)
    assert stored_dtype(objects, half) == "bfloat16"
    objects.put_bytes(kept)

    # What config.json names is not what the weights have: computed in bfloat16, trained in float32.
    masters = objects.put_tree(with_config(dtype="bfloat16"))
    assert stored_dtype(objects, masters) == "float32"
    assert in_precision_of(masters, half, objects, cache) == rounded_model
    nested = objects.put_tree(with_config(text_config={"dtype": "float32"}))
    rounded = objects.manifest(in_precision_of(nested, half, objects, cache))
    [config] = [objects.get_json(file.content_id) for file in rounded.files if file.path == "config.json"]
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"

    folder = with_config(dtype="float32")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    large = objects.put_tree(folder)
    cast_model(tiny_model, tmp_path / "of float16", "float16")
    base = objects.put_tree(tmp_path / "of float16")
    with caplog.at_level(logging.WARNING):
        assert in_precision_of(large, base, objects, cache) == large
    assert "stays in float32: float16 cannot hold 1e+06, which tensor model.norm.weight has" in caplog.text
