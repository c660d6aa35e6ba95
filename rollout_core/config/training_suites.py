"""Suites of runs that train: which ones evaluate the models, when, and what their figures decide."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from rollout_core.base.errors import ConfigError
from rollout_core.config.base import Address, Settings
from rollout_core.config.lm_eval import AnySuite


def _refuse_empty(given: Any) -> Any:
    if given == "":
        raise ConfigError("got an empty text; expected a suite's name, its file or its table")
    return given


def _form_of(given: Any) -> str:
    return "file" if isinstance(given, str) else "table"


class TrainingSuite(Settings):
    """A suite by which a run evaluates the models that it trains, the one that it starts from first."""

    suite: Annotated[
        Annotated[Address, Tag("file")] | Annotated[AnySuite, Tag("table")],
        Discriminator(_form_of),
        BeforeValidator(_refuse_empty),
    ]
    """The suite's name, its file, or its table."""
    every: int | None = Field(default=None, ge=1)
    """Iterations on policy from one evaluation to the next. Default: only before and after each phase."""
    select: Literal["last", "best"] = "last"
    """Which iteration's model is the result: the last one's, or that of the evaluation with the best ``metric``, the
    first of several. Its training state stays with ``run.keep_states = "all"``."""
    patience: int | None = Field(default=None, ge=1)
    """Training ends after so many evaluations in a row without a new best ``metric``."""
    metric: str | None = None
    """One of the suite's, for ``select`` and ``patience``: the highest is the best, or the lowest where tasks of
    lm-evaluation-harness say so. Default: the first that counts right answers, else the first."""

    @model_validator(mode="after")
    def _several_evaluations(self) -> TrainingSuite:
        if self.every is None and self.watches:
            asked = f"patience = {self.patience}" if self.select == "last" else 'select = "best"'
            raise ValueError(f"{asked} compares evaluations between iterations, and there are none; set every")
        if self.metric is not None and not self.watches:
            raise ValueError('metric is for select = "best" and patience; leave it out')
        return self

    @property
    def watches(self) -> bool:
        """Whether its figures decide about training."""
        return self.select == "best" or self.patience is not None


class SuitesConfig(Settings):
    """How models are evaluated while a run trains."""

    suites: tuple[TrainingSuite, ...] = ()
    """Suites that they answer, each a table `[[evaluation.suites]]`. No update is computed otherwise for them."""

    @model_validator(mode="after")
    def _one_selects(self) -> SuitesConfig:
        if len([entry for entry in self.suites if entry.select == "best"]) > 1:
            raise ValueError('several suites have select = "best"; leave it with one of them')
        return self

    def refuse_every(self, why: str) -> None:
        """Raise ValueError where a suite is to be evaluated between iterations."""
        for place, entry in enumerate(self.suites):
            if entry.every is not None:
                raise ValueError(f"evaluation.suites.{place}.every is {entry.every}, and {why}; leave it out")
