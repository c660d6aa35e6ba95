"""The training loop: schedules, accumulation and optimizers by hand, and nothing is lost when a step is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Trainer,
)

from rollout_core.algorithms.loop import (
    LoopHooks,
    MinibatchLoss,
    build_accelerator,
    build_optimizer,
    learning_rate,
    train,
)
from rollout_core.algorithms.state import TrainState
from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.ids import canonical_json, hash_bytes
from rollout_core.config import (
    LearnerSettings,
    LoRAConfig,
    OptimizerConfig,
    SnapshotPolicy,
    SpikeRule,
    identity,
    parse_config,
)
from rollout_core.models.architecture import with_lora


@dataclass
class Regression:
    """Fits y = 2x - 1 by least squares; rows of step n are the same however they are cut into minibatches."""

    model: nn.Linear
    minibatch_size: int = 4
    num_steps: int = 5
    name: str = "regression"
    spoil: Callable[[int, torch.Tensor], torch.Tensor] = field(default=lambda step, loss: loss)

    def minibatches(self, step: int) -> list[tuple[int, torch.Tensor]]:
        rows = torch.randn(4, 1, generator=torch.Generator().manual_seed(step))
        return [(step, part) for part in rows.split(self.minibatch_size)]

    def loss(self, batch: tuple[int, torch.Tensor], step_batches: Sequence[Any]) -> MinibatchLoss:
        step, x = batch
        rows = sum(len(other) for _, other in step_batches)
        error = ((self.model(x) - (2 * x - 1)) ** 2).sum()
        return MinibatchLoss(self.spoil(step, error / rows), {"error": (error / len(x), len(x))})

    def num_tokens(self, batch: tuple[int, torch.Tensor]) -> int:
        return len(batch[1])

    def sequences(self, batch: tuple[int, torch.Tensor]) -> list[list[int]]:
        return [[batch[0]]] * len(batch[1])


def settings(**optimizer: Any) -> LearnerSettings:
    return LearnerSettings(
        optimizer=OptimizerConfig(**{"kind": "sgd", "lr": 0.1, "max_grad_norm": 1e9, **optimizer}),
        snapshots=SnapshotPolicy(every_steps=2),
    )


def start(**changes: Any) -> tuple[Regression, TrainState]:
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return Regression(model, **changes), TrainState(model, torch.optim.SGD(model.parameters(), lr=0.0))


def run(algorithm: Regression, state: TrainState, using: LearnerSettings, **options: Any) -> None:
    train(algorithm, state, using, build_accelerator("float32"), **options)


def weights(state: TrainState) -> list[float]:
    return [float(parameter.detach()) for parameter in state.model.parameters()]


# Schedules


@pytest.mark.parametrize(
    ("config", "num_steps", "expected"),
    [
        ({}, 3, [1.0, 1.0, 1.0]),
        ({"warmup_steps": 4}, 6, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ({"schedule": "linear"}, 4, [1.0, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "warmup_steps": 2}, 6, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ({"schedule": "cosine"}, 4, [1.0, 0.5 + math.sqrt(0.5) / 2, 0.5, 0.5 - math.sqrt(0.5) / 2]),
        ({"schedule": "cosine", "warmup_steps": 2}, 5, [0.5, 1.0, 1.0, 0.75, 0.25]),
        ({"schedule": "linear", "warmup_steps": 9}, 2, [1 / 9, 2 / 9]),
        ({"warmup_ratio": 0.25}, 5, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "linear", "warmup_ratio": 0.5, "min_lr": 0.2}, 4, [0.5, 1.0, 1.0, 0.6]),
        ({"schedule": "cosine", "min_lr": 0.5}, 2, [1.0, 0.75]),
    ],
)
def test_rates_by_hand(config: dict[str, Any], num_steps: int, expected: list[float]):
    made = OptimizerConfig(lr=1.0, **config)
    assert [learning_rate(made, step, num_steps) for step in range(num_steps)] == pytest.approx(expected)
    assert learning_rate(
        made.model_copy(update={"lr": 3.0, "min_lr": 3.0 * made.min_lr}), 1, num_steps
    ) == pytest.approx(3 * expected[1])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_run_of_more_steps_than_were_planned_stays_at_the_lowest_rate(schedule: Any):
    made = OptimizerConfig(lr=1.0, schedule=schedule, min_lr=0.2)
    assert [learning_rate(made, step, 4) for step in (4, 5, 9)] == pytest.approx([0.2, 0.2, 0.2])


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"warmup_steps": 2, "warmup_ratio": 0.1}, "warmup_steps and warmup_ratio are two ways to say one thing"),
        ({"min_lr": 0.1}, "min_lr is what linear and cosine schedules fall towards, and schedule is constant"),
        ({"min_lr": 2.0, "schedule": "linear"}, r"min_lr is 2\.0, above lr 1\.0"),
    ],
)
def test_schedules_that_contradict_themselves_are_refused(optimizer: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        parse_config({"lr": 1.0, **optimizer}, OptimizerConfig)


def test_a_spike_is_skipped_and_a_resumed_run_skips_the_same():
    """The loss of step 5 is a hundred times as large: no weight changes, and later steps do not compare with it."""

    def spoil(step: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * 100.0 if step == 4 else loss

    def using(factor: float) -> LearnerSettings:
        rule = SpikeRule(factor=factor, window=4, after_steps=3)
        return settings(lr=0.01).model_copy(update={"skip_spikes": rule})

    (algorithm, state), seen = start(num_steps=8, spoil=spoil), []
    run(algorithm, state, using(10.0), hooks=LoopHooks(on_step=lambda row: seen.append(weights(state))))
    assert [row["skipped"] for row in state.metrics] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert seen[4] == seen[3] != seen[5]

    first, again = start(num_steps=4, spoil=spoil)
    run(first, again, using(10.0))
    first.num_steps = 8
    run(first, again, using(10.0))
    assert weights(again) == weights(state) and again.metrics == state.metrics
    plain, other = start(num_steps=8, spoil=spoil)
    run(plain, other, using(1e6))
    assert not any(row["skipped"] for row in other.metrics) and weights(other) != weights(state)


def test_the_rate_of_each_step_is_the_optimizers_and_is_logged():
    algorithm, state = start(num_steps=4)
    used: list[float] = []
    hooks = LoopHooks(on_step=lambda row: used.append(state.optimizer.param_groups[0]["lr"]))
    run(algorithm, state, settings(lr=0.4, schedule="linear"), hooks=hooks)
    assert used == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert [row["learning_rate"] for row in state.metrics] == used


def test_a_schedule_may_span_more_steps_than_this_update():
    """PPO's updates share one schedule."""
    algorithm, state = start(num_steps=2)
    run(algorithm, state, settings(lr=0.4, schedule="linear"), total_steps=4)
    assert [row["learning_rate"] for row in state.metrics] == pytest.approx([0.4, 0.3])


def test_wall_time_cuts_training_short_and_changes_no_step_before():
    """Each step takes 10 s by this clock; what earlier processes used counts."""
    whole_algorithm, whole = start(num_steps=5)
    run(whole_algorithm, whole, settings(schedule="linear"))
    algorithm, state = start(num_steps=5)
    ticks = iter(range(0, 1000, 10))
    taken: list[int] = []
    hooks = LoopHooks(on_snapshot=lambda at: taken.append(at.step))
    options = {"max_seconds": 35.0, "clock": lambda: next(ticks), "hooks": hooks}
    run(algorithm, state, settings(schedule="linear"), **options)
    assert (state.step, state.seconds, taken) == (4, 40.0, [2]), "the last step gets no snapshot of its own"
    assert state.metrics == whole.metrics[:4]
    run(algorithm, state, settings(schedule="linear"), **options)
    assert state.step == 4, "the time is used up"
    run(algorithm, state, settings(schedule="linear"), **options | {"max_seconds": 50.0})
    assert state.step == 5 and weights(state) == weights(whole) and state.metrics == whole.metrics


# Steps


def test_sgd_by_hand():
    """One row x, weight and bias 0: error 1 - 2x, gradients 2 (1 - 2x) x and 2 (1 - 2x)."""
    algorithm, state = start(num_steps=1)
    [(_, x)] = algorithm.minibatches(0)
    run(algorithm, state, settings())
    error = 1 - 2 * x
    assert weights(state) == pytest.approx([float(-0.1 * 2 * (error * x).mean()), float(-0.1 * 2 * error.mean())])
    [row] = state.metrics
    assert row["loss"] == pytest.approx(float((error**2).mean())) == row["error"]
    assert (row["step"], row["num_tokens"], state.step) == (1, 4, 1)


def test_gradients_are_clipped_by_their_global_norm():
    algorithm, state = start(num_steps=1)
    run(algorithm, state, settings(lr=1.0, max_grad_norm=0.5))
    assert math.hypot(*weights(state)) == pytest.approx(0.5, rel=1e-4), "a step of plain SGD is the clipped gradient"
    assert state.metrics[0]["grad_norm"] > 0.5, "the norm before clipping is logged"


@pytest.mark.parametrize("minibatch_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_accumulated_minibatches_are_the_step_of_the_whole_batch(minibatch_size: int, kind: str):
    def trained(size: int) -> TrainState:
        algorithm, state = start(minibatch_size=size)
        using = settings(kind=kind, weight_decay=0.1)
        state.optimizer = build_optimizer(using.optimizer, list(algorithm.model.parameters()))
        run(algorithm, state, using)
        return state

    whole, parts = trained(4), trained(minibatch_size)
    assert weights(parts) == pytest.approx(weights(whole), rel=1e-5)
    for ours, theirs in zip(parts.metrics, whole.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_every_optimizer_is_torchs_own_with_its_settings(kind: str):
    model = nn.Linear(1, 1)
    config = OptimizerConfig.model_validate({"kind": kind, "lr": 0.2, "weight_decay": 0.3, "betas": (0.5, 0.6)})
    optimizer = build_optimizer(config, list(model.parameters()))
    assert type(optimizer).__name__.lower() == kind
    for group, (parameter, decay) in zip(optimizer.param_groups, [(model.weight, 0.3), (model.bias, 0.0)], strict=True):
        assert group["params"] == [parameter] and (group["lr"], group["weight_decay"]) == (0.2, decay)
        assert group.get("betas", (0.5, 0.6)) == (0.5, 0.6) and group.get("momentum", 0) == 0


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "llama, its biases too", "qwen2 with adapters", "reward model"])
def test_weight_decay_reaches_what_transformers_trainer_lets_it_reach(kind: str):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = {
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4)),
        "llama, its biases too": lambda: LlamaForCausalLM(
            LlamaConfig(**sizes, **heads, attention_bias=True, mlp_bias=True)
        ),
        "reward model": lambda: Qwen2ForSequenceClassification(Qwen2Config(**sizes, **heads, num_labels=1)),
    }.get(kind, lambda: Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=True)))()
    if "adapters" in kind:
        model = with_lora(model, LoRAConfig(r=4), seed=1)
    decayed = Trainer.get_decay_parameter_names(cast(Trainer, None), model)
    optimizer = build_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.3), list(model.parameters()))
    found = {parameter: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name: found[parameter] for name, parameter in trained.items()} == {
        name: 0.3 if name in decayed else 0.0 for name in trained
    }
    plain = build_optimizer(OptimizerConfig(lr=0.1), list(model.parameters()))
    assert len(plain.param_groups) == 1, "without decay nothing is told apart"


def test_a_step_shrinks_weights_and_leaves_norms_and_biases_without_a_gradient_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.5), list(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if name == "0.weight" else 1.0
        assert torch.allclose(parameter, factor * before[name]), name


NAMED = [
    ("Adafactor", {}),
    ("torch.optim.RAdam", {"betas": (0.8, 0.9)}),
    ("NAdam", {"decoupled_weight_decay": True}),
    ("Adagrad", {}),
    ("RMSprop", {"momentum": 0.5}),
    ("Rprop", {}),
    ("ASGD", {}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("adam", {"amsgrad": True}),
]


@pytest.mark.parametrize(("kind", "options"), NAMED)
def test_whatever_torch_has_trains_as_torch_trains_it(kind: str, options: dict[str, Any]):
    algorithm, state = start(num_steps=4)
    config = OptimizerConfig(kind=kind, lr=0.05, max_grad_norm=1e9, options=options)
    state.optimizer = build_optimizer(config, list(algorithm.model.parameters()))
    run(algorithm, state, settings(kind=kind, lr=0.05, options=options))

    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    name = {"sgd": "SGD", "adam": "Adam"}.get(kind, kind.removeprefix("torch.optim."))
    plain = getattr(torch.optim, name)(model.parameters(), lr=0.05, **options)
    for step in range(4):
        [(_, x)] = algorithm.minibatches(step)
        ((model(x) - (2 * x - 1)) ** 2).mean().backward()
        plain.step()
        plain.zero_grad()
    assert weights(state) == pytest.approx([float(parameter.detach()) for parameter in model.parameters()], rel=1e-5)


def test_adam_is_fused_where_it_exists_unless_told_otherwise():
    parameters = list(nn.Linear(1, 1).parameters())

    def is_fused(config: OptimizerConfig) -> bool:
        return bool(build_optimizer(config, parameters).param_groups[0]["fused"])

    assert is_fused(OptimizerConfig(lr=0.1)) and is_fused(OptimizerConfig(kind="adam", lr=0.1))
    assert not is_fused(OptimizerConfig(lr=0.1, options={"fused": False}))
    assert not is_fused(OptimizerConfig(lr=0.1, options={"foreach": True}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "Adafacto"}, "no optimizer 'Adafacto' in torch.optim; did you mean 'Adafactor'"),
        ({"kind": "Optimizer"}, "no optimizer 'Optimizer' in torch.optim"),
        ({"kind": "LBFGS"}, "LBFGS cannot train here: it evaluates the loss several times"),
        ({"kind": "Adafactor", "options": {"beta2_deca": 0.1}}, "no such argument; did you mean 'beta2_decay'"),
        ({"kind": "Adafactor", "betas": (0.9, 0.95)}, "betas is of adam and adamw; what Adafactor takes belongs into"),
        ({"kind": "Rprop", "weight_decay": 0.1}, "Rprop has no weight_decay"),
        ({"kind": "sgd", "options": {"momentum": -1}}, "SGD refuses its settings: Invalid momentum value: -1"),
        ({"kind": "adamw", "options": {"betas": (0.9, 0.9)}}, "options.betas: write optimizer.betas instead"),
        ({"kind": "adamw", "options": {"params": []}}, "options.params: AdamW has no such argument"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_told_when_the_configuration_is_read(config: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        parse_config({"optimizer": {"lr": 0.1, **config}}, LearnerSettings)
    [line] = str(caught.value).splitlines()
    assert message in line and line.startswith("config: optimizer")


def test_a_configuration_that_uses_nothing_new_keeps_its_identity():
    before = {
        "kind": "adamw", "lr": 0.1, "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8,
        "warmup_steps": 0, "schedule": "constant", "max_grad_norm": 1.0,
    }  # fmt: skip
    assert identity(OptimizerConfig(lr=0.1)) == before
    named = OptimizerConfig(kind="sgd", lr=0.1, options={"momentum": 0.9})
    assert identity(named) == {**before, "kind": "sgd", "options": {"momentum": 0.9}}


# Snapshots and faults


def test_snapshots_come_every_so_many_steps_but_not_after_the_last():
    algorithm, state = start(num_steps=6)
    taken: list[int] = []
    run(algorithm, state, settings(), hooks=LoopHooks(on_snapshot=lambda at: taken.append(at.step)))
    assert taken == [2, 4]


@pytest.mark.parametrize(
    ("more", "expected"),
    [({"every_seconds": 30.0}, [3, 6]), ({"every_tokens": 1}, [1, 2, 3, 4, 5, 6]), ({"every_tokens": 10**6}, [])],
)
def test_snapshots_come_by_tokens_and_by_seconds_too(more: dict[str, float], expected: list[int]):
    algorithm, state = start(num_steps=7)
    ticks = iter(range(0, 1000, 10))
    taken: list[int] = []
    policy = SnapshotPolicy.model_validate({"every_steps": 100, **more})
    hooks = LoopHooks(on_snapshot=lambda at: taken.append(at.step))
    run(algorithm, state, settings().model_copy(update={"snapshots": policy}), hooks=hooks, clock=lambda: next(ticks))
    assert taken == expected


def test_training_goes_on_from_the_states_step_and_ends_in_the_same_weights():
    whole_algorithm, whole = start(num_steps=5)
    run(whole_algorithm, whole, settings())
    algorithm, state = start(num_steps=3)
    run(algorithm, state, settings())
    algorithm.num_steps = 5
    run(algorithm, state, settings())
    assert weights(state) == weights(whole) and state.metrics == whole.metrics


def nan_loss(step: int, loss: torch.Tensor) -> torch.Tensor:
    return loss * math.nan if step == 3 else loss


def infinite_gradient(step: int, loss: torch.Tensor) -> torch.Tensor:
    """A finite loss: the root of 0 is 0, its slope is not finite."""
    return loss + torch.sqrt(loss - loss.detach()) if step == 3 else loss


@pytest.mark.parametrize("minibatch_size", [4, 2])
@pytest.mark.parametrize(
    ("spoil", "reason"), [(nan_loss, "loss nan, gradient norm nan"), (infinite_gradient, "gradient norm (nan|inf)")]
)
def test_a_step_that_is_not_finite_is_fatal_and_leaves_the_last_good_state(
    spoil: Callable[..., torch.Tensor], reason: str, minibatch_size: int
):
    good_algorithm, good = start(num_steps=3)
    run(good_algorithm, good, settings())
    algorithm, state = start(spoil=spoil, minibatch_size=minibatch_size)
    taken, seen = [], []
    hooks = LoopHooks(
        on_step=lambda row: seen.append(row["step"]),
        on_snapshot=lambda at: taken.append(at.step),
        on_failure=lambda at: taken.append(at.step),
    )
    with pytest.raises(Fatal, match=rf"^regression step 4: .*{reason}; both must be finite") as caught:
        run(algorithm, state, settings(), hooks=hooks)
    assert state.step == 3 and seen == [1, 2, 3] and taken == [2, 3]
    content_id = hash_bytes(canonical_json([[3]] * minibatch_size))
    assert str(caught.value).count(content_id) == 4 // minibatch_size, "one for each minibatch"
    assert weights(state) == pytest.approx(weights(good)) and len(state.metrics) == 3
    assert all(parameter.grad is None for parameter in algorithm.model.parameters())
    algorithm.spoil = lambda step, loss: loss
    run(algorithm, state, settings())
    assert state.step == 5, "training can go on from there"


def test_a_loss_that_is_not_finite_in_one_minibatch_spoils_the_step():
    """Also where another minibatch's figures would hide it."""
    algorithm, state = start(minibatch_size=1)
    calls: list[int] = []

    def spoil(step: int, loss: torch.Tensor) -> torch.Tensor:
        calls.append(step)
        return loss * math.inf if len(calls) == 6 else loss

    algorithm.spoil = spoil
    with pytest.raises(Fatal, match=r"step 2: loss (inf|nan)"):
        run(algorithm, state, settings())
    assert state.step == 1
