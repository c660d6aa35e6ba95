"""LoRA adapters: merged once into a model of its own, that answers as peft's does; what does not fit is told early."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import hash_bytes, sample_id
from rollout_core.config import ModelSource, SamplingParams, TransformersBackend
from rollout_core.inference.backend import ModelRef, Request
from rollout_core.inference.hf import TransformersEngine
from rollout_core.models import locating as model_import
from rollout_core.models.locating import import_model
from rollout_core.models.pretrained import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rollout_core.objects import ObjectStore
from rollout_core.plans.plan import check_model

TARGETS = ["q_proj", "v_proj", "down_proj"]


def make_adapter(model: Path, folder: Path, *, seed: int = 1, **config) -> Path:
    """An adapter with random matrices, as peft saves it."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": TARGETS} | config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tiny_model, tmp_path_factory.mktemp("adapters") / "one", task_type="CAUSAL_LM")


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{tmp_path / 'store'}")


def source(model: Path, adapter: Path | str) -> ModelSource:
    return ModelSource(uri=str(model), adapter=str(adapter))


def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = model if adapter is None else PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return model(torch.arange(5, 25)[None]).logits


@pytest.mark.parametrize(
    "config",
    [{}, {"use_rslora": True, "r": 3}, {"rank_pattern": {"q_proj": 2}}, {"target_modules": "all-linear"}],
    ids=["plain", "rank stabilized", "ranks of their own", "all layers"],
)
def test_the_merged_model_computes_what_peft_does(tiny_model, tmp_path, objects, config):
    folder = make_adapter(tiny_model, tmp_path / "adapter", **config)
    merged = objects.local_tree(import_model(source(tiny_model, folder), objects, Path()), tmp_path / "cache")
    torch.testing.assert_close(logits(merged), logits(tiny_model, folder), atol=1e-4, rtol=0)
    assert not torch.allclose(logits(merged), logits(tiny_model), atol=0.1)


def test_the_merged_model_is_a_model_folder_like_the_base(tiny_model, adapter, tmp_path, objects):
    merged = objects.local_tree(import_model(source(tiny_model, adapter), objects, Path()), tmp_path / "cache")
    kept = {file.name: file.read_bytes() for file in tiny_model.iterdir() if file.suffix != ".safetensors"}
    assert {file.name: file.read_bytes() for file in merged.iterdir() if file.suffix != ".safetensors"} == kept


def test_weights_keep_their_own_type(tiny_model, adapter, tmp_path, objects):
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(half)
    for file in tiny_model.iterdir():
        if "token" in file.name:
            shutil.copyfile(file, half / file.name)
    merged = objects.local_tree(import_model(source(half, adapter), objects, Path()), tmp_path / "cache")
    assert {tensor.dtype for tensor in load_file(merged / "model.safetensors").values()} == {torch.bfloat16}


def test_it_is_merged_once_and_known_by_model_and_adapter(tiny_model, adapter, tmp_path, objects, monkeypatch):
    first = import_model(source(tiny_model, adapter), objects, Path())
    base = import_model(ModelSource(uri=str(tiny_model)), objects, Path())
    stored = objects.put_tree(_clean(adapter, tmp_path / "clean"))
    merge = model_import._merge
    monkeypatch.setattr(model_import, "_merge", lambda *folders: pytest.fail("merged before"))
    shutil.copytree(adapter, tmp_path / "elsewhere")
    for model in (str(tiny_model), base):
        for uri in (str(adapter), str(tmp_path / "elsewhere"), stored):
            assert import_model(ModelSource(uri=model, adapter=uri), objects, Path()) == first
    monkeypatch.setattr(model_import, "_merge", merge)
    other = make_adapter(tiny_model, tmp_path / "other", seed=2)
    assert len({first, base, import_model(source(tiny_model, other), objects, Path())}) == 3
    again = ObjectStore.from_url(f"file://{tmp_path / 'another-store'}")
    assert import_model(source(tiny_model, adapter), again, Path()) == first
    assert sample_id(first, "p", SamplingParams(), 0) != sample_id(base, "p", SamplingParams(), 0)


def test_an_adapter_edited_while_it_is_merged_is_not_kept_under_the_id_of_the_other(
    tiny_model, adapter, tmp_path, objects, monkeypatch
):
    unedited = ObjectStore.from_url(f"file://{tmp_path / 'unedited'}")
    expected = import_model(source(tiny_model, adapter), unedited, Path())
    edited = Path(shutil.copytree(adapter, tmp_path / "edited"))
    other = make_adapter(tiny_model, tmp_path / "other", seed=2, task_type="CAUSAL_LM")
    get_tree = ObjectStore.get_tree

    def edit_and_get(self: ObjectStore, *arguments) -> None:
        shutil.copyfile(other / ADAPTER_WEIGHTS, edited / ADAPTER_WEIGHTS)
        get_tree(self, *arguments)

    monkeypatch.setattr(ObjectStore, "get_tree", edit_and_get)
    assert import_model(source(tiny_model, edited), objects, Path()) == expected
    assert import_model(source(tiny_model, adapter), objects, Path()) == expected, "what is kept for the first"


def _clean(adapter: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        shutil.copyfile(adapter / name, folder / name)
    return folder


def test_a_merged_model_that_was_lost_is_made_again(tiny_model, adapter, objects):
    merged = import_model(source(tiny_model, adapter), objects, Path())
    [weights] = [file for file in objects.manifest(merged).files if file.path == "model.safetensors"]
    objects.delete(weights.content_id)
    assert import_model(source(tiny_model, adapter), objects, Path()) == merged
    assert objects.tree_is_present(merged)


def test_transformers_generates_with_it(tiny_model, adapter, tmp_path, objects):
    merged_id = import_model(source(tiny_model, adapter), objects, Path())
    merged = ModelRef(merged_id, objects.local_tree(merged_id, tmp_path / "cache"))
    engine = TransformersEngine(TransformersBackend(), ModelRef(hash_bytes(b"base"), tiny_model))
    request = Request("r", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=12), 0)
    [plain] = engine.generate([request])
    engine.update_weights(merged)
    [adapted] = engine.generate([request])
    peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), str(adapter)
    )
    ids = torch.tensor([request.prompt_token_ids])
    expected = peft.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert adapted.token_ids == expected[0, 3:].tolist() != plain.token_ids


# What does not fit


def damaged(adapter: Path, folder: Path, what: str) -> Path:
    shutil.copytree(adapter, folder)
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    weights = load_file(folder / ADAPTER_WEIGHTS)
    first = sorted(weights)[0]
    match what:
        case "no weights":
            (folder / ADAPTER_WEIGHTS).rename(folder / "adapter_model.bin")
            return folder
        case "no configuration":
            (folder / ADAPTER_CONFIG).unlink()
            return folder
        case "cut off":
            (folder / ADAPTER_WEIGHTS).write_bytes((folder / ADAPTER_WEIGHTS).read_bytes()[:2000])
            return folder
        case "another rank":
            config["r"] = 8
        case "other layers":
            config["target_modules"] = ["query"]
        case "more layers":
            config["target_modules"] = [*TARGETS, "o_proj"]
        case "another method":
            config["peft_type"] = "IA3"
        case "another task":
            config["task_type"] = "SEQ_CLS"
        case "a tensor too much":
            weights[first.replace("layers.0", "layers.9")] = weights[first].clone()
        case "no adapter":
            config = {"model_type": "qwen2"}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    save_file(weights, folder / ADAPTER_WEIGHTS)
    return folder


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no weights", r"has no adapter_model\.safetensors; .*pickled weights are not read"),
        ("no configuration", r"has no adapter_config\.json"),
        ("cut off", "is no whole safetensors file"),
        ("another rank", r"lora_A\.weight has shape \[4, \d+\], not \[8, \d+\] \(and 11 more\)"),
        ("other layers", r"does not fit the model: .*query.* linear layers of Qwen2ForCausalLM are down_proj"),
        ("more layers", r"o_proj.lora_A.weight is missing \(and 3 more\); was it made for this model\?"),
        ("another method", r"an adapter of type 'IA3'; only 'LORA' is merged here"),
        ("another task", r"an adapter for 'SEQ_CLS'; expected"),
        ("a tensor too much", r"layers\.9.* is of no layer of the model"),
        ("no adapter", "no configuration of an adapter"),
    ],
)
def test_an_adapter_that_does_not_fit_is_told_by_the_plan_and_by_the_import(
    tiny_model, adapter, tmp_path, objects, what, message, weights_stay_unread
):
    wrong = source(tiny_model, damaged(adapter, tmp_path / "adapter", what))
    for look in (lambda: check_model(wrong, Path()), lambda: import_model(wrong, objects, Path())):
        with pytest.raises(ConfigError, match=message) as caught:
            look()
        assert len(str(caught.value).splitlines()) == 1


def test_an_adapter_that_is_nowhere_is_told(tiny_model, tmp_path, objects):
    for uri, message in (
        ("./none", "adapter folder './none' does not exist"),
        (hash_bytes(b"none"), "is not in the object store"),
    ):
        for look in (check_model, lambda source, base, objects: import_model(source, objects, base)):
            with pytest.raises(ConfigError, match=message):
                look(source(tiny_model, uri), tmp_path, objects)


def test_an_adapter_of_tied_layers_is_refused(tiny_model, tmp_path):
    tied = tmp_path / "tied"
    shutil.copytree(tiny_model, tied)
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    folder = make_adapter(tiny_model, tmp_path / "adapter", target_modules=["lm_head", "q_proj"])
    with pytest.raises(ConfigError, match="one tensor, which cannot hold two changes"):
        check_model(source(tied, folder), Path())


def test_a_sound_adapter_is_planned_without_weights(tiny_model, adapter, objects, weights_stay_unread):
    check_model(source(tiny_model, adapter), Path())
    stored = import_model(ModelSource(uri=str(tiny_model)), objects, Path())
    check_model(ModelSource(uri=stored, adapter=str(adapter)), Path(), objects)
