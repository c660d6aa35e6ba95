"""For every kind of model a plan says what training does: both ask the same code, without weights and with them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import plain_torch
import pytest
import torch
from architectures import ARCHITECTURES, Architecture
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from updates import LORA, rows_of, update_context

from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.dataset_updates import preference_update, rm_update, sft_update
from rollout_core.algorithms.layers import checkpoint_layers
from rollout_core.algorithms.on_policy_updates import grpo_update
from rollout_core.algorithms.policy import Policy
from rollout_core.algorithms.supervised import RewardModel, load_reward_model
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, canonical_json, hash_bytes
from rollout_core.config import (
    DPOSettings,
    GRPOSettings,
    HeldOutRows,
    JsonlDataset,
    RewardModelSettings,
    SFTSettings,
)
from rollout_core.data.datasets import PairRow, SftRow, to_jsonl
from rollout_core.data.packing import Document, pack
from rollout_core.data.samples import Completion, Sample, encode_completion, encode_samples
from rollout_core.models.architecture import count_adapted
from rollout_core.models.bounded.inspecting import check_training
from rollout_core.models.pretrained import load_causal_lm, load_tokenizer
from rollout_core.objects.records import Checkpoint, Scores

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": 50,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PACKED = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "gpt_neox", "gpt2", "olmo2", "opt"]
PACKED += ["mixtral", "qwen2_moe", "qwen3_moe", "cohere", "cohere2", "granite", "granitemoe"]
PADDED = ["gpt_oss", "bloom", "nemotron", "gemma2", "recurrent_gemma"]
"""Attention with sinks, ALiBi or a cap, layers that do not hand on what they are given, and recurrent ones."""
REFUSED = ["minicpm3", "bert"]
"""They scale what goes into their output layer, or have weights of their own before it."""
NOT_CAUSAL = ["bert-generation", "roberta", "xlm"]
"""Unless their configuration says that they are decoders."""
PARTLY = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "olmo2", "qwen2_moe", "qwen3_moe"]
"""Their last layer is attention and then a feed-forward part, which is computed where its output is read."""
DOCUMENTS = [Document(list(range(3, 12))), Document([5, 6, 7], [[7, 8, 9], [20, 21]]), Document([4, 9, 8, 7])]


def config_of(kind: str) -> Any:
    own = {"is_decoder": True} if kind == "bert" else {}
    return AutoConfig.for_model(kind, **(GPT2 if kind == "gpt2" else SIZES | EXPERTS | own))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def make(kind: str, folder: Path) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return model


def plain_logprobs(folder: Path) -> torch.Tensor:
    """Of the documents' targets, a row at a time and without anything of ours."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for document in DOCUMENTS:
        first = len(document.prefix) if document.branches else 1
        for row in [[*document.prefix, *branch] for branch in document.branches] or [list(document.prefix)]:
            logprobs = model(torch.tensor([row])).logits[0].log_softmax(-1)
            found += [logprobs[place - 1, row[place]] for place in range(first, len(row))]
    return torch.stack(found)


@pytest.mark.parametrize("kind", PACKED + PADDED)
def test_a_model_that_the_plan_lets_through_is_trained_and_computes_what_transformers_does(kind: str, folder: Path):
    make(kind, folder)
    check_training(folder, is_reward_model=False)
    policy = Policy(load_causal_lm(folder).eval())
    assert policy.packed == (kind in PACKED)
    logprobs = policy(pack(DOCUMENTS)).logprobs
    torch.testing.assert_close(logprobs, plain_logprobs(folder), atol=1e-5, rtol=1e-4)
    logprobs.sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in policy.parameters())


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_training_refuses_is_refused_by_the_plan_in_the_same_words(kind: str, folder: Path):
    make(kind, folder)
    told = []
    for look in (lambda: check_training(folder, is_reward_model=False), lambda: Policy(load_causal_lm(folder))):
        with pytest.raises(ConfigError, match="makes its logits in another way than by its output layer, a") as caught:
            look()
        told.append(str(caught.value))
    assert told[0] == told[1]


@pytest.mark.parametrize("kind", NOT_CAUSAL)
def test_a_model_whose_tokens_see_later_ones_is_refused_by_the_plan(kind: str, folder: Path):
    make(kind, folder)
    told = []
    for look in (lambda: check_training(folder, is_reward_model=False), lambda: Policy(load_causal_lm(folder))):
        with pytest.raises(
            ConfigError, match=r"is not causal: its tokens see those behind them, as .*; choose another"
        ) as caught:
            look()
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_a_model_whose_tokens_see_later_ones_is_refused_whatever_its_configuration_says(folder: Path):
    """Padding would change its rows."""
    sizes = {"vocab_size": 50, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("xlnet", **sizes))
    with pytest.raises(ConfigError, match="XLNetLMHeadModel is not causal: its tokens see those behind them"):
        Policy(model.train())
    assert model.training


@pytest.mark.parametrize("kind", ["bloom", "gpt_oss"])
def test_a_second_policy_of_weights_of_two_dtypes_is_made_without_another_look(kind: str, folder: Path):
    """As GRPO makes its reference of a policy with adapters, whose matrices are bfloat16 by then and its norms not."""
    model = make(kind, folder)
    Policy(model)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.bfloat16()
    Policy(model)


def test_a_model_that_has_diverged_is_not_taken_for_one_that_is_not_causal(folder: Path):
    model = make("llama", folder)
    torch.nn.init.constant_(model.get_input_embeddings().weight, float("nan"))
    Policy(model)


@pytest.mark.parametrize("kind", ["granite", "mamba"])
def test_a_reward_model_of_what_transformers_has_no_classifier_of_is_refused(kind: str, folder: Path):
    make(kind, folder)
    told = []
    for look in (
        lambda: check_training(folder, is_reward_model=True),
        lambda: load_reward_model(folder, new_head=True),
    ):
        with pytest.raises(
            ConfigError, match=f"has no sequence classifier of a '{kind}', .*; choose another"
        ) as caught:
            look()
        told.append(str(caught.value))
    assert told[0] == told[1]


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "gpt_neox", "gemma2"])
def test_a_reward_model_is_judged_alike(kind: str, folder: Path):
    config = config_of(kind)
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    check_training(folder, is_reward_model=True)
    RewardModel(load_reward_model(folder))


def read_of(policy: Policy, seen: list[int] | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities after long prompts, and the gradients of their sum; ``seen`` gets how many tokens pass through
    the last layer's feed-forward part."""
    batches = [
        pack([Document(list(range(3, 23)), [[7, 8, 9], [20, 21]])]),
        pack([Document(list(range(9, 40)), [[7], [2, 21]])]),
    ]
    if seen is not None:
        part = policy.model.base_model.layers[-1].mlp
        part.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    # Backward passes come after both forward ones: with checkpointing each computes its own layers again.
    logprobs = [policy(batch).logprobs for batch in batches]
    for found in logprobs:
        found.sum().backward()
    named = {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}
    return torch.cat(logprobs).detach(), named


@pytest.mark.parametrize("kind", PARTLY)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_last_layer_is_computed_where_it_is_read_with_the_gradients_of_the_whole(
    kind: str, checkpointed: bool, folder: Path
):
    make(kind, folder)
    whole = read_of(Policy(load_causal_lm(folder).eval(), packed=False))
    model = load_causal_lm(folder).eval()
    Policy(model)  # more than one may be made of a model
    policy = Policy(copy.deepcopy(model))
    if checkpointed:
        checkpoint_layers(policy.model)
    seen: list[int] = []
    found = read_of(policy, seen)
    assert seen[:2] == [4, 2] and set(seen) == {4, 2}, "of 25 and 34 tokens those that predict a target"
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-4)


# Against plain torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"
OPTIMIZER = plain_torch.Optimizer()
TOLERANCE = 1e-5
"""float32 has seven digits, and packed or padded products are added up in another order than those of a row alone."""
BETA, CLIP, KL, TEMPERATURE = 0.1, 0.2, 0.1, 0.7
DIGITS = ["31", "402", "7", "9182736450", "52", "8642097", "1357902", "66"]
"""What is to be sorted, two tokens a digit: rows of 10 to 50 tokens, within windows of attention and beyond them."""
ADAPTERS = LORA.model_copy(update={"dropout": 0.0})
PARTS = ("sft", "dpo", "rm", "grpo", "lora")
TEXTS = [(f"sort {' '.join(digits)} =", "".join(f" {one}" for one in sorted(digits))) for digits in DIGITS]


def check_close(found: plain_torch.Step, expected: plain_torch.Step) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=TOLERANCE), "loss"
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=TOLERANCE), "gradient norm"
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        difference, largest = (float(one.abs().max()) for one in (found.weights[name] - weight, weight))
        assert difference <= TOLERANCE * max(largest, OPTIMIZER.lr), (
            f"{name}: {difference:.1e} apart, its largest is {largest:.1e}"
        )


class Trial:
    """Updates of one architecture, each beside plain torch."""

    def __init__(self, architecture: Architecture, tiny_model: Path, folder: Path) -> None:
        self.architecture = architecture
        self._tokenizer_from, self._base = tiny_model, folder
        self._tokenizer = load_tokenizer(tiny_model)
        self._place = update_context(folder)

    def _under(self, *key: Any) -> UpdateContext:
        """Where an update of its own leaves what it makes."""
        return replace(self._place, key=hash_bytes(repr(key).encode()))

    def model(self, name: str, *, seed: int = 0, scored: bool = False) -> Path:
        folder = self._base / name
        if not folder.exists():
            self.architecture.make(folder, self._tokenizer_from, seed=seed, scored=scored)
        return folder

    def plan(self) -> str:
        """What the plan says of it, and whether its rows are packed."""
        folder, refused = self.model("policy"), self.architecture.refused
        if refused is None:
            check_training(folder, is_reward_model=False)
            assert Policy(load_causal_lm(folder).eval()).packed == self.architecture.packed
            return "packed" if self.architecture.packed else "padded"
        for look in (lambda: check_training(folder, is_reward_model=False), lambda: self._sft_update(folder)):
            with pytest.raises(
                ConfigError, match=f"^{type(load_causal_lm(folder)).__name__} {refused}; choose another"
            ):
                look()
        return f"refused: {refused}"

    def sft(self) -> str:
        """In one pass, and in passes of one row each."""
        folder, rows = self.model("policy"), [self._row(*texts) for texts in TEXTS]
        plain = self._plain(folder).train()
        if self.architecture.random:
            assert plain_torch.sft_loss(plain, rows) != plain_torch.sft_loss(plain, rows)
            return "random"
        expected = plain_torch.step(plain, lambda model: plain_torch.sft_loss(model, rows), OPTIMIZER)
        for tokens in (1000, 1):
            checkpoint = self._sft_update(folder, max_tokens_per_microbatch=tokens)
            check_close(self._stepped(checkpoint), expected)
        return "equal"

    def dpo(self) -> str:
        """Against a reference of other weights, for with the same ones every loss is log 2."""
        folder, other = self.model("policy"), self.model("reference", seed=1)
        reference, (dataset, pairs) = self._plain(other), self._pairs()
        expected = plain_torch.step(
            self._plain(folder), lambda model: plain_torch.dpo_loss(model, reference, pairs, beta=BETA), OPTIMIZER
        )
        settings = DPOSettings.model_validate(self._settings(beta=BETA, minibatch_size=4, gradient_accumulation=2))
        models = [self._place.objects.put_tree(one) for one in (folder, other)]
        checkpoint, _ = preference_update(*models, dataset, settings, self._under("dpo"))
        check_close(self._stepped(checkpoint), expected)
        return "equal"

    def rm(self) -> str:
        """Of a reward model, whose head so is known."""
        if self.architecture.scored is not None:
            folder = self.model("policy")
            for look in (
                lambda: check_training(folder, is_reward_model=True),
                lambda: load_reward_model(folder, new_head=True),
            ):
                with pytest.raises(ConfigError, match=f"{self.architecture.scored}.*; choose a") as caught:
                    look()
                assert len(str(caught.value)) < 200
            return "refused"
        folder, (dataset, pairs) = self.model("reward model", scored=True), self._pairs()
        check_training(folder, is_reward_model=True)
        expected = plain_torch.step(
            self._plain(folder, scored=True), lambda model: plain_torch.reward_loss(model, pairs), OPTIMIZER
        )
        settings = self._settings(minibatch_size=4, gradient_accumulation=2)
        model = self._place.objects.put_tree(folder)
        checkpoint, _ = rm_update(model, dataset, RewardModelSettings.model_validate(settings), self._under("rm"))
        check_close(self._stepped(checkpoint, scored=True), expected)
        return "equal"

    def grpo(self) -> str:
        """Of groups that share a prompt, all in one pass, with a KL to other weights. The engine was off by up to
        0.3, so ratios are clipped."""
        folder, other = self.model("policy"), self.model("reference", seed=1)
        plain, reference = self._plain(folder), self._plain(other)
        groups = self._drawn(plain)
        options: dict[str, float] = {"clip": CLIP, "beta": KL, "temperature": TEMPERATURE}
        expected = plain_torch.step(
            plain, lambda model: plain_torch.grpo_loss(model, reference, groups, **options), OPTIMIZER
        )
        settings = GRPOSettings.model_validate(
            {
                "prompts": {"path": "x"},
                "optimizer": asdict(OPTIMIZER),
                "samples_per_prompt": len(groups[0]),
                "prompts_per_iteration": len(groups),
                "minibatch_size": len(groups) * len(groups[0]),
                "gradient_accumulation": 1,
                "iterations": 1,
                "clip_low": CLIP,
                "clip_high": CLIP,
                "kl_coef": KL,
                "sampling": {"temperature": TEMPERATURE},
            }
        )
        models = [self._place.objects.put_tree(one) for one in (folder, other)]
        scores, samples = self._filed(groups)
        checkpoint = grpo_update(models[0], None, models[1], scores, samples, settings, self._under("grpo"))
        check_close(self._stepped(checkpoint), expected)
        return "equal"

    def lora(self) -> str:
        """What adapters compute is what the merged checkpoint does, and training begins at the model itself."""
        folder, rows = self.model("policy"), [self._row(*texts) for texts in TEXTS]
        assert count_adapted(folder, ADAPTERS).trained > 0
        evaluation = HeldOutRows(dataset=JsonlDataset(path="x")).model_dump()
        checkpoint = self._sft_update(folder, lora=ADAPTERS.model_dump(), evaluation=evaluation)
        [row] = rows_of(checkpoint, self._place.objects)
        merged = self._plain(self._place.model(checkpoint.model))
        before, after = (plain_torch.sft_loss(model, rows).item() for model in (self._plain(folder), merged))
        assert row["eval_loss"] == pytest.approx(after, rel=TOLERANCE)
        assert self.architecture.random or row["loss"] == pytest.approx(before, rel=TOLERANCE)
        assert before - after > 1e-3 * before, "adapters have learned"
        return "equal"

    def _sft_update(self, folder: Path, **changes: Any) -> Checkpoint:
        settings = SFTSettings.model_validate(self._settings(minibatch_size=len(TEXTS), **changes))
        objects, place = self._place.objects, self._under("sft", changes)
        rows = to_jsonl([SftRow(prompt=prompt, completion=answer) for prompt, answer in TEXTS])
        dataset = objects.put_bytes(rows)
        held_out = None if settings.evaluation is None else dataset
        return sft_update(objects.put_tree(folder), dataset, settings, place, held_out=held_out)[0]

    def _settings(self, **changes: Any) -> dict[str, Any]:
        one_step = {"dataset": {"path": "x"}, "budget": {"max_steps": 1}, "sequence": {"max_length": 128}}
        return {"optimizer": asdict(OPTIMIZER), **one_step, **changes}

    def _plain(self, folder: Path, *, scored: bool = False) -> Any:
        return plain_torch.load(folder, self.architecture.attention, scored=scored)

    def _row(self, prompt: str, answer: str) -> plain_torch.Row:
        ids = self._tokenizer(prompt + answer)["input_ids"]
        return plain_torch.Row([*ids, self._tokenizer.eos_token_id], len(self._tokenizer(prompt)["input_ids"]))

    def _pairs(self) -> tuple[ContentId, list[tuple[plain_torch.Row, plain_torch.Row]]]:
        told = [(prompt, answer, answer[::-1] + " 5") for prompt, answer in TEXTS]
        rows = [PairRow(prompt=prompt, chosen=better, rejected=f" {worse}") for prompt, better, worse in told]
        plain = [(self._row(prompt, better), self._row(prompt, f" {worse}")) for prompt, better, worse in told]
        return self._place.objects.put_bytes(to_jsonl(rows)), plain

    def _drawn(self, model: Any) -> list[list[plain_torch.Drawn]]:
        draw = random.Random(3)
        groups = []
        for prompt, answer in TEXTS[:4]:
            group = []
            for number in range(3):
                row = self._row(prompt, answer[: len(answer) - 2 * number] + " 8" * number)
                exact = plain_torch.logprobs(model, row, TEMPERATURE).tolist()
                group.append(plain_torch.Drawn(row, [one + draw.uniform(-0.3, 0.3) for one in exact], draw.random()))
            groups.append(group)
        return groups

    def _filed(self, groups: list[list[plain_torch.Drawn]]) -> tuple[Scores, ContentId]:
        """As the stages before an update file them."""
        objects, items = self._place.objects, [item for group in groups for item in group]
        keys = [hash_bytes(b"%d" % number) for number in range(len(items))]
        samples = [
            Sample(key, "prompt", item.row.ids[: item.row.first], 0, None, {})
            for key, item in zip(keys, items, strict=True)
        ]
        completions = [
            Completion(key, item.row.ids[item.row.first :], item.logprobs, "text", "stop")
            for key, item in zip(keys, items, strict=True)
        ]
        scores = Scores(
            scores=objects.put_bytes(canonical_json([item.reward for item in items])),
            completions=objects.put_bytes(b"".join(map(encode_completion, completions))),
            num_samples=len(items),
            mean=0.5,
            std=0.5,
        )
        return scores, objects.put_bytes(encode_samples(samples))

    def _stepped(self, checkpoint: Checkpoint, *, scored: bool = False) -> plain_torch.Step:
        [row] = rows_of(checkpoint, self._place.objects)
        model = self._plain(self._place.model(checkpoint.model), scored=scored)
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        return plain_torch.Step(row["loss"], row["grad_norm"], weights)


@pytest.mark.campaign
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_step_of_every_architecture_is_that_of_plain_torch(
    name: str, tiny_model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
):
    """The table at the end of the session has a line of each."""
    trial = Trial(ARCHITECTURES[name], tiny_model, tmp_path)
    verdict = trial.plan()
    outcomes, failures = dict.fromkeys(PARTS, "-"), []
    for part in PARTS if trial.architecture.refused is None else ():
        try:
            outcomes[part] = getattr(trial, part)()
        except Exception as error:  # noqa: BLE001 - the line of the table comes first
            failures.append(error)
            outcomes[part] = "FAILS"
    cells = "".join(f"{outcome:9}" for outcome in outcomes.values())
    record_property(
        f"table: {'architecture':26}{''.join(f'{part:9}' for part in PARTS)}verdict", f"{name:26}{cells}{verdict}"
    )
    if failures:
        raise ExceptionGroup(name, failures)


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere", "phi3, LongRoPE", "mamba2"])
def test_a_step_is_that_of_plain_torch(name: str, tiny_model: Path, tmp_path: Path):
    """Of logits that are changed, positions that follow from a row's length, and states that go from token to token."""
    assert Trial(ARCHITECTURES[name], tiny_model, tmp_path).sft() == "equal"


def test_the_page_has_the_campaigns_table():
    lines = ["| `model_type` | Rows in a pass | Reward model |", "|---|---|---|"]
    lines += [_line(name, one) for name, one in sorted(ARCHITECTURES.items()) if one.refused is None]
    lines += ["", "| `model_type` | Refused, because it |", "|---|---|"]
    lines += [f"| {_shown(name)} | {one.refused} |" for name, one in sorted(ARCHITECTURES.items()) if one.refused]
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    wanted = "\n" + "\n".join(lines) + "\n\n"
    assert table == wanted, f"write this between the marks of docs/architectures.md:\n{wanted}"


def _line(name: str, one: Architecture) -> str:
    return f"| {_shown(name)} | {'packed' if one.packed else 'padded'} | {'no' if one.scored else 'yes'} |"


def _shown(name: str) -> str:
    kind, comma, rest = name.partition(",")
    return f"`{kind}`{comma}{rest}"
