"""An environment with a memory: questions that earlier iterations answered rightly are shown with their answers. Rows
are those of `lookup.py`; the settings need ``episodic_memory = true``."""

from __future__ import annotations

from typing import Any

from rollout_core.environments import Done

MOST = 100
"""Questions that are remembered: the last ones."""


class Notebook:
    """One episode: a question, below what the notebook says of it."""

    def load_memory(self, memory: list[list[str]] | None) -> None:
        """Questions with their right answers, the last ones last."""
        self.notebook = {question: answer for question, answer in memory or []}

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """The question."""
        self.row, self.said = row, ""
        noted = self.notebook.get(row["question"])
        return row["question"] if noted is None else f"Noted: {noted}\n{row['question']}"

    def step(self, message: dict[str, Any]) -> Done:
        """The answer."""
        self.said = message["content"].strip()
        return Done()

    def reward(self) -> float:
        """1 for the right answer and 0 for all else."""
        return float(self.said == self.row["answer"])

    def save_memory(self) -> list[str] | None:
        """The question with its answer, if that was right."""
        return [self.row["question"], self.said] if self.reward() else None

    def merge_memory(self, memory: list[list[str]] | None, notes: list[list[str]]) -> list[list[str]]:
        """The notebook of the next iteration."""
        notebook = {question: [question, answer] for question, answer in [*(memory or []), *notes]}
        return list(notebook.values())[-MOST:]
