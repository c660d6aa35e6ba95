"""In conversations engines stop where the chat template ends a turn, also where that is not the model's EOS."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_templates import FAMILIES, TWO, tokenizer_of, trained, user
from updates import sft_settings, update_context

from rollout_core.algorithms.dataset_updates import rm_update, sft_update
from rollout_core.algorithms.supervised import score_samples
from rollout_core.base.ids import hash_bytes
from rollout_core.config import (
    BudgetConfig,
    JsonlDataset,
    LossOn,
    OptimizerConfig,
    RewardModelSettings,
    SamplingParams,
    TransformersBackend,
)
from rollout_core.data.datasets import PairRow, PromptRow, SftRow, to_jsonl
from rollout_core.data.samples import Sample, decode_samples, encode_samples, ends_of, make_samples
from rollout_core.data.turn_ends import as_engines_end, turn_end, turn_ends, until_end
from rollout_core.inference.backend import ModelRef, Request
from rollout_core.inference.hf import TransformersEngine
from rollout_core.models.facts import end_ids
from rollout_core.models.pretrained import load_tokenizer
from tests.models.chat_models import make_chat_base
from tests.support.rows import tokenize_pairs

MODEL = hash_bytes(b"model")
PARAMS = SamplingParams(max_tokens=24)
CHAT = PromptRow.model_validate({"messages": [{"role": "user", "content": "sort 3 1"}]})
HI = PromptRow.model_validate({"messages": [user("hi")]})
TEXT = PromptRow(prompt="sort 3 1 =")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_end_of_a_turn_is_the_token_that_is_trained_there(name: str):
    texts, told = trained(name, TWO)
    end = turn_end(tokenizer_of(name))
    if told.num_ended and name not in ("Phi 3", "Phi 3.5"):
        assert end is None
    else:
        assert end is not None and texts[-1][-1].rstrip().endswith(end)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_reward_model_is_trained_at_the_token_at_which_the_engine_ends(name: str, named: bool, tmp_path: Path):
    """Whether the model names the template's end among its own (Gemma's instruct models) or not (most base models)."""
    tokenizer, end = tokenizer_of(name), turn_end(tokenizer_of(name))
    own = tokenizer.convert_tokens_to_ids([tokenizer.eos_token, *([end] if named and end else [])])
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": own}))
    [sample] = make_samples(
        tokenizer, [HI], model=MODEL, params=PARAMS, ends=ends_of(tmp_path, tokenizer, [HI], PARAMS)
    )
    stops = {*end_ids(tmp_path, tokenizer), *sample.ends}
    row = PairRow.model_validate({"prompt": [user("hi")], "chosen": "yes", "rejected": "no"})
    [pair], _ = tokenize_pairs(tokenizer, [row], max_seq_len=8192, need_prompts=True)
    for written, said in ((pair.chosen, "yes"), (pair.rejected, "no")):
        drawn = next(written[: place + 1] for place, token in enumerate(written) if token in stops)
        assert as_engines_end(tmp_path, tokenizer)(written) == drawn and said in tokenizer.decode(drawn)


@pytest.mark.parametrize("names_its_end", [True, False])
def test_a_reward_model_judges_completions_of_an_engine_as_it_judged_its_rows(
    tiny_model: Path, tmp_path: Path, names_its_end: bool
):
    """Turns end by a token and a line break (Gemma, ChatML): a score that is trained at the line break is none where
    an engine stops."""
    folder = tmp_path / "model"
    make_chat_base(tiny_model, folder)
    tokenizer = load_tokenizer(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if names_its_end:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_token_id, end]}))
    prompt = [{"role": "user", "content": "sort 3 1"}]
    rows = [PairRow.model_validate({"prompt": prompt, "chosen": f"{n} 1", "rejected": f"{n} 7"}) for n in range(10, 18)]
    context = update_context(tmp_path)
    settings = RewardModelSettings(
        dataset=JsonlDataset(path="x"), optimizer=OptimizerConfig(lr=1e-2), budget=BudgetConfig(max_steps=12)
    )
    dataset = context.objects.put_bytes(to_jsonl(rows))
    checkpoint, _ = rm_update(context.objects.put_tree(folder), dataset, settings, context)
    [chat] = made(folder, [CHAT])
    drawn = [[*tokenizer(text, add_special_tokens=False)["input_ids"], end] for row in rows for text in answers(row)]
    scores = score_samples(context.model(checkpoint.model), [(chat.prompt_token_ids, token_ids) for token_ids in drawn])
    assert all(chosen > rejected + 1 for chosen, rejected in zip(scores[::2], scores[1::2], strict=True))


def answers(row: PairRow) -> tuple[str, str]:
    assert isinstance(row.chosen, str) and isinstance(row.rejected, str)
    return row.chosen, row.rejected


def made(folder: Path, rows: list[PromptRow], params: SamplingParams = PARAMS) -> list[Sample]:
    tokenizer = load_tokenizer(folder)
    return make_samples(tokenizer, rows, model=MODEL, params=params, ends=ends_of(folder, tokenizer, rows, params))


def test_ends_are_those_of_conversations_alone_and_part_of_their_identity(chat_base: Path, tmp_path: Path):
    tokenizer = load_tokenizer(chat_base)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chat, text = made(chat_base, [CHAT, TEXT])
    assert (chat.ends, text.ends) == ([end], [])
    plain_chat, plain_text = make_samples(tokenizer, [CHAT, TEXT], model=MODEL, params=PARAMS)
    assert plain_text == text and plain_chat.id != chat.id and plain_chat.prompt_token_ids == chat.prompt_token_ids
    assert decode_samples(encode_samples([chat, text])) == [chat, text] and b"ends" not in encode_samples([text])
    ignoring = SamplingParams(max_tokens=24, ignore_eos=True)
    assert made(chat_base, [CHAT], ignoring)[0].ends == []
    # A model that names the token among its ends, in one place or another, is what it was.
    for name in ("generation_config.json", "config.json"):
        folder = tmp_path / name
        make_chat_base(chat_base, folder)
        (folder / "generation_config.json").unlink(missing_ok=name == "config.json")
        file = folder / name
        known = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(known | {"eos_token_id": [1, end]}))
        assert turn_ends(folder, load_tokenizer(folder)) == []
        assert made(folder, [CHAT, TEXT]) == [plain_chat, plain_text]


@pytest.mark.parametrize(
    "template", [None, "{{ raise_exception('no') }}", "{% for m in messages %}{{ m.role }}{% endfor %}<|im_end|>"]
)
def test_without_an_end_of_a_turn_there_is_none(tiny_model: Path, tmp_path: Path, template: str | None):
    make_chat_base(tiny_model, tmp_path / "model", template=template)
    assert turn_ends(tmp_path / "model", load_tokenizer(tmp_path / "model")) == []


def test_a_base_model_learns_to_end_its_turns_and_stops_there(chat_base: Path, tmp_path: Path):
    """Trained for some steps on conversations, it ends its turn by the template's token, and the engine stops."""
    answer = {"role": "assistant", "content": "1"}
    talks = [[{"role": "user", "content": f"sort {n} 1"}, answer] for n in range(8)]
    rows = [SftRow.model_validate({"messages": messages}) for messages in talks]
    context = update_context(tmp_path)
    model = context.objects.put_tree(chat_base)
    dataset = context.objects.put_bytes(to_jsonl(rows))
    settings = sft_settings(loss_on=LossOn(kind="assistant_only"), budget=BudgetConfig(max_steps=40))
    checkpoint, report = sft_update(model, dataset, settings, context)
    assert report.num_turn_by_turn == 0 and report.num_ended == 0
    folder = tmp_path / "trained"
    context.objects.get_tree(checkpoint.model, folder)
    engine = TransformersEngine(TransformersBackend(), ModelRef(checkpoint.model, folder))
    end = load_tokenizer(folder).convert_tokens_to_ids("<|im_end|>")
    chat, text = made(folder, [CHAT, TEXT], greedy := SamplingParams(max_tokens=24, temperature=0.0))
    assert chat.ends == [end]
    asked = [Request(str(one.id), one.prompt_token_ids, greedy, 1, ends=one.ends) for one in (chat, text)]
    ended, _ = engine.generate(asked)
    assert (ended.text, ended.finish_reason, ended.token_ids[-1]) == ("1", "stop", end)
    [unended] = engine.generate([Request("x", chat.prompt_token_ids, greedy, 1)])
    assert unended.finish_reason == "length" and list(unended.token_ids[: len(ended.token_ids)]) == ended.token_ids


def test_sequences_end_where_engines_end_them():
    def until(token_ids: list[int], ends: set[int]) -> list[int]:
        return until_end(token_ids, ends, lambda token: token == 0)

    assert until([5, 9, 7], {9}) == [5, 9]
    assert until([9, 5, 9], {9}) == [9, 5, 9]
    assert until([5, 7], {9}) == [5, 7]
    assert until([5, 8, 0, 9], {8, 9}) == [5, 8], "an engine stops at the first"
    assert until([8, 5, 9, 0, 8], {8, 9}) == [8, 5, 9]
    assert until([8, 0, 5, 9], {8, 9}) == [8, 0, 5, 9], "a conversation of several turns"
