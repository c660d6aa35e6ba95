"""Completions that go on from iteration to iteration: drawn by the weights they name; the same bytes after a kill."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.reproduce import reproduce
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.config import TrainGRPOConfig, parse_config
from rollout_core.data.partial_rollouts import carried_over
from rollout_core.data.samples import SampledCompletion, decode_completions_blob, decode_samples
from rollout_core.inference.backend import ModelRef
from rollout_core.inference.vllm_backend import trainer_logprobs
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import Lineage, trace_lineage
from rollout_core.objects.snapshots import SnapshotStore, find_start
from tests.flows.conftest import finished_samples, objects, small_grpo, wait_for, write_toml
from tests.flows.test_resume import ROLLOUT, kill

ITERATIONS = 4
FIRST = 12 * 2
"""Samples of the first iteration; those of the second go on with some of them, beside as many new ones."""


def document(tiny_model: Path, sorting_task: Any, **changes: Any) -> dict[str, Any]:
    keys = {
        "iterations": ITERATIONS,
        "prompts_per_iteration": 12,
        "samples_per_prompt": 2,
        "minibatch_size": 8,
        "sampling": {"max_tokens": 15, "stop_token_ids": list(range(40, 60))},
        "partial_rollouts": {"max_tokens_per_iteration": 5},
        "optimizer": {"lr": 3e-3},
        "snapshots": {"every_steps": 1},
    }
    return small_grpo(tiny_model, sorting_task, "cut", **keys | changes)


def updates_behind(last: str) -> list[Lineage]:
    """Updates that led to a model, the first one first."""
    found = [item for item in trace_lineage(objects(), ContentId(last)) if item.stage == "grpo_update"]
    return found[::-1]


def learned_from(store: ObjectStore, update: Lineage) -> list[tuple[list[int], SampledCompletion]]:
    """Prompts and completions of an update."""
    samples = decode_samples(store.get_bytes(ContentId(update.inputs["samples"])))
    completions = decode_completions_blob(store.get_bytes(ContentId(update.inputs["scores"]["completions"])))
    return [(one.prompt_token_ids, other) for one, other in zip(samples, completions, strict=True)]


def check_parts(store: ObjectStore, cache: Path, prompt: list[int], row: SampledCompletion) -> None:
    """The trainer finds the log-probabilities of each part with the weights that the part names."""
    assert row.written is not None and row.model_ids is not None
    assert [start for start, _ in row.written] == [0, *(end for _, end in row.written[:-1])]
    for (start, end), model in zip(row.written, row.model_ids, strict=True):
        own = ModelRef(ContentId(model), store.local_tree(ContentId(model), cache))
        expected = trainer_logprobs(own, [*prompt, *row.token_ids[:start]], row.token_ids[start:end])
        assert row.logprobs[start:end] == pytest.approx(expected, abs=2e-4)


@pytest.fixture
def killed_and_run_again(
    tmp_path: Path, start_process: Any, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Runs a configuration in a store of its own, kills it in its second iteration, and runs it once more; the result
    of that."""

    def run(asked: dict[str, Any]) -> dict[str, Any]:
        from flows.train import train_grpo

        monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'killed'}")
        monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{tmp_path / 'killed.db'}")
        command = ("train", "grpo", "--config", str(write_toml(tmp_path / "killed.toml", asked)))
        killed = start_process(*ROLLOUT, *command, env={"PREFECT_API_URL": prefect_server})
        wait_for(lambda: finished_samples() > FIRST, "samples of the second iteration", process=killed)
        kill(killed)
        return train_grpo(parse_config(asked, TrainGRPOConfig))

    return run


@pytest.mark.server
def test_parts_are_drawn_by_the_weights_they_name_and_a_killed_run_comes_to_the_same_bytes(
    tiny_model, sorting_task, tmp_path, prefect_server, monkeypatch, killed_and_run_again
):
    from flows.train import train_grpo

    asked = document(tiny_model, sorting_task)
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'undisturbed'}")
    monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{tmp_path / 'undisturbed.db'}")
    finished = train_grpo(parse_config(asked, TrainGRPOConfig))
    store, updates = objects(), updates_behind(finished["model"])
    assert len(updates) == ITERATIONS
    models = [update.inputs["model"] for update in updates]
    groups = [learned_from(store, update) for update in updates]
    for rows in groups:
        assert rows and len(rows) % 2 == 0, "whole groups"
        assert all(
            len(row.token_ids) == 15 or row.token_ids[-1] in range(40, 60) or row.finish_reason == "stop"
            for _, row in rows
        )
    by_three = [item for item in groups[2] if item[1].model_ids == models[:3]]
    assert by_three, "begun in the first iteration, ended in the third"
    for prompt, row in by_three[:3]:
        check_parts(store, tmp_path / "cache", prompt, row)
    drawn = [row.id for rows in groups for _, row in rows]
    assert len(set(drawn)) == len(drawn) < ITERATIONS * FIRST, "each is learned from once, and some are left over"
    left = carried_over(store, ContentId(finished["train_state"]), group_size=2)
    assert left.number == ITERATIONS - 1 and left.partials is not None

    again = killed_and_run_again(asked)
    assert (again["model"], again["train_state"]) == (finished["model"], finished["train_state"])

    # A run that goes on takes up what was carried over, and comes to what one longer run comes to.
    longer = {**asked, "algorithm": {**asked["algorithm"], "iterations": ITERATIONS + 1}}
    expected = train_grpo(parse_config(longer, TrainGRPOConfig))
    state = SnapshotStore(objects()).get(ContentId(again["train_state"]))
    resumed = {**longer, "run": {"name": "cut", "resume": state.id}}
    assert train_grpo(parse_config(resumed, TrainGRPOConfig))["model"] == expected["model"]


@pytest.mark.campaign
@pytest.mark.server
def test_parts_drawn_ahead_of_training_come_to_the_same_bytes_after_a_kill(
    tiny_model, sorting_task, tmp_path, prefect_server, monkeypatch, killed_and_run_again
):
    from flows.train import train_grpo

    asked = document(tiny_model, sorting_task, iterations=3, async_depth=1)
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'undisturbed'}")
    monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{tmp_path / 'undisturbed.db'}")
    finished = train_grpo(parse_config(asked, TrainGRPOConfig))
    store, updates = objects(), updates_behind(finished["model"])
    start, first = (update.inputs["model"] for update in updates[:2])
    rows = [row for update in updates for _, row in learned_from(store, update)]
    # The starting weights draw the parts of two iterations, those of the first update go on in the third.
    assert {tuple(row.model_ids or ()) for row in rows} >= {(start,), (start, first)}

    again = killed_and_run_again(asked)
    assert (again["model"], again["train_state"]) == (finished["model"], finished["train_state"])


@pytest.mark.server
def test_what_is_left_is_told_and_runs_go_on_from_ends_of_partial_rollouts_only(
    tiny_model, sorting_task, tmp_path, prefect_server, monkeypatch, caplog
):
    from flows.train import train_grpo

    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'store'}")
    monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{tmp_path / 'store.db'}")

    def train(**changes: Any) -> ContentId:
        asked = document(tiny_model, sorting_task, **{"iterations": 2, **changes})
        done = train_grpo(parse_config(asked, TrainGRPOConfig))
        models.append(ContentId(done["model"]))
        return ContentId(done["train_state"])

    models: list[ContentId] = []
    lines = logging.getLogger("prefect.flow_runs")
    lines.addHandler(caplog.handler)
    try:
        one = train()
    finally:
        lines.removeHandler(caplog.handler)
    assert "groups of completions are not whole at the end of the last iteration" in caplog.text
    store = objects()
    assert carried_over(store, one, group_size=2).partials is not None

    # Within an iteration a label makes no end of one.
    snapshots = SnapshotStore(store)
    snapshots.restore(one, tmp_path / "state")
    (tmp_path / "state" / "more").write_bytes(b"another step")
    within = snapshots.save(tmp_path / "state", run_id="within", step=1, algorithm="grpo", label="mine")
    options: Any = {"algorithm": "grpo", "run_name": "cut", "steps_per_iteration": None}
    with pytest.raises(ConfigError, match="is of step 1, within an iteration, or no update is on record"):
        find_start(store, within.id, **options)
    snapshots.set_label(one, None)
    assert find_start(store, one, **options).id == one

    # Nothing goes in or out: samples are those of the prompts.
    short = {"max_tokens": 15, "stop_token_ids": list(range(262))}
    left = carried_over(store, train(iterations=1, sampling=short), group_size=2)
    assert (left.number, left.partials) == (0, None)

    plain = train(iterations=1, partial_rollouts=None)
    resumed = document(tiny_model, sorting_task)
    resumed["run"]["resume"] = plain
    with pytest.raises(ConfigError, match=r"run.resume: snapshot .* was left by an iteration without partial_rollouts"):
        train_grpo(parse_config(resumed, TrainGRPOConfig))

    # What was carried over is made again, too.
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'elsewhere'}")
    monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{tmp_path / 'elsewhere.db'}")
    again = reproduce(models[0], store.url)
    assert again["difference"] is None and "continue_samples iteration 2" in again["same"]
