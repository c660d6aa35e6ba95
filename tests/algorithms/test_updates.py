"""Learners on a real tiny model: losses agree with transformers' own, padding is invisible, updates resume exactly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from updates import PPO_SETTINGS, grpo, positions_at, ppo, rows_of, scored_completions, sft_settings, update_context

from rollout_core.algorithms import experience, on_policy_updates
from rollout_core.algorithms.dataset_updates import sft_update
from rollout_core.algorithms.experience import (
    CompletionOutput,
    FirstStep,
    PolicyBatch,
    Trajectory,
    build_batch,
    completion_forward,
    drawn_entropy,
)
from rollout_core.algorithms.on_policy import PPO, KLController, assign_credit
from rollout_core.algorithms.policy import Policy, zero_head
from rollout_core.algorithms.supervised import SFT
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.config import (
    AdaptiveKL,
    BudgetConfig,
    Curriculum,
    HeldOutRows,
    ImportanceCorrection,
    JsonlDataset,
    LoRAConfig,
    LossOn,
    OptimizerConfig,
    PPOSettings,
    Replay,
    SamplingParams,
)
from rollout_core.data.advantage_rows import decode_advantages
from rollout_core.data.datasets import SftRow, to_jsonl
from rollout_core.data.examples import Example, epoch_order, positions_between
from rollout_core.data.packing import Document, pack
from rollout_core.data.samples import SampledCompletion, decode_completions_blob
from rollout_core.models.pretrained import load_causal_lm, load_tokenizer
from rollout_core.objects import SnapshotStore
from tests.support.padding import pad_vocabulary
from tests.support.rows import parse_sft, tokenize_sft

CPU = torch.device("cpu")


@pytest.fixture
def policy(tiny_model):
    torch.manual_seed(0)
    return load_causal_lm(tiny_model)


def kept_advantages(update, tiny_model, folder: Path, **changes) -> list[tuple[SampledCompletion, Any]]:
    """Of the last iteration, with the completions."""
    place = update_context(folder)
    checkpoint = update(place, tiny_model, **changes)
    scores, _ = scored_completions(place.objects, seed=2)
    completions = decode_completions_blob(place.objects.get_bytes(scores.completions))
    assert checkpoint.advantages is not None and checkpoint.advantages not in checkpoint.outputs()
    lines = place.objects.get_bytes(checkpoint.advantages).splitlines()
    return [
        (completion, decode_advantages(line, len(completion.token_ids)))
        for completion, line in zip(completions, lines, strict=True)
    ]


def test_an_update_keeps_the_advantages_of_its_samples(tiny_model, tmp_path):
    by_hand = 0.5 / (0.5**0.5 + 1e-4)  # rewards of 0 and 1 beside each other, and their deviation with ddof 1
    for number, (completion, advantages) in enumerate(kept_advantages(grpo, tiny_model, tmp_path / "grpo")):
        sign = 1 if number % 2 else -1
        assert advantages == pytest.approx([sign * by_hand] * len(completion.token_ids), abs=1e-5)
    whitened = [value for _, values in kept_advantages(ppo, tiny_model, tmp_path / "ppo") for value in values]
    assert np.mean(whitened) == pytest.approx(0, abs=1e-5) and np.var(whitened, ddof=1) == pytest.approx(1, abs=1e-4)
    assert len(set(whitened)) > 10, "each token has its own"


@pytest.mark.parametrize("update", [ppo, grpo])
def test_an_update_shares_probabilities_among_the_ids_that_are_drawn(update, tiny_model, tmp_path):
    """The output layer's rows of others stay what they are, and completions that have them are refused."""
    pad_vocabulary(tiny_model, tmp_path / "padded", seed=1)
    known, place = len(load_tokenizer(tiny_model)), update_context(tmp_path)
    checkpoint = update(place, tmp_path / "padded", optimizer=OptimizerConfig(lr=1e-3))
    before, after = (
        load_causal_lm(folder).get_output_embeddings().weight
        for folder in (tmp_path / "padded", place.objects.local_tree(checkpoint.model, tmp_path / "models"))
    )
    assert torch.equal(before[known:], after[known:]) and not torch.equal(before[:known], after[:known])
    with pytest.raises(ConfigError, match=rf"has the token id {known}, and the tokenizer in .* has {known} ids"):
        on_policy_updates._known_ids(tmp_path / "padded", [Trajectory([2], [3, known], [-1.0] * 2, 1.0, False)])


def test_what_is_masked_counts_in_no_loss_and_keeps_no_advantage():
    trajectories = [
        Trajectory([2], [3, 4, 5], [-1.0] * 3, 1.0, cut, written)
        for cut, written in ((True, None), (False, [(0, 1), (2, 3)]))
    ]
    batch = build_batch(trajectories)
    batch = batch.with_columns(advantages=torch.tensor([[0.5, 0.5, 0.5], [0.1, 0.0, 0.3]]))
    settings = PPO_SETTINGS.model_copy(update={"truncated": "mask"})
    algorithm = PPO(None, batch, settings, first_step=0, seed=0, device=CPU)  # pyright: ignore[reportArgumentType]
    assert algorithm.kept_advantages() == b"null\n[0.1,0.0,0.3]\n"
    assert PPO(None, build_batch(trajectories), settings, first_step=0, seed=0, device=CPU).kept_advantages() is None  # pyright: ignore[reportArgumentType]


CORRECTED: dict[str, dict[str, Any]] = {
    "a step of all": {"epochs": 1, "minibatch_size": 2, "gradient_accumulation": 4},
    "several steps and epochs": {},
    "sequences": {"correction": ImportanceCorrection(level="sequence", mode="mask"), "loss": "gspo"},
    "adapters in bfloat16": {"lora": LoRAConfig(r=4), "precision": "bfloat16"},
    "replay, cut by tokens": {"replay": Replay(groups=2), "max_tokens_per_microbatch": 24},
    "masked, layers computed twice": {"truncated": "mask", "loss_type": "bnpo", "gradient_checkpointing": True},
}


@pytest.mark.parametrize("changes", CORRECTED.values(), ids=CORRECTED.keys())
def test_the_first_step_corrects_as_a_pass_before_it_does(tiny_model, tmp_path, monkeypatch, changes):
    """Weights, optimizer, figures and advantages, to the bit; where there is one step, nothing is computed before."""
    changes = {"correction": ImportanceCorrection(cap=1.5), "kl_coef": 0.0, **changes}
    scored: list[int] = []

    def counted(policy: Any, batch: PolicyBatch, **options: Any) -> CompletionOutput:
        scored.append(len(batch.mask))
        return completion_forward(policy, batch, **options)

    monkeypatch.setattr(experience, "completion_forward", counted)
    found = grpo(update_context(tmp_path / "in step"), tiny_model, **changes)
    later = sum(scored)
    monkeypatch.setattr(on_policy_updates, "_corrects_in_first_step", lambda *_: False)
    before = grpo(update_context(tmp_path / "before"), tiny_model, **changes)
    in_first_steps = 2 * (8 if "epochs" in changes else 4)
    assert sum(scored) - later == later + in_first_steps
    assert (
        found.model_copy(update={"seconds": 0.0}).model_dump_json()
        == before.model_copy(update={"seconds": 0.0}).model_dump_json()
    )


def uneven_batch() -> PolicyBatch:
    """Completions of 20 to 600 tokens, whose log-probabilities have all their bits."""
    draw = random.Random(3)
    lengths = [draw.randrange(20, 600) for _ in range(64)]
    rows = [[draw.randrange(2, 250) for _ in range(length)] for length in lengths]
    logprobs = [[-draw.expovariate(1.0) for _ in row] for row in rows]
    items = [
        Trajectory([2, 3], row, own, float(n % 2), False)
        for n, (row, own) in enumerate(zip(rows, logprobs, strict=True))
    ]
    batch = build_batch(items)
    return batch.with_columns(advantages=torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_minibatch_is_weighed_as_in_the_whole_batch_however_narrow_it_is(level: Literal["token", "sequence"]):
    batch, steps = uneven_batch(), [[list(range(start, start + 4)) for start in range(0, 64, 4)]]
    drift = 0.3 * torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1))
    own = (batch.columns["old_logprobs"] + drift).masked_fill(~batch.mask, 0.0)
    correction = ImportanceCorrection(level=level, cap=1e6)
    first = FirstStep(torch.nn.Identity(), batch, steps, correction, temperature=1.0, device=CPU)
    minibatches = [batch.rows(rows) for rows in steps[0]]
    found = [
        first.corrected(place, part, own[torch.tensor(steps[0][place]), : part.mask.shape[1]])
        for place, part in enumerate(minibatches)
    ]
    whole, _ = first.end()
    for rows, part in zip(steps[0], found, strict=True):
        again = whole.rows(rows)
        for name in ("advantages", "old_logprobs"):
            assert torch.equal(part.columns[name], again.columns[name]), name


def test_a_first_step_that_another_process_took_is_tried_again():
    batch = uneven_batch()
    first = FirstStep(torch.nn.Identity(), batch, [[[0], [1]]], ImportanceCorrection(), temperature=1.0, device=CPU)
    with pytest.raises(Recoverable, match="another process"):
        first.end()


def ragged_examples() -> list[Example]:
    draw = random.Random(0)
    lengths = [5, 9, 3, 12, 7, 7, 4, 10]
    return [
        Example([draw.randrange(2, 250) for _ in range(length)], [position >= 2 for position in range(length)])
        for length in lengths
    ]


def test_sft_loss_and_gradient_equal_transformers_own_on_each_row(policy, tiny_model):
    examples = ragged_examples()
    learner = SFT(Policy(policy), examples, sft_settings(), seed=0, device=CPU)
    [batch] = learner.minibatches(0)
    loss = learner.loss(batch, [batch]).loss
    loss.backward()
    plain = load_causal_lm(tiny_model)
    total, count = 0.0, 0
    for example in examples:
        ids = torch.tensor([example.token_ids])
        labels = ids.masked_fill(~torch.tensor([example.trained]), -100)
        trained = sum(example.trained[1:])
        total = total + plain(input_ids=ids, labels=labels).loss * trained
        count += trained
    (total / count).backward()
    assert torch.allclose(loss, total / count, atol=1e-5)
    expected = dict(plain.named_parameters())
    for name, parameter in policy.named_parameters():
        assert torch.allclose(expected[name].grad, parameter.grad, atol=1e-5), name


def test_accumulated_minibatches_give_the_gradient_of_the_whole(policy):
    examples = ragged_examples()
    learner = SFT(Policy(policy), examples, sft_settings(), seed=0, device=CPU)
    documents = [Document(example.token_ids, trained=example.trained) for example in examples]
    whole = pack(documents)
    learner.loss(whole, [whole]).loss.backward()
    expected = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    parts = [pack(documents[start : start + 3]) for start in (0, 3, 6)]
    for part in parts:
        learner.loss(part, parts).loss.backward()
    for name, parameter in policy.named_parameters():
        assert torch.allclose(expected[name], parameter.grad, atol=1e-6), name


def test_completions_are_trained_with_the_token_that_ends_them(tiny_model):
    tokenizer = load_tokenizer(tiny_model)
    rows = parse_sft(b'{"prompt": "sort 2 1 =", "completion": "1 2"}\n', "x")
    [example], report = tokenize_sft(tokenizer, rows, loss_on=LossOn(), max_seq_len=64)
    trained = [token for token, is_trained in zip(example.token_ids, example.trained, strict=True) if is_trained]
    assert tokenizer.decode(trained) == "1 2<|endoftext|>" and report.num_trained_tokens == len(trained)
    [whole], _ = tokenize_sft(tokenizer, rows, loss_on=LossOn(kind="full"), max_seq_len=64)
    assert all(whole.trained) and whole.token_ids == example.token_ids


def test_every_item_comes_once_an_epoch_and_the_step_is_the_whole_cursor():
    steps = [positions_at(step, num_items=10, per_step=4, seed=3) for step in range(5)]
    flat = [item for step in steps for item in step]
    assert sorted(flat[:10]) == sorted(flat[10:20]) == list(range(10))
    assert flat[:10] == epoch_order(10, seed=3, epoch=0)
    assert positions_at(3, num_items=10, per_step=4, seed=3) == steps[3]
    assert positions_between(7, 19, num_items=10, seed=3) == flat[7:19], "and a step may span several passes"
    assert positions_between(0, 35, num_items=10, seed=3)[:20] == flat
    assert flat[:10] != flat[10:20] and positions_between(0, 10, num_items=10, seed=4) != flat[:10]
    assert positions_between(4, 4, num_items=10, seed=3) == []


@given(
    num_items=st.integers(1, 40),
    minibatch_size=st.integers(1, 9),
    accumulation=st.integers(1, 3),
    epochs=st.integers(1, 4),
    max_tokens=st.one_of(st.none(), st.integers(1, 20)),
    by_length=st.booleans(),
)
def test_each_row_is_trained_once_an_epoch(num_items, minibatch_size, accumulation, epochs, max_tokens, by_length):
    """In steps of full size and a last one with what is left; a curriculum, which repeats easy rows, takes as many."""
    settings = sft_settings(
        minibatch_size=minibatch_size,
        gradient_accumulation=accumulation,
        max_tokens_per_microbatch=max_tokens,
        budget=BudgetConfig(epochs=epochs),
        curriculum=Curriculum(by="length", initial=0.5) if by_length else None,
    )
    rows = [Example([row, 1], [False, True]) for row in range(num_items)]
    learner = SFT(None, rows, settings, seed=3, device=CPU)
    steps = [
        [sequence[0] for batch in learner.minibatches(step) for sequence in learner.sequences(batch)]
        for step in range(learner.num_steps)
    ]
    assert all(len(step) == minibatch_size * accumulation for step in steps[:-1]) and steps[-1]
    trained = sorted(row for step in steps for row in step)
    assert len(trained) == epochs * num_items
    if not by_length:
        assert trained == sorted(list(range(num_items)) * epochs)
        for step, rows_of_step in enumerate(steps):
            per_step = minibatch_size * accumulation
            drawn = positions_at(step, num_items=num_items, per_step=per_step, seed=3, epochs=epochs)
            assert sorted(drawn) == sorted(rows_of_step)


CUTS: dict[str, dict[str, Any]] = {
    "whole": {"minibatch_size": 4},
    "accumulated": {"minibatch_size": 2, "gradient_accumulation": 2},
    "of tokens": {"minibatch_size": 4, "max_tokens_per_microbatch": 24},
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_two_epochs_of_nine_rows_are_what_a_plain_loop_trains(cut, tiny_model, tmp_path):
    """Row by row through transformers' own model: the mean over the trained tokens of a step, the last of two rows."""
    place = update_context(tmp_path)
    settings = sft_settings(
        **cut,
        budget=BudgetConfig(epochs=2),
        optimizer=OptimizerConfig(kind="sgd", lr=0.1, max_grad_norm=1e9),
        evaluation=HeldOutRows(dataset=JsonlDataset(path="x")),
    )
    rows = [SftRow(prompt="sort" + f" {number}" * number, completion=" 1" * (1 + number % 4)) for number in range(9)]
    dataset = place.objects.put_bytes(to_jsonl(rows))
    checkpoint, _ = sft_update(place.objects.put_tree(tiny_model), dataset, settings, place, held_out=dataset)
    figures = rows_of(checkpoint, place.objects)

    examples, _ = tokenize_sft(load_tokenizer(tiny_model), rows, loss_on=LossOn(), max_seq_len=1024)
    plain = load_causal_lm(tiny_model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    order = [*epoch_order(9, seed=1, epoch=0), *epoch_order(9, seed=1, epoch=1)]
    steps = [order[start : start + 4] for start in range(0, 18, 4)]
    assert list(map(len, steps)) == [4, 4, 4, 4, 2] and len(figures) == 5

    def mean_loss(positions: list[int]) -> torch.Tensor:
        total, count = torch.zeros(()), 0
        for example in (examples[position] for position in positions):
            ids = torch.tensor([example.token_ids])
            logprobs = torch.log_softmax(plain(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
            trained = torch.tensor(example.trained[1:])
            total, count = total - logprobs[trained].sum(), count + int(trained.sum())
        return total / count

    for row, step in zip(figures, steps, strict=True):
        assert row["num_tokens"] == sum(len(examples[position].token_ids) for position in step)
        loss = mean_loss(step)
        assert row["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        assert figures[-1]["eval_loss"] == pytest.approx(float(mean_loss(list(range(9)))), abs=1e-5)


def trajectories() -> list[Trajectory]:
    draw = random.Random(1)
    return [
        Trajectory(
            [draw.randrange(2, 250) for _ in range(prompt)],
            [draw.randrange(2, 250) for _ in range(length)],
            [-draw.random() for _ in range(length)],
            score,
            truncated,
        )
        for prompt, length, score, truncated in ((3, 4, 1.0, False), (6, 2, 0.0, True), (2, 5, 0.5, False))
    ]


def test_completion_forward_equals_a_plain_pass_over_each_sequence(policy, tiny_model):
    items = trajectories()
    batch = build_batch(items, missing_eos_penalty=0.0)
    head = torch.nn.Linear(policy.config.hidden_size, 1)
    output = completion_forward(Policy(policy, head), batch, temperature=0.7, device=CPU, entropy=True)
    model = load_causal_lm(tiny_model)
    for row, item in enumerate(items):
        ids = torch.tensor([[*item.prompt_token_ids, *item.token_ids]])
        plain = model(ids, output_hidden_states=True)
        start, count = len(item.prompt_token_ids) - 1, len(item.token_ids)
        logprobs = torch.log_softmax(plain.logits[0, start:-1] / 0.7, -1)
        chosen = logprobs.gather(1, ids[0, start + 1 :, None]).squeeze(1)
        assert torch.allclose(output.logprobs[row, :count], chosen, atol=1e-5)
        values = head(plain.hidden_states[-1][0, start:-1]).squeeze(-1)
        assert torch.allclose(output.values[row, :count], values, atol=1e-5)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        assert torch.allclose(output.entropy[row, :count], entropy, atol=1e-5)


def test_credit_equals_an_independent_reference(policy, other_tiny_model):
    items = trajectories()
    settings = PPOSettings(
        prompts=JsonlDataset(path="x"),
        optimizer=OptimizerConfig(lr=1e-4),
        minibatch_size=2,
        gamma=0.9,
        lam=0.8,
        missing_eos_penalty=0.25,
        sampling=SamplingParams(temperature=1.0),
    )
    batch = build_batch(items, missing_eos_penalty=settings.missing_eos_penalty)
    head = torch.nn.Linear(policy.config.hidden_size, 1)
    learned, reference = Policy(policy, head), Policy(load_causal_lm(other_tiny_model))
    credit, _, _ = assign_credit(learned, reference, batch, settings, kl_coef=0.1, device=CPU)
    advantages, returns = [], []
    with torch.no_grad():
        own = completion_forward(learned, batch, temperature=1.0, device=CPU)
        ref = completion_forward(reference, batch, temperature=1.0, device=CPU)
    for row, item in enumerate(items):
        count = len(item.token_ids)
        ratio = np.array(item.logprobs, float) - ref.logprobs[row, :count].double().numpy()
        rewards = -0.1 * ratio
        rewards[-1] += item.score - 0.25 * item.truncated
        values = np.append(own.values[row, :count].double().numpy(), 0.0)
        running, row_advantages = 0.0, []
        for t in reversed(range(count)):
            running = rewards[t] + 0.9 * values[t + 1] - values[t] + 0.9 * 0.8 * running
            row_advantages.insert(0, running)
        advantages.append(np.array(row_advantages))
        returns.append(np.array(row_advantages) + values[:-1])
    flat = np.concatenate(advantages)
    for row, item in enumerate(items):
        count = len(item.token_ids)
        white = (advantages[row] - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)
        assert np.allclose(credit.columns["advantages"][row, :count].numpy(), white, atol=1e-4)
        assert np.allclose(credit.columns["returns"][row, :count].numpy(), returns[row], atol=1e-5)


def test_with_a_correction_the_divergence_that_is_penalised_is_the_trainers(policy):
    """The engine's log-probabilities lie far off here; the reference is the policy, so there is nothing to penalise."""
    settings = PPOSettings(
        prompts=JsonlDataset(path="x"), optimizer=OptimizerConfig(lr=1e-4), correction=ImportanceCorrection()
    )
    model = Policy(policy, zero_head(policy))
    figures = {}
    for name, changed in (("own", settings), ("engine's", settings.model_copy(update={"correction": None}))):
        _, figures[name], _ = assign_credit(model, model, build_batch(trajectories()), changed, kl_coef=0.1, device=CPU)
    assert figures["own"]["objective/kl"] == 0 == figures["own"]["objective/non_score_reward"]
    assert figures["engine's"]["objective/kl"] > 1


def test_the_entropy_of_drawn_tokens_is_that_of_the_distribution_without_another_pass_over_the_logits(
    policy, tiny_model
):
    torch.manual_seed(2)
    model, prompt = Policy(policy), [5, 6, 7]
    exact = completion_forward(
        model, build_batch([Trajectory(prompt, [8], [0.0], 0.0, False)]), temperature=0.5, device=CPU, entropy=True
    ).entropy
    logits = load_causal_lm(tiny_model)(torch.tensor([prompt])).logits[0, -1] / 0.5
    drawn = torch.distributions.Categorical(logits=logits).sample((4000,)).tolist()
    batch = build_batch([Trajectory(prompt, [token], [0.0], 0.0, False) for token in drawn])
    output = completion_forward(model, batch, temperature=0.5, device=CPU)
    assert float(drawn_entropy(output.logprobs, batch.mask)) == pytest.approx(float(exact), abs=0.03)
    assert output.entropy.abs().sum() == 0, "not computed"


@pytest.mark.parametrize("update", [ppo, grpo])
def test_the_exact_entropy_is_computed_only_where_it_is_in_the_loss(tiny_model, tmp_path, monkeypatch, update):
    asked = []

    def forward(self, batch, **options):
        asked.append(options.get("entropy", False))
        return whole(self, batch, **options)

    whole = Policy.forward
    monkeypatch.setattr(Policy, "forward", forward)
    place = update_context(tmp_path)
    rows = rows_of(update(place, tiny_model), place.objects)
    assert asked and not any(asked)
    assert all(4 < row["entropy"] < 7 for row in rows), "the figure is there"
    if update is ppo:
        update(update_context(tmp_path / "other"), tiny_model, entropy_coef=0.01)
        assert any(asked)


@pytest.mark.parametrize("minibatch_size", [3, 1])
def test_masked_truncated_completions_give_ppo_no_gradient(policy, tiny_model, minibatch_size):
    """The loss of a step is then the one of the other completions by themselves, however the step is cut."""

    def gradient(rows: list[int], *, truncated: Literal["keep", "mask"], size: int) -> tuple[float, torch.Tensor]:
        settings = PPOSettings(
            prompts=JsonlDataset(path="x"), optimizer=OptimizerConfig(lr=1e-3), truncated=truncated,
            minibatch_size=size, gradient_accumulation=len(rows) // size, entropy_coef=0.1,
        )  # fmt: skip
        trained = load_causal_lm(tiny_model)
        model = Policy(trained, zero_head(trained))
        batch, _, _ = assign_credit(
            model, Policy(policy), build_batch(trajectories()), settings, kl_coef=0.1, device=CPU
        )
        learner = PPO(model, batch.rows(rows), settings, first_step=0, seed=0, device=CPU)
        parts, total = learner.minibatches(0), 0.0
        for part in parts:
            result = learner.loss(part, parts)
            result.loss.backward()
            total += float(result.loss.detach())
        return total, torch.cat(
            [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        )

    assert [item.truncated for item in trajectories()] == [False, True, False]
    masked = gradient([0, 1, 2], truncated="mask", size=minibatch_size)
    without = gradient([0, 2], truncated="keep", size=2)
    kept = gradient([0, 1, 2], truncated="keep", size=3)
    assert masked[0] == pytest.approx(without[0], abs=1e-6)
    torch.testing.assert_close(masked[1], without[1], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(masked[1], kept[1], rtol=1e-2, atol=1e-4)


def test_the_kl_controller_by_hand():
    controller = KLController(AdaptiveKL(init_coef=0.1, target=2.0, horizon=100))
    controller.update(mean_kl=10.0, num_sequences=50)
    assert controller.coef == pytest.approx(0.1 * (1 + 0.2 * 0.5))
    controller.update(mean_kl=1.9, num_sequences=50)
    assert controller.coef == pytest.approx(0.11 * (1 - 0.05 * 0.5))
    fixed = KLController(AdaptiveKL(init_coef=0.1, adaptive=False))
    fixed.update(100.0, 100)
    assert fixed.coef == 0.1


def test_the_checkpoint_is_a_usable_model_and_nothing_in_a_state_is_pickled(tiny_model, sorting_task, tmp_path):
    place = update_context(tmp_path)
    model = place.objects.put_tree(tiny_model)
    dataset = place.objects.put_bytes(to_jsonl(parse_sft(sorting_task.sft.read_bytes(), "sft")))
    checkpoint, _ = sft_update(model, dataset, sft_settings(), place)
    folder = place.model(checkpoint.model)
    assert load_tokenizer(folder).eos_token_id is not None
    losses = [
        row["loss"] for row in map(__import__("json").loads, place.objects.get_bytes(checkpoint.metrics).splitlines())
    ]
    assert losses[-1] < losses[0]
    names = {
        file.path
        for file in place.objects.manifest(SnapshotStore(place.objects).get(checkpoint.train_state).files).files
    }
    assert {Path(name).suffix for name in names} <= {".safetensors", ".json", ".jsonl", ".jinja"}
