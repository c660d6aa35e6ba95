"""Train an agent: GRPO of a small model that a program calls, without a configuration or a server of one's own.

    python examples/make_tiny.py
    python examples/library/train_agent.py data/example/model data/train-agent

The agent may be any program that calls the model by an OpenAI client. Kill it and run it again: rollouts that have
finished are not run again, and updates end in the same weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

from openai import OpenAI

from rollout_core.agents import GRPO, Trainer, rollout
from rollout_core.config import TransformersBackend
from rollout_core.store import LLM, SqlLightningStore

TASKS = [{"prompt": f"sort {number} {9 - number} ="} for number in range(6)]


@rollout
def writes_digits(task: dict[str, str], llm: LLM) -> float:
    """The reward: the share of characters that are digits or blanks."""
    client = OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key)
    text = client.completions.create(model=llm.model, prompt=task["prompt"]).choices[0].text
    return sum(character in "0123456789 " for character in text) / max(1, len(text))


def train(model: Path, folder: Path) -> GRPO:
    """Everything is kept under ``folder``."""
    grpo = GRPO(
        model,
        iterations=6,
        tasks_per_iteration=4,
        rollouts_per_task=8,
        lr=1e-2,
        max_tokens=8,
        backend=TransformersBackend(),  # default: vLLM
        storage=folder / "objects",
        cache=folder / "cache",
    )
    folder.mkdir(parents=True, exist_ok=True)
    store = SqlLightningStore.from_url(f"sqlite:///{folder / 'rollouts.db'}")
    Trainer(algorithm=grpo, n_runners=2, store=store).fit(writes_digits, TASKS)
    return grpo


if __name__ == "__main__":
    grpo = train(*map(Path, sys.argv[1:]))
    for report in grpo.history:
        print(f"iteration {report.number + 1}  reward {report.mean_reward:.3f}  model {report.checkpoint.model.short}")
    print(f"model {grpo.history[-1].checkpoint.model}")
