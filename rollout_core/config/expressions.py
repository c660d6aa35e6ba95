"""Arithmetic over named numbers, compiled from text without running any of it as Python.

Allowed: numbers, names, ``+ - * / **``, comparisons, ``and or not``, ``a if condition else b``, and the functions
of `FUNCTIONS`. Everything else is refused when the expression is compiled.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rollout_core.base.errors import ConfigError

MAX_LENGTH = 2_000
"""Characters of an expression."""

Evaluate = Callable[[Mapping[str, float]], float]

FUNCTIONS: Mapping[str, tuple[Callable[..., Any], int, int | None]] = {
    "abs": (abs, 1, 1),
    "min": (min, 2, None),
    "max": (max, 2, None),
    "clip": (lambda value, low, high: min(max(value, low), high), 3, 3),
    "exp": (math.exp, 1, 1),
    "log": (math.log, 1, 1),
    "sqrt": (math.sqrt, 1, 1),
    "tanh": (math.tanh, 1, 1),
    "sigmoid": (lambda value: 0.5 * (1.0 + math.tanh(0.5 * value)), 1, 1),
}
"""Name -> function of floats, fewest and most arguments."""

_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def compile_expression(text: str, names: Collection[str]) -> Evaluate:
    """A function from values of ``names`` to the value of the expression, a float; comparisons count 1 and 0.

    Raises ConfigError for what is not such an expression, and for names and functions that are not known. The function
    raises ArithmeticError or ValueError where mathematics does (division by zero, overflow, the root of -1).
    """
    if len(text) > MAX_LENGTH:
        raise ConfigError(f"an expression of {len(text)} characters; expected at most {MAX_LENGTH}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        evaluate = _compile(tree.body, names)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, ConfigError):
            raise ConfigError(f"expression {_shown(text)}: {error}") from None
        reason = error.msg if isinstance(error, SyntaxError) else "nested too deeply"
        raise ConfigError(f"expression {_shown(text)}: {reason}") from None
    return lambda values: float(evaluate(values))


def _compile(node: ast.expr, names: Collection[str]) -> Evaluate:
    match node:
        case ast.Constant(value=bool() | int() | float() as number):
            # Floats only: whole numbers without bound could take all memory.
            constant = _finite(number)
            return lambda values: constant
        case ast.Name(id=name):
            _require_known(name, names, "name")
            return lambda values: float(values[name])
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            apply, inner = _OPERATORS[type(op)], _compile(operand, names)
            return lambda values: apply(inner(values))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            apply, first, second = _OPERATORS[type(op)], _compile(left, names), _compile(right, names)
            return lambda values: apply(first(values), second(values))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            apply, first, second = _OPERATORS[type(op)], _compile(left, names), _compile(right, names)
            return lambda values: apply(first(values), second(values))
        case ast.BoolOp(op=op, values=operands):
            parts = [_compile(operand, names) for operand in operands]
            every = isinstance(op, ast.And)
            return lambda values: all(p(values) for p in parts) if every else any(p(values) for p in parts)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            condition, yes, no = (_compile(part, names) for part in (test, body, orelse))
            return lambda values: yes(values) if condition(values) else no(values)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            _require_known(name, FUNCTIONS, "function")
            return _call(name, [_compile(argument, names) for argument in arguments])
    raise ConfigError(f"{ast.unparse(node)!r} is no arithmetic; allowed are numbers, names, + - * / **, comparisons, "
                      f"and, or, not, if-else, and {', '.join(sorted(FUNCTIONS))}")  # fmt: skip


def _call(name: str, arguments: list[Evaluate]) -> Evaluate:
    function, fewest, most = FUNCTIONS[name]
    if len(arguments) < fewest or (most is not None and len(arguments) > most):
        expected = str(fewest) if most == fewest else f"at least {fewest}"
        raise ConfigError(f"{name} takes {expected} arguments, got {len(arguments)}")
    return lambda values: function(*(argument(values) for argument in arguments))


def _require_known(name: str, known: Collection[str], what: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        raise ConfigError(f"unknown {what} {name!r}; {hint}")


def _finite(number: float) -> float:
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ConfigError("a number is too large")
    return value


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
