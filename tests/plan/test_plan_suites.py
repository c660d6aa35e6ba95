"""Suites as files: what is sound is planned, and what is wrong with one is a line before anything starts."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config import EvalConfig, Suite, apply_overrides, parse_config
from rollout_core.config.lm_eval import suite_class
from rollout_core.evaluation.suite_files import read_suite
from rollout_core.plans.learner_plan import plan_suites
from rollout_core.store.reachable import plain_connections
from tests.evaluation.lm_eval_tasks import write_tasks
from tests.plan.planning import TEMPLATE, jsonl
from tests.rewards.judge_server import JudgeServer
from tests.support.answer_server import AnswerServer

PROJECT = Path(__file__).resolve().parents[2]
QUESTION: dict[str, Any] = {
    "name": "sums",
    "rows": {"path": "sums.jsonl"},
    "prompt": {"text": "{{ question }} ="},
    "sampling": {"max_tokens": 8},
}
FEW_SHOT = {"rows": {"path": "sums.jsonl"}, "count": 1}


@pytest.fixture(autouse=True)
def here(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(work / "sums.jsonl", *({"question": f"sort {n} 1", "answer": n} for n in range(2, 6)))
    (work / "empty.jsonl").write_text("")
    (work / "broken.jsonl").write_text('{"question": "a"}\n{"question"\n')
    monkeypatch.chdir(work)


def plan(*suites: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    document = {"model": {"uri": "model"}, "backend": {"kind": "transformers"}, "suites": [dict(s) for s in suites]}
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    config = parse_config(apply_overrides(document, overrides), EvalConfig)
    return plan_suites(config, Path.cwd(), plain_connections())


def suite(**changes: Any) -> dict[str, Any]:
    """The sound one with other keys; None leaves one out."""
    changed = apply_overrides(QUESTION, {key.replace("__", "."): value for key, value in changes.items()})
    return {key: value for key, value in changed.items() if value is not None}


def refusal(*suites: Mapping[str, Any], **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(*suites, **changes)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


def test_what_is_sound_is_planned():
    prompts = {"name": "sorting", "rows": {"path": "prompts.jsonl"}, "samples": 8}
    prompts["sampling"] = {"temperature": 0.7, "max_tokens": 8}
    facts = plan(QUESTION, suite(name="shots", prompt__few_shot=FEW_SHOT), prompts)
    assert facts == {"model": "model", "questions": {"sums": "4", "shots": "4", "sorting": "2 x 8"}}


@pytest.mark.parametrize(
    ("samples", "scorer", "metrics"),
    [
        (1, {"kind": "math"}, ("mean", "accuracy")),
        (4, {"kind": "math"}, ("mean", "avg@4", "pass@4", "maj@4")),
        (4, {"kind": "text", "compare": "bleu"}, ("mean", "avg@4", "pass@4")),
    ],
)
def test_metrics_follow_from_samples_and_scorer(samples: int, scorer: dict[str, Any], metrics: tuple[str, ...]):
    found = Suite.model_validate(suite(samples=samples, scorer=scorer, sampling={"temperature": 1.0}))
    assert found.chosen_metrics == metrics


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": None}, "suites.0.name: required, but not given"),
        ({"name": "two words"}, "suites.0.name: String should match pattern"),
        ({"rows": None}, "suites.0.rows: required, but not given"),
        ({"rowz": {"path": "x"}}, "suites.0.rowz: unknown key; did you mean 'rows'?"),
        ({"rows__path": "none.jsonl"}, "suite sums: rows.path: "),
        ({"rows__path": "empty.jsonl"}, "suite sums: rows.path: "),
        ({"rows__path": "broken.jsonl"}, "suite sums: rows.path: broken.jsonl:2: "),
        ({"prompt": {}}, "suites.0.prompt: give either text, or user"),
        ({"prompt__user": "{{ question }}"}, "suites.0.prompt: give either text, or user"),
        ({"prompt__system": "Be kind."}, "suites.0.prompt: system is for conversations"),
        ({"prompt__text": "{{ question"}, "suites.0.prompt.text: is no Jinja template: unexpected end of template"),
        ({"prompt__text": "{% if %}"}, "suites.0.prompt.text: is no Jinja template: "),
        ({"prompt__text": ""}, "suites.0.prompt.text: String should have at least 1 character"),
        (
            {"prompt__text": "{{ qestion }}"},
            "suite sums: prompt: row 1: it has no 'qestion', which text reads; ",
        ),
        ({"prompt__few_shot": {**FEW_SHOT, "count": 0}}, "suites.0.prompt.few_shot.count: "),
        ({"prompt__few_shot": {**FEW_SHOT, "count": 4}}, "suite sums: prompt: row 1: few_shot.count is 4, and"),
        ({"prompt__few_shot": {**FEW_SHOT, "rows": {"path": "x"}}}, "suite sums: prompt.few_shot.rows.path: "),
        ({"prompt__few_shot": {**FEW_SHOT, "answer": "{{ a }}"}}, "it has no 'a', which few_shot.answer reads"),
        ({"samples": 0}, "suites.0.samples: Input should be greater than or equal to 1; got 0"),
        ({"samples": 4}, "suites.0: samples is 4, and sampling.temperature 0 draws the same answer each time"),
        ({"sampling": {"max_token": 4}}, "suites.0.sampling.max_token: unknown key; did you mean 'max_tokens'?"),
        ({"sampling": {"max_tokens": 600}}, "suite sums: rows.path: "),
        ({"metrics": ["acuracy"]}, "suites.0: metrics: unknown metric 'acuracy'; did you mean 'accuracy'?"),
        ({"metrics": ["pass@0"]}, "suites.0: metrics: unknown metric 'pass@0'; did you mean 'pass@1'?"),
        ({"metrics": ["mean", "mean"]}, "suites.0: metrics: mean, mean names one of them twice"),
        ({"metrics": ["pass@2"]}, "suites.0: metrics: pass@2 needs 2 samples of each question, and samples is 1"),
        (
            {"metrics": ["maj@1"], "scorer": {"kind": "schema"}},
            "metrics: maj@1 needs answers to count, which a",
        ),
        ({"scorer": {"kind": "maths"}}, "suites.0.scorer.kind: Input should be "),
        ({"scorer": {"kind": "math", "answer_key": "result"}}, "row 1 has no 'result', which the math reward reads"),
        ({"scorer": {"kind": "regex", "pattern": "("}}, "suites.0.scorer.pattern: '(' is no regular expression"),
        ({"scorer": {"kind": "function", "callable": "none.py:f"}}, "suite sums: scorer: "),
        ({"scorer": {"kind": "sql", "database": "none.db", "answer_key": "answer"}}, "suite sums: scorer: "),
        ({"threshold": "high"}, "suites.0.threshold: Input should be a valid number"),
        ({"prompt": None}, "suite sums: rows.path: sums.jsonl:1: needs prompt or messages; "),
    ],
)
def test_a_bad_suite_is_refused_in_one_line(changes: dict[str, Any], expected: str):
    message = refusal(suite(**changes)).removeprefix("config: ")
    assert expected in message, message


FILE = """\
name = "sums"
rows = { path = "sums.jsonl" }
sampling = { max_tokens = 8 }

[prompt]
text = "{{ question }} ="
"""
CHOICE = """
[scorer]
kind = "choice"
"""
PICK = """\
name = "pick"
rows = { path = "picks.jsonl" }
prompt = { text = "{{ question }} =" }
scorer = { kind = "choice" }
"""
BAD_FILES: list[tuple[str, str, str, str]] = [
    # text, what of it is replaced, by what, and what is said
    (FILE, 'name = "sums"', "", "suite.toml: name: required, but not given"),
    (FILE, "name =", "name", "suite.toml: not readable as TOML: "),
    (FILE, '"sums"', "sums", "suite.toml: not readable as TOML: "),
    (FILE, "[prompt]", "[prompt", "suite.toml: not readable as TOML: "),
    (FILE, "[prompt]", "[promt]", "suite.toml: promt: unknown key; did you mean 'prompt'?"),
    (FILE, "name =", 'title = "Sums"\nname =', "suite.toml: title: unknown key"),
    (FILE, '"sums"', "7", "suite.toml: name: Input should be a valid string; got 7"),
    (FILE, '{ path = "sums.jsonl" }', '"sums.jsonl"', "suite.toml: rows: Input should be a valid dictionary"),
    (
        FILE,
        '"sums.jsonl"',
        '"sums.jsonl", colums = {}',
        "suite.toml: rows.colums: unknown key; did you mean 'columns'?",
    ),
    (FILE, "{ path", '{ kind = "csv", path', "suite.toml: rows.kind: Input should be "),
    (FILE, 'path = "sums.jsonl"', 'kind = "function"', "suite.toml: rows.callable: required, but not given"),
    (FILE, 'path = "sums.jsonl"', 'kind = "function", callable = "own.py"', "rows.callable: expected module:function"),
    (FILE, 'path = "sums.jsonl"', 'kind = "function", callable = "own.py:rows"', "own.py does not exist; did you mean"),
    (FILE, "max_tokens = 8", "max_tokens = 0", "suite.toml: sampling.max_tokens: Input should be greater than or "),
    (FILE, "max_tokens = 8", "max_new_tokens = 8", "sampling.max_new_tokens: unknown key; did you mean 'max_tokens'?"),
    (FILE, "max_tokens = 8", 'max_tokens = "8 tokens"', "suite.toml: sampling.max_tokens: Input should be a valid int"),
    (FILE, "max_tokens = 8", "temperature = -1", "suite.toml: sampling.temperature: Input should be greater than or "),
    (
        FILE,
        "text =",
        "user =",
        "suite sums: rows.path: prompt 1 holds chat messages, but the tokenizer has no chat temp",
    ),
    (FILE, "text =", 'description = "Sums"\nuser =', "suite.toml: prompt: description stands before text; "),
    (
        FILE,
        "text =",
        'few_shot = { rows = { path = "sums.jsonl" }, same = "kind", count = 1 }\ntext =',
        "it has no 'kind', w",
    ),
    (FILE, "name =", 'failed = "skip"\nname =', "suite.toml: failed: Input should be 'leave_out', 'wrong' or 'fail'"),
    (
        FILE,
        "name =",
        'failed = "wrong"\nthreshold = 0.0\nname =',
        'failed = "wrong" gives answers that cannot be had a s',
    ),
    (
        FILE,
        "name =",
        'metrics = ["inst_level_acc"]\nname =',
        "metrics: inst_level_acc counts the instructions that are ",
    ),
    (FILE, "name =", 'metrics = ["acc_norm"]\nname =', "metrics: unknown metric 'acc_norm'"),
    (FILE, "name =", 'scorer = "math"\nname =', "suite.toml: scorer: Input should be a valid dictionary"),
    (
        FILE + CHOICE,
        "",
        "",
        "sampling is for answers that are drawn and scored, and a scorer of kind 'choice' draws none",
    ),
    (PICK, "name =", 'metrics = ["accuracy"]\nname =', "metrics: unknown metric 'accuracy'; expected one of acc, "),
    (PICK, "name =", "samples = 4\nname =", "samples is for answers that are drawn and scored, and a scorer of kind"),
    (
        PICK,
        '"choice"',
        '"choice", choices = "options"',
        "suite pick: scorer: row 1: it has no 'options', which scorer.c",
    ),
    (
        PICK,
        '"choice"',
        '"choice", answer_key = "answr"',
        "it has no 'answr', which scorer.answer_key names; did you mean",
    ),
    (
        PICK,
        '"choice"',
        '"choice", answer_as = "letter"',
        "suite.toml: scorer.answer_as: Input should be 'auto', 'index', ",
    ),
    (
        PICK,
        '"choice"',
        '"choice", continuation = "{{ choise }}"',
        "it has no 'choise', which continuation reads; did you",
    ),
    (PICK, '"choice"', '"choice", delimiter = ""', "suite.toml: scorer.delimiter: unknown key"),
    (PICK, "picks", "sums", "suite pick: scorer: row 1: it has no 'choices', which scorer.choices names"),
    (
        PICK,
        "picks",
        "broken_picks",
        "suite pick: scorer: row 2: its 'answer' is 'Z', which is the index, label or text of no",
    ),
]


@pytest.mark.parametrize(("text", "old", "new", "expected"), BAD_FILES)
def test_a_bad_file_is_refused_in_one_line(text: str, old: str, new: str, expected: str):
    picks = [{"question": "sort 2 1", "choices": ["1 2", "2 1"], "answer": answer} for answer in ("A", "Z")]
    jsonl(Path("picks.jsonl"), picks[0])
    jsonl(Path("broken_picks.jsonl"), *picks)
    changed = text.replace(old, new, 1) if old else text
    assert changed != text or not old
    Path("suite.toml").write_text(changed)
    with pytest.raises(ConfigError) as caught:
        plan(read_suite("suite.toml"))
    message = str(caught.value)
    assert expected in message and len(message.splitlines()) == 1, message


def test_sound_choices_are_planned():
    jsonl(Path("picks.jsonl"), {"question": "sort 2 1", "choices": ["1 2", "2 1"], "answer": "A"})
    Path("suite.toml").write_text(PICK)
    facts = plan(read_suite("suite.toml"))
    assert facts["questions"] == {"pick": "1, 2 choices"}
    assert "exceed the model's context" in refusal({**read_suite("suite.toml"), "prompt": {"text": "sort 1 " * 300}})


ENDPOINT = {"kind": "endpoint", "model": "wise"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": None}, "config: model.model: required, but not given"),
        ({"kind": "endpont"}, "config: model.kind: Input should be 'endpoint'; got 'endpont'"),
        ({"url": "ftp://x/v1"}, "model.url: expected an address such as http://127.0.0.1:8000/v1"),
        ({"api": "responses"}, "model.api: Input should be 'chat', 'completions' or 'anthropic'; got 'responses'"),
        ({"revison": "1"}, "config: model.revison: unknown key; did you mean 'revision'?"),
        ({"api_key": "sk-12345"}, "expected the NAME of a secret, such as SERVER_KEY"),
        *(
            (change, f"{where}.{key} is not for {where}: other settings or the question decide it")
            for key in ("model", "messages", "prompt", "system", "stream", "n", "max_tokens", "echo")
            for where, change in (("body", {"body": {key: 1}}), ("leave_out", {"leave_out": [key]}))
        ),
        ({"body": {"max_completion_tokens": 9}}, "neither for body nor for leave_out: set max_tokens_key = "),
        (
            {"api": "anthropic", "max_tokens_key": "max_completion_tokens"},
            "'max_completion_tokens', which api 'anthropic' has not; leave it out",
        ),
    ],
)
def test_a_bad_endpoint_is_refused_in_one_line(changes: dict[str, Any], expected: str):
    with AnswerServer() as server:
        table = {**ENDPOINT, "url": server.url, **changes}
        assert expected in refusal(QUESTION, model={key: value for key, value in table.items() if value is not None})


@pytest.mark.parametrize(
    ("api", "suites", "expected"),
    [
        ("chat", {"prompt": {"text": "{{ question }}"}}, None),
        (
            "completions",
            {"prompt": {"user": "{{ question }}"}},
            "row 1 has a conversation, and api 'completions' takes",
        ),
        ("chat", {"sampling": {"top_k": 5}}, "sampling.top_k: an endpoint with api 'chat' knows no such field"),
        ("anthropic", {"sampling": {"temperature": 1.5}}, "sampling.temperature: api 'anthropic' takes at most 1"),
        (
            "chat",
            {"scorer": {"kind": "model", "model": "model"}},
            "a reward model scores token ids, which answers of an",
        ),
    ],
)
def test_what_an_endpoint_cannot_do_is_refused(api: str, suites: dict[str, Any], expected: str | None):
    with AnswerServer() as server:
        model = {**ENDPOINT, "url": server.url, "api": api}
        if expected is None:
            assert plan({**QUESTION, **suites}, model=model)["model"] == f"wise at {server.url}"
        else:
            with pytest.raises(ConfigError, match=re.escape(expected)):
                plan({**QUESTION, **suites}, model=model)


@pytest.mark.parametrize(
    ("people", "expected"),
    [
        ({"people": 7}, None),
        ({"peoples": 7}, "no row has 'people', the judge's human_key; did you mean 'peoples'?"),
        ({"people": 70}, "row 1: people is 70; expected a number from 0 to 10, as a person judges it"),
    ],
)
def test_what_people_say_is_looked_for_in_the_rows(people: dict[str, Any], expected: str | None):
    jsonl(Path("judged.jsonl"), {"prompt": "sort 2 1 =", **people})
    with JudgeServer() as server:
        judge = {"kind": "judge", "judges": [{"url": server.url, "model": "wise"}], "human_key": "people"}
        asked = {"name": "judged", "rows": {"path": "judged.jsonl"}, "sampling": {"max_tokens": 8}, "scorer": judge}
        if expected is None:
            assert plan(asked)["questions"] == {"judged": "1"}
        else:
            assert expected in refusal(asked)


CALL = {"role": "assistant", "tool_calls": [{"id": "a", "name": "clock"}]}
TOLD = {"role": "tool", "content": "noon", "tool_call_id": "a"}


@pytest.mark.parametrize(
    ("messages", "tool", "expected"),
    [
        ([CALL, TOLD], {"type": "function", "function": {"name": "clock"}}, None),
        ([CALL], None, "the last message calls a tool and has no answer; mend it, or leave the row out"),
        ([CALL, {"role": "user", "content": "well?"}], None, "message 3 follows a call of a tool that has no answer"),
        ([CALL, TOLD, TOLD], None, "message 4 answers a call of a tool that is not there"),
        ([TOLD], None, "message 2 answers a call of a tool that is not there"),
        ([CALL, TOLD], {"name": "clock"}, "row 1 has a tool that is not described in OpenAI's form"),
    ],
)
def test_calls_of_tools_that_anthropics_form_refuses_are_named(messages: Any, tool: Any, expected: str | None):
    row = {"messages": [{"role": "user", "content": "When?"}, *messages], "answer": "noon"}
    jsonl(Path("calls.jsonl"), row if tool is None else {**row, "tools": [tool]})
    suite = {"name": "calls", "rows": {"path": "calls.jsonl"}, "scorer": {"kind": "exact_match"}}
    with AnswerServer() as server:
        model = {**ENDPOINT, "url": server.url, "api": "anthropic"}
        if expected is None:
            assert plan(suite, model=model)["model"] == f"wise at {server.url}"
        else:
            assert expected in refusal(suite, model=model)


@pytest.mark.parametrize("api", ["chat", "anthropic"])
def test_choices_at_an_endpoint_of_messages_are_refused_before_anything_is_asked(api: str):
    jsonl(Path("picks.jsonl"), {"question": "sort 2 1", "choices": ["1 2", "2 1"], "answer": "A"})
    Path("suite.toml").write_text(PICK)
    with AnswerServer() as server:
        model = {**ENDPOINT, "url": server.url, "api": api}
        assert "gives no log-probabilities of prompts" in refusal(read_suite("suite.toml"), model=model)
        assert server.asked == []
        assert plan(read_suite("suite.toml"), model={**model, "api": "completions"})["questions"] == {
            "pick": "1, 2 choices"
        }


def test_a_model_that_an_endpoint_does_not_list_is_named_as_not_checked():
    with AnswerServer() as server:
        facts = plan(QUESTION, model={**ENDPOINT, "url": server.url, "model": "unwise"})
        assert f"whether {server.url} serves 'unwise'; it lists wise" in facts["not checked"]
        facts = plan(QUESTION, model={**ENDPOINT, "url": server.url})
        assert "whether" not in facts.get("not checked", "")


def test_an_endpoint_that_is_away_is_named_as_not_checked():
    facts = plan(QUESTION, model={**ENDPOINT, "url": "http://127.0.0.1:1/v1"})
    assert "the endpoint does not answer" in facts["not checked"]


def test_metrics_of_some_samples_are_refused_but_for_pass():
    drawn = functools.partial(suite, samples=4, sampling__temperature=1.0)
    assert "avg@2 is not of all 4 samples; give avg@4" in refusal(drawn(metrics=["avg@2"]))
    assert plan(drawn(metrics=["pass@1", "pass@2", "avg@4"]))["questions"] == {"sums": "4 x 4"}


def test_two_suites_of_one_name_are_refused():
    assert "two suites are named 'sums'; rename one of them" in refusal(QUESTION, QUESTION)


def test_no_suites_are_refused():
    assert "suites is empty; give at least one" in refusal()


def test_what_is_wrong_with_several_suites_is_said_together():
    with pytest.raises(ConfigError) as caught:
        plan(suite(rows__path="none.jsonl"), suite(name="other", prompt__text="{{ q }}"))
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["suite sums", "suite other"]


def test_an_evaluation_starts_from_no_snapshot():
    assert "run.resume: an evaluation resumes by itself" in refusal(QUESTION, run__resume="latest")


EXAMPLES = PROJECT / "examples" / "suites"


@pytest.mark.parametrize("file", sorted([*EXAMPLES.glob("*.toml"), *EXAMPLES.glob("*.py")]), ids=lambda file: file.stem)
def test_example_suites_are_sound(file: Path, monkeypatch: pytest.MonkeyPatch, work: Path):
    table = read_suite(str(file.relative_to(PROJECT)), base=PROJECT)
    found = suite_class(table).model_validate(table)
    model = {"uri": str(work / "model"), "chat_template": TEMPLATE}
    monkeypatch.chdir(PROJECT)
    monkeypatch.setenv("HF_HOME", str(work / "hub"))
    config = EvalConfig.model_validate({"model": model, "backend": {"kind": "scripted"}, "suites": [found]})
    assert list(plan_suites(config, PROJECT, plain_connections())["questions"]) == [found.name]


def test_tasks_of_lm_eval_are_planned_and_what_is_wrong_with_them_is_a_line(
    work: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HOME", str(work / "hub"))
    (work / "tasks").mkdir()
    write_tasks(work / "tasks")
    tasks = {"kind": "lm_eval", "name": "theirs", "tasks": ["several", "chosen"], "include_path": "tasks"}
    assert plan(tasks)["questions"] == {"theirs": "24 requests of lm_eval 0.4.13"}
    assert "suite theirs: task 'severl' is neither known to lm_eval nor a file" in refusal(
        {**tasks, "tasks": ["severl"]}
    )
    assert "suites.0.task: unknown key; did you mean 'tasks'?" in refusal({**tasks, "task": "several"})
    assert "exceed the model's context" in refusal({**tasks, "gen_kwargs": {"max_gen_toks": 10_000}})
