"""Tuning an agent's prompt: a beam search over templates by rollouts of the agent, a critic and an editor."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict

from prefect import flow

from rollout_core.agents.apo import Candidate, keep_best, parents_of
from rollout_core.base.ids import ContentId
from rollout_core.config import SamplingParams, TunePromptConfig
from rollout_core.inference.engines import close_engine
from rollout_core.inference.folders import LocalFolder
from rollout_core.objects.records import AgentPrompt, AgentRollouts, AgentSource
from rollout_core.plans.agent_plan import plan_prompt
from rollout_core.plans.plan import context_limit
from rollout_core.store.types import RolloutMode
from tasks.agents import close_agents, enqueue_tasks, import_agent, run_agents, template_of
from tasks.imports import import_model, import_tasks
from tasks.prompts import PromptPromotion, critique_prompt, edit_prompt, import_prompt, promote_prompt
from tasks.runtime.artifacts import draw_curve
from tasks.runtime.connections import objects, working_folder
from tasks.runtime.dry_run import end_of_stages
from tasks.runtime.flow_run import pipeline
from tasks.runtime.journal import Journal, Outcome, stage_logger
from tasks.runtime.report import PAGE, Curve, capitalized, page, shown_curve, stages_section
from tasks.runtime.run_record import record_refusal

TEMPLATE_FILE = "best-template.txt"


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
    sampling = config.evaluation.sampling

    def evaluate(prompt: AgentPrompt, label: str) -> AgentRollouts:
        return search.work(prompt, held_out, sampling, mode="val", label=label)

    before = evaluate(search.seed, "held out before")
    for number in range(1, config.search.rounds + 1):
        search.play(number)
    best = search.prompt(search.beam[0])
    after = evaluate(best, "held out after")
    promotion = promote_prompt(best, before, after, enabled=config.promote)
    end_of_stages()
    held_out_rewards = {"before": before.mean_reward, "after": after.mean_reward}
    folder = _report(config, search, held_out_rewards, promotion, journal)
    return TunedPrompt(
        template=best.text,
        scores=[entry.best.score for entry in search.rounds],
        held_out=held_out_rewards,
        promoted=promotion.promoted,
        report=str(folder),
    )


@dataclass(frozen=True)
class _Round:
    judged: Sequence[Candidate]
    """The beam before, and its rewritings, with their scores."""
    best: Candidate


@dataclass
class _Search:
    """A beam search under way; all that costs anything in it is a cached stage."""

    config: TunePromptConfig
    rounds: list[_Round] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.source: AgentSource = import_agent(self.config.agent)
        self.model: ContentId = import_model(self.config.model).model
        imported = import_tasks(self.config.tasks)
        self.tasks, self.num_tasks = imported.data, imported.num_rows
        self.seed: AgentPrompt = import_prompt(self.config.template)
        self.beam = [Candidate(0, template_of(objects(), self.seed))]
        self.num_candidates = 1

    def prompt(self, candidate: Candidate) -> AgentPrompt:
        """The template as agents get it."""
        text = objects().put_bytes(candidate.template.template.encode())
        return self.seed.model_copy(update={"text": text})

    def play(self, number: int) -> None:
        """One round, from 1: rewritings of the beam; of all of them the best stay."""
        settings = self.config.search
        parents = parents_of(self.beam, settings.beam_width, settings.branch_factor)
        children: list[Candidate] = []
        for place, parent in enumerate(parents):
            child = self._rewritten(parent, (number - 1) * len(parents) + place, f"round {number}, child {place + 1}")
            if child is not None:
                children.append(child)
        judged = [self._judged(item, number) for item in _different([*self.beam, *children])]
        self.beam = keep_best(judged, settings.beam_width)
        self.rounds.append(_Round(judged, self.beam[0]))
        stage_logger().info(
            "round %d of %d: %d new templates, best %s with mean reward %.4f",
            number,
            settings.rounds,
            len(children),
            self.beam[0].name,
            self.beam[0].score,
        )

    def _rewritten(self, parent: Candidate, turn: int, label: str) -> Candidate | None:
        """A rewriting, by what the parent did on tasks that are its alone in this turn; None without a usable one."""
        count = min(self.config.search.gradient_batch_size, self.num_tasks)
        prompt = self.prompt(parent)
        options = {"mode": "train", "label": label, "first": turn * count, "count": count, "seed": self.config.seed}
        seen = self.work(prompt, self.tasks, self.config.sampling, **options)
        critic, seed = self.config.critic, self.config.seed + turn
        critique = critique_prompt(prompt, seen, critic, seed=seed, label=label)
        rewriting = edit_prompt(prompt, critique, critic, seed=seed, label=label)
        if not rewriting.is_usable:
            return None
        text = objects().get_bytes(rewriting.text).decode()
        self.num_candidates += 1
        template = parent.template.model_copy(update={"template": text})
        return Candidate(self.num_candidates - 1, template, parent.number)

    def _judged(self, candidate: Candidate, number: int) -> Candidate:
        """The candidate with its mean reward on the round's tasks, which are the same for all of them."""
        count = min(self.config.search.val_batch_size, self.num_tasks)
        options = {"first": (number - 1) * count, "count": count, "seed": self.config.seed + 1, "mode": "val"}
        label = f"round {number}, {candidate.name}"
        found = self.work(self.prompt(candidate), self.tasks, self.config.sampling, label=label, **options)
        return replace(candidate, score=found.mean_reward)

    def work(
        self,
        prompt: AgentPrompt,
        tasks: ContentId,
        sampling: SamplingParams,
        *,
        mode: RolloutMode,
        label: str,
        first: int = 0,
        count: int | None = None,
        seed: int | None = None,
    ) -> AgentRollouts:
        """Have the agent work on tasks with a template; rows as `enqueue_tasks` chooses them."""
        config = self.config
        options = {"mode": mode, "prompt": prompt, "label": label}
        enqueued = enqueue_tasks(
            tasks,
            self.model,
            self.source,
            config.agent,
            sampling,
            config.backend,
            first=first,
            count=count,
            seed=seed,
            draws=config.seed,
            limit=context_limit(config.backend),
            **options,
        )
        return run_agents(
            enqueued, self.source, config.agent, sampling, config.backend, config.runners, seed=config.seed, **options
        )


def _different(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of equal templates the oldest alone."""
    by_text: dict[str, Candidate] = {}
    for item in candidates:
        by_text.setdefault(item.template.template, item)
    return list(by_text.values())


def _report(
    config: TunePromptConfig, search: _Search, held_out: dict[str, float], promotion: PromptPromotion, journal: Journal
) -> Path:
    """Write page, curve and the best template, leave them for the run's summary, and return their folder."""
    folder = working_folder() / config.report_dir
    folder.mkdir(parents=True, exist_ok=True)
    first, best = template_of(objects(), search.seed).template, search.beam[0]
    curve = Curve("mean reward", [entry.best.score for entry in search.rounds], "round")
    title = f"{capitalized(curve.what)} of each {curve.x_label}'s best template, on its own tasks"
    draw_curve(
        folder / curve.file_name,
        {curve.what: curve.values},
        title=title,
        x_label=curve.x_label,
        y_label=curve.what,
        marks={f"held out {moment}: {value:.3f}": value for moment, value in held_out.items()},
    )
    figures = "".join(
        f'<div class="figure"><b>{value:.3f}</b><span>held-out reward {moment}</span></div>'
        for moment, value in held_out.items()
    )
    rows = "".join(
        f'<tr><td class="number">{number}</td><td>{item.name}</td><td>{_of(item)}</td>'
        f'<td class="number">{item.score:.4f}</td></tr>\n'
        for number, entry in enumerate(search.rounds, start=1)
        for item in keep_best(entry.judged, len(entry.judged))
    )
    body = f"""<p>Agent <code>{html.escape(config.agent.function)}</code>, model <code>{search.model}</code>,
critic <code>{html.escape(config.critic.model)}</code>. {html.escape(promotion.reason)}.</p>
<div class="figures">{figures}</div>
<div class="curves"><img src="{curve.file_name}" alt="{html.escape(curve.what)}"></div>
<h2>Best template ({best.name})</h2><pre>{html.escape(best.template.template)}</pre>
<h2>First template</h2><pre>{html.escape(first)}</pre>
<h2>Templates by round</h2>
<table><tr><th>round</th><th>template</th><th>rewritten from</th><th>mean reward</th></tr>
{rows}</table>
{stages_section(journal.entries)}"""
    LocalFolder(folder).replace(TEMPLATE_FILE, [best.template.template.encode()])
    LocalFolder(folder).replace(PAGE, [page(config.run.name, body, style="pre { white-space: pre-wrap; }\n").encode()])
    journal.outcome = Outcome(
        facts={"best template": best.name, "report": str(folder)},
        held_out=held_out,
        promoted=promotion.promoted,
        reason=promotion.reason,
        pictures=shown_curve(objects(), config.run.name, curve),
    )
    return folder


def _of(candidate: Candidate) -> str:
    return "" if candidate.parent is None else f"v{candidate.parent}"
