"""Low-rank adapters: what they change, what is saved of them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)
from updates import LORA, UPDATES, grpo, ppo, preference_update, save_state, sft_settings, update_context

from rollout_core.algorithms import dataset_updates, on_policy_updates
from rollout_core.algorithms.dataset_updates import rm_update
from rollout_core.algorithms.loop import build_optimizer
from rollout_core.algorithms.policy import Policy
from rollout_core.algorithms.state import TrainState, load_state
from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.config import LoRAConfig, OptimizerConfig, RewardModelSettings
from rollout_core.data.datasets import PairRow, to_jsonl
from rollout_core.data.packing import pack_completions
from rollout_core.exports.hugging_face import export_model
from rollout_core.models.architecture import WithoutAdapters, count_adapted, has_lora, merged_weights, with_lora
from rollout_core.models.pretrained import copy_tokenizer, load_causal_lm
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import record_derivation
from rollout_core.objects.origins import Source, record_import
from rollout_core.objects.records import Checkpoint

IDS = torch.arange(2, 12)[None]


def scatter(model) -> None:
    """Adapters as after training."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)


def gpt2() -> GPT2LMHeadModel:
    """Its layers keep weights the other way round."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32)).eval()


EXPERTS = ("mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "phimoe")
"""Some have shared experts, or layers without experts, by the names that those of experts have in older checkpoints."""


def experts(kind: str) -> Any:
    """The weights of all experts are one tensor."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 16}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    of_experts: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}
    of_experts |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "decoder_sparse_step": 1}
    of_experts |= {"shared_expert_intermediate_size": 16}
    if kind == "deepseek_v3":
        of_experts |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        of_experts |= {"v_head_dim": 16, "head_dim": 8}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | counts | of_experts)).eval()


@pytest.mark.parametrize("kind", EXPERTS[:2])
def test_experts_and_their_router_have_no_adapter(kind):
    model = with_lora(experts(kind), LoRAConfig(), seed=1)
    adapted = {
        name.partition(".lora_")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_" in name
    }
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ConfigError, match=r"names model.layers.0.mlp.gate, a \w+Router, and only linear layers can"):
        with_lora(experts(kind), LoRAConfig(target_modules=("gate",)), seed=1)


@pytest.mark.parametrize("config", [LoRAConfig(), LoRAConfig(r=4, alpha=3.0, rank_stabilized=True)])
@pytest.mark.parametrize("kind", ["qwen2", "gpt2", *EXPERTS])
def test_adapters_change_nothing_at_first_and_merge_into_the_same_function(tiny_model: Path, kind, config):
    def load():
        if kind in EXPERTS:
            return experts(kind)
        return load_causal_lm(tiny_model).eval() if kind == "qwen2" else gpt2()

    if kind == "gpt2":
        config = config.model_copy(update={"target_modules": ("c_attn", "c_fc")})
    plain = load()
    expected = plain(IDS).logits
    model = with_lora(load(), config, seed=1).eval()
    assert has_lora(model) and not has_lora(plain)
    torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=0)

    scatter(model)
    changed = model(IDS).logits
    assert (changed - expected).abs().max() > 1e-2
    plain.load_state_dict(merged_weights(model, model.state_dict()))
    torch.testing.assert_close(plain(IDS).logits, changed, rtol=1e-4, atol=1e-5)


STATE_SPACES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mixer", {}),
    "mamba2": ("mixer", {"num_heads": 8, "head_dim": 8, "n_groups": 2}),
    "falcon_h1": ("mamba", {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64}),
    "bamba": ("mamba", {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]}),
    "jamba": ("mamba", {"num_experts": 2}),
}


@pytest.mark.parametrize("kind", STATE_SPACES)
def test_layers_whose_weights_kernels_take_have_no_adapter(kind: str, tmp_path: Path):
    """On a GPU one kernel computes a Mamba layer, from the weights alone; peft refuses those of some architectures. Of
    Jamba's that holds for one layer alone."""
    read = ("dt_proj",) if kind == "jamba" else ("x_proj", "dt_proj", "out_proj")
    mixer, sizes = STATE_SPACES[kind]
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, **sizes}
    if kind != "mamba2":
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"names .*\.{mixer}\.{read[-1]}, whose weight a kernel .* choose among .*in_proj"
    ):
        with_lora(model, LoRAConfig(target_modules=(read[-1],)), seed=1)
    names = [name for name, _ in with_lora(model, LoRAConfig(), seed=1).named_parameters()]
    adapted = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    assert {name.rpartition(".")[2] for name in adapted if f".{mixer}." in name} >= {"in_proj"}
    assert not any(name.endswith(read) for name in adapted)
    if kind == "jamba":
        assert any(name.endswith(f"{mixer}.out_proj") for name in adapted)
    assert any(name.endswith(f"{mixer}.{read[-1]}") for name in count_adapted(tmp_path, LoRAConfig()).left_out)


def test_only_adapters_are_trained_and_a_seed_gives_them(tiny_model: Path):
    model, same, other = (with_lora(load_causal_lm(tiny_model), LoRAConfig(), seed=seed) for seed in (1, 1, 2))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    assert not any("lm_head" in name or "embed" in name for name in trained)
    for name in trained:
        assert torch.equal(model.state_dict()[name], same.state_dict()[name])
    assert any(not torch.equal(model.state_dict()[name], other.state_dict()[name]) for name in trained)
    assert Policy(model).packed, "packed attention goes through adapters"
    optimizer = build_optimizer(OptimizerConfig(lr=1.0), list(model.parameters()))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(trained)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("nothing",), "names no layer of Qwen2ForCausalLM; its linear layers are down_proj, "),
        (("lm_head",), "output"),
        (("q_proj", "embed_tokens"), "names model.embed_tokens, a Embedding, .* choose among down_proj, "),
    ],
)
def test_layers_that_cannot_have_an_adapter_are_refused(tiny_model: Path, targets, message):
    with pytest.raises(ConfigError, match=message) as caught:
        with_lora(load_causal_lm(tiny_model), LoRAConfig(target_modules=targets), seed=1)
    assert "lm_head" not in str(caught.value), "what it offers can be chosen"


def test_without_lora_the_identity_is_as_it_was():
    assert "lora" not in sft_settings().cache_identity()
    assert sft_settings(lora=LoRAConfig()).cache_identity()["lora"] is not None


def state_of(model) -> TrainState:
    return TrainState(model, build_optimizer(OptimizerConfig(lr=1e-2), list(model.parameters())))


def test_a_state_restores_adapters_to_the_last_bit_and_holds_a_model_usable_as_it_is(tiny_model: Path, tmp_path: Path):
    state = state_of(with_lora(load_causal_lm(tiny_model), LoRAConfig(), seed=1))
    scatter(state.model)
    state.model(IDS, labels=IDS).loss.backward()
    state.optimizer.step()
    save_state(state, tmp_path / "state", tokenizer_from=tiny_model)

    other = state_of(with_lora(load_causal_lm(tiny_model), LoRAConfig(), seed=2))
    load_state(other, tmp_path / "state")
    for name, tensor in state.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name
    usable = AutoModelForCausalLM.from_pretrained(tmp_path / "state/model").eval()
    torch.testing.assert_close(usable(IDS).logits, state.model.eval()(IDS).logits, rtol=1e-4, atol=1e-5)

    with pytest.raises(ConfigError, match="of a run with lora, this one is without"):
        load_state(state_of(load_causal_lm(tiny_model)), tmp_path / "state")
    save_state(state_of(load_causal_lm(tiny_model)), tmp_path / "plain", tokenizer_from=tiny_model)
    with pytest.raises(ConfigError, match="of a run without lora, this one is with"):
        load_state(other, tmp_path / "plain")


def test_on_policy_iterations_go_on_with_one_adapter(tiny_model: Path, tmp_path: Path):
    """Merged into the policy each time, it must not be counted twice."""
    place = update_context(tmp_path)
    checkpoint = UPDATES["grpo-lora"](place, tiny_model)
    assert checkpoint.step == 12
    merged = load_causal_lm(place.model(checkpoint.model))
    start = load_causal_lm(tiny_model).state_dict()
    ranks = {
        name: int(torch.linalg.matrix_rank((tensor - start[name]).double(), rtol=1e-3))
        for name, tensor in merged.state_dict().items()
        if name.endswith("proj.weight")
    }
    assert ranks and all(0 < rank <= 4 for rank in ranks.values()), ranks


def test_without_its_adapters_a_policy_is_the_model_they_were_put_into_to_the_last_bit(tiny_model: Path):
    batch = pack_completions([[5, 6, 7], [5, 6, 7]], [[10, 11], [12, 13, 14]])
    trained = with_lora(load_causal_lm(tiny_model), LORA, seed=1).eval()
    scatter(trained)
    policy = Policy(trained)
    before = [parameter.requires_grad for parameter in trained.parameters()]
    with torch.no_grad():
        base, bare = Policy(load_causal_lm(tiny_model).eval())(batch), WithoutAdapters(policy)(batch)
        assert torch.equal(bare.logprobs, base.logprobs) and not torch.equal(policy(batch).logprobs, base.logprobs)
    assert [parameter.requires_grad for parameter in trained.parameters()] == before


@pytest.mark.parametrize("name", ["ppo", "grpo", "dpo", "kto"])
def test_with_adapters_the_reference_is_no_second_model(tiny_model: Path, tmp_path: Path, monkeypatch, name):
    """Each update loads one model, and its reference's log-probabilities are those of a run with two."""
    loaded: list[Path] = []

    def load(folder: Path, *_):
        loaded.append(folder)
        return load_causal_lm(folder)

    monkeypatch.setattr(on_policy_updates, "load_to_train", load)
    monkeypatch.setattr(dataset_updates, "load_to_train", load)
    place, other = update_context(tmp_path / "with"), update_context(tmp_path / "without")
    if name in ("ppo", "grpo"):
        update = {"ppo": ppo, "grpo": grpo}[name]
        update(place, tiny_model, lora=LORA.model_copy(update={"dropout": 0.0}))
        assert len(loaded) == 2, "one in each of two iterations"
    else:
        preference_update(name, tiny_model, place, lora={"r": 4})
        assert len(loaded) == 1
        preference_update(name, tiny_model, other)
        assert len(loaded) == 3
        kept = list(place.objects.list_refs("reference-logprobs"))
        assert kept and kept == list(other.objects.list_refs("reference-logprobs"))


def test_a_reward_model_with_adapters_trains_its_head_too(tiny_model: Path, tmp_path: Path):
    place = update_context(tmp_path)
    rows = [PairRow(prompt=f"sort {n} 1 =", chosen=f" 1 {n}", rejected=f" {n} 1") for n in range(2, 18)]
    settings = RewardModelSettings.model_validate(
        {
            "dataset": {"path": "x"},
            "optimizer": {"lr": 1e-2},
            "lora": {"r": 4},
            "sequence": {"max_length": 64},
            "budget": {"max_steps": 8},
        }
    )
    data = place.objects.put_bytes(to_jsonl(rows))
    checkpoint, _ = rm_update(place.objects.put_tree(tiny_model), data, settings, place)
    assert checkpoint.summary["loss"] < 0.6 and checkpoint.summary["rewards/margins"] > 0


@pytest.mark.parametrize("name", ["sft-lora", "sft-chosen", "grpo-lora", "rm"])
def test_an_adapter_leaves_alone_and_peft_makes_the_model_of_it(tiny_model: Path, tmp_path: Path, name: str):
    """Of SFT, of an average at the best step, of the iterations of GRPO, which go on with one, and with a head."""
    place = update_context(tmp_path)
    base, lora = place.objects.put_tree(tiny_model), LORA if name != "rm" else LoRAConfig(r=4)
    if name == "rm":
        checkpoint = preference_update("rm", tiny_model, place, lora={"r": 4})
    else:
        checkpoint = UPDATES[name](place, tiny_model)
    before = place.objects.put_bytes(b"the model of the iteration before") if name == "grpo-lora" else base
    inputs = {"model": before, "reference": base, "settings": {"lora": lora.cache_identity()}}
    record(place.objects, f"{name.partition('-')[0]}_update", inputs, checkpoint)
    record_import(place.objects, base, Source(kind="model", address="a/b", hub_id="a/b", size_bytes=1, num_files=1))

    folder = tmp_path / "adapter"
    export_model(place.objects, checkpoint.model, folder, as_adapter=True)
    assert {file.name for file in folder.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "README.md", "lineage.json", "training-metrics.jsonl",
    }  # fmt: skip
    kind = AutoModelForSequenceClassification if name == "rm" else AutoModelForCausalLM
    options: Any = {"dtype": torch.float32} | ({"num_labels": 1} if name == "rm" else {})
    adapted = PeftModel.from_pretrained(kind.from_pretrained(tiny_model, **options), str(folder)).eval()
    merged = kind.from_pretrained(place.model(checkpoint.model), **options).eval()
    bare = kind.from_pretrained(tiny_model, **options).eval()
    torch.testing.assert_close(adapted(IDS).logits, merged(IDS).logits, rtol=1e-4, atol=1e-5)
    assert (bare(IDS).logits - merged(IDS).logits).abs().max() > 1e-3
    assert adapted.peft_config["default"].base_model_name_or_path == "a/b"
    assert "library_name: peft" in (card := (folder / "README.md").read_text()) and 'from_pretrained("a/b"' in card


def test_a_model_without_an_adapter_or_its_training_state_gives_none(tiny_model: Path, tmp_path: Path):
    objects = update_context(tmp_path).objects
    base, model = objects.put_tree(tiny_model), objects.put_bytes(b"{}")
    with pytest.raises(ConfigError, match=r"has no adapter: no stage trained it; export it without --adapter"):
        export_model(objects, base, tmp_path / "out", as_adapter=True)
    outcome = Checkpoint(
        model=model, train_state=objects.put_bytes(b"s"), metrics=objects.put_bytes(b""), algorithm="sft", step=1,
        summary={},
    )  # fmt: skip
    record(objects, "sft_update", {"model": base, "settings": {"lora": None}}, outcome)
    with pytest.raises(ConfigError, match="has no adapter: sft_update trained its own weights"):
        export_model(objects, model, tmp_path / "out", as_adapter=True)
    record(objects, "sft_update", {"model": base, "settings": {"lora": LORA.cache_identity()}}, outcome)
    with pytest.raises(NotFound, match=r"the training state of this sft_update is not in the object store"):
        export_model(objects, model, tmp_path / "out", as_adapter=True)
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_peft_would_put_elsewhere_is_refused(tiny_model: Path, tmp_path: Path):
    """peft takes names of a dense layer for those of experts in older checkpoints."""
    model, folder = experts("deepseek_v3"), tmp_path / "model"
    model.resize_token_embeddings(load_causal_lm(tiny_model).config.vocab_size)
    model.config.max_position_embeddings = 256
    model.save_pretrained(folder)
    copy_tokenizer(tiny_model, folder)
    place = update_context(tmp_path)
    checkpoint = UPDATES["sft-lora"](place, folder)
    inputs = {"model": place.objects.put_tree(folder), "settings": {"lora": LORA.cache_identity()}}
    record(place.objects, "sft_update", inputs, checkpoint)
    with pytest.raises(ConfigError, match="peft would not put this adapter into the layers that it was trained in"):
        export_model(place.objects, checkpoint.model, tmp_path / "out", as_adapter=True)
    assert not (tmp_path / "out").exists()


def record(objects: ObjectStore, stage: str, inputs: dict[str, Any], outcome: Checkpoint) -> None:
    """As the stage files what it made."""
    record_derivation(objects, stage, inputs, outcome.outputs())
