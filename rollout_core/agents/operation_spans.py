"""Operations: a span around a block, or around each call of a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

from rollout_core.agents.emitters import tracer_for
from rollout_core.agents.tracing import SpanRecordingContext, active_tracer
from rollout_core.base.errors import ConfigError
from rollout_core.store import SpanCoreFields
from rollout_core.store.semconv import AGL_OPERATION, LightningSpanAttributes

Function = TypeVar("Function", bound=Callable[..., Any])

_OPERATION_NAME = LightningSpanAttributes.OPERATION_NAME.value


class Operation:
    """What ``operation`` makes: a context manager, once, and a decorator."""

    def __init__(self, attributes: dict[str, Any], *, propagate: bool) -> None:
        self._attributes = attributes
        self._propagate = propagate
        self._block: AbstractContextManager[SpanRecordingContext] | None = None
        self._recording: SpanRecordingContext | None = None

    def __enter__(self) -> Operation:
        # Looked up now, not when the operation was made: functions are decorated when modules are imported.
        is_traced = self._propagate or active_tracer() is not None
        self._block = tracer_for(is_traced, "operation").operation_context(AGL_OPERATION, self._attributes)
        self._recording = self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        assert self._block is not None, "entered"
        return self._block.__exit__(*error)

    def set_input(self, *args: Any, **kwargs: Any) -> None:
        """Record what goes in."""
        given = {"args": _by_place(args)} if args else {}
        self._record(LightningSpanAttributes.OPERATION_INPUT.value, {**given, **kwargs})

    def set_output(self, output: Any) -> None:
        """Record what comes out."""
        self._record(LightningSpanAttributes.OPERATION_OUTPUT.value, output)

    def span(self) -> SpanCoreFields:
        """The span, after the block. Raises RuntimeError before."""
        return self._begun().get_recorded_span()

    def _record(self, key: str, value: Any) -> None:
        self._begun().record_attributes({key: value})

    def _begun(self) -> SpanRecordingContext:
        if self._recording is None:
            raise RuntimeError("the operation has not begun; use it in a with block")
        return self._recording

    def __call__(self, function: Function) -> Function:
        """The function, with a span around each call that has its arguments and its result."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"@operation: {function.__name__} is a generator, whose call ends before its work begins; use a block "
                "inside it: with operation(name=...)"
            )
        signature = inspect.signature(function)
        attributes = {_OPERATION_NAME: getattr(function, "__name__", type(function).__name__), **self._attributes}

        def begun() -> Operation:
            return Operation(attributes, propagate=self._propagate)

        def record_arguments(block: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
            values = {
                name: _by_place(value) if kinds[name] is inspect.Parameter.VAR_POSITIONAL else value
                for name, value in bound.arguments.items()
            }
            block._record(LightningSpanAttributes.OPERATION_INPUT.value, values)

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            with begun() as block:
                record_arguments(block, args, kwargs)
                result = await function(*args, **kwargs)
                block.set_output(result)
                return result

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with begun() as block:
                record_arguments(block, args, kwargs)
                result = function(*args, **kwargs)
                block.set_output(result)
                return result

        chosen: Any = call_async if inspect.iscoroutinefunction(function) else call
        return chosen


def _by_place(values: tuple[Any, ...]) -> dict[str, Any]:
    return {str(place): value for place, value in enumerate(values)}


@overload
def operation(function: Function, /) -> Function: ...
@overload
def operation(*, name: str | None = None, propagate: bool = False, **attributes: Any) -> Operation: ...


def operation(function: Any = None, /, *, name: str | None = None, propagate: bool = False, **attributes: Any) -> Any:
    """A span around a block, ``with operation(name="search") as op``, or around each call of a function, ``@operation``
    or ``@operation(name="search")``.

    Of calls, arguments and result are recorded; of blocks, what ``set_input`` and ``set_output`` are given. Values that
    are no JSON are recorded as text. Errors are recorded and raised. Other keywords become attributes. The span goes to
    the trace that is active when the block or call begins; outside a trace none is stored, unless ``propagate`` asks
    for a RuntimeError then.
    """
    made = Operation({**attributes, **({_OPERATION_NAME: name} if name is not None else {})}, propagate=propagate)
    return made if function is None else made(function)
