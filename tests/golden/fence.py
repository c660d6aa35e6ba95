"""The golden files, how each is made, and how what is found is compared with it."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.golden import surfaces
from tests.golden.keys import PROJECT, SETTINGS, VARIABLES

AGAIN = "python -m tests.golden"
FOLDER = Path(__file__).parent
ALGORITHMS = PROJECT / "tests" / "algorithms" / "portable_child.py"
Lines = Mapping[str, Sequence[str]]
"""What is compared, in sections."""


@dataclass(frozen=True)
class Golden:
    """A file of this folder."""

    name: str
    make: Callable[[], Lines]
    may_grow: bool
    """Whether new lines break nothing that people have stored or typed."""
    rule: str
    """What to do where a line has changed or is gone."""
    folder: Path = FOLDER

    @property
    def file(self) -> Path:
        """Where it is."""
        return self.folder / f"{self.name}.json"

    def read(self) -> dict[str, list[str]]:
        """What was found when it was written."""
        return json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {}

    def write(self, found: Lines) -> None:
        """Replace it; a line of the file for each line that is compared."""
        self.file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def changes(self, found: Lines) -> list[str]:
        """Lines that are gone (-) or new (+), by section."""
        expected = self.read()
        differ = _missing if self.may_grow else _moved
        return [line for section in dict.fromkeys([*expected, *found]) for line in differ(section, expected, found)]

    def complaint(self, found: Lines) -> str:
        """What differs and what to do about it; empty where nothing does."""
        changes = self.changes(found)
        if not changes:
            return ""
        if self.may_grow and not any(line.startswith("  - ") for line in changes):
            heading = f"lines are new, and none has changed. Enter them with `{AGAIN} {self.name}`, in the same commit."
        else:
            heading = f"lines are not what they were.\n{self.rule}"
        return "\n".join([f"{self.file.name}: {heading}", "", *changes])


def _moved(section: str, expected: Lines, found: Lines) -> Iterator[str]:
    """Where the order counts, too."""
    before, now = expected.get(section, []), found.get(section, [])
    if list(before) != list(now):
        yield f"{section}:"
        yield from (f"  {line}" for line in difflib.ndiff(before, now) if line[0] in "+-")


def _missing(section: str, expected: Lines, found: Lines) -> Iterator[str]:
    before, now = Counter(expected.get(section, [])), Counter(found.get(section, []))
    if before != now:
        yield f"{section}:"
        yield from (f"  - {line}" for line in before - now)
        yield from (f"  + {line}" for line in now - before)


def in_process(*command: str, **environment: str) -> Any:
    """What another Python prints as JSON, which inherits nothing that differs from machine to machine."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLES)}
    done = subprocess.run(
        [sys.executable, *command],
        env={**inherited, **SETTINGS, **environment},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def train_states(*names: str, **environment: str) -> Lines:
    """What a tiny run of each algorithm (of those with these names, if any is given) comes to in portable arithmetic,
    in a process with these variables."""
    with tempfile.TemporaryDirectory() as folder:
        states = in_process(str(ALGORITHMS), folder, *names, ROLLOUT_NUMERICS="portable", **environment)
    return {"train states": [f"{name} {state}" for name, state in states.items()]}


KEPT = (
    "A line changes only together with a raised version and a reason in the same commit: the version of a stage "
    "(`@stage(version=...)`) where its calls have other keys, the number in the tag where ids have. Otherwise results "
    "that people have stored no longer count, so mend what moved. Where the change is meant (or an example itself was "
    f"edited), run `{AGAIN}` and say why in the commit."
)
STORED = (
    "Databases, blocks and deployments of earlier versions have the names in these lines. A change needs a migration, "
    f"or another way for those that exist, in the same commit, with its reason. Then run `{AGAIN}`."
)
TYPED = (
    "People have typed these names in configurations, commands, requests and imports. A name stays for one release, "
    "beside its successor, and its type and default stay as they are. Bring it back; where it has had its release, or "
    f"the change is meant, run `{AGAIN}` and say so in CHANGELOG.md."
)
KEYS = Golden("keys", lambda: in_process("-m", "tests.golden.keys"), False, KEPT)
STAGES = Golden("stages", surfaces.stages, False, KEPT)
DEFAULTS = Golden("defaults", surfaces.defaults, True, KEPT)
STORAGE = Golden("storage", surfaces.storage, False, STORED)
INTERFACES = Golden("interfaces", surfaces.interfaces, True, TYPED)
TRAIN_STATES = Golden(
    "numerics",
    train_states,
    False,
    "Training comes to other bytes than it did with torch 2.13.0+cpu and transformers 5.19.0. Moved code does not do "
    "that, so mend it. Where other libraries or other arithmetic are meant, raise the versions of the stages that "
    f"train (tasks/learn.py), run `{AGAIN}` and say why in the same commit.",
)
GOLDENS = (KEYS, STAGES, DEFAULTS, STORAGE, INTERFACES, TRAIN_STATES)
