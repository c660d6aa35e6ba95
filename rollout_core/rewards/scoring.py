"""Calling a reward: what it is given, what of its answers counts, and the child process that calls a user's own.
Imports little, to start quickly.

A reward answers for a sample with a finite number, or with None: it abstains, and the sample has no score. Anything
else is a failure on that sample, which has none either.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, TypeVar

from rollout_core.base.errors import ConfigError, Fatal, Recoverable, RolloutError, as_cause, in_words, near, shown
from rollout_core.rewards.call_forms import TRAINER_STATE, CallForm, load_function
from rollout_core.rewards.user_code import UserCode, importable

CONCURRENT_CALLS = 64
"""Of an async reward that takes one sample: so many samples of a batch are waited for at the same time."""


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

Score = float | None
"""A finite number; None where the reward abstains."""


@dataclass(frozen=True)
class RewardFunction:
    """A reward, loaded and checked; `score` and `judge` call it."""

    name: str
    function: Callable[..., Any]
    """Takes a `RewardInput`, or the list of them where ``batched``. What it returns may have to be awaited."""
    batched: bool = False
    separable: bool = False
    """Whether a sample's reward is the same whatever other samples are scored with it."""
    close: Callable[[], None] = lambda: None
    """Ends what was started for it. It may be called again afterwards, and starts that anew."""
    parts: tuple[RewardPart, ...] = ()
    """Of a weighted sum, what it sums."""
    is_async: bool = False
    """Whether ``function`` returns what is to be awaited."""
    forms: Mapping[str, CallForm] = field(default_factory=dict)
    """How the user's functions in it are called, by their names."""
    max_failed_share: float = 0.0
    """Of the samples scored together, the share that it may fail on (`within_share`)."""
    judges: tuple[Any, ...] = ()
    """Those in it who ask models (`rollout_core.rewards.judges.judging.Judges`)."""
    plugins: tuple[Any, ...] = ()
    """Those in it (`rollout_core.rewards.plugin_rewards.PluginScores`)."""


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


def score(reward: RewardFunction, inputs: Sequence[RewardInput]) -> list[Score]:
    """The reward of each input, in order: finite floats, and None where the reward abstains.

    Raises Fatal, naming the reward and the sample, where the function raises or returns anything else. A `Recoverable`
    that the function raises (a judge that is overloaded, say) passes through, so that scoring is retried.
    """
    found: list[Score] = []
    for value in judge(reward, inputs):
        if isinstance(value, Fatal):
            raise value
        found.append(value)
    return found


def judge(
    reward: RewardFunction,
    inputs: Sequence[RewardInput],
    *,
    on_sample: Callable[[int], None] = lambda index: None,
    run: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run,
) -> list[Score | Fatal]:
    """As `score`, with the error in the place of a sample that the reward fails on, which names both. What is about the
    batch as a whole is raised.

    ``on_sample`` gets a sample's index before a call for it alone; ``run`` runs what an async function returns.
    """
    known = list(places(inputs))
    if reward.batched:
        values = _attempt(reward, lambda: _listed(_finished(reward.function(list(inputs)), run)), whole_batch(inputs))
        if isinstance(values, Fatal):
            raise values
        if not isinstance(values, list):
            raise Fatal(f"reward {reward.name} returned {shown(values)}; expected a list of numbers")
        if len(values) != len(inputs):
            raise Fatal(f"reward {reward.name} returned {len(values)} numbers for {len(inputs)} samples")
    elif reward.is_async:
        values = run(_awaited(reward, inputs, known, on_sample))
    else:
        values = []
        for index, (sample, place) in enumerate(zip(inputs, known, strict=True)):
            on_sample(index)
            values.append(_attempt(reward, lambda sample=sample: _finished(reward.function(sample), run), place))
    return [_number(reward, value, place) for value, place in zip(values, known, strict=True)]


def within_share(reward: RewardFunction, values: Sequence[Score | Fatal]) -> list[Fatal]:
    """The failures among what `judge` found of all samples. Raises Fatal where they are more than the reward may."""
    failures = [value for value in values if isinstance(value, Fatal)]
    if len(failures) <= reward.max_failed_share * len(values):
        return failures
    if len(failures) == 1 or not reward.max_failed_share:
        raise failures[0]
    raise Fatal(
        f"{failures[0]}. It failed on {len(failures)} of {len(values)} samples, more than max_failed_share = "
        f"{reward.max_failed_share:g} allows"
    ) from failures[0]


def places(inputs: Sequence[RewardInput]) -> Iterator[str]:
    """What messages call each of them."""
    for index, sample in enumerate(inputs):
        yield f"sample {index}" + (f" ({sample.id})" if sample.id is not None else "")


def whole_batch(inputs: Sequence[RewardInput]) -> str:
    """What messages call all of them."""
    return f"the batch of {len(inputs)} samples"


def _attempt(reward: RewardFunction, call: Callable[[], Any], place: str) -> Any:
    try:
        return call()
    except (Recoverable, Fatal):
        raise
    except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - other people's code
        return _failure(reward, place, error)


def _failure(reward: RewardFunction, place: str, error: BaseException) -> Fatal:
    failure = Fatal(f"reward {reward.name} failed on {place}: {in_words(error)}")
    failure.__cause__ = as_cause(error)
    return failure


def _listed(values: Any) -> Any:
    return list(values) if isinstance(values, Iterable) else values


def _finished(value: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> Any:
    async def result(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    return run(result(value)) if inspect.isawaitable(value) else value


async def _awaited(
    reward: RewardFunction, inputs: Sequence[RewardInput], known: Sequence[str], on_sample: Callable[[int], None]
) -> list[Any]:
    turns = asyncio.Semaphore(CONCURRENT_CALLS)

    async def one(index: int) -> Any:
        async with turns:
            on_sample(index)
            try:
                return await reward.function(inputs[index])
            except (Recoverable, Fatal):
                raise
            except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - other people's code
                return _failure(reward, known[index], error)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index)) for index in range(len(inputs))]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _number(reward: RewardFunction, value: Any, place: str) -> Score | Fatal:
    if value is None or isinstance(value, Fatal):
        return value
    try:
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            value = value.item()  # a scalar of numpy or torch
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - other people's code
        failure = Fatal(f"reward {reward.name} returned no number for {place}: {in_words(error)}")
        failure.__cause__ = as_cause(error)
        return failure
    if not math.isfinite(number):
        return Fatal(f"reward {reward.name} returned {shown(value)} for {place}; expected a finite number")
    return number


def as_plain(sample: RewardInput, name: str) -> Any:
    """A field of a sample as JSON has it."""
    value = getattr(sample, name)
    if isinstance(value, Mapping):
        return dict(value)
    return value if isinstance(value, str | int | list) or value is None else list(value)


def as_called(function: Callable[..., Any], form: CallForm, kwargs: Mapping[str, Any], name: str) -> Callable[..., Any]:
    """A user's function as one of a sample, or of all, whatever form it has itself."""
    if form.takes != "columns":
        return lambda given: function(given, **kwargs)
    return lambda samples: function(**{**_columns(form, samples, name), **kwargs})


def _columns(form: CallForm, samples: Sequence[RewardInput], name: str) -> dict[str, Any]:
    """What TRL's reward functions get: a list over ``samples`` by name, those of the rows' keys with None where a row
    has none. A completion of a chat is the list of its one message."""
    keys = dict.fromkeys(key for sample in samples for key in sample.extras)
    if samples and (missing := [column for column in form.required if column not in keys]):
        raise ConfigError(
            f"the prompts' rows have no {missing[0]!r}, which reward {name} takes; {near(missing[0], keys)}"
        )
    columns: dict[str, Any] = {key: [sample.extras.get(key) for sample in samples] for key in keys}
    columns |= {column: [] for column in form.required if not samples}
    columns |= {
        "prompts": [sample.prompt for sample in samples],
        "completions": [
            sample.completion
            if isinstance(sample.prompt, str)
            else [{"role": "assistant", "content": sample.completion}]
            for sample in samples
        ],
        "completion_ids": [list(sample.token_ids) for sample in samples],
        TRAINER_STATE: None,
    }
    return {
        key: value for key, value in columns.items() if key in form.columns or (form.takes_any and key != TRAINER_STATE)
    }


_loaded: RewardFunction | None = None
_imports = ExitStack()
_loop = asyncio.Runner()
"""Stays from call to call: clients that a reward keeps belong to the loop that they were made in."""


def handle(request: dict[str, Any], report: Callable[[int], None]) -> Any:
    """Load the function that a request brings the code of, which is the first, and say how it is called; judge the
    inputs of any other request: a number, None, or the text of a failure in a list."""
    global _loaded
    if "code" in request:
        code, kwargs = UserCode.from_document(request["code"]), request["kwargs"]
        _imports.enter_context(importable(code, alone=True))
        function, form = load_function(code, kwargs)
        called = as_called(function, form, kwargs, code.callable)
        _loaded = RewardFunction(code.callable, called, form.takes_all, is_async=form.is_async)
        return form.document()
    reward = _loaded
    assert reward is not None, "the caller loads it first"
    inputs = [RewardInput(**dict(zip(INPUT_FIELDS, row, strict=True))) for row in request["inputs"]]
    at = [whole_batch(inputs)]

    def on_sample(index: int) -> None:
        report(index)
        at[0] = f"sample {index}"

    try:
        return list(map(as_json, judge(reward, inputs, on_sample=on_sample, run=_loop.run)))
    except RolloutError:
        raise
    except BaseException as error:  # whatever it is: here it is no signal to this project
        raise Fatal(f"reward {reward.name} failed on {at[0]}: {in_words(error)}") from error


def as_json(value: Score | Fatal) -> Any:
    """What `judge` found of a sample, as JSON values."""
    return [str(value)] if isinstance(value, Fatal) else value


def from_json(value: Any) -> Score | Fatal:
    """Inverse of `as_json`."""
    return Fatal(value[0]) if isinstance(value, list) else value
