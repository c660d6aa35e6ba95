"""A trainer in a process of its own, to be killed: ``python training_script.py FOLDER STORAGE MODEL``.

Agents note each of their attempts in a file, so that a test sees which rollouts were run again.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from openai import OpenAI

from rollout_core.agents import ClientServerExecutionStrategy, LitAgentRunner, OtelTracer, Trainer, rollout
from rollout_core.agents.policy_algorithms import GRPO
from rollout_core.config import TransformersBackend
from rollout_core.store import LLM, Rollout, SqlLightningStore


def digits(text: str) -> float:
    """Share of characters that are digits or blanks: what a model with random weights can find out."""
    return sum(character in "0123456789 " for character in text) / max(1, len(text))


def ask(task: dict, llm: LLM) -> str:
    """What the policy writes after the task's prompt."""
    with OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key, max_retries=0) as client:
        return client.completions.create(model=llm.model, prompt=task["prompt"]).choices[0].text


def algorithm(model: Path, folder: Path, **changes) -> GRPO:
    """A few iterations of a tiny model."""
    settings = {
        "iterations": 3,
        "tasks_per_iteration": 2,
        "rollouts_per_task": 4,
        "lr": 1e-2,
        "max_tokens": 8,
        "name": "digits",
        "backend": TransformersBackend(),
        "storage": folder / "objects",
        "cache": folder / "cache",
        "num_threads": 1,
        "learner": {"snapshots": {"every_steps": 1}},
    }
    return GRPO(model, **{**settings, **changes})


TASKS = [{"prompt": f"sort {number} ="} for number in range(3)]


@rollout
def agent(task, llm, rollout: Rollout):
    """Asks, and notes the attempt."""
    reward = digits(ask(task, llm))
    with (Path(sys.argv[1]) / "attempts.txt").open("a") as file:
        file.write(f"{rollout.rollout_id}\n")
    return reward


def main(folder: Path, storage: Path, model: Path) -> None:
    """Train, and print what came of it."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)

    grpo = algorithm(model, storage)
    trainer = Trainer(
        algorithm=grpo,
        store=SqlLightningStore.from_url(f"sqlite:///{folder / 'rollouts.db'}"),
        strategy=ClientServerExecutionStrategy(n_runners=1, server_port=0, worker_timeout=10),
        runner={"type": LitAgentRunner, "poll_interval": 0.02, "heartbeat_interval": 1},
        tracer=OtelTracer(instrument=[]),
    )
    trainer.fit(agent, TASKS)
    for report in grpo.history:
        sys.stdout.write(f"{report.number} {report.mean_reward} {report.checkpoint.model}\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
