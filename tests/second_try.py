"""CI's second try of tests that failed: ``python -m tests.second_try build/tests.xml`` after ``make test`` has failed.

A few failed tests are run once more, one after another on a quiet machine. Those that pass then are named with the text
of their first failure, which a person enters into ``tests/second_tries.md``. Only ``.ci/run`` calls this: at a
developer's desk a test that fails has failed.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.server_logs import OF_SEVERAL_TESTS

MAX_FAILED = 20
"""More than these are no accident."""
CLASS = "Test"
"""How the name of a class of tests begins, and that of no folder or module."""
LIST = Path(__file__).with_name("second_tries.md")
SHOWN_LINES = 40
CRASH, UNCOLLECTED = "crashed while running", "collection failure"
"""What pytest-xdist says of the test that a process of it died in, and pytest of a file that it cannot import."""


@dataclass(frozen=True)
class Failure:
    """A test that failed, in its setup, its call or its teardown."""

    test: str
    text: str


class NoSecondTry(Exception):
    """What happened is no accident of single tests."""


def failures(report: str, outcome: Mapping[str, Any]) -> list[Failure]:
    """Failed tests of a JUnit report of the family xunit1, in order, each once.

    ``outcome`` is what `tests.conftest` writes beside the report. Raises NoSecondTry where the session did not come to
    its end, more than MAX_FAILED tests failed, a pytest process died, a file could not be collected, or a check of
    several tests failed.
    """
    if outcome["exit_status"] != 1:
        raise NoSecondTry(f"the session ended otherwise than by failed tests, with {outcome['exit_status']}")
    found: dict[str, str] = {}
    reported = set()
    for case in ElementTree.fromstring(report).iter("testcase"):
        problems = [*case.iter("failure"), *case.iter("error")]
        if not case.get("classname") and not problems:
            continue  # a file that skips itself whole: none of its tests was collected
        text = "\n".join(f"{problem.get('message', '')}\n{problem.text or ''}" for problem in problems)
        if any(sign in text for sign in (CRASH, UNCOLLECTED, OF_SEVERAL_TESTS)) or not case.get("file"):
            raise NoSecondTry(
                f"a pytest process died, a file cannot be collected, or a check of several tests failed: {text[:3000]}"
            )
        reported.add(_node_id(case))
        if problems:
            found[_node_id(case)] = "\n".join(filter(None, [found.get(_node_id(case)), text]))
    if len(reported) != outcome["collected"]:
        raise NoSecondTry(f"{outcome['collected']} tests were collected, and {len(reported)} reported")
    if len(found) > MAX_FAILED:
        raise NoSecondTry(f"{len(found)} tests failed, and at most {MAX_FAILED} get a second try")
    return [Failure(test, text) for test, text in found.items()]


def passed(report: str) -> set[str]:
    """Tests of a report that ran and passed."""
    cases: dict[str, bool] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        cases[_node_id(case)] = cases.get(_node_id(case), True) and len(case.findall("*")) == len(
            [*case.findall("system-out"), *case.findall("system-err"), *case.findall("properties")]
        )
    return {test for test, is_whole in cases.items() if is_whole}


def _node_id(case: ElementTree.Element) -> str:
    """``classname`` is the file's dotted name, followed by the names of classes that the test is in.

    ``file`` says where the function stands, which is another file where a library made it.
    """
    parts = case.attrib["classname"].split(".")
    folders = list(itertools.takewhile(lambda part: not part.startswith(CLASS), parts))
    return "::".join(["/".join(folders) + ".py", *parts[len(folders) :], case.attrib["name"]])


def report_of(passed: list[Failure], known: str) -> str:
    """The block that CI prints, given the text of ``tests/second_tries.md``."""
    lines = ["passed at the second try:"]
    for failure in passed:
        text = failure.text.strip().splitlines()
        lines += [f"* {failure.test}", *(f"    {line}" for line in text[-SHOWN_LINES:])]
    lines.append(f"Enter them into tests/{LIST.name}, with the reason once it is known.")
    again = [failure.test for failure in passed if f"`{failure.test}`" in known]
    if again:
        lines.append(f"These stand there already, so mend their fault in this change: {', '.join(again)}")
    return "\n".join(lines)


def main(report: Path) -> int:
    """0 where all that failed passes now."""
    beside = report.with_suffix(".json")
    try:
        if not report.exists() or not beside.exists():
            raise NoSecondTry(f"there is no {report} with what became of the session: the tests did not end")
        outcome = json.loads(beside.read_text(encoding="utf-8"))
        failed = failures(report.read_text(encoding="utf-8"), outcome)
        if not failed:
            raise NoSecondTry("no test failed, but the run did; see its last lines")
    except NoSecondTry as reason:
        print(f"no second try: {reason}")
        return 1
    print(f"a second try of {len(failed)} tests that failed, one after another", flush=True)
    tests, second = [failure.test for failure in failed], report.with_name("second-try.xml")
    second.unlink(missing_ok=True)
    done = subprocess.run([sys.executable, "-m", "pytest", f"--junitxml={second}", *tests])
    if done.returncode or not set(tests) <= passed(second.read_text(encoding="utf-8")):
        return 1
    print(report_of(failed, LIST.read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
