"""Suites of every kind of scorer, killed at random moments while they ask, score and report, come to the report of an
evaluation that nobody disturbs, and ask nothing again whose answer was kept."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.ids import ContentId, seed_of
from rollout_core.evaluation.reports import SuiteReport
from tests.evaluation.lm_eval_tasks import write_tasks
from tests.flows.conftest import PATIENCE_SECONDS, write_toml
from tests.flows.kills import attempts_after_success
from tests.flows.test_evaluate import ROLLOUT
from tests.store.patience import wait_until
from tests.support.answer_server import AnswerServer

pytestmark = [pytest.mark.server, pytest.mark.campaign, pytest.mark.timeout(7200)]

KILLS = 20
FINISHED = re.compile(r"Task run '(\w+) [^']*' - Finished in state")
SAID: dict[str, Callable[[int], str]] = {
    "exact": str,
    "numeric": lambda n: f"So it is {n}.0 in all.",
    "math": lambda n: rf"Half of it: \boxed{{\frac{{{2 * n}}}{{2}}}}",
    "code": lambda n: f"```python\ndef answer():\n    return {n}\n```",
    "instructions": lambda n: " ".join(["word"] * n),
    "schema": lambda n: json.dumps({"n": n}),
    "sql": lambda n: f"```sql\nselect n from numbers where n = {n}\n```",
    "regex": lambda n: f"<answer>{n}</answer>",
}
"""What a model says whose answer is ``n``, by the scorer that reads it."""
SCORERS: dict[str, dict[str, Any]] = {
    "exact": {"kind": "text", "compare": "exact"},
    "numeric": {"kind": "text", "compare": "numeric"},
    "math": {"kind": "math"},
    "code": {"kind": "code", "tests_key": "asserts"},
    "instructions": {"kind": "instructions"},
    "schema": {"kind": "schema"},
    "sql": {"kind": "sql"},
    "regex": {"kind": "regex", "pattern": "<answer>(.*)</answer>", "answer_key": "answer"},
}


def row(n: int) -> dict[str, Any]:
    """A question with what each scorer holds its answer against."""
    return {
        "id": f"q{n}",
        "prompt": f"say {n} ",
        "answer": str(n),
        "asserts": f"assert answer() == {n}",
        "instruction_id_list": ["length_constraints:number_words"],
        "kwargs": [{"relation": "less than", "num_words": n + 1}],
        "schema": {"type": "object", "properties": {"n": {"const": n}}, "required": ["n"]},
        "query": f"select {n}",
    }


def said(kind: str, n: int) -> str:
    """Every third answer is wrong."""
    return SAID[kind](n if n % 3 else n + 1)


@dataclass(frozen=True)
class Stage:
    """A stage of an evaluation that nobody disturbs."""

    name: str
    seconds: float
    kept: range
    """Numbers of answers that the store has from its beginning to its end."""


@dataclass
class Evaluation:
    """A storage with its database, in which `rollout eval run` is started again and again."""

    folder: Path
    arguments: tuple[str, ...]
    start_process: Callable[..., subprocess.Popen[str]]
    starts: int = 0

    def start(self) -> subprocess.Popen[str]:
        self.starts += 1
        environment = {
            "ROLLOUT_STORAGE": f"file://{self.folder / 'objects'}",
            "ROLLOUT_DATABASE": self.database,
            "ROLLOUT_CACHE": str(self.folder / "cache"),
            "COLUMNS": "200",
        }
        command = (*ROLLOUT, "eval", "run", *self.arguments, "--format", "json")
        self.folder.mkdir(exist_ok=True)
        with self._log.open("w") as log:
            return self.start_process(*command, stdout=log, env=environment)

    @property
    def database(self) -> str:
        return f"sqlite:///{self.folder / 'rollout.db'}"

    @property
    def _log(self) -> Path:
        return self.folder / f"{self.starts}.log"

    def finished(self) -> list[str]:
        """Stages that the last process is through with, in order."""
        return FINISHED.findall(self._log.read_text())

    def kept(self) -> set[ContentId]:
        """Samples whose answers the store has."""
        try:
            with closing(sqlite3.connect(f"file:{self.folder / 'rollout.db'}?mode=ro", uri=True, timeout=60)) as store:
                found = store.execute("SELECT rollout_id FROM rollouts WHERE status = 'succeeded'")
                return {ContentId(sample) for [sample] in found}
        except sqlite3.OperationalError:  # before its tables are made
            return set()

    def report(self, process: subprocess.Popen[str]) -> SuiteReport:
        """What a process prints at its end."""
        code = process.wait(PATIENCE_SECONDS)
        text = self._log.read_text()
        assert code == 0, text[-4000:]
        [report] = json.loads(text[text.index("\n{\n") :])["reports"]
        return SuiteReport.model_validate(report)

    def undisturbed(self) -> tuple[SuiteReport, list[Stage]]:
        """Its report and its stages."""
        process, stages, began, kept = self.start(), [], 0.0, 0
        while process.poll() is None:
            names, now = self.finished(), time.monotonic()
            for name in names[len(stages) :]:
                stages.append(Stage(name, now - (began or now), range(kept, kept := len(self.kept()))))
                began = now
            time.sleep(0.02)
        return self.report(process), stages

    def killed(self, place: int, share: float, stage: Stage) -> bool:
        """Start it, and kill it in the stage of this place, after a share of its answers or of its time; False where it
        ended before."""
        process = self.start()
        wanted = stage.kept.start + int(share * len(stage.kept))
        wait_until(lambda: process.poll() is not None or len(self.finished()) >= place)
        if stage.kept:
            wait_until(lambda: process.poll() is not None or len(self.kept()) >= wanted)
        else:
            with suppress(subprocess.TimeoutExpired):
                process.wait(share * stage.seconds)
        is_killed = process.poll() is None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return is_killed


def report_after_kills(
    evaluation: Evaluation, stages: list[Stage], seen: Callable[[], None], record: Callable[[str], None]
) -> SuiteReport:
    """Of an evaluation that is killed `KILLS` times, half of them while answers come; ``seen`` is called after each."""
    chance, kills = random.Random(7), Counter[str]()
    answering = [place for place, stage in enumerate(stages) if stage.kept]
    others = [place for place in range(1, len(stages)) if place not in answering]
    places = [place for n in range(KILLS // 2) for place in (answering[n % len(answering)], others[n % len(others)])]
    for place, share in sorted((place, chance.random()) for place in places):
        while not evaluation.killed(place, share, stages[place]):
            share /= 2
        kills[stages[place].name] += 1
        seen()
    record(", ".join(f"{count} in {name}" for name, count in kills.items()))
    return evaluation.report(evaluation.start())


@pytest.fixture
def record(request: pytest.FixtureRequest, record_property: Callable[[str, str], None]) -> Callable[[str], None]:
    """Enters a line of this test into the table that pytest prints."""
    return lambda line: record_property("table: evaluations killed", f"{request.node.callspec.id:12} {line}")


@pytest.mark.parametrize("kind", SCORERS)
def test_a_suite_that_is_killed_asks_no_question_again_and_comes_to_the_same_report(
    tmp_path: Path, start_process: Any, prefect_server: str, record: Any, kind: str
):
    count, samples = (200, 8) if kind == "numeric" else (60, 2)
    write_rows(tmp_path, count)
    suite = {
        "name": kind,
        "samples": samples,
        "rows": {"path": str(tmp_path / "rows.jsonl")},
        "sampling": {"temperature": 1.0, "max_tokens": 64},
        "scorer": SCORERS[kind] | ({"database": str(tmp_path / "numbers.db")} if kind == "sql" else {}),
    }
    write_toml(tmp_path / "suite.toml", suite)
    answers = {row(n)["prompt"]: said(kind, n) for n in range(count)}
    with AnswerServer(answers, on_answer=lambda count: time.sleep(0.01)) as server:
        arguments = (server.url, "--served-model", "wise", "--suite", str(tmp_path / "suite.toml"))
        arguments += ("--set", "model.max_concurrency=4")
        expected, stages = Evaluation(tmp_path / "undisturbed", arguments, start_process).undisturbed()
        assert expected.metrics[0].value == pytest.approx(sum(n % 3 > 0 for n in range(count)) / count)
        assert Counter(body["seed"] for body in server.asked).most_common(1)[0][1] == 1
        all_seeds = {body["seed"] for body in server.asked}
        assert len(all_seeds) == count * samples

        evaluation, kept = Evaluation(tmp_path / "killed", arguments, start_process), set[int]()
        server.asked.clear()

        def none_was_asked_again() -> None:
            asked = [body["seed"] for body in server.asked]
            assert not kept & {*asked} and len(asked) == len({*asked})
            kept.update(map(seed_of, evaluation.kept()))
            server.asked.clear()

        report = report_after_kills(evaluation, stages, none_was_asked_again, record)
        none_was_asked_again()
        assert report == expected and kept == all_seeds
        assert not attempts_after_success(evaluation.database)


def write_rows(folder: Path, count: int) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(count)))
    with closing(sqlite3.connect(folder / "numbers.db")) as database:
        database.execute("CREATE TABLE numbers (n)")
        database.executemany("INSERT INTO numbers VALUES (?)", [(n,) for n in range(count + 1)])
        database.commit()


@pytest.mark.parametrize("kind", ["choice", "lm_eval"])
def test_log_likelihoods_and_tasks_of_lm_eval_come_to_the_same_report(
    tmp_path: Path,
    start_process: Any,
    prefect_server: str,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    record: Any,
    kind: str,
):
    """By the tiny model itself; a task's drawings, generated and scored, are answered one after the other."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    rows = [
        {"question": f"sort {n} {n % 7}", "answer": f"{n % 7} {n}", "choices": [f"{n}", f"{n} 1", "x"], "gold": n % 3}
        for n in range(120)
    ]
    write_tasks(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suites: dict[str, dict[str, Any]] = {
        "choice": {
            "name": "choice",
            "rows": {"path": str(tmp_path / "rows.jsonl")},
            "prompt": {"text": "{{ question }} ="},
            "scorer": {"kind": "choice", "answer_key": "gold", "answer_as": "index"},
        },
        "lm_eval": {
            "kind": "lm_eval",
            "name": "tasks",
            "tasks": ["several", "chosen"],
            "include_path": str(tmp_path),
            "bootstrap_iters": 100,
        },
    }
    write_toml(tmp_path / "suite.toml", suites[kind])
    arguments = (str(tiny_model), "--suite", str(tmp_path / "suite.toml"), "--backend", "transformers")
    expected, stages = Evaluation(tmp_path / "undisturbed", arguments, start_process).undisturbed()
    evaluation, kept = Evaluation(tmp_path / "killed", arguments, start_process), set[ContentId]()

    def all_are_kept() -> None:
        assert kept <= evaluation.kept()
        kept.update(evaluation.kept())

    report = report_after_kills(evaluation, stages, all_are_kept, record)
    assert report == expected
    assert not attempts_after_success(evaluation.database)
