"""A loss of the user's own: its code is read without running any, checked in a process of its own, and loaded by the
process that computes with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from rollout_core.base.errors import ConfigError, Fatal, in_words, shown
from rollout_core.base.isolation.child import Child, Ended
from rollout_core.base.processes import Limits
from rollout_core.config import LearnerSettings, OwnLoss
from rollout_core.rewards.call_forms import named_object
from rollout_core.rewards.user_code import UserCode, importable, read_code

SettingsT = TypeVar("SettingsT", bound=BaseModel)

CHECK_LIMITS = Limits(seconds=120.0)


def with_code(settings: SettingsT, base: Path) -> SettingsT:
    """``settings``, or a whole configuration, with the code of each loss of the user's own that has none yet, as it is
    now; relative paths start at ``base``. Raises ConfigError where there is no such file or module; runs none."""
    if isinstance(settings, OwnLoss):
        if settings.code is not None:
            return settings
        code = read_code(settings.path, base, what="loss")
        return settings.model_copy(update={"code": {**code.document(), "identity": code.identity()}})
    tables = {name: value for name, value in settings if isinstance(value, BaseModel)}
    read = {name: with_code(value, base) for name, value in tables.items()}
    changed = {name: value for name, value in read.items() if value is not tables[name]}
    return settings.model_copy(update=changed) if changed else settings


def check_own_loss(settings: LearnerSettings, base: Path, on_line: Callable[[str], None]) -> None:
    """Load the settings' own loss, where they have one, in a process of its own; ``on_line`` gets what it prints.
    Raises ConfigError where it cannot be loaded, or not be called as this algorithm does."""
    own = settings.own_loss
    if own is None:
        return
    request = {
        "code": read_code(own.path, base, what="loss").document(),
        "arguments": settings.loss_arguments,
        "kwargs": own.kwargs,
    }
    with Child("rollout_core.launch.own_loss:handle_check", CHECK_LIMITS, on_line=on_line) as child:
        try:
            child.call(request)
        except Ended as error:
            raise ConfigError(f"loss {own.path} cannot be loaded: it {error}") from error


def handle_check(request: dict[str, Any], step: Callable[[int], None]) -> None:
    """In the child: load the function of a request. Raises as `check_own_loss`."""
    code = UserCode.from_document(request["code"])
    with importable(code, alone=True):
        _load(code, request["arguments"], request["kwargs"])


def load_own_loss(settings: LearnerSettings) -> Callable[..., Any] | None:
    """The settings' own loss as a function of the tensors in the order of ``settings.loss_arguments``, or None.

    Raises ConfigError where its code has not been read (`with_code`), or as `check_own_loss`. The function raises Fatal
    where the user's raises, and ConfigError where that returns no tensor of the first one's shape.
    """
    own = settings.own_loss
    if own is None:
        return None
    if own.code is None:
        raise ConfigError(f"the code of loss {own.path} has not been read; use the settings that with_code returns")
    # Plans import this module, and do without torch.
    import torch

    code, names = UserCode.from_document(own.code), settings.loss_arguments
    with importable(code):
        function = _load(code, names, own.kwargs)

    def call(*tensors: Any) -> Any:
        try:
            with importable(code):
                found = function(**dict(zip(names, tensors, strict=True)), **own.kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise Fatal(f"loss {own.path} failed: {in_words(error)}") from error
        expected = list(tensors[0].shape)
        if not isinstance(found, torch.Tensor) or list(found.shape) != expected:
            got = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ConfigError(
                f"loss {own.path} returned {got}; expected a tensor of the shape of {names[0]}, {expected}"
            )
        return found

    return call


def _load(code: UserCode, arguments: Sequence[str], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The function; inside `importable`. Raises ConfigError unless it can be called with these names."""
    name, function = code.callable, named_object(code)
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(
            f"loss {name} is of type {type(function).__name__}; expected a function that returns a tensor"
        )
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(arguments), **kwargs)
    except TypeError as error:
        called = ", ".join([*arguments, *(f"{key}={shown(value)}" for key, value in kwargs.items())])
        raise ConfigError(
            f"loss {name} has the signature {signature}, but this algorithm calls it by name with ({called}): {error}"
        ) from None
    return function
