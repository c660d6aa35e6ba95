"""Architectures that a campaign holds against plain torch: of each a tiny model, and what the product does with it.

docs/architectures.md shows this table; `test_architectures.py` compares the two, and runs the campaign.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rollout_core.models.pretrained import copy_tokenizer, load_tokenizer

VOCABULARY, PAD, EOS = 262, 0, 1
"""Of the tokenizer of `tests/conftest.py`'s tiny model."""
BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "head_dim": 4,
}
"""Attention whose keys and values are made of one narrow vector."""
ROUTED = EXPERTS | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
"""Experts in groups, and in the second layer only."""
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
"""A layer whose state goes from token to token in place of attention."""
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
"""Shorter than all rows."""
GEMMA4 = WINDOW | {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
    "global_head_dim": 8,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
FALCON = {name: size for name, size in BASE.items() if name != "head_dim"}
UNDROPPED = dict.fromkeys(
    (
        "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "embd_pdrop", "resid_pdrop",
        "hidden_dropout", "hidden_dropout_prob", "dropout", "activation_dropout", "layerdrop", "residual_dropout",
    ),
    0.0,
)  # fmt: skip
"""Plain torch would draw other units than the product does."""


def scaled(kind: str, original: int, **keys: Any) -> dict[str, Any]:
    """Rotary embeddings for rows beyond ``original`` tokens."""
    common = {"rope_type": kind, "rope_theta": 10_000.0, "original_max_position_embeddings": original}
    return {"rope_parameters": common | keys}


def within(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A language model that is a part of one that sees images, which rows have none of."""
    sees = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": EOS}
    text = {**BASE, **changes, **ids, "model_type": kind}
    return {"text_config": text, "vision_config": sees | {"image_size": 28, "patch_size": 14}}


OTHER_LOGITS = (
    "makes its logits in another way than by its output layer, a factor and a cap, which the trainer cannot do"
)
NOT_CAUSAL = "is not causal: its tokens see those behind them, as its configuration makes it no decoder"
NO_CLASSIFIER = "transformers has no sequence classifier of a"
NO_HEAD = "has no linear score head"


@dataclass(frozen=True)
class Architecture:
    """One of the table."""

    kind: str
    """transformers' ``model_type``."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Keys of its configuration beside those of ``base``."""
    base: dict[str, Any] = field(default_factory=lambda: BASE)
    attention: str = "eager"
    """Which of transformers' own attentions it is compared with."""
    packed: bool = True
    """Whether rows share a forward pass without padding."""
    scored: str | None = None
    """What is said of a reward model where there can be none."""
    refused: str | None = None
    """What is said of a model that is not trained."""
    random: bool = False
    """Whether it draws random numbers in training, dropout aside, so that steps of SFT cannot be compared."""

    def make(self, folder: Path, tokenizer_from: Path, *, seed: int, scored: bool = False) -> None:
        """A model folder with a tokenizer. Its weights are so large that logits tell of all tokens before them."""
        tokenizer = load_tokenizer(tokenizer_from)
        assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id) == (VOCABULARY, PAD, EOS)
        ids = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": EOS}
        sizes = {**self.base, **UNDROPPED, **ids, **self.changes}
        config, kind = AutoConfig.for_model(self.kind, **sizes), AutoModelForCausalLM
        if scored:
            kind, config.num_labels = AutoModelForSequenceClassification, 1
        torch.manual_seed(seed)
        model = kind.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.15 if parameter.ndim > 1 else 0.05)
        model.save_pretrained(folder)
        copy_tokenizer(tokenizer_from, folder)


ARCHITECTURES: dict[str, Architecture] = {
    "afmoe": Architecture("afmoe", ROUTED | WINDOW, scored=NO_CLASSIFIER),
    "apertus": Architecture("apertus", scored=NO_CLASSIFIER),
    "arcee": Architecture("arcee"),
    "bamba": Architecture("bamba", MAMBA | {"attn_layer_indices": [1]}, packed=False, scored=NO_CLASSIFIER),
    "bert": Architecture("bert", {"is_decoder": True}, refused=OTHER_LOGITS),
    "bert, no decoder": Architecture("bert", refused=NOT_CAUSAL),
    "bert-generation": Architecture("bert-generation", {"is_decoder": True}, scored=NO_CLASSIFIER),
    "biogpt": Architecture("biogpt", packed=False),
    "bitnet": Architecture("bitnet", scored=NO_CLASSIFIER),
    "bloom": Architecture("bloom", {"n_layer": 2, "n_head": 4}, base={"hidden_size": 32}, packed=False),
    "codegen": Architecture("codegen", {"rotary_dim": 4}, base=GPT2, packed=False, scored=NO_CLASSIFIER),
    "cohere": Architecture("cohere", {"logit_scale": 0.3}, scored=NO_CLASSIFIER),
    "cohere2": Architecture("cohere2", WINDOW | {"logit_scale": 0.3}, scored=NO_CLASSIFIER),
    "ctrl": Architecture("ctrl", {"dff": 48}, base=GPT2, scored=NO_HEAD),
    "deepseek_v2": Architecture("deepseek_v2", ROUTED | LATENT),
    "deepseek_v3": Architecture("deepseek_v3", ROUTED | LATENT),
    "diffllama": Architecture("diffllama"),
    "doge": Architecture("doge", packed=False),
    "dots1": Architecture("dots1", ROUTED | {"n_shared_experts": 1}, scored=NO_CLASSIFIER),
    "ernie4_5": Architecture("ernie4_5", scored=NO_CLASSIFIER),
    "ernie4_5_moe": Architecture(
        "ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}, scored=NO_CLASSIFIER
    ),
    "exaone4": Architecture("exaone4", WINDOW),
    "falcon": Architecture("falcon", base=FALCON, packed=False),
    "falcon, ALiBi": Architecture(
        "falcon", {"alibi": True, "multi_query": False}, base=FALCON, attention="sdpa", packed=False
    ),
    "falcon_h1": Architecture("falcon_h1", MAMBA | {"lm_head_multiplier": 0.5}, packed=False, scored=NO_CLASSIFIER),
    "falcon_mamba": Architecture("falcon_mamba", {"state_size": 8}, packed=False, scored=NO_CLASSIFIER),
    "flex_olmo": Architecture("flex_olmo", EXPERTS, scored=NO_CLASSIFIER),
    "gemma": Architecture("gemma"),
    "gemma2": Architecture(
        "gemma2",
        WINDOW | {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
        packed=False,
    ),
    "gemma3": Architecture("gemma3", within("gemma3_text", WINDOW) | {"mm_tokens_per_image": 4}, base={}),
    "gemma3_text": Architecture("gemma3_text", WINDOW),
    "gemma4": Architecture("gemma4", within("gemma4_text", GEMMA4), base={}, scored=NO_CLASSIFIER),
    "gemma4_text": Architecture("gemma4_text", GEMMA4, scored=NO_CLASSIFIER),
    "glm": Architecture("glm"),
    "glm4": Architecture("glm4"),
    "glm4_moe": Architecture("glm4_moe", ROUTED, scored=NO_CLASSIFIER),
    "gpt2": Architecture("gpt2", base=GPT2),
    "gpt_bigcode": Architecture("gpt_bigcode", base=GPT2),
    "gpt_neo": Architecture(
        "gpt_neo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 6},
        packed=False,
    ),
    "gpt_neox": Architecture("gpt_neox"),
    "gpt_oss": Architecture("gpt_oss", EXPERTS | WINDOW, packed=False),
    "gptj": Architecture("gptj", {"rotary_dim": 4}, base=GPT2, packed=False),
    "granite": Architecture(
        "granite",
        {
            "logits_scaling": 3.0,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.4,
        },
        scored=NO_CLASSIFIER,
    ),
    "granitemoe": Architecture("granitemoe", EXPERTS | {"logits_scaling": 3.0}, scored=NO_CLASSIFIER),
    "granitemoehybrid": Architecture(
        "granitemoehybrid",
        EXPERTS | MAMBA | {"shared_intermediate_size": 16, "layer_types": ["mamba", "attention"]},
        packed=False,
        scored=NO_CLASSIFIER,
    ),
    "helium": Architecture("helium"),
    "hunyuan_v1_dense": Architecture("hunyuan_v1_dense"),
    "hunyuan_v1_moe": Architecture("hunyuan_v1_moe", EXPERTS | {"moe_topk": 2}),
    "inkling_text": Architecture("inkling_text", EXPERTS, refused=OTHER_LOGITS),
    "jamba": Architecture(
        "jamba",
        {
            "num_experts": 4,
            "mamba_d_state": 8,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
        packed=False,
    ),
    "jetmoe": Architecture("jetmoe", EXPERTS | {"kv_channels": 8}),
    "kimi_linear": Architecture(
        "kimi_linear",
        ROUTED | LATENT | {"linear_head_dim": 8, "linear_num_heads": 4, "layer_types": LINEAR["layer_types"]},
        packed=False,
        scored=NO_CLASSIFIER,
    ),
    "lfm2": Architecture(
        "lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}, packed=False, scored=NO_CLASSIFIER
    ),
    "lfm2_moe": Architecture(
        "lfm2_moe",
        EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        packed=False,
        scored=NO_CLASSIFIER,
    ),
    "llama": Architecture("llama"),
    "llama, scaled positions": Architecture(
        "llama", scaled("llama3", 16, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    ),
    "llama4_text": Architecture("llama4_text", EXPERTS, refused=OTHER_LOGITS),
    "mamba": Architecture("mamba", {"state_size": 8}, packed=False, scored=NO_CLASSIFIER),
    "mamba2": Architecture(
        "mamba2",
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
        base={"hidden_size": 32, "num_hidden_layers": 2},
        packed=False,
        scored=NO_CLASSIFIER,
    ),
    "minicpm3": Architecture("minicpm3", LATENT, refused=OTHER_LOGITS),
    "minimax": Architecture(
        "minimax", EXPERTS | {"block_size": 8, "layer_types": ["linear_attention", "full_attention"]}, packed=False
    ),
    "minimax_m2": Architecture("minimax_m2", EXPERTS, scored=NO_CLASSIFIER),
    "ministral3": Architecture("ministral3"),
    "mistral": Architecture("mistral"),
    "mistral, window": Architecture("mistral", {"sliding_window": 6}),
    "mixtral": Architecture("mixtral", EXPERTS),
    "modernbert-decoder": Architecture("modernbert-decoder", refused=OTHER_LOGITS),
    "mpt": Architecture("mpt", {"max_seq_len": 128}, base={"d_model": 32, "n_layers": 2, "n_heads": 4}, packed=False),
    "nanochat": Architecture("nanochat", scored=NO_CLASSIFIER),
    "nemotron": Architecture("nemotron", packed=False),
    "nemotron_h": Architecture(
        "nemotron_h",
        {
            "hybrid_override_pattern": "M*-",
            "num_hidden_layers": 3,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
        packed=False,
        scored=NO_CLASSIFIER,
    ),
    "olmo": Architecture("olmo"),
    "olmo2": Architecture("olmo2"),
    "olmo3": Architecture("olmo3", WINDOW),
    "olmoe": Architecture("olmoe", EXPERTS, scored=NO_CLASSIFIER),
    "openai-gpt": Architecture("openai-gpt", base=GPT2, packed=False),
    "opt": Architecture("opt", {"word_embed_proj_dim": 32, "ffn_dim": 48}),
    "persimmon": Architecture("persimmon"),
    "phi": Architecture("phi"),
    "phi3": Architecture("phi3"),
    "phi3, LongRoPE": Architecture(
        "phi3",
        {
            "original_max_position_embeddings": 21,
            **scaled("longrope", 21, short_factor=[1.0, 1.2, 1.5, 2.0], long_factor=[1.5, 3.0, 6.0, 9.0]),
        },
    ),
    "phimoe": Architecture("phimoe", EXPERTS, random=True),
    "qwen2": Architecture("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window": Architecture("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen2, YaRN": Architecture("qwen2", scaled("yarn", 16, factor=4.0)),
    "qwen2_moe": Architecture("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 16}),
    "qwen3": Architecture("qwen3"),
    "qwen3_5": Architecture(
        "qwen3_5",
        {
            "text_config": within("qwen3_5_text", LINEAR)["text_config"],
            "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32},
        },
        base={},
        packed=False,
    ),
    "qwen3_5_text": Architecture("qwen3_5_text", LINEAR, packed=False),
    "qwen3_5_moe_text": Architecture(
        "qwen3_5_moe_text",
        EXPERTS | LINEAR | {"shared_expert_intermediate_size": 16},
        packed=False,
        scored=NO_CLASSIFIER,
    ),
    "qwen3_moe": Architecture("qwen3_moe", EXPERTS),
    "qwen3_next": Architecture("qwen3_next", EXPERTS | LINEAR | {"shared_expert_intermediate_size": 16}, packed=False),
    "recurrent_gemma": Architecture(
        "recurrent_gemma",
        {"attention_window_size": 6, "lru_width": 32, "block_types": ["recurrent", "attention"]},
        packed=False,
        scored=NO_CLASSIFIER,
    ),
    "roberta": Architecture("roberta", refused=NOT_CAUSAL),
    "rwkv": Architecture(
        "rwkv", {"attention_hidden_size": 32, "context_length": 128}, packed=False, scored=NO_CLASSIFIER
    ),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3", {"no_rope_layers": [1, 0]}),
    "stablelm": Architecture("stablelm", packed=False),
    "starcoder2": Architecture("starcoder2", {"sliding_window": 6}),
    "vaultgemma": Architecture("vaultgemma", WINDOW, packed=False, scored=NO_CLASSIFIER),
    "xglm": Architecture(
        "xglm",
        {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
        base={"max_position_embeddings": 128},
        packed=False,
        scored=NO_CLASSIFIER,
    ),
    "xlstm": Architecture(
        "xlstm",
        {"num_heads": 4, "embedding_dim": 32, "num_blocks": 2, "chunk_size": 8},
        packed=False,
        scored=NO_CLASSIFIER,
    ),
    "zamba2": Architecture(
        "zamba2", {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]}, packed=False
    ),
}
