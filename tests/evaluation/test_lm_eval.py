"""Suites of lm-evaluation-harness: what its tasks ask, and that answers come to what it makes of them itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.config import LmEvalSuite, SamplingParams, SuiteGuard
from rollout_core.data.datasets import PromptRow, parse_rows
from rollout_core.data.samples import Completion, Sample, encode_completion, encode_samples
from rollout_core.evaluation.lm_eval_tasks import LmEvalRequests, ask_tasks, lower_is_better, report, sampling_of
from rollout_core.evaluation.moments import SuiteWatch, change_of
from rollout_core.evaluation.reports import SuiteReport, compare_reports
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Completions
from rollout_core.promotion.guards import Measured, judge_guard
from tests.evaluation.lm_eval_tasks import ROWS, write_tasks

ANSWERS = {row["question"]: f" {row['answer']}" if place % 2 else " 2" for place, row in enumerate(ROWS)}
METRIC = "metric_list:\n  - {metric: exact_match, aggregation: mean, higher_is_better: true}\n"


@pytest.fixture
def objects() -> ObjectStore:
    return ObjectStore.from_url("memory://lm-eval")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "tasks").mkdir()
    return write_tasks(tmp_path / "tasks")


def suite_of(*tasks: str, **keys: Any) -> LmEvalSuite:
    return LmEvalSuite.model_validate({"kind": "lm_eval", "name": "s", "tasks": tasks, **keys})


def answer_to(context: str, place: int) -> str:
    """The stored answer to a prompt: by its last question, and by the number of the copy."""
    question = context.removesuffix(" =").rpartition("sort")[2]
    return f"{ANSWERS[f'sort{question}']}{', 3' if place else ''}"


def likelihood(context: str, continuation: str) -> tuple[float, bool]:
    """The stored one of a continuation, exact in float32, and whether it is the greedy one."""
    number = int(hash_bytes(f"{context}|{continuation}".encode())[:4], 16)
    return -(number % 64) / 8, number % 2 == 0


class Stored(LM):
    """A model with these answers, for lm_eval's own command."""

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        seen: dict[int, int] = {}
        found = []
        for request in requests:
            place = seen[id(request)] = seen.get(id(request), -1) + 1
            found.append(answer_to(request.args[0], place))
        return found

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return [likelihood(*request.args) for request in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        return [likelihood("", request.args[0])[0] for request in requests]


def by_themselves(folder: Path, tasks: Sequence[str], model: LM, **options: Any) -> Any:
    """What lm_eval makes of it without us."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return simple_evaluate(model, tasks=list(tasks), task_manager=manager, bootstrap_iters=200, **options)


def completed(objects: ObjectStore, asked: LmEvalRequests, model: str = "a", wrong: bool = False) -> list[Completions]:
    """The stored answers, as completions of each drawing."""
    found = []
    for drawing in asked.asked:
        rows = parse_rows(objects.get_bytes(drawing.prompts), "prompts", PromptRow)
        samples, made = [], []
        for row in rows:
            for place in range(drawing.samples):
                key = hash_bytes(f"{model} {row.id} {place} {drawing}".encode())
                samples.append(Sample(key, row.prompt, [1], place, row.id, row.extras))
                if drawing.scored:
                    text = row.extras["continuation"]
                    total, greedy = likelihood(row.prompt or "", text)
                    made.append(Completion(key, [3], [total], text, "stop", greedy=greedy))
                else:
                    text = " 9" if wrong else answer_to(row.prompt or "", place)
                    made.append(Completion(key, [3], [-0.5], text, "stop"))
        found.append(
            Completions(
                completions=objects.put_bytes(b"".join(map(encode_completion, made))),
                samples=objects.put_bytes(encode_samples(samples)),
                model=ContentId(hash_bytes(model.encode())),
                num_samples=len(samples),
                num_tokens=len(samples),
                finish_reasons={"stop": len(samples)},
            )
        )
    return found


def reported(objects: ObjectStore, suite: LmEvalSuite, folder: Path, **how: Any) -> SuiteReport:
    asked = ask_tasks(suite, folder).filed(objects)
    return report(objects, suite, asked, completed(objects, asked, **how), folder)


def figures(results: Mapping[str, Any]) -> dict[str, Any]:
    """Of lm_eval's results, those of tasks and groups."""
    return {
        entry: {name: value for name, value in found.items() if "," in name}
        for entry, found in results["results"].items()
    }


@pytest.mark.parametrize(
    "tasks",
    [
        ["sums"],
        ["translated"],
        ["several"],
        ["repeated"],
        ["chosen"],
        ["told"],
        ["read"],
        ["all_sums"],
        ["sums", "repeated", "chosen", "read"],
    ],
    ids=" ".join,
)
def test_stored_answers_come_to_what_lm_eval_makes_of_them(objects: ObjectStore, folder: Path, tasks: list[str]):
    suite = suite_of(*tasks, include_path=str(folder), bootstrap_iters=200)
    found = reported(objects, suite, folder)
    theirs = by_themselves(folder, tasks, Stored())
    filed = objects.get_json(found.questions)
    assert figures(filed["lm_eval"]) == figures(theirs)
    values = {
        (task, example["doc_id"], example["filter"], metric): example[metric]
        for task, examples in theirs["samples"].items()
        for example in examples
        for metric in example["metrics"]
    }
    for (task, doc, chosen, metric), value in values.items():
        label = f"{metric},{chosen}".removesuffix(",none")
        label = label if len(theirs["results"]) == 1 else f"{task}/{label}"
        if isinstance(value, float | int):
            assert filed["values"][label][filed["ids"].index(f"{task}/{doc}")] == value
        else:
            assert label not in filed["values"], "one that is no number, such as a pair for BLEU"
    for metric in found.metrics:
        entry, _, name = metric.name.rpartition("/")
        entry, name = entry or tasks[0], name if "," in name else f"{name},none"
        assert metric.value == theirs["results"][entry][name]
        error = theirs["results"][entry][name.replace(",", "_stderr,")]
        if metric.upper is not None:
            assert metric.upper - metric.value == pytest.approx(1.959964 * error)


def test_prompts_are_rows_of_their_own_and_drawn_as_their_tasks_say(folder: Path):
    asked = ask_tasks(suite_of("sums", "repeated", include_path=str(folder)), folder)
    assert [(len(drawn.rows), drawn.sampling, drawn.samples) for drawn in asked.drawings] == [
        (6, SamplingParams(temperature=0.0, max_tokens=8, stop=(",",)), 1),
        (6, SamplingParams(temperature=0.8, top_p=0.9, max_tokens=4), 3),
    ]
    row = asked.drawings[0].rows[1]
    assert (row.id, row.extras) == ("sums/1", {"task": "sums", "doc_id": 1})
    assert row.prompt is not None and row.prompt.endswith("sort 3 1 =") and row.prompt.count("=") == 3
    again = ask_tasks(suite_of("sums", "repeated", include_path=str(folder)), folder)
    assert again == asked
    other = ask_tasks(suite_of("sums", include_path=str(folder), fewshot_random_seed=5), folder)
    assert other.drawings[0].rows[1].prompt != row.prompt


def test_settings_are_those_of_its_command(folder: Path):
    options: dict[str, Any] = {"num_fewshot": 1, "limit": 2, "gen_kwargs": {"max_gen_toks": 3, "temperature": 0.5}}
    suite = suite_of("sums", include_path=str(folder), system_instruction="Sort.", **options)
    asked = ask_tasks(suite, folder)
    [drawn] = asked.drawings
    theirs = by_themselves(folder, ["sums"], Stored(), system_instruction="Sort.", **options)
    assert [row.prompt for row in drawn.rows] == [
        example["arguments"][0][0] for example in theirs["samples"]["sums"][:2]
    ]
    assert drawn.sampling == SamplingParams(temperature=0.5, max_tokens=3, stop=(",",))


def test_conversations_are_rendered_where_the_model_is(folder: Path):
    suite = suite_of("sums", include_path=str(folder), apply_chat_template=True, system_instruction="Sort.")
    [drawn] = ask_tasks(suite, folder).drawings
    assert [message.role for message in drawn.rows[0].messages or ()] == ["system", *["user", "assistant"] * 2, "user"]


def test_two_models_are_compared_question_by_question(objects: ObjectStore, folder: Path):
    suite = suite_of("sums", include_path=str(folder))
    before, after = reported(objects, suite, folder), reported(objects, suite, folder, model="b", wrong=True)
    assert before.suite_id == after.suite_id and before.model != after.model
    compared = compare_reports(objects, before, after)
    assert compared.gains["exact_match,strict"].gain == -0.5 and len(compared.lost) == 3 and not compared.gained
    assert compared.lost[0].completions == (" 1 3", " 9") and compared.lost[0].question == "sums/1"


def test_the_answer_of_a_row_is_part_of_what_is_asked(objects: ObjectStore, folder: Path):
    suite = suite_of("sums.yaml")
    asked = ask_tasks(suite, folder).filed(objects)
    (folder / "rows.jsonl").write_text("".join(json.dumps({**row, "answer": "9"}) + "\n" for row in ROWS))
    with pytest.raises(ConfigError, match="ask something else than when their prompts were made"):
        report(objects, suite, asked, completed(objects, asked), folder)


def included(folder: Path, *, metric: str = METRIC, **code: str) -> LmEvalSuite:
    """A suite of a task that includes its metric from another folder, which has code beside it."""
    for name in ("base", "own"):
        (folder / name).mkdir(exist_ok=True)
    for name, text in code.items():
        (folder / "base" / f"{name}.py").write_text(text)
    (folder / "base" / "base.yaml").write_text(metric)
    task = (folder / "sums.yaml").read_text().partition("metric_list:")[0]
    (folder / "own" / "own.yaml").write_text(f"include: ../base/base.yaml\n{task}")
    return suite_of("own/own.yaml")


def test_settings_that_a_task_includes_are_part_of_what_is_asked(objects: ObjectStore, folder: Path):
    suite = included(folder)
    before = ask_tasks(suite, folder).filed(objects)
    found = report(objects, suite, before, completed(objects, before), folder)
    included(folder, metric=METRIC.replace("mean", "median"))
    with pytest.raises(ConfigError, match="settings or code differ from when their prompts were made; start again"):
        report(objects, suite, before, completed(objects, before), folder)
    assert reported(objects, suite, folder).suite_id != found.suite_id


def test_code_that_a_task_uses_is_part_of_what_is_asked(folder: Path):
    metric = METRIC + "process_results: !function scoring.score\n"
    scoring = """
import sys
sys.path.insert(0, __file__.rpartition("/")[0])
from halves_of_a_test import half
def score(doc, results):
    return {"exact_match": half()}
"""
    helper = "def half():\n    return 0.5\n"

    def source(scoring: str, helper: str) -> ContentId:
        return ask_tasks(included(folder, metric=metric, scoring=scoring, halves_of_a_test=helper), folder).source

    first = source(scoring, helper)
    assert len({first, source(scoring + "# more\n", helper), source(scoring, helper + "# more\n")}) == 3
    assert source(scoring, helper) == first


def test_files_that_no_task_uses_and_places_of_files_are_not(folder: Path, tmp_path: Path):
    (tmp_path / "moved").mkdir()
    other = write_tasks(tmp_path / "moved")
    before, again = (ask_tasks(included(where, unused=f"WHERE = '{where}'\n"), where) for where in (folder, other))
    assert again == before


def test_only_a_metric_of_which_more_is_better_says_what_is_right(objects: ObjectStore, folder: Path):
    values = objects.get_json(reported(objects, suite_of("told.yaml"), folder).questions)["values"]
    assert values["accuracy"] == values["acc"] and {*values["acc"]} == {0, 1}
    fewer = included(folder, metric=METRIC.replace("true", "false"))
    values = objects.get_json(reported(objects, fewer, folder).questions)["values"]
    assert values["accuracy"] == [None] * len(ROWS) and None not in values["exact_match,strict"]


@pytest.mark.parametrize("by_size", [True, False])
def test_a_groups_figure_stands_first_and_is_paired_by_the_questions_of_its_tasks(
    objects: ObjectStore, folder: Path, by_size: bool
):
    (folder / "all_sums.yaml").write_text(
        "group: all_sums\ntask: [sums, group]\n"
        f"aggregate_metric_list:\n  - {{metric: exact_match, weight_by_size: {by_size}}}\n"
    )
    (folder / "group.yaml").write_text(
        "group: group\ntask: [several, few]\naggregate_metric_list:\n  - {metric: exact_match, weight_by_size: true}\n"
    )
    few = (folder / "several.yaml").read_text().replace("task: several", "task: few").replace("rows.jsonl", "few.jsonl")
    (folder / "few.yaml").write_text(few)
    (folder / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    suite = suite_of("all_sums", include_path=str(folder))
    before, after = (
        reported(objects, suite, folder, model=name, wrong=wrong) for name, wrong in (("a", False), ("b", True))
    )
    named = [metric.name for metric in before.metrics]
    assert named[:4] == [
        *(f"all_sums/exact_match{each}" for each in (",flexible", "", ",strict")),
        "group/exact_match",
    ]
    assert set(named) == set(ask_tasks(suite, folder).metrics)
    compared = compare_reports(objects, before, after)
    assert set(compared.gains) == set(named)
    for metric in (*before.metrics, *after.metrics):
        gain = compared.gains[metric.name]
        side = gain.mean_before if metric in before.metrics else gain.mean_after
        assert side == pytest.approx(metric.value), metric.name
    assert ("weights" in objects.get_json(before.questions)) == (not by_size)


def test_of_a_perplexity_less_is_better_and_no_question_has_one_to_pair(objects: ObjectStore, folder: Path):
    before, after = (reported(objects, suite_of("told.yaml"), folder, model=name) for name in "ab")
    assert lower_is_better(objects, after) == {"perplexity"}
    assert {metric.name for metric in after.metrics} == {"perplexity", "acc"}
    assert set(compare_reports(objects, before, after).gains) == {"acc"}
    watch = SuiteWatch("perplexity", 1)
    for number, value in enumerate((4.0, 3.0, 3.5), start=1):
        metric = after.figure("perplexity").model_copy(update={"value": value})
        watch.note(number, after.model_copy(update={"metrics": (metric,)}), lower_is_better(objects, after))
    assert watch.selected == "iteration 2, with the lowest perplexity on suite s (3.0000)"
    assert watch.end == (
        "after iteration 3, as the last 1 evaluations brought no lower perplexity on suite s than iteration 2 (3.0000)"
    )


@pytest.mark.parametrize("max_drop", [0.4, 0.6])
def test_a_metric_of_which_less_is_better_falls_where_it_rises(objects: ObjectStore, folder: Path, max_drop: float):
    """The second model answers nothing that the task wants, which the first one does in half of the questions."""
    fewer = included(folder, metric=METRIC.replace("true", "false"))
    after, before = (reported(objects, fewer, folder, model=name, wrong=name == "b") for name in "ab")
    guard = SuiteGuard(kind="suite", name="s", metric="exact_match,strict", max_drop=max_drop, confidence=0.95)
    [found] = judge_guard(guard, Measured(objects, {"latest": before}, after))
    assert found.line.startswith(
        "suite s: exact_match,strict 0.0000 (latest) -> 0.5000, change (less is better) 0.5000, "
    )
    assert found.line.endswith(f"may rise by {max_drop}, and so may the interval's upper end") and not found.passed
    [found] = judge_guard(guard.model_copy(update={"confidence": 0.0}), Measured(objects, {"latest": before}, after))
    assert found.passed == (max_drop > 0.5)
    change = change_of(objects, before, after, "exact_match,strict")
    assert change is not None and change.fall == 0.5 and change.largest_fall == change.gain.upper


def test_a_metric_that_a_report_lacks_is_no_figure(objects: ObjectStore, folder: Path):
    with pytest.raises(ConfigError, match="suite s came to no metric 'acc_norm'; expected one of perplexity, acc"):
        reported(objects, suite_of("told.yaml"), folder).figure("acc_norm")


def test_tasks_without_a_figure_are_refused(objects: ObjectStore, folder: Path):
    metric = METRIC.replace("mean", "!function scoring.nothing")
    suite = included(folder, metric=metric, scoring="def nothing(values):\n    return 'much'\n")
    with pytest.raises(ConfigError, match="suite s: no metric of its tasks came to a number; look at their metric_l"):
        reported(objects, suite, folder)


def test_another_interpreter_does_the_same(objects: ObjectStore, folder: Path):
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "bin" / "python").chmod(0o755)
    suite, other = (suite_of("sums.yaml", python=python) for python in (None, "bin/python"))
    assert ask_tasks(other, folder) == ask_tasks(suite, folder)
    assert reported(objects, other, folder) == reported(objects, suite, folder)


@pytest.mark.parametrize(
    ("tasks", "keys", "message"),
    [
        (["repeatde"], {}, "task 'repeatde' is neither known to lm_eval nor a file; did you mean 'repeated'?"),
        (["sums", "none.yaml"], {}, "task 'none.yaml' is neither known to lm_eval nor a file"),
        (["broken.yaml"], {}, "tasks cannot be loaded: "),
        (["lost.yaml"], {}, "tasks cannot be loaded: FileNotFoundError: "),
        (["beams.yaml"], {}, "task beams: generation_kwargs has num_beams = 4, which has no meaning here"),
        (["sums"], {"gen_kwargs": {"max_gen_toks": 0}}, "task sums: generation_kwargs: "),
        (["sums"], {"python": "/no/python"}, "python = '/no/python' is no interpreter"),
        (["unsafe.yaml"], {}, "lm_eval: ValueError: Attempted to run task: unsafe which is marked as unsafe"),
    ],
)
def test_what_cannot_be_asked_is_one_error(folder: Path, tasks: list[str], keys: dict[str, Any], message: str):
    sums = (folder / "sums.yaml").read_text()
    (folder / "broken.yaml").write_text("task: [broken\n")
    (folder / "lost.yaml").write_text(sums.replace("task: sums", "task: lost").replace("rows.jsonl", "lost.jsonl"))
    (folder / "beams.yaml").write_text(
        sums.replace("task: sums", "task: beams").replace('[","]', '[","], num_beams: 4')
    )
    (folder / "unsafe.yaml").write_text(sums.replace("task: sums", "task: unsafe\nunsafe_code: true"))
    with pytest.raises(ConfigError) as refused:
        ask_tasks(suite_of(*tasks, include_path=str(folder), **keys), folder)
    assert str(refused.value).startswith(message)


def test_what_draws_an_answer_has_our_names():
    def drawn(**given: Any) -> SamplingParams:
        generation = {"max_gen_toks": 8, "until": [], "do_sample": False, **given}
        return sampling_of({"task": "t", "kind": "generate_until", "generation": generation})

    assert drawn() == SamplingParams(temperature=0.0, max_tokens=8)
    assert drawn(do_sample=True) == SamplingParams(temperature=1.0, max_tokens=8), "as transformers has it"
    assert drawn(temperature=0.7) == drawn(), "without do_sample it is greedy"
    assert drawn(until=["", "\n"], top_k=0, num_beams=1).stop == ("\n",)
    assert drawn(do_sample=True, top_k=5, repetition_penalty=1.1, min_new_tokens=2) == SamplingParams(
        temperature=1.0, top_k=5, repetition_penalty=1.1, min_tokens=2, max_tokens=8
    )
