"""Records of runs: written again and again, found by people, kept without what the run made."""

from __future__ import annotations

import json
import math
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.cli.results import sparklines
from rollout_core.base.errors import ConfigError, NotFound, Recoverable
from rollout_core.base.ids import ContentId, content_id
from rollout_core.config.retention import Retention
from rollout_core.data.samples import Completion, Sample, encode_completion, encode_samples
from rollout_core.objects import ObjectStore
from rollout_core.objects.backends import LocalFiles
from rollout_core.objects.object_store import blob_key
from rollout_core.objects.retention.garbage import collect_garbage
from rollout_core.objects.retention.run_leases import lease
from rollout_core.runs.decisions import note_decision
from rollout_core.runs.estimates import stage_times
from rollout_core.runs.figures import MOST_POINTS, curves_of
from rollout_core.runs.run_records import (
    ABSENT,
    AtWork,
    Live,
    MetricsOf,
    RunDetail,
    RunHead,
    RunRecords,
    StageCall,
    differences,
    next_step,
    runs_under_way,
    shown_state,
    state_in_words,
    work_in_words,
)
from rollout_core.runs.run_samples import compare_held_out, final_evaluation, read_set, sample_sets
from tests.objects.test_housekeeping import clean

BEGAN = datetime(2026, 11, 25, 2, 0, tzinfo=UTC)
IDS = ("aaaa1111-0000", "aaaa2222-0000", "bbbb3333-0000")


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"{tmp_path}/store")


def head(run: str = IDS[0], day: int = 0, **changes: Any) -> RunHead:
    began = BEGAN + timedelta(days=day)
    plain = RunHead(id=run, name="night", flow="nightly", state="running", began=began, written=began)
    return plain.model_copy(update=changes)


def call(stage: str, label: str = "", kind: str | None = None, **result: Any) -> StageCall:
    return StageCall(stage=stage, label=label, state="Completed", ended=0.0, seconds=1.0, kind=kind, result=result)


def test_a_record_takes_the_place_of_the_one_before_and_leaves_nothing_of_it(objects: ObjectStore) -> None:
    records = RunRecords(objects)
    for steps in range(3):
        records.write(head(seconds=float(steps)), RunDetail(config={"steps": steps}))
    assert len(dict(objects.blobs())) == 2
    found, detail = records.detail(records.find("latest"))
    assert (found.seconds, detail.config) == (2.0, {"steps": 2})


def test_runs_of_one_configuration_leave_each_other_s_records_alone(objects: ObjectStore) -> None:
    records, first = RunRecords(objects), RunDetail(config={"seed": 1})
    records.write(head(IDS[0], state="failed"), first)
    records.write(head(IDS[2], 1), first)
    records.write(head(IDS[2], 1), first.model_copy(update={"calls": (call("import_model"),)}))
    assert records.detail(records.find(IDS[0]))[1].config == {"seed": 1}


def test_runs_are_found_by_digits_by_name_and_as_the_latest(objects: ObjectStore) -> None:
    records = RunRecords(objects)
    for day, run in enumerate(IDS):
        records.write(head(run, day, name=f"night-{day // 2}"), RunDetail(config={}))
    assert [found.id for found in records.heads()] == list(reversed(IDS))
    assert [found.id for found in records.heads(lambda found: found.name == "night-0", limit=1)] == [IDS[1]]
    assert records.find("aaaa1").id == IDS[0]
    assert records.find("night-0").id == IDS[1]
    assert records.find("latest").id == IDS[2]
    with pytest.raises(ConfigError, match="only one run begins with"):
        records.find("aaaa")
    with pytest.raises(NotFound, match="rollout runs"):
        records.find("cccc")


def test_runs_that_began_within_one_second_are_ordered_by_when_they_did(objects: ObjectStore) -> None:
    records = RunRecords(objects)
    earlier = f"run-records/{BEGAN:%Y%m%dT%H%M%S}-cccc4444-0000"  # as names were
    objects.set_ref(earlier, objects.put_json(head("cccc4444-0000", detail=objects.put_bytes(b"{}"))))
    for place, run in enumerate(reversed(IDS)):
        began = BEGAN + timedelta(milliseconds=100 * (place + 1))
        records.write(head(run, began=began, written=began), RunDetail(config={}))
    assert [found.id for found in records.heads()] == [*IDS, "cccc4444-0000"]
    assert records.find("latest").id == IDS[0]


def test_who_reads_while_a_run_writes_gets_the_next_record(objects: ObjectStore) -> None:
    reader, writer = RunRecords(objects), RunRecords(objects)
    writer.write(head(), RunDetail(config={"version": 1}))
    old = reader.find(IDS[0])
    writer.write(head(state="completed"), RunDetail(config={"version": 2}))
    found, detail = reader.detail(old)
    assert (found.state, detail.config) == ("completed", {"version": 2})
    assert reader.heads()[0].state == "completed"


def test_a_damaged_record_is_left_out_with_a_warning(objects: ObjectStore, tmp_path: Path, caplog) -> None:
    records = RunRecords(objects)
    records.write(head(IDS[0]), RunDetail(config={}))
    records.write(head(IDS[2], 1), RunDetail(config={}))
    (name,) = (name for name in objects.ref_names("run-records") if IDS[0] in name)
    blob = objects.get_ref(name)
    assert blob is not None
    path = tmp_path / "store" / blob_key(blob)
    path.chmod(0o644)
    path.write_bytes(b"damaged")
    assert [found.id for found in RunRecords(objects).heads()] == [IDS[2]]
    assert name in caplog.text


def test_a_record_keeps_figures_and_not_what_the_run_made(objects: ObjectStore, monkeypatch) -> None:
    monkeypatch.setattr(LocalFiles, "settle_seconds", 0.05)
    model, metrics = objects.put_bytes(b"weights"), objects.put_bytes(b'{"step": 1}\n')
    detail = RunDetail(config={"model": {"uri": model}}, calls=(call("sft_update", kind="Checkpoint", model=model),))
    of = MetricsOf(stage="sft_update", label="", metrics=metrics)
    RunRecords(objects).write(head(metrics=(of,)), detail)
    collect_garbage(objects, min_age=timedelta(0))
    assert (objects.exists(metrics), objects.exists(model)) == (True, False)
    kept, read = RunRecords(objects).detail(RunRecords(objects).find(IDS[0]))
    assert (read, kept.metrics) == (detail.model_copy(update={"run": IDS[0]}), (of,))


def test_housekeeping_gives_up_old_records(objects: ObjectStore, monkeypatch) -> None:
    monkeypatch.setattr(LocalFiles, "settle_seconds", 0.05)
    RunRecords(objects).write(head(), RunDetail(config={}))
    clean(objects, Retention(grace_hours=0))
    assert len(RunRecords(objects).heads()) == 1
    monkeypatch.setattr("rollout_core.objects.retention.rounds._DAY", 0.0)
    clean(objects, Retention(grace_hours=0))
    assert RunRecords(objects).heads() == []
    assert dict(objects.blobs()) == {}


def test_a_run_without_a_lease_is_lost(objects: ObjectStore) -> None:
    running, ended = head(), head(IDS[1], state="failed")
    with lease(objects, f"night (flow run {running.id})"):
        assert shown_state(running, runs_under_way(objects)) == "running"
    assert shown_state(running, runs_under_way(objects)) == "lost"
    assert shown_state(ended, runs_under_way(objects)) == "failed"


def test_short_ids_are_as_long_as_tells_runs_apart(objects: ObjectStore) -> None:
    ids = ("01a21e4a-7c1f-7aa1-0000", "01a21e4a-7c1f-7ab1-0000", "01a21e4a-7c1f-7ab2-0000", "bbbb3333-0000")
    for day, run in enumerate(ids):
        RunRecords(objects).write(head(run, day), RunDetail(config={}, calls=(call("sft_update"),) if day == 2 else ()))
    records = RunRecords(objects)
    shown = ["01a21e4a-7c1f-7aa", "01a21e4a-7c1f-7ab1", "01a21e4a-7c1f-7ab2", "bbbb3333"]
    assert [records.short(run) for run in ids] == shown
    taken_from = stage_times(RunRecords(objects), head().flow, head().name, None, {})["sft_update"]
    assert (taken_from.run.id, taken_from.short_id) == (ids[2], shown[2]), "an estimate names its run so, too"
    assert [records.find(run).id for run in shown] == list(ids)
    listed = CliRunner().invoke(app, ["runs", "--storage", f"{objects.url}"]).output
    assert all(f"{run} " in listed for run in shown)


def test_a_run_under_way_that_is_not_heard_of_says_since_when(objects: ObjectStore, tmp_path: Path) -> None:
    records = RunRecords(objects)
    since = BEGAN + timedelta(minutes=5)
    records.write(head(at_work=(AtWork(title="evaluate before", since=since),) * 2), RunDetail(config={}))
    found = records.find(IDS[0])
    assert work_in_words(found, "running") == "evaluate before since 02:05:00 UTC, and 1 more"
    assert (work_in_words(found, "lost"), state_in_words(found, "running")) == ("", "running")
    (ref,) = (path for path in (tmp_path / "store/refs/run-records").rglob("*") if IDS[0] in path.name)
    minutes_ago = time.time() - 7 * 60
    os.utime(ref, (minutes_ago, minutes_ago))
    for found in (records.find(IDS[0]), *records.heads()):
        assert state_in_words(found, "running") == "running, last heard of 7 min ago"
        assert state_in_words(found, "lost") == "lost"
    with lease(objects, f"night (flow run {IDS[0]})"):
        for command in (["runs"], ["show", IDS[0]]):
            shown = CliRunner().invoke(app, [*command, "--storage", f"{objects.url}"]).output
            assert "running, last heard of 7 min ago" in shown and "evaluate before since 02:05:00 UTC" in shown
    records.renew(IDS[0])
    assert state_in_words(records.find(IDS[0]), "running") == "running"


def test_a_run_that_ended_badly_says_what_to_do_next(objects: ObjectStore) -> None:
    records = RunRecords(objects)
    records.write(head(state="failed", error="ConfigError: no"), RunDetail(config={}))
    shown = CliRunner().invoke(app, ["show", IDS[0], "--storage", f"{objects.url}"]).output
    assert "failed: ConfigError: no" in shown
    assert "mend what the error names, then start the run again (by the same command; one of a deployment by " in shown
    assert f"`prefect flow-run retry {IDS[0]}`" in shown
    assert next_step(head(), "lost").startswith("start the run again")
    assert next_step(head(), "completed") == next_step(head(), "running") == ""


def test_what_a_person_decided_is_said_by_the_runs_that_asked(objects: ObjectStore) -> None:
    records, model, other = RunRecords(objects), content_id("model", 1), content_id("model", 2)
    asked = call("promote", kind="Promotion", model=model, waits=True)
    for day, (run, detail) in enumerate(
        zip(IDS, (asked, call("promote", kind="Promotion", model=other, waits=True), call("promote")), strict=True)
    ):
        told = "a person is to decide; it waits for a person"
        records.write(
            head(run, day, state="completed", promoted=False, reason=told), RunDetail(config={}, calls=(detail,))
        )
    assert note_decision(objects, model, "approved by Ada: good", promoted=True) == 1
    found = records.find(IDS[0])
    assert (found.promoted, found.reason, found.written) == (True, "approved by Ada: good", head(IDS[0]).written)
    assert all(records.find(run).promoted is False for run in IDS[1:])
    assert note_decision(objects, model, "again", promoted=True) == 0
    assert note_decision(objects, other, "better; rejected by Ada", promoted=False) == 1
    assert records.find(IDS[1]).reason == "better; rejected by Ada"


def test_storage_that_fails_when_a_decision_is_noted_fails_no_decision(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model has been promoted by then."""
    model = content_id("model", 1)
    asked = call("promote", kind="Promotion", model=model, waits=True)
    records = RunRecords(objects)
    records.write(head(state="completed", promoted=False, reason="it waits"), RunDetail(config={}, calls=(asked,)))

    def full(*_: Any) -> None:
        raise Recoverable("no room")

    monkeypatch.setattr(RunRecords, "write", full)
    assert note_decision(objects, model, "approved by Ada", promoted=True) == 0
    assert f"the runs that asked about model {model.short} may still say that they wait: no room" in caplog.text


def metrics(objects: ObjectStore, label: str, *rows: dict[str, float]) -> MetricsOf:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    return MetricsOf(stage="ppo_update", label=label, metrics=objects.put_bytes(lines.encode()))


def test_steps_of_updates_count_on(objects: ObjectStore) -> None:
    first = metrics(objects, "iteration 1", {"step": 1, "loss": 4.0}, {"step": 2, "loss": 3.0})
    counts_on = metrics(objects, "iteration 2", {"step": 3, "loss": 2.0}, {"step": 4, "loss": 1.0, "kl": 0.5})
    gone = MetricsOf(stage="ppo_update", label="iteration 3", metrics=content_id("gone", []))
    live = Live(
        title="ppo_update iteration 4", num_steps=2, rows=({"step": 1.0, "loss": 0.5}, {"step": 2.0, "loss": None})
    )
    scores = [call("score_rewards", f"iteration {n}", "Scores", mean=n / 10) for n in (1, 2)]
    guard = call("score_rewards", "guard 1", "Scores", mean=9.0)
    detail = RunDetail(config={}, calls=(*scores, guard), live=live)
    curves = curves_of(objects, head(metrics=(first, counts_on, gone)), detail)
    assert list(curves) == ["reward of iterations", "ppo_update: loss", "ppo_update: kl"]
    assert (curves["reward of iterations"].x, curves["reward of iterations"].y) == ([1, 2], [0.1, 0.2])
    assert (curves["ppo_update: loss"].x, curves["ppo_update: loss"].y) == ([1, 2, 3, 4, 5], [4.0, 3.0, 2.0, 1.0, 0.5])
    assert curves["ppo_update: kl"].x == [4]


def test_figures_that_are_named_twice_count_once_and_cut_ones_leave_a_gap(objects: ObjectStore) -> None:
    once = metrics(objects, "iteration 1", {"step": 1, "loss": 4.0}, {"step": 2, "loss": 3.0})
    cut = MetricsOf(stage="ppo_update", label="", metrics=objects.put_bytes(b'{"step": 1, "lo'))
    late = Live(title="ppo_update iteration 2", num_steps=9, rows=({"step": 5.0, "loss": 1.0},))
    detail = RunDetail(config={}, calls=(call("score_rewards", "", "Scores", mean=None),), live=late)
    curves = curves_of(objects, head(metrics=(once, once, cut)), detail)
    assert curves["ppo_update: loss"].x == [1, 2, 7]
    assert list(curves) == ["ppo_update: loss"]


def test_long_curves_are_thinned_and_keep_their_end(objects: ObjectStore) -> None:
    count = 3 * MOST_POINTS
    long = metrics(objects, "", *({"step": step, "loss": float(step)} for step in range(1, count + 1)))
    curve = curves_of(objects, head(metrics=(long,)), RunDetail(config={}))["ppo_update: loss"]
    assert len(curve.x) <= MOST_POINTS + 1
    assert (curve.x[0], curve.x[-1], curve.last) == (1, count, float(count))


def test_configurations_differ_where_a_value_does_or_is_not_set() -> None:
    first = {"seed": 1, "ppo": {"lr": 0.1, "epochs": 2}, "sft": {}}
    second = {"seed": 1, "ppo": {"lr": 0.2, "epochs": 2}, "sft": {"lr": 1.0}}
    found = {row.key: row.values for row in differences([first, second])}
    assert found == {"ppo.lr": (0.1, 0.2), "sft": ({}, ABSENT), "sft.lr": (ABSENT, 1.0)}


def evaluated(objects: ObjectStore, label: str, answers: dict[str, tuple[str, float]]) -> StageCall:
    """A held-out evaluation, as its stage leaves it."""
    samples = [Sample(content_id("sample", [prompt]), prompt, [1, 2], 0, None, {}) for prompt in answers]
    completions = b"".join(
        encode_completion(Completion(sample.id, [5, 6], [-0.5, -0.5], answers[sample.prompt][0], "stop"))
        for sample in samples
    )
    rewards = [reward for _, reward in answers.values()]
    return call(
        "evaluate",
        label,
        "EvalReport",
        samples=objects.put_bytes(encode_samples(samples)),
        completions=objects.put_bytes(completions),
        scores=objects.put_json(rewards),
        num_samples=len(rewards),
        mean_reward=math.fsum(rewards) / len(rewards),
    )


def test_held_out_samples_stand_side_by_side_and_those_that_lost_most_come_first(objects: ObjectStore) -> None:
    before = evaluated(objects, "after PPO", {"a": ("x", 1.0), "b": ("y", 0.0), "c": ("z", 0.5)})
    after = evaluated(objects, "after PPO", {"a": ("u", 0.0), "b": ("v", 1.0), "c": ("w", 0.5)})
    latest = evaluated(objects, "latest", {"a": ("no", 0.0)})
    runs = [
        (head(), RunDetail(config={}, calls=(before, latest))),
        (head(IDS[1]), RunDetail(config={}, calls=(after,))),
    ]
    found = compare_held_out(objects, runs)
    assert found is not None
    assert found.means == (0.5, 0.5)
    assert [(pair.prompt, pair.completions, pair.change) for pair in found.pairs] == [
        ("a", ("x", "u"), -1.0),
        ("c", ("z", "w"), 0.0),
        ("b", ("y", "v"), 1.0),
    ]
    early = (head(IDS[2]), RunDetail(config={}, calls=(evaluated(objects, "before", {"a": ("x", 0.0)}),)))
    unlike = compare_held_out(objects, [runs[0], early])
    assert unlike is not None and unlike.labels == ("after PPO", "before") and unlike.gain is None
    only_before = RunDetail(config={}, calls=(before, evaluated(objects, "held out, iteration 1", {"a": ("no", 0.0)})))
    final = final_evaluation(only_before)
    assert final is not None and final.label == "after PPO"
    assert found.gain is not None
    assert (found.gain.gain, found.gain.num_prompts) == (0.0, 3)


def test_what_an_iteration_joined_from_parts_is_shown(objects: ObjectStore) -> None:
    prompt = Sample(content_id("sample", ["a"]), "a", [1, 2], 0, None, {})
    row = Completion(prompt.id, [5, 6], [-0.5, -0.5], "x", "stop", written=[(0, 1), (1, 2)], model_ids=["m", "n"])
    ids = {
        "samples": objects.put_bytes(encode_samples([prompt])),
        "completions": objects.put_bytes(encode_completion(row)),
    }
    drawn = {"samples": content_id("drawn", []), "completions": content_id("drawn", [1])}
    model = content_id("model", [])
    calls = (
        call("batch_inference", "iteration 1", "Completions", model=model, **drawn),
        call("join_completions", "iteration 1", "JoinedCompletions", model=model, **ids),
        call(
            "score_rewards",
            "iteration 1",
            "Scores",
            completions=ids["completions"],
            scores=objects.put_json([0.25]),
            num_samples=1,
            mean=0.25,
        ),
    )
    (only,) = sample_sets(RunDetail(config={}, calls=calls))
    assert (only.label, only.is_held_out, only.model) == ("iteration 1", False, model)
    assert [(row.prompt, row.completion, row.reward) for row in read_set(objects, only)] == [("a", "x", 0.25)]


def test_a_set_that_is_gone_is_told(objects: ObjectStore) -> None:
    detail = RunDetail(config={}, calls=(evaluated(objects, "before", {"a": ("x", 1.0)}),))
    (only,) = sample_sets(detail)
    assert [(row.prompt, row.completion, row.reward, row.num_tokens) for row in read_set(objects, only)] == [
        ("a", "x", 1.0, 2)
    ]
    objects.delete(ContentId(only.scores))
    with pytest.raises(NotFound, match="are not in file"):
        read_set(objects, only)


@pytest.mark.parametrize(
    ("values", "shown"),
    [([], ""), ([math.nan], ""), ([2.0, 2.0], "▄▄"), ([0.0, 3.5, 7.0], "▁▅█"), ([1e308, -1e308], "█▁")],
)
def test_a_curve_in_a_line(values: list[float], shown: str) -> None:
    assert sparklines([values]) == [shown]


@pytest.mark.parametrize("command", ["runs", "show", "compare", "samples"])
def test_texts_of_runs_are_no_commands_to_the_terminal(objects: ObjectStore, monkeypatch, command: str) -> None:
    nasty = "[/x] [INST] \x1b]0;taken\x07"
    records = RunRecords(objects)
    for day, run in enumerate(IDS[1:]):
        calls = (evaluated(objects, nasty, {nasty: (nasty, 0.5)}), call(nasty, nasty))
        detail = RunDetail(config={"text": f"{nasty} {day}"}, facts={"report": nasty}, calls=calls)
        records.write(head(run, day, name="night", state="failed", error=nasty, flow=nasty), detail)
    monkeypatch.setenv("ROLLOUT_STORAGE", objects.url)
    arguments = {"compare": [IDS[1], IDS[2]]}.get(command, [])
    done = CliRunner().invoke(app, [command, *arguments])
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output and "\x07" not in done.output
    assert "[INST]" in done.output


def test_a_run_is_followed_to_its_end(objects: ObjectStore, monkeypatch) -> None:
    RunRecords(objects).write(
        head(state="failed", error="no disk"), RunDetail(config={}, calls=(call("import_model"),))
    )
    monkeypatch.setenv("ROLLOUT_STORAGE", objects.url)
    done = CliRunner().invoke(app, ["tail", "latest"])
    assert done.exit_code == 1
    assert "failed: no disk" in done.output


def test_what_is_no_number_is_null_in_json(objects: ObjectStore, monkeypatch) -> None:
    of = metrics(objects, "", {"step": 1, "loss": math.nan}, {"step": 2, "loss": 1.0})
    RunRecords(objects).write(head(metrics=(of,)), RunDetail(config={}))
    monkeypatch.setenv("ROLLOUT_STORAGE", objects.url)
    done = CliRunner().invoke(app, ["show", "--json"])
    assert json.loads(done.stdout, parse_constant=pytest.fail)["curves"]["ppo_update: loss"]["y"] == [None, 1.0]
