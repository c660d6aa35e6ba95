"""Two real processes train what one does: same losses and figures, snapshots that either takes up."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from ranks import CASES, INTERRUPTED, INTERRUPTED_OFTEN, KINDS, OFTEN, WHOLE, leave, place_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    GPT2Config,
    Phi3Config,
    PhiConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)
from updates import rows_of, sft_settings, update_context

from rollout_core.algorithms.dataset_updates import _computed_otherwise
from rollout_core.algorithms.parallel import clip_gradients, parts_per_minibatch, split_across_ranks, whole
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.config import DPOSettings, OptimizerConfig, ParallelConfig, SFTSettings, identity
from rollout_core.models.architecture import SUMMED, cut_layers
from rollout_core.models.pretrained import copy_tokenizer
from rollout_core.objects import ObjectStore, SnapshotStore
from rollout_core.objects.records import Checkpoint

pytestmark = pytest.mark.timeout(1800)  # the first test has two processes train all cases
PROJECT = Path(__file__).parents[2]
ONE = ParallelConfig()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def by_two(
    request: pytest.FixtureRequest, folder: Path, tiny_model: Path, run_process: Callable[..., str]
) -> dict[str, dict[str, Checkpoint]]:
    """What two processes made of every case that tests ask for, and of what one process had left."""
    whole, interrupted = asked_of(request, "by_two"), asked_of(request, "interrupted_by_two")
    for kind, name in interrupted:
        leave(name, place_of(folder / "left by one", kind, name), tiny_model, ONE)
    return made_by(2, run_process, folder, tiny_model, whole, interrupted)


@pytest.fixture(scope="module")
def interrupted_by_two(by_two: dict[str, dict[str, Checkpoint]]) -> dict[str, dict[str, Checkpoint]]:
    """The same, for tests of cases that are also left by some processes and taken up by others."""
    return by_two


def asked_of(request: pytest.FixtureRequest, fixture: str) -> list[tuple[str, str]]:
    """Kinds and cases of the tests of this file that are run and use ``fixture``."""
    here = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    given = [item.callspec.params for item in here if fixture in item.fixturenames and hasattr(item, "callspec")]
    return list(dict.fromkeys((params["kind"], params["name"]) for params in given))


def made_by(
    nproc: int,
    run_process: Callable[..., str],
    folder: Path,
    model: Path,
    whole: Sequence[tuple[str, str]],
    interrupted: Sequence[tuple[str, str]] = (),
) -> dict[str, dict[str, Checkpoint]]:
    script = str(Path(__file__).with_name("ranks.py"))
    options = ("--standalone", "--nproc-per-node", str(nproc))
    lists = json.dumps(whole), json.dumps(interrupted)
    run_process("-m", "torch.distributed.run", *options, script, str(folder), str(model), *lists)
    made = json.loads((folder / "checkpoints.json").read_text())
    return {
        part: {name: Checkpoint.model_validate(checkpoint) for name, checkpoint in checkpoints.items()}
        for part, checkpoints in made.items()
    }


@pytest.fixture(scope="module")
def by_one(folder: Path, tiny_model: Path) -> Callable[[str], Checkpoint]:
    """What one process makes of a case, computed once."""
    found: dict[str, Checkpoint] = {}

    def compute(name: str) -> Checkpoint:
        if name not in found:
            found[name] = CASES[name].run(update_context(place_of(folder, "one", name)), tiny_model, ONE)
        return found[name]

    return compute


def objects(folder: Path, kind: str, name: str) -> ObjectStore:
    return update_context(place_of(folder, kind, name)).objects


def assert_same_training(
    checkpoint: Checkpoint,
    store: ObjectStore,
    expected: Checkpoint,
    expected_store: ObjectStore,
    tolerance: float = 1e-4,
    ties: tuple[str, ...] = (),
) -> None:
    """Every figure of every step. Only which values are clipped is at first a tie that rounding decides, and what
    ``ties`` names of the first step."""
    found, wanted = rows_of(checkpoint, store), rows_of(expected, expected_store)
    for row in (*found, *wanted):
        row.pop("clip_ratio/value", None)
    for row, name in itertools.product((found[0], wanted[0]), ties):
        row.pop(name, None)
    assert len(found) == len(wanted) == checkpoint.step - (found[0]["step"] - 1)
    for row, other in zip(found, wanted, strict=True):
        assert row == pytest.approx(other, rel=tolerance, abs=tolerance)


def often(pairs: Iterable[tuple[str, str]], often: Collection[tuple[str, str]]) -> list[Any]:
    """Parameters of tests, of which `make test` runs those that are among ``often``."""
    return [pair if pair in often else pytest.param(*pair, marks=pytest.mark.campaign) for pair in pairs]


@pytest.mark.parametrize(("kind", "name"), often(WHOLE, OFTEN))
def test_two_processes_train_like_one(kind, name, by_one, by_two, folder):
    checkpoint, expected = by_two["whole"][f"{kind} {name}"], by_one(name)
    stores = objects(folder, kind, name), objects(folder, "one", name)
    assert_same_training(checkpoint, stores[0], expected, stores[1], CASES[name].tolerance)


@pytest.mark.parametrize("name", ["sft", "sft, averaged weights"])
@pytest.mark.parametrize("kind", KINDS)
def test_their_checkpoint_is_a_plain_model_with_the_weights_of_one_process(kind, name, by_one, by_two, folder):
    own, other = (
        AutoModelForCausalLM.from_pretrained(store.local_tree(checkpoint.model, folder / "models")).state_dict()
        for checkpoint, store in (
            (by_two["whole"][f"{kind} {name}"], objects(folder, kind, name)),
            (by_one(name), objects(folder, "one", name)),
        )
    )
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        assert torch.allclose(tensor, other[name], atol=1e-5), name


TAKEN_UP = often(INTERRUPTED, INTERRUPTED_OFTEN)


@pytest.mark.parametrize(("kind", "name"), TAKEN_UP)
def test_what_two_processes_leave_one_takes_up(kind, name, by_one, interrupted_by_two, folder, tiny_model):
    steps: list[int] = []
    place = update_context(
        place_of(folder / "left by two", kind, name), on_start=lambda first, last: steps.append(first)
    )
    checkpoint = CASES[name].run(place, tiny_model, ONE)
    # Snapshots are written beside training: of the three steps the last may not have been saved any more.
    assert 1 <= steps[0] <= 3
    assert_same_training(checkpoint, place.objects, by_one(name), objects(folder, "one", name))


@pytest.mark.parametrize(("kind", "name"), TAKEN_UP)
def test_what_one_process_leaves_two_take_up(kind, name, by_one, interrupted_by_two, folder):
    store = objects(folder / "left by one", kind, name)
    assert_same_training(
        interrupted_by_two["taken up"][f"{kind} {name}"], store, by_one(name), objects(folder, "one", name)
    )


@pytest.mark.parametrize(("kind", "name"), TAKEN_UP)
def test_what_two_processes_leave_two_take_up_to_the_last_bit(kind, name, interrupted_by_two):
    whole, resumed = (interrupted_by_two[part][f"{kind} {name}"] for part in ("whole", "resumed"))
    assert (resumed.model, resumed.train_state) == (whole.model, whole.train_state)


def test_a_weight_that_is_not_the_same_in_all_processes_is_found(by_two, folder):
    assert json.loads((folder / "apart.json").read_text()) == ["apart", "bfloat16, apart", "its own"]


def test_weights_that_drift_apart_are_not_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path):
    monkeypatch.setattr("rollout_core.algorithms.state.differing_replicas", lambda tensors: sorted(tensors)[:2])
    place = update_context(tmp_path)
    with pytest.raises(Recoverable, match=r"after step \d+ 2 tensors, model\.\S+ first, are not"):
        CASES["sft"].run(place, tiny_model, ONE)
    assert not SnapshotStore(place.objects).list()


@pytest.fixture(scope="module")
def grouped_model(folder: Path, tiny_model: Path) -> Path:
    """A Qwen3: four heads of keys for eight of queries, each with norms before its products."""
    own = AutoConfig.from_pretrained(tiny_model)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    shared = {name: getattr(own, name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(Qwen3Config(hidden_size=64, intermediate_size=128, **sizes, **shared))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder / "grouped")
    copy_tokenizer(tiny_model, folder / "grouped")
    return folder / "grouped"


@pytest.mark.campaign  # two do in test_two_processes_train_like_one
def test_four_processes_compute_every_row_together(folder, grouped_model, run_process):
    names = ("sft, layers computed twice", "dpo", "grpo")
    asked = [("tensor", name) for name in names]
    by_four = made_by(4, run_process, folder / "four", grouped_model, asked)["whole"]
    for name in names:
        place = update_context(place_of(folder, "one of grouped heads", name))
        expected = CASES[name].run(place, grouped_model, ONE)
        # Four numbers are added in an order that depends on their place, so policy and reference, which are equal at
        # first, differ in the last bit: whether the chosen answer is above the other is a tie that rounding decides.
        ties = ("rewards/accuracies",)
        store = objects(folder / "four", "tensor", name)
        assert_same_training(by_four[f"tensor {name}"], store, expected, place.objects, ties=ties)


@pytest.mark.parametrize(
    ("minibatch_size", "accumulation", "processes", "parts"),
    [(8, 1, 1, 1), (8, 2, 2, 1), (8, 1, 2, 2), (8, 3, 2, 2), (6, 1, 4, 3), (5, 1, 2, 5), (1, 4, 4, 1), (8, 1, 3, 8)],
)
def test_minibatches_are_cut_no_finer_than_an_even_share_asks_for(minibatch_size, accumulation, processes, parts):
    assert parts_per_minibatch(minibatch_size, accumulation, processes) == parts


def test_a_process_by_itself_gets_every_item_once():
    assert list(split_across_ranks("abc")) == [("a", True), ("b", True), ("c", True)]


def test_processes_are_part_of_what_is_computed_and_one_of_them_is_not_named():
    assert "parallel" not in identity(sft_settings())
    keys = [identity(sft_settings(parallel=ParallelConfig(nproc=2, kind=kind)))["parallel"] for kind in KINDS]
    assert keys == [["ddp", 2], ["fsdp2", 2], ["tensor", 2]]


def settings(**changes: Any) -> SFTSettings:
    fields = {"dataset": {"path": "x"}, "optimizer": {"lr": 1e-3}, "minibatch_size": 4}
    return SFTSettings.model_validate({**fields, **changes})


def test_more_processes_than_rows_and_optimizers_of_whole_matrices_are_refused():
    with pytest.raises(ValidationError, match=r"parallel\.nproc is 5, but a step has 4 rows"):
        settings(parallel={"nproc": 5})
    with pytest.raises(ValidationError, match="Adafactor needs whole matrices, which fsdp2 cuts up"):
        settings(parallel={"nproc": 2, "kind": "fsdp2"}, optimizer=OptimizerConfig(kind="Adafactor", lr=1e-3))
    with pytest.raises(ValidationError, match="adamw8bit needs whole matrices, which fsdp2 cuts up"):
        settings(parallel={"nproc": 2, "kind": "fsdp2"}, optimizer=OptimizerConfig(kind="adamw8bit", lr=1e-3))
    with pytest.raises(ValidationError, match="options: adamw8bit takes none"):
        OptimizerConfig(kind="adamw8bit", lr=1e-3, options={"fused": True})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": {"r": 4}}, r'lora: with parallel.kind = "tensor" .* use parallel.kind = "fsdp2"'),
        ({"lora": {"quantization": "nf4"}}, 'lora: .* use parallel.kind = "ddp"'),
        ({"offload": True}, 'offload: .* use parallel.kind = "fsdp2"'),
        ({"optimizer": {"kind": "Adafactor", "lr": 1e-3}}, 'optimizer.kind Adafactor: .* use parallel.kind = "ddp"'),
    ],
)
def test_what_cannot_be_computed_in_parts_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        settings(parallel={"nproc": 2, "kind": "tensor"}, **changes)
    settings(parallel={"nproc": 1, "kind": "tensor"}, **changes)


def test_processes_that_see_every_row_may_be_more_than_rows():
    assert settings(parallel={"nproc": 8, "kind": "tensor"}).parallel.cuts_matrices


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300, "pad_token_id": 0}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("config", "processes", "why"),
    [
        (GPT2Config(n_embd=64, n_head=4, n_layer=2), 2, "transformers has no plan for it"),
        (Phi3Config(**SMALL, **HEADS), 2, "no plan for it but one with colwise_gather_output"),
        (CohereConfig(**SMALL, **HEADS, use_qk_norm=True), 2, "q_norm.weight would work on a part of its input"),
        (Qwen2MoeConfig(**SMALL, **HEADS, num_experts=4), 2, r"0 of its 2 layers have a layers\.\*\.mlp\.gate_proj"),
        (Qwen3Config(**SMALL, **HEADS), 8, "num_key_value_heads is 4, which 8 processes cannot share evenly"),
        (
            Qwen3Config(**{**SMALL, "intermediate_size": 130}, **HEADS),
            4,
            "out_features of layers.0.mlp.gate_proj is 130",
        ),
        (Qwen3Config(**SMALL, **HEADS, attention_dropout=0.1), 4, "attention_dropout is 0.1"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(config, processes, why):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=f'cannot cut a {type(model).__name__}: .*{why}.*; use "fsdp2"'):
        cut_layers(model, processes)


def test_layers_are_cut_as_transformers_has_them():
    with torch.device("meta"):
        models = [
            AutoModelForCausalLM.from_config(config) for config in (Qwen3Config(**SMALL, **HEADS), PhiConfig(**SMALL))
        ]
    kinds = [{name.rpartition(".")[2]: how for name, how in cut_layers(model, 4).items()} for model in models]
    columns, rows = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise"), "rowwise"
    mlp = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": rows}
    assert kinds[0] == {**columns, "q_norm": SUMMED, "k_norm": SUMMED, "o_proj": rows, **mlp}
    assert kinds[1] == {**columns, "dense": rows, "fc1": "colwise", "fc2": rows}


def test_gradients_of_whole_and_cut_parameters_are_clipped_by_their_common_norm(tmp_path: Path):
    torch.manual_seed(0)
    grads = [3.0 * torch.randn(4, 6), torch.randn(6), torch.randn(2, 4), None]
    expected = torch.cat([grad.flatten() for grad in grads if grad is not None]).norm()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        cuts = [[Shard(0)], None, [Shard(1)], None]
        parameters = []
        for grad, cut in zip(grads, cuts, strict=True):
            plain = torch.zeros(4, 6) if grad is None else torch.zeros_like(grad)
            parameters.append(torch.nn.Parameter(distribute_tensor(plain, mesh, cut) if cut else plain))
            own = None if grad is None else grad.clone()
            parameters[-1].grad = distribute_tensor(own, mesh, cut) if cut and own is not None else own
        assert clip_gradients(parameters, 1.0) == pytest.approx(float(expected), rel=1e-6)
        for parameter, grad in zip(parameters, grads, strict=True):
            if grad is not None:
                assert parameter.grad is not None
                assert torch.allclose(whole(parameter.grad), grad / (expected + 1e-6), rtol=1e-6)
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def run_process() -> Callable[..., str]:
    """Run Python to its end; its output."""
    import subprocess
    import sys

    def run(*arguments: str) -> str:
        paths = [str(PROJECT), str(PROJECT / "examples"), str(Path(__file__).parent)]
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=1500,  # dozens of updates: eight minutes were too few beside other work
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return done.stdout

    return run


def test_log_probabilities_of_a_reference_in_parts_are_kept_apart_from_those_of_a_whole_one():
    given = {"dataset": {"path": "x"}, "optimizer": {"lr": 1e-3}, "minibatch_size": 2}
    names = [
        _computed_otherwise(DPOSettings.model_validate({**given, "parallel": {"nproc": 2, "kind": kind}}), None)
        for kind in KINDS
    ]
    assert names == [[], [], ["tensor 2"]]
