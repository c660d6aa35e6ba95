"""Calling a reward: what it is given, what of its answers counts, and the child process that calls a user's own.
Imports little, to start quickly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, TypeVar

from rollout_core.base.errors import Fatal, Recoverable, RolloutError, as_cause, in_words, shown
from rollout_core.rewards.user_code import UserCode, importable, is_batched, load_function


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


INPUT_FIELDS = tuple(field.name for field in fields(RewardInput))


@dataclass(frozen=True)
class RewardFunction:
    """A reward, loaded and checked; `score` calls it."""

    name: str
    function: Callable[..., Any]
    """Takes a `RewardInput`, or the list of them where ``batched``."""
    batched: bool = False
    separable: bool = False
    """Whether a sample's reward is the same whatever other samples are scored with it."""
    close: Callable[[], None] = lambda: None
    """Ends what was started for it. It may be called again afterwards, and starts that anew."""
    parts: tuple[RewardPart, ...] = ()
    """Of a weighted sum, what it sums."""


@dataclass(frozen=True)
class RewardPart:
    """A reward of a weighted sum."""

    name: str
    weight: float
    reward: RewardFunction


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def batch_reward(function: FunctionT) -> FunctionT:
    """Marks a reward that takes the list of all samples and returns as many numbers."""
    function.batch_reward = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def score(
    reward: RewardFunction, inputs: Sequence[RewardInput], *, on_sample: Callable[[int], None] = lambda index: None
) -> list[float]:
    """The reward of each input, in order: finite floats. ``on_sample`` gets its index before a call for it alone.

    Raises Fatal, naming the reward and the sample, where the function raises or returns anything but a finite number. A
    `Recoverable` that the function raises (a judge that is overloaded, say) passes through, so that scoring is retried.
    """
    if not reward.batched:
        values = []
        for index, (sample, place) in enumerate(zip(inputs, places(inputs), strict=True)):
            on_sample(index)
            values.append(_number(reward, _call(reward, sample, place), place))
        return values
    values = _call(reward, list(inputs), whole_batch(inputs))
    if not isinstance(values, list):
        raise Fatal(f"reward {reward.name} returned {shown(values)}; expected a list of numbers")
    if len(values) != len(inputs):
        raise Fatal(f"reward {reward.name} returned {len(values)} numbers for {len(inputs)} samples")
    return [_number(reward, value, place) for value, place in zip(values, places(inputs), strict=True)]


def places(inputs: Sequence[RewardInput]) -> Iterator[str]:
    """What messages call each of them."""
    for index, sample in enumerate(inputs):
        yield f"sample {index}" + (f" ({sample.id})" if sample.id is not None else "")


def whole_batch(inputs: Sequence[RewardInput]) -> str:
    """What messages call all of them."""
    return f"the batch of {len(inputs)} samples"


def _call(reward: RewardFunction, argument: Any, place: str) -> Any:
    try:
        value = reward.function(argument)
        return list(value) if reward.batched and isinstance(value, Iterable) else value
    except (Recoverable, Fatal):
        raise
    except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - other people's code
        raise Fatal(f"reward {reward.name} failed on {place}: {in_words(error)}") from as_cause(error)


def _number(reward: RewardFunction, value: Any, place: str) -> float:
    try:
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            value = value.item()  # a scalar of numpy or torch
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - other people's code
        raise Fatal(f"reward {reward.name} returned no number for {place}: {in_words(error)}") from as_cause(error)
    if not math.isfinite(number):
        raise Fatal(f"reward {reward.name} returned {shown(value)} for {place}; expected a finite number")
    return number


_loaded: RewardFunction | None = None
_imports = ExitStack()


def handle(request: dict[str, Any], report: Callable[[int], None]) -> Any:
    """Load the function that a request brings the code of, which is the first, and say whether it takes all samples at
    once; score the inputs of any other request."""
    global _loaded
    if "code" in request:
        code, kwargs = UserCode.from_document(request["code"]), request["kwargs"]
        _imports.enter_context(importable(code, alone=True))
        function = load_function(code, kwargs)
        _loaded = RewardFunction(code.callable, lambda given: function(given, **kwargs), is_batched(function))
        return is_batched(function)
    reward = _loaded
    assert reward is not None, "the caller loads it first"
    inputs = [RewardInput(**dict(zip(INPUT_FIELDS, row, strict=True))) for row in request["inputs"]]
    at = [whole_batch(inputs)]

    def on_sample(index: int) -> None:
        report(index)
        at[0] = f"sample {index}"

    try:
        return score(reward, inputs, on_sample=on_sample)
    except RolloutError:
        raise
    except BaseException as error:  # whatever it is: here it is no signal to this project
        raise Fatal(f"reward {reward.name} failed on {at[0]}: {in_words(error)}") from error
