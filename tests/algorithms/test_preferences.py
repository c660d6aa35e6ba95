"""DPO, IPO, KTO and reward models on a real tiny model, against plain float64 passes over each row alone."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from rollout_core.algorithms.policy import Policy
from rollout_core.algorithms.preference import DPO, IPO, KTO, unpaired_documents
from rollout_core.algorithms.supervised import BradleyTerry, RewardModel, load_reward_model, score_sequences
from rollout_core.config import DPOSettings, IPOSettings, KTOSettings, RewardModelSettings
from rollout_core.data.examples import epoch_order
from rollout_core.data.preference_data import Pair, UnpairedPreference
from rollout_core.models.pretrained import load_causal_lm

CPU = torch.device("cpu")
COMMON = {"dataset": {"path": "x"}, "optimizer": {"lr": 1e-3}, "minibatch_size": 8}
KINDS = ("rm", "dpo", "ipo", "kto")


def tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, 250) for _ in range(length)]


def ragged_pairs() -> list[Pair]:
    """Prompts long enough to be shared and short ones, answers of any length, one of a single token."""
    rng = random.Random(0)
    lengths = [(20, 4, 7), (3, 5, 2), (31, 1, 6), (5, 9, 9), (17, 3, 12), (1, 2, 8), (20, 6, 6), (8, 8, 1)]
    return [
        Pair(tokens(rng, prompt), tokens(rng, chosen), tokens(rng, rejected), margin=0.1 * prompt)
        for prompt, chosen, rejected in lengths
    ]


def ragged_unpaired() -> list[UnpairedPreference]:
    return [
        UnpairedPreference(pair.prompt, pair.chosen if number % 3 else pair.rejected, desirable=number % 3 != 0)
        for number, pair in enumerate(ragged_pairs())
    ]


REF_PAIRS = torch.linspace(-60.0, -20.0, 16)
REF_UNPAIRED = torch.linspace(-70.0, -30.0, 16)


def learner(kind: str, folder: Path, *, packed: bool = True, **changes):
    """An algorithm over all ragged rows and the model it trains."""
    options = {"seed": 0, "device": CPU}
    if kind == "rm":
        torch.manual_seed(3)
        model = load_reward_model(folder, new_head=True)
        settings = RewardModelSettings.model_validate({**COMMON, **changes})
        return BradleyTerry(RewardModel(model, packed=packed), ragged_pairs(), settings, **options), model
    model = load_causal_lm(folder)
    policy = Policy(model, packed=packed)
    if kind == "kto":
        settings = KTOSettings.model_validate({**COMMON, **changes})
        return KTO(policy, ragged_unpaired(), REF_UNPAIRED, settings, **options), model
    settings = (DPOSettings if kind == "dpo" else IPOSettings).model_validate({**COMMON, **changes})
    algorithm = DPO if kind == "dpo" else IPO
    return algorithm(policy, ragged_pairs(), REF_PAIRS, settings, **options), model


def whole_step(algorithm, parts: list[list[int]]) -> tuple[float, list]:
    """Loss of a step of the given minibatches, its gradient added to the model's; and each minibatch's result."""
    batches = [algorithm.minibatch(positions) for positions in parts]
    results = [algorithm.loss(batch, batches) for batch in batches]
    for result in results:
        result.loss.backward()
    return sum(float(result.loss.detach()) for result in results), results


def plain_logps(model, prompt: list[int], answer: list[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *answer]])
    logprobs = torch.log_softmax(model(input_ids=ids).logits[0], -1)
    places = torch.arange(len(prompt), ids.shape[1])
    return logprobs[places - 1, ids[0, places]].sum()


def reference_loss(kind: str, model) -> torch.Tensor:
    """The loss of all ragged rows in float64, written from the papers, one plain pass a row."""
    if kind == "rm":
        total = torch.zeros((), dtype=torch.float64)
        for pair in ragged_pairs():
            scores = [
                model(input_ids=torch.tensor([[*pair.prompt, *answer]])).logits[0, 0]
                for answer in (pair.chosen, pair.rejected)
            ]
            total = total + torch.log1p(torch.exp(-(scores[0] - scores[1] - pair.margin)))
            total = total + 0.05 * (scores[0] + scores[1]) ** 2
        return total / len(ragged_pairs())
    if kind == "kto":
        rows = ragged_unpaired()
        documents = unpaired_documents(rows)
        own = [plain_logps(model, d.prefix, d.branches[0]) for d in documents]
        other = [plain_logps(model, d.prefix, d.branches[1]).detach() for d in documents]
        ref = REF_UNPAIRED.double().view(-1, 2)
        kl = max(0.0, float(torch.stack(other).sum() - ref[:, 1].sum()) / len(rows))
        assert kl > 1, "the case is to show the KL's part"
        total = torch.zeros((), dtype=torch.float64)
        for row, logp, ref_logp in zip(rows, own, ref[:, 0], strict=True):
            ratio = logp - ref_logp
            value = torch.sigmoid(0.1 * (ratio - kl)) if row.desirable else torch.sigmoid(0.1 * (kl - ratio))
            total = total + (1.0 if row.desirable else 0.7) * (1 - value)
        return total / len(rows)
    total = torch.zeros((), dtype=torch.float64)
    for pair, ref in zip(ragged_pairs(), REF_PAIRS.double().view(-1, 2), strict=True):
        chosen = plain_logps(model, pair.prompt, pair.chosen) - ref[0]
        rejected = plain_logps(model, pair.prompt, pair.rejected) - ref[1]
        if kind == "dpo":
            margin = 0.1 * (chosen - rejected)
            total = total - 0.8 * F.logsigmoid(margin) - 0.2 * F.logsigmoid(-margin)
        else:
            total = total + (chosen / len(pair.chosen) - rejected / len(pair.rejected) - 1 / (2 * 0.1)) ** 2
    return total / len(ragged_pairs())


OPTIONS = {
    "rm": {"center_coef": 0.05},
    "dpo": {"label_smoothing": 0.2},
    "ipo": {},
    "kto": {"undesirable_weight": 0.7},
}


def plain_model(kind: str, folder: Path):
    if kind == "rm":
        torch.manual_seed(3)
        return load_reward_model(folder, new_head=True).double().eval()
    return load_causal_lm(folder).double().eval()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_equal_plain_float64_passes_over_each_row(kind, packed, tiny_model):
    algorithm, model = learner(kind, tiny_model, packed=packed, **OPTIONS[kind])
    loss, _ = whole_step(algorithm, [list(range(8))])
    plain = plain_model(kind, tiny_model)
    expected = reference_loss(kind, plain)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    scale = max(float(parameter.grad.abs().max()) for parameter in plain.parameters() if parameter.grad is not None)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5 * scale), name


@pytest.mark.parametrize("kind", KINDS)
def test_neither_order_nor_accumulation_changes_loss_or_gradient(kind, tiny_model):
    algorithm, model = learner(kind, tiny_model, **OPTIONS[kind])
    expected, _ = whole_step(algorithm, [list(range(8))])
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for parts in ([[5, 1, 7, 0, 3, 6, 2, 4]], [[7, 3, 0], [1, 2, 6], [5, 4]]):
        model.zero_grad()
        loss, _ = whole_step(algorithm, parts)
        assert loss == pytest.approx(expected, rel=1e-5)
        for name, parameter in model.named_parameters():
            assert torch.allclose(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5 * scale), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_depends_on_its_number_alone(kind, tiny_model):
    algorithm, _ = learner(kind, tiny_model, minibatch_size=3, gradient_accumulation=2, budget={"epochs": 3})
    assert algorithm.num_steps == 4
    first, again = algorithm.minibatches(1), algorithm.minibatches(1)
    assert [len(algorithm.minibatches(step)) for step in range(4)] == [2, 2, 2, 2]
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.tokens.input_ids, other.tokens.input_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_has_every_item_once_and_its_last_step_is_a_mean_over_what_is_left(kind, tiny_model):
    """Eight items, five a step. Losses of single pairs add up to that of all, by plain passes; KTO has a KL a step."""
    algorithm, _ = learner(kind, tiny_model, minibatch_size=5, budget={"epochs": 1}, **OPTIONS[kind])
    order = epoch_order(8, seed=0, epoch=0)
    assert algorithm.num_steps == 2
    losses = []
    for step, positions in enumerate((order[:5], order[5:])):
        [batch] = algorithm.minibatches(step)
        losses.append(float(algorithm.loss(batch, [batch]).loss.detach()))
        assert losses[-1] == pytest.approx(whole_step(algorithm, [positions[:1], positions[1:]])[0], rel=1e-5)
    if kind != "kto":
        expected = float(reference_loss(kind, plain_model(kind, tiny_model)).detach())
        assert (5 * losses[0] + 3 * losses[1]) / 8 == pytest.approx(expected, rel=1e-5)


def test_a_policy_that_is_its_reference_loses_what_the_papers_say(tiny_model):
    """log 2 for DPO, (1 / (2 beta))^2 for IPO, 1/2 for KTO; no reward, no margin."""
    plain = load_causal_lm(tiny_model)
    with torch.no_grad():
        pairs = [plain_logps(plain, p.prompt, answer) for p in ragged_pairs() for answer in (p.chosen, p.rejected)]
        judged = [
            plain_logps(plain, d.prefix, branch) for d in unpaired_documents(ragged_unpaired()) for branch in d.branches
        ]
    for kind, expected in (("dpo", math.log(2)), ("ipo", 25.0), ("kto", 0.5)):
        algorithm, _ = learner(kind, tiny_model)
        algorithm._ref_logps = torch.stack(judged if kind == "kto" else pairs).view(-1, 2)
        loss, [result] = whole_step(algorithm, [list(range(8))])
        assert loss == pytest.approx(expected, rel=1e-4)
        assert float(result.metrics["rewards/margins"][0]) == pytest.approx(0, abs=1e-4)


def step_figures(results) -> dict[str, float]:
    """Figures of a step as the loop logs them."""
    names = results[0].metrics
    return {
        name: sum(float(r.metrics[name][0]) * r.metrics[name][1] for r in results)
        / sum(r.metrics[name][1] for r in results)
        for name in names
    }


@pytest.mark.parametrize("kind", KINDS)
def test_figures_by_the_usual_names_do_not_depend_on_accumulation(kind, tiny_model):
    algorithm, _ = learner(kind, tiny_model)
    _, whole = whole_step(algorithm, [list(range(8))])
    _, parts = whole_step(algorithm, [[7, 3, 0], [1, 2, 6], [5, 4]])
    one, other = step_figures(whole), step_figures(parts)
    assert one == pytest.approx(other, rel=1e-4, abs=1e-4)
    assert one["rewards/margins"] == pytest.approx(one["rewards/chosen"] - one["rewards/rejected"], rel=1e-4)
    if kind in ("dpo", "ipo"):
        ref = REF_PAIRS.view(-1, 2).mean(0)
        assert 0 <= one["rewards/accuracies"] <= 1
        if kind == "dpo":
            assert one["rewards/chosen"] == pytest.approx(0.1 * (one["logps/chosen"] - float(ref[0])), rel=1e-4)
    if kind == "kto":
        desirable = sum(item.desirable for item in ragged_unpaired())
        assert (one["count/desirable"], one["count/undesirable"]) == (desirable, 8 - desirable)
        assert one["kl"] > 0


def test_the_kl_of_kto_is_never_negative_and_counts_the_whole_step(tiny_model):
    algorithm, _ = learner("kto", tiny_model)
    algorithm._ref_logps = torch.zeros(8, 2)  # the reference finds every answer certain: log-ratios are negative
    _, [result] = whole_step(algorithm, [list(range(8))])
    assert float(result.metrics["kl"][0]) == 0.0


def test_kto_mismatches_every_answer_with_a_prompt_that_is_not_its_own():
    rows = ([1], [5], True), ([1], [6], False), ([2], [7], True), ([3], [8], False)
    items = [UnpairedPreference(*row) for row in rows]
    mismatched = [document.branches[1] for document in unpaired_documents(items)]
    assert mismatched == [[7], [7], [8], [5]]


def test_margins_count_with_bradley_terry_only(tiny_model):
    losses = {}
    for head in ("bradley_terry", "pairwise_logistic"):
        algorithm, _ = learner("rm", tiny_model, head=head)
        losses[head], _ = whole_step(algorithm, [list(range(8))])
    assert losses["bradley_terry"] > losses["pairwise_logistic"]


def test_a_reward_model_reads_whole_sequences_of_which_one_may_begin_the_other(tiny_model):
    torch.manual_seed(3)
    model = load_reward_model(tiny_model, new_head=True)
    rng = random.Random(5)
    start = tokens(rng, 30)
    pairs = [Pair([], start, [*start, 7]), Pair([], [9], [8, 4]), Pair([], tokens(rng, 6), tokens(rng, 3))]
    settings = RewardModelSettings.model_validate({**COMMON})
    algorithm = BradleyTerry(RewardModel(model.eval()), pairs, settings, seed=0, device=CPU)
    batch = algorithm.minibatch([0, 1, 2])
    scores = algorithm._model(batch.tokens)
    plain = load_reward_model(tiny_model, new_head=True).eval()
    plain.load_state_dict(model.state_dict())
    rows = [row for pair in pairs for row in (pair.chosen, pair.rejected)]
    expected = [float(plain(input_ids=torch.tensor([row])).logits[0, 0]) for row in rows]
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)
    assert score_sequences(algorithm._model, rows, device=CPU, batch_tokens=40) == pytest.approx(expected, abs=1e-5)


def test_what_is_kept_of_a_step_that_is_not_finite_holds_the_answers_that_make_its_kl(tiny_model):
    algorithm, _ = learner("kto", tiny_model)
    [batch, *_] = algorithm.minibatches(0)
    assert algorithm.sequences(batch) == [*batch.tokens.sequences(), *batch.mismatched.sequences()]
    assert len(algorithm.sequences(batch)) == 2 * len(batch.desirable)


def test_turns_one_by_one_are_refused():
    with pytest.raises(ValidationError, match="only SFT trains turns of a conversation one by one; leave it out"):
        DPOSettings.model_validate({**COMMON, "sequence": {"turns": "each"}})
