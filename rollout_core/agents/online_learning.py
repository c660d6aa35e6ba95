"""Online learning: a policy in use learns from the rollouts of live traffic, and gets better under its users' hands."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_core.agents.algorithm import Dataset
from rollout_core.agents.live import NOT_LEARNABLE, LiveRollouts, OnlineRun, OnlineState, with_retries
from rollout_core.agents.policy_session import (
    Evaluation,
    PolicyAlgorithm,
    PolicyLearner,
    PolicyOptions,
    PolicySession,
    policy_settings,
    to_thread,
)
from rollout_core.base.errors import ConfigError
from rollout_core.config import ImportanceCorrection, LiveTraffic, ModelSource
from rollout_core.config.agents import AgentGRPO, AgentPPO
from rollout_core.inference.backend import ModelRef
from rollout_core.objects import Checkpoint, Experience

logger = logging.getLogger(__name__)

Gate = Callable[[ModelRef, ModelRef], bool | Awaitable[bool]]
"""Whether new weights, the first argument, may take the place of the present ones."""


@dataclass(frozen=True)
class OnlineReport:
    """What an update has come to."""

    number: int
    """From 0, over all runs of this name."""
    rollouts: Sequence[str]
    """What was learnt from."""
    mean_reward: float
    """Of the samples."""
    checkpoint: Checkpoint
    is_promoted: bool


class OnlineLearning(PolicyAlgorithm):
    """Learns from rollouts that others enqueued, whenever enough have ended with a reward, and swaps the weights behind
    the proxy; agents at work notice nothing.

    Each rollout that ends after the first start is learnt from once, also across restarts under the same ``name``. A
    reward may come after a rollout's end, up to ``reward_patience_seconds``. Rollouts of the modes ``val`` and
    ``test``, and those of flows, are left alone. A batch from which nothing can be learnt is logged and done with.

    Rollouts may be older than the weights: spans say which weights wrote them. Those of weights more than
    ``max_staleness`` promotions back, or of weights that were never in use here, are left out; for the others the
    learner's correction weighs tokens by how likely they were drawn. PPO is the default, as live tasks rarely repeat:
    GRPO compares rollouts of equal input, and one whose group does not fill within the patience is left out.

    New weights are promoted if ``gate`` says so and, where ``fit`` gets a val_dataset, if their mean reward on it is
    not below that of the present ones by more than ``tolerance``. There is one engine, so while they are tried they
    also answer live calls; rollouts answered by refused weights are not learnt from.

    Args:
        model: to start from; or give ``settings`` whole (AgentPPO or AgentGRPO).
        min_rollouts: so many that can be learnt from make an update.
        max_rollouts: the most of an update; of more the latest are taken. Default: four times min_rollouts.
        max_updates: after so many the run ends; None: it runs until ``stop``.
        max_staleness: see above.
        poll_seconds: between looks for ended rollouts.
        lr, temperature, max_tokens, learner: as for PPO.
        options: see ``PolicyOptions``.
    """

    def __init__(
        self,
        model: str | Path | ModelSource | None = None,
        *,
        settings: AgentGRPO | AgentPPO | None = None,
        min_rollouts: int = 64,
        max_rollouts: int | None = None,
        max_updates: int | None = None,
        max_staleness: int = 1,
        reward_patience_seconds: float = 300.0,
        gate: Gate | None = None,
        tolerance: float = 0.0,
        poll_seconds: float = 5.0,
        lr: float = 1e-6,
        temperature: float = 1.0,
        max_tokens: int = 256,
        learner: Mapping[str, Any] | None = None,
        name: str = "online",
        **options: Any,
    ) -> None:
        try:
            self._live = LiveTraffic(
                min_rollouts=min_rollouts,
                max_rollouts=max_rollouts,
                max_staleness=max_staleness,
                reward_patience_seconds=reward_patience_seconds,
                poll_seconds=poll_seconds,
            )
        except ValueError as error:
            raise ConfigError(f"what is to be learnt from is not clear: {error}") from error
        if max_updates is not None and max_updates < 1:
            raise ConfigError(f"max_updates is {max_updates}; expected 1 or more, or None")
        settings = policy_settings(
            AgentPPO,
            model,
            settings,
            num_rollouts=min_rollouts,
            lr=lr,
            temperature=temperature,
            max_tokens=max_tokens,
            learner=learner,
            correction=ImportanceCorrection(),
        )
        super().__init__(settings, PolicyOptions(name=name, **options))
        self._max_updates = max_updates
        self._gate = gate
        self._tolerance = tolerance
        self._stop = threading.Event()
        self.history: list[OnlineReport] = []
        """What each update of this process has come to."""

    def stop(self) -> None:
        """End the run after the update under way, if there is one; from any thread."""
        self._stop.set()

    async def run(self, train_dataset: Dataset | None = None, val_dataset: Dataset | None = None) -> None:
        if train_dataset is not None:
            raise ConfigError("OnlineLearning learns from live rollouts; leave out the train_dataset")
        if val_dataset is not None and not len(val_dataset):
            raise ConfigError("the val_dataset is empty; give tasks to judge by, or None")
        found: list[OnlineState[Experience]] = []
        async with self.session(lambda learner: found.append(self._resume(learner))) as session:
            [state] = found
            live = LiveRollouts(
                session.store,
                state,
                self._live,
                group_size=self.settings.group_size,
                adapt=session.adapt,
                flush=session.flush,
            )
            await session.publish()
            learning = _Learning(self, session, state, val_dataset)
            while not self._stop.is_set() and (self._max_updates is None or state.num_updates < self._max_updates):
                if state.batch is None and not await learning.collect(live):
                    await asyncio.sleep(live.pause)
                    continue
                await learning.learn()

    @property
    def max_staleness(self) -> int:
        """Promotions that a rollout's weights may be back."""
        return self._live.max_staleness

    @property
    def ref(self) -> str:
        """What says how far the run is."""
        return f"agent-online/{self._options.name}"

    def _resume(self, learner: PolicyLearner) -> OnlineState[Experience]:
        name = self._options.name
        state = OnlineState[Experience].begin(learner.objects, self.ref, name, learner.reference)
        learner.start_from(state.versions[-1], state.train_state)
        if state.num_updates:
            logger.info("%s: resumes after %d updates", name, state.num_updates)
        return state

    async def may_serve(
        self, session: PolicySession, checkpoint: Checkpoint, val_dataset: Dataset | None
    ) -> tuple[bool, str]:
        """What the gate and the held-out tasks say. Those leave the weights that they were tried with last loaded."""
        if self._gate is not None:
            new, present = await to_thread(
                lambda: [session.learner.ref_of(m) for m in (checkpoint.model, session.serving)]
            )
            answer = self._gate(new, present)
            if not (await answer if inspect.isawaitable(answer) else answer):
                return False, ""
        if val_dataset is None:
            return True, ""
        present = await self._judged(session, val_dataset)
        await session.load(checkpoint.model, session.sampling)
        new = await self._judged(session, val_dataset)
        logger.info("%s: held-out reward %.4f, was %.4f", self._options.name, new.mean_reward, present.mean_reward)
        # False where there is no reward at all.
        return new.mean_reward >= present.mean_reward - self._tolerance, ""

    async def _judged(self, session: PolicySession, val_dataset: Dataset) -> Evaluation:
        return await session.evaluate(val_dataset, await session.publish(), session.sampling)

    def note(self, report: OnlineReport) -> None:
        """An update has ended."""
        self.history.append(report)
        if report.is_promoted:
            self.checkpoint = report.checkpoint
        logger.info(
            "%s, update %d: mean reward %.4f, model %s %s",
            self._options.name,
            report.number + 1,
            report.mean_reward,
            report.checkpoint.model.short,
            "promoted" if report.is_promoted else "refused",
        )


class _Learning(OnlineRun[Experience]):
    """The algorithm's run, on its event loop."""

    def __init__(
        self,
        algorithm: OnlineLearning,
        session: PolicySession,
        state: OnlineState[Experience],
        val_dataset: Dataset | None,
    ) -> None:
        super().__init__(state, algorithm.max_staleness)
        self._algorithm, self._session, self._val_dataset = algorithm, session, val_dataset
        self._learner = session.learner

    async def collect(self, live: LiveRollouts) -> bool:
        """Whether there is something to learn from, which is noted then."""
        state, learner = self.state, self._learner
        chosen = await live.next_batch()
        if not chosen:
            if live.is_due_to_save():
                await self.save()
            return False
        adapted = await with_retries(lambda: self._session.adapt(chosen))
        live.take(chosen)
        try:
            state.batch = await to_thread(lambda: learner.file(adapted, failed="leave_out"))
        except NOT_LEARNABLE as error:
            self.skip(error)
        await self.save()
        state.check_learnable()
        if state.batch is not None:
            logger.info("%d live rollouts to learn from; left out: %s", len(chosen), state.left_out or "none")
        return state.batch is not None

    async def update(self, batch: Experience) -> tuple[Checkpoint, float]:
        number = self.state.num_updates
        checkpoint = await to_thread(lambda: self._learner.learn(batch, number), on_cancel=self._learner.stop)
        return checkpoint, batch.mean

    async def judge(self, checkpoint: Checkpoint) -> tuple[bool, str]:
        return await self._algorithm.may_serve(self._session, checkpoint, self._val_dataset)

    async def serve(self, checkpoint: Checkpoint, is_promoted: bool) -> None:
        model = checkpoint.model if is_promoted else self.serving
        if self._session.serving != model:
            await self._session.load(model, self._session.sampling)
        if not is_promoted:
            self._learner.start_from(model, self.state.train_state)
        await self._session.publish()

    def note(self, checkpoint: Checkpoint, is_promoted: bool, mean_reward: float) -> None:
        state = self.state
        self._algorithm.note(OnlineReport(state.num_updates, state.rollouts, mean_reward, checkpoint, is_promoted))

    async def save(self) -> None:
        await to_thread(lambda: self.state.save(self._learner.objects, self._algorithm.ref))
