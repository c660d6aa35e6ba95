"""What a model earns on held-out prompts, and what guards measure besides, as the nightly flow and the canary ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollout_core.algorithms.reward_hacking import HackingWatch, PolicyRewards
from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId
from rollout_core.config import BackendConfig, NightlyConfig, OnPolicySettings, SamplingParams
from rollout_core.config.base import DatasetSource
from rollout_core.config.promotion import Guard, SuiteGuard
from rollout_core.config.rewards import RewardSpec
from rollout_core.evaluation.moments import LATEST, START
from rollout_core.evaluation.reports import SuiteReport
from rollout_core.objects.records import Checkpoint, Divergence, EvalReport, Scores
from rollout_core.plans.plan import context_limit
from rollout_core.promotion.guards import GuardReports, subject_of
from rollout_core.rewards.source_ids import plugin_parts, record_code, source_id, source_of
from tasks.generate import enqueue_prompts
from tasks.imports import import_prompts, import_reward
from tasks.runtime import connections
from tasks.runtime.dry_run import current_dry_run, dry_run_remark, is_placeholder
from tasks.runtime.kept_states import current_keeping
from tasks.score import evaluate, evaluate_by, measure_kl


@dataclass(frozen=True)
class Judge:
    """A reward, and `source_id` of its code."""

    reward: RewardSpec
    source: ContentId


def judge_of(reward: RewardSpec) -> Judge:
    """The reward with its models filed, and the id of its code as it is now. Plugins are filed, so that whichever
    machine scores has them."""
    filed = import_reward(reward)
    source = source_id(filed, base=connections.working_folder())
    if plugin_parts(filed) and current_dry_run() is None:
        objects = connections.objects()
        record_code(objects, filed, source_of(filed, connections.working_folder(), source))
    return Judge(filed, source)


def evaluate_held_out(
    sampling: SamplingParams,
    backend: BackendConfig,
    prompts: ContentId,
    judge: Judge,
    model: ContentId,
    label: str,
    *,
    drawing: str | None = None,
) -> EvalReport:
    """Reward of ``model`` on the held-out ``prompts``. With a ``drawing`` all completions are generated again, for it
    alone."""
    options = {"max_model_len": context_limit(backend), "mode": "test", "drawing": drawing, "label": label}
    prompt_set = enqueue_prompts(prompts, model, sampling, **options)
    return evaluate(prompt_set, sampling, backend, judge.reward, judge.source, label=label)


@dataclass(frozen=True)
class HeldOutPrompts:
    """Prompts whose completions say how good a model is."""

    sampling: SamplingParams
    backend: BackendConfig
    prompts: ContentId
    judge: Judge

    def evaluate(self, model: ContentId, label: str) -> EvalReport:
        """Reward of ``model`` on them."""
        return evaluate_held_out(self.sampling, self.backend, self.prompts, self.judge, model, label)


def guard_reports(
    config: NightlyConfig,
    judge: Judge | None,
    before: EvalReport,
    latest: EvalReport | None,
    after: EvalReport,
    suites: Mapping[str, Mapping[str, SuiteReport]],
    outcome: str,
) -> tuple[GuardReports, ...]:
    """Evaluations for those guards that look at another reward, at other prompts, or at one of ``suites``, which are
    by name and moment; ``outcome`` is the moment of ``after``."""
    found = []
    for number, guard in enumerate(config.promotion.guards):
        if isinstance(guard, SuiteGuard):
            known = suites[guard.name]
            rivals = {"before": known[START], "latest": known.get(LATEST)}
            found.append(GuardReports(guard=number, **rivals, after=known[outcome]))
        elif subject_of(guard) in ("own reward", "own prompts"):
            assert judge is not None, "episodes have no such guard"
            measure = _measure(config, judge, guard, f"guard {number + 1}")
            found.append(
                GuardReports(
                    guard=number,
                    before=measure(before, "before"),
                    latest=None if latest is None else measure(latest, "latest"),
                    after=measure(after, "after"),
                )
            )
    return tuple(found)


def _measure(config: NightlyConfig, judge: Judge, guard: Guard, label: str) -> Callable[[EvalReport, str], EvalReport]:
    """How a guard with a reward or prompts of its own evaluates the model of a report."""
    reward: RewardSpec | None = getattr(guard, "reward", None)
    source: DatasetSource | None = getattr(guard, "prompts", None)
    own = judge if reward is None else judge_of(reward)
    if source is None:
        return lambda of, moment: evaluate_by(of, own.reward, own.source, label=f"{label}, {moment}")
    known = config.evaluation.sampling, config.backend, import_prompts(source, label=label).data, own
    return lambda of, moment: evaluate_held_out(*known, of.model, f"{label}, {moment}")


def divergences(
    config: NightlyConfig, before: EvalReport, latest: EvalReport | None, after: EvalReport
) -> tuple[Divergence, ...]:
    """Of the new model from each that it is compared with, where a guard asks for it."""
    if not any(subject_of(guard) == "divergence" for guard in config.promotion.guards):
        return ()
    rivals = {"before": before} if latest is None else {"before": before, "latest": latest}
    temperature = config.evaluation.sampling.temperature
    return tuple(
        measure_kl(after, rival.model, temperature, num_threads=config.num_threads, label=f"from {moment}")
        for moment, rival in rivals.items()
    )


class HackingGuard:
    """Has the models that draw the completions of iterations complete held-out prompts, too, where ``settings`` guard
    against reward hacking."""

    def __init__(self, settings: OnPolicySettings, backend: BackendConfig, judge: Judge) -> None:
        self._settings, self._guard = settings, settings.guards.reward_hacking
        if self._guard is None:
            return
        prompts = import_prompts(self._guard.prompts, label="held out").data
        own = judge if self._guard.reward is None else judge_of(self._guard.reward)
        self._known = settings.sampling.model_copy(update={"temperature": 0.0}), backend, prompts, own
        self._watch = HackingWatch(self._guard)

    @property
    def best(self) -> ContentId | None:
        """The model with the highest held-out reward so far, if any was evaluated."""
        return None if self._guard is None else self._watch.best

    def look(self, number: int, model: ContentId, scores: Scores, mean_reward: float) -> None:
        """At iteration ``number`` (from 0), which is to train ``model`` on completions with these rewards. Raises
        `Fatal` with the evidence where the training reward is hacked."""
        if self._guard is None or number % self._guard.every:
            return
        report = evaluate_held_out(*self._known, model, f"held out, iteration {number + 1}")
        if is_placeholder(report.scores) or is_placeholder(scores.scores):  # their zeros are evidence of nothing
            return
        found = PolicyRewards(number + 1, model, mean_reward, report.mean_reward)
        self._watch.note(found, is_stored=self._settings.stores_all_models and current_keeping() is None)


def check_guards(settings: OnPolicySettings, checkpoint: Checkpoint, label: str) -> None:
    """Raises Fatal where an update that was cached is past a bound that it was not made under; a plan says so."""
    try:
        settings.guards.check_done(checkpoint.summary, label.capitalize())
    except Fatal as error:
        if current_dry_run() is None:
            raise
        dry_run_remark(f"the run ends here: {error}")
