"""A user's reward function: made from its code and checked, so that what is wrong with it is known before any work."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rollout_core.base.errors import ConfigError, near, shown
from rollout_core.rewards.user_code import UserCode, load_module


def load_function(code: UserCode, kwargs: Mapping[str, Any]) -> Any:
    """The function that ``code.callable`` names; inside `importable`. Raises ConfigError."""
    name = code.callable
    function = _attribute(load_module(code), name.rpartition(":")[2], name)
    _check_callable(function, name, kwargs, is_batched(function))
    return function


def is_batched(function: Any) -> bool:
    """Whether it takes the list of all samples."""
    return bool(getattr(function, "batch_reward", False))


def _attribute(module: ModuleType, attribute: str, name: str) -> Any:
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            found = [key for key in dir(value) if not key.startswith("_") and callable(getattr(value, key, None))]
            raise ConfigError(f"reward {name}: there is no {part!r}; {near(part, found)}")
        value = getattr(value, part)
    return value


def _check_callable(function: Any, name: str, kwargs: Mapping[str, Any], batched: bool) -> None:
    """Raises ConfigError unless ``function`` can be called with a sample and ``kwargs``."""
    if not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if inspect.iscoroutinefunction(function) else f"of type {type(function).__name__}"
        raise ConfigError(f"reward {name} is {kind}; expected a function that returns a number")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some built-ins have none
    try:
        signature.bind(None, **kwargs)
    except TypeError as error:
        argument = "samples" if batched else "sample"
        call = ", ".join([argument, *(f"{key}={shown(value)}" for key, value in kwargs.items())])
        raise ConfigError(
            f"reward {name} has the signature {signature}, but is called with ({call}): {error}"
        ) from None
