"""The reward of a program that a model wrote: the cases of its prompt's row that it passes, in a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, Fatal, near, shown
from rollout_core.base.settings import require_secret
from rollout_core.config.verifiers import CodeReward, CodeSandbox
from rollout_core.rewards.scoring import RewardInput, places
from rollout_core.rewards.verifiers.code import CodeGrade, IoCase, begin_output, grade_tests
from rollout_core.rewards.verifiers.extraction import code_or_all
from rollout_core.sandbox import LANGUAGES, Limits, NoSandbox, Program, Sandbox, SandboxSettings


class CodeGrader:
    """Grades the programs in completions, as many at a time as there are processors.

    Raises ConfigError where this machine has no such sandbox (NoSandbox), or does not run the language in it.
    """

    def __init__(self, spec: CodeReward) -> None:
        self._spec = spec
        if spec.language not in LANGUAGES:
            raise ConfigError(
                f"language {spec.language!r} of reward code is not known; {near(spec.language, LANGUAGES)}"
            )
        self._sandbox = Sandbox(sandbox_settings(spec.sandbox))
        self._limits = Limits(
            wall_seconds=spec.timeout_seconds,
            cpu_seconds=spec.cpu_seconds,
            memory_bytes=spec.memory_mb * 2**20,
            processes=spec.max_processes,
            disk_bytes=spec.disk_mb * 2**20,
        )
        try:
            self._try_out()
        except BaseException:
            self._sandbox.close()
            raise

    def _try_out(self) -> None:
        """A sandbox stands, and has what runs programs of the language."""
        command = LANGUAGES[self._spec.language][1]
        needed = command[2].split()[0] if command[:2] == ("sh", "-c") else command[0]
        found = self._sandbox.run(Program(argv=("sh", "-c", f"command -v {needed}")))
        if not found.ok:
            raise ConfigError(
                f"reward code: programs in {self._spec.language} are run by {needed}, which the sandbox does not have; "
                "install it on the machine that scores"
            )

    def __call__(self, inputs: Sequence[RewardInput]) -> list[float | Fatal]:
        """The reward of each input, or what is wrong with its row. Raises Recoverable where the sandbox failed, and
        NoSandbox where it is there no more."""
        with self._threads() as pool:
            try:
                begun = [self._begin(pool, sample.completion, sample.extras) for sample in inputs]
                return [self._reward(grade, place) for grade, place in zip(begun, places(inputs), strict=True)]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._sandbox.parallel, thread_name_prefix="rollout-code-reward")

    def _reward(self, finished: Callable[[], CodeGrade], place: str) -> float | Fatal:
        try:
            grade = finished()
        except NoSandbox:
            raise  # a fault of the machine, and no sample's
        except ConfigError as error:
            return Fatal(f"reward code failed on {place}: {error}")
        return float(grade.all_passed) if self._spec.value == "all" else grade.share

    def grade(self, completion: str, extras: Mapping[str, Any]) -> CodeGrade:
        """How the program in ``completion`` fares, case by case; without a program no case passes. Raises ConfigError
        where the row has no tests or they are none, and as `Sandbox.run`."""
        with self._threads() as pool:
            return self._begin(pool, completion, extras)()

    def _begin(self, pool: Executor, completion: str, extras: Mapping[str, Any]) -> Callable[[], CodeGrade]:
        """What waits for the grade, and raises as `grade`."""
        try:
            return self._begun(pool, completion, extras)
        except ConfigError as error:
            problem = error

            def failed() -> CodeGrade:
                raise problem

            return failed

    def _begun(self, pool: Executor, completion: str, extras: Mapping[str, Any]) -> Callable[[], CodeGrade]:
        spec = self._spec
        key = spec.row_keys[0]
        if key not in extras:
            raise ConfigError(f"the prompt's row has no {key!r}; {near(key, extras)}")
        source = code_or_all(completion, spec.extract, spec.language) or ""
        options: dict[str, Any] = {"limits": self._limits, "stop_at_failure": spec.value == "all"}
        if spec.check == "output":
            cases = _cases(key, extras[key])
            options |= {"language": spec.language, "compare": spec.compare}
            return begin_output(pool, self._sandbox, source, cases, **options)
        entry_point = extras.get(spec.entry_point_key)
        if entry_point is not None and not str(entry_point).isidentifier():
            raise ConfigError(f"the row's {spec.entry_point_key!r} is {shown(entry_point)}; expected a function's name")
        options["objects"] = spec.objects
        tests = _tests(key, extras[key])
        return pool.submit(grade_tests, self._sandbox, source, tests, entry_point=entry_point, **options).result

    def close(self) -> None:
        """End what the sandbox holds."""
        self._sandbox.close()


def sandbox_settings(given: CodeSandbox | str) -> SandboxSettings:
    """Of a sandbox as a configuration has it. Raises ConfigError where its secret is not to be had."""
    if isinstance(given, str):
        return SandboxSettings(kind="none")
    return SandboxSettings(
        kind=given.kind,
        url=given.url,
        image=given.image,
        command=given.command,
        python=given.python,
        search_path=(*given.packages, *_packages_of(given.python)),
        api_key=None if given.api_key is None else require_secret(given.api_key),
    )


def _packages_of(python: str | None) -> list[str]:
    """Where the packages of a virtual environment are; of other interpreters none, which find their own by
    themselves."""
    if python is None or not (folder := Path(python).absolute().parents[1]).joinpath("pyvenv.cfg").is_file():
        return []
    return [str(found) for found in sorted(folder.glob("lib/python3.*/site-packages"))]


def _tests(key: str, given: Any) -> list[str]:
    found = [given] if isinstance(given, str) else given
    if (
        not isinstance(found, Sequence)
        or not found
        or not all(isinstance(text, str) and text.strip() for text in found)
    ):
        raise ConfigError(f"the row's {key!r} is {shown(given)}; expected unit tests, a text or a list of texts")
    return list(found)


def _cases(key: str, given: Any) -> list[IoCase]:
    """Of both forms in use: a list of objects, or an object of lists."""
    try:
        if isinstance(given, Mapping):
            found = [IoCase(_text(one), _text(two)) for one, two in zip(given["inputs"], given["outputs"], strict=True)]
        else:
            found = [IoCase(_text(case["input"]), _text(case["output"])) for case in given]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the row's {key!r} is {shown(given)} ({type(error).__name__}: {error}); expected a list of "
            '{"input": ..., "output": ...}, or {"inputs": [...], "outputs": [...]}'
        ) from None
    if not found:
        raise ConfigError(f"the row's {key!r} has no case; expected at least one")
    return found


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError(f"{shown(given)} is no text")
    return given
