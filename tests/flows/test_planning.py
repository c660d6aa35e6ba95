"""`rollout plan` walks through a flow: what it says is cached is what the run finds cached, and it changes nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import typing
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from blocks import ContentAddressedStorage
from flows.cli import app
from rollout_core.base.errors import ConfigError, Fatal, MissingObject, Recoverable
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.config import ModelSource, Run, parse_config
from rollout_core.config.kinds import CONFIG_KINDS
from rollout_core.config.runs import NightlyConfig
from rollout_core.inference.shards import import_shards, shards_of
from rollout_core.models import locating
from rollout_core.models.precision import stored_dtype
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import lineage_of
from rollout_core.objects.overlay import overlaid
from rollout_core.objects.records import EvalReport, Record, Scores
from rollout_core.plans.lock import PlanLock, planned_call, read_lock
from tasks.runtime.connections import result_storage
from tasks.runtime.held_run import HeldRun
from tasks.runtime.stage import Stage
from tests.conftest import PROJECT
from tests.models.gguf_files import make_model, write_model
from tests.models.test_adapters import make_adapter
from tests.plan.planning import TEMPLATE


class Trained(Record):
    """What a stage of these tests returns."""

    number: int


def prompts(count: int) -> str:
    return "".join(json.dumps({"prompt": f"sort {n} 1 =", "answer": f"1 {n}"}) + "\n" for n in range(count))


@pytest.fixture
def folder(tmp_path: Path, half_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.chdir(own)
    (own / "model").symlink_to(half_model)
    (own / "sft.jsonl").write_text(
        "".join(json.dumps({"prompt": "sort 2 1 =", "completion": " 1 2"}) + "\n" for _ in range(8))
    )
    (own / "prompts.jsonl").write_text(prompts(8))
    (own / "held-out.jsonl").write_text(prompts(4))
    return own


def nightly(**changes: Any) -> NightlyConfig:
    few = {"max_tokens": 16}
    document = {
        "num_threads": 1,
        "run": {"name": "own"},
        "model": {"uri": "model"},
        "backend": {"kind": "transformers"},
        "sft": {
            "dataset": {"path": "sft.jsonl"},
            "budget": {"max_steps": 2},
            "optimizer": {"lr": 1e-3},
            "sequence": {"max_length": 64},
        },
        "grpo": {
            "prompts": {"path": "prompts.jsonl"},
            "iterations": 2,
            "prompts_per_iteration": 2,
            "samples_per_prompt": 2,
            "sampling": few,
            "optimizer": {"lr": 1e-4},
        },
        # Rewards that differ: without them an update leaves the model as it is, and what follows is cached after all.
        "reward": {"kind": "expression", "expression": "num_characters / 10"},
        "evaluation": {"prompts": {"path": "held-out.jsonl"}, "sampling": {**few, "temperature": 0.0}},
        "cost": {"per_hour": 3600.0},
    }
    return parse_config(document, NightlyConfig, name="test", overrides=changes)


def files_below(folder: Path) -> dict[str, float]:
    return {str(file): file.stat().st_mtime for file in folder.rglob("*") if file.is_file()}


def test_a_plan_knows_what_a_run_will_find_cached(folder: Path, prefect_server: str, tmp_path: Path):
    from flows.nightly import nightly as flow
    from tasks.runtime.planning import plan_run

    before = plan_run("nightly", nightly())
    assert list(folder.glob("*/")) == [folder / "model"]
    assert not (tmp_path / "objects").exists()
    assert not (tmp_path / "rollout.db").exists()
    assert before.totals["cached"] == 0
    assert before.untimed
    assert before.price == 0

    result = flow(nightly())
    stages = [(row["stage"], row["label"]) for row in result["stages"]]
    assert [(call.stage, call.label) for call in before.calls] == stages  # the very calls, though nothing was known

    # What would be promoted is in its base's bfloat16, and is what was evaluated.
    filed = result_storage().objects()
    lineage = lineage_of(filed, result["model"])
    assert lineage is not None and lineage.stage == "round_weights"
    dtypes = [stored_dtype(filed, lineage.inputs[name]) for name in ("base", "model")]
    assert (stored_dtype(filed, result["model"]), dtypes) == ("bfloat16", ["bfloat16", "float32"])
    page = (Path(result["report"]) / "index.html").read_text()
    first, *others = re.findall(r"held-out reward ([\w ]+)<br>(\w+ weights), computed in float32", page)
    assert [first, *others] == [
        ("before", "bfloat16 weights"),
        ("after SFT", "float32 weights"),
        ("after GRPO", "bfloat16 weights"),
    ]
    assert "<li>precision: before bfloat16 weights, computed in float32; after bfloat16 weights, computed" in page

    kept = files_below(tmp_path)
    again = plan_run("nightly", nightly())
    assert files_below(tmp_path) == kept
    assert again.totals["computed"] == 0
    assert again.totals["cached"] == before.totals["computed"]
    assert again.seconds == 0

    # Another learning rate of GRPO: all before its first update is cached, and what follows is not known by its ids.
    changed = nightly(**{"grpo.optimizer.lr": 1e-3})
    planned = plan_run("nightly", changed)
    assert planned.untimed == []
    assert planned.price == pytest.approx(planned.seconds)
    differing = {key for stage in planned.stages if stage.time is not None for key in stage.time.differing}
    assert "grpo.optimizer.lr" in differing
    found = {(row["stage"], row["label"]): row["state"] for row in flow(changed)["stages"]}
    states = {"cached": "cached", "computed": "completed", "checked": "checked"}
    assert {(call.stage, call.label): states[call.state] for call in planned.calls}.items() <= found.items()
    assert found[("grpo_update", "iteration 1")] == "completed"
    assert found[("batch_inference", "iteration 1")] == "cached"


@pytest.mark.parametrize("kind", [kind for kind in CONFIG_KINDS if kind.startswith("train-") and kind != "train-agent"])
def test_every_kind_of_training_is_planned(kind: str, folder: Path, tmp_path: Path):
    from tasks.runtime.planning import plan_run

    algorithm: dict[str, Any] = {
        "base_model": {"uri": "model"},
        "optimizer": {"lr": 1e-3},
        "kind": kind.removeprefix("train-"),
    }
    if kind in ("train-ppo", "train-grpo"):
        algorithm |= {"prompts": {"path": "prompts.jsonl"}, "iterations": 2, "sampling": {"max_tokens": 4}}
    else:
        keys = {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}
        wanted = {"train-sft": ("prompt", "completion"), "train-kto": ("prompt", "completion", "label")}
        own = wanted.get(kind, ("prompt", "chosen", "rejected"))
        documents = [{key: {**keys, "label": number > 1}[key] for key in own} for number in range(4)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
        algorithm |= {"dataset": {"path": "rows.jsonl"}, "sequence": {"max_length": 64}}
    document: dict[str, Any] = {"algorithm": algorithm}
    if kind in ("train-ppo", "train-grpo"):
        document["backend"] = {"kind": "transformers"}
    found = plan_run(kind, parse_config(document, CONFIG_KINDS[kind], name="test"))
    update = next(call for call in found.calls if call.stage.endswith("_update"))
    assert update.state == "computed"
    assert found.remarks == ()
    assert not (tmp_path / "objects").exists()


@pytest.mark.parametrize("example", ["train-lookup", "online-lookup"])
def test_runs_of_agents_are_planned_as_their_examples_say(example: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    keys, key_of = set(), Stage.key

    def noted(stage: Stage[Any, Any], inputs: dict[str, Any]) -> Any:
        keys.add((stage.name, inputs.get("limit"), key := key_of(stage, inputs)))
        return key

    monkeypatch.setattr(Stage, "key", noted)
    (folder / "examples").symlink_to(PROJECT / "examples")
    (folder / "tasks.jsonl").write_text('{"question": "?", "answer": "a", "records": {}}\n' * 20)
    shutil.copytree(folder / "model", folder / "chat-model")
    (folder / "chat-model" / "chat_template.jinja").write_text(TEMPLATE)
    settings = json.loads((folder / "chat-model" / "config.json").read_text())
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}  # of the same matrices: vLLM takes no smaller ones
    (folder / "chat-model" / "config.json").write_text(json.dumps(settings | heads))
    changes = ["algorithm.base_model.uri=chat-model", "backend.max_model_len=64"]
    if example == "train-lookup":
        changes += ["algorithm.prompts.path=tasks.jsonl", "evaluation.tasks.path=tasks.jsonl", "algorithm.iterations=2"]
    options = [option for change in changes for option in ("--set", change)]
    asked = ["plan", "--config", f"examples/agents/{example}.toml", *options]
    done = CliRunner().invoke(app, [*asked, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    shown = CliRunner().invoke(app, asked).stdout
    calls = Counter(call["stage"] for call in found["calls"] if call["state"] == "to compute")
    if example == "train-lookup":
        assert calls == dict.fromkeys(("enqueue_tasks", "run_agents"), 4) | dict.fromkeys(
            ("collect_samples", "grpo_update", "snapshot"), 2
        ) | {"round_weights": 1}
        assert not found["stages_follow"] and not found["not_known"]
        CliRunner().invoke(app, [*asked, "--set", "backend.max_model_len=65", "--json"])
        made = {limit: {key for name, of, key in keys if name == "enqueue_tasks" and of == limit} for limit in (64, 65)}
        assert [len(found) for found in made.values()] == [4, 4]
        assert made[64].isdisjoint(made[65]), "a call that is too long for one is answered with the other"
    else:
        assert not calls and found["stages_follow"]
        assert "time:        not known: later stages" in shown and "what live agents do" in shown


def grpo(**changes: Any) -> Any:
    document = {
        "num_threads": 1,
        "run": {"name": "own"},
        "backend": {"kind": "transformers"},
        "algorithm": {
            "kind": "grpo",
            "base_model": {"uri": "model"},
            "prompts": {"path": "prompts.jsonl"},
            "reward": {"kind": "function", "callable": "reward.py:reward"},
            "iterations": 2,
            "prompts_per_iteration": 2,
            "samples_per_prompt": 2,
            "sampling": {"max_tokens": 4},
            "optimizer": {"lr": 1e-4},
        },
    }
    return parse_config(document, CONFIG_KINDS["train-grpo"], name="test", overrides=changes)


@pytest.fixture
def with_reward(folder: Path) -> Path:
    (folder / "reward.py").write_text("def reward(sample):\n    return len(sample.completion)\n")
    return folder


def test_a_run_is_held_to_the_plan_that_was_locked(
    with_reward: Path, prefect_server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from flows.train import train_grpo
    from tasks.runtime.planning import lock_plan

    planned = lock_plan("train-grpo", grpo())
    assert not (tmp_path / "objects").exists()
    planned.write(with_reward / "plan.json")
    assert read_lock(with_reward / "plan.json") == planned
    assert [(item.stage, len(item.ids)) for item in planned.inputs] == [("import_model", 1), ("import_prompts", 1)]
    updates = [call for call in planned.calls if call.stage == "grpo_update"]
    assert [call.label for call in updates] == ["iteration 1", "iteration 2"]
    assert "model" in updates[1].results and "model" not in updates[0].results  # of iteration 1, and so not known

    held = {"run.locked": "plan.json"}
    done = train_grpo(grpo(**held, **{"run.tags": ["other"]}))
    assert f"held to plan {planned.id} of" in caplog.text
    assert "does not have" not in caplog.text
    assert lock_plan("train-grpo", grpo()) == planned, "a plan's id changes with the progress of its runs"
    assert train_grpo(grpo(**held))["model"] == done["model"]

    def refused(**changes: Any) -> str:
        known = files_below(tmp_path / "objects")
        with pytest.raises(ConfigError) as caught:
            train_grpo(grpo(**held, **changes))
        new = {Path(name).parent.name for name in files_below(tmp_path / "objects").keys() - known.keys()}
        assert new <= {"prompt-lengths"}, "nothing but a note of the plan is written"
        return str(caught.value)

    assert "settings.algorithm.optimizer.lr: planned 0.0001, now 0.01" in refused(**{"algorithm.optimizer.lr": 0.01})
    assert "settings.algorithm.guards.max_mean_length: planned null, now 9.0" in refused(
        **{"algorithm.guards.max_mean_length": 9.0}
    ), "what decides in the flow alone, and is in no stage's key"
    assert "settings.algorithm.iterations: planned 2, now 3" in refused(**{"algorithm.iterations": 3})
    (with_reward / "reward.py").write_text("def reward(sample):\n    return -len(sample.completion)\n")
    assert "score_rewards iteration 1: " in refused()
    (with_reward / "reward.py").write_text("def reward(sample):\n    return len(sample.completion)\n")
    (with_reward / "prompts.jsonl").write_text(prompts(9))
    had, has = planned.inputs[1].ids[0][:8], lock_plan("train-grpo", grpo()).inputs[1].ids[0][:8]
    assert f"import_prompts: planned content {had}, now {has}" in refused()
    (with_reward / "prompts.jsonl").write_text(prompts(8))
    changed = planned.model_copy(update={"software": {**planned.software, "torch": "1.0"}})
    changed.write(with_reward / "plan.json")
    assert 'torch: planned "1.0", now' in refused()


@pytest.mark.parametrize("edited", ["prompts.jsonl", "reward.py"])
def test_a_file_that_is_edited_once_the_plan_was_compared_is_refused(
    edited: str, with_reward: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
):
    from flows.train import train_grpo
    from tasks.runtime.planning import lock_plan

    lock_plan("train-grpo", grpo()).write(with_reward / "plan.json")
    check = HeldRun.check

    def then_edit(held: HeldRun, now: PlanLock) -> None:
        check(held, now)
        text = prompts(9) if edited == "prompts.jsonl" else "def reward(sample):\n    return 1.0\n"
        (with_reward / edited).write_text(text)

    monkeypatch.setattr(HeldRun, "check", then_edit)
    stage = {"prompts.jsonl": "import_prompts", "reward.py": "score_rewards iteration 1"}[edited]
    with pytest.raises(ConfigError, match=rf"{stage}: the run is held to plan .* and differs from it"):
        train_grpo(grpo(**{"run.locked": "plan.json"}))


def test_the_order_of_a_plan_does_not_depend_on_what_is_drawn_ahead(with_reward: Path):
    from tasks.runtime.planning import lock_plan

    ahead = grpo(**{"algorithm.async_depth": 1, "algorithm.iterations": 4})
    plans = [lock_plan("train-grpo", ahead) for _ in range(3)]
    assert plans[0].id == plans[1].id == plans[2].id
    drawn = [call for call in plans[0].calls if call.stage == "enqueue_prompts"]
    assert ["model" in call.results for call in drawn] == [False, False, True, True]


def test_a_batch_is_held_to_its_plan(with_reward: Path, prefect_server: str, caplog: pytest.LogCaptureFixture):
    from flows.batch import batch_inference
    from tasks.runtime.planning import lock_plan

    document = {
        "model": {"uri": "model"},
        "sampling": {"max_tokens": 4},
        "input": {"glob": "prompts.jsonl"},
        "output": {"dir": "out"},
        "backend": {"kind": "transformers", "num_threads": 1},
    }

    def batch(**changes: Any) -> Any:
        return parse_config(document, CONFIG_KINDS["infer-batch"], name="test", overrides=changes)

    lock_plan("infer-batch", batch()).write(with_reward / "plan.json")
    held = {"run.locked": "plan.json"}
    assert batch_inference(batch(**held))["num_rows"] == 8
    assert "is held to plan" in caplog.text and "does not have" not in caplog.text
    with pytest.raises(ConfigError, match=r"settings\.sampling\.max_tokens: planned 4, now 5"):
        batch_inference(batch(**held, **{"sampling.max_tokens": 5, "output.dir": "elsewhere"}))
    assert not (with_reward / "elsewhere").exists()


def test_a_plan_that_a_file_names_is_written_and_compared(with_reward: Path):
    (with_reward / "batch.toml").write_text(
        '[run]\nlocked = "plan.json"\n[model]\nuri = "model"\n[sampling]\nmax_tokens = 4\n'
        '[input]\nglob = "prompts.jsonl"\n[output]\ndir = "out"\n[backend]\nkind = "transformers"\n'
    )
    command = ["plan", "--config", "batch.toml"]
    missing = CliRunner().invoke(app, command)
    assert missing.exit_code == 2 and "plan.json: the plan cannot be read" in missing.stderr
    assert CliRunner().invoke(app, [*command, "--lock", "plan.json"]).exit_code == 0
    assert CliRunner().invoke(app, command).exit_code == 0
    other = CliRunner().invoke(app, [*command, "--set", "sampling.max_tokens=5"])
    assert other.exit_code == 2 and "settings.sampling.max_tokens: planned 4, now 5" in other.stderr


def test_plans_are_locked_and_compared_by_the_command(with_reward: Path):
    (with_reward / "batch.toml").write_text(
        '[model]\nuri = "model"\n[sampling]\nmax_tokens = 4\n[input]\nglob = "prompts.jsonl"\n[output]\ndir = "out"\n'
        '[backend]\nkind = "transformers"\n'
    )
    options = ["--config", "batch.toml"]
    done = CliRunner().invoke(app, ["plan", *options, "--lock", "plan.json", "--json"])
    assert done.exit_code == 0, done.output
    lock = read_lock(with_reward / "plan.json")
    assert json.loads(done.stdout)["plan"] == lock.id
    same = CliRunner().invoke(app, ["plan", *options, "--locked", "plan.json"])
    assert same.exit_code == 0
    assert f"plan id:     {lock.id}" in same.stdout
    other = CliRunner().invoke(app, ["plan", *options, "--locked", "plan.json", "--set", "sampling.max_tokens=5"])
    assert other.exit_code == 2
    assert other.stderr.strip() == "rollout: plan.json: settings.sampling.max_tokens: planned 4, now 5"
    command = ["infer", "batch", *options, "--locked", "plan.json"]
    refused = CliRunner().invoke(app, [*command, "--dry-run"])
    assert refused.exit_code == 2
    assert "use `rollout plan --config FILE --locked plan.json`" in refused.stderr
    away = CliRunner().invoke(app, [*command[:-1], "none.json"])
    assert away.exit_code == 2
    assert "none.json: the plan cannot be read: No such file" in away.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:50], "got no JSON"),
        (lambda text: "[]", r"got format \[\]"),
        (lambda text: text.replace("plan/1", "plan/2", 1), "got format 'rollout-plan/2'"),
        (lambda text: text.replace('"is_open": false', '"is_open": true'), "its id is"),
        (lambda text: text.replace('"is_open": false', '"is_open": 7'), "is_open: "),
        (lambda text: text.replace('"calls":', '"call":'), "calls: Field required"),
    ],
)
def test_a_plan_that_was_edited_or_is_none_is_refused(change: Callable[[str], str], message: str, tmp_path: Path):
    call = planned_call("update", 1, "", {"lr": 0.1, "long": "x" * 200, "model": None}, ["model"])
    lock = PlanLock(software={"python": "3"}, settings={"a": 1}, inputs=(), calls=(call,), is_open=False)
    lock.write(tmp_path / "plan.json")
    assert read_lock(tmp_path / "plan.json") == lock
    (tmp_path / "plan.json").write_text(change((tmp_path / "plan.json").read_text()))
    with pytest.raises(ConfigError, match=message):
        read_lock(tmp_path / "plan.json")


def test_what_is_downloaded_or_merged_by_the_run_cannot_be_locked_before(folder: Path):
    from tasks.runtime.planning import lock_plan

    make_adapter(folder / "model", folder / "adapter", task_type="CAUSAL_LM", r=2)
    rows = {"dataset": {"path": "sft.jsonl"}, "sequence": {"max_length": 64}, "optimizer": {"lr": 1e-3}}
    document = {"algorithm": {"kind": "sft", "base_model": {"uri": "model", "adapter": "adapter"}, **rows}}
    config = parse_config(document, CONFIG_KINDS["train-sft"], name="test")
    with pytest.raises(ConfigError, match=r"cannot be locked: model: the adapter adapter is merged .* let a run"):
        lock_plan("train-sft", config)


def test_a_placed_run_is_planned_by_what_its_workers_offer(folder: Path):
    from distributed import LocalCluster

    from tasks.runtime.planning import plan_run

    options: dict[str, Any] = {
        "dashboard_address": None,
        "resources": {"GPU": 1},
        "protocol": "tcp://",
        "host": "127.0.0.1",
    }
    with LocalCluster(processes=False, n_workers=1, **options) as cluster:
        placement = {"dask": {"address": cluster.scheduler_address}, "generation": {"resources": {"GPU": 1}}}
        found = plan_run("nightly", nightly(placement=placement))
        assert "1 of 1 workers" in str(found.facts["placement"])
        assert {"batch_inference", "evaluate", "grpo_update"} <= {stage.stage for stage in found.stages}
        with pytest.raises(ConfigError, match=r"none of the 1 workers of .* offers LEARNER=1; they offer GPU=1"):
            plan_run("nightly", nightly(placement={**placement, "learning": {"resources": {"LEARNER": 1}}}))


def test_the_command_says_what_is_wrong_and_tells_kinds_apart(folder: Path):
    (folder / "batch.toml").write_text(
        '[model]\nuri = "model"\n[sampling]\nmax_tokens = 4\n[input]\nglob = "prompts.jsonl"\n[output]\ndir = "out"\n'
        '[backend]\nkind = "transformers"\n'
    )
    done = CliRunner().invoke(app, ["plan", "--config", "batch.toml", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["kind"] == "infer-batch"
    assert document["counts"]["to compute"] == 1
    assert {call["stage"] for call in document["calls"]} == {"import_model", "import_prompts", "infer_shard"}
    assert not (folder / "out").exists()
    wrong = CliRunner().invoke(app, ["plan", "--config", "batch.toml", "--set", "sampling.max_token=3"])
    assert wrong.exit_code == 2
    assert "max_token" in wrong.stderr
    missing = CliRunner().invoke(app, ["plan", "--config", "batch.toml", "--set", "input.glob=none.jsonl"])
    assert missing.exit_code == 2
    assert "none.jsonl" in missing.stderr


def test_a_copy_takes_what_is_written_and_the_store_stays_as_it_is(tmp_path: Path):
    store = ObjectStore.from_url(f"file://{tmp_path / 'store'}")
    old, kept = store.put_bytes(b"old"), store.put_bytes(b"kept")
    store.set_ref("a/b", old)
    before = files_below(tmp_path / "store")
    copy = overlaid(store, tmp_path / "copy")
    new = copy.put_bytes(b"new")
    store_large = [os.urandom(2**19) for _ in range(12)]
    large = copy.put_stream(iter(store_large))
    copy.set_ref("a/b", new)
    copy.set_ref("a/c", old)
    copy.delete(kept)
    assert next(iter(copy.stream(large))) == b"".join(store_large)[: 2**20 - 1], "the beginning is kept"
    with pytest.raises(MissingObject):
        copy.get_bytes(large)
    assert copy.get_bytes(new) == b"new"
    assert copy.get_bytes(old) == b"old"
    assert copy.get_ref("a/b") == new
    assert copy.ref_names("a") == ["a/b", "a/c"]
    assert copy.exists(large)
    assert copy.size(large) == 6 * 2**20
    assert not copy.exists(kept)
    assert sum(1 for _ in copy.blobs()) == 3
    copy.delete_ref("a/b")
    assert copy.get_ref("a/b") is None
    assert store.get_ref("a/b") == old
    assert not store.exists(ContentId(new))
    assert files_below(tmp_path / "store") == before


def test_an_input_of_any_size_takes_little_room_and_its_index_stays_readable(tmp_path: Path):
    from rollout_core.data.datasets import PromptRow

    store = ObjectStore.from_url(f"file://{tmp_path / 'store'}")
    copy = overlaid(store, tmp_path / "copy", kept_bytes=20_000)
    rows = (PromptRow(prompt=f"{number} {'x' * 1000}") for number in range(100))
    prompts = import_shards(copy, rows, shard_size=2)
    shards = [shard for shard, _ in shards_of(copy, prompts)]
    assert len(set(shards)) == 50
    assert all(copy.exists(shard) and copy.size(shard) > 2000 for shard in shards)
    assert copy.get_bytes(shards[0]) == b"".join(copy.stream(shards[0]))
    assert copy.get_bytes(shards[-1]) == b"".join(copy.stream(shards[-1]))  # from memory
    with pytest.raises(MissingObject):
        copy.get_bytes(shards[20])
    assert sum(file.stat().st_size for file in (tmp_path / "copy").rglob("*") if file.is_file()) <= 20_000
    assert not (tmp_path / "store").exists()
    copy.delete(shards[-1])
    assert not copy.exists(shards[-1])


def test_a_plan_merges_no_adapter_and_knows_one_that_was_merged(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from tasks.runtime.planning import plan_run

    make_adapter(folder / "model", folder / "adapter", task_type="CAUSAL_LM", r=2048)
    assert (folder / "adapter" / "adapter_model.safetensors").stat().st_size > 4 * 2**20
    source = {"uri": "model", "adapter": "adapter"}
    rows = {"dataset": {"path": "sft.jsonl"}, "sequence": {"max_length": 64}, "optimizer": {"lr": 1e-3}}
    config = parse_config(
        {"algorithm": {"kind": "sft", "base_model": source, **rows}}, CONFIG_KINDS["train-sft"], name="test"
    )

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a plan merges nothing")

    with monkeypatch.context() as patched:
        patched.setattr(locating, "_merge", refuse)
        found = plan_run("train-sft", config)
    assert not (tmp_path / "objects").exists()
    assert [call.stage for call in found.calls if call.state == "computed"][:1] == ["sft_update"]
    assert found.remarks == (
        "model: the adapter adapter is merged in when the run starts; what is made of it counts as not cached",
    )
    objects = ObjectStore.from_url(f"file://{tmp_path / 'objects'}")
    locating.import_model(ModelSource(**source), objects, folder)
    monkeypatch.setattr(locating, "_merge", refuse)
    assert plan_run("train-sft", config).remarks == ()


def test_a_gguf_file_is_planned_without_being_converted_and_the_run_converts_it_once(
    folder: Path, prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from flows.nightly import nightly as flow
    from tasks.runtime.planning import plan_run

    write_model(folder / "tiny.gguf", "qwen2", make_model("qwen2"))
    config = nightly(**{"model.uri": "tiny.gguf"})
    before = plan_run("nightly", config)
    assert not (tmp_path / "objects").exists()
    said = "tiny.gguf: converted from GGUF when the run starts; what is made of it counts as not cached"
    assert said in before.remarks and before.totals["computed"]
    result = flow(config)
    assert [(call.stage, call.label) for call in before.calls] == [(r["stage"], r["label"]) for r in result["stages"]]

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("it was converted before")

    monkeypatch.setattr(locating, "import_gguf", refuse)
    again = plan_run("nightly", config)
    assert again.totals["computed"] == 0 and said not in again.remarks


def test_every_kind_of_run_has_its_flow():
    from tasks.runtime.planning import FLOWS, flow_of

    assert FLOWS.keys() == CONFIG_KINDS.keys()
    for kind, model in CONFIG_KINDS.items():
        flow = flow_of(kind)
        assert flow.name == ("batch-inference" if kind == "infer-batch" else kind)
        assert typing.get_type_hints(flow.fn)["config"] is model


def test_zeros_of_what_is_not_there_are_no_evidence_of_hacking(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from flows import evaluation
    from tasks.runtime.dry_run import DryRun, running_dry

    config = nightly(**{"grpo.guards": {"reward_hacking": {"prompts": {"path": "held-out.jsonl"}, "evaluations": 1}}})
    settings, source = config.grpo, hash_bytes(b"reward")
    assert settings is not None
    dry_run = DryRun(ContentAddressedStorage.over(ObjectStore.from_url("memory://hacking")))
    report = EvalReport(
        model=source, completions=source, samples=source, scores=source, num_samples=4, mean_reward=0.8, num_tokens=9
    )
    reports = iter([report, dry_run.placeholder(EvalReport), report.model_copy(update={"mean_reward": 0.5})])
    monkeypatch.setattr(evaluation, "evaluate", lambda *arguments, **options: next(reports))

    def look(number: int, mean: float) -> None:
        guard.look(number, source, Scores(scores=source, completions=source, num_samples=4, mean=mean, std=0.1), mean)

    with running_dry(dry_run):
        guard = evaluation.HackingGuard(settings, config.backend, evaluation.Judge(config.reward, source))
        look(0, 0.1)
        look(1, 0.2)  # whose held-out reward, a stand-in's, is 0
        with pytest.raises(Fatal, match="reward_hacking"):
            look(2, 0.3)


def away_once(calls: list[str], name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """``answer``, but that the first call finds the database away."""

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if calls.count(name) == 1:
            raise Recoverable("the database is away")
        return answer(*arguments)

    return call


def refuse(*arguments: Any) -> None:
    raise ConfigError("no such model")


def test_what_a_run_reads_before_its_stages_may_be_away_for_a_moment(monkeypatch: pytest.MonkeyPatch):
    from tasks.runtime.flow_run import pipeline

    calls: list[str] = []
    monkeypatch.setattr("tasks.runtime.stage.RETRY_DELAYS_SECONDS", [0.0])
    whole = away_once(calls, "with_whole_ids", lambda config, *others: config)
    monkeypatch.setattr("tasks.runtime.flow_run.with_whole_ids", whole)

    @pipeline(away_once(calls, "plan", refuse), closes=(lambda: calls.append("closed"),))
    def body(config: Run, journal: Any) -> None:
        calls.append("body")

    with pytest.raises(ConfigError, match="no such model"):
        body(Run())
    assert calls == ["with_whole_ids"] * 2 + ["plan"] * 2


@pytest.mark.parametrize("kind", CONFIG_KINDS)
def test_each_kind_of_run_reads_again_what_was_away_for_a_moment(monkeypatch: pytest.MonkeyPatch, kind: str):
    from tasks.runtime.planning import flow_of

    calls: list[str] = []
    monkeypatch.setattr("tasks.runtime.stage.RETRY_DELAYS_SECONDS", [0.0])
    monkeypatch.setattr("tasks.runtime.flow_run.with_whole_ids", away_once(calls, "with_whole_ids", refuse))
    with pytest.raises(ConfigError, match="no such model"):
        flow_of(kind).fn(SimpleNamespace(max_hours=None, environment=None))
    assert calls == ["with_whole_ids"] * 2


def test_what_a_process_kept_for_a_run_is_closed_in_order_whatever_comes_of_it(monkeypatch: pytest.MonkeyPatch):
    from tasks.runtime.flow_run import pipeline

    calls: list[str] = []

    def fails() -> None:
        calls.append("first")
        raise RuntimeError("cannot be closed")

    @pipeline(None, closes=(fails, lambda: calls.append("second")))
    def body(config: Run, journal: Any) -> None:
        raise ValueError("the body failed")

    monkeypatch.setattr("tasks.runtime.flow_run.with_whole_ids", lambda config, *others: config)
    monkeypatch.setattr("tasks.runtime.flow_run.recompute_missing", lambda body, config: body(None))
    with pytest.raises(RuntimeError, match="cannot be closed") as error:
        body(Run())
    assert calls == ["first", "second"]
    assert isinstance(error.value.__context__, ValueError)


def test_an_update_whose_snapshot_has_no_record_is_to_be_computed(tmp_path: Path):
    from rollout_core.objects import SnapshotStore
    from rollout_core.objects.snapshots import progress_ref
    from tasks.runtime.dry_run import DryRun, running_dry
    from tasks.runtime.stage import stage

    @stage(version=1)
    def train_some(number: int) -> Trained:
        """Never called."""
        raise AssertionError

    objects = ObjectStore.from_url(f"file://{tmp_path / 'objects'}")
    state = tmp_path / "state"
    state.mkdir()
    (state / "weights").write_bytes(b"1")
    saved = SnapshotStore(objects).save(state, run_id="one", step=7, algorithm="sft", meta={})
    dry_run = DryRun(ContentAddressedStorage.over(overlaid(objects, tmp_path / "copy")))
    with running_dry(dry_run):
        objects.set_ref(progress_ref(train_some.key({"number": 1})), saved.id)
        train_some(1)
        objects.delete_ref(saved.ref)
        train_some(1)
    assert [(call.state, call.step) for call in dry_run.calls] == [("continued", 7), ("computed", None)]
