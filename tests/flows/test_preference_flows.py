"""Preference runs from their TOML files to their end: the shipped examples on a tiny model, by flow and by command."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.ids import ContentId
from rollout_core.config import (
    CONFIG_KINDS,
    JsonlDataset,
    ModelSource,
    NightlyConfig,
    SamplingParams,
    TrainGRPOConfig,
    TrainPPOConfig,
    TrainRMConfig,
    load_config,
    parse_config,
)
from rollout_core.data.samples import decode_samples
from rollout_core.plans.learner_plan import plan_nightly, plan_training
from rollout_core.runs.run_records import RunHead
from tests.flows.conftest import objects, snapshots_of
from tests.support import forked

PROJECT = Path(__file__).resolve().parent.parent.parent
KINDS = ("rm", "dpo", "ipo", "kto")
GZIP = b"\x1f\x8b"


@pytest.fixture(scope="module")
def preference_data(tmp_path_factory) -> dict[str, Path]:
    """Files of pairs and of labelled answers."""
    from make_tiny import make_judged, make_pairs, make_problems

    folder = tmp_path_factory.mktemp("preferences")
    problems = make_problems(96, random.Random(3))
    files = {}
    for name, make in (("pairs", make_pairs), ("judged", make_judged)):
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in make(problems, random.Random(4))))
    return files


def example(kind: str, tiny_model: Path, files: dict[str, Path], **changes):
    """The shipped configuration on the tests' model and data."""
    overrides = {
        "algorithm.base_model.uri": str(tiny_model),
        "algorithm.dataset.path": str(files["judged" if kind == "kto" else "pairs"]),
        "algorithm.budget.max_steps": 12,
        "algorithm.optimizer.lr": 1e-3,
        "algorithm.evaluation.dataset.path": str(files["judged" if kind == "kto" else "pairs"]),
        "num_threads": 1,
        "numerics": "native",  # this process has chosen its kernels
        **changes,
    }
    return load_config(PROJECT / "examples" / f"{kind}-tiny.toml", CONFIG_KINDS[f"train-{kind}"], overrides)


def plan(kind: str, config, base: Path = PROJECT, *, connect: bool = False):
    from tasks.runtime.connections import current_connections

    return plan_training(config, base, current_connections() if connect else None)


@pytest.mark.server
@pytest.mark.parametrize("kind", KINDS)
def test_the_example_trains_and_a_second_run_is_cached(kind, tiny_model, preference_data, prefect_server):

    from flows import train

    config = example(kind, tiny_model, preference_data)
    flow = getattr(train, f"train_{kind}")
    result = flow(config)
    assert "eval_loss" in result["summary"]
    rows = [json.loads(line) for line in objects().get_bytes(result["metrics"]).splitlines()]
    assert result["step"] == len(rows) == 12 and result["algorithm"] == kind
    assert sum(row["loss"] for row in rows[-4:]) < sum(row["loss"] for row in rows[:4])
    assert sum(row["rewards/margins"] for row in rows[-4:]) > sum(row["rewards/margins"] for row in rows[:4])
    assert result["train_state"] in {snapshot.id for snapshot in snapshots_of(kind)}
    before = set(dict(objects().blobs()))
    assert flow(config) == result
    written = [objects().get_bytes(found) for found in set(dict(objects().blobs())) - before]
    documents = [set(json.loads(data)) for data in written if not data.startswith(GZIP)]
    assert len(written) - len(documents) == 1, "the detail of its record"
    assert sorted(documents, key=len) == [{"holder", "process"}, set(RunHead.model_fields)], (
        "its own lease, the head of its record and nothing else"
    )


@pytest.mark.server
def test_a_run_trains_by_a_loss_of_its_own_which_its_records_have(
    tiny_model, preference_data, prefect_server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from flows.reproduce import reproduce
    from flows.train import train_dpo
    from tasks.runtime.planning import plan_run

    code = tmp_path / "losses.py"
    code.write_text((PROJECT / "examples" / "losses.py").read_text())
    own = {"algorithm.loss": {"path": f"{code}:hinge", "kwargs": {"beta": 0.2}}}
    config = example("dpo", tiny_model, preference_data, **own)
    before = dict(objects().blobs())
    plan_run("train-dpo", config)
    assert dict(objects().blobs()) == before
    result = train_dpo(config)
    assert result["model"] != train_dpo(example("dpo", tiny_model, preference_data))["model"]
    assert train_dpo(config) == result
    code.write_text(code.read_text().replace("1 - beta", "2 - beta"))
    assert train_dpo(config)["model"] != result["model"]
    code.unlink()
    source = objects()
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'again'}")
    assert reproduce(result["model"], source.url)["difference"] is None


@pytest.mark.server
def test_a_reward_model_rewards_the_completions_of_another_run(
    tiny_model, sorting_task, preference_data, prefect_server
):
    from flows.train import train_ppo, train_rm

    trained = train_rm(example("rm", tiny_model, preference_data))
    config = load_config(
        PROJECT / "examples" / "ppo-tiny.toml",
        TrainPPOConfig,
        {
            "algorithm.base_model.uri": str(tiny_model),
            "algorithm.prompts.path": str(sorting_task.prompts),
            "algorithm.iterations": 1,
            "algorithm.prompts_per_iteration": 8,
            "algorithm.minibatch_size": 8,
            "algorithm.epochs": 1,
            "algorithm.reward": {
                "kind": "expression",
                "expression": "clip(quality, -5, 5) - 0.1 * truncated",
                "rewards": {"quality": {"kind": "model", "model": trained["model"]}},
            },
            "backend": {"kind": "transformers"},
            "num_threads": 1,
            "numerics": "native",
        },
    )
    [reward] = train_ppo(config)["rewards"]
    assert reward != 0.0


PICTURES = {
    "dpo": {"accuracy-of-the-implicit-reward.png", "dpo-loss.png"},
    "rm and grpo": {
        "accuracy-of-the-reward-model.png",
        "entropy.png",  # without kl_coef no divergence from a reference is known
        "mean-completion-length.png",
    },
}


@pytest.mark.server
@pytest.mark.parametrize("variant", PICTURES)
def test_the_nightly_flow_learns_from_pairs(
    variant, tiny_model, sorting_task, preference_data, small_nightly, prefect_server
):
    from flows.nightly import nightly

    learner = {
        "minibatch_size": 16,
        "optimizer": {"lr": 1e-3},
        "dataset": {"path": str(preference_data["pairs"])},
        "sequence": {"max_length": 64},
    }
    document = {**small_nightly, "run": {"name": variant.replace(" ", "-")}}
    ppo = document.pop("ppo")
    if variant == "dpo":
        document["dpo"] = {**learner, "budget": {"max_steps": 6}}
    else:
        document["rm"] = {**learner, "budget": {"max_steps": 6}}
        sizes = {
            "iterations": 1,
            "prompts_per_iteration": 4,
            "samples_per_prompt": 4,
            "minibatch_size": 16,
            "epochs": 1,
        }
        document["grpo"] = {**ppo, **sizes}
    config = parse_config(document, NightlyConfig)
    assert plan_nightly(config, PROJECT)["rm rows" if config.rm else "dpo rows"] == 96
    result = nightly(config)
    assert list(result["held_out"]) == ["before", "after SFT", "after DPO" if variant == "dpo" else "after GRPO"]
    stages = [row["stage"] for row in result["stages"]]
    learnt = ["dpo_update"] if variant == "dpo" else ["rm_update", "grpo_update"]
    assert [name for name in stages if name.endswith("_update")] == ["sft_update", *learnt]
    assert result["rewards"] == []
    folder = Path(result["report"])
    assert {file.name for file in folder.iterdir()} == {
        "index.html",
        "progress.png",
        "sft-loss.png",
        *PICTURES[variant],
    }
    assert {row["state"] for row in nightly(config)["stages"]} == {"cached", "checked"}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"dpo", "ppo"}, "exactly one of the tables ppo, grpo and dpo; got ppo and dpo"),
        (set(), "exactly one of the tables ppo, grpo and dpo; got none"),
        ({"dpo", "rm"}, "the table rm is for ppo and grpo"),
    ],
)
def test_a_nightly_run_has_one_algorithm_after_sft(small_nightly, preference_data, tables, message):
    learner = {"optimizer": {"lr": 1e-3}, "dataset": {"path": str(preference_data["pairs"])}}
    document = {**small_nightly, "dpo": learner, "rm": learner}
    with pytest.raises(ConfigError, match=message):
        parse_config(
            {key: value for key, value in document.items() if key in tables or key not in ("dpo", "ppo", "rm")},
            NightlyConfig,
        )


@pytest.mark.server
def test_a_run_goes_on_from_its_latest_snapshot(tiny_model, preference_data, prefect_server):
    from flows.train import train_dpo

    def config(steps: int, **changes):
        return example("dpo", tiny_model, preference_data, **{"algorithm.budget.max_steps": steps, **changes})

    with pytest.raises(ConfigError, match=r"run\.resume: no dpo snapshot of a run named 'dpo-tiny'"):
        train_dpo(config(2, **{"run.resume": "latest"}))
    train_dpo(config(2))
    resumed = train_dpo(config(4, **{"run.resume": "latest"}))
    whole = train_dpo(config(4))
    assert (resumed["model"], resumed["step"]) == (whole["model"], 4)
    assert (
        train_dpo(config(4, **{"run.resume": whole["train_state"][:10], "algorithm.budget.max_steps": 5}))["step"] == 5
    )
    with pytest.raises(ConfigError, match="is a train_state of dpo; this run trains ipo"):
        plan("ipo", example("ipo", tiny_model, preference_data, **{"run.resume": whole["train_state"]}), connect=True)


@pytest.mark.server
def test_iterations_go_on_where_a_shorter_run_ended(tiny_model, sorting_task, prefect_server):
    from flows.train import train_grpo

    def config(iterations: int, **changes):
        overrides = {
            "algorithm.base_model.uri": str(tiny_model),
            "algorithm.prompts.path": str(sorting_task.prompts),
            "algorithm.iterations": iterations,
            "algorithm.prompts_per_iteration": 4,
            "algorithm.minibatch_size": 8,
            "backend": {"kind": "transformers"},
            "num_threads": 1,
            "numerics": "native",
            **changes,
        }
        return load_config(PROJECT / "examples" / "grpo-tiny.toml", TrainGRPOConfig, overrides)

    first = train_grpo(config(1))
    with pytest.raises(ConfigError, match=r"has 1 iterations behind it; raise algorithm.iterations"):
        train_grpo(config(1, **{"run.resume": "latest"}))
    other = {"run.resume": "latest", "algorithm.prompts_per_iteration": 8, "algorithm.gradient_accumulation": 2}
    with pytest.raises(ConfigError, match=r"behind snapshot \w+ had prompts_per_iteration = 4 \(here 8\), "):
        train_grpo(config(3, **other))
    resumed = train_grpo(config(2, **{"run.resume": first["train_state"][:12]}))
    whole = train_grpo(config(2))
    assert resumed["train_state"] == whole["train_state"] and resumed["rewards"] == whole["rewards"][1:]


SPREAD = """
from rollout_core.rewards import RewardInput

def reward(sample: RewardInput) -> float:
    '''Completions of every second prompt are alike; the others differ where their tokens do.'''
    return 0.0 if int(sample.prompt.split()[1]) % 2 else float(sum(sample.token_ids) % 5)
"""


@pytest.mark.server
def test_groups_without_spread_are_drawn_anew_in_rounds_that_an_interrupted_run_does_not_repeat(
    tiny_model, sorting_task, prefect_server, tmp_path, monkeypatch
):
    from flows import learning, sampling, train
    from tasks.runtime import connections

    (tmp_path / "spread.py").write_text(SPREAD)

    def config(**changes):
        overrides = {
            "algorithm.base_model.uri": str(tiny_model),
            "algorithm.prompts.path": str(sorting_task.prompts),
            "algorithm.iterations": 1,
            "algorithm.prompts_per_iteration": 4,
            "algorithm.samples_per_prompt": 2,
            "algorithm.minibatch_size": 4,
            "algorithm.sampling.max_tokens": 4,
            "algorithm.overlong.cache": 2,
            "algorithm.reward_normalization": "each",
            "algorithm.reward": {
                "kind": "composite",
                "parts": [
                    {"reward": {"kind": "function", "callable": f"{tmp_path / 'spread.py'}:reward"}},
                    {"weight": 0.5, "reward": {"kind": "exact_match"}},
                ],
            },
            "backend": {"kind": "transformers"},
            "num_threads": 1,
            "numerics": "native",
            **changes,
        }
        return load_config(PROJECT / "examples" / "dapo-tiny.toml", TrainGRPOConfig, overrides)

    drawn, learned = [], []
    score, update = sampling.score_rewards, learning.TrainingStates.update

    def scoring(completions, *arguments, **options):
        drawn.append(completions.num_samples)
        if len(drawn) == 2:
            raise KeyboardInterrupt("killed in the second round")
        return score(completions, *arguments, **options)

    def updating(self, number, stage, model, state, reference, scores, samples, *arguments, **options):
        learned.append((scores, samples))
        return update(self, number, stage, model, state, reference, scores, samples, *arguments, **options)

    monkeypatch.setattr(sampling, "score_rewards", scoring)
    monkeypatch.setattr(learning.TrainingStates, "update", updating)
    with pytest.raises(KeyboardInterrupt):
        train.train_grpo(config())
    resumed = train.train_grpo(config())
    again = train.train_grpo(config(**{"run.refresh": True}))
    assert resumed["model"] == again["model"] and resumed["train_state"] == again["train_state"]
    assert drawn[:2] == drawn[2:4] and drawn[0] == 8, "four prompts in the first round, fewer in those that fill up"

    scores, samples = learned[0]
    values = json.loads(connections.objects().get_bytes(scores.scores))
    prompts = [sample.prompt for sample in decode_samples(connections.objects().get_bytes(samples))]
    assert len(values) == 8 and prompts[::2] == prompts[1::2] and len(set(prompts)) == 4
    parts = connections.objects().get_json(scores.parts)
    assert parts["names"] == ["reward", "exact_match"]
    assert [one + 0.5 * other for one, other in parts["values"]] == values
    [row] = map(json.loads, connections.objects().get_bytes(ContentId(resumed["metrics"])).splitlines()[:1])
    assert row["rewards/reward/mean"] == sum(one for one, _ in parts["values"]) / 8
    assert all(one != other for one, other in zip(values[::2], values[1::2], strict=True))

    with pytest.raises(Fatal, match=r"iteration 1: in 1 rounds \d of 4 groups have rewards that differ, .* needs 4"):
        train.train_grpo(config(**{"algorithm.dynamic_sampling": {"max_rounds": 1}, "run.name": "short"}))


HACKED = """
from rollout_core.rewards import RewardInput

def training(sample: RewardInput) -> float:
    '''What a policy finds out within a few steps: low token ids. It begins with the highest as the most likely ones.'''
    return 1.0 - sum(sample.token_ids) / max(1, len(sample.token_ids)) / 262

def wanted(sample: RewardInput) -> float:
    return 1.0 - training(sample)
"""


@pytest.mark.server
def test_a_run_ends_when_its_training_reward_rises_and_that_on_held_out_prompts_falls(
    tiny_model, sorting_task, prefect_server, tmp_path, monkeypatch
):
    from flows import train

    (tmp_path / "hacked.py").write_text(HACKED)
    guard = {
        "prompts": {"path": str(sorting_task.held_out)},
        "reward": {"kind": "function", "callable": f"{tmp_path / 'hacked.py'}:wanted"},
        "evaluations": 2,
    }

    def config(**changes):
        overrides = {
            "algorithm.base_model.uri": str(tiny_model),
            "algorithm.prompts.path": str(sorting_task.prompts),
            "algorithm.iterations": 6,
            "algorithm.prompts_per_iteration": 8,
            "algorithm.samples_per_prompt": 4,
            "algorithm.minibatch_size": 8,
            "algorithm.optimizer.lr": 1e-2,
            "algorithm.sampling.max_tokens": 6,
            "algorithm.reward": {"kind": "function", "callable": f"{tmp_path / 'hacked.py'}:training"},
            "backend": {"kind": "transformers"},
            "num_threads": 1,
            "numerics": "native",
            "run.name": "hacked",
            **changes,
        }
        return load_config(PROJECT / "examples" / "grpo-tiny.toml", TrainGRPOConfig, overrides)

    with pytest.raises(Fatal, match=r"guards\.reward_hacking: in the last 2 evaluations the training reward") as told:
        train.train_grpo(config(**{"algorithm.guards": {"reward_hacking": guard}}))
    assert "Training and held-out reward by iteration: 1: 0." in str(told.value)
    mends = {"reward_hacking": {**guard, "max_fall": 5.0}}
    assert len(train.train_grpo(config(**{"algorithm.guards": mends, "algorithm.iterations": 2}))["rewards"]) == 2

    # A bound that was not there when the update was made: it is found, not made again, and what it learned from counts.
    with monkeypatch.context() as patched, pytest.raises(Fatal, match="Iteration 1 was trained earlier, without this"):
        patched.setattr("tasks.runtime.updates.UpdateJob.learn_on_policy", lambda job: pytest.fail("it is made again"))
        train.train_grpo(config(**{"algorithm.guards": {"max_mean_length": 0.5}, "algorithm.iterations": 2}))

    missing = {"reward_hacking": {**guard, "prompts": {"path": "nowhere.jsonl"}}}
    with pytest.raises(ConfigError, match=r"algorithm\.guards\.reward_hacking\.prompts\.path: .*nowhere\.jsonl"):
        train.train_grpo(config(**{"algorithm.guards": missing}))


@pytest.mark.server
def test_iterations_pass_over_the_prompts_in_orders_that_follow_from_the_seed(
    tiny_model, sorting_task, prefect_server, tmp_path, monkeypatch
):
    """Three iterations of 4 of 6 prompts are two passes; held-out prompts, say, keep the order of their file."""
    from prefect import flow

    from flows import sampling, train
    from tasks.imports import import_model, import_prompts
    from tasks.runtime import connections

    lines = sorting_task.prompts.read_text().splitlines()[:6]
    rows = [json.loads(line)["prompt"] for line in lines]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    asked: list[str] = []
    enqueue = sampling.enqueue_prompts

    def asking(*arguments, **options):
        prompts = enqueue(*arguments, **options)
        samples = decode_samples(connections.objects().get_bytes(prompts.samples))
        asked.extend(sample.prompt for sample in samples[:: options.get("samples_per_prompt", 1)])
        return prompts

    monkeypatch.setattr(sampling, "enqueue_prompts", asking)

    def passes(seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        asked.clear()
        overrides = {
            "algorithm.base_model.uri": str(tiny_model),
            "algorithm.prompts.path": str(tmp_path / "prompts.jsonl"),
            "algorithm.iterations": 3,
            "algorithm.prompts_per_iteration": 4,
            "algorithm.samples_per_prompt": 2,
            "algorithm.minibatch_size": 8,
            "algorithm.sampling.max_tokens": 2,
            "backend": {"kind": "transformers"},
            "num_threads": 1,
            "numerics": "native",
            "seed": seed,
        }
        train.train_grpo(load_config(PROJECT / "examples" / "grpo-tiny.toml", TrainGRPOConfig, overrides))
        return tuple(asked[:6]), tuple(asked[6:])

    first, second = passes(3)
    assert sorted(first) == sorted(second) == sorted(rows) and len({first, second, tuple(rows)}) == 3
    assert passes(3) == (first, second) != passes(4)

    @flow(name="test", persist_result=False)
    def in_file_order() -> None:
        prompts = import_prompts(JsonlDataset(path=str(tmp_path / "prompts.jsonl"))).data
        asking(prompts, import_model(ModelSource(uri=str(tiny_model))).model, SamplingParams(max_tokens=2))

    asked.clear()
    in_file_order()
    assert asked == rows


@pytest.mark.parametrize("kind", ["dpo", "kto"])  # of pairs and of single judgements
def test_dry_run_says_what_the_data_gives(kind, tiny_model, preference_data):
    done = forked.run(
        [sys.executable, "-c", "from flows.cli import main; main()", "train", kind,
         "--config", f"examples/{kind}-tiny.toml", "--dry-run",
         "--set", f"algorithm.base_model.uri={tiny_model}",
         "--set", f"algorithm.dataset.path={preference_data['judged' if kind == 'kto' else 'pairs']}"],
        cwd=PROJECT, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"dry-run OK: algorithm={kind} model={tiny_model} rows=96 examples=96 ")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("dpo", {"algorithm.beta": 0}, r"algorithm\.beta: .*greater than 0; got 0"),
        ("ipo", {"algorithm.label_smoothing": 0.1}, r"algorithm\.label_smoothing: unknown key"),
        ("kto", {"algorithm.kind": "dpo"}, r"algorithm\.kind: .*got 'dpo'"),
        ("rm", {"algorithm.head": "linear"}, r"algorithm\.head: .*got 'linear'"),
        (
            "dpo",
            {"algorithm.sequence.max_length": 9999},
            r"sequence.max_length: 9999 tokens, but the model has 256 positions",
        ),
        ("dpo", {"algorithm.dataset.path": "none.jsonl"}, r"dataset\.path: dataset 'none\.jsonl' cannot be read"),
        (
            "kto",
            {"algorithm.trackers": ["wandb"]},
            r"algorithm\.trackers: wandb is not installed; install rollout-post-training\[wandb\]",
        ),
        ("dpo", {"algorithm.trackers": ["wandbb"]}, r"algorithm\.trackers.*got 'wandbb'"),
        ("rm", {"algorithm.evaluation.dataset.path": "none"}, r"evaluation\.dataset\.path: dataset 'none' cannot be"),
        ("dpo", {"algorithm.reference": {"uri": "nowhere/at/all"}}, r"algorithm\.reference: model folder"),
    ],
)
def test_bad_configuration_is_told_before_any_work(kind, change, message, tiny_model, preference_data):
    with pytest.raises(ConfigError, match=message):
        plan(kind, example(kind, tiny_model, preference_data, **change))


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "b"}, r"bad\.jsonl:1: chosen and rejected are the same"),
        ("ipo", {"prompt": "a", "chosen": "b", "rejected": ""}, r"bad\.jsonl:1: rejected is empty"),
        ("dpo", {"chosen": "b", "rejected": "c"}, r"bad\.jsonl:1 has no prompt; only a reward model"),
        ("rm", {"prompt": "a", "chosen": "b"}, r"bad\.jsonl:1: needs chosen and rejected, but has no rejected"),
        ("kto", {"prompt": "a", "completion": "b", "label": True}, "all 1 rows have label true"),
        ("kto", {"prompt": "a", "completion": "", "label": True}, r"bad\.jsonl:1: completion is empty"),
    ],
)
def test_bad_data_is_told_before_any_work(kind, row, message, tiny_model, preference_data, tmp_path):
    (tmp_path / "bad.jsonl").write_text(json.dumps(row) + "\n")
    config = example(kind, tiny_model, preference_data, **{"algorithm.dataset.path": "bad.jsonl"})
    with pytest.raises(ConfigError, match=message):
        plan(kind, config, tmp_path)


def test_a_policy_is_no_reward_model_and_an_expression_is_checked(tiny_model, sorting_task):
    overrides = {
        "algorithm.base_model.uri": str(tiny_model),
        "algorithm.prompts.path": str(sorting_task.prompts),
        "backend": {"kind": "transformers"},
    }
    ppo = PROJECT / "examples" / "ppo-tiny.toml"
    reward = {"kind": "model", "model": str(tiny_model)}
    config = load_config(ppo, TrainPPOConfig, {**overrides, "algorithm.reward": reward})
    with pytest.raises(ConfigError, match=r"algorithm\.reward: .* holds a Qwen2ForCausalLM of 2 labels, no reward"):
        plan_training(config, PROJECT)
    for expression, message in (("qality", "did you mean 'quality'"), ("quality +", "invalid syntax")):
        reward = {"kind": "expression", "expression": expression, "rewards": {"quality": {"kind": "exact_match"}}}
        with pytest.raises(ConfigError, match=message):
            load_config(ppo, TrainPPOConfig, {**overrides, "algorithm.reward": reward})


def test_every_preference_flow_has_its_schema():
    from rollout_core.config import json_schema

    schema = json_schema()
    assert {f"train-{kind}" for kind in KINDS} <= set(schema)
    assert schema["train-rm"]["title"] == TrainRMConfig.__name__
