"""Programs that a model has written, held against cases of input and output or against unit tests, in a sandbox.

What is expected is never where the program is. Of cases of input and output, the program gets the input, and its output
is compared here. Unit tests run in a second sandbox: they call the program over a socket and compare
values that are theirs (`code_peer`). So a program that exits early, prints a success, replaces ``assert``, traces
frames or looks for the tests changes nothing but its own answers.

A score says what the tests say. Weak tests are passed by wrong programs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from rollout_core.base.errors import ConfigError
from rollout_core.sandbox import Limits, Outcome, Program, Sandbox

Compare = Literal["exact", "lines", "tokens", "numbers"]

OUTPUT_SLACK = 2**16
"""Bytes that a program may write beyond twice what is expected."""
RELATIVE = 1e-6
"""Of ``numbers``: how far two may be apart."""
MOST_REASON = 200
TESTS_LIMITS = {"memory_bytes": 512 * 2**20, "output_bytes": 16 * 2**20}
"""Of the tests' own side, at least."""
TESTS_SLACK_SECONDS = 2.0
"""That the tests may take longer than the program: one that hangs is ended first, and so is the reason."""
_PEER = "rollout_core/rewards/verifiers/code_peer.py"
"""As both programs import it."""
MOST_STARTS = 4
"""Times that a program is started anew for the tests after the one that it did not survive."""


@dataclass(frozen=True)
class IoCase:
    """What a program reads, and what it is to write."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class CodeGrade:
    """How a program fared, case by case."""

    passed: tuple[bool, ...]
    reasons: tuple[str, ...]
    """Why not, for each case; empty where it passed."""

    @property
    def share(self) -> float:
        """Of the cases that passed."""
        return sum(self.passed) / len(self.passed)

    @property
    def all_passed(self) -> bool:
        """Whether every case did."""
        return all(self.passed)


def grade_output(
    sandbox: Sandbox,
    source: str,
    cases: Sequence[IoCase],
    *,
    language: str = "python",
    limits: Limits | None = None,
    compare: Compare = "lines",
    stop_at_failure: bool = False,
) -> CodeGrade:
    """Run a program on each input, and compare what it writes.

    ``compare``: ``exact``; ``lines``, without spaces at the ends of lines and empty lines at the end; ``tokens``, by
    words alone; ``numbers``, by words, of which numbers may differ by a millionth, and whole ones not at all.
    ``stop_at_failure``: cases after one that fails fail, too, without being run, for all-or-nothing. Raises as
    `Sandbox.run`, and never for what the program does.
    """
    with ThreadPoolExecutor(sandbox.parallel, thread_name_prefix="rollout-code") as pool:
        return begin_output(
            pool,
            sandbox,
            source,
            cases,
            language=language,
            limits=limits,
            compare=compare,
            stop_at_failure=stop_at_failure,
        )()


def begin_output(
    pool: Executor,
    sandbox: Sandbox,
    source: str,
    cases: Sequence[IoCase],
    *,
    language: str,
    limits: Limits | None,
    compare: Compare,
    stop_at_failure: bool,
) -> Callable[[], CodeGrade]:
    """As `grade_output`, in the threads of ``pool``; what is returned waits for the grade."""
    if not cases:
        raise ConfigError("a program is to be graded without cases; expected at least one")
    same, given = _COMPARE[compare], limits or Limits()

    def reason(case: IoCase) -> str:
        expected = case.stdout.encode("utf-8", "surrogatepass")
        bounded = min(given.output_bytes, 2 * len(expected) + OUTPUT_SLACK)
        program = Program(
            source=source,
            language=language,
            stdin=case.stdin.encode("utf-8", "surrogatepass"),
            limits=replace(given, output_bytes=bounded),
        )
        return _output_reason(sandbox.run(program), case.stdout, same)

    def until_failure() -> list[str]:
        reasons: list[str] = []
        for case in cases:
            reasons.append(reason(case))
            if reasons[-1]:
                break
        return reasons + ["not run: a case before it failed"] * (len(cases) - len(reasons))

    if stop_at_failure:
        whole = pool.submit(until_failure)
        return lambda: _grade(whole.result())
    begun = [pool.submit(reason, case) for case in cases]
    return lambda: _grade([future.result() for future in begun])


def _grade(reasons: Sequence[str]) -> CodeGrade:
    return CodeGrade(tuple(not text for text in reasons), tuple(reasons))


def _output_reason(outcome: Outcome, expected: str, same: Callable[[str, str], bool]) -> str:
    if not outcome.ok:
        said = outcome.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return f"it {outcome.reason}{f': {said[0]}' if said else ''}"[:MOST_REASON]
    written = outcome.stdout.decode("utf-8", "replace")
    if same(written, expected):
        return ""
    return f"it wrote {written[:60]!r}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _numbers(written: str, expected: str) -> bool:
    ours, theirs = written.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _close(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if _INFINITE.fullmatch(word) and _INFINITE.fullmatch(expected):
        return float(word) == float(expected) or word.lower() == expected.lower()
    if not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    one, other = float(word), float(expected)
    if (_INTEGER.fullmatch(word) and _INTEGER.fullmatch(expected)) or not (isfinite(one) and isfinite(other)):
        try:
            return Decimal(word) == Decimal(expected)
        except InvalidOperation:  # an exponent of its own kind
            return False
    return abs(one - other) <= RELATIVE * max(1.0, abs(other))


_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_INFINITE = re.compile(r"[+-]?(inf|infinity|nan)", re.IGNORECASE)
_COMPARE: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda written, expected: written == expected,
    "lines": lambda written, expected: _lines(written) == _lines(expected),
    "tokens": lambda written, expected: written.split() == expected.split(),
    "numbers": _numbers,
}


def grade_tests(
    sandbox: Sandbox,
    source: str,
    tests: Sequence[str],
    *,
    entry_point: str | None = None,
    objects: bool | None = None,
    limits: Limits | None = None,
    stop_at_failure: bool = False,
) -> CodeGrade:
    """Run unit tests against a program in Python.

    Each text of ``tests`` is one case: some asserts; or as many as it has functions ``test_*`` and test classes'
    methods; or its function ``check(candidate)``, called with ``entry_point``. They have the program's names, also by
    ``from solution import ...``. ``objects``: whether the program may answer with objects of its own classes, whose
    methods answer as it likes; None: where the tests name a class of it, by a capital letter. A program that ends
    within a case is started anew for the next text, and its starts share ``limits``. Raises ConfigError for tests that
    can judge no program, and as `Sandbox.run_linked`; never for what the program does.
    """
    if not tests:
        raise ConfigError("a program is to be graded without tests; expected at least one")
    left = limits or Limits()
    results: dict[int, list[str]] = {}
    counts: dict[int, int] = {}
    first, reason = 0, ""
    for _ in range(MOST_STARTS):
        asked = json.dumps([list(tests), entry_point, objects, stop_at_failure, first])
        reason, wall_seconds, cpu_seconds = _run_tests(sandbox, source, asked, left, results, counts)
        first = max(results, default=first - 1) + 1
        if not reason or first >= len(tests) or (stop_at_failure and any(map(any, results.values()))) or not results:
            break
        wall_seconds, cpu_seconds = left.wall_seconds - wall_seconds, left.cpu_seconds - cpu_seconds
        if wall_seconds <= 0 or cpu_seconds <= 0:
            break
        left = replace(left, wall_seconds=wall_seconds, cpu_seconds=cpu_seconds)
    for number in range(len(tests)):
        there = results.setdefault(number, [])
        there += [reason or "not run: a case before it failed"] * (max(1, counts.get(number, 1)) - len(there))
    reasons = [text for number in range(len(tests)) for text in results[number]]
    return _grade(reasons)


def _run_tests(
    sandbox: Sandbox,
    source: str,
    asked: str,
    limits: Limits,
    results: dict[int, list[str]],
    counts: dict[int, int],
) -> tuple[str, float, float]:
    """Run those that are asked for, and enter the results; the reason where they did not come to their end, and the
    time that it took, of the wall clock and of a processor."""
    peer = _program("code_peer").encode()
    more: dict[str, Any] = {name: max(least, getattr(limits, name)) for name, least in TESTS_LIMITS.items()}
    more["wall_seconds"] = limits.wall_seconds + TESTS_SLACK_SECONDS
    judge = Program(
        source=_program("code_tests"), files={_PEER: peer, "tests.json": asked.encode()}, limits=replace(limits, **more)
    )
    candidate = Program(
        source=_program("code_candidate"),
        files={_PEER: peer, "solution.py": source.encode("utf-8", "surrogatepass")},
        limits=limits,
    )
    said, of_program = sandbox.run_linked(judge, candidate)
    taken = max(said.wall_seconds, of_program.wall_seconds), max(said.cpu_seconds, of_program.cpu_seconds)
    lost = "it was lost" if of_program.ended == "stopped" else f"it {of_program.reason}"
    if of_program.ended == "exit":
        lost += " before its tests did"
    reason = lost
    if of_program.ended in ("exit", "stopped"):
        reason = f"the tests did not come to their end: they {said.reason}"
    for line in said.stdout.splitlines():
        try:
            message = json.loads(line)
        except ValueError:
            break  # its last, in the midst of which it was ended
        if message.get("done"):
            return "", *taken
        if "unusable" in message:
            raise ConfigError(f"the row's tests can judge no program: {message['unusable']}")
        if "failed" in message:
            return f"the program does not load: {lost if message.get('lost') else message['failed']}"[
                :MOST_REASON
            ], *taken
        number = message["text"]
        if "cases" in message:
            counts[number] = message["cases"]
            results[number] = []
        elif message.get("lost"):
            reason = lost
            results[number].append(lost)
        else:
            results[number].append("" if message["passed"] else message["reason"][:MOST_REASON])
    return reason, *taken


@cache
def _program(name: str) -> str:
    return Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
