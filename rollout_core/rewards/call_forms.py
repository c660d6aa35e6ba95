"""How a user's reward function wants to be called, which its signature tells, checked before any work.

Imports little, as each process that calls such a function starts with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rollout_core.base.errors import ConfigError, near, shown
from rollout_core.rewards.user_code import UserCode, load_module

GIVEN_COLUMNS = ("prompts", "completions", "completion_ids")
"""That every sample has, under the names of TRL's reward functions. A parameter of such a name tells TRL's form."""
TRAINER_STATE = "trainer_state"
"""TRL's state of its trainer, which there is none of here: None for a function that must be given it."""


@dataclass(frozen=True)
class CallForm:
    """How a reward function wants to be called, which its signature tells."""

    takes: Literal["sample", "samples", "columns"] = "sample"
    """One sample; the list of them, under ``batch_reward``; or TRL's columns, a list of all samples each."""
    columns: tuple[str, ...] = ()
    """Names of the columns it has parameters for, where it takes columns."""
    required: tuple[str, ...] = ()
    """Those of them that only rows can give."""
    takes_any: bool = False
    """Whether it takes every other column, too (``**kwargs``)."""
    is_async: bool = False

    @property
    def takes_all(self) -> bool:
        """Whether one call is about all samples."""
        return self.takes != "sample"

    @property
    def in_words(self) -> str:
        """For people."""
        if self.takes == "columns":
            columns = [name for name in self.columns if name != TRAINER_STATE]
            names = ", ".join([*columns, *(["every other key of the rows"] if self.takes_any else [])])
            called = f"TRL's form: called with lists over all samples of {names}"
        else:
            called = "called with one sample" if self.takes == "sample" else "called with the list of all samples"
        return f"{called}, awaited" if self.is_async else called

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> CallForm:
        """Inverse of `document`."""
        lists = {name: tuple(document[name]) for name in ("columns", "required")}
        return cls(**{**document, **lists})


def load_function(code: UserCode, kwargs: Mapping[str, Any]) -> tuple[Any, CallForm]:
    """The function that ``code.callable`` names, and how it is called; inside `importable`. Raises ConfigError."""
    function = named_object(code)
    return function, form_of(function, code.callable, kwargs)


def named_object(code: UserCode) -> Any:
    """What ``code.callable`` names in its module; inside `importable`. Raises ConfigError."""
    value: Any = load_module(code)
    for part in code.callable.rpartition(":")[2].split("."):
        if not hasattr(value, part):
            found = [key for key in dir(value) if not key.startswith("_") and callable(getattr(value, key, None))]
            raise ConfigError(f"{code.what} {code.callable}: there is no {part!r}; {near(part, found)}")
        value = getattr(value, part)
    return value


def form_of(function: Any, name: str, kwargs: Mapping[str, Any]) -> CallForm:
    """How ``function`` is called. Raises ConfigError unless it can be in one of the forms, and with ``kwargs``."""
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(
            f"reward {name} is of type {type(function).__name__}; expected a function that returns a number"
        )
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    is_batched = bool(getattr(function, "batch_reward", False))
    try:
        signature = inspect.signature(function)
    except ValueError:
        return CallForm("samples" if is_batched else "sample", is_async=is_async)  # some built-ins have none
    given: dict[str, Any]
    parameters = signature.parameters.values()
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    wanted = {each.name for each in parameters if takes_any or each.default is inspect.Parameter.empty}
    if not is_batched and wanted & set(GIVEN_COLUMNS):
        form = _columns_form(signature, kwargs, is_async)
        called, given = list(form.columns), dict.fromkeys(form.columns)
        arguments: tuple[Any, ...] = ()
    else:
        form = CallForm("samples" if is_batched else "sample", is_async=is_async)
        called, given, arguments = [form.takes], {}, (None,)
    try:
        signature.bind(*arguments, **given, **kwargs)
    except TypeError as error:
        called += [f"{key}={shown(value)}" for key, value in kwargs.items()]
        raise ConfigError(
            f"reward {name} has the signature {signature}, but is called with ({', '.join(called)}): {error}; expected "
            "(sample), (samples) under batch_reward, or TRL's (prompts, completions, **kwargs)"
        ) from None
    return form


def _columns_form(signature: inspect.Signature, kwargs: Mapping[str, Any], is_async: bool) -> CallForm:
    named = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and parameter.name not in kwargs
    ]
    known = {*GIVEN_COLUMNS, TRAINER_STATE}
    columns = [each.name for each in named if each.name != TRAINER_STATE or each.default is each.empty]
    return CallForm(
        takes="columns",
        columns=tuple(columns),
        required=tuple(each.name for each in named if each.default is each.empty and each.name not in known),
        takes_any=any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()),
        is_async=is_async,
    )
