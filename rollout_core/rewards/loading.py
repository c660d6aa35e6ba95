"""The function that a reward's description means. What can be wrong with it is found here, before any generation."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, Fatal, Recoverable, near
from rollout_core.base.isolation.child import Child, Ended, Interrupted
from rollout_core.base.processes import Limits
from rollout_core.config.judges import JudgeReward
from rollout_core.config.rewards import (
    SAMPLE_FIGURES,
    CompositeReward,
    ExactMatchReward,
    ExpressionReward,
    FunctionReward,
    ModelReward,
    PluginReward,
    RewardSpec,
    compile_expression,
    plain_rewards,
)
from rollout_core.config.verifiers import CodeReward, SqlReward, VerifiedReward
from rollout_core.rewards.answers import comparable, written
from rollout_core.rewards.call_forms import CallForm, load_function
from rollout_core.rewards.judges.kept_answers import AnswerLedger
from rollout_core.rewards.plugin_rewards import PluginScores
from rollout_core.rewards.scoring import (
    INPUT_FIELDS,
    RewardFunction,
    RewardInput,
    RewardPart,
    Score,
    as_called,
    as_plain,
    from_json,
    judge,
    places,
    whole_batch,
)
from rollout_core.rewards.source_ids import RewardSource, read_source
from rollout_core.rewards.user_code import SourceFile, UserCode, importable, imports
from rollout_core.rewards.verifiers.code_reward import CodeGrader
from rollout_core.rewards.verifiers.process import VerifierProcesses

log = logging.getLogger(__name__)

IS_ISOLATED = sys.platform == "linux"
"""Elsewhere nothing can be said of a process's descendants, and rewards run in this process."""


def load_reward(
    spec: RewardSpec,
    *,
    base: Path | None = None,
    source: RewardSource | None = None,
    model_folder: Callable[[str], Path] | None = None,
    ledger: AnswerLedger | None = None,
    on_line: Callable[[str], None] = log.info,
) -> RewardFunction:
    """The function ``spec`` describes; relative files and modules start at ``base`` (default: the working directory).

    ``source`` is its code where that has been read, ``model_folder`` finds the local folder of a reward model by its
    address, when it first scores; ``ledger`` keeps the answers of judges (default: this process's memory); ``on_line``
    gets what a user's function writes to its output.
    Raises ConfigError where the module, file or function does not exist, fails on import, or cannot be called with a
    sample.
    """
    source = source or read_source(spec, base)
    options: dict[str, Any] = {"base": base, "source": source, "model_folder": model_folder, "on_line": on_line}
    options["ledger"] = ledger
    if isinstance(spec, CompositeReward | ExpressionReward):
        return _combined(spec, [load_reward(part, **options) for part in plain_rewards(spec)])
    if isinstance(spec, ModelReward):
        return RewardFunction(f"model({spec.model})", _model_scores(spec, base or Path(), model_folder), batched=True)
    if isinstance(spec, ExactMatchReward):
        name = f"exact_match({spec.answer_key})"
        return RewardFunction(name, lambda sample: _exact_match(spec, sample), separable=True)
    if isinstance(spec, JudgeReward):
        from rollout_core.rewards.judges.judging import Judges

        judges = Judges(spec, ledger, on_line)
        return RewardFunction(spec.kind, judges, batched=True, judges=(judges,))
    if isinstance(spec, CodeReward):
        grader = CodeGrader(spec)
        return RewardFunction(spec.kind, grader, batched=True, separable=True, close=grader.close)
    if isinstance(spec, VerifiedReward):
        files = {spec.database: source.files[spec.database]} if isinstance(spec, SqlReward) else {}
        verifier = VerifierProcesses(spec, base or Path(), files, lambda line: on_line(f"reward {spec.kind}: {line}"))
        return RewardFunction(spec.kind, verifier, batched=True, separable=True, close=verifier.close)
    if isinstance(spec, PluginReward):
        scores = PluginScores(spec, source.plugins[spec.address], on_line)
        return RewardFunction(
            spec.name,
            scores,
            batched=True,
            separable=True,
            close=scores.close,
            forms={spec.name: CallForm()},
            plugins=(scores,),
            max_failed_share=spec.max_failed_share,
        )
    code = source.codes[spec.callable]
    if spec.in_process or not IS_ISOLATED:
        return _in_process(code, spec)
    process = RewardProcess(code, spec.kwargs, spec.limits(), on_line)
    return RewardFunction(
        spec.callable,
        process,
        batched=True,
        separable=not process.form.takes_all,
        close=process.close,
        forms={spec.callable: process.form},
        max_failed_share=spec.max_failed_share,
    )


def _in_process(code: UserCode, spec: FunctionReward) -> RewardFunction:
    with importable(code):
        function, form = load_function(code, spec.kwargs)
    called = as_called(function, form, spec.kwargs, code.callable)
    alarms = next((name for name in USES_SIGNALS if any(imports(file.code, name) for file in _files(code))), None)

    def call(given: Any) -> Any:
        with _running(code, alarms):
            return called(given)

    async def wait(given: Any) -> Any:
        with _running(code, alarms):
            return await called(given)

    return RewardFunction(
        code.callable,
        wait if form.is_async else call,
        form.takes_all,
        separable=not form.takes_all,
        is_async=form.is_async,
        forms={code.callable: form},
        max_failed_share=spec.max_failed_share,
    )


USES_SIGNALS = ("signal", "math_verify")
"""Modules that tell of alarms, which Python has in a process's main thread alone. In another one Math-Verify takes what
it cannot time for no answer, and says so to its log only."""


@contextmanager
def _running(code: UserCode, alarms: str | None) -> Iterator[None]:
    """Around a call of a user's function in this process, where imports inside of it find the user's modules.
    ``alarms``: which of `USES_SIGNALS` it imports."""
    if alarms is not None and threading.current_thread() is not threading.main_thread():
        raise Fatal(
            f"reward {code.callable} imports {alarms}, whose alarms need a process's main thread, and with in_process "
            "= true it is called in another; leave in_process out, and it runs in the main thread of a process of its "
            "own"
        )
    with importable(code):
        yield


def _files(code: UserCode) -> list[SourceFile]:
    return [*([code.main] if code.main else []), *code.imported.values()]


def _combined(spec: CompositeReward | ExpressionReward, parts: Sequence[RewardFunction]) -> RewardFunction:
    if isinstance(spec, CompositeReward):
        weights = [part.weight for part in spec.parts]

        def combine(sample: RewardInput, values: Sequence[Score]) -> Score:
            return weighted_sum(weights, values)

        name = "composite"
    else:
        evaluate = compile_expression(spec.expression, [*spec.rewards, *SAMPLE_FIGURES])

        def combine(sample: RewardInput, values: Sequence[Score]) -> Score:
            known = [value for value in values if value is not None]
            if len(known) < len(values):
                return None
            figures = (sample.num_tokens, len(sample.completion), sample.finish_reason == "length")
            return evaluate(dict(zip((*spec.rewards, *SAMPLE_FIGURES), (*known, *figures), strict=True)))

        name = spec.expression

    def one(place: str, sample: RewardInput, values: Sequence[Score | Fatal]) -> Score | Fatal:
        if failures := [value for value in values if isinstance(value, Fatal)]:
            return failures[0]
        try:
            return combine(sample, [value for value in values if not isinstance(value, Fatal)])
        except (ArithmeticError, ValueError) as error:
            return Fatal(f"reward {name} failed on {place}: {type(error).__name__}: {error}")

    def rewards(samples: Sequence[RewardInput]) -> list[Score | Fatal]:
        columns = [judge(part, samples) for part in parts]
        return [
            one(place, sample, values)
            for place, sample, *values in zip(places(samples), samples, *columns, strict=True)
        ]

    def close() -> None:
        for part in parts:
            part.close()

    summed = _summed(spec, parts) if isinstance(spec, CompositeReward) else ()
    separable = all(part.separable for part in parts)
    return RewardFunction(
        name,
        rewards,
        batched=True,
        separable=separable,
        close=close,
        parts=summed,
        forms={name: form for part in parts for name, form in part.forms.items()},
        max_failed_share=min((part.max_failed_share for part in parts if part.forms), default=0.0),
        judges=tuple(each for part in parts for each in part.judges),
        plugins=tuple(each for part in parts for each in part.plugins),
    )


def weighted_sum(weights: Sequence[float], values: Sequence[Score]) -> Score:
    """Of a composite's parts. Where some abstained, the others count so much more that the weights, by their absolute
    values, sum to what they all do; None where no part answered that has a weight."""
    answers = [(weight, value) for weight, value in zip(weights, values, strict=True) if value is not None]
    total = sum(weight * value for weight, value in answers)
    if len(answers) == len(weights):
        return total
    share = math.fsum(abs(weight) for weight, _ in answers)
    return total * math.fsum(map(abs, weights)) / share if share else None


def _summed(spec: CompositeReward, functions: Sequence[RewardFunction]) -> tuple[RewardPart, ...]:
    """Parts by the names of their kinds, functions or plugins; a name that was there before is numbered."""
    parts: list[RewardPart] = []
    for part, function in zip(spec.parts, functions, strict=True):
        own = part.reward
        name = own.callable.rpartition(":")[2] if isinstance(own, FunctionReward) else own.kind
        name = own.name if isinstance(own, PluginReward) else name
        same = sum(other.name.partition(" ")[0] == name for other in parts)
        parts.append(RewardPart(f"{name} {same + 1}" if same else name, part.weight, function))
    return tuple(parts)


def _model_scores(
    spec: ModelReward, base: Path, model_folder: Callable[[str], Path] | None
) -> Callable[[Sequence[RewardInput]], list[float]]:
    def scores(samples: Sequence[RewardInput]) -> list[float]:
        from rollout_core.algorithms.supervised import score_samples

        folder = model_folder(spec.model) if model_folder else base / spec.model
        return score_samples(folder, [(sample.prompt_token_ids, sample.token_ids) for sample in samples])

    return scores


def _exact_match(spec: ExactMatchReward, sample: RewardInput) -> float:
    if spec.answer_key not in sample.extras:
        raise ConfigError(f"the prompt's row has no {spec.answer_key!r}; {near(spec.answer_key, sample.extras)}")
    answer = sample.extras[spec.answer_key]
    same = partial(comparable, strip=spec.strip, ignore_case=spec.ignore_case)
    return float(same(sample.completion) in map(same, written(answer)))


class RewardProcess:
    """A reward function that is loaded and called in a child process, which stays from call to call.

    Raises ConfigError where the function cannot be loaded, as `load_function` does.
    """

    def __init__(
        self, code: UserCode, kwargs: Mapping[str, Any], limits: Limits, on_line: Callable[[str], None]
    ) -> None:
        self._code = code
        self._kwargs = dict(kwargs)
        self.form = CallForm()
        """How the function is called."""
        name = code.callable
        self._child = Child(
            "rollout_core.rewards.scoring:handle",
            limits,
            on_line=lambda line: on_line(f"reward {name}: {line}"),
            prepare=self._load,
        )
        self._child.start()

    def _load(self, ask: Callable[[Any], Any]) -> None:
        try:
            self.form = CallForm.from_document(ask({"code": self._code.document(), "kwargs": self._kwargs}))
        except Ended as error:
            raise ConfigError(f"reward {self._code.callable} cannot be loaded: it {error}") from error
        except Interrupted as error:
            raise Recoverable(f"reward {self._code.callable} was not loaded: its process {error.reason}") from error

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score | Fatal]:
        """The reward of each input. Raises as `judge` does."""
        rows = [[as_plain(sample, name) for name in INPUT_FIELDS] for sample in inputs]
        try:
            return list(map(from_json, self._child.call({"inputs": rows})))
        except Ended as error:
            place = _place(error.place, inputs)
            raise Fatal(f"reward {self._code.callable} failed on {place}: it {error}") from error
        except Interrupted as error:
            place = _place(error.place, inputs)
            raise Recoverable(
                f"reward {self._code.callable} was interrupted on {place}: its process {error.reason}"
            ) from error

    def close(self) -> None:
        """End the child."""
        self._child.close()


def _place(place: int | None, inputs: Sequence[RewardInput]) -> str:
    """Where it was, for a message; the process may have reported no valid position."""
    known = list(places(inputs))
    return known[place] if place is not None and 0 <= place < len(known) else whole_batch(inputs)
