"""Suites of inspect_ai: their tasks come to what inspect_ai makes of the same answers, and no answer is lost."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.config import EndpointModel, InspectSuite, ScriptedBackend
from rollout_core.data.samples import decode_completions_blob, decode_samples
from rollout_core.evaluation import inspect_process, inspect_tasks
from rollout_core.evaluation.inspect_tasks import InspectTasks, evaluate, find_tasks
from rollout_core.evaluation.metrics import Z
from rollout_core.evaluation.reports import SuiteReport, compare_reports
from rollout_core.inference.backend import generator_id
from rollout_core.inference.batch import BatchOptions, Work
from rollout_core.inference.engines import EngineOf, close_engine
from rollout_core.inference.spending import Account
from rollout_core.objects import ObjectStore
from rollout_core.store import InMemoryLightningStore, LightningStore
from tests.inference.batches import ref
from tests.support.answer_server import AnswerServer

CALL = '<tool_call>{"name":"add","arguments":{"x":2,"y":1}}</tool_call>'


@pytest.fixture
def objects() -> ObjectStore:
    return ObjectStore.from_url("memory://inspect")


@pytest.fixture
def store() -> LightningStore:
    return InMemoryLightningStore()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(Path(__file__).with_name("inspected.py"), tmp_path / "tasks.py")
    return tmp_path


@pytest.fixture
def run(objects: ObjectStore, store: LightningStore, folder: Path, chat_base: Path) -> Any:
    """Evaluates a suite; returns its report and what was generated."""

    found: dict[str, InspectTasks] = {}

    def run(suite: InspectSuite, text: str = "3 5 7", **changes: Any) -> tuple[SuiteReport, Work]:
        backend = changes.pop("backend", None) or ScriptedBackend(text=text)
        engine = EngineOf(backend, ref(changes.pop("model", chat_base)))
        options = {"worker_id": "w", "limit": None, "account_of": Account}
        options["options"] = BatchOptions(mode="test", deterministic=False, generator=generator_id(backend))
        key = suite.model_dump_json()
        tasks = found[key] = found.get(key) or find_tasks(suite, folder)
        running = evaluate(
            store, objects, engine, suite, tasks, folder, on_progress=lambda progress: None, **{**options, **changes}
        )
        return asyncio.run(running)

    yield run
    close_engine()


def suite_of(*tasks: str, **keys: Any) -> InspectSuite:
    given = {"generate_config": {"max_tokens": 24, "temperature": 0}, **keys}
    tasks = tuple(f"tasks.py@{name}" for name in tasks)
    return InspectSuite.model_validate({"kind": "inspect", "name": "s", "tasks": tasks, **given})


def answered(objects: ObjectStore, report: SuiteReport) -> dict[str, list[tuple[str, str]]]:
    """Texts and finish reasons of all answers, by their conversations."""
    samples = decode_samples(objects.get_bytes(report.samples))
    found: dict[str, list[tuple[str, str]]] = {}
    for sample, row in zip(samples, decode_completions_blob(objects.get_bytes(report.completions)), strict=True):
        found.setdefault(json.dumps(sample.prompt, sort_keys=True), []).append((row.text, row.finish_reason))
    return found


def by_themselves(folder: Path, names: Sequence[str], answers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What inspect_ai makes of these answers without us, of each task."""
    given = {"tasks": [str(folder / f"tasks.py@{name}") for name in names], "answers": answers}
    command = [sys.executable, "-m", "tests.evaluation.inspect_alone", str(folder / "results.json")]
    environment = {**os.environ, "XDG_DATA_HOME": str(folder)}
    subprocess.run(command, input=json.dumps(given), text=True, check=True, env=environment)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("names", [["sums"], ["several"], ["sums", "chosen", "several"]], ids=" ".join)
def test_answers_come_to_what_inspect_ai_makes_of_them(run: Any, objects: ObjectStore, folder: Path, names: list[str]):
    report, work = run(suite_of(*names))
    assert work.samples == report.num_samples > 0
    logs = by_themselves(folder, names, answered(objects, report))
    filed = objects.get_json(report.questions)
    ours = {metric.name: metric for metric in report.metrics}
    expected: dict[str, float] = {}
    for name, log in zip(names, logs, strict=True):
        found = {(score, metric): value for score, metric, value in log["figures"]}
        scores = {score for score, _ in found}
        for (score, metric), value in found.items():
            if metric == "stderr":
                continue
            label = "/".join([*([name] if len(names) > 1 else []), *([score] if len(scores) > 1 else []), metric])
            expected[label] = value
            if error := found.get((score, "stderr")):
                assert ours[label].upper == pytest.approx(value + Z * error)
        for sample_id, value in log["values"].items():
            assert filed["values"]["accuracy"][filed["ids"].index(f"{name}/{sample_id}")] == value
    assert {label: metric.value for label, metric in ours.items()} == expected


def test_a_question_is_asked_once_an_epoch_and_kept_for_the_next_evaluation(run: Any, objects: ObjectStore):
    report, work = run(suite_of("sums"))
    assert (report.num_questions, report.num_samples, work.samples) == (6, 12, 12)
    filed = objects.get_json(report.questions)
    assert filed["ids"] == [f"sums/q{n}" for n in range(2, 8)]
    samples = decode_samples(objects.get_bytes(report.samples))
    assert [(sample.row_id, sample.extras["epoch"]) for sample in samples[:3]] == [
        ("sums/q2", 1),
        ("sums/q2", 2),
        ("sums/q3", 1),
    ]
    assert [sample["role"] for sample in samples[0].prompt] == ["system", "user"]
    assert [filed["places"], filed["values"]["accuracy"]] == [[1, 3, 5, 7, 9, 11], [0, 1, 0, 1, 0, 1]]
    again, work = run(suite_of("sums"))
    assert again == report and work.samples == 0
    fewer, work = run(suite_of("sums", limit=2, epochs=1))
    assert (fewer.num_questions, fewer.num_samples, work.samples) == (2, 2, 0), "another suite, and the same questions"
    assert fewer.suite_id != report.suite_id
    _, work = run(suite_of("sums", task_args={"epochs": 3}))
    assert work.samples == 6


def test_a_model_calls_tools_and_reads_what_they_give(run: Any, objects: ObjectStore):
    report, work = run(suite_of("acting", generate_config={"max_tokens": 100}), text=CALL)
    # question, call, result, call, result: then the limit of messages is reached
    assert (report.num_questions, report.num_samples) == (2, 4) == (2, work.samples)
    second = decode_samples(objects.get_bytes(report.samples))[1]
    assert [message["role"] for message in second.prompt] == ["user", "assistant", "tool"]
    assert second.prompt[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"x": 2, "y": 1}}
    assert second.prompt[2]["content"] == "3" and second.tools[0]["function"]["name"] == "add"
    again, work = run(suite_of("acting", generate_config={"max_tokens": 100}), text=CALL)
    assert again == report and work.samples == 0


def test_a_grader_is_a_model_at_an_endpoint_and_is_not_asked_twice(run: Any, objects: ObjectStore):
    with AnswerServer(answers={"grade 1": "yes", "grade 2": "no"}) as server:
        grader = {"kind": "endpoint", "url": f"{server.url}", "model": "wise"}
        suite = suite_of("judged", model_roles={"grader": grader})
        report, _ = run(suite, text="21")
        assert (report.headline.value, report.num_samples, len(server.asked)) == (1.0, 4, 4)
        assert run(suite, text="21")[0] == report and len(server.asked) == 4
        worse, _ = run(suite, text="12")
        assert worse.headline.value == 0.0 and len(server.asked) == 8


def test_answers_without_a_score_are_counted_and_named(run: Any, objects: ObjectStore):
    report, _ = run(suite_of("graded_partly", epochs=2))
    assert (report.num_abstained, report.num_score_failed, report.num_failed) == (4, 2, 0)
    assert report.unscored == ("graded_partly/q2", "graded_partly/q4", "graded_partly/q3")
    assert report.num_asked("accuracy") == 6 and report.headline.num_questions == 4
    assert report.headline.value == 0.5, "of q3, q5, q6 and q7: inspect_ai counts a text that is no number as 0"
    assert objects.get_json(report.questions)["values"]["accuracy"] == [None, 0, None, 1, 1, 0]


def test_figures_of_groups_are_named_and_have_the_errors_of_their_groups(run: Any):
    report, _ = run(suite_of("graded_partly", task_args={"without": False}))
    assert report.headline.name == "accuracy" and report.unscored == ()
    found = {metric.name: (metric.value, metric.num_questions) for metric in report.metrics}
    assert found == {
        "accuracy": (pytest.approx(5 / 6), 6),
        "accuracy[subject=a]": (1, 3),
        "accuracy[subject=b]": (pytest.approx(2 / 3), 3),
        "accuracy[subject: all]": (pytest.approx(5 / 6), 6),
    }
    reach = {metric.name: metric.upper and metric.upper - metric.value for metric in report.metrics}
    assert reach["accuracy"] == reach["accuracy[subject: all]"] == pytest.approx(Z * (5 / 36 / 5) ** 0.5)
    assert reach["accuracy[subject=a]"] is None and reach["accuracy[subject=b]"] == pytest.approx(Z / 3)


def test_categories_are_no_numbers(run: Any, objects: ObjectStore):
    report, _ = run(suite_of("categories"))
    found = {metric.name: (metric.value, metric.num_questions) for metric in report.metrics}
    assert found == {"frequency[answered]": (0.75, 4), "frequency[refused]": (0.25, 4)}
    assert report.unscored == () and objects.get_json(report.questions)["values"]["accuracy"] == [None] * 4


def test_two_models_are_compared_question_by_question(run: Any, objects: ObjectStore, other_tiny_model: Path):
    first, _ = run(suite_of("sums"))
    second, _ = run(suite_of("sums"), text="7 ")
    compared = compare_reports(objects, first, second)
    assert {name: pair.gain for name, pair in compared.gains.items()} == {"accuracy": pytest.approx(-1 / 3)}
    assert [flip.question for flip in compared.lost] == ["sums/q3", "sums/q5"]


def test_a_sample_that_fails_ends_the_evaluation_unless_that_is_allowed(run: Any):
    with pytest.raises(Fatal, match=r"task broken: .*this one is broken"):
        run(suite_of("broken"))
    report, work = run(suite_of("broken", fail_on_error=False))
    assert (report.failed, report.num_failed, report.num_questions) == (("broken/q3",), 1, 6)
    assert work.samples < 5, "what was answered before the failure is kept"


def test_answers_of_another_model_are_not_given_from_inspects_own_cache(run: Any):
    report, _ = run(suite_of("cached"))
    other, work = run(suite_of("cached"), text="9")
    assert (report.headline.value, other.headline.value, work.samples) == (0.5, 0.5, 2)
    assert report.samples == other.samples and report.completions != other.completions


def test_a_long_question_comes_whole(run: Any, objects: ObjectStore):
    report, _ = run(suite_of("huge", fail_on_error=False))
    assert (report.num_failed, report.num_truncated) == (0, 1), "it leaves no room, which is no failure"


def test_a_prompt_without_room_ends_its_sample(run: Any, objects: ObjectStore):
    report, _ = run(suite_of("long"))
    assert (report.num_questions, report.num_samples, report.num_truncated) == (2, 1, 1)
    assert objects.get_json(report.questions)["places"] == [None, 0]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("seen", "content of type image; this model takes texts"),
        ("thoughtful_later", "reasoning_effort has no effect on this model and would change its answers"),
        ("forced", "tool_choice: only 'none' and 'auto' are supported"),
    ],
)
def test_what_the_model_cannot_do_is_said(run: Any, task: str, message: str):
    with pytest.raises((Fatal, ConfigError), match=message):
        run(suite_of(task))


def test_an_endpoint_that_is_down_ends_it_with_what_it_said(run: Any):
    with AnswerServer() as server:
        url = server.url
    grader = {"kind": "endpoint", "url": url, "model": "wise", "max_retries": 0}
    suite = suite_of("judged", model_roles={"grader": grader}, fail_on_error=False)
    with pytest.raises(Recoverable, match=r"no answer|refused|cannot connect|Connect"):
        run(suite)


def test_what_ends_the_engine_ends_a_task_that_catches_errors(run: Any):
    with AnswerServer() as server:
        url = server.url
    backend = EndpointModel(kind="endpoint", url=url, model="wise", max_retries=0)
    with pytest.raises(Recoverable, match=r"no answer|refused|cannot connect|Connect"):
        run(suite_of("going_on"), backend=backend)


def test_a_question_whose_answer_came_too_late_is_the_same_question(run: Any, objects: ObjectStore):
    """The first of its answers is held back for longer than the task waits for it."""
    is_too_late = threading.Event()

    def hold(count: int) -> None:
        if count == 1:
            is_too_late.wait(4)

    with AnswerServer({"sort 2 1": "9"}, on_answer=hold) as server:
        backend = EndpointModel(kind="endpoint", url=server.url, model="wise")
        report, _ = run(suite_of("waiting"), backend=backend)
        assert (report.num_samples, len(server.asked)) == (3, 3), "once more where the task asks once more"
        again, work = run(suite_of("waiting"), backend=backend)
        assert again == report and work.samples == 0 and len(server.asked) == 3


@pytest.mark.usefixtures("long_temporary_folder")
def test_temporary_files_may_lie_in_a_folder_of_a_long_name(run: Any):
    report, _ = run(suite_of("sums", limit=1))
    assert report.num_samples == 2


@pytest.fixture
def long_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_tasks_that_change_under_way_are_refused(run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch):
    suite = suite_of("sums")
    before = find_tasks(suite, folder)
    source = (folder / "tasks.py").read_text()
    (folder / "tasks.py").write_text(source.replace("sort {n} 1", "sort {n} 2"))
    assert find_tasks(suite, folder).source != before.source
    monkeypatch.setitem(globals(), "find_tasks", lambda *_: before)
    with pytest.raises(ConfigError, match="the tasks' rows, settings or code differ from when this run began"):
        run(suite)


def test_sets_and_messages_in_metadata_are_the_same_each_time(run: Any):
    report, _ = run(suite_of("with_sets"))
    assert report.num_samples == 1


def test_what_differs_each_time_is_named(run: Any):
    message = "sample random/q2 has another metadata.drawn each time that its task is loaded; draw that by a seed"
    with pytest.raises(ConfigError, match=message):
        run(suite_of("random"))


def test_files_of_sandboxes_are_part_of_a_task(folder: Path):
    def source() -> str:
        return find_tasks(suite_of("boxed"), folder).source

    (folder / "compose.yaml").write_text("services:\n  default:\n    build: {context: box}\n")
    (folder / "box").mkdir()
    (folder / "box" / "Dockerfile").write_text("FROM one\n")
    first = source()
    assert source() == first
    (folder / "box" / "Dockerfile").write_text("FROM two\n")
    second = source()
    (folder / "compose.yaml").write_text("services:\n  default:\n    build: box\n    init: true\n")
    assert len({first, second, source()}) == 3


def test_code_that_a_task_imports_is_part_of_it_and_the_place_of_files_is_not(folder: Path, tmp_path: Path):
    def source(helper: str, where: Path) -> str:
        where.mkdir(exist_ok=True)
        (where / "helper_of_tasks.py").write_text(helper)
        (where / "tasks.py").write_text(
            Path(__file__).with_name("inspected.py").read_text() + "\nfrom helper_of_tasks import WORD  # noqa\n"
        )
        return find_tasks(suite_of("sums"), where).source

    first = source("WORD = 1\n", tmp_path / "one")
    assert source("WORD = 1\n", tmp_path / "two") == first
    assert source("WORD = 2\n", tmp_path / "two") != first


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"tasks": ["none.py"]},
            "no task was found in none.py; expected files with functions under @task, or names",
        ),
        ({"tasks": ["tasks.py@none"]}, "tasks cannot be loaded: "),
        ({"tasks": ["wrong.py"]}, "tasks cannot be loaded: .*division by zero"),
        ({"tasks": ["plain.py"]}, "no task was found in plain.py|tasks cannot be loaded: "),
        ({"task_args": {"epoch": 3}}, "task_args has 'epoch'; expected arguments of the tasks: epochs"),
        (
            {"generate_config": {"max_token": 3}},
            "generate_config has 'max_token', which inspect_ai's GenerateConfig has not; expected ",
        ),
        ({"generate_config": {"max_tokens": "many"}}, "generate_config: "),
        (
            {"generate_config": {"verbosity": "low"}},
            "generate_config has 'verbosity', which has no effect on this model",
        ),
        ({"tasks": ["tasks.py@own"]}, "task own names its model, mockllm/model; leave that out of it"),
        ({"tasks": ["tasks.py@roled"]}, "task roled names a model for role 'critic'; give it by model_roles.critic"),
        ({"tasks": ["tasks.py@thoughtful"]}, "task thoughtful has 'reasoning_effort' in its config, which has no eff"),
        ({"tasks": ["tasks.py@unreduced"]}, "task unreduced reduces its epochs by nothing, .*; give Epochs a reducer"),
        ({"python": "/no/python"}, "python = '/no/python' is no interpreter; expected the path of one that has insp"),
    ],
)
def test_what_cannot_be_run_is_one_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], message: str
):
    (folder / "wrong.py").write_text("from inspect_ai import task\n@task\ndef t():\n    return 1 / 0\n")
    (folder / "plain.py").write_text("x = 1\n")
    suite = InspectSuite.model_validate({"kind": "inspect", "name": "s", "tasks": ["tasks.py@sums"], **keys})
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_DATA_HOME", str(folder))
    with pytest.raises(ConfigError, match=message):
        if suite.python is not None:
            find_tasks(suite, folder)
        inspect_process.handle(inspect_tasks._given(suite, folder, folder, None), lambda place: None)


def test_tasks_without_a_figure_are_refused(run: Any):
    with pytest.raises(ConfigError, match="suite s: no metric of its tasks came to a number; give their scorers metr"):
        run(suite_of("unscored"))


def test_another_interpreter_does_the_same(folder: Path):
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)
    suite = suite_of("sums", python="./python")
    assert find_tasks(suite, folder) == find_tasks(suite_of("sums"), folder)
    assert suite.cache_identity() == suite_of("sums", max_connections=3).cache_identity()


def test_more_is_needed_than_one_name(chat_base: Path):
    with pytest.raises(ValueError, match="tasks"):
        InspectSuite.model_validate({"kind": "inspect", "name": "s", "tasks": []})
