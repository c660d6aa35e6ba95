"""Rewards: a number for each completion, from a rule or from the user's own function.

What can be wrong with a reward is found when it is loaded, before anything is generated. A user's function enters cache
keys by the content of its source file (`source_id`), so editing it makes new scores.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_core.errors import ConfigError, Fatal
from rollout_core.expressions import compile_expression
from rollout_core.ids import ContentId, canonical_json, content_id
from rollout_core.reward_functions import is_batched, load_function, near
from rollout_core.reward_process import RewardProcess
from rollout_core.reward_scoring import RewardFunction, RewardInput, batch_reward, places, score
from rollout_core.reward_specs import (
    SAMPLE_FIGURES,
    CompositeReward,
    ExactMatchReward,
    ExpressionReward,
    FunctionReward,
    ModelReward,
    PlainReward,
    RewardSpec,
    WeightedReward,
    plain_rewards,
    with_models,
)
from rollout_core.user_code import UserCode
from rollout_core.user_modules import importable
from rollout_core.user_sources import read_code

log = logging.getLogger(__name__)

IS_ISOLATED = sys.platform == "linux"
"""Elsewhere nothing can be said of a process's descendants, and rewards run in this process."""

__all__ = [
    "CompositeReward",
    "ExactMatchReward",
    "ExpressionReward",
    "FunctionReward",
    "ModelReward",
    "PlainReward",
    "RewardFunction",
    "RewardInput",
    "RewardSource",
    "RewardSpec",
    "WeightedReward",
    "batch_reward",
    "load_reward",
    "plain_rewards",
    "read_source",
    "score",
    "source_id",
    "source_of",
    "with_models",
]


def load_reward(
    spec: RewardSpec,
    *,
    base: Path | None = None,
    source: RewardSource | None = None,
    model_folder: Callable[[str], Path] | None = None,
    on_line: Callable[[str], None] = log.info,
) -> RewardFunction:
    """The function ``spec`` describes; relative files and modules start at ``base`` (default: the working directory).

    ``source`` is its code where that has been read, ``model_folder`` finds the local folder of a reward model by its
    address, when it first scores; ``on_line`` gets what a user's function writes to its output.
    Raises ConfigError where the module, file or function does not exist, fails on import, or cannot be called with a
    sample.
    """
    source = source or read_source(spec, base)
    options: dict[str, Any] = {"base": base, "source": source, "model_folder": model_folder, "on_line": on_line}
    if isinstance(spec, CompositeReward | ExpressionReward):
        return _combined(spec, [load_reward(part, **options) for part in plain_rewards(spec)])
    if isinstance(spec, ModelReward):
        return RewardFunction(f"model({spec.model})", _model_scores(spec, base or Path(), model_folder), batched=True)
    if isinstance(spec, ExactMatchReward):
        return RewardFunction(f"exact_match({spec.answer_key})", lambda sample: _exact_match(spec, sample))
    code = source.codes[spec.callable]
    if spec.in_process or not IS_ISOLATED:
        return _in_process(code, spec.kwargs)
    process = RewardProcess(code, spec.kwargs, spec.limits(), on_line)
    return RewardFunction(spec.callable, process, batched=True, close=process.close)


def _in_process(code: UserCode, kwargs: Mapping[str, Any]) -> RewardFunction:
    with importable(code):
        function = load_function(code, kwargs)

    def call(given: Any) -> Any:
        with importable(code):  # for imports inside of functions
            return function(given, **kwargs)

    return RewardFunction(code.callable, call, is_batched(function))


@dataclass(frozen=True)
class RewardSource:
    """The code of a reward as it was read, and the id of what its scores depend on."""

    id: ContentId
    codes: Mapping[str, UserCode]
    """Of its functions, by their names."""


def read_source(spec: RewardSpec, base: Path | None = None) -> RewardSource:
    """Read each file of a reward's code once. Runs none of it. Raises ConfigError if it cannot be found."""
    functions = [part.callable for part in plain_rewards(spec) if isinstance(part, FunctionReward)]
    codes = {name: read_code(name, base) for name in dict.fromkeys(functions)}
    return RewardSource(_source_id(spec, codes), codes)


def source_id(spec: RewardSpec, base: Path | None = None) -> ContentId:
    """Content id of what scores depend on: the settings of ``spec``, the function's source file, and what of the user's
    own code that imports (`read_code`). What was read is held, so that this process runs it (`source_of`).

    Where the files lie does not matter. Installed packages, data files and services do not enter. A reward model counts
    by its address, so give its content id. Raises ConfigError if the source cannot be found; runs none of it.
    """
    source = read_source(spec, base)
    with _held_lock:
        _held.pop(source.id, None)
        _held[source.id] = source
        while len(_held) > HELD_SOURCES:
            del _held[next(iter(_held))]
    return source.id


def source_of(spec: RewardSpec, base: Path | None, wanted: ContentId) -> RewardSource:
    """The code that ``wanted`` is the id of: as this process read it when it took the id, else as it is now.

    Raises ConfigError where that is other code.
    """
    with _held_lock:
        held = _held.get(wanted)
    if held is not None and all(
        part.callable in held.codes for part in plain_rewards(spec) if isinstance(part, FunctionReward)
    ):
        return held
    source = read_source(spec, base)
    if source.id != wanted:
        names = ", ".join(source.codes) or spec.kind
        raise ConfigError(
            f"the code of reward {names} is not what it was when the run began (id {source.id.short}, expected "
            f"{wanted.short}): it was edited since, or differs between machines. No score was stored; start the run "
            "again to score with the code as it is now"
        )
    return source


HELD_SOURCES = 32
_held: dict[ContentId, RewardSource] = {}
_held_lock = threading.Lock()


def _source_id(spec: RewardSpec, codes: Mapping[str, UserCode]) -> ContentId:
    if isinstance(spec, CompositeReward):
        parts = [[part.weight, _source_id(part.reward, codes)] for part in spec.parts]
        return content_id("reward/1", {"kind": spec.kind, "parts": parts})
    if isinstance(spec, ExpressionReward):
        rewards = {name: _source_id(reward, codes) for name, reward in spec.rewards.items()}
        return content_id("reward/1", {"kind": spec.kind, "expression": spec.expression, "rewards": rewards})
    if not isinstance(spec, FunctionReward):
        return content_id("reward/1", spec)
    function = spec.callable.rpartition(":")[2]
    identity = {"kind": spec.kind, "function": function, "kwargs": spec.kwargs}
    return content_id("reward/1", {**identity, **codes[spec.callable].identity()})


def _combined(spec: CompositeReward | ExpressionReward, parts: Sequence[RewardFunction]) -> RewardFunction:
    if isinstance(spec, CompositeReward):
        weights = [part.weight for part in spec.parts]

        def combine(sample: RewardInput, values: Sequence[float]) -> float:
            return sum(weight * value for weight, value in zip(weights, values, strict=True))

        name = "composite"
    else:
        evaluate = compile_expression(spec.expression, [*spec.rewards, *SAMPLE_FIGURES])

        def combine(sample: RewardInput, values: Sequence[float]) -> float:
            figures = (sample.num_tokens, len(sample.completion), sample.finish_reason == "length")
            return evaluate(dict(zip((*spec.rewards, *SAMPLE_FIGURES), (*values, *figures), strict=True)))

        name = spec.expression

    def rewards(samples: Sequence[RewardInput]) -> list[float]:
        columns = [score(part, samples) for part in parts]
        combined = []
        for place, sample, *values in zip(places(samples), samples, *columns, strict=True):
            try:
                combined.append(combine(sample, values))
            except (ArithmeticError, ValueError) as error:
                raise Fatal(f"reward {name} failed on {place}: {type(error).__name__}: {error}") from error
        return combined

    def close() -> None:
        for part in parts:
            part.close()

    return RewardFunction(name, rewards, batched=True, close=close)


def _model_scores(
    spec: ModelReward, base: Path, model_folder: Callable[[str], Path] | None
) -> Callable[[Sequence[RewardInput]], list[float]]:
    def scores(samples: Sequence[RewardInput]) -> list[float]:
        from rollout_core.algorithms.reward_model import score_samples

        folder = model_folder(spec.model) if model_folder else base / spec.model
        return score_samples(folder, [(sample.prompt_token_ids, sample.token_ids) for sample in samples])

    return scores


def _exact_match(spec: ExactMatchReward, sample: RewardInput) -> float:
    if spec.answer_key not in sample.extras:
        raise ConfigError(f"the prompt's row has no {spec.answer_key!r}; {near(spec.answer_key, sample.extras)}")
    answer = sample.extras[spec.answer_key]
    pair = [sample.completion, answer if isinstance(answer, str) else canonical_json(answer).decode()]
    if spec.strip:
        pair = [text.strip() for text in pair]
    if spec.ignore_case:
        pair = [text.casefold() for text in pair]
    return float(pair[0] == pair[1])
