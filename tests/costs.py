"""What the suite costs, by test, by fixture and by the processes that it starts.

``pytest -p tests.costs --costs=build/costs ...`` writes one file of JSON lines for each pytest process into that
folder; ``python -m tests.costs build/costs`` prints them as tables. Seconds of a processor are those of the test's
own process and of its children that have ended and were waited for, with theirs. ``--slow`` prints the names of tests
that ``make test-fast`` leaves out, as ``tests/slow.txt`` has them: those whose mean is at least 0.2 s by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

SHOWN = 40
SLOW = 0.2
"""Mean seconds of a test, over its parameters, from which `make test-fast` leaves it out."""


@dataclass(frozen=True)
class Moment:
    """Clocks of this process."""

    wall: float
    own: float
    children: float

    @classmethod
    def now(cls) -> Moment:
        own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(time.perf_counter(), own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime)

    def since(self) -> dict[str, float]:
        """Seconds from then to now."""
        now = Moment.now()
        names = ("wall", "own", "children")
        return {name: round(getattr(now, name) - getattr(self, name), 3) for name in names}


@dataclass(eq=False)  # a plugin is hashed by its identity
class Costs:
    """Writes what tests and fixtures cost as they end."""

    file: Path
    started: list[str] = field(default_factory=list)
    """Processes begun since the last line."""

    def __post_init__(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            self.started.append(_kind_of([os.fsdecode(word) for word in arguments[1]]))
        elif event == "os.fork":
            self.started.append("fork")

    def write(self, what: str, name: str, since: Moment) -> None:
        started, self.started = self.started, []
        with self.file.open("a") as file:
            print(json.dumps({"what": what, "name": name, "started": started, **since.since()}), file=file)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began = Moment.now()
        result = yield
        self.write("test", item.nodeid, began)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        began, before = Moment.now(), list(self.started)
        result = yield
        if fixturedef.scope in ("session", "module"):
            self.write("fixture", fixturedef.argname, began)
            self.started = before
        return result


def _kind_of(command: list[str]) -> str:
    """A name for a kind of process: its program, with what Python runs in it."""
    program = Path(command[0]).name
    if not program.startswith("python"):
        return program
    words = [word for word in command[1:] if word not in ("-P", "-I", "-u", "-B", "-X", "faulthandler")]
    if words[:1] == ["-m"]:
        return " ".join(["python", *takewhile(lambda word: not word.startswith("{"), words[:4])])
    if words[:1] == ["-c"]:
        return f"python -c {words[1].strip().splitlines()[0][:60]}"
    return f"python {Path(words[0]).name}" if words else "python"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, help="folder for what tests cost, see tests/costs.py")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("costs")
    if folder is not None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        config.pluginmanager.register(Costs(folder / f"{worker}.jsonl"))


def _table(title: str, sums: dict[str, list[float]]) -> None:
    print(f"\n{title:90} {'n':>5} {'wall':>8} {'own':>8} {'children':>8}")
    for name, (count, wall, own, children) in sorted(sums.items(), key=lambda item: -sum(item[1][2:]))[:SHOWN]:
        print(f"{name[-90:]:90} {count:5.0f} {wall:8.1f} {own:8.1f} {children:8.1f}")


def _slow(rows: list[dict[str, Any]]) -> list[str]:
    """Names of tests, without parameters, whose mean is long."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["what"] == "test":
            seconds[row["name"].split("[")[0]].append(row["wall"])
    return sorted(name for name, walls in seconds.items() if statistics.mean(walls) >= SLOW)


def main() -> None:
    """Print the tables, or the names of slow tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of --costs")
    parser.add_argument("--slow", action="store_true", help="print what tests/slow.txt has")
    asked = parser.parse_args()
    rows = [json.loads(line) for file in asked.folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    if asked.slow:
        print("\n".join(_slow(rows)))
        return
    tests, files, fixtures, started = defaultdict(list), defaultdict(list), defaultdict(list), Counter()
    for row in rows:
        cost = (1, row["wall"], row["own"], row["children"])
        if row["what"] == "test":
            tests[row["name"]].append(cost)
            files[row["name"].split("::")[0]].append(cost)
            started.update(row["started"])
        else:
            fixtures[row["name"]].append(cost)
    for title, costs in (("file", files), ("test", tests), ("fixture of a session or module", fixtures)):
        _table(title, {name: [sum(column) for column in zip(*found, strict=True)] for name, found in costs.items()})
    print(f"\n{sum(started.values())} processes started by tests")
    for kind, count in started.most_common(SHOWN):
        print(f"{count:6} {kind}")


if __name__ == "__main__":
    main()
