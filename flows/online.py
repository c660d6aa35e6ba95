"""Online learning as a flow: a policy serves live agents, and learns from what they have finished with it."""

from __future__ import annotations

import time
from typing import TypedDict

from prefect import flow

from flows.agent_work import learn_from, work_on
from rollout_core.agents.live import OnlineRun, blocking, until_over
from rollout_core.base.ids import ContentId
from rollout_core.config import LearnOnlineConfig
from rollout_core.inference.engines import close_engine
from rollout_core.objects.records import AgentRollouts, Checkpoint
from rollout_core.plans.agent_plan import plan_online
from tasks.agents import close_agents, import_agent
from tasks.collect import collect_samples
from tasks.imports import import_model, import_tasks
from tasks.online import (
    NOT_HELD_OUT,
    begin_online,
    close_live,
    forget_models,
    save_online,
    serve_policy,
    take_live_batch,
)
from tasks.promotion import promote
from tasks.runtime.agent_report import report_online
from tasks.runtime.dry_run import end_of_stages
from tasks.runtime.flow_run import forget_stages, pipeline
from tasks.runtime.journal import Journal, stage_logger
from tasks.runtime.run_record import record_refusal

MOST_STAGES = 500
"""Of the last ones the report tells, and this process keeps."""


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
    run = _Learning(config, journal)
    end_of_stages("each update follows from what live agents do")
    until_over(lambda: run.step(ends_at), stage_logger().warning)
    state, folder = run.state, report_online(config, run.state, journal, is_last=True)
    return LearntOnline(
        model=run.serving,
        train_state=state.train_state,
        updates=state.num_updates,
        refused=state.num_refused,
        skipped=state.num_skipped,
        rewards=[past.mean_reward for past in state.history if past.outcome != "skipped"],
        report=str(folder),
    )


class _Learning(OnlineRun[AgentRollouts]):
    """A run under way; all of an update that costs anything is a cached stage."""

    def __init__(self, config: LearnOnlineConfig, journal: Journal) -> None:
        self.config, self.journal = config, journal
        self.source = None if config.agent is None else import_agent(config.agent)
        self.start = import_model(config.algorithm.base_model).model
        judged = config.evaluation
        self.held_out = None if judged is None else import_tasks(judged.tasks, label="held out").data
        super().__init__(begin_online(config, self.start), config.live.max_staleness, stage_logger)
        self.is_saved, self._in_use = True, set(self.state.versions)
        self.served: ContentId | None = None
        """What `_serve` has made answer; None: nothing yet, or that failed."""

    @property
    def label(self) -> str:
        """Of the batch, for people."""
        return f"batch {self.state.num_updates + self.state.num_skipped + 1}"

    def step(self, ends_at: float | None) -> bool:
        """One batch, from live traffic to what answers it, see `LearnOnlineConfig`; whether the run is over."""
        blocking(self.save())  # where that failed
        state, most, now = self.state, self.config.max_updates, time.monotonic()
        is_over = (most is not None and state.num_updates >= most) or (ends_at is not None and now >= ends_at)
        if is_over and state.batch is None:
            return True
        if self.served != self.serving:
            self._serve(self.serving)
        if state.batch is None:
            seconds = None if ends_at is None else max(0.0, ends_at - time.monotonic())
            take_live_batch(self.serving, self.config, self.source, seconds=seconds, label=self.label)
        if state.batch is not None:
            self.is_saved, self._in_use = False, set(state.versions)
            blocking(self.learn())
            forget_stages(self.journal, MOST_STAGES)
            report_online(self.config, state, self.journal)
        return False

    async def update(self, batch: AgentRollouts) -> tuple[Checkpoint, float]:
        config, settings, label = self.config, self.config.algorithm, self.label
        form = {"group_size": settings.group_size, "form": config.form, "label": label}
        experience = collect_samples(batch, failed="leave_out", **form)
        options = {"seed": config.seed + self.state.num_updates, "num_threads": config.num_threads, "label": label}
        states = self.serving, self.state.train_state, self.start
        return learn_from(experience, settings, *states, **options), experience.mean

    async def judge(self, checkpoint: Checkpoint) -> tuple[bool, str]:
        if self.held_out is None:
            return True, NOT_HELD_OUT
        assert self.source is not None, "the configuration says so"
        known = self.config, self.source, self.held_out
        sampling, label = self.config.algorithm.sampling, f"{self.label}, held out"
        before = work_on(*known, self.serving, sampling, label=f"{label} before")
        after = work_on(*known, checkpoint.model, sampling, label=f"{label} after")
        promotion = promote(before, None, after, self.config.promotion)
        return promotion.promoted, promotion.reason

    async def serve(self, checkpoint: Checkpoint, is_promoted: bool) -> None:
        self._serve(checkpoint.model if is_promoted else self.serving, promoted=is_promoted)

    def note(self, checkpoint: Checkpoint, is_promoted: bool, mean_reward: float) -> None:
        forget_models({*self._in_use, checkpoint.model}.difference(self.state.versions))

    async def save(self) -> None:
        """Unless it is saved: what the next batch is compared with, and this run's end, rest on it."""
        if not self.is_saved:
            save_online(self.config, self.state)
            self.is_saved = True

    def _serve(self, model: ContentId, *, promoted: bool = False) -> None:
        self.served = None
        serve_policy(model, self.config, self.source, promoted=promoted, label=self.label)
        self.served = model
