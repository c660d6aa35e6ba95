"""`rollout promote`, `promotions` and `rollback`, the flow that goes back, and the guards of a nightly run."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flows.cli import app
from rollout_core.base.ids import ContentId
from tasks.runtime.summary import plain
from tests.flows.conftest import objects
from tests.support.task_runs import ended_task_runs


def rollout(*arguments: str, code: int = 0) -> Result:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output + done.stderr
    return done


@pytest.fixture
def models(tmp_path: Path) -> list[ContentId]:
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
        (tmp_path / name / "model.safetensors").write_text(name)
        found.append(objects().put_tree(tmp_path / name))
    return found


def test_models_are_promoted_listed_and_gone_back_from_by_command(models, monkeypatch):
    monkeypatch.setenv("LOGNAME", "ann")
    first, second = models
    assert rollout("promotions").stdout == "nothing was promoted yet\n"
    assert rollout("promote", first[:8]).stdout == f"policy: model {first} is the latest\n"
    assert rollout("promote", second, "--reason", "the reviewers' choice").stdout == (
        f"policy: model {second} instead of {first}\n"
    )
    assert "is the latest already" in rollout("promote", second).stdout
    assert rollout("rollback", "policy").stdout == f"policy: model {first} instead of {second}\n"
    assert rollout("rollback", "policy", "--to", second[:8], "--reason", "it was the data").exit_code == 0

    lines = rollout("promotions", "policy").stdout.splitlines()
    assert lines[0] == f"policy: model {second} is served, 4 entries"
    assert [line[:1] for line in lines[1::2]] == ["*", " ", " ", " "]
    assert lines[1].endswith(f"rollback  {second.short} instead of {first.short}  ann@rollout rollback")
    assert [line.strip() for line in lines[2::2]] == [
        "it was the data",
        f"back from {second.short} to {first.short}",
        "the reviewers' choice",
        "by hand",
    ]
    entries = json.loads(rollout("promotions", "--json").stdout)
    assert [entry["model"] for entry in entries] == [second, first, second, first]
    assert all(entry["by"].startswith("ann@rollout ") for entry in entries)


def test_what_cannot_be_done_is_one_line_and_exit_code_2(models):
    refused = rollout("rollback", "policy", code=2)
    assert refused.stderr.startswith(
        "rollout: nothing to go back to: 'policy' serves no model of ours; `rollout promotion"
    )
    assert refused.stderr.count("\n") == 1
    assert "no folder has an id that begins with 00000000" in rollout("promote", "00000000", code=2).stderr
    assert "resource: String should match pattern" in rollout("promote", models[0], "--resource", "a/b", code=2).stderr


@pytest.mark.server
def test_the_flow_goes_back_and_says_so_in_the_history(prefect_server, models):
    from flows.rollback import rollback
    from rollout_core.base.errors import NotFound
    from rollout_core.promotion.history import history_of

    first, second = models
    rollout("promote", first, "--resource", "judge")
    rollout("promote", second, "--resource", "judge")
    served = rollback("judge")
    assert served == {"model": first, "previous": second, "reason": f"back from {second.short} to {first.short}"}
    assert history_of(objects(), "judge")[-1].by.startswith("flow run ")
    with pytest.raises(NotFound, match="nothing to go back to"):
        rollback("judge")
    assert rollback("judge", second[:8])["model"] == second


def seen_of_the_last_run(name: str, num_stages: int) -> tuple[list[str], dict[str, str]]:
    """Names of the task runs of the latest flow run of a name, sorted; and the rows of its summary, its only artifact
    beside those of stages."""
    from prefect import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter, FlowRunFilterName
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        named = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
        run = client.read_flow_runs(flow_run_filter=named, sort=FlowRunSort.START_TIME_DESC)[0]
        own = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
        [summary] = [found for found in client.read_artifacts(artifact_filter=own) if found.task_run_id is None]
    assert summary.key == "summary" and "![guarded: mean training reward](data:image" not in str(summary.data)
    points = re.findall(r"^- \*\*(.+?)\*\*: (.*)$", str(summary.data), re.MULTILINE)
    return sorted(task.name for task in ended_task_runs(run.id, num_stages)), dict(points)


def assert_summary(summary: dict[str, str], result: Any) -> None:
    """It says what the flow returned."""
    rewards = {name.removeprefix("held-out reward "): row for name, row in summary.items() if "held-out" in name}
    assert list(rewards) == list(result["held_out"])
    first, *_, last = result["held_out"].values()
    assert [row.split()[0] for row in rewards.values()] == [f"**{value:.4f}**" for value in result["held_out"].values()]
    assert list(rewards.values())[-1].endswith(f"({last - first:+.4f})")
    assert summary["promoted"].startswith("**no**: ") and "a guard refused it: mean reward" in summary["promoted"]
    assert (summary["state"], summary["algorithm"]) == ("completed", "SFT, PPO")
    assert (summary["checkpoint"], summary["report"]) == (result["model"], plain(result["report"]))
    states = Counter(row["state"].replace("completed", "computed") for row in result["stages"])
    assert summary["stages"] == ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


@pytest.mark.server
def test_guards_of_a_nightly_run_are_evaluated_reported_and_refuse(
    prefect_server, small_nightly, sorting_task, tmp_path
):
    from flows.nightly import nightly
    from rollout_core.config import NightlyConfig, parse_config
    from rollout_core.promotion.history import history_of

    easy = tmp_path / "easy.jsonl"
    easy.write_text("".join(sorting_task.held_out.read_text().splitlines(keepends=True)[:6]))
    small_nightly["run"]["name"] = "guarded"
    small_nightly["cost"] = {"per_hour": 3600, "per_gpu_hour": 1, "currency": "EUR"}
    small_nightly["sft"]["budget"] = {"max_steps": 4}
    small_nightly["ppo"] |= {"iterations": 1, "prompts_per_iteration": 80}
    small_nightly["promotion"] = {
        "confidence": 0.9,
        "guards": [
            {"kind": "length", "max_growth": 9.0},
            {"kind": "finish", "max_truncated": 1.0},
            {"kind": "reward", "reward": {"kind": "exact_match", "answer_key": "prompt_text"}, "max_drop": 1.0},
            {"kind": "prompts", "prompts": {"path": str(easy)}, "max_drop": 1.0, "floor": 2.0},
            {"kind": "kl", "max_kl": 9.0},
        ],
    }
    rows = [{**json.loads(line), "prompt_text": "x"} for line in sorting_task.held_out.read_text().splitlines()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small_nightly["evaluation"]["prompts"]["path"] = str(tmp_path / "rows.jsonl")

    first = nightly(parse_config(small_nightly, NightlyConfig))
    names, summary = seen_of_the_last_run("guarded", len(first["stages"]))
    assert names == sorted(f"{row['stage']} {row['label']}".strip() for row in first["stages"])
    assert_summary(summary, first)
    seconds = sum(float(row["seconds"]) for row in first["stages"] if row["state"] == "completed")
    assert float(summary["cost"].split()[0].strip("*")) == pytest.approx(seconds, abs=0.1)
    assert not first["promoted"] and history_of(objects(), "policy") == []
    page = (Path(first["report"]) / "index.html").read_text()
    assert "a guard refused it: mean reward" in page and ", at least 2 is asked for" in page
    assert page.count("<li>guard passed: ") == 5 and page.count("<li>guard refused: ") == 1
    assert "paired bootstrap)</li>" in page and f"over {len(rows)} prompts" in page
    assert re.search(r"guard passed: KL divergence from the model before \(\w+\) [\d.e-]+ nats a token \(exact; ", page)
    labels = {(row["stage"], row["label"]) for row in first["stages"]}
    expected = {("evaluate_by", f"guard 3, {moment}") for moment in ("before", "after")}
    assert ("measure_kl", "from before") in labels
    assert expected | {("evaluate", f"guard 4, {moment}") for moment in ("before", "after")} <= labels
    again = nightly(parse_config(small_nightly, NightlyConfig))
    assert {row["state"] for row in again["stages"]} == {"cached", "checked"}
    names, summary = seen_of_the_last_run("guarded", len(first["stages"]))
    assert names == sorted(f"{row['stage']} {row['label']}".strip() for row in first["stages"])
    assert {"evaluate before", "sft_update", "ppo_update iteration 1", "evaluate_by guard 3, after"} <= set(names)
    assert len(again["stages"]) == len(names)
    assert_summary(summary, again)
    assert "**0.0000 EUR**: 0.0 s computed, 0.0 GPU-seconds, at 3600 an hour and 1 a GPU-hour" in summary["cost"]


def drawn_for_evaluations() -> Counter[tuple[int, ...]]:
    """Completions of evaluations that an engine has generated, by their tokens."""
    from rollout_core.base.stopping import run_async
    from rollout_core.inference.ledger import BLOB_ATTRIBUTE, COMPLETION_SPAN, ROW_ATTRIBUTE
    from tasks.runtime.connections import open_store

    async def look() -> Counter[tuple[int, ...]]:
        async with open_store() as store:
            rollouts = [item.rollout_id for item in await store.query_rollouts() if item.mode == "test"]
            spans = await store.query_many_spans(rollouts, name=COMPLETION_SPAN)
        stored = objects()
        lines = (
            stored.get_bytes(ContentId(span.attributes[BLOB_ATTRIBUTE])).splitlines()[span.attributes[ROW_ATTRIBUTE]]
            for span in spans
        )
        return Counter(tuple(json.loads(line)["token_ids"]) for line in lines)

    return run_async(look())


@pytest.mark.server
def test_a_canary_goes_back_from_a_model_that_does_not_do_what_it_was_promoted_for(
    prefect_server, small_nightly, sorting_task, tmp_path
):
    from flows.canary import canary
    from flows.nightly import nightly
    from rollout_core.config import NightlyConfig, parse_config
    from rollout_core.promotion.history import history_of

    small_nightly["sft"]["budget"] = {"max_steps": 2}
    small_nightly["ppo"] |= {"iterations": 1, "prompts_per_iteration": 32, "epochs": 1, "minibatch_size": 16}
    # What is earned is all the same here: each night is promoted.
    small_nightly["promotion"] = {"tolerance": 1.0}
    worth = tmp_path / "worth.py"
    worth.write_text("def score(sample):\n    return 0.5\n")
    small_nightly["reward"] = {"kind": "function", "callable": f"{worth}:score"}

    def parsed(seed: int = 5) -> NightlyConfig:
        return parse_config({**small_nightly, "seed": seed}, NightlyConfig)

    found = canary(parsed())
    assert (found["model"], found["mean_reward"]) == (None, None) and "no model is served" in found["reason"]
    first, second = (nightly(parsed(seed)) for seed in (5, 6))
    assert first["promoted"] and second["promoted"] and first["model"] != second["model"]

    before = drawn_for_evaluations()
    found = canary(parsed(), max_drop=0.1)
    assert found["serves"] == found["model"] == second["model"]
    # All of it was generated again, from the same seeds; the store's own completions stay as they were.
    again = drawn_for_evaluations() - before
    num_held_out = len(sorting_task.held_out.read_text().splitlines())
    assert again.total() == num_held_out and not again - before
    assert found["reason"] == "mean held-out reward 0.5000 when promoted -> 0.5000 now; it holds"
    worth.write_text("def score(sample):\n    return 0.375\n")
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(sorting_task.held_out.read_text().splitlines(keepends=True)[:8]))
    found = canary(parsed(), max_drop=0.1, overrides={"evaluation.prompts.path": str(fewer)})
    assert (found["model"], found["serves"], found["mean_reward"]) == (second["model"], first["model"], 0.375)
    last = history_of(objects(), "policy")[-1]
    assert (last.action, last.model) == ("rollback", first["model"])
    assert last.reason == (
        "canary: mean held-out reward 0.5000 when promoted -> 0.3750 now, on other prompts than then, may fall by 0.1"
    )

    rollout("promote", second["model"], "--reason", "by hand")
    assert "was promoted without held-out prompts" in canary(parsed())["reason"]


@pytest.mark.server
def test_a_question_whose_run_crashed_for_good_is_not_taken_for_an_answer(prefect_server, monkeypatch):
    from prefect import flow, get_client
    from prefect.states import Cancelled, Completed, Crashed, State

    from flows import candidate
    from rollout_core.base.errors import RolloutError
    from tasks.runtime import suspension

    @flow
    def asks() -> None: ...

    def ended(state: State[None]) -> str | None:
        with get_client(sync_client=True) as client:
            return candidate._decide_for(client.create_flow_run(asks, state=state).id, 1.0, "promote").message

    assert ended(Completed()) == ended(Cancelled()) == "somebody has decided"
    monkeypatch.setattr(suspension, "_GIVEN_UP_SECONDS", 0.5)
    monkeypatch.setattr(suspension, "_LOOK_SECONDS", 0.1)
    with pytest.raises(RolloutError, match="ended Crashed, and nobody has decided: `prefect flow-run retry"):
        ended(Crashed())
