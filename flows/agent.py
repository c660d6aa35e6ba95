"""Training an agent: its tasks become rollouts, what it did becomes token samples, the model behind it is updated."""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from prefect import flow

from rollout_core.agents.adapters import drawing
from rollout_core.agents.adapters.ended import EndedRollout, ended_rollouts, read_rollouts
from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import run_async
from rollout_core.config import AgentGRPO, SamplingParams, TrainAgentConfig
from rollout_core.inference.engines import close_engine
from rollout_core.inference.folders import LocalFolder
from rollout_core.objects.records import AgentRollouts, AgentSource, Checkpoint, Experience
from rollout_core.plans.agent_plan import plan_agent
from rollout_core.plans.plan import context_limit
from rollout_core.promotion.decision import Promotion, precision_of
from tasks.agents import close_agents, collect_samples, enqueue_tasks, import_agent, run_agents
from tasks.approval import reason_of
from tasks.checkpoints import file_state, in_base_precision
from tasks.imports import import_model, import_tasks
from tasks.learn import check_guards, grpo_update, ppo_update
from tasks.promotion import latest_model, promote
from tasks.runtime.artifacts import draw_curve
from tasks.runtime.connections import objects, open_store, working_folder
from tasks.runtime.dry_run import end_of_stages
from tasks.runtime.flow_run import pipeline
from tasks.runtime.journal import Journal, Outcome, log_iteration
from tasks.runtime.kept_states import keeping
from tasks.runtime.report import (
    PAGE,
    Curve,
    capitalized,
    curves_of_iterations,
    page,
    shown_curve,
    stages_section,
    verdict,
)
from tasks.runtime.run_record import record_refusal
from tasks.runtime.stage import retry

NUM_GAINED, NUM_LOST = 3, 1
"""Tasks that are shown: of those whose reward rose most, and of those whose reward fell most."""

_STYLE = f"""{drawing.STYLE}
.side-by-side {{ display: grid; grid-template-columns: 1fr 1fr; gap: 1.5rem; margin: 1rem 0; }}
.side-by-side > div {{ border: 1px solid #d5dbe3; border-radius: 8px; padding: .5rem 1rem; min-width: 0; }}
.side-by-side code {{ overflow-wrap: anywhere; }}
"""


class TrainedAgent(TypedDict):
    """What training an agent returns, as JSON has it."""

    model: ContentId
    train_state: ContentId
    step: int
    rewards: list[float]
    """Mean reward of each iteration's rollouts; one without a reward counts as 0."""
    held_out: dict[str, float]
    """The same of the held-out tasks, by moment."""
    promoted: bool
    report: str
    """Folder of the report."""


@dataclass(frozen=True)
class AgentIteration:
    """What one round of tasks and update gave."""

    rollouts: AgentRollouts
    experience: Experience
    checkpoint: Checkpoint


@flow(name="train-agent", flow_run_name="{config.run.name}", persist_result=False, on_failure=[record_refusal])
def train_agent(config: TrainAgentConfig) -> TrainedAgent:
    """Train the model behind an agent by GRPO or PPO on what the agent does, and evaluate it on held-out tasks."""
    return _train(config)


@pipeline(plan_agent, closes=(close_agents, close_engine))
@keeping
def _train(config: TrainAgentConfig, journal: Journal) -> TrainedAgent:
    settings = config.algorithm
    source = import_agent(config.agent)
    model = import_model(settings.base_model).model
    tasks = import_tasks(settings.prompts).data
    held_out = None if config.evaluation is None else import_tasks(config.evaluation.tasks, label="held out").data

    def evaluate(of: ContentId, label: str) -> AgentRollouts | None:
        if held_out is None or config.evaluation is None:
            return None
        return work_on(config, source, held_out, of, config.evaluation.sampling, label=label)

    before = evaluate(model, "held out before")
    iterations = agent_iterations(config, source, tasks, model)
    last = iterations[-1].checkpoint
    final = in_base_precision(last.model, model)
    after = evaluate(final, "held out after")
    promotion: Promotion | None = None
    if before is not None and after is not None and config.promotion.enabled:
        seen = latest_model(config.promotion.resource)
        latest = seen.model
        rival = evaluate(latest, "latest") if latest is not None and latest not in (model, final) else None
        promotion = promote(before, rival, after, config.promotion, instead_of=seen.served, backend=config.backend)
        end_of_stages()
        reason = reason_of(promotion, seen.served, config.run.name, config.promotion)
        promotion = promotion.model_copy(update={"reason": reason})
    end_of_stages()
    held_out_rewards = {
        moment: rollouts.mean_reward for moment, rollouts in (("before", before), ("after", after)) if rollouts
    }
    traces = "" if before is None or after is None else _traces_section(before, after)
    precision = {
        moment: retry(lambda of=rollouts.model: precision_of(objects(), of, config.backend))
        for moment, rollouts in (("before", before), ("after", after))
        if rollouts
    }
    folder = _report(config, final, iterations, held_out_rewards, precision, promotion, traces, journal)
    return TrainedAgent(
        model=final,
        train_state=last.train_state,
        step=last.step,
        rewards=[iteration.rollouts.mean_reward for iteration in iterations],
        held_out=held_out_rewards,
        promoted=promotion is not None and promotion.promoted,
        report=str(folder),
    )


def work_on(
    config: TrainAgentConfig,
    source: AgentSource,
    tasks: ContentId,
    model: ContentId,
    sampling: SamplingParams,
    *,
    label: str,
    **chosen: Any,
) -> AgentRollouts:
    """Have agents work on ``tasks`` with ``model`` behind them; ``chosen`` as `enqueue_tasks` takes it, default: each
    task once, as held-out ones are."""
    mode = chosen.pop("mode", "val")
    options = {"mode": mode, "label": label}
    chosen["draws"] = config.seed
    asked = {**chosen, **options, "limit": context_limit(config.backend)}
    enqueued = enqueue_tasks(tasks, model, source, config.agent, sampling, config.backend, **asked)
    return run_agents(
        enqueued, source, config.agent, sampling, config.backend, config.runners, seed=config.seed, **options
    )


def agent_iterations(
    config: TrainAgentConfig, source: AgentSource, tasks: ContentId, start: ContentId
) -> list[AgentIteration]:
    """Rounds of tasks and update, each on the policy of the round before."""
    settings = config.algorithm
    group_size = settings.samples_per_prompt if isinstance(settings, AgentGRPO) else 1
    kind = settings.kind
    model, train_state = start, None
    iterations: list[AgentIteration] = []
    for number in range(settings.iterations):
        label = f"iteration {number + 1}"
        ended = work_on(
            config,
            source,
            tasks,
            model,
            settings.sampling,
            label=label,
            mode="train",
            first=number * settings.prompts_per_iteration,
            count=settings.prompts_per_iteration,
            rollouts_per_task=settings.samples_per_prompt,
            seed=config.seed,
        )
        experience = collect_samples(
            ended, failed=settings.failed, group_size=group_size, form=config.agent.form, label=label
        )
        inputs = model, train_state, start, experience.as_scores(), experience.samples
        options = {"seed": config.seed + number, "num_threads": config.num_threads, "label": label}
        if isinstance(settings, AgentGRPO):
            checkpoint = grpo_update(*inputs, settings, **options)
        else:
            checkpoint = ppo_update(*inputs, settings, **options)
        check_guards(settings, checkpoint, label)
        file_state(checkpoint, f"{config.run.name}/{kind}-{number + 1}", label=label)
        log_iteration(f"{kind.upper()} {label} of {settings.iterations}", checkpoint.summary)
        iterations.append(AgentIteration(ended, experience, checkpoint))
        model, train_state = checkpoint.model, checkpoint.train_state
    return iterations


def _report(
    config: TrainAgentConfig,
    model: ContentId,
    iterations: Sequence[AgentIteration],
    held_out: dict[str, float],
    precision: Mapping[str, str | None],
    promotion: Promotion | None,
    traces: str,
    journal: Journal,
) -> Path:
    """Write page and curves, leave them for the run's summary, and return their folder."""
    folder = working_folder() / config.report_dir
    folder.mkdir(parents=True, exist_ok=True)
    x_label = f"{config.algorithm.kind.upper()} iteration"
    checkpoints = [iteration.checkpoint for iteration in iterations]
    curves = [
        Curve("mean reward", [iteration.rollouts.mean_reward for iteration in iterations], x_label),
        Curve("rollouts with a reward", [iteration.rollouts.num_rewards for iteration in iterations], x_label),
        # Without a reference, say, there is no distance from it.
        *(found for found in curves_of_iterations(objects(), checkpoints, x_label) if any(found.values)),
    ]
    images = ""
    for curve in curves:
        marks = {f"held out {moment}: {value:.3f}": value for moment, value in held_out.items()}
        draw_curve(
            folder / curve.file_name,
            {curve.what: curve.values},
            title=f"{capitalized(curve.what)} per {x_label}",
            x_label=x_label,
            y_label=curve.what,
            marks=marks if curve is curves[0] else {},
        )
        images += f'<img src="{curve.file_name}" alt="{html.escape(curve.what)}">\n'
    figures = "".join(
        f'<div class="figure"><b>{value:.3f}</b><span>{html.escape(what)}</span></div>'
        for what, value in [
            *(
                (", ".join(filter(None, (f"held-out reward {moment}", precision.get(moment)))), value)
                for moment, value in held_out.items()
            ),
            ("mean training reward", statistics.fmean(curves[0].values)),
        ]
    )
    body = f"""<p>Agent <code>{html.escape(config.agent.function)}</code>, model
<code>{model}</code>.</p>
{"" if promotion is None else verdict(promotion)}
<div class="figures">{figures}</div>
<div class="curves">{images}</div>
{traces}
{stages_section(journal.entries)}"""
    LocalFolder(folder).replace(PAGE, [page(config.run.name, body, style=_STYLE).encode()])
    journal.outcome = Outcome(
        facts={"checkpoint": model, "report": str(folder)},
        held_out=held_out,
        promoted=None if promotion is None else promotion.promoted,
        reason="" if promotion is None else promotion.reason,
        pictures=shown_curve(objects(), config.run.name, curves[0]),
    )
    return folder


def _traces_section(before: AgentRollouts, after: AgentRollouts) -> str:
    """A few tasks that rollouts of both worked on, in the same order; what was done before and after, side by side."""
    known = objects()
    pairs = chosen_pairs(ended_rollouts(known, before), ended_rollouts(known, after))
    drawn = run_async(_draw([one.rollout_id for pair in pairs for one in pair]))
    rows = ""
    for pair in pairs:
        cells = "".join(
            f"<div><b>{moment}</b> {one.status} <code>{html.escape(one.rollout_id)}</code>{drawn[one.rollout_id]}</div>"
            for moment, one in zip(("before", "after"), pair, strict=True)
        )
        rows += f'<div class="side-by-side">{cells}</div>\n'
    return f"<h2>Traces of held-out tasks</h2>\n{rows}" if rows else ""


def chosen_pairs(
    before: Sequence[EndedRollout], after: Sequence[EndedRollout]
) -> list[tuple[EndedRollout, EndedRollout]]:
    """Those whose reward rose most, then those whose reward fell most."""
    pairs = sorted(zip(before, after, strict=True), key=lambda pair: (pair[0].reward or 0.0) - (pair[1].reward or 0.0))
    return [*pairs[:NUM_GAINED], *pairs[max(NUM_GAINED, len(pairs) - NUM_LOST) :]]


async def _draw(rollout_ids: Sequence[str]) -> Mapping[str, str]:
    async with open_store() as store:
        return {
            rollout_id: drawing.draw_trace(spans) async for rollout_id, _, spans in read_rollouts(store, rollout_ids)
        }
