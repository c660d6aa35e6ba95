"""How a reward is told: a rule, a function of the user's own, a model, or several of these together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from rollout_core.base.errors import ConfigError
from rollout_core.base.isolation.limits import Limits
from rollout_core.base.numerics import numerics_identity
from rollout_core.base.secrets import refuse_credentials
from rollout_core.config.expressions import compile_expression


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
    """``module:function``, or ``path/to/file.py:function`` relative to the working folder."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments of each call."""
    timeout_seconds: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """Longest time for one call (of a `batch_reward`: for all samples), and for importing the code."""
    memory_mb: int | None = Field(default=None, ge=64)
    """Memory of the function's processes together, in MiB. Default: three quarters of the machine's."""
    max_processes: int = Field(default=64, ge=1)
    """Processes of the function at the same time, the one it runs in among them."""
    in_process: bool = False
    """Trusted code: run it inside the run's own process, where nothing holds it to the limits and an exit or a crash
    takes the run along. Spares a call the way to another process, about 0.2 ms and the time of copying the samples."""

    def limits(self) -> Limits:
        """For the process it runs in."""
        memory = None if self.memory_mb is None else self.memory_mb * 2**20
        return Limits(seconds=self.timeout_seconds, memory_bytes=memory, processes=self.max_processes)

    def cache_identity(self) -> Any:
        """Where the function lies does not count; its code does, by its `source_id`."""
        return {"kind": self.kind, "function": self.callable.rpartition(":")[2], "kwargs": self.kwargs}

    @field_validator("callable")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        source, colon, attribute = value.rpartition(":")
        if not (source and colon and all(part.isidentifier() for part in attribute.split("."))):
            raise ValueError("expected module:function or path/to/file.py:function")
        return value


class ModelReward(_Spec):
    """The score of a reward model, read at the completion's last token."""

    kind: Literal["model"] = "model"
    model: Annotated[str, AfterValidator(refuse_credentials)] = Field(min_length=1)
    """A folder, a hub id or the content id of a checkpoint of `rollout train rm`. It scores the engine's token ids, so
    its tokenizer must be the policy's."""

    def cache_identity(self) -> Any:
        """The same scores wherever the arithmetic is the same."""
        return {"kind": self.kind, "model": self.model, **numerics_identity()}


PlainReward = ExactMatchReward | FunctionReward | ModelReward


class WeightedReward(_Spec):
    """A reward and how much it counts."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    reward: PlainReward


class CompositeReward(_Spec):
    """The weighted sum of rewards."""

    kind: Literal["composite"] = "composite"
    parts: tuple[WeightedReward, ...] = Field(min_length=1)


class ExpressionReward(_Spec):
    """Arithmetic over named rewards, such as ``clip(quality, -2, 2) - 0.5 * truncated``."""

    kind: Literal["expression"] = "expression"
    expression: str = Field(min_length=1)
    """Names are those of ``rewards``, ``num_tokens``, ``num_characters`` and ``truncated`` (1 or 0)."""
    rewards: dict[str, PlainReward] = {}

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
"""Names that an expression knows beside its rewards."""

RewardSpec = ExactMatchReward | FunctionReward | ModelReward | CompositeReward | ExpressionReward


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
