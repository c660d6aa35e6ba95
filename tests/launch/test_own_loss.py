"""A loss of the user's own: checked before any work, part of the key, and trained by as by a built-in one, here and in
processes of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.policy_losses import grpo_loss, ppo_policy_loss
from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.config import (
    AnyGroupSettings,
    AnyPairSettings,
    IPOSettings,
    KTOSettings,
    LearnerSettings,
    PPOSettings,
    TrainDPOConfig,
    identity,
    non_identity_inputs,
    parse_config,
)
from rollout_core.data.datasets import PairRow, UnpairedRow, to_jsonl
from rollout_core.data.samples import Completion, Sample, encode_completion, encode_samples
from rollout_core.launch import run_update
from rollout_core.launch.own_loss import check_own_loss, load_own_loss, with_code
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Checkpoint, Scores
from tasks.runtime.arguments import read_arguments

CODE = """
import torch
import torch.nn.functional as F


def clipped(logprobs, old_logprobs, ref_logprobs, advantages, mask, clip=0.2):
    ratio = torch.exp(logprobs - old_logprobs)
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))


def sigmoid_of_margin(policy_chosen, policy_rejected, ref_chosen, ref_rejected, *, beta):
    return -F.logsigmoid(beta * ((policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)))


def squared(policy_chosen, policy_rejected, ref_chosen, ref_rejected, *, beta):
    return ((policy_chosen - ref_chosen) - (policy_rejected - ref_rejected) - 1 / (2 * beta)) ** 2


def sigmoid_of_means(policy_chosen, policy_rejected, *, beta):
    return -F.logsigmoid(beta * (policy_chosen - policy_rejected))


def odds(policy_chosen, policy_rejected, *, beta):
    chosen, rejected = (x - torch.log(-torch.expm1(x)) for x in (policy_chosen, policy_rejected))
    return -policy_chosen - beta * F.logsigmoid(chosen - rejected)


def valued(policy, ref, desirable, kl, *, beta):
    margin = policy - ref - kl
    return torch.where(desirable, torch.sigmoid(-beta * margin), torch.sigmoid(beta * margin))


def one_number(**tensors):
    return 1.0


def fails(**tensors):
    raise ValueError("no such thing")


limit = 3
"""
POLICY = {
    "prompts": {"path": "x"},
    "optimizer": {"lr": 1e-2},
    "prompts_per_iteration": 2,
    "minibatch_size": 2,
    "gradient_accumulation": 2,
    "epochs": 2,
    "correction": None,
}
PAIRS = {"dataset": {"path": "x"}, "optimizer": {"lr": 1e-2}, "minibatch_size": 2, "budget": {"max_steps": 3}}
KINDS: dict[str, tuple[Any, dict[str, Any], str, dict[str, Any]]] = {
    "grpo": (AnyGroupSettings, {**POLICY, "samples_per_prompt": 2}, "clipped", {}),
    "online_dpo": (
        AnyGroupSettings,
        {**POLICY, "kind": "online_dpo", "samples_per_prompt": 2, "minibatch_size": 1, "correction": None},
        "sigmoid_of_margin",
        {"beta": 0.1},
    ),
    "ppo": (PPOSettings, {**POLICY, "samples_per_prompt": 2}, "clipped", {}),
    "dpo": (AnyPairSettings, {**PAIRS, "kind": "dpo"}, "sigmoid_of_margin", {"beta": 0.1}),
    "orpo": (AnyPairSettings, {**PAIRS, "kind": "orpo"}, "odds", {"beta": 0.1}),
    "simpo": (AnyPairSettings, {**PAIRS, "kind": "simpo", "beta": 2.0}, "sigmoid_of_means", {"beta": 2.0}),
    "ipo": (IPOSettings, {**PAIRS, "kind": "ipo"}, "squared", {"beta": 0.1}),
    "kto": (KTOSettings, {**PAIRS, "kind": "kto"}, "valued", {"beta": 0.1}),
}
KINDS["online_dpo"][1].pop("correction")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


def settings_of(kind: str, base: Path | None = None, **changes: Any) -> Any:
    """Of the built-in loss, or with ``base`` of the one in its file."""
    model, document, function, kwargs = KINDS[kind]
    own = {} if base is None else {"loss": {"path": f"mine.py:{function}", "kwargs": kwargs}}
    parsed = TypeAdapter(model).validate_python({**document, **own, **changes})
    return parsed if base is None else with_code(parsed, base)


def update(settings: LearnerSettings, folder: Path, model: Path, **hooks: Any) -> Checkpoint:
    objects = ObjectStore.from_url(str(folder / "objects"))
    options = {"key": hash_bytes(b"key"), "run_id": "run", "seed": 1, "num_threads": 1, **hooks}
    place = UpdateContext(objects=objects, cache=folder / "cache", **options)
    start = objects.put_tree(model)
    inputs: dict[str, Any] = {"settings": settings, "model": start, "reference": start}
    if settings.update == "preference":
        inputs["dataset"] = objects.put_bytes(to_jsonl(rows(settings.family)))
        return run_update("preference", place, **inputs)[0]
    scores, samples = scored(objects)
    return run_update(settings.update, place, **inputs, train_state=None, scores=scores, samples=samples)


def rows(family: str) -> list[Any]:
    if family == "kto":
        return [UnpairedRow(prompt=f"sort {n} 1 =", completion=f" 1 {n}", label=n % 2 == 0) for n in range(2, 8)]
    return [PairRow(prompt=f"sort {n} 1 =", chosen=f" 1 {n}", rejected=f" {n} 1") for n in range(2, 8)]


def scored(objects: ObjectStore) -> tuple[Scores, ContentId]:
    """Two completions each of two prompts."""
    samples = [Sample(hash_bytes(b"%d" % n), f"p{n // 2}", [5 + n // 2, 9], n, None, {}) for n in range(4)]
    lines = [
        encode_completion(Completion(sample.id, [20 + n, 30, 40], [-5.0, -5.5, -6.0], "", "stop"))
        for n, sample in enumerate(samples)
    ]
    scores = objects.put_json([0.0, 1.0, 0.5, 0.25])
    completions = objects.put_bytes(b"".join(lines))
    filed = Scores(scores=scores, completions=completions, num_samples=4, mean=0.4, std=0.4)
    return filed, objects.put_bytes(encode_samples(samples))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_computes_the_same_trains_the_same(kind: str, code: Path, tiny_model: Path, tmp_path: Path):
    built_in = update(settings_of(kind), tmp_path / "built-in", tiny_model)
    own = update(settings_of(kind, code), tmp_path / "own", tiny_model)
    assert own.summary["loss"] == pytest.approx(built_in.summary["loss"], rel=1e-5)
    assert own.summary["grad_norm"] == pytest.approx(built_in.summary["grad_norm"], rel=1e-4)
    if kind in ("grpo", "dpo"):  # the same operations in the same order
        assert own.model == built_in.model


def test_an_own_loss_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, 7.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    seen: dict[str, Any] = {}

    def loss(logprobs: Any, old: Any, ref: Any, advantages: Any, mask: Any) -> Any:
        seen.update(old=old, ref=ref, mask=mask)
        return -2.0 * advantages * logprobs + 1.0

    given = logprobs, torch.full((2, 2), -4.0), torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), mask
    found = grpo_loss(*given, loss=loss, loss_type="dapo")
    # (2 + 1) + (4 + 1) + (-6 + 1) over 3 tokens
    assert found.loss.item() == pytest.approx(1.0) and found.clip_fraction.item() == 0
    assert seen["ref"] is None and seen["old"].tolist() == [[-4.0, -4.0], [-4.0, 0.0]]
    found.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[pytest.approx(-2 / 3)] * 2, [pytest.approx(2 / 3), 0.0]]
    # Sequence by sequence: (8 / 2 - 5) / 2.
    assert grpo_loss(*given, loss=loss).loss.item() == pytest.approx(-0.5)
    ref = torch.full((2, 2), -2.5)
    assert ppo_policy_loss(*given, loss=loss, ref_logprobs=ref).loss.item() == pytest.approx(1.0)
    assert seen["ref"].tolist() == [[-2.5, -2.5], [-2.5, 0.0]]


@pytest.mark.parametrize("kind", ["grpo", pytest.param("dpo", marks=pytest.mark.campaign)])
def test_ranks_of_a_machine_compute_with_the_code_as_it_was_read(kind: str, code: Path, tiny_model: Path, tmp_path):
    parallel = {"parallel": {"nproc": 2}}
    own = settings_of(kind, code, **parallel)
    (code / "mine.py").unlink()
    built_in = update(settings_of(kind, **parallel), tmp_path / "built-in", tiny_model)
    assert update(own, tmp_path / "own", tiny_model).model == built_in.model


def test_an_interrupted_update_with_an_own_loss_resumes_to_the_same_bytes(code: Path, tiny_model: Path, tmp_path):
    own = settings_of("dpo", code, snapshots={"every_steps": 1})
    whole = update(own, tmp_path / "whole", tiny_model)

    def stop(row: dict[str, float]) -> None:
        if row["step"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        update(own, tmp_path / "stopped", tiny_model, on_step=stop)
    (code / "mine.py").unlink()
    starts: list[int] = []
    again = update(own, tmp_path / "stopped", tiny_model, on_start=lambda first, last: starts.append(first))
    assert again == whole and starts[0] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_and_not_its_place_is_in_the_key_and_a_record_has_it(kind: str, code: Path, tmp_path: Path):
    plain, own = settings_of(kind), settings_of(kind, code)
    named = identity(own)
    assert named != identity(plain) and str(code) not in str(named)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.py").write_text(CODE)
    assert identity(settings_of(kind, elsewhere)) == named
    # What a stage records of its call is read back, whatever the file is by now.
    recorded = {"settings": named, **non_identity_inputs({"settings": own})}
    (code / "mine.py").write_text(CODE + "\n# edited")
    model = KINDS[kind][0]

    def stage(settings: model) -> None: ...  # pyright: ignore[reportInvalidTypeForm]

    stage.__annotations__["settings"] = model
    read = read_arguments(stage, recorded)["settings"]
    assert read == own and identity(read) == named
    assert identity(settings_of(kind, code)) != named


def test_settings_without_the_code_have_no_key(code: Path):
    bare = TypeAdapter(AnyPairSettings).validate_python({**PAIRS, "loss": {"path": "mine.py:sigmoid_of_margin"}})
    for refused in (identity, load_own_loss):
        with pytest.raises(ConfigError, match=r"the code of loss mine\.py:sigmoid_of_margin has not been read"):
            refused(bare)


def test_a_whole_configuration_gets_the_code(code: Path):
    loss = {"path": "mine.py:sigmoid_of_margin", "kwargs": {"beta": 0.1}}
    document = {"algorithm": {"base_model": {"uri": "m"}, **PAIRS, "loss": loss}}
    config = parse_config(document, TrainDPOConfig)
    coded = with_code(config, code)
    assert identity(coded.algorithm) and with_code(coded, Path("elsewhere")) is coded
    without = parse_config({"algorithm": {"base_model": {"uri": "m"}, **PAIRS}}, TrainDPOConfig)
    assert with_code(without, code) is without


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"path": "none.py:f"}, r"^loss file .*none\.py does not exist; did you mean 'mine\.py'"),
        ({"path": "mine.py:sigmoid"}, r"^loss mine\.py:sigmoid: there is no 'sigmoid'; "),
        ({"path": "mine.py:limit"}, r"^loss mine\.py:limit is of type int; expected a function"),
        (
            {"path": "mine.py:sigmoid_of_margin"},
            r"signature .*, but this algorithm calls it by name with \(policy_chosen, .*\): missing .*'beta'",
        ),
        ({"path": "mine.py:clipped"}, r"calls it by name with \(policy_chosen, policy_rejected, ref_chosen, ref_"),
        ({"path": "broken.py:f"}, r"^loss file .*broken\.py fails on import: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_loaded_or_called_is_one_error_before_any_work(loss: dict[str, Any], message: str, code: Path):
    (code / "broken.py").write_text("1 / 0\n")
    settings = TypeAdapter(AnyPairSettings).validate_python({**PAIRS, "loss": loss})
    with pytest.raises(ConfigError, match=message):
        check_own_loss(settings, code, print)


def test_a_loss_that_returns_no_tensor_of_the_shape_or_raises_says_so(code: Path):
    def load(name: str) -> Any:
        document = {**PAIRS, "loss": {"path": f"mine.py:{name}"}}
        return load_own_loss(with_code(TypeAdapter(AnyPairSettings).validate_python(document), code))

    tensors = [torch.zeros(3)] * 4
    with pytest.raises(ConfigError, match=r"mine\.py:one_number returned float; expected a tensor of the shape of po"):
        load("one_number")(*tensors)
    with pytest.raises(Fatal, match=r"loss mine\.py:fails failed: ValueError: no such thing"):
        load("fails")(*tensors)


def test_an_update_called_without_the_loss_refuses(code: Path, tmp_path: Path):
    objects = ObjectStore.from_url(str(tmp_path / "objects"))
    place = UpdateContext(objects=objects, cache=tmp_path, key=hash_bytes(b"key"), run_id="run", seed=1)
    own = settings_of("dpo", code)
    with pytest.raises(ConfigError, match="is not loaded; train by"):
        place.loss_of(own)
    assert replace(place, own_loss=print).loss_of(own) is print


def test_a_dual_clip_has_nothing_to_bound(code: Path):
    with pytest.raises(ValueError, match="dual_clip bounds the built-in surrogate"):
        settings_of("ppo", code, dual_clip=3.0)
