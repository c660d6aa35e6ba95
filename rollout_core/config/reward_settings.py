"""What the settings of every reward share."""

from __future__ import annotations

from pydantic import ConfigDict

from rollout_core.config.described import Described


class RewardSettings(Described):
    """What the descriptions of all rewards share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def row_keys(self) -> tuple[str, ...]:
        """Keys that every prompt's row has to have."""
        return ()

    @property
    def reads_answers(self) -> bool:
        """Whether an answer is read from a completion, in a form in which equal answers can be counted."""
        return False
