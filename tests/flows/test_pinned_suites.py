"""The suites mmlu, gsm8k and ifeval on ten rows each, with answers and log-probabilities that are pinned here: what an
endpoint says to them is scored as the harnesses they come from score it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_core.config import EvalConfig
from rollout_core.evaluation.reports import SuiteReport
from rollout_core.evaluation.suite_files import read_suite
from tests.support.answer_server import AnswerServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]
ROWS = Path(__file__).resolve().parents[1] / "evaluation" / "rows"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def server(prefect_server: str):
    with AnswerServer() as running:
        yield running


def evaluate(server: AnswerServer, name: str, api: str) -> SuiteReport:
    from flows.evaluate import evaluate_suites

    model = {"kind": "endpoint", "url": server.url, "model": "wise", "api": api}
    suite = read_suite(name, rows=str(ROWS / f"{name}.jsonl"))
    config = EvalConfig.model_validate({"model": model, "suites": [suite]})
    [report] = evaluate_suites(config)["reports"]
    return SuiteReport.model_validate(report)


def values(report: SuiteReport) -> dict[str, float]:
    return {metric.name: round(metric.value, 6) for metric in report.metrics}


GSM8K = (
    "She has 12 and eats 2, so 10.\n#### 10",
    "60 * 2.5 = 150.0 km",
    "$3,600.",
    "#### -7",
    "half of 240 is 120",
    "It is 7 kg.",
    "28 / 4 = 7\n#### 7",
    "12 eggs cost $3.00.",
    "9 x 4 = 36",
    "About 100 pages.",
)
"""Nine are right: the number after ``####``, or the last one, with commas, signs and fractions that end in zeros."""


def test_gsm8k(server: AnswerServer):
    asked = rows("gsm8k")
    server.answers = {f"Question: {row['question']}\nAnswer:": said for row, said in zip(asked, GSM8K, strict=True)}
    report = evaluate(server, "gsm8k", "completions")
    assert values(report) == {"mean": 0.9, "accuracy": 0.9}
    [prompt] = [body["prompt"] for body in server.asked if body["prompt"].endswith(f"{asked[3]['question']}\nAnswer:")]
    shots = prompt.split("\n\n")
    assert len(shots) == 6 and all("####" in shot for shot in shots[:5])
    assert server.asked[0]["stop"] == ["Question:", "</s>", "<|im_end|>"] and server.asked[0]["temperature"] == 0


IFEVAL = (
    "Blue",
    "rain falls, softly and it is wet for hours on end.",  # lower case, and a comma
    '"Here it is"',
    "* one\n* two\n* three",  # three and not two
    "The sea is full of salt",
    "<<A title>> This is very good",  # a title, and the word
    '{"a": 1}',
    "That is all. Any questions?",
    "These are five plain words",
    "*One* and *two* parts",
)
"""Seven of ten prompts, and ten of thirteen instructions, are followed."""


def test_ifeval_strict(server: AnswerServer):
    asked = rows("ifeval")
    server.answers = {row["prompt"]: said for row, said in zip(asked, IFEVAL, strict=True)}
    report = evaluate(server, "ifeval", "chat")
    assert values(report) == {"accuracy": 0.7, "inst_level_acc": round(10 / 13, 6)}
    assert [{"role": "user", "content": asked[0]["prompt"]}] in [body["messages"] for body in server.asked]


def test_mmlu(server: AnswerServer):
    """The right letter is the likeliest of eight questions."""
    asked = rows("mmlu")
    for number, row in enumerate(asked):
        letters = [f" {letter}" for letter in "ABCD"]
        likeliest = letters[row["answer"]] if number not in (3, 7) else letters[(row["answer"] + 1) % 4]
        scores = {letter: -1.0 if letter == likeliest else -2.0 for letter in letters}
        server.scores = {**server.scores, f"{row['question']}\n" + _listed(row): scores}
    report = evaluate(server, "mmlu", "completions")
    assert values(report) == {"acc": 0.8, "acc_norm": 0.8}
    assert (report.num_questions, report.num_samples) == (10, 40)
    [prompt] = {body["prompt"] for body in server.asked if "cubed" in body["prompt"] and body["prompt"].endswith(" D")}
    assert prompt == (
        "The following are multiple choice questions (with answers) about arithmetic.\n\n"
        "What is 3 cubed?\nA. 9\nB. 6\nC. 12\nD. 27\nAnswer: D"
    )
    before = len(server.asked)
    assert evaluate(server, "mmlu", "completions") == report and len(server.asked) == before


def _listed(row: dict[str, Any]) -> str:
    return "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True)) + "\nAnswer:"
