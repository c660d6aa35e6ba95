"""Evaluations by suites: what is reported, that nothing is generated twice, and that a killed one goes on."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from rollout_core.base.errors import Fatal
from rollout_core.config import EndpointModel, EvalConfig, SamplingParams
from rollout_core.evaluation.reports import SuiteReport, compare_reports
from rollout_core.evaluation.suite_files import read_suite
from rollout_core.inference import engines
from rollout_core.inference.backend import Request
from rollout_core.inference.endpoint_model import body_of
from rollout_core.inference.spending import Account
from rollout_core.runs.evaluations import evaluated_models, find_evaluated
from rollout_core.runs.run_records import RunRecords
from rollout_core.runs.run_samples import read_set, sample_sets
from tests.flows.conftest import finished_samples, objects, wait_for
from tests.rewards.judge_server import JudgeServer
from tests.support.answer_server import AnswerServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

ROLLOUT = ("-c", "from flows.cli import main; main()")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: str) -> Path:
    rows = [{"question": f"sort {n} 1", "answer": f"1 {n}", "id": f"q{n}"} for n in range(2, 8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"prompt": f"sort {n} 1 =", "answer": "sort 3"} for n in range(2, 6)]
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sums(**changes: Any) -> dict[str, Any]:
    return {
        "name": "sums",
        "samples": 4,
        "rows": {"path": "sums.jsonl"},
        "prompt": {
            "text": "{{ question }} =",
            "few_shot": {"rows": {"path": "sums.jsonl"}, "count": 2, "answer": " {{ answer }}", "separator": " "},
        },
        "sampling": {"temperature": 1.0, "max_tokens": 8},
        "scorer": {"kind": "regex", "pattern": r"(\d)", "answer_key": "answer"},
        **changes,
    }


PLAIN = {
    "name": "plain",
    "rows": {"path": "plain.jsonl"},
    "sampling": {"temperature": 0.0, "max_tokens": 32},
    "scorer": {"kind": "text", "compare": "contains"},
}


def evaluate(model: Path, *suites: dict[str, Any], kind: str = "transformers") -> list[SuiteReport]:
    from flows.evaluate import evaluate_suites

    config = EvalConfig.model_validate({"model": {"uri": str(model)}, "backend": {"kind": kind}, "suites": suites})
    return [SuiteReport.model_validate(report) for report in evaluate_suites(config)["reports"]]


def last_states() -> dict[str, str]:
    """Of the stages of the last run, by title."""
    records = RunRecords(objects())
    _, detail = records.detail(records.find("latest"))
    return {f"{call.stage} {call.label}".strip(): call.state for call in detail.calls}


def test_an_evaluation_is_held_to_the_plan_of_a_file(folder: Path, tiny_model: Path):
    suite = (
        'name = "plain"\nrows = { path = "plain.jsonl" }\nsampling = { temperature = 0.0, max_tokens = 32 }\n'
        'scorer = { kind = "text", compare = "contains" }\n'
    )
    (folder / "plain.toml").write_text(suite)
    model = f'[model]\nuri = "{tiny_model}"\n[backend]\nkind = "scripted"\n'
    (folder / "eval.toml").write_text(f"{model}[[suites]]\n{suite}")
    planned = CliRunner().invoke(app, ["plan", "--config", "eval.toml", "--lock", "plan.json"])
    assert planned.exit_code == 0, planned.output
    command = ["eval", "run", str(tiny_model), "--suite", "plain.toml", "--backend", "scripted"]
    command += ["--locked", "plan.json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "0.2500" in done.stdout, done.output
    refused = CliRunner().invoke(app, [*command, "--dry-run"])
    assert refused.exit_code == 2 and "`rollout plan --config FILE --locked plan.json`" in refused.stderr
    (folder / "plain.jsonl").write_text('{"prompt": "sort 7 1 =", "answer": "sort 3"}\n')
    other = CliRunner().invoke(app, command)
    assert other.exit_code == 2 and "planned content" in other.stderr, other.output


def test_answers_are_scored_reported_and_compared(folder: Path, tiny_model: Path, other_tiny_model: Path):
    [report] = evaluate(tiny_model, PLAIN, kind="scripted")  # answers SCRIPTED: and the prompt
    assert [(metric.name, metric.value) for metric in report.metrics] == [("mean", 0.25), ("accuracy", 0.25)]
    accuracy = report.headline
    assert (accuracy.lower, accuracy.upper) == pytest.approx((0.045587, 0.699358), abs=1e-5)  # Wilson's of 1 in 4
    filed = objects().get_json(report.questions)
    assert filed["ids"] == ["1", "2", "3", "4"] and filed["places"] == [0, 1, 2, 3]
    assert filed["values"] == {"mean": [0, 1, 0, 0], "accuracy": [0, 1, 0, 0]}

    [other] = evaluate(other_tiny_model, PLAIN, kind="transformers")
    compared = compare_reports(objects(), report, other)
    assert [(flip.question, flip.shares) for flip in compared.lost] == [("2", (1.0, 0.0))] and not compared.gained
    assert compared.lost[0].completions[0] == "SCRIPTED:sort 3 1 ="
    assert (compared.gains["accuracy"].gain, compared.gains["accuracy"].num_prompts) == (-0.25, 4)

    models = evaluated_models(RunRecords(objects()))
    assert [model.model for model in models] == [other.model, report.model]
    assert find_evaluated(models, report.model[:6]).reports == {"plain": report}
    assert find_evaluated(models, str(other_tiny_model)).model == other.model

    listed = CliRunner().invoke(app, ["eval", "list"])
    assert listed.exit_code == 0, listed.stderr
    head, *rows = listed.stdout.splitlines()
    assert head.split() == ["model", "from", "evaluated", "plain"]
    assert [row.split()[0] for row in rows] == [other.model[:12], report.model[:12]]
    assert "accuracy 0.2500 (0.0456 to 0.6994)" in rows[1]
    both = ["eval", "compare", report.model[:8], str(other_tiny_model)]
    told = CliRunner().invoke(app, both).stdout
    assert re.search(r"^accuracy +0\.2500 +0\.0000 +-0\.2500 +-\S+ to \+0\.0000 +4$", told, re.MULTILINE), told
    assert "questions that flipped: 1 lost, 0 gained\nlost 2: sort 3 1 =\n    SCRIPTED:sort 3 1 =\n" in told
    document = json.loads(CliRunner().invoke(app, [*both, "--format", "json"]).stdout)
    assert document["models"] == [report.model, other.model]
    assert document["suites"][0]["lost"]["count"] == 1 and document["not_compared"] == []

    (folder / "plain.jsonl").write_text('{"prompt": "sort 9 1 =", "answer": "9"}\n')
    evaluate(other_tiny_model, PLAIN, kind="scripted")
    refused = CliRunner().invoke(app, both)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "suite plain was changed between the two evaluations" in refused.stderr

    # What was filed of an evaluation may be gone, by housekeeping say.
    [again] = evaluate(tiny_model, PLAIN, kind="scripted")
    objects().delete(again.questions)
    gone = CliRunner().invoke(app, both)
    assert (gone.exit_code, gone.stdout) == (2, "")
    assert re.fullmatch(r"rollout: the answers to plain are not in .* evaluate the model again\n", gone.stderr)


def test_one_engine_answers_all_suites_and_a_second_evaluation_generates_nothing(
    folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    started: list[str] = []
    start = engines.build_backend

    def counted(config: Any, *arguments: Any, **options: Any) -> Any:
        started.append(config.kind)
        return start(config, *arguments, **options)

    monkeypatch.setattr(engines, "build_backend", counted)
    first = evaluate(tiny_model, sums(), PLAIN)
    assert started == ["transformers"]
    assert first[0].num_samples == 24 and first[0].num_questions == 6
    assert [metric.name for metric in first[0].metrics] == ["mean", "avg@4", "pass@4", "maj@4"]
    answers = finished_samples()

    assert evaluate(tiny_model, sums(), PLAIN) == first
    states = last_states()
    assert {state for title, state in states.items() if not title.startswith("import_")} == {"Cached"}
    # Another threshold is another report of the same answers and scores; another scorer, other scores of the answers.
    [looser] = evaluate(tiny_model, sums(threshold=0.0))
    assert looser.headline.value == 1.0 and looser.suite_id != first[0].suite_id
    assert [title for title, state in last_states().items() if state == "Completed"] == ["report_suite sums"]
    [other] = evaluate(tiny_model, sums(scorer={"kind": "text", "compare": "numeric"}))
    assert other.suite_id != first[0].suite_id and other.completions == first[0].completions
    assert started == ["transformers"] and finished_samples() == answers


def test_killed_while_it_answers_the_next_run_goes_on_and_comes_to_the_same_report(
    folder: Path, tiny_model: Path, start_process: Any, prefect_server: str
):
    questions = [{"question": f"sort {n} {n + 1}", "answer": str(n % 7), "id": f"q{n}"} for n in range(60)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (folder / "sums.toml").write_text(
        f'name = "sums"\nsamples = 4\nrows = {{ path = "{folder}/sums.jsonl" }}\n'
        'prompt = { text = "{{ question }} =" }\n'
        'sampling = { temperature = 1.0, max_tokens = 64 }\nscorer = { kind = "text", compare = "contains" }\n'
    )
    slow = ("--backend", "scripted", "--set", "backend.delay_seconds=0.03")

    def run() -> subprocess.Popen[str]:
        environment = {"PREFECT_API_URL": prefect_server, "COLUMNS": "200"}
        command = ("eval", "run", str(tiny_model), "--suite", str(folder / "sums.toml"), *slow)
        return start_process(*ROLLOUT, *command, env=environment)

    process = run()
    wait_for(lambda: finished_samples() >= 20, "20 answers", process=process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = finished_samples()
    assert 20 <= kept < 240
    process = run()
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output[-4000:]
    assert finished_samples() == 240
    assert re.search(r"^sums +avg@4 ", output, re.MULTILINE), output[-4000:]
    [model] = evaluated_models(RunRecords(objects()))
    resumed = model.reports["sums"]
    values = objects().get_json(resumed.questions)["values"]["mean"]
    wanted = [float(row["answer"] in f"SCRIPTED:{row['question']} =") for row in questions]
    assert 0 < sum(wanted) < 60 and values == wanted and resumed.num_samples == 240


DIGITS = {
    "name": "digits",
    "rows": {"path": "choices.jsonl"},
    "prompt": {"text": "sort {{ digits }} ="},
    "scorer": {"kind": "choice"},
}


def write_choices(folder: Path, count: int) -> None:
    rows = [
        {"id": f"c{n}", "digits": f"{n} 1", "choices": [f"1 {n}", f"{n} 1", "x"], "answer": n % 3}
        for n in range(2, count + 2)
    ]
    (folder / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_choices_are_scored_by_log_likelihood_and_a_second_evaluation_scores_nothing(folder: Path, tiny_model: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_choices(folder, 8)
    [report] = evaluate(tiny_model, DIGITS)
    tokenizer, policy = AutoTokenizer.from_pretrained(tiny_model), AutoModelForCausalLM.from_pretrained(tiny_model)
    wanted: dict[str, list[float]] = {"acc": [], "acc_norm": []}
    for line in (folder / "choices.jsonl").read_text().splitlines():
        row, totals = json.loads(line), []
        before = tokenizer(f"sort {row['digits']} =")["input_ids"]
        for choice in row["choices"]:
            ids = tokenizer(f"sort {row['digits']} = {choice}")["input_ids"]
            with torch.no_grad():
                logprobs = policy(torch.tensor([ids])).logits[0].log_softmax(-1)
            totals.append(sum(float(logprobs[place - 1, ids[place]]) for place in range(len(before), len(ids))))
        normed = [total / len(choice) for total, choice in zip(totals, row["choices"], strict=True)]
        for name, values in (("acc", totals), ("acc_norm", normed)):
            wanted[name].append(float(values.index(max(values)) == row["answer"]))
    filed = objects().get_json(report.questions)
    assert {name: filed["values"][name] for name in wanted} == wanted
    assert [metric.name for metric in report.metrics] == ["acc", "acc_norm"]
    assert (report.num_questions, report.num_samples) == (8, 24)
    scored = finished_samples()
    assert evaluate(tiny_model, DIGITS) == [report] and finished_samples() == scored
    assert {state for title, state in last_states().items() if not title.startswith("import_")} == {"Cached"}
    records = RunRecords(objects())
    [shown] = sample_sets(records.detail(records.heads()[0])[1])
    right = filed["values"]["acc"]
    assert [row.reward for row in read_set(objects(), shown)] == [right[place // 3] for place in range(24)]

    [other] = evaluate(tiny_model, {**DIGITS, "prompt": {"text": "order {{ digits }} ="}})
    compared = compare_reports(objects(), report, other)
    assert compared.gains["acc"].num_prompts == 8 and "8 questions of 8 and 8 are paired" in (compared.remark or "")


def test_killed_while_it_scores_choices_the_next_run_goes_on(
    folder: Path, tiny_model: Path, start_process: Any, prefect_server: str
):
    write_choices(folder, 40)
    (folder / "digits.toml").write_text(
        f'name = "digits"\nrows = {{ path = "{folder}/choices.jsonl" }}\n'
        'prompt = { text = "sort {{ digits }} =" }\nscorer = { kind = "choice" }\n'
    )
    slow = ("--backend", "scripted", "--set", "backend.delay_seconds=0.08", "--set", "backend.text=1 7")

    def run() -> subprocess.Popen[str]:
        environment = {"PREFECT_API_URL": prefect_server, "COLUMNS": "200"}
        command = ("eval", "run", str(tiny_model), "--suite", str(folder / "digits.toml"), *slow)
        return start_process(*ROLLOUT, *command, env=environment)

    process = run()
    wait_for(lambda: finished_samples() >= 20, "20 choices", process=process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert 20 <= finished_samples() < 120
    process = run()
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output[-4000:]
    assert finished_samples() == 120
    [model] = evaluated_models(RunRecords(objects()))
    # A token of any but the scripted text has a log-probability of -1, so of other questions the shortest choice wins.
    values = objects().get_json(model.reports["digits"].questions)["values"]["acc"]
    assert values == [float(n % 3 == (0 if n == 7 else 2)) for n in range(2, 42)]


@pytest.mark.parametrize("mode", ["score", "pairwise"])
def test_a_judge_is_compared_with_people_where_rows_have_their_judgements(folder: Path, tiny_model: Path, mode: str):
    people = [1, 4, 3, None, 9] if mode == "score" else ["reference", "completion", "tie", None, "completion"]
    rows = [{"prompt": "x" * n, "human": one, "other": "xxx"} for n, one in zip((1, 2, 3, 5, 7), people, strict=True)]
    (folder / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = {"name": "judged", "rows": {"path": "judged.jsonl"}, "sampling": {"temperature": 0.0, "max_tokens": 64}}
    with JudgeServer() as server:
        judge = {"kind": "judge", "judges": [{"url": server.url, "model": "wise"}], "mode": mode}
        judge |= {"reference_key": "other"} if mode == "pairwise" else {}
        [plain] = evaluate(tiny_model, {**suite, "scorer": judge}, kind="scripted")
        asked = len(server.bodies)
        [report] = evaluate(tiny_model, {**suite, "scorer": {**judge, "human_key": "human"}}, kind="scripted")
        assert len(server.bodies) == asked, "the answers are kept"
    known, found = len(plain.metrics), {metric.name: metric for metric in report.metrics}
    assert report.metrics[:known] == plain.metrics and report.headline == plain.headline
    values = {name: round(found[name].value, 4) for name in list(found)[known:]}
    if mode == "score":  # judge 1, 2, 3, 7 and people 1, 4, 3, 9
        assert values == {"human_spearman": 0.8, "human_concordance": round(5 / 6, 4)}
    else:  # judge: reference, reference, tie, completion
        assert values == {"human_agreement": 0.75, "human_kappa": round((0.75 - 5 / 16) / (11 / 16), 4)}
    assert {found[name].num_questions for name in values} == {4}


def ask(server: AnswerServer, *suites: dict[str, Any], **model: Any) -> list[SuiteReport]:
    from flows.evaluate import evaluate_suites

    named = {"kind": "endpoint", "url": server.url, "model": "wise", "max_retries": 0, **model}
    config = EvalConfig.model_validate({"model": named, "suites": suites})
    return [SuiteReport.model_validate(report) for report in evaluate_suites(config)["reports"]]


ANSWERS = {f"sort {n} 1 =": f"sort 3 and {n}" for n in range(2, 6)}


@pytest.mark.parametrize("api", ["chat", "completions", "anthropic"])
def test_a_model_at_an_endpoint_is_asked_once_for_each_revision(folder: Path, api: str):
    with AnswerServer(ANSWERS) as server:
        [report] = ask(server, PLAIN, api=api, revision="may")
        assert report.headline.value == 1.0 and (report.num_tokens, len(server.asked)) == (12, 4)
        assert ask(server, PLAIN, api=api, revision="may", max_concurrency=2) == [report] and len(server.asked) == 4
        [other] = ask(server, PLAIN, api=api, revision="june")
        assert len(server.asked) == 8 and other.model != report.model and other.suite_id == report.suite_id
        body = {"chat": "messages", "completions": "prompt", "anthropic": "messages"}[api]
        assert all(body in each and each["temperature"] == 0 and each["max_tokens"] == 32 for each in server.asked)
    listed = CliRunner().invoke(app, ["eval", "list"]).stdout
    assert f"wise at {server.url} (may)" in " ".join(listed.split())
    compared = CliRunner().invoke(app, ["eval", "compare", report.model[:8], f"wise at {server.url} (june)"])
    assert compared.exit_code == 0 and "questions that flipped: 0 lost, 0 gained" in compared.stdout


@pytest.mark.parametrize(("rule", "value", "questions"), [("leave_out", 1.0, 3), ("wrong", 0.75, 4)])
def test_one_refused_question_ends_no_evaluation(folder: Path, rule: str, value: float, questions: int):
    with AnswerServer(ANSWERS, refused=frozenset(["sort 3 1 ="])) as server:
        [report] = ask(server, {**PLAIN, "failed": rule})
    assert (report.headline.value, report.headline.num_questions) == (value, questions)
    assert (report.num_questions, report.num_samples, report.num_failed, report.failed) == (4, 3, 1, ("2",))


def test_one_refused_question_ends_the_evaluation_where_the_suite_says_so(folder: Path):
    with (
        AnswerServer(ANSWERS, refused=frozenset(["sort 3 1 ="])) as server,
        pytest.raises(
            Fatal, match=r"1 of 4 samples failed; first .*: the endpoint refuses it \(HTTP 400\): that is not"
        ),
    ):
        ask(server, {**PLAIN, "failed": "fail"})


def test_an_evaluation_at_an_endpoint_keeps_each_answer_when_it_is_killed(
    folder: Path, start_process: Any, prefect_server: str
):
    questions = [{"prompt": f"say {n} ", "answer": str(n)} for n in range(40)]
    (folder / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (folder / "many.toml").write_text(
        f'name = "many"\nrows = {{ path = "{folder}/many.jsonl" }}\nscorer = {{ kind = "exact_match" }}\n'
    )
    held = threading.Event()

    def hold(count: int) -> None:
        if count > 12:
            held.wait()

    with AnswerServer({row["prompt"]: row["answer"] for row in questions}, on_answer=hold) as server:

        def run() -> subprocess.Popen[str]:
            environment = {"PREFECT_API_URL": prefect_server, "COLUMNS": "200"}
            command = ("eval", "run", server.url, "--served-model", "wise", "--suite", str(folder / "many.toml"))
            return start_process(*ROLLOUT, *command, env=environment)

        process = run()
        try:
            wait_for(lambda: finished_samples() >= 12, "12 answers", process=process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            held.set()
        server.asked.clear()
        process = run()
        output, _ = process.communicate(timeout=500)
        assert process.returncode == 0, output[-4000:]
        assert len(server.asked) == 28 and finished_samples() == 40
        assert re.search(r"^many +accuracy +1\.0000 ", output, re.MULTILINE), output[-4000:]


def test_a_killed_evaluation_at_an_endpoint_goes_on_within_the_same_budget(
    folder: Path, start_process: Any, prefect_server: str
):
    questions = [{"prompt": f"say {n} ", "answer": str(n)} for n in range(10, 50)]
    (folder / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (folder / "many.toml").write_text(
        f'name = "many"\nrows = {{ path = "{folder}/many.jsonl" }}\nscorer = {{ kind = "exact_match" }}\n'
        "sampling = { max_tokens = 16 }\n"
    )
    held = threading.Event()

    def hold(count: int) -> None:
        if count > 12:
            held.wait()

    with AnswerServer({row["prompt"]: row["answer"] for row in questions}, on_answer=hold) as server:
        config = EndpointModel(kind="endpoint", url=server.url, model="wise")
        request = Request("", (), SamplingParams(), 0, "say 10 ")
        limit = Account(config).most(body_of(config, request), request.params.max_tokens).tokens + 250

        def run(tokens: int) -> subprocess.Popen[str]:
            command = ["eval", "run", server.url, "--served-model", "wise", "--suite", str(folder / "many.toml")]
            command += ["--set", f"model.budget.tokens={tokens}", "--set", "model.max_concurrency=1"]
            return start_process(*ROLLOUT, *command, env={"PREFECT_API_URL": prefect_server, "COLUMNS": "200"})

        process = run(limit)
        try:
            wait_for(lambda: finished_samples() >= 12, "12 answers", process=process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            held.set()
        for expected in (14, 0):
            server.asked.clear()
            process = run(limit)
            output, _ = process.communicate(timeout=500)
            assert process.returncode != 0 and len(server.asked) == expected, output[-4000:]
            assert f"generation has taken 260 of {limit} tokens of its budget" in " ".join(output.split())
        process = run(100_000)
        output, _ = process.communicate(timeout=500)
        assert process.returncode == 0 and len(server.asked) == 14, output[-4000:]
    records = RunRecords(objects())
    facts = records.detail(records.heads()[0])[1].facts
    assert facts[f"endpoint wise at {server.url}"] == "40 answers, 280 tokens of prompts and 120 of answers"


PYTHON = """
suite = {"name": "own", "prompt": {"text": "{{ question }} ="}, "sampling": {"max_tokens": 32}}


def rows():
    return [{"question": f"sort {n} 1", "answer": n} for n in range(4)]


def score(sample):
    return float(str(sample.extras["answer"]) in sample.completion)
"""


def test_a_python_suite_is_evaluated_and_its_code_is_part_of_the_key(folder: Path, tiny_model: Path):
    (folder / "own.py").write_text(PYTHON)
    [first] = evaluate(tiny_model, read_suite("own.py"), kind="scripted")
    assert first.headline.value == 1.0
    assert evaluate(tiny_model, read_suite("own.py"), kind="scripted") == [first]
    assert {state for title, state in last_states().items() if not title.startswith("import_")} == {"Cached"}
    # Another scorer scores the same answers anew; other rows are other questions.
    (folder / "own.py").write_text(PYTHON.replace("return float(", "return 0.5 * float("))
    [halved] = evaluate(tiny_model, read_suite("own.py"), kind="scripted")
    assert halved.headline.value == 0.0 and halved.completions == first.completions
    assert halved.suite_id != first.suite_id
    (folder / "own.py").write_text(PYTHON.replace("range(4)", "range(5)"))
    assert evaluate(tiny_model, read_suite("own.py"), kind="scripted")[0].num_questions == 5


def test_figures_are_exported(folder: Path, tiny_model: Path):
    from huggingface_hub import ModelCard

    [report] = evaluate(tiny_model, PLAIN, kind="scripted")

    def exported(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["eval", "export", *arguments])
        assert result.exit_code == 0, result.stderr
        return result.stdout

    rows = list(csv.DictReader(exported().splitlines()))
    assert [(row["suite"], row["metric"], float(row["value"])) for row in rows] == [
        ("plain", "mean", 0.25),
        ("plain", "accuracy", 0.25),
    ]
    assert rows[1]["model"] == report.model and float(rows[1]["upper"]) == report.headline.upper
    [document] = json.loads(exported(report.model[:8], "--format", "json"))
    assert SuiteReport.model_validate(document["reports"]["plain"]) == report
    text = exported(str(tiny_model), "--format", "card", "--name", "tiny")
    card = ModelCard(text)
    results: Any = card.data
    assert [(each.dataset_name, each.metric_type, each.metric_value) for each in results.eval_results] == [
        ("plain", "mean", 0.25),
        ("plain", "accuracy", 0.25),
    ]
    assert "| plain | accuracy | 0.2500 | 0.0456 to 0.6994 | 4 |" in text
    refused = CliRunner().invoke(app, ["eval", "export", "nothing-like-it"])
    assert refused.exit_code == 2 and "no evaluation of 'nothing-like-it' is recorded" in refused.stderr
