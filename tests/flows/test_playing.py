"""Training in an environment: episodes are played, rewarded and learned from."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sqlite3
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.ids import ContentId
from rollout_core.config import (
    EvalConfig,
    InferBatchConfig,
    NightlyConfig,
    TrainGRPOConfig,
    TrainPPOConfig,
    TrainSFTConfig,
    load_config,
    parse_config,
)
from rollout_core.environments.memory import read_memory
from rollout_core.objects import ObjectStore, SnapshotStore
from rollout_core.objects.lineage import all_lineage
from rollout_core.plans.learner_plan import plan_training
from rollout_core.runs.evaluations import evaluated_models
from rollout_core.runs.run_records import RunRecords
from rollout_core.store.reachable import plain_connections
from tests.conftest import PROJECT
from tests.flows.conftest import objects, write_toml
from tests.flows.kills import attempts_after_success
from tests.store.patience import wait_until

pytestmark = pytest.mark.server

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SAMPLING = {"temperature": 1.0, "max_tokens": 8, "stop_token_ids": [*range(130, 262)]}
"""A model of random weights ends hardly any turn by itself."""
ENVIRONMENT = '''
import hashlib, json, os, time
from rollout_core.environments import Done


def fail_once(folder, turn):
    """In a fifth of the turns, the first time that it comes to them."""
    digest = hashlib.sha256(turn.encode()).hexdigest()
    mark = os.path.join(folder, digest)
    if int(digest[:4], 16) % 5 or os.path.exists(mark):
        return
    open(mark, "w").close()
    match int(digest[4:8], 16) % 4:
        case 0:
            os._exit(1)
        case 1:
            raise KeyError(turn)
        case 2:
            os.kill(os.getpid(), 11)
        case 3:
            time.sleep(600)


class Env:
    """Wants many different characters, and says so twice."""

    def __init__(self, most=2):
        self.most, self.said = most, ""

    def reset(self, row, seed):
        with open(os.environ["EPISODES"], "a") as played:
            played.write(json.dumps([row, seed]) + "\\n")
        self.row = row
        return f"sort {row['digits']} ="

    def step(self, message):
        if faults := os.environ.get("FAULTS"):
            fail_once(faults, f"{self.row['digits']} {self.most} {message['content']}")
        self.said += message["content"]
        self.most -= 1
        return "again" if self.most else Done()

    async def reward(self):
        return {"variety": len(set(self.said)) / 20, "length": -len(self.said) / 1000}
'''


@pytest.fixture
def work(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an environment, its rows, and a model that has a chat template."""
    shutil.copytree(tiny_model, tmp_path / "model")
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    rows = [{"digits": f"{number} 1"} for number in range(2, 8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EPISODES", str(tmp_path / "episodes.jsonl"))
    return tmp_path


def document(**environment: Any) -> dict[str, Any]:
    return {
        "num_threads": 1,
        "run": {"name": "playing"},
        "backend": {"kind": "transformers"},
        "environment": {"path": "env.py:Env", "max_turns": 4, **environment},
        "algorithm": {
            "kind": "grpo",
            "base_model": {"uri": "model"},
            "prompts": {"path": "rows.jsonl"},
            "iterations": 2,
            "prompts_per_iteration": 3,
            "samples_per_prompt": 4,
            "minibatch_size": 4,
            "sampling": SAMPLING,
            "optimizer": {"lr": 1e-3},
        },
    }


def episodes(work: Path) -> list[Any]:
    file = work / "episodes.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_policy_learns_in_an_environment_and_again_from_the_cache(prefect_server: str, work: Path):
    from flows.train import train_grpo

    config = parse_config(document(), TrainGRPOConfig)
    first = train_grpo(config)
    played = episodes(work)
    assert len(played) == 2 * 3 * 4
    assert len(first["rewards"]) == 2
    again = train_grpo(config)
    assert (again["model"], again["rewards"]) == (first["model"], first["rewards"])
    assert episodes(work) == played


TURN_REWARD = """
    def turn_reward(self):
        return len(set(self.said)) / 40 - 0.1
"""


@pytest.mark.parametrize(("kind", "form"), [("grpo", "trajectory"), ("ppo", "transition")])
def test_a_policy_learns_from_what_its_turns_earn(prefect_server: str, work: Path, kind: str, form: str):
    from flows.train import train_grpo, train_ppo

    (work / "env.py").write_text(ENVIRONMENT + TURN_REWARD)
    tables = document(form=form)
    tables["algorithm"] |= {"kind": kind, "iterations": 1, "credit": "turn"}

    def train() -> dict[str, Any]:
        if kind == "grpo":
            return train_grpo(parse_config(tables, TrainGRPOConfig))
        return train_ppo(parse_config(tables, TrainPPOConfig))

    by_turn = train()
    played = episodes(work)
    assert len(played) == 3 * 4
    del tables["algorithm"]["credit"]
    by_outcome = train()
    # The same episodes, and another model.
    assert episodes(work) == played and by_turn["rewards"] == by_outcome["rewards"]
    assert by_turn["model"] != by_outcome["model"]


def test_a_model_is_fine_tuned_on_the_best_episodes_of_an_earlier_run(prefect_server: str, work: Path):
    from flows.train import train_grpo, train_sft

    played = document()
    played["algorithm"]["iterations"] = 1
    tables: dict[str, Any] = {
        "num_threads": 1,
        "algorithm": {
            "kind": "sft",
            "base_model": {"uri": "model"},
            "dataset": {"kind": "episodes", "run": "playing", "best": 0.5},
            "minibatch_size": 1,
            "budget": {"max_steps": 1},
            "optimizer": {"lr": 1e-3},
            "sequence": {"max_length": 64},
        },
    }
    config = parse_config(tables, TrainSFTConfig)
    with pytest.raises(ConfigError, match=r"algorithm.dataset.run: no run is recorded under 'playing'"):
        train_sft(config)
    train_grpo(parse_config(played, TrainGRPOConfig))
    tuned = train_sft(config)
    assert train_sft(config)["model"] == tuned["model"]
    facts = plan_training(config, Path.cwd(), plain_connections())
    assert "episodes are rows" in str(facts) and "not among the best" in str(facts)
    derived = [each for each in all_lineage(objects()) if each.stage == "read_episodes"]
    assert len(derived) == 1
    [rows] = derived[0].outputs
    roles = [[each["role"] for each in json.loads(line)["messages"]] for line in objects().get_bytes(rows).splitlines()]
    assert roles and all(said == ["user", "assistant", "user", "assistant"] for said in roles)


def test_a_locked_plan_is_the_same_in_another_folder(work: Path, monkeypatch: pytest.MonkeyPatch):
    from tasks.runtime.planning import lock_plan

    here = lock_plan("train-grpo", parse_config(document(), TrainGRPOConfig))
    shutil.copytree(work, work.parent / "elsewhere")
    monkeypatch.chdir(work.parent / "elsewhere")
    assert lock_plan("train-grpo", parse_config(document(), TrainGRPOConfig)) == here
    Path("env.py").write_text(ENVIRONMENT + "# edited")
    assert lock_plan("train-grpo", parse_config(document(), TrainGRPOConfig)).inputs != here.inputs


def batch(work: Path, **changes: Any) -> InferBatchConfig:
    tables = {
        "model": {"uri": "model"},
        "backend": {"kind": "transformers", "num_threads": 1},
        "sampling": {**SAMPLING, "n": 2},
        "input": {"glob": "rows.jsonl"},
        "output": {"dir": "out", "token_ids": True},
        "environment": {"path": "env.py:Env", "max_turns": 4, "max_attempts": 2},
    }
    return parse_config(tables, InferBatchConfig, overrides=changes)


def test_a_batch_plays_episodes_and_writes_what_was_said(prefect_server: str, work: Path):
    from flows.batch import batch_inference
    from tasks.runtime.planning import plan_run

    broken = ENVIRONMENT.replace("self.row = row", "self.row = row; 1 / (row['digits'] != '7 1')")
    (work / "env.py").write_text(broken)
    planned = plan_run("infer-batch", batch(work))
    assert planned.facts["inputs"] == 6 and not (work / "out").exists()
    assert [call.stage for call in planned.calls][-2:] == ["enqueue_episodes", "play"]
    done = batch_inference(batch(work, **{"failures.max_share": 0.2}))
    assert (done["num_rows"], done["num_failed"], done["what"]) == (12, 2, "episodes")
    rows = [json.loads(line) for line in (work / "out" / "episodes.jsonl").read_text().splitlines()]
    assert [(row["digits"], row["index"]) for row in rows] == [
        (f"{number} 1", index) for number in range(2, 8) for index in range(2)
    ]
    for row in rows[:10]:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant", "user", "assistant"]
        said = "".join(message["content"] for message in row["messages"] if message["role"] == "assistant")
        assert row["reward"] == pytest.approx(len(set(said)) / 20 - len(said) / 1000)
        assert row["turns"] == len(row["token_ids"]) == 2
        assert row["num_tokens"] == sum(map(len, row["token_ids"]))
    for row in rows[10:]:
        assert (row["reward"], row["finish_reason"]) == (None, "error")
        assert row["error"].startswith("reset raised ZeroDivisionError")

    played, written = episodes(work), (work / "out" / "episodes.jsonl").stat().st_mtime_ns
    assert len(played) == 10 + 2 * 2
    assert batch_inference(batch(work, **{"failures.max_share": 0.2}))["run_id"] == done["run_id"]
    assert episodes(work) == played
    assert (work / "out" / "episodes.jsonl").stat().st_mtime_ns == written
    with pytest.raises(Fatal, match=r"2 of 12 episodes failed, more than failures.max_share = 0.1 .*ZeroDiv"):
        batch_inference(batch(work, **{"output.dir": "elsewhere"}))
    assert not (work / "elsewhere" / "episodes.jsonl").exists()
    (work / "env.py").write_text(ENVIRONMENT)  # other code is other episodes
    assert batch_inference(batch(work))["num_failed"] == 0
    assert len(episodes(work)) == len(played) + 12


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"workers.count": 2}, "workers: one engine plays all episodes"),
        ({"output.format": "parquet"}, 'output.format: episodes are written as "jsonl"'),
        ({"output.events": True}, "output.events: they are of completions"),
        ({"input.format": "jsonl"}, "input.format: the first bytes"),
        ({"backend": {"kind": "openai", "url": "http://127.0.0.1:1/v1", "served_model": "m"}}, "an endpoint does not"),
    ],
)
def test_what_a_batch_of_episodes_cannot_do_is_refused(work: Path, changes: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem):
        batch(work, **changes)


def succeeded() -> set[str]:
    """Episodes and answers that the store has."""
    return {name for name, status in statuses(database()).items() if status == "succeeded"}


RUN = """
import sys
from rollout_core.config import TrainGRPOConfig, load_config
from flows.train import train_grpo
print(train_grpo(load_config("run.toml", TrainGRPOConfig))["model"])
"""


def database() -> Path:
    return Path(os.environ["ROLLOUT_DATABASE"].removeprefix("sqlite:///"))


def statuses(database: Path) -> dict[str, str]:
    """Of episodes and of answers, by id."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=60)) as store:
            return dict(store.execute("SELECT rollout_id, status FROM rollouts").fetchall())
    except sqlite3.OperationalError:  # before it is there
        return {}


@pytest.mark.parametrize(
    "kills", [2, pytest.param(20, marks=[pytest.mark.campaign, pytest.mark.timeout(3600)], id="campaign")]
)
def test_killed_while_it_plays_it_plays_on_and_comes_to_the_same_checkpoint(
    prefect_server: str, work: Path, start_process: Any, monkeypatch: pytest.MonkeyPatch, kills: int
):
    from flows.train import train_grpo

    (work / "env.py").write_text(ENVIRONMENT.replace("self.most -= 1", "self.most -= 1; time.sleep(0.1)"))
    write_toml(work / "run.toml", document(episodes_at_once=3))
    ended, chance = set[str](), random.Random(kills)
    for _ in range(kills):
        process = start_process("-c", RUN, cwd=work, stdout=(work / "run.log").open("a"))
        wanted = len(ended) + chance.randrange(1, 120 // kills)  # of some 70 answers and episodes
        wait_until(lambda process=process, wanted=wanted: process.poll() is not None or len(succeeded()) >= wanted)
        process.kill()
        process.wait()
        assert ended <= succeeded()
        ended = succeeded()
    config = load_config("run.toml", TrainGRPOConfig)
    model = train_grpo(config)["model"]
    assert ended <= succeeded() and not attempts_after_success(os.environ["ROLLOUT_DATABASE"])
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{work / 'undisturbed'}")
    monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{work / 'undisturbed.db'}")
    assert train_grpo(config)["model"] == model


def test_an_environment_that_crashes_and_hangs_costs_attempts_and_changes_no_checkpoint(
    prefect_server: str, work: Path, monkeypatch: pytest.MonkeyPatch
):
    from flows.train import train_grpo

    (work / "faults").mkdir()
    monkeypatch.setenv("FAULTS", str(work / "faults"))
    config = parse_config(document(turn_seconds=3, max_attempts=8), TrainGRPOConfig)
    model = train_grpo(config)["model"]
    assert len(list((work / "faults").iterdir())) >= 3
    assert set(statuses(database()).values()) == {"succeeded"}
    monkeypatch.delenv("FAULTS")
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{work / 'undisturbed'}")
    monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{work / 'undisturbed.db'}")
    assert train_grpo(config)["model"] == model


REMEMBERS = """
    def load_memory(self, memory):
        self.memory = memory or []
        with open(os.environ["EPISODES"] + ".memory", "a") as file:
            file.write(json.dumps(self.memory) + "\\n")

    def save_memory(self):
        return [self.row["digits"], self.said]

    def merge_memory(self, memory, notes):
        return [*(memory or []), *notes]
"""


def remembers(work: Path, start_memory: str | None = None, **algorithm: Any) -> dict[str, Any]:
    """A configuration whose environment puts into its first message how much it remembers."""
    source = ENVIRONMENT.replace("f\"sort {row['digits']} =\"", "f\"{len(self.memory)} sort {row['digits']} =\"")
    (work / "env.py").write_text(source + REMEMBERS)
    begins = {} if start_memory is None else {"start_memory": start_memory}
    found = document(episodic_memory=True, turn_seconds=3, max_attempts=8, **begins)
    return found | {"algorithm": found["algorithm"] | algorithm}


def memories() -> list[tuple[int, ContentId]]:
    """Iteration and id of each memory that is stored, the first one first."""
    found = SnapshotStore(objects()).list(kind="episodic_memory")
    return sorted((snapshot.step, snapshot.id) for snapshot in found)


def begun_with(work: Path) -> list[int]:
    """How many notes each episode was given, in no order."""
    file = work / "episodes.jsonl.memory"
    found = sorted(len(json.loads(line)) for line in file.read_text().splitlines())
    file.unlink()
    return found


def test_an_environment_remembers_and_crashes_change_no_memory(
    prefect_server: str, work: Path, monkeypatch: pytest.MonkeyPatch
):
    from flows.train import train_grpo

    (work / "faults").mkdir()
    monkeypatch.setenv("FAULTS", str(work / "faults"))
    config = parse_config(remembers(work), TrainGRPOConfig)
    model = train_grpo(config)["model"]
    assert set(begun_with(work)) == {0, 12} and list((work / "faults").iterdir())
    [(_, first), (_, second)] = disturbed = memories()
    notes = json.loads(read_memory(objects(), second))
    assert len(notes) == 24 and json.loads(read_memory(objects(), first)) == notes[:12]
    assert train_grpo(config)["model"] == model and not (work / "episodes.jsonl.memory").exists()
    monkeypatch.delenv("FAULTS")
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{work / 'undisturbed'}")
    monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{work / 'undisturbed.db'}")
    assert train_grpo(config)["model"] == model
    assert memories() == disturbed and begun_with(work) == [0] * 12 + [12] * 12


def test_another_run_begins_with_a_memory(prefect_server: str, work: Path):
    from flows.train import train_grpo

    whole = train_grpo(parse_config(remembers(work), TrainGRPOConfig))
    assert begun_with(work) == [0] * 12 + [12] * 12
    forked = SnapshotStore(objects()).fork(memories()[0][1], "another")
    other = {**remembers(work, start_memory=forked.id[:12], iterations=1), "run": {"name": "another"}}
    found = train_grpo(parse_config(other, TrainGRPOConfig))
    assert begun_with(work) == [12] * 12 and found["model"] != whole["model"]
    [state, *_] = SnapshotStore(objects()).list(kind="train_state")
    wrong = {**other, "environment": {**other["environment"], "start_memory": state.id[:12]}}
    with pytest.raises(ConfigError, match="is a train_state; expected an episodic_memory"):
        train_grpo(parse_config(wrong, TrainGRPOConfig))


def test_a_night_in_an_environment_is_evaluated_and_promoted(prefect_server: str, work: Path):
    from flows.nightly import nightly

    chat = [{"role": "user", "content": "sort 2 1 ="}, {"role": "assistant", "content": "1 2 3 4 5"}]
    (work / "sft.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    tables = document()
    learner = {name: value for name, value in tables.pop("algorithm").items() if name != "base_model"}
    tables |= {
        "model": {"uri": "model"},
        "sft": {
            "minibatch_size": 1,
            "dataset": {"path": "sft.jsonl"},
            "budget": {"max_steps": 4},
            "optimizer": {"lr": 1e-3},
            "sequence": {"max_length": 64},
        },
        "grpo": learner,
        "evaluation": {"prompts": {"path": "rows.jsonl"}, "sampling": SAMPLING},
        "report_dir": "report",
    }
    found = nightly(parse_config(tables, NightlyConfig))
    assert list(found["held_out"]) == ["before", "after SFT", "after GRPO"] and len(found["rewards"]) == 2
    page = (Path(found["report"]) / "index.html").read_text()
    assert "[user] again" in page and "evaluate_episodes" in page
    played = episodes(work)
    assert len(played) == 3 * 6 + 2 * 3 * 4
    again = nightly(parse_config(tables, NightlyConfig))
    assert again["model"] == found["model"]


def test_the_example_is_planned_as_it_is(work: Path):
    tables = tomllib.loads((PROJECT / "examples/environments/lookup.toml").read_text())
    (work / "examples").symlink_to(PROJECT / "examples")
    rows = '{"question": "?", "answer": "a", "records": {}}\n' * 20
    (work / "tasks.jsonl").write_text(rows)
    changes = {
        "algorithm.base_model.uri": "model",
        "algorithm.prompts.path": "tasks.jsonl",
        "evaluation.suites": [{"suite": "suite.toml"}],
        "backend": {"kind": "transformers"},
    }
    suite = tables["evaluation"]["suites"][0]["suite"]
    write_toml(work / "suite.toml", {**suite, "rows": {"path": "tasks.jsonl"}})
    found = plan_training(parse_config(tables, TrainGRPOConfig, overrides=changes), Path.cwd())
    assert found["environment"].startswith("examples/environments/lookup.py:Lookup (")
    assert found["environment"].endswith("), 1 tools (lookup)")


@pytest.mark.campaign
def test_the_example_is_learned(prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from flows.train import train_grpo

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(PROJECT / "examples" / "agents"))
    (tmp_path / "examples").symlink_to(PROJECT / "examples")
    import_module("make_lookup").make(tmp_path / "data" / "agents")
    tables = tomllib.loads((PROJECT / "examples/environments/lookup.toml").read_text())
    changes = {"backend": {"kind": "transformers"}, "algorithm.iterations": 4}
    train_grpo(parse_config(tables, TrainGRPOConfig, overrides=changes))
    reports = [report for model in evaluated_models(RunRecords(objects())) for report in model.reports.values()]
    figures = sorted(report.headline.value for report in reports)
    assert figures[-1] >= figures[0] + 0.2


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"algorithm.reward": {"kind": "exact_match"}}, "algorithm.reward: the environment rewards its episodes"),
    ({"algorithm.async_depth": 1}, "algorithm.async_depth is of completions of prompts, not of episodes"),
    ({"algorithm.curriculum": {"by": "length"}}, "algorithm.curriculum is of completions of prompts"),
    ({"algorithm.kind": "online_dpo"}, "of single completions of prompts; choose another one"),
    ({"environment.path": "env.py"}, "environment.path: expected module:function or path/to/file.py:function"),
    ({"environment.max_turn": 3}, "max_turns"),
    ({"environment.config": {"least": 1}}, "environment env.py:Env has the signature (most=2), and config gives least"),
    ({"environment.path": "none.py:Env"}, "environment file none.py does not exist"),
    ({"environment.path": "env.py:Environment"}, "there is no 'Environment'; found: Done, Env, fail_once"),
    ({"algorithm.prompts": {"path": "none.jsonl"}}, "none.jsonl"),
    ({"algorithm.credit": "turn"}, 'algorithm.credit is "turn", and environment env.py:Env has no method turn_reward'),
    ({"algorithm.gamma": 0.9}, 'gamma is of credit = "turn"'),
    ({"environment": None, "algorithm.credit": "turn"}, 'credit = "turn" is of the turns of episodes'),
    ({"algorithm.kind": "online_dpo", "algorithm.credit": "turn"}, "has no use for credit"),
]


@pytest.mark.parametrize(("changes", "problem"), REFUSED, ids=[next(iter(changes)) for changes, _ in REFUSED])
def test_what_cannot_be_played_is_refused_by_the_plan(work: Path, changes: dict[str, Any], problem: str):
    with pytest.raises(ConfigError) as refused:
        plan_training(parse_config(document(), TrainGRPOConfig, overrides=changes), Path.cwd())
    assert problem in str(refused.value).replace(f"{work}/", "")
    assert not episodes(work)


def test_a_template_that_leaves_out_what_tools_say_is_refused_by_the_plan(work: Path):
    settings = work / "model" / "tokenizer_config.json"
    without_tools = TEMPLATE.replace("{{ message.role }}", "{% if message.role == 'tool' %}{{ raise_exception('no') }}"
                                     "{% endif %}{{ message.role }}")  # fmt: skip
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": without_tools}))
    (work / "env.py").write_text(
        ENVIRONMENT
        + '''
    def look(self) -> str:
        """Look around."""
        return "nothing"
'''
    )
    config = parse_config(document(), TrainGRPOConfig)
    with pytest.raises(ConfigError, match=r'of which an episode is made \(tool_role = "user"'):
        plan_training(config, Path.cwd())
    remark = plan_training(parse_config(document(tool_role="user"), TrainGRPOConfig), Path.cwd())
    assert "does not show the model its tools (look)" in remark["environment, to look at"]


def test_an_environment_evaluates_models_as_a_suite(prefect_server: str, work: Path):
    from flows.evaluate import evaluate_suites

    suite = {
        "name": "variety",
        "rows": {"path": "rows.jsonl"},
        "environment": {"path": "env.py:Env"},
        "samples": 2,
        "sampling": SAMPLING,
        "threshold": 0.2,
    }
    config = parse_config(
        {"model": {"uri": "model"}, "backend": {"kind": "transformers"}, "suites": [suite]}, EvalConfig
    )
    [report] = evaluate_suites(config)["reports"]
    assert (report["num_questions"], report["num_samples"], report["num_failed"]) == (6, 12, 0)
    assert [metric["name"] for metric in report["metrics"]] == ["mean", "avg@2", "pass@2"]
    objects = ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"])
    text = json.loads(objects.get_bytes(ContentId(report["completions"])).splitlines()[0])["text"]
    assert text.startswith("[assistant] ") and "\n[user] again\n[assistant] " in text
    played = episodes(work)
    assert len(played) == 12
    assert evaluate_suites(config)["reports"] == [report] and episodes(work) == played
