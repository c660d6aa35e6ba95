"""Bad input and faulty rewards met by a flow itself: a Failed state with the one clear message, and nothing lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.config import (
    InferBatchConfig,
    JsonlDataset,
    ModelSource,
    NightlyConfig,
    SamplingParams,
    TrainPPOConfig,
    TrainSFTConfig,
    TransformersBackend,
    parse_config,
)
from rollout_core.config.rewards import FunctionReward
from rollout_core.rewards.source_ids import source_id

pytestmark = pytest.mark.server


def flow_and_config(kind: str, document: dict[str, Any]) -> tuple[Any, Any]:
    """A flow and a sound configuration of it, made of the parts of a nightly one."""
    from flows.batch import batch_inference
    from flows.nightly import nightly
    from flows.train import train_ppo, train_sft

    model, backend = document["model"], document["backend"]
    inputs = {"glob": document["ppo"]["prompts"]["path"]}
    sampling = document["evaluation"]["sampling"]
    batch = {"model": model, "backend": backend, "sampling": sampling, "input": inputs, "output": {"dir": "out"}}
    ppo = {"algorithm": {**document["ppo"], "base_model": model}, "backend": backend}
    return {
        "nightly": lambda: (nightly, parse_config(document, NightlyConfig)),
        "train-sft": lambda: (
            train_sft,
            parse_config({"algorithm": {**document["sft"], "base_model": model}}, TrainSFTConfig),
        ),
        "train-ppo": lambda: (train_ppo, parse_config(ppo, TrainPPOConfig)),
        "infer-batch": lambda: (batch_inference, parse_config(batch, InferBatchConfig)),
    }[kind]()


@pytest.mark.parametrize("kind", ["nightly", "train-sft", "train-ppo", "infer-batch"])
def test_a_flow_plans_before_its_first_stage(
    prefect_server: str, small_nightly: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    """Flows that a deployment starts never met the command's own plan."""
    monkeypatch.chdir(tmp_path)
    small_nightly["model"]["uri"] = "./gone"
    flow, config = flow_and_config(kind, small_nightly)
    state = flow(config, return_state=True)
    assert state.is_failed() and "model folder './gone' does not exist" in state.message
    with pytest.raises(ConfigError, match="does not exist"):
        state.result()
    assert not (tmp_path / "objects").exists() and not (tmp_path / "rollout.db").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("raise KeyError('no such answer')", r"failed on sample 1 \(second\): KeyError: 'no such answer'"),
        ("return float('nan')", r"returned nan for sample 1 \(second\); expected a finite number"),
    ],
)
def test_a_reward_that_fails_at_run_time_names_its_sample_and_nothing_is_generated_twice(
    prefect_server: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
):
    """In the stage that generates and scores at once, too: its samples are in the store before they are scored."""
    from prefect import flow

    from rollout_core.inference.engines import close_engine
    from rollout_core.inference.hf import TransformersEngine
    from tasks.generate import enqueue_prompts
    from tasks.imports import import_model, import_prompts
    from tasks.score import evaluate

    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "sort 1 =", "id": "first"}\n{"prompt": "sort 2 =", "id": "second"}\n')
    Path("mine.py").write_text(f"def reward(sample):\n    if sample.id == 'second': {line}\n    return 1.0\n")
    sampling = SamplingParams(temperature=0.0, max_tokens=4)

    @flow(name="test", persist_result=False)
    def evaluation() -> float:
        spec = FunctionReward(callable="mine.py:reward")
        model = import_model(ModelSource(uri=str(tiny_model))).model
        prompts = enqueue_prompts(import_prompts(JsonlDataset(path="prompts.jsonl")).data, model, sampling, mode="test")
        return evaluate(prompts, sampling, TransformersBackend(), spec, source_id(spec)).mean_reward

    state = evaluation(return_state=True)
    assert state.is_failed() and "reward mine.py:reward" in state.message
    with pytest.raises(Fatal, match=message):
        state.result()
    monkeypatch.setattr(TransformersEngine, "stream", lambda *arguments: 1 / 0)
    Path("mine.py").write_text("def reward(sample): return 0.5\n")
    assert evaluation() == 0.5, "its samples came from the store"
    close_engine()
