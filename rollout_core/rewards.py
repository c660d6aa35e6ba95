"""Rewards: a number for each completion, from a rule or from the user's own function.

What can be wrong with a reward is found when it is loaded, before anything is generated. A user's function enters cache
keys by the content of its source file (`source_id`), so editing it makes new scores.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rollout_core.errors import ConfigError, Fatal, Recoverable
from rollout_core.ids import ContentId, canonical_json, content_id, hash_bytes


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
    """``module:function``, or ``path/to/file.py:function`` relative to the config file."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments of each call."""

    @field_validator("callable")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        source, colon, attribute = value.rpartition(":")
        if not (source and colon and all(part.isidentifier() for part in attribute.split("."))):
            raise ValueError("expected module:function or path/to/file.py:function")
        return value


RewardSpec = ExactMatchReward | FunctionReward


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


def load_reward(spec: RewardSpec, *, base: Path | None = None) -> RewardFunction:
    """The function ``spec`` describes; relative files and modules start at ``base`` (default: the working directory).

    Raises ConfigError where the module, file or function does not exist, fails on import, or cannot be called with a
    sample.
    """
    if isinstance(spec, ExactMatchReward):
        return RewardFunction(f"exact_match({spec.answer_key})", lambda sample: _exact_match(spec, sample))
    source, _, attribute = spec.callable.rpartition(":")
    module = _load_file(source, base) if source.endswith(".py") else _load_module(source, base)
    function = _attribute(module, attribute, spec.callable)
    batched = bool(getattr(function, "batch_reward", False))
    _check_callable(function, spec, batched)
    return RewardFunction(spec.callable, lambda given: function(given, **spec.kwargs), batched)


def source_id(spec: RewardSpec, base: Path | None = None) -> ContentId:
    """Content id of what scores depend on: the settings of ``spec`` and the bytes of the function's source file.

    Where the file lies does not matter. Of what the file imports in turn, nothing enters. Raises ConfigError if the
    source cannot be found; runs none of it, except packages that a dotted module name leads through.
    """
    if isinstance(spec, ExactMatchReward):
        return content_id("reward/1", spec)
    source, _, attribute = spec.callable.rpartition(":")
    path = _file(source, base) if source.endswith(".py") else _module_file(source, base)
    identity = {"kind": spec.kind, "function": attribute, "kwargs": spec.kwargs}
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
        raise Fatal(f"reward {reward.name} returned {_shown(values)}; expected a list of numbers")
    if len(values) != len(inputs):
        raise Fatal(f"reward {reward.name} returned {len(values)} numbers for {len(inputs)} samples")
    return [_number(reward, value, place) for value, place in zip(values, _places(inputs), strict=True)]


def _places(inputs: Sequence[RewardInput]) -> Iterator[str]:
    for index, sample in enumerate(inputs):
        yield f"sample {index}" + (f" ({sample.id})" if sample.id is not None else "")


def _call(reward: RewardFunction, argument: Any, place: str) -> Any:
    try:
        value = reward.function(argument)
        return list(value) if reward.batched and isinstance(value, Iterable) else value
    except Recoverable:
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
        raise Fatal(f"reward {reward.name} returned {_shown(value)} for {place}; expected a finite number")
    return number


def _exact_match(spec: ExactMatchReward, sample: RewardInput) -> float:
    if spec.answer_key not in sample.extras:
        raise ConfigError(f"the prompt's row has no {spec.answer_key!r}; {_near(spec.answer_key, sample.extras)}")
    answer = sample.extras[spec.answer_key]
    pair = [sample.completion, answer if isinstance(answer, str) else canonical_json(answer).decode()]
    if spec.strip:
        pair = [text.strip() for text in pair]
    if spec.ignore_case:
        pair = [text.casefold() for text in pair]
    return float(pair[0] == pair[1])


def _file(source: str, base: Path | None) -> Path:
    path = (base or Path()) / source
    if not path.is_file():
        found = {file.name for file in path.parent.glob("*.py")}
        raise ConfigError(f"reward file {path} does not exist; {_near(path.name, found)}")
    return path


def _load_file(source: str, base: Path | None) -> ModuleType:
    path = _file(source, base).resolve()
    code = path.read_bytes()
    # Named by its content, so that an edited file is a new module also in a process that has loaded the old one.
    name = f"_rollout_reward_{hash_bytes(str(path).encode() + code)}"
    if name not in sys.modules:
        module = ModuleType(name)
        module.__file__ = str(path)
        sys.modules[name] = module  # where dataclasses look their module up
        try:
            with _importable(path.parent):
                exec(compile(code, path, "exec"), module.__dict__)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise ConfigError(f"reward file {path} fails on import: {type(error).__name__}: {error}") from error
    return sys.modules[name]


_loaded_sources: dict[str, ContentId] = {}
"""Source of each reward module at its import: one that has been edited since is imported anew."""


def _load_module(name: str, base: Path | None) -> ModuleType:
    path = _module_file(name, base)
    source = hash_bytes(path.read_bytes()) if path else None
    try:
        with _importable(base):
            module = importlib.import_module(name)
            if _loaded_sources.get(name, source) != source:
                module = importlib.reload(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"reward module {name} fails on import: {type(error).__name__}: {error}") from error
    if source is not None:
        _loaded_sources[name] = source
    return module


def _module_file(name: str, base: Path | None) -> Path | None:
    """The module's source file; None for one without, such as a built-in."""
    with _importable(base):
        importlib.invalidate_caches()
        try:
            spec = importlib.util.find_spec(name)
        except (Exception, SystemExit) as error:  # finding a dotted name imports the packages before the last dot
            raise ConfigError(f"reward module {name} cannot be found: {error}; {_REMEDY}") from error
    if spec is None:
        raise ConfigError(f"reward module {name} cannot be found; {_REMEDY}")
    return Path(spec.origin) if spec.has_location and spec.origin else None


_REMEDY = "install it, run from the folder that holds it, or name its file: path/to/file.py:function"


@contextmanager
def _importable(base: Path | None) -> Iterator[None]:
    """Modules in ``base`` can be imported, as they could if Python had been started there."""
    folder = str((base or Path()).resolve())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _attribute(module: ModuleType, attribute: str, name: str) -> Any:
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            found = [key for key in dir(value) if not key.startswith("_") and callable(getattr(value, key, None))]
            raise ConfigError(f"reward {name}: there is no {part!r}; {_near(part, found)}")
        value = getattr(value, part)
    return value


def _check_callable(function: Any, spec: FunctionReward, batched: bool) -> None:
    if not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if inspect.iscoroutinefunction(function) else f"of type {type(function).__name__}"
        raise ConfigError(f"reward {spec.callable} is {kind}; expected a function that returns a number")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some built-ins do not tell
    try:
        signature.bind(None, **spec.kwargs)
    except TypeError as error:
        argument = "samples" if batched else "sample"
        call = ", ".join([argument, *(f"{key}={_shown(value)}" for key, value in spec.kwargs.items())])
        raise ConfigError(
            f"reward {spec.callable} has the signature {signature}, but is called with ({call}): {error}"
        ) from None


def _near(wanted: str, found: Any) -> str:
    close = difflib.get_close_matches(wanted, list(found), n=1)
    return f"did you mean {close[0]!r}?" if close else f"found: {', '.join(sorted(found)) or 'nothing'}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
