"""Expressions: arithmetic as Python has it, and nothing else of Python."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given, strategies as st

from rollout_core.base.errors import ConfigError
from rollout_core.config.rewards import FUNCTIONS, compile_expression

VALUES = {"quality": 0.75, "num_tokens": 40.0, "truncated": 1.0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("quality", 0.75),
        ("2 * quality - 0.5 * truncated", 1.0),
        ("-quality + 2 ** 3 / 4", 1.25),
        ("clip(num_tokens, 0, 10) + min(1, 2, 3) - max(1, 2)", 9.0),
        ("quality if num_tokens > 30 and not truncated else -1", -1.0),
        ("(num_tokens >= 40) + (quality == 0.75) + (quality != 1)", 3.0),
        ("truncated or quality", 1.0),
        ("sigmoid(0) + exp(0) + log(1) + sqrt(4) + tanh(0) + abs(-3)", 6.5),
        ("True", 1.0),
    ],
)
def test_values_by_hand(text, expected):
    value = compile_expression(text, VALUES)(VALUES)
    assert type(value) is float and value == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qualty", r"unknown name 'qualty'; did you mean 'quality'\?"),
        ("__import__('os')", "unknown function '__import__'"),
        ("quality.real", r"'quality\.real' is no arithmetic"),
        ("[1][0]", "is no arithmetic"),
        ("(lambda: 1)()", "is no arithmetic"),
        ("'text'", "is no arithmetic"),
        ("1 < 2 < 3", "is no arithmetic"),
        ("1j", "is no arithmetic"),
        ("min(1)", "min takes at least 2 arguments, got 1"),
        ("abs(*quality)", "is no arithmetic"),
        ("max(1, b=2)", "is no arithmetic"),
        ("1 +", "invalid syntax"),
        ("", "invalid syntax"),
        ("1e999", "a number is too large"),
        ("9" * 400, "a number is too large"),
        ("-" * 1500 + "1", "nested too deeply"),
        ("1+" * 1500 + "1", "at most 2000"),
    ],
)
def test_anything_else_is_refused_when_compiled(text, message):
    with pytest.raises(ConfigError, match=message):
        compile_expression(text, VALUES)


def test_powers_stay_floats():
    with pytest.raises(OverflowError):
        compile_expression("9 ** 9 ** 9", {})({})
    with pytest.raises(ValueError):
        compile_expression("(0 - 2) ** 0.5", {})({})


@given(st.text(alphabet="0123456789.+-*/() <>=,abnortquliymx_[]'", max_size=40))
def test_no_text_does_anything_but_compile_or_be_refused(text):
    try:
        evaluate = compile_expression(text, VALUES)
    except ConfigError:
        return
    with contextlib.suppress(ArithmeticError, ValueError):
        assert isinstance(evaluate(VALUES), float)


@given(st.floats(-50, 50))
def test_sigmoid_is_the_logistic_function(value):
    got = FUNCTIONS["sigmoid"][0](value)
    assert got == pytest.approx(1 / (1 + math.exp(-value)), abs=1e-12)
