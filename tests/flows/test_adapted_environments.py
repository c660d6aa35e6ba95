"""Training in environments of other projects, with rows that they make themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config import EvalConfig, NightlyConfig, TrainGRPOConfig, load_config, parse_config
from rollout_core.objects import ObjectStore
from rollout_core.plans.learner_plan import plan_suites, plan_training
from tests.conftest import PROJECT
from tests.flows.test_playing import SAMPLING, TEMPLATE

pytestmark = pytest.mark.server
pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")

EXAMPLE = PROJECT / "examples" / "environments" / "chain_sum.toml"
SMALL = {
    "num_threads": 1,
    "backend": {"kind": "transformers"},
    "evaluation.suites": [],
    "algorithm.base_model.uri": "model",
    "algorithm.iterations": 1,
    "algorithm.prompts_per_iteration": 3,
    "algorithm.samples_per_prompt": 2,
    "algorithm.minibatch_size": 2,
    "algorithm.prompts.size": 5,
    "algorithm.sampling": SAMPLING,
}


@pytest.fixture
def work(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model that has a chat template."""
    shutil.copytree(tiny_model, tmp_path / "model")
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(**changed: Any) -> TrainGRPOConfig:
    return load_config(EXAMPLE, TrainGRPOConfig, SMALL | changed)


def test_the_example_trains_on_rows_that_reasoning_gym_makes(prefect_server: str, work: Path):
    import reasoning_gym

    from flows.train import train_grpo
    from tests.flows.conftest import objects

    config = small()
    facts = plan_training(config, work)
    assert facts["training rows"] == 5
    assert facts["environment"].startswith("reasoning_gym chain_sum (")
    trained = train_grpo(config)
    assert len(trained["rewards"]) == 1
    again = train_grpo(config)
    assert again["model"] == trained["model"]
    own = reasoning_gym.create_dataset("chain_sum", min_terms=2, max_terms=2, max_digits=2, seed=1, size=5)
    asked = _episodes(objects())
    assert len(asked) == 3 and asked <= {item["question"] for item in own}


def _episodes(objects: ObjectStore) -> set[str]:
    """Questions of the rollouts that the store has."""
    import asyncio

    from tasks.runtime import connections

    async def read() -> set[str]:
        async with connections.open_store() as store:
            return {
                rollout.input["question"]
                for rollout in await store.query_rollouts()
                if isinstance(rollout.input, dict) and "question" in rollout.input
            }

    return asyncio.run(read())


def test_a_suite_asks_rows_that_are_held_out(prefect_server: str, work: Path):
    from flows.evaluate import evaluate_suites

    suite = {
        "name": "sums",
        "rows": {"kind": "environment", "split": "eval", "size": 3},
        "environment": {"kind": "reasoning_gym", "dataset": "chain_sum", "max_turns": 1},
        "sampling": {**SAMPLING, "temperature": 0.0},
    }
    document = {"model": {"uri": "model"}, "backend": {"kind": "transformers"}, "suites": [suite]}
    config = parse_config(document, EvalConfig)
    assert plan_suites(config, work)["questions"] == {"sums": "3 episodes"}
    evaluate_suites(config)
    from tests.flows.conftest import objects

    assert len(_episodes(objects())) == 3


def test_rows_to_learn_from_are_not_the_held_out_ones(work: Path):
    suite = {
        "name": "sums",
        "rows": {"kind": "environment", "size": 3},
        "environment": {"kind": "reasoning_gym", "dataset": "chain_sum"},
    }
    with pytest.raises(ConfigError, match=r'rows: say which rows .*split = "eval"'):
        parse_config({"model": {"uri": "model"}, "suites": [suite]}, EvalConfig)
    night = {"model": {"uri": "model"}, "evaluation": {"prompts": {"kind": "environment"}}}
    with pytest.raises(ConfigError, match=r'evaluation.*prompts: rows of split = "train" are learned from'):
        parse_config(night, NightlyConfig)


def test_rows_of_an_environment_need_one(work: Path):
    config = load_config(EXAMPLE, TrainGRPOConfig, SMALL | {"environment": None})
    with pytest.raises(ConfigError, match=r'algorithm.prompts.kind: rows of kind "environment"'):
        plan_training(config, work)


def test_what_is_wrong_with_an_environment_is_named_under_its_table(work: Path):
    with pytest.raises(ConfigError, match=r"environment: environment reasoning_gym chain_summ .*chain_sum"):
        plan_training(small(**{"environment.dataset": "chain_summ"}), work)
    with pytest.raises(ConfigError, match=r"environment.data_set: unknown key; did you mean 'dataset'"):
        small(**{"environment.data_set": "chain_sum"})
    with pytest.raises(ConfigError, match=r"environment.kind: Input should be 'python' or 'reasoning_gym' or"):
        small(**{"environment.kind": "reasoning"})
