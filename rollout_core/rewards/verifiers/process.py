"""Verifying answers in child processes: an answer that makes its verifier hang, crash or take all memory costs its own
sample, and no other.

Other people's libraries (SymPy, parsers of LaTeX, regular expressions, SQLite) are called on text that a model wrote.
What they can be made to do with it is bounded from outside, by time and memory, and not by alarms, which code in C does
not hear.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rollout_core.base.errors import ConfigError, Fatal, Recoverable, in_words, near
from rollout_core.base.ids import ContentId
from rollout_core.base.isolation.child import Child, Ended, Interrupted
from rollout_core.base.machine import usable_cores
from rollout_core.base.processes import Limits
from rollout_core.config.verifiers import SqlReward, TextReward, Verified
from rollout_core.objects.trees import hash_file
from rollout_core.rewards.scoring import RewardInput, places

CHUNK = 32
"""Answers of one request: what has to be verified again after one of them ended the process."""
MAX_PROCESSES = 4
LOAD_SECONDS = 300.0
"""For a process to import what it verifies with, such as SymPy, which a busy machine may take long for."""
_SPECS: TypeAdapter[Verified] = TypeAdapter(Verified)

Verifier = Callable[[str, dict[str, Any]], float]
"""From a completion, and the other keys of its prompt's row, to its reward."""

LOADING_SECONDS = 60.0
"""For a verifier's packages to be imported, which a busy machine makes long; its own limit is an answer's."""


class VerifierProcesses:
    """A reward that verifies answers, in as many processes as there are processors, up to `MAX_PROCESSES`.

    Raises ConfigError where it cannot be loaded, such as for a package that is not installed.
    """

    def __init__(
        self, spec: Verified, base: Path, files: Mapping[str, ContentId], on_line: Callable[[str], None]
    ) -> None:
        """``files``: what the files under ``base`` that it reads hold, by their paths there."""
        self._spec = spec
        self._base = base
        self._files = files
        self._states: dict[str, tuple[int, int, int]] = {}
        """Of files that were found to hold what they should."""
        self._on_line = on_line
        limits = Limits(
            seconds=spec.timeout_seconds, memory_bytes=spec.memory_mb * 2**20, processes=4, address_space=True
        )
        self._children = [
            Child(
                "rollout_core.rewards.verifiers.process:handle",
                limits,
                on_line=on_line,
                prepare=self._load,
                prepare_seconds=max(spec.timeout_seconds, LOADING_SECONDS),
            )
            for _ in range(min(MAX_PROCESSES, usable_cores()))
        ]
        self._children[0].start()

    def _load(self, ask: Callable[[Any], Any]) -> None:
        try:
            ask({"spec": self._spec.model_dump(mode="json"), "base": str(self._base)})
        except Ended as error:
            raise ConfigError(f"reward {self._spec.kind} cannot be loaded: it {error}") from error
        except Interrupted as error:
            raise Recoverable(f"reward {self._spec.kind} was not loaded: its process {error.reason}") from error

    def __call__(self, inputs: Sequence[RewardInput]) -> list[float | Fatal]:
        """The reward of each input, or what is wrong with its row. Raises Fatal where a file was changed, Recoverable
        where the machine is to blame."""
        self._check_files()
        rows = [[sample.completion, dict(sample.extras)] for sample in inputs]
        values = self._in_chunks("rows", rows, 0.0, "earn 0")
        self._check_files()
        return [
            Fatal(f"reward {self._spec.kind} failed on {place}: {value}") if isinstance(value, str) else value
            for place, value in zip(places(inputs), values, strict=True)
        ]

    def answers(self, completions: Sequence[str]) -> list[str | None]:
        """The answer that each completion is judged by, in a form that equal answers share; None where it has none."""
        return self._in_chunks("completions", completions, None, "have no answer")

    def _in_chunks(self, what: str, rows: Sequence[Any], lost: Any, fate: str) -> list[Any]:
        """What processes find of the rows, in order; ``lost`` of one that ended its process."""
        chunks = [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]
        free: queue.SimpleQueue[Child] = queue.SimpleQueue()
        for child in self._children[: len(chunks)]:
            free.put(child)
        ended: list[str] = []

        def verified(chunk: Sequence[Any]) -> list[Any]:
            child = free.get()
            try:
                return self._verify(child, what, chunk, lost, ended)
            finally:
                free.put(child)

        with ThreadPoolExecutor(max(1, min(len(chunks), len(self._children)))) as threads:
            values = [value for part in threads.map(verified, chunks) for value in part]
        if ended:
            self._on_line(
                f"{len(ended)} of {len(rows)} answers could not be verified and {fate}; the last one {ended[-1]}"
            )
        return values

    def _check_files(self) -> None:
        for name, wanted in self._files.items():
            found = (self._base / name).stat()
            state = (found.st_ino, found.st_size, found.st_mtime_ns)
            if self._states.get(name) != state and hash_file(self._base / name).content_id == wanted:
                self._states[name] = state
            if self._states.get(name) != state:
                raise Fatal(
                    f"reward {self._spec.kind}: {name} was changed since the run began, so that no score was kept; "
                    "start the run again to score with it as it is now"
                )

    def _verify(self, child: Child, what: str, rows: Sequence[Any], lost: Any, ended: list[str]) -> list[Any]:
        if not rows:
            return []
        try:
            return child.call({what: list(rows)})
        except Ended as error:
            place = error.place
            if place is None or not 0 <= place < len(rows):
                raise Fatal(f"reward {self._spec.kind} does not run: it {error}") from error
            ended.append(str(error))
            parts = rows[:place], rows[place + 1 :]
            before, after = (self._verify(child, what, part, lost, ended) for part in parts)
            return [*before, lost, *after]
        except Interrupted as error:
            raise Recoverable(f"reward {self._spec.kind} was interrupted: its process {error.reason}") from error

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.close()


VERIFIERS = {
    "math": "mathematics:math_reward",
    "regex": "patterns:regex_reward",
    "schema": "schema:schema_reward",
    "sql": "sql:sql_reward",
    "instructions": "instructions:instructions_reward",
    "text": "texts:text_reward",
    "text by overlap": "overlaps:overlap_reward",
}
"""By kind, the function that verifies, in a module that imports what it alone needs."""

ANSWERS = {"math": "mathematics:math_answer", "regex": "patterns:regex_answer", "text": "texts:text_answer"}
"""By kind, the function that reads a completion's answer, of kinds that read one."""


def verifier_of(spec: Verified, base: Path) -> Verifier:
    """The function that ``spec`` describes. Raises ConfigError naming the package that is not installed."""
    kind = "text by overlap" if isinstance(spec, TextReward) and spec.measures_overlap else spec.kind
    module, _, name = VERIFIERS[kind].partition(":")
    try:
        function = getattr(import_module(f"{__package__}.{module}"), name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reward {spec.kind} needs the package {error.name}; install it with: pip install "
            "'rollout-post-training[verify]'"
        ) from None
    if isinstance(spec, SqlReward):
        spec = spec.model_copy(update={"database": str(base / spec.database)})
    return lambda completion, extras: function(spec, completion, extras)


_loaded: tuple[Verified, Verifier] | None = None


def handle(request: dict[str, Any], report: Callable[[int], None]) -> Any:
    """Load what the first request describes; verify the rows of any other one, a number each, or what is wrong with the
    row; or read the answers of completions."""
    global _loaded
    if "spec" in request:
        spec = _SPECS.validate_python(request["spec"])
        _loaded = spec, verifier_of(spec, Path(request["base"]))
        return None
    assert _loaded is not None, "the caller loads it first"
    spec, verify = _loaded
    if "rows" in request:
        return list(_verified(verify, spec.row_keys, request["rows"], report))
    module, _, name = ANSWERS[spec.kind].partition(":")
    read = getattr(import_module(f"{__package__}.{module}"), name)
    return list(_answers(partial(read, spec), request["completions"], report))


def _answers(
    read: Callable[[str], str | None], completions: Sequence[str], report: Callable[[int], None]
) -> Iterator[str | None]:
    for index, completion in enumerate(completions):
        report(index)
        yield read(completion)


def _verified(
    verify: Verifier, needed: Sequence[str], rows: Iterable[list[Any]], report: Callable[[int], None]
) -> Iterator[float | str]:
    for index, (completion, extras) in enumerate(rows):
        report(index)
        if missing := [key for key in needed if key not in extras]:
            yield f"the prompt's row has no {missing[0]!r}; {near(missing[0], extras)}"
            continue
        try:
            yield verify(completion, extras)
        except ConfigError as error:
            yield str(error)
        except Exception as error:  # noqa: BLE001 - what a library raises for a row or an answer concerns that one alone
            yield in_words(error)
