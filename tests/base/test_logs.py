"""Logs in JSON: each record of a process is one line on stderr, whoever writes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base import logs
from rollout_core.base.errors import ConfigError
from rollout_core.base.isolation.child import Child
from rollout_core.base.processes import Limits

PROJECT = Path(__file__).resolve().parents[2]
SECONDS = 120


def run(program: str, *, code: int = 0, **environment: str) -> list[dict[str, Any]]:
    """The lines of a process in JSON, each of which must be an object."""
    command = [sys.executable, "-P", "-c", program]
    asked = {**os.environ, "PYTHONPATH": str(PROJECT), "ROLLOUT_LOG": "json", **environment}
    done = subprocess.run(command, env=asked, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_record_is_a_line_with_time_level_logger_message_and_process():
    before = datetime.now(UTC).timestamp()
    (line,) = run("import logging, rollout_core; logging.getLogger('mine').warning('two\\nlines of %s', 3)")
    assert (line["level"], line["logger"], line["message"]) == ("WARNING", "mine", "two\nlines of 3")
    assert isinstance(line["process"], int) and line["process"] != os.getpid()
    assert line["time"].endswith("Z") and len(line["time"]) == len("2026-11-30T23:34:35.401Z")
    assert before - 0.001 <= datetime.fromisoformat(line["time"]).timestamp() <= datetime.now(UTC).timestamp()


def test_an_exception_is_one_field():
    program = "import logging, rollout_core\ntry: 1/0\nexcept Exception: logging.exception('failed')"
    (line,) = run(program)
    assert line["message"] == "failed"
    assert line["exception"].startswith("Traceback") and line["exception"].endswith(
        "ZeroDivisionError: division by zero"
    )


@pytest.mark.parametrize(
    ("program", "code", "logger", "fields"),
    [
        ("import warnings; warnings.warn('careful')", 0, "py.warnings", {"level": "WARNING"}),
        ("raise RuntimeError('nobody catches it')", 1, "rollout", {"level": "CRITICAL"}),
        (
            "import threading; t = threading.Thread(target=int, args=['x'], name='mine'); t.start(); t.join()",
            0,
            "rollout",
            {"level": "ERROR", "message": "thread mine ends by ValueError"},
        ),
        ("import sys; print('a', 'b', file=sys.stderr)", 0, "stderr", {"message": "a b"}),
        ("import sys; sys.stderr.write('no end')", 0, "stderr", {"message": "no end"}),
        ("import sys; sys.stderr.write('two\\nlines\\n')", 0, "stderr", {"message": "two\nlines"}),
        ("import click; click.echo('for people', err=True)", 0, "stderr", {"message": "for people"}),
        (
            "class A:\n def __del__(self): 1/0\nA()",
            0,
            "rollout",
            {"level": "ERROR"},
        ),
    ],
)
def test_what_python_writes_to_stderr_is_a_line(program, code, logger, fields):
    (line,) = run(f"import rollout_core\n{program}", code=code)
    assert line["logger"] == logger
    assert {name: line[name] for name in fields} == fields


def test_a_line_that_is_an_object_already_stays_as_it_is():
    events = '{"topic":"a"}\n{"topic":"b"}\n'
    assert run(f"import sys, rollout_core; sys.stderr.write({events!r})") == [{"topic": "a"}, {"topic": "b"}]


def test_handlers_of_before_write_no_second_line():
    program = (
        "import logging, sys; logging.basicConfig(); other = logging.getLogger('other')\n"
        "other.addHandler(logging.StreamHandler()); other.propagate = False\n"
        "import rollout_core; rollout_core.base.logs.configure(logging.INFO, '%(message)s')\n"
        "other.warning('once'); logging.info('once, too')"
    )
    assert [line["message"] for line in run(program)] == ["once", "once, too"]


def test_a_fork_writes_no_line_that_its_parent_began():
    program = (
        "import os, sys, rollout_core; sys.stderr.write('begun ')\n"
        "if os.fork() == 0:\n sys.stderr.write('in the child\\n'); os._exit(0)\n"
        "os.wait(); sys.stderr.write('and ended\\n')"
    )
    assert [line["message"] for line in run(program)] == ["in the child", "begun and ended"]


def test_a_fork_amid_the_lines_of_other_threads_writes_its_own():
    program = (
        "import logging, os, rollout_core, signal, threading\n"
        "done = threading.Event()\n"
        "def talk():\n"
        " while not done.is_set(): logging.warning('x' * 1000)\n"
        "threads = [threading.Thread(target=talk) for _ in range(2)]\n"
        "for thread in threads: thread.start()\n"
        "for number in range(20):\n"
        " child = os.fork()\n"
        " if child == 0: signal.alarm(60); logging.warning('child'); os._exit(0)\n"
        " assert os.waitpid(child, 0)[1] == 0\n"
        "done.set()\n"
        "for thread in threads: thread.join()\n"
    )
    assert sum(line["message"] == "child" for line in run(program)) == 20


def test_secrets_are_hidden_in_lines_that_are_json_already_and_where_json_escapes_them():
    program = (
        "import json, os, sys, rollout_core\n"
        "secret = os.environ['ROLLOUT_SECRET_JUDGE']\n"
        "print(json.dumps({'key': secret, 'at': 'postgresql://me:hunter2-hunter2@db/x'}), file=sys.stderr)"
    )
    (line,) = run(program, ROLLOUT_SECRET_JUDGE='sk-"0123456789"ü')
    assert line == {"key": "***", "at": "postgresql://me:***@db/x"}


def test_secrets_are_hidden_in_messages_and_exceptions():
    program = (
        "import logging, os, rollout_core\n"
        "try: raise ValueError('key ' + os.environ['ROLLOUT_SECRET_JUDGE'])\n"
        "except ValueError: logging.exception('at %s', 'postgresql://me:hunter2-hunter2@db/x')"
    )
    (line,) = run(program, ROLLOUT_SECRET_JUDGE="sk-0123456789abcdef")
    assert line["message"] == "at postgresql://me:***@db/x"
    assert line["exception"].endswith("ValueError: key ***") and "0123456789" not in json.dumps(line)


def test_ids_are_those_of_where_a_line_is_written():
    program = (
        "import asyncio, logging, rollout_core\nfrom rollout_core.base.logs import about\n"
        "async def work(name):\n"
        " with about(rollout_id=name, attempt_id='1'):\n"
        "  await asyncio.sleep(0); logging.warning(name)\n"
        "async def both(): await asyncio.gather(work('a'), work('b'))\n"
        "asyncio.run(both()); logging.warning('after')"
    )
    lines = run(program)
    assert [(line["message"], line.get("rollout_id"), line.get("attempt_id")) for line in lines] == [
        ("a", "a", "1"),
        ("b", "b", "1"),
        ("after", None, None),
    ]


def test_a_line_says_of_which_span_it_is():
    trace, span = "1" * 32, "2" * 16
    program = (
        "import logging\nfrom rollout_core.base import traces\n"
        f"with traces.part_of('00-{trace}-{span}-01'): logging.warning('inside')\nlogging.warning('outside')"
    )
    inside, outside = run(program)
    assert (inside["trace_id"], inside["span_id"]) == (trace, span)
    assert "trace_id" not in outside


def test_a_record_of_an_isolated_child_is_one_line_of_its_caller(monkeypatch):
    monkeypatch.setenv("ROLLOUT_LOG", "json")
    told: list[str] = []
    with Child("tests.base.isolated_handlers:log_failure", Limits(seconds=SECONDS), on_line=told.append) as child:
        child.call("it failed")
    assert len(told) == 1
    assert told[0].startswith("it failed\nTraceback") and told[0].endswith("ValueError: it failed")


def test_only_lines_of_ours_become_a_message():
    for line in ("plain", '{"time":"x"}', '{"time":"' + "[" * 100_000, '{"time":"x","message":3}', '{"a":1}'):
        assert logs.text_of(line) == line


def test_without_the_variable_nothing_is_changed():
    program = "import logging, sys, rollout_core; logging.warning('as ever'); assert sys.stderr is sys.__stderr__"
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "ROLLOUT_LOG": ""}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    assert done.stderr == "WARNING:root:as ever\n"


def test_another_form_is_refused_by_a_command_in_one_line():
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "ROLLOUT_LOG": "xml"}
    command = [sys.executable, "-P", "-m", "rollout_core", "schema", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "rollout: ROLLOUT_LOG is 'xml'; expected json, or text (the default)\n"


def test_another_form_is_refused_by_a_program_of_ours(monkeypatch):
    monkeypatch.setenv("ROLLOUT_LOG", "yes")
    with pytest.raises(ConfigError, match="ROLLOUT_LOG is 'yes'; expected json"):
        logs.configure(30)
