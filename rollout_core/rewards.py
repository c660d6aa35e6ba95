"""Rewards: a number for each completion, from a rule or from the user's own function.

What can be wrong with a reward is found when it is loaded, before anything is generated. A user's function enters cache
keys by the content of its source file (`source_id`), so editing it makes new scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rollout_core.errors import ConfigError, Fatal, Recoverable
from rollout_core.expressions import compile_expression
from rollout_core.ids import ContentId, canonical_json, content_id, hash_bytes
from rollout_core.numerics import numerics_identity
from rollout_core.reward_functions import imported_sources, load_function, near, shown, source_file


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ExactMatchReward(_Spec):
    """1 where the completion is the answer of its row, else 0."""

    kind: Literal["exact_match"] = "exact_match"
    answer_key: str = Field(default="answer", min_length=1)
    """Key of the prompt's row that holds the answer; an answer that is no string is compared by its JSON text."""
    strip: bool = True
    """White space around completion and answer does not count."""
    ignore_case: bool = False


class FunctionReward(_Spec):
    """A function of yours: ``def reward(sample: RewardInput) -> float``, or of a whole list under `batch_reward`."""

    kind: Literal["function"] = "function"
    callable: str
    """``module:function``, or ``path/to/file.py:function`` relative to the working folder."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments of each call."""

    def cache_identity(self) -> Any:
        """Where the function lies does not count; its code does, by its `source_id`."""
        return {"kind": self.kind, "function": self.callable.rpartition(":")[2], "kwargs": self.kwargs}

    @field_validator("callable")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        source, colon, attribute = value.rpartition(":")
        if not (source and colon and all(part.isidentifier() for part in attribute.split("."))):
            raise ValueError("expected module:function or path/to/file.py:function")
        return value


class ModelReward(_Spec):
    """The score of a reward model, read at the completion's last token."""

    kind: Literal["model"] = "model"
    model: str = Field(min_length=1)
    """A folder, a hub id or the content id of a checkpoint of `rollout train rm`. It scores the engine's token ids, so
    its tokenizer must be the policy's."""

    def cache_identity(self) -> Any:
        """The same scores wherever the arithmetic is the same."""
        return {"kind": self.kind, "model": self.model, **numerics_identity()}


PlainReward = ExactMatchReward | FunctionReward | ModelReward


class WeightedReward(_Spec):
    """A reward and how much it counts."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    reward: PlainReward


class CompositeReward(_Spec):
    """The weighted sum of rewards."""

    kind: Literal["composite"] = "composite"
    parts: tuple[WeightedReward, ...] = Field(min_length=1)


class ExpressionReward(_Spec):
    """Arithmetic over named rewards, such as ``clip(quality, -2, 2) - 0.5 * truncated``."""

    kind: Literal["expression"] = "expression"
    expression: str = Field(min_length=1)
    """Names are those of ``rewards``, ``num_tokens``, ``num_characters`` and ``truncated`` (1 or 0)."""
    rewards: dict[str, PlainReward] = {}

    @model_validator(mode="after")
    def _compiles(self) -> ExpressionReward:
        hidden = sorted(set(_SAMPLE_FIGURES) & set(self.rewards))
        if hidden:
            raise ValueError(f"a reward named {hidden[0]!r} would hide the sample's own figure; rename it")
        try:
            compile_expression(self.expression, [*self.rewards, *_SAMPLE_FIGURES])
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


_SAMPLE_FIGURES = ("num_tokens", "num_characters", "truncated")

RewardSpec = ExactMatchReward | FunctionReward | ModelReward | CompositeReward | ExpressionReward


def plain_rewards(spec: RewardSpec) -> list[PlainReward]:
    """The rewards ``spec`` is made of; itself, where it is made of nothing else."""
    if isinstance(spec, CompositeReward):
        return [part.reward for part in spec.parts]
    if isinstance(spec, ExpressionReward):
        return list(spec.rewards.values())
    return [spec]


def with_models(spec: RewardSpec, replace: Callable[[str], str]) -> RewardSpec:
    """``spec`` with the address of each reward model replaced, such as by its content id."""
    if isinstance(spec, ModelReward):
        return spec.model_copy(update={"model": replace(spec.model)})
    if isinstance(spec, CompositeReward):
        parts = (part.model_copy(update={"reward": with_models(part.reward, replace)}) for part in spec.parts)
        return spec.model_copy(update={"parts": tuple(parts)})
    if isinstance(spec, ExpressionReward):
        rewards = {name: with_models(reward, replace) for name, reward in spec.rewards.items()}
        return spec.model_copy(update={"rewards": rewards})
    return spec


@dataclass(frozen=True)
class RewardInput:
    """A completion to be scored."""

    prompt: str | list[dict[str, str]]
    """The text, or the chat messages."""
    completion: str
    extras: Mapping[str, Any] = field(default_factory=dict)
    """The prompt row's other keys, such as ``answer``."""
    finish_reason: str = "stop"
    """``stop``, or ``length`` where the completion was cut at max_tokens."""
    num_tokens: int = 0
    """Tokens of the completion."""
    id: str | None = None
    """Sample id."""
    prompt_token_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    """Of the completion, as the engine gave them; reward models score these."""


@dataclass(frozen=True)
class RewardFunction:
    """A reward, loaded and checked; `score` calls it."""

    name: str
    function: Callable[..., Any]
    """Takes a `RewardInput`, or the list of them where ``batched``."""
    batched: bool = False


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def batch_reward(function: FunctionT) -> FunctionT:
    """Marks a reward that takes the list of all samples and returns as many numbers."""
    function.batch_reward = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def load_reward(
    spec: RewardSpec, *, base: Path | None = None, model_folder: Callable[[str], Path] | None = None
) -> RewardFunction:
    """The function ``spec`` describes; relative files and modules start at ``base`` (default: the working directory).

    ``model_folder`` finds the local folder of a reward model by its address, when it first scores.
    Raises ConfigError where the module, file or function does not exist, fails on import, or cannot be called with a
    sample.
    """
    if isinstance(spec, CompositeReward | ExpressionReward):
        return _combined(
            spec, [load_reward(part, base=base, model_folder=model_folder) for part in plain_rewards(spec)]
        )
    if isinstance(spec, ModelReward):
        return RewardFunction(f"model({spec.model})", _model_scores(spec, base or Path(), model_folder), batched=True)
    if isinstance(spec, ExactMatchReward):
        return RewardFunction(f"exact_match({spec.answer_key})", lambda sample: _exact_match(spec, sample))
    function = load_function(spec.callable, spec.kwargs, base)
    batched = bool(getattr(function, "batch_reward", False))
    return RewardFunction(spec.callable, lambda given: function(given, **spec.kwargs), batched)


def source_id(spec: RewardSpec, base: Path | None = None) -> ContentId:
    """Content id of what scores depend on: the settings of ``spec``, the function's source file, and what of the user's
    own code that imports (`imported_sources`).

    Where the files lie does not matter. Installed packages, data files and services do not enter. A reward model counts
    by its address, so give its content id. Raises ConfigError if the source cannot be found; runs none of it, except
    packages that a dotted module name leads through.
    """
    if isinstance(spec, CompositeReward):
        parts = [[part.weight, source_id(part.reward, base)] for part in spec.parts]
        return content_id("reward/1", {"kind": spec.kind, "parts": parts})
    if isinstance(spec, ExpressionReward):
        rewards = {name: source_id(reward, base) for name, reward in spec.rewards.items()}
        return content_id("reward/1", {"kind": spec.kind, "expression": spec.expression, "rewards": rewards})
    if not isinstance(spec, FunctionReward):
        return content_id("reward/1", spec)
    source, _, attribute = spec.callable.rpartition(":")
    path = source_file(spec.callable, base)
    identity = {"kind": spec.kind, "function": attribute, "kwargs": spec.kwargs}
    imported = imported_sources(path, base) if path else {}
    if imported:
        identity["imports"] = {name: hash_bytes(code) for name, code in imported.items()}
    return content_id("reward/1", {**identity, "source": hash_bytes(path.read_bytes()) if path else source})


def score(reward: RewardFunction, inputs: Sequence[RewardInput]) -> list[float]:
    """The reward of each input, in order: finite floats.

    Raises Fatal, naming the reward and the sample, where the function raises or returns anything but a finite number. A
    `Recoverable` that the function raises (a judge that is overloaded, say) passes through, so that scoring is retried.
    """
    if not reward.batched:
        return [
            _number(reward, _call(reward, sample, place), place)
            for sample, place in zip(inputs, _places(inputs), strict=True)
        ]
    values = _call(reward, list(inputs), f"the batch of {len(inputs)} samples")
    if not isinstance(values, list):
        raise Fatal(f"reward {reward.name} returned {shown(values)}; expected a list of numbers")
    if len(values) != len(inputs):
        raise Fatal(f"reward {reward.name} returned {len(values)} numbers for {len(inputs)} samples")
    return [_number(reward, value, place) for value, place in zip(values, _places(inputs), strict=True)]


def _combined(spec: CompositeReward | ExpressionReward, parts: Sequence[RewardFunction]) -> RewardFunction:
    if isinstance(spec, CompositeReward):
        weights = [part.weight for part in spec.parts]

        def combine(sample: RewardInput, values: Sequence[float]) -> float:
            return sum(weight * value for weight, value in zip(weights, values, strict=True))

        name = "composite"
    else:
        evaluate = compile_expression(spec.expression, [*spec.rewards, *_SAMPLE_FIGURES])

        def combine(sample: RewardInput, values: Sequence[float]) -> float:
            figures = (sample.num_tokens, len(sample.completion), sample.finish_reason == "length")
            return evaluate(dict(zip((*spec.rewards, *_SAMPLE_FIGURES), (*values, *figures), strict=True)))

        name = spec.expression

    def rewards(samples: Sequence[RewardInput]) -> list[float]:
        columns = [score(part, samples) for part in parts]
        combined = []
        for place, sample, *values in zip(_places(samples), samples, *columns, strict=True):
            try:
                combined.append(combine(sample, values))
            except (ArithmeticError, ValueError) as error:
                raise Fatal(f"reward {name} failed on {place}: {type(error).__name__}: {error}") from error
        return combined

    return RewardFunction(name, rewards, batched=True)


def _model_scores(
    spec: ModelReward, base: Path, model_folder: Callable[[str], Path] | None
) -> Callable[[Sequence[RewardInput]], list[float]]:
    def scores(samples: Sequence[RewardInput]) -> list[float]:
        from rollout_core.algorithms.reward_model import score_samples

        folder = model_folder(spec.model) if model_folder else base / spec.model
        return score_samples(folder, [(sample.prompt_token_ids, sample.token_ids) for sample in samples])

    return scores


def _places(inputs: Sequence[RewardInput]) -> Iterator[str]:
    for index, sample in enumerate(inputs):
        yield f"sample {index}" + (f" ({sample.id})" if sample.id is not None else "")


def _call(reward: RewardFunction, argument: Any, place: str) -> Any:
    try:
        value = reward.function(argument)
        return list(value) if reward.batched and isinstance(value, Iterable) else value
    except (Recoverable, Fatal):
        raise
    except Exception as error:
        raise Fatal(f"reward {reward.name} failed on {place}: {type(error).__name__}: {error}") from error


def _number(reward: RewardFunction, value: Any, place: str) -> float:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a scalar of numpy or torch
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Fatal(f"reward {reward.name} returned {shown(value)} for {place}; expected a finite number")
    return number


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
