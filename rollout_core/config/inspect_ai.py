"""Suites of inspect_ai: which of its tasks are run, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from rollout_core.config.base import Settings
from rollout_core.config.inference import EndpointModel


class InspectSuite(Settings):
    """Tasks of inspect_ai as they are: its solvers, tools and scorers, with the model of the evaluation as theirs."""

    kind: Literal["inspect"]
    """What tells this suite from one of rows."""
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """How people call it; letters, digits, dots, dashes."""
    tasks: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1)
    """As ``inspect eval`` takes them: Python files, ``file.py@task``, or names of packages' tasks, such as
    ``inspect_evals/gsm8k``."""
    task_args: Mapping[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the tasks."""
    limit: int | None = Field(default=None, ge=1)
    """Of each task only so many samples, the first ones."""
    epochs: int | None = Field(default=None, ge=1)
    """Times that each sample is evaluated. Default: what the task says."""
    generate_config: Mapping[str, JsonValue] = Field(default_factory=dict)
    """How answers are drawn, over what each task says, by keys of its ``GenerateConfig``: ``{max_tokens = 512,
    temperature = 0}``. Without ``max_tokens`` an answer has the room that the context leaves, or 2048 tokens of an
    endpoint, and without ``temperature`` that is 1."""
    sandbox: str | None = Field(default=None, min_length=1)
    """Where tools run that need one, ``docker`` or ``local``. Default: what the task says."""
    message_limit: int | None = Field(default=None, ge=1)
    """Most messages of a sample. Default: what the task says."""
    token_limit: int | None = Field(default=None, ge=1)
    """Most tokens of a sample. Default: what the task says."""
    fail_on_error: bool | Annotated[float, Field(gt=0)] | None = None
    """Whether a sample that fails ends the evaluation; a number: so many of them do, or, below 1, that share.
    Default: what the task says, which is that one does."""
    model_roles: Mapping[str, EndpointModel] = Field(default_factory=dict)
    """Models at endpoints that tasks ask for by their role, such as ``grader``."""
    max_connections: int = Field(default=128, ge=1)
    """Most samples at once, and most questions to a model."""
    python: str | None = Field(default=None, min_length=1)
    """Interpreter that has inspect_ai, from 3.11 on, such as that of a virtual environment of its own; a relative path
    starts at the working folder. Default: the one that runs this."""

    def cache_identity(self) -> Any:
        left_out = ("python", "max_connections")
        return {name: given for name, given in super().cache_identity().items() if name not in left_out}
