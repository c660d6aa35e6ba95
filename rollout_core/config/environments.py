"""Settings of environments: whose episodes a model is trained on or evaluated by, and their limits."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rollout_core.base.processes import Limits
from rollout_core.config.base import Settings
from rollout_core.config.rewards import FunctionName
from rollout_core.config.tools import AnyTool

START_SECONDS = 120.0
"""For an environment's file to be imported and an object to be made."""


class EnvironmentConfig(Settings):
    """What a model acts in, in place of answering a prompt once. Each prompt's row is the start of an episode, and the
    environment rewards it."""

    identity_without_default = frozenset({"config", "tools"})

    path: FunctionName
    """``path/to/env.py:Env``, relative to the working folder, or ``package.module:Env``: a class, or a function that
    makes an object, of what an episode needs."""
    config: dict[str, Any] = Field(default={})
    """Keyword arguments of each call of it."""
    tools: tuple[AnyTool, ...] = ()
    """That the model may call besides the environment's methods, each a table `[[environment.tools]]`. A row with a key
    ``tools``, a list of their names, has those alone."""
    max_turns: int = Field(default=8, ge=1)
    """Answers of the model in an episode."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Tokens of a whole episode: its first messages, answers, and what the environment says. Default: what the engine
    takes."""
    truncated: Literal["reward", "zero"] = "reward"
    """What an episode earns whose last answer was cut, or that was at ``max_turns`` or ``max_tokens`` before it was
    over: what the environment says, or 0."""
    tool_parser: Literal["hermes"] | None = "hermes"
    """How the model writes tool calls; None: what it writes is text."""
    tool_role: Literal["tool", "user"] = "tool"
    """Role of the messages that hold what tools answered; ``user`` where the chat template knows no other."""
    form: Literal["trajectory", "transition"] = "trajectory"
    """Whether turns that continue each other are one training sample, or each turn is one."""
    turn_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Longest time of one call of a method."""
    episode_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Longest time of all calls of an episode together; the model's time does not count."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts at an episode, where earlier ones failed. What the model answered is kept and asked again of nobody."""
    episodes_at_once: int = Field(default=64, ge=1)
    """That are under way together. Changes speed only."""
    processes: int = Field(default=1, ge=1)
    """That run environments. Changes speed only."""
    memory_mb: int | None = Field(default=None, ge=64)
    """Memory of each of these processes, in MiB. Default: three quarters of the machine's. Part of no id: what failed
    for want of it is played again with ``run.refresh``."""

    @model_validator(mode="after")
    def _tools_have_names(self) -> EnvironmentConfig:
        names = [tool.name for tool in self.tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tools are called {twice[0]!r}; give each a name of its own")
        return self

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of what tools read from this machine, relative to the working folder."""
        return tuple(path for tool in self.tools for path in tool.files)

    def limits(self) -> Limits:
        """For each process."""
        memory = None if self.memory_mb is None else self.memory_mb * 2**20
        seconds = max(START_SECONDS, 2 * self.turn_seconds)  # to start in; then it shows every second that it is alive
        return Limits(seconds=seconds, memory_bytes=memory, processes=4096, output_bytes=2**50)

    def cache_identity(self) -> Any:
        """What episodes depend on; the code enters by its content."""
        named = super().cache_identity()
        for name in ("path", "form", "episodes_at_once", "processes", "memory_mb"):
            named.pop(name)
        return named
