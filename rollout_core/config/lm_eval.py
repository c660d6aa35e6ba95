"""Suites of lm-evaluation-harness: which of its tasks are run, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationInfo, WrapValidator

from rollout_core.config.base import Settings
from rollout_core.config.evaluation import Suite
from rollout_core.config.inspect_ai import InspectSuite


class LmEvalSuite(Settings):
    """Tasks of lm-evaluation-harness as they are: its prompts, answered by the model, and its metrics of the answers.
    Extra ``lm-eval``."""

    kind: Literal["lm_eval"]
    """What tells this suite from one of rows."""
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """How people call it; letters, digits, dots, dashes."""
    tasks: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1)
    """Names of tasks, groups or tags, such as ``gsm8k``, or YAML files of tasks."""
    include_path: str | None = Field(default=None, min_length=1)
    """A folder whose YAML files define further tasks, whose names ``tasks`` may give."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Examples before each question. Default: what the task says, which is 0 where it says nothing. A task that says 0
    keeps it."""
    limit: int | None = Field(default=None, ge=1)
    """Of each task only so many questions, the first ones."""
    apply_chat_template: bool = False
    """Prompts are conversations, which the model's chat template writes. Default: they are plain text."""
    fewshot_as_multiturn: bool = True
    """Of conversations: examples are turns of their own, not a part of the one user's turn."""
    system_instruction: str | None = None
    """Stands before each prompt; of conversations the system's turn."""
    gen_kwargs: Mapping[str, JsonValue] = Field(default_factory=dict)
    """How answers are drawn, over what each task says under ``generation_kwargs``: ``{max_gen_toks = 512}``."""
    metadata: Mapping[str, JsonValue] = Field(default_factory=dict)
    """Further values for tasks that ask for them."""
    fewshot_random_seed: int = 1234
    """Of the choice of examples."""
    bootstrap_iters: int = Field(default=100_000, ge=0)
    """Drawings by which the standard error of a metric is estimated that is no mean; 0: none is."""
    confirm_run_unsafe_code: bool = False
    """Run tasks that run programs which the model wrote. They run without walls, as this user: see `docs/sandbox.md`
    for what such programs can do, and ``kind = "code"`` for a scorer with walls."""
    python: str | None = Field(default=None, min_length=1)
    """Interpreter that has lm_eval, from 3.11 on, such as that of a virtual environment of its own; a relative path
    starts at the working folder. Default: the one that runs this."""

    def cache_identity(self) -> Any:
        return {name: given for name, given in super().cache_identity().items() if name != "python"}


_KINDS: Mapping[str, type[LmEvalSuite] | type[InspectSuite]] = {"lm_eval": LmEvalSuite, "inspect": InspectSuite}


def suite_class(given: Any) -> type[Suite] | type[LmEvalSuite] | type[InspectSuite]:
    """What the tables of a suite, or one that is made already, are."""
    kind = given.get("kind") if isinstance(given, Mapping) else getattr(given, "kind", None)
    return _KINDS.get(str(kind), Suite)


def _read(given: Any, union: Any, info: ValidationInfo) -> Any:
    """As its own kind reads it, so that errors are about that one."""
    return suite_class(given).model_validate(given, context=info.context)


AnySuite = Annotated[Suite | LmEvalSuite | InspectSuite, WrapValidator(_read)]
