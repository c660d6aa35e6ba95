"""Settings of a curriculum: which rows or prompts are open to training, by how hard they are."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rollout_core.config.base import Settings


class Curriculum(Settings):
    """Easy ones first (competence-based curriculum, arXiv:1903.09848): at each moment of training rows are drawn from
    the easiest share of them, which grows until all are open; from then on as without a curriculum."""

    by: Literal["length", "key"] = "length"
    """What makes one harder than another: its tokens, or a number that it has under ``key``, the larger the harder."""
    key: str | None = Field(default=None, min_length=1)
    """Key of a row, in addition to what is trained."""
    initial: float = Field(default=0.1, gt=0, le=1)
    """Share that is open at first."""
    until: float = Field(default=0.5, gt=0, le=1)
    """Share of the steps, or iterations, after which all are open."""
    power: float = Field(default=2.0, ge=1)
    """How the share grows: 1 evenly; above that fast at first, for each new row then has the time that earlier ones
    had. The paper's best is 2."""

    @model_validator(mode="after")
    def _a_key_to_go_by(self) -> Curriculum:
        if (self.by == "key") != (self.key is not None):
            raise ValueError('key and by = "key" belong together: name the key of the rows, or take another by')
        return self


class PromptCurriculum(Curriculum):
    """That of prompts, whose open share is the same all through an iteration."""

    by: Literal["length", "key", "reward"] = "length"  # pyright: ignore[reportIncompatibleVariableOverride]
    """``reward``: what completions of the starting model earn in the mean, the less the harder; they are drawn and
    scored before the first iteration."""
    samples: int = Field(default=4, ge=1)
    """Completions of each prompt that are drawn for ``reward``."""
