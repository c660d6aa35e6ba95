"""Settings of environments: whose episodes a model is trained on or evaluated by, and their limits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from rollout_core.base.processes import Limits
from rollout_core.config.base import Address, Settings
from rollout_core.config.plugin_use import PluginUse
from rollout_core.config.rewards import FunctionName
from rollout_core.config.tools import AnyTool

START_SECONDS = 120.0
"""For an environment's file to be imported and an object to be made."""


class EnvironmentConfig(Settings):
    """What a model acts in, in place of answering a prompt once. Each prompt's row is the start of an episode, and the
    environment rewards it. What all kinds share."""

    identity_without_default: ClassVar[frozenset[str]] = frozenset({"tools", "episodic_memory"})
    tools: tuple[AnyTool, ...] = ()
    """That the model may call besides the environment's methods, each a table `[[environment.tools]]`. A row with a key
    ``tools``, a list of their names, has those alone."""
    episodic_memory: bool = False
    """Whether it remembers between iterations: episodes begin with what those of earlier iterations left, by its
    methods ``load_memory``, ``save_memory`` and ``merge_memory``. Held-out episodes and suites begin with no memory."""
    start_memory: str | None = Field(default=None, pattern=r"^[0-9a-f]{8,64}$")
    """Id of a snapshot of kind ``episodic_memory``, or the first digits of it: the memory that training begins with,
    such as another run's. Default: none."""
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

    @model_validator(mode="after")
    def _a_memory_to_start_with(self) -> EnvironmentConfig:
        if self.start_memory is not None and not self.episodic_memory:
            raise ValueError("start_memory is the memory of an environment with episodic_memory = true; set that, too")
        return self

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of what tools read from this machine, relative to the working folder."""
        return tuple(path for tool in self.tools for path in tool.files)

    @property
    def address(self) -> str:
        """What plays the other side, for people."""
        raise NotImplementedError

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of each call of what makes an episode's object."""
        raise NotImplementedError

    def code_fields(self) -> Collection[str]:
        """Fields that say which code plays the other side. They enter ids with that code, and not by themselves."""
        raise NotImplementedError

    def limits(self) -> Limits:
        """For each process."""
        memory = None if self.memory_mb is None else self.memory_mb * 2**20
        seconds = max(START_SECONDS, 2 * self.turn_seconds)  # to start in; then it shows every second that it is alive
        return Limits(seconds=seconds, memory_bytes=memory, processes=4096, output_bytes=2**50)

    def cache_identity(self) -> Any:
        """What episodes depend on; the code enters by its content."""
        named = super().cache_identity()
        for name in (*self.code_fields(), "form", "start_memory", "episodes_at_once", "processes", "memory_mb"):
            named.pop(name, None)
        return named


class PythonEnvironment(EnvironmentConfig):
    """A Python class of your own."""

    identity_without_default = frozenset({"config", "tools", "episodic_memory"})

    kind: Literal["python"] = "python"
    path: FunctionName
    """``path/to/env.py:Env``, relative to the working folder, or ``package.module:Env``: a class, or a function that
    makes an object, of what an episode needs."""
    config: dict[str, Any] = Field(default={})
    """Keyword arguments of each call of it."""

    @property
    def address(self) -> str:
        return self.path

    @property
    def arguments(self) -> dict[str, Any]:
        return self.config

    def code_fields(self) -> Collection[str]:
        return ("kind", "path")


class AdaptedEnvironment(EnvironmentConfig):
    """An environment of another project, which an adapter of ours plays (`rollout_core.environments.adapters`)."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The keys that this kind has of its own."""
        own = set(type(self).model_fields) - set(EnvironmentConfig.model_fields) - {"kind"}
        return {name: value for name, value in self.model_dump(mode="json").items() if name in own}

    def code_fields(self) -> Collection[str]:
        return ("kind", *self.arguments)


class ReasoningGymEnvironment(AdaptedEnvironment):
    """A data set of reasoning-gym: it makes the questions, and scores the answers."""

    kind: Literal["reasoning_gym"]
    dataset: str = Field(min_length=1)
    """Its name, such as ``chain_sum``."""
    config: dict[str, Any] = Field(default={})
    """Keys of the data set's own configuration, such as ``{min_terms = 2}``; ``size`` and ``seed`` are those of the
    rows."""
    answer_tag: str = Field(default="answer", pattern=r"^[A-Za-z_]\w*$")
    """The model is asked to put its answer between ``<answer>`` and ``</answer>``, and what stands there last is
    scored. ``"none"``: nothing is asked, and all that it says is scored."""

    @model_validator(mode="after")
    def _rows_say_which(self) -> ReasoningGymEnvironment:
        for name in ("size", "seed"):
            if name in self.config:
                raise ValueError(f'config.{name}: rows say it, as in prompts = {{kind = "environment", {name} = 1}}')
        return self

    @property
    def address(self) -> str:
        return f"reasoning_gym {self.dataset}"


class OpenEnvEnvironment(AdaptedEnvironment):
    """An environment that an OpenEnv server has."""

    kind: Literal["openenv"]
    url: Address = Field(pattern=r"^https?://")
    """Where the server listens, such as ``http://127.0.0.1:8000``. Part of no id; what the server says of itself is,
    and ``revision``."""
    revision: str = ""
    """Changed by you where the server's code has changed, so that episodes are played anew."""
    text_field: str | None = None
    """Field of the server's actions that an answer of the model is the text of. Default: the model calls a tool
    ``act`` with the fields of an action."""
    observation_field: str | None = None
    """Field of observations that the model reads. Default: all of them, as JSON."""
    instructions: str = ""
    """Before the first observation."""
    reward: Literal["sum", "last"] = "sum"
    """Of what each action earned, the sum counts, or what the last one did."""

    @property
    def address(self) -> str:
        return f"openenv {self.url}"


class TextArenaEnvironment(AdaptedEnvironment):
    """A game of TextArena that one player plays."""

    kind: Literal["textarena"]
    game: str = Field(min_length=1)
    """Its name, such as ``GuessTheNumber-v0``."""
    config: dict[str, Any] = Field(default={})
    """Keyword arguments of the game, such as ``{max_number = 50}``."""

    @property
    def address(self) -> str:
        return f"textarena {self.game}"


class PluginEnvironment(PluginUse, EnvironmentConfig):
    """An environment that a plugin has, of kind ``env-harness``."""

    @property
    def address(self) -> str:
        return f"plugin {super().address}"

    @property
    def arguments(self) -> dict[str, Any]:
        """None: the plugin's factory has had its configuration."""
        return {}

    def code_fields(self) -> Collection[str]:
        return PluginUse.model_fields


class VerifiersEnvironment(AdaptedEnvironment):
    """An environment of verifiers, which its package makes by ``load_environment``."""

    kind: Literal["verifiers"]
    name: str = Field(pattern=r"^[A-Za-z0-9._/-]+$")
    """Of the environment, such as ``gsm8k``: its package is a module of this name, with ``_`` for ``-``."""
    config: dict[str, Any] = Field(default={})
    """Keyword arguments of its ``load_environment``."""
    path: str | None = Field(default=None, min_length=1)
    """Folder that the module lies in, where it is not installed; relative to the working folder."""
    python: str | None = Field(default=None, min_length=1)
    """Interpreter that has verifiers, from 3.11 on, such as that of a virtual environment of its own; a relative path
    starts at the working folder. Default: the one that runs this."""

    @model_validator(mode="after")
    def _calls_its_tools(self) -> VerifiersEnvironment:
        if self.tools:
            raise ValueError("tools: an environment of verifiers calls its tools itself, and takes no others")
        return self

    @property
    def address(self) -> str:
        return f"verifiers {self.name}"


class HarborEnvironment(AdaptedEnvironment):
    """Tasks of Harbor and Terminal-Bench, which are refused with the reason."""

    is_refused: ClassVar[bool] = True
    kind: Literal["harbor"]

    @model_validator(mode="before")
    @classmethod
    def _is_not_played(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("kind") == "harbor":
            raise ValueError(
                'kind = "harbor": a task of Harbor or Terminal-Bench is an image of Docker in which its agent and its '
                "tests run, and no containers are started here, with Docker or without; run harbor itself on an "
                "exported model, or write the task as a Python class whose tools are shell and files"
            )
        return given


AnyEnvironment = (
    PythonEnvironment
    | ReasoningGymEnvironment
    | OpenEnvEnvironment
    | TextArenaEnvironment
    | PluginEnvironment
    | VerifiersEnvironment
    | HarborEnvironment
)
