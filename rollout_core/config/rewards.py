"""What a completion is worth: a rule, a function of the user's own, a model, or several of these together.

An expression over rewards is arithmetic over named numbers, compiled from text without running any of it as Python.
Allowed: numbers, names, ``+ - * / **``, comparisons, ``and or not``, ``a if condition else b``, and the functions
of `FUNCTIONS`. Everything else is refused when the expression is compiled.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rollout_core.base.determinism import numerics_identity
from rollout_core.base.errors import ConfigError
from rollout_core.base.processes import Limits
from rollout_core.base.settings import refuse_credentials
from rollout_core.config.judges import JudgeReward
from rollout_core.config.plugin_use import PluginUse
from rollout_core.config.reward_settings import RewardSettings
from rollout_core.config.verifiers import CodeReward, Verified

MAX_LENGTH = 2_000
"""Characters of an expression."""

DEFAULT_FAILED_SHARE = 0.1
"""As of the requests of a batch."""

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


# Not simpleeval 1.0.8: `4000000**4000000` passes its limits and runs for over a minute, for its numbers are integers
# without bound; it also knows strings, comprehensions and attributes (CVE-2026-32640), which arithmetic does not need.
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


def _names_a_function(value: str) -> str:
    source, colon, attribute = value.rpartition(":")
    if not (source and colon and all(part.isidentifier() for part in attribute.split("."))):
        raise ValueError("expected module:function or path/to/file.py:function")
    return value


FunctionName = Annotated[str, AfterValidator(_names_a_function)]
"""``module:function`` or ``path/to/file.py:function``."""


class ExactMatchReward(RewardSettings):
    """1 where the completion is the answer of its row, else 0. Both are compared in Unicode's form NFC."""

    kind: Literal["exact_match"] = "exact_match"
    answer_key: str = Field(default="answer", min_length=1)
    """Key of the prompt's row that holds the answer; an answer that is no string is compared by its JSON text, a float
    that is whole by its text without a fraction, too: 42.0 is ``42`` and ``42.0``."""
    strip: bool = True
    """White space around completion and answer does not count."""
    ignore_case: bool = False
    """Upper and lower case count as the same."""

    @property
    def row_keys(self) -> tuple[str, ...]:
        return (self.answer_key,)

    @property
    def reads_answers(self) -> bool:
        return True


class FunctionReward(RewardSettings):
    """A function of yours: ``def reward(sample: RewardInput) -> float | None``, of a whole list under `batch_reward`,
    or in TRL's form, ``def reward(completions, **kwargs) -> list[float | None]``; async, too. None: it abstains."""

    kind: Literal["function"] = "function"
    callable: FunctionName
    """``module:function``, or ``path/to/file.py:function`` relative to the working folder."""
    kwargs: dict[str, Any] = Field(default={})
    """Further keyword arguments of each call."""
    timeout_seconds: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """Longest time for one call (of a `batch_reward`: for all samples), and for importing the code."""
    memory_mb: int | None = Field(default=None, ge=64)
    """Memory of the function's processes together, in MiB. Default: three quarters of the machine's."""
    max_processes: int = Field(default=64, ge=1)
    """Processes of the function at the same time, the one it runs in among them."""
    max_failed_share: float = Field(default=DEFAULT_FAILED_SHARE, ge=0, le=1)
    """Share of the samples scored together that the function may fail on: it raises, or returns neither a finite number
    nor None. They have no score and are counted; where they are more, scoring fails."""
    in_process: bool = False
    """Trusted code: run it inside the run's own process, where nothing holds it to the limits and an exit or a crash
    takes the run along. Spares a call the way to another process, about 0.2 ms and the time of copying the samples."""

    def limits(self) -> Limits:
        """For the process it runs in."""
        memory = None if self.memory_mb is None else self.memory_mb * 2**20
        return Limits(seconds=self.timeout_seconds, memory_bytes=memory, processes=self.max_processes)

    def cache_identity(self) -> Any:
        """Where the function lies does not count; its code does, by its `source_id`."""
        named = {"kind": self.kind, "function": self.callable.rpartition(":")[2], "kwargs": self.kwargs}
        # Scores that were kept before there was such a share are found: then none failed.
        share = {"max_failed_share": self.max_failed_share}
        return named | (share if self.max_failed_share != DEFAULT_FAILED_SHARE else {})


class ModelReward(RewardSettings):
    """The score of a reward model, read at the completion's last token."""

    kind: Literal["model"] = "model"
    model: Annotated[str, AfterValidator(refuse_credentials)] = Field(min_length=1)
    """A folder, a hub id or the content id of a checkpoint of `rollout train rm`. It scores the engine's token ids, so
    its tokenizer must be the policy's."""

    def cache_identity(self) -> Any:
        """The same scores wherever the arithmetic is the same."""
        return {"kind": self.kind, "model": self.model, **numerics_identity()}


class PluginReward(PluginUse, RewardSettings):
    """The score of a plugin: a folder or package with a ``rollout-plugin.toml``, whose code runs in processes of its
    own."""

    max_failed_share: float = Field(default=DEFAULT_FAILED_SHARE, ge=0, le=1)
    """Share of the samples scored together that it may fail on: it crashes, hangs, or answers with neither a finite
    number nor null. They have no score and are counted; where they are more, scoring fails."""

    def cache_identity(self) -> Any:
        """Where the plugin lies does not count; its files do, by its `source_id`."""
        return {
            "kind": self.kind,
            "name": self.name,
            "config": self.config,
            "max_failed_share": self.max_failed_share,
        }


PlainReward = ExactMatchReward | FunctionReward | ModelReward | Verified | CodeReward | JudgeReward | PluginReward


class WeightedReward(RewardSettings):
    """A reward and how much it counts."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of the reward in the sum."""
    reward: PlainReward
    """What is weighted."""


class CompositeReward(RewardSettings):
    """The weighted sum of rewards."""

    kind: Literal["composite"] = "composite"
    parts: tuple[WeightedReward, ...] = Field(min_length=1)
    """Rewards with their weights; a sample earns the weighted sum."""


class ExpressionReward(RewardSettings):
    """Arithmetic over named rewards, such as ``clip(quality, -2, 2) - 0.5 * truncated``."""

    kind: Literal["expression"] = "expression"
    expression: str = Field(min_length=1)
    """Names are those of ``rewards``, ``num_tokens``, ``num_characters`` and ``truncated`` (1 or 0)."""
    rewards: dict[str, PlainReward] = Field(default={})
    """Rewards by the names that the expression has for them."""

    @model_validator(mode="after")
    def _compiles(self) -> ExpressionReward:
        hidden = sorted(set(SAMPLE_FIGURES) & set(self.rewards))
        if hidden:
            raise ValueError(f"a reward named {hidden[0]!r} would hide the sample's own figure; rename it")
        try:
            compile_expression(self.expression, [*self.rewards, *SAMPLE_FIGURES])
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


SAMPLE_FIGURES = ("num_tokens", "num_characters", "truncated")
"""Names that an expression knows in addition to its rewards."""

RewardSpec = PlainReward | CompositeReward | ExpressionReward


def plain_rewards(spec: RewardSpec) -> list[PlainReward]:
    """The rewards ``spec`` is made of; itself, where it is made of nothing else."""
    if isinstance(spec, CompositeReward):
        return [part.reward for part in spec.parts]
    if isinstance(spec, ExpressionReward):
        return list(spec.rewards.values())
    return [spec]


def with_models(spec: RewardSpec, replace: Callable[[str], str]) -> RewardSpec:
    """``spec`` with the address of each reward model replaced, such as by its content id."""
    if isinstance(spec, ModelReward):
        return spec.model_copy(update={"model": replace(spec.model)})
    if isinstance(spec, CompositeReward):
        parts = (part.model_copy(update={"reward": with_models(part.reward, replace)}) for part in spec.parts)
        return spec.model_copy(update={"parts": tuple(parts)})
    if isinstance(spec, ExpressionReward):
        rewards = {name: with_models(reward, replace) for name, reward in spec.rewards.items()}
        return spec.model_copy(update={"rewards": rewards})
    return spec
