"""Agents: what a user's program looks like from here, as a class or as a plain function.

A rollout may return

- None: what the tracer saw is the trace, rewards included;
- a number: the final reward;
- a list of spans: the SDK's ``ReadableSpan``, ``Span`` or ``SpanCoreFields``, of one kind.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
import weakref
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar, Token
from typing import Any, Generic, Protocol, TypeVar, overload

from rollout_core.agents.tracing import Tracer
from rollout_core.base.errors import ConfigError
from rollout_core.store import LightningStore
from rollout_core.store.resources import LLM, NamedResources, PromptTemplate, ProxyLLM, Resource
from rollout_core.store.types import AttemptedRollout, Rollout

logger = logging.getLogger(__name__)

Task = TypeVar("Task")
Kind = TypeVar("Kind", bound=Resource)
RolloutRawResult = Any
"""See the module: None, a number, or a list of spans. Checked when a rollout has returned it."""
RolloutFunction = Callable[..., RolloutRawResult] | Callable[..., Awaitable[RolloutRawResult]]


class CurrentRunner(Protocol):
    """What hooks see of the runner that calls them."""

    tracer: Tracer
    worker_id: int | None
    """Number of the worker; None outside of one."""

    def get_store(self) -> LightningStore:
        """Where the rollout is."""
        ...


class Current:
    """What runs this code: runners in threads of one process share the agent. A thread that the code started itself has
    no context of it; there it is the last one of this process."""

    def __init__(self, name: str) -> None:
        self._of_context: ContextVar[Any] = ContextVar(name, default=None)
        self._last: weakref.ref[Any] | None = None

    def set(self, value: Any) -> Token[Any]:
        """Have the code of this context run by ``value``, which is referred to weakly where it is found elsewhere."""
        self.remember(value)
        return self._of_context.set(value)

    def remember(self, value: Any) -> None:
        """Have it be the last one of this process."""
        self._last = weakref.ref(value)

    def forget(self, value: Any) -> None:
        """Have nothing be the last one of this process, where ``value`` is."""
        if self._last is not None and self._last() is value:
            self._last = None

    def reset(self, before: Token[Any]) -> None:
        """Undo a `set` of this context."""
        self.forget(self._of_context.get())
        self._of_context.reset(before)

    def get(self) -> Any:
        """None where nothing of this process has run such code, or what did is gone."""
        return self._of_context.get() or (None if self._last is None else self._last())


CURRENT_RUNNER = Current("rollout-runner")
"""The runner whose rollout this code is part of."""
CURRENT_TRAINER = Current("rollout-trainer")
"""The trainer whose run this code is part of, in the trainer's own process. For the deprecated accessors alone."""

_INJECTED = ("task", "rollout", "llm", "prompt_template", "resources")
"""Parameters that a function may have, by name."""


class LitAgent(Generic[Task]):
    """A program whose model or prompt is to be trained. Override ``rollout`` or ``rollout_async``.

    ``training_rollout`` runs for rollouts of mode ``train``, ``validation_rollout`` for all others; both call
    ``rollout`` unless overridden, and so do their asynchronous forms. An agent that overrides any asynchronous form is
    asynchronous, and none of its synchronous forms are called. Synchronous ones run in a thread of their own, so they
    may block, and may start event loops.
    """

    def is_async(self) -> bool:
        """Whether the asynchronous forms are the ones to be called."""
        forms = ("rollout_async", "training_rollout_async", "validation_rollout_async")
        return any(getattr(type(self), name) is not getattr(LitAgent, name) for name in forms)

    @property
    def trainer(self) -> Any:
        """Deprecated: give the agent what it needs of the trainer. Raises ConfigError outside of the trainer's
        process."""
        return current(CURRENT_TRAINER, "trainer")

    @property
    def runner(self) -> CurrentRunner:
        """Deprecated: a hook gets the runner that calls it. Raises ConfigError outside of a rollout."""
        return current(CURRENT_RUNNER, "runner")

    @property
    def tracer(self) -> Tracer:
        """What records this rollout, in threads that the agent starts, too. Raises ConfigError outside of a runner."""
        runner: CurrentRunner | None = CURRENT_RUNNER.get()
        if runner is None:
            raise ConfigError("the agent has no tracer now; it has one while a runner runs it")
        return runner.tracer

    def set_trainer(self, trainer: Any) -> None:
        """Deprecated, and without effect: see `trainer`."""
        warn_of("set_trainer")

    def set_runner(self, runner: Any) -> None:
        """Deprecated, and without effect: see `runner`."""
        warn_of("set_runner")

    def rollout(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Work on one task. ``resources`` are those that the algorithm published, by name."""
        raise NotImplementedError(f"{type(self).__name__} defines neither rollout nor rollout_async")

    async def rollout_async(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """``rollout`` for programs on an event loop."""
        raise NotImplementedError(f"{type(self).__name__} defines neither rollout nor rollout_async")

    def training_rollout(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """``rollout`` in training."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """``rollout`` otherwise."""
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """``rollout_async`` in training."""
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(
        self, task: Task, resources: NamedResources, rollout: Rollout
    ) -> RolloutRawResult:
        """``rollout_async`` otherwise."""
        return await self.rollout_async(task, resources, rollout)


def current(variable: Current, what: str) -> Any:
    """What runs this code, for accessors that go with the next release. Raises ConfigError where nothing does."""
    warn_of(f"the {what}", stacklevel=4)
    found = variable.get()
    if found is None:
        raise ConfigError(f"there is no {what} here; there is one while a {what} of this process runs this code")
    return found


def warn_of(what: str, stacklevel: int = 3) -> None:
    """Say that something goes with the next release."""
    text = f"{what} goes with the next release; give agents and algorithms what they need of it"
    warnings.warn(text, FutureWarning, stacklevel=stacklevel)


class FunctionalLitAgent(LitAgent[Any]):
    """A function as an agent. Arguments are given by name: ``task``, and of ``rollout`` (the record), ``llm`` (the
    first LLM among the resources), ``prompt_template`` (the first template) and ``resources`` those that it names. An
    ``llm`` or ``prompt_template`` with a default keeps that where the resources have none.

    ``strip_proxy`` makes a ProxyLLM an LLM whose endpoint files requests under the attempt. Raises ConfigError for a
    function with another parameter that has no default.
    """

    def __init__(self, function: RolloutFunction, *, strip_proxy: bool = True) -> None:
        self._function = function
        self._strip_proxy = strip_proxy
        parameters = inspect.signature(function).parameters.values()
        self._named = {parameter.name for parameter in parameters} & set(_INJECTED)
        self._optional = {parameter.name for parameter in parameters if parameter.default is not parameter.empty}
        other = [
            parameter.name
            for parameter in parameters
            if parameter.name not in _INJECTED
            and parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        ]
        if "task" not in self._named or other:
            given = ", ".join(parameter.name for parameter in parameters)
            raise ConfigError(
                f"{_name(function)}({given}) cannot be an agent: it needs a parameter task, and of {_INJECTED[1:]} "
                "those that it uses; give any other a default"
            )
        functools.update_wrapper(self, function)  # type: ignore[arg-type] - for its name and docstring

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself."""
        return self._function(*args, **kwargs)

    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._function)

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        if self.is_async():
            raise RuntimeError(f"{_name(self._function)} is asynchronous; call rollout_async")
        return self._function(**self._arguments(task, resources, rollout))

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        if not self.is_async():
            raise RuntimeError(f"{_name(self._function)} is synchronous; call rollout")
        return await self._function(**self._arguments(task, resources, rollout))

    def _arguments(self, task: Any, resources: NamedResources, rollout: Rollout) -> dict[str, Any]:
        values: dict[str, Any] = {"task": task, "rollout": rollout, "resources": resources}
        for name, kind in (("llm", LLM), ("prompt_template", PromptTemplate)):
            if name in self._named and (found := _first(kind, resources, is_needed=name not in self._optional)):
                values[name] = _without_proxy(found, rollout) if self._strip_proxy else found
        return {name: value for name, value in values.items() if name in self._named}


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _first(kind: type[Kind], resources: Mapping[str, Resource], *, is_needed: bool) -> Kind | None:
    found = {
        name: resource
        for name, resource in resources.items()
        # A model that a flow made the latest is an LLM without an endpoint: it names weights, and nobody answers there.
        if isinstance(resource, kind) and not (type(resource) is LLM and not resource.endpoint)
    }
    if not found and not is_needed:
        return None
    if not found:
        kinds = {name: type(resource).__name__ for name, resource in resources.items()}
        raise ConfigError(f"the agent asks for a {kind.__name__}, but the resources are {kinds or 'none'}; publish one")
    if len(found) > 1:
        logger.warning("Of the resources %s the agent gets the first one", ", ".join(found))
    return next(iter(found.values()))


def _without_proxy(resource: Resource, rollout: Rollout) -> Resource:
    if not isinstance(resource, ProxyLLM):
        return resource
    if not isinstance(rollout, AttemptedRollout):
        raise ConfigError(f"got a {type(rollout).__name__}, but a ProxyLLM needs the attempt; pass an AttemptedRollout")
    return resource.with_attempted_rollout(rollout)


@overload
def llm_rollout(function: RolloutFunction) -> FunctionalLitAgent: ...
@overload
def llm_rollout(*, strip_proxy: bool = True) -> Callable[[RolloutFunction], FunctionalLitAgent]: ...


def llm_rollout(function: RolloutFunction | None = None, *, strip_proxy: bool = True) -> Any:
    """Make a function with the parameters ``task`` and ``llm`` an agent, see ``FunctionalLitAgent``."""

    def decorate(function: RolloutFunction) -> FunctionalLitAgent:
        _needs(function, "llm", "llm_rollout")
        return FunctionalLitAgent(function, strip_proxy=strip_proxy)

    return decorate if function is None else decorate(function)


@overload
def prompt_rollout(function: RolloutFunction) -> FunctionalLitAgent: ...
@overload
def prompt_rollout() -> Callable[[RolloutFunction], FunctionalLitAgent]: ...


def prompt_rollout(function: RolloutFunction | None = None) -> Any:
    """Make a function with the parameters ``task`` and ``prompt_template`` an agent, see ``FunctionalLitAgent``."""

    def decorate(function: RolloutFunction) -> FunctionalLitAgent:
        _needs(function, "prompt_template", "prompt_rollout")
        return FunctionalLitAgent(function)

    return decorate if function is None else decorate(function)


def rollout(function: RolloutFunction) -> FunctionalLitAgent:
    """Make a function with the parameter ``task``, and ``llm`` or ``prompt_template`` or both, an agent."""
    names = inspect.signature(function).parameters
    if "llm" not in names and "prompt_template" not in names:
        raise ConfigError(f"@rollout: {_name(function)} has neither of the parameters llm and prompt_template")
    return FunctionalLitAgent(function)


def _needs(function: RolloutFunction, parameter: str, decorator: str) -> None:
    if parameter not in inspect.signature(function).parameters:
        raise ConfigError(f"@{decorator}: {_name(function)} has no parameter {parameter}")
