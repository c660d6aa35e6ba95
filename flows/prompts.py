"""Tuning an agent's prompt: a beam search over templates by rollouts of the agent, a critic and an editor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict

from prefect import flow

from flows.agent_work import work_on
from rollout_core.agents.apo import Beam, Candidate, different
from rollout_core.agents.task_rollouts import template_of
from rollout_core.base.ids import ContentId
from rollout_core.config import TunePromptConfig
from rollout_core.inference.engines import close_engine
from rollout_core.objects.records import AgentPrompt, AgentRollouts
from rollout_core.plans.agent_plan import plan_prompt
from rollout_core.store import PromptTemplate
from tasks.agents import close_agents, import_agent
from tasks.imports import import_model, import_tasks
from tasks.prompts import critique_prompt, edit_prompt, import_prompt, promote_prompt
from tasks.runtime.agent_report import TEMPLATE_FILE as TEMPLATE_FILE, report_tuning
from tasks.runtime.connections import objects
from tasks.runtime.dry_run import end_of_stages
from tasks.runtime.flow_run import pipeline
from tasks.runtime.journal import Journal, stage_logger
from tasks.runtime.run_record import record_refusal


class TunedPrompt(TypedDict):
    """What tuning a prompt returns, as JSON has it."""

    template: ContentId
    """Text of the best template, in the object store."""
    scores: list[float]
    """Mean reward of each round's best template, on that round's tasks."""
    held_out: dict[str, float]
    """Mean reward on the held-out tasks, of the first template (``before``) and of the best (``after``)."""
    promoted: bool
    report: str
    """Folder of the report."""


@flow(name="tune-prompt", flow_run_name="{config.run.name}", persist_result=False, on_failure=[record_refusal])
def tune_prompt(config: TunePromptConfig) -> TunedPrompt:
    """Search for a template with which an agent earns more, and publish it if it does so on held-out tasks."""
    return _tune(config)


@pipeline(plan_prompt, closes=(close_agents, close_engine))
def _tune(config: TunePromptConfig, journal: Journal) -> TunedPrompt:
    search = _Search(config)
    held_out = import_tasks(config.evaluation.tasks, label="held out").data
    options = {"sampling": config.evaluation.sampling, "mode": "val"}
    before = search.work(search.seed, held_out, label="held out before", **options)
    for number in range(1, config.search.rounds + 1):
        search.play(number)
    best = search.prompt(search.beam.best)
    after = search.work(best, held_out, label="held out after", **options)
    promotion = promote_prompt(best, before, after, enabled=config.promote)
    end_of_stages()
    rewards = {"before": before.mean_reward, "after": after.mean_reward}
    first = template_of(objects(), search.seed).template
    verdict = promotion.promoted, promotion.reason
    folder = report_tuning(config, search.model, first, search.rounds, rewards, *verdict, journal)
    return TunedPrompt(
        template=best.text,
        scores=search.scores,
        held_out=rewards,
        promoted=promotion.promoted,
        report=str(folder),
    )


class _Search:
    """A beam search under way; all that costs anything in it is a cached stage."""

    def __init__(self, config: TunePromptConfig) -> None:
        self.config = config
        self.source = import_agent(config.agent)
        self.model = import_model(config.model).model
        imported = import_tasks(config.tasks)
        self.tasks, self.num_tasks = imported.data, imported.num_rows
        self.seed = import_prompt(config.template)
        self.beam = Beam(template_of(objects(), self.seed), config.search.beam_width, config.search.branch_factor)
        self.rounds: list[Sequence[Candidate]] = []
        """The beam before each round, and its rewritings, with their scores."""
        self.scores: list[float] = []

    def prompt(self, candidate: Candidate) -> AgentPrompt:
        """The template as agents get it."""
        text = objects().put_bytes(candidate.template.template.encode())
        return self.seed.model_copy(update={"text": text})

    def play(self, number: int) -> None:
        """One round, from 1: rewritings of the beam; of all of them the best stay."""
        parents, beam = self.beam.parents(), self.beam.candidates
        turns = enumerate(parents, (number - 1) * len(parents))
        labels = (f"round {number}, child {place + 1}" for place in range(len(parents)))
        children = self.beam.children(
            [self._rewritten(parent, turn, label) for (turn, parent), label in zip(turns, labels, strict=True)]
        )
        judged = [self._judged(item, number) for item in different([*beam, *children])]
        self.beam.keep(judged)
        self.rounds.append(judged)
        self.scores.append(self.beam.best.score)
        what = "round %d of %d: %d new templates, best %s with mean reward %.4f"
        best, rounds = self.beam.best, self.config.search.rounds
        stage_logger().info(what, number, rounds, len(children), best.name, best.score)

    def _rewritten(self, parent: Candidate, turn: int, label: str) -> PromptTemplate | None:
        """A rewriting, by what the parent did on tasks that are its alone in this turn; None without a usable one."""
        count = min(self.config.search.gradient_batch_size, self.num_tasks)
        prompt = self.prompt(parent)
        rows = {"first": turn * count, "count": count, "seed": self.config.seed}
        seen = self.work(prompt, self.tasks, mode="train", label=label, **rows)
        critic, seed = self.config.critic, self.config.seed + turn
        critique = critique_prompt(prompt, seen, critic, seed=seed, label=label)
        rewriting = edit_prompt(prompt, critique, critic, seed=seed, label=label)
        if not rewriting.is_usable:
            return None
        return parent.template.model_copy(update={"template": objects().get_bytes(rewriting.text).decode()})

    def _judged(self, candidate: Candidate, number: int) -> Candidate:
        """The candidate with its mean reward on the round's tasks, which are the same for all of them."""
        count = min(self.config.search.val_batch_size, self.num_tasks)
        rows = {"first": (number - 1) * count, "count": count, "seed": self.config.seed + 1}
        label = f"round {number}, {candidate.name}"
        found = self.work(self.prompt(candidate), self.tasks, mode="val", label=label, **rows)
        return replace(candidate, score=found.mean_reward)

    def work(self, prompt: AgentPrompt, tasks: ContentId, **options: Any) -> AgentRollouts:
        """Have the agent work on tasks with a template, see `work_on`."""
        given = {"sampling": self.config.sampling, **options}
        return work_on(self.config, self.source, tasks, self.model, prompt=prompt, **given)
