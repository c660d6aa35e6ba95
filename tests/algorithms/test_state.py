"""Train states: the same bytes for the same state, back to the same state, and refused where they do not belong."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from updates import save_state

from rollout_core.algorithms.loop import build_optimizer
from rollout_core.algorithms.state import STATE_VERSION, TrainState, load_state
from rollout_core.base.errors import ConfigError
from rollout_core.config import OptimizerConfig
from rollout_core.models.pretrained import load_causal_lm
from rollout_core.objects.snapshots import MODEL_FOLDER

DECAYING = ("sgd", "adam", "adamw", "Adafactor", "adamw8bit")
"""With two groups of parameters, whose order in the optimizer is another than in the model."""


def build(model: Path, *, kind: str = "adamw", head: int | None = 1, steps: int = 0) -> TrainState:
    """A state of ``model`` after ``steps`` steps; ``head`` is the width of a module beside it."""
    torch.manual_seed(3)
    policy = load_causal_lm(model)
    modules = nn.ModuleDict({} if head is None else {"value_head": nn.Linear(policy.config.hidden_size, head)})
    config = OptimizerConfig.model_validate({"kind": kind, "lr": 1e-2, "weight_decay": 0.1 * (kind in DECAYING)})
    state = TrainState(policy, build_optimizer(config, [*policy.parameters(), *modules.parameters()]), modules, seed=7)
    for _ in range(steps):
        train_one(state)
    return state


def train_one(state: TrainState) -> None:
    output = state.model(torch.randint(2, 250, (2, 6)), output_hidden_states=True)
    loss = output.logits.square().mean()
    for head in state.modules.values():
        loss = loss + head(output.hidden_states[-1]).square().mean()
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.metrics.append({"loss": float(loss.detach()), "step": float(state.step)})
    state.extras = {"kl_coef": 0.1 / state.step}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def tensors(state: TrainState) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone() for module in (state.model, state.modules) for name, tensor in module.state_dict().items()
    }


@pytest.fixture(scope="module")
def other_shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture, narrower."""
    from make_tiny import make_model

    folder = tmp_path_factory.mktemp("models") / "narrow"
    make_model(folder, hidden_size=32, num_layers=2, seed=1)
    return folder


OPTIMIZERS = ["sgd", "adam", "adamw", "Adafactor", "NAdam", "RAdam", "Adagrad", "RMSprop", "Rprop", "ASGD"]
EIGHT_BITS = pytest.param(
    "adamw8bit", 1, marks=pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="an extra: bitsandbytes")
)


@pytest.mark.parametrize(
    ("kind", "head"), [*((kind, 1) for kind in OPTIMIZERS), ("sgd", None), ("adamw", None), EIGHT_BITS]
)
def test_a_loaded_state_goes_on_bit_for_bit(tiny_model: Path, tmp_path: Path, kind: str, head: int | None):
    """The next batch is drawn by torch's own generator, which is part of the state."""
    state = build(tiny_model, kind=kind, head=head, steps=2)
    save_state(state, tmp_path / "saved", tokenizer_from=tiny_model)
    restored = build(tiny_model, kind=kind, head=head)
    load_state(restored, tmp_path / "saved")
    train_one(restored)
    save_state(restored, tmp_path / "restored", tokenizer_from=tiny_model)
    load_state(state, tmp_path / "saved")
    train_one(state)
    save_state(state, tmp_path / "whole", tokenizer_from=tiny_model)
    assert contents(tmp_path / "restored") == contents(tmp_path / "whole")
    assert (restored.step, len(restored.metrics), restored.extras) == (3, 3, {"kl_coef": 0.1 / 3})


def test_saving_changes_nothing_and_equal_states_have_equal_files(tiny_model: Path, tmp_path: Path):
    state = build(tiny_model, steps=1)
    before = tensors(state)
    for name in ("one", "two"):
        save_state(state, tmp_path / name, tokenizer_from=tiny_model)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(state).items())
    assert set(contents(tmp_path / "one")) >= {"state.json", "metrics.jsonl", "optimizer.safetensors"}
    assert load_causal_lm(tmp_path / "one" / MODEL_FOLDER).config.hidden_size == 64, "its model is usable as it is"


def test_large_states_are_in_several_files_and_go_on_as_from_one(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    state = build(tiny_model, steps=2)
    save_state(state, tmp_path / "one", tokenizer_from=tiny_model)
    with monkeypatch.context() as smaller:
        for module in ("rollout_core.models.deferred", "rollout_core.algorithms.state"):
            smaller.setattr(f"{module}.MOST_FILE_BYTES", 2**17)
        save_state(state, tmp_path / "many", tokenizer_from=tiny_model)
    files = contents(tmp_path / "many")
    parts = sorted(name for name in files if name.startswith("optimizer-"))
    assert len(parts) > 2 and parts[0] == f"optimizer-00001-of-{len(parts):05}.safetensors"
    assert "model/model.safetensors.index.json" in files and "optimizer.safetensors" not in files
    assert max(map(len, files.values())) < 2**18 < max(map(len, contents(tmp_path / "one").values()))
    assert load_causal_lm(tmp_path / "many" / MODEL_FOLDER).config.hidden_size == 64
    ends = []
    for name in ("one", "many"):
        restored = build(tiny_model)
        load_state(restored, tmp_path / name)
        train_one(restored)
        save_state(restored, tmp_path / f"{name} ended", tokenizer_from=tiny_model)
        ends.append(contents(tmp_path / f"{name} ended"))
    assert ends[0] == ends[1]


def refuse(state: TrainState, folder: Path) -> str:
    """What ``state`` is refused with; it stays as it was."""
    train_one(state)
    before, step = tensors(state), state.step
    with pytest.raises(ConfigError) as caught:
        load_state(state, folder)
    assert state.step == step and all(torch.equal(tensor, before[name]) for name, tensor in tensors(state).items())
    message = str(caught.value)
    assert message.endswith("Go on with what made it, or train from the start: run.refresh = true")
    return message


@pytest.fixture
def saved(tiny_model: Path, tmp_path: Path) -> Path:
    save_state(build(tiny_model, steps=2), tmp_path / "saved", tokenizer_from=tiny_model)
    return tmp_path / "saved"


@pytest.mark.parametrize("version", [STATE_VERSION - 1, STATE_VERSION + 1])
def test_a_state_of_another_version_is_refused(tiny_model: Path, saved: Path, version: int):
    file = saved / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": version}))
    message = refuse(build(tiny_model), saved)
    assert message.startswith(f"train state has version {version}; this software reads {STATE_VERSION}")


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_state_of_another_optimizer_is_refused(tiny_model: Path, saved: Path, kind: str):
    message = refuse(build(tiny_model, kind=kind), saved)
    assert message.startswith(f"train state is of the optimizer AdamW, this run has {kind[0].upper()}")


def test_a_state_of_another_model_is_refused(other_shape: Path, saved: Path):
    message = refuse(build(other_shape), saved)
    assert message.startswith("train state is of another run: model tensor lm_head.weight is of shape [262, 64] there")
    assert "of shape [262, 32] here" in message


def test_a_state_of_other_modules_is_refused(tiny_model: Path, saved: Path, tmp_path: Path):
    message = refuse(build(tiny_model, head=None), saved)
    assert "modules tensor value_head.bias is of shape [1] there, missing here" in message
    assert "value_head.bias is of shape [1] there, of shape [2] here" in refuse(build(tiny_model, head=2), saved)
    save_state(build(tiny_model, head=None, steps=1), tmp_path / "plain", tokenizer_from=tiny_model)
    assert "value_head.bias is missing there, of shape [1] here" in refuse(build(tiny_model), tmp_path / "plain")


def test_a_state_that_trained_what_is_frozen_here_is_refused(tiny_model: Path, saved: Path):
    state = build(tiny_model)
    state.modules["value_head"].bias.requires_grad_(False)
    assert "modules.value_head.bias was trained there, not here" in refuse(state, saved)
