"""Online learning as a flow: a policy serves live agents, and learns from what they have finished with it."""

from __future__ import annotations

import html
import time
from pathlib import Path
from typing import TypedDict

from prefect import flow
from prefect.context import FlowRunContext

from rollout_core.agents.live import NOT_LEARNABLE, PastUpdate
from rollout_core.base.errors import Recoverable, Stopped
from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import is_stopping
from rollout_core.config import AgentGRPO, LearnOnlineConfig
from rollout_core.inference.engines import close_engine
from rollout_core.inference.folders import LocalFolder
from rollout_core.objects.records import AgentRollouts, Checkpoint, Experience
from rollout_core.plans.agent_plan import plan_online
from rollout_core.plans.plan import context_limit
from tasks.agents import close_agents, collect_samples, enqueue_tasks, import_agent, run_agents
from tasks.imports import import_model, import_tasks
from tasks.learn import check_guards, grpo_update, ppo_update
from tasks.online import (
    NOT_HELD_OUT,
    begin_online,
    close_live,
    forget_models,
    group_size,
    save_online,
    serve_policy,
    take_live_batch,
)
from tasks.promotion import promote
from tasks.runtime.artifacts import draw_curve
from tasks.runtime.connections import objects, working_folder
from tasks.runtime.dry_run import end_of_stages
from tasks.runtime.flow_run import pipeline
from tasks.runtime.journal import Journal, Outcome, log_iteration, stage_logger
from tasks.runtime.report import PAGE, Curve, page, shown_curve, stages_section
from tasks.runtime.run_record import record_refusal

MOST_STAGES = 500
"""Of the last ones the report tells, and this process keeps."""
PATIENCE_SECONDS = 300.0
"""So long in a row stages may fail for passing reasons, such as a database that is away."""
_LONGEST_PAUSE = 30.0


class LearntOnline(TypedDict):
    """What online learning returns, as JSON has it."""

    model: ContentId
    """The weights that answered last."""
    train_state: ContentId | None
    updates: int
    """Over all runs of this name, the refused ones included."""
    refused: int
    skipped: int
    """Batches from which nothing could be learnt."""
    rewards: list[float]
    """Mean live reward of each of the last thousand updates."""
    report: str
    """Folder of the report."""


@flow(name="learn-online", flow_run_name="{config.run.name}", persist_result=False, on_failure=[record_refusal])
def learn_online(config: LearnOnlineConfig) -> LearntOnline:
    """Serve a policy to live agents and train it on what they do with it, update by update."""
    return _learn(config, None if config.max_hours is None else time.monotonic() + 3600 * config.max_hours)


@pipeline(plan_online, closes=(close_live, close_agents, close_engine))
def _learn(config: LearnOnlineConfig, journal: Journal, ends_at: float | None) -> LearntOnline:
    return _Learning(config, journal).run(ends_at)


class _Learning:
    """A run under way; all of an update that costs anything is a cached stage."""

    def __init__(self, config: LearnOnlineConfig, journal: Journal) -> None:
        self.config, self.journal = config, journal
        self.source = None if config.agent is None else import_agent(config.agent)
        self.start = import_model(config.algorithm.base_model).model
        self.held_out = (
            None if config.evaluation is None else import_tasks(config.evaluation.tasks, label="held out").data
        )
        self.state = begin_online(objects(), config, self.start)
        self.is_noted = True
        """Whether the state is saved."""
        self.served: ContentId | None = None
        """What `_serve` has made answer; None: nothing yet, or that failed."""

    @property
    def serving(self) -> ContentId:
        """The weights that were promoted last."""
        return self.state.versions[-1]

    def run(self, ends_at: float | None) -> LearntOnline:
        """Learn until the end of the run, see `LearnOnlineConfig`."""
        end_of_stages("each update follows from what live agents do")
        failing_since: float | None = None
        pause = 1.0
        while True:
            try:
                self._note()
                if self._is_over(ends_at):
                    break
                self._learn(ends_at)
                failing_since, pause = None, 1.0
            except Recoverable as error:
                # What is under way is noted, so another try continues with it.
                failing_since = failing_since or time.monotonic()
                if isinstance(error, Stopped) or is_stopping() or time.monotonic() - failing_since > PATIENCE_SECONDS:
                    raise
                stage_logger().warning("%s; trying again in %g s", error, pause)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        state, folder = self.state, self._report()
        rewards = [past.mean_reward for past in state.history if past.outcome != "skipped"]
        curve = Curve("mean reward of live rollouts", rewards, "update")
        counts = {"updates": state.num_updates, "refused": state.num_refused, "skipped": state.num_skipped}
        self.journal.outcome = Outcome(
            facts={name: str(value) for name, value in {"serving": self.serving, **counts, "report": folder}.items()},
            pictures=shown_curve(objects(), self.config.run.name, curve),
        )
        return LearntOnline(
            model=self.serving,
            train_state=state.train_state,
            updates=state.num_updates,
            refused=state.num_refused,
            skipped=state.num_skipped,
            rewards=rewards,
            report=str(folder),
        )

    def _is_over(self, ends_at: float | None) -> bool:
        state, most = self.state, self.config.max_updates
        if state.batch is not None:
            return False
        return (most is not None and state.num_updates >= most) or (ends_at is not None and time.monotonic() >= ends_at)

    def _learn(self, ends_at: float | None) -> None:
        """One batch, from live traffic to what answers it."""
        config, state = self.config, self.state
        label = f"batch {state.num_updates + state.num_skipped + 1}"
        if self.served != self.serving:
            self._serve(self.serving, label)
        if state.batch is None:
            seconds = None if ends_at is None else max(0.0, ends_at - time.monotonic())
            take_live_batch(self.serving, config, self.source, seconds=seconds, label=label)
        if state.batch is None:
            return
        in_use, self.is_noted = set(state.versions), False
        try:
            options = {"group_size": group_size(config), "form": config.form, "label": label}
            experience = collect_samples(state.batch, failed="leave_out", **options)
            checkpoint = self._update(experience, label)
        except NOT_LEARNABLE as error:
            stage_logger().warning("nothing is learnt from %d live rollouts: %s", len(state.rollouts), error)
            state.conclude("skipped", str(error))
        else:
            is_promoted, reason = self._judge(checkpoint, label)
            # Noted only after it answers: where that fails, the same update is tried again.
            self._serve(checkpoint.model if is_promoted else self.serving, label, promoted=is_promoted)
            if is_promoted:
                state.promote(checkpoint, config.live.max_staleness)
            outcome = "promoted" if is_promoted else "refused"
            state.conclude(outcome, reason, mean_reward=experience.mean, model=checkpoint.model)
            forget_models({*in_use, checkpoint.model}.difference(state.versions))
        self._note()
        state.check_learnable()
        del self.journal.entries[:-MOST_STAGES]
        _forget_task_runs()
        self._report()

    def _note(self) -> None:
        """Save the state, unless it is saved: what the next batch is compared with, and this run's end, rest on it."""
        if not self.is_noted:
            save_online(objects(), self.config, self.state)
            self.is_noted = True

    def _serve(self, model: ContentId, label: str, *, promoted: bool = False) -> None:
        """Have a model answer live agents."""
        self.served = None
        serve_policy(model, self.config, self.source, promoted=promoted, label=label)
        self.served = model

    def _update(self, experience: Experience, label: str) -> Checkpoint:
        config, state, settings = self.config, self.state, self.config.algorithm
        inputs = self.serving, state.train_state, self.start, experience.as_scores(), experience.samples
        options = {"seed": config.seed + state.num_updates, "num_threads": config.num_threads, "label": label}
        if isinstance(settings, AgentGRPO):
            checkpoint = grpo_update(*inputs, settings, **options)
        else:
            checkpoint = ppo_update(*inputs, settings, **options)
        check_guards(settings, checkpoint, label)
        log_iteration(f"{settings.kind.upper()} {label}", checkpoint.summary)
        return checkpoint

    def _judge(self, checkpoint: Checkpoint, label: str) -> tuple[bool, str]:
        """Whether the new weights are to answer, and why."""
        if checkpoint.model == self.serving:
            return False, "the update left the weights as they are"
        if self.held_out is None:
            return True, NOT_HELD_OUT
        before = self._evaluate(self.serving, self.held_out, f"{label}, held out before")
        after = self._evaluate(checkpoint.model, self.held_out, f"{label}, held out after")
        promotion = promote(before, None, after, self.config.promotion)
        return promotion.promoted, promotion.reason

    def _evaluate(self, model: ContentId, tasks: ContentId, label: str) -> AgentRollouts:
        """Have the agent work on held-out tasks with a model behind it, which answers live agents meanwhile."""
        config, source, sampling = self.config, self.source, self.config.algorithm.sampling
        assert source is not None and config.agent is not None, "the configuration says so"
        known = source, config.agent, sampling, config.backend
        limit = context_limit(config.backend)
        enqueued = enqueue_tasks(tasks, model, *known, draws=config.seed, mode="val", limit=limit, label=label)
        return run_agents(enqueued, *known, config.runners, seed=config.seed, mode="val", label=label)

    def _report(self) -> Path:
        """Write page and curve; their folder."""
        config, state = self.config, self.state
        folder = working_folder() / config.report_dir
        folder.mkdir(parents=True, exist_ok=True)
        learnt = [past for past in state.history if past.outcome != "skipped"]
        curve = Curve("mean reward", [past.mean_reward for past in learnt], "update")
        image = ""
        if learnt:
            title = "Mean reward of the live rollouts of each update"
            draw_curve(
                folder / curve.file_name, {curve.what: curve.values}, title=title, x_label="update", y_label=curve.what
            )
            image = f'<div class="curves"><img src="{curve.file_name}" alt="{title}"></div>'
        counts = {"updates": state.num_updates, "refused": state.num_refused, "skipped": state.num_skipped}
        figures = "".join(
            f'<div class="figure"><b>{count}</b><span>{what}</span></div>' for what, count in counts.items()
        )
        body = f"""<p>Model <code>{self.serving}</code> answers live agents, which find it as the resource
<code>llm</code>.</p>
<div class="figures">{figures}</div>
{image}
<h2>Batches of live rollouts, the latest first</h2>
<table><tr><th>batch</th><th>rollouts</th><th>mean reward</th><th>model</th><th>outcome</th><th>why</th></tr>
{"".join(map(_row, reversed(state.history)))}</table>
{stages_section(self.journal.entries)}"""
        LocalFolder(folder).replace(PAGE, [page(config.run.name, body).encode()])
        return folder


def _forget_task_runs() -> None:
    """Prefect keeps the state of every task run until the flow ends, for others that may depend on it."""
    context = FlowRunContext.get()
    if context is not None:
        context.run_results.clear()


def _row(past: PastUpdate) -> str:
    reward = "" if past.outcome == "skipped" else f"{past.mean_reward:.4f}"
    kind = "right" if past.outcome == "promoted" else "wrong"
    return (
        f'<tr><td class="number">{past.number + 1}</td><td class="number">{past.num_rollouts}</td>'
        f'<td class="number">{reward}</td><td><code>{past.model or ""}</code></td>'
        f'<td class="{kind}">{past.outcome}</td><td>{html.escape(past.reason)}</td></tr>\n'
    )
