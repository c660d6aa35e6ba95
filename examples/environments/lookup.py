"""An environment: questions about people, answered by looking them up. A row is ``{"question": ..., "records": {name:
{field: value}}, "answer": ...}``, as `examples/agents/make_lookup.py` makes them.

Try it by hand:  rollout env play examples/environments/lookup.py:Lookup --rows data/agents/held-out.jsonl
"""

from __future__ import annotations

from typing import Any

from rollout_core.environments import Done, ToolError


class Lookup:
    """One episode: the model may look things up, and its first answer without a look-up counts."""

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """The question."""
        self.row, self.said = row, ""
        return row["question"]

    def lookup(self, name: str, field: str) -> str:
        """Look up a field of a person."""
        try:
            return self.row["records"][name][field]
        except KeyError:
            raise ToolError("unknown") from None

    def step(self, message: dict[str, Any]) -> Done:
        """The answer."""
        self.said = message["content"].strip()
        return Done()

    def reward(self) -> float:
        """1 for the right answer and 0 for all else."""
        return float(self.said == self.row["answer"])
