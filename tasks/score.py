"""The stages that judge: rewards of completions, the groups that are learned from, held-out evaluation of a model."""

from __future__ import annotations

import statistics

from prefect.runtime import flow_run

from rollout_core.base import traces
from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.ids import ContentId
from rollout_core.config import BackendConfig, Replay, SamplingParams
from rollout_core.config.rewards import RewardSpec
from rollout_core.data import replay
from rollout_core.data.replay import Replayed
from rollout_core.data.samples import decode_completions_blob, decode_samples
from rollout_core.environments.transcripts import file_episodes
from rollout_core.objects.plugin_files import file_plugin
from rollout_core.objects.records import (
    AgentRollouts,
    AgentTasks,
    Completions,
    Divergence,
    EvalReport,
    PromptSet,
    Scores,
    SelectedGroups,
)
from rollout_core.objects.retention.unstored import local_model
from rollout_core.objects.snapshots import RUN_NAME
from rollout_core.rewards import kept, scores as filed_scores
from rollout_core.rewards.scoring import RewardFunction
from tasks.generate import Help, help_inference
from tasks.runtime import artifacts, connections, events
from tasks.runtime.endpoint_costs import judged_so_far
from tasks.runtime.episodes import outcomes_of
from tasks.runtime.generation import generate
from tasks.runtime.journal import Journal, current_journal, stage_logger
from tasks.runtime.placement import shared_with
from tasks.runtime.stage import current_stage, stage

NAMED_FAILURES = 3
"""In the log, of those of a scoring."""


def open_reward(reward: RewardSpec, reward_source: ContentId) -> RewardFunction:
    """`rollout_core.rewards.kept.open_reward` with this stage's connections; what it has to say is logged. Judges count
    in their budget what they took in this run before."""
    function = kept.open_reward(
        reward,
        reward_source,
        objects=current_stage().objects,
        open_store=connections.open_store,
        base=connections.working_folder(),
        models=connections.cache_folder(),
        on_line=lambda line: stage_logger().info("%s", line),
        on_warning=lambda line: stage_logger().warning("%s", line),
    )
    if function.judges:
        judging = judged_so_far(current_journal() or Journal(), current_stage().objects)
        for judges in function.judges:
            judges.spending = judging.of(judges.reward)
    return function


@stage(version=1, optional=("by_part",), time="scoring", place="scoring")
def score_rewards(
    completions: Completions,
    reward: RewardSpec,
    reward_source: ContentId,
    *,
    by_part: bool | None = None,
    label: str = "",
) -> Scores:
    """Score every completion. ``reward_source`` is the content of the reward's code, and no other code is run.

    With ``by_part`` the parts of a weighted sum are filed with it.
    """
    shared = current_stage().key if shared_with() is not None else None
    function = open_reward(reward, reward_source)
    scores = _compute_scores(completions, function, reward_source, by_part=bool(by_part), shared_as=shared)
    filed_scores.record_rewards(current_stage().objects, connections.open_store, completions, scores, reward_source)
    figures = {"mean reward": scores.mean, "std": scores.std, **_without_score(scores)}
    artifacts.figures("rewards", figures, f"Rewards {label}")
    return scores


@stage(version=1)
def select_groups(
    rounds: tuple[Scores, ...],
    samples: tuple[ContentId, ...],
    *,
    group_size: int,
    wanted: int,
    min_spread: float = 0.0,
    label: str = "",
) -> SelectedGroups:
    """The first ``wanted`` groups of completions whose rewards differ by more than ``min_spread``, from all rounds.
    Completions without a score do not count.

    ``samples`` are those of each round; completions of one prompt, ``group_size`` of them, stand side by side.
    """
    selected = filed_scores.select_groups(
        current_stage().objects, rounds, samples, group_size=group_size, wanted=wanted, min_spread=min_spread
    )
    stage_logger().info(
        "%d of %d groups have rewards that differ; %d are learned from",
        selected.num_groups,
        selected.num_drawn,
        selected.num_samples // group_size,
    )
    figures = {"rounds": len(rounds), "groups drawn": selected.num_drawn, "of rewards that differ": selected.num_groups}
    artifacts.figures("groups", figures, f"Groups {label}")
    return selected


@stage(version=2, optional=("buffer",))
def replay_groups(
    scores: Scores,
    samples: ContentId,
    model: ContentId,
    settings: Replay,
    *,
    buffer: ContentId | None,
    number: int,
    group_size: int,
    seed: int,
    algorithm: str,
    label: str = "",
) -> Replayed:
    """Add groups of ``buffer`` to those that ``model`` drew for iteration ``number``, and these to the buffer."""
    run = current_stage()
    drawn = {"buffer": buffer, "number": number, "group_size": group_size, "seed": seed}
    about = {"run_id": run.run_id, "algorithm": algorithm, "meta": {RUN_NAME: flow_run.name or ""}}
    found, ages = replay.replay_groups(run.objects, scores, samples, model, settings, **drawn, **about)
    old = f", {statistics.fmean(ages):.1f} iterations old in the mean" if ages else ""
    stage_logger().info("%s: %d groups are replayed%s", label, len(ages), old)
    return found


@stage(version=1, cached=False, retries=0, time="scoring")
def help_scoring(
    completions: Completions,
    reward: RewardSpec,
    reward_source: ContentId,
    shared_as: ContentId,
    *,
    by_part: bool = False,
    label: str = "",
) -> Help:
    """Score slices of what a `score_rewards` with the key ``shared_as`` has not come to yet."""
    function = open_reward(reward, reward_source)
    done = filed_scores.help_scoring(current_stage().objects, completions, function, shared_as, by_part=by_part)
    stage_logger().info("%d completions scored for another worker", done)
    return Help(num_samples=done)


score_rewards.helped_by(help_scoring)


@stage(version=1, concurrency="engine", time="scoring", place="generation")
def evaluate(
    prompts: PromptSet,
    sampling: SamplingParams,
    backend: BackendConfig,
    reward: RewardSpec,
    reward_source: ContentId,
    *,
    label: str = "",
) -> EvalReport:
    """Mean reward of a model on held-out prompts."""
    function = open_reward(reward, reward_source)
    completions, _, _ = generate(prompts, sampling, backend, mode="test", deterministic=True)
    scores = _compute_scores(completions, function, reward_source)
    stage_logger().info("held-out reward of model %s: %.4f", prompts.model.short, scores.mean)
    row = {"model": prompts.model.short, "prompts": scores.num_samples, "mean reward": round(scores.mean, 4)}
    artifacts.table("evaluation", [{**row, **_without_score(scores)}], f"Held-out evaluation {label}".strip())
    return filed_scores.report_of(completions, scores)


evaluate.helped_by(help_inference)


@stage(version=1, time="scoring")
def evaluate_episodes(episodes: AgentTasks, played: AgentRollouts, *, label: str = "") -> EvalReport:
    """Mean reward of a model in held-out episodes. Raises Fatal where one of them failed in every attempt."""
    outcomes = outcomes_of(episodes, played)
    failed = sum(outcome.reward is None for outcome in outcomes)
    if failed:
        raise Fatal(
            f"{failed} of {len(outcomes)} held-out episodes failed in every attempt, so that models cannot be compared "
            "by them; mend the environment, raise environment.max_attempts, or try them again with run.refresh = true"
        )
    completions, scores, _ = file_episodes(current_stage().objects, played.model, outcomes)
    stage_logger().info("held-out reward of model %s: %.4f", played.model.short, scores.mean)
    row = {"model": played.model.short, "episodes": scores.num_samples, "mean reward": round(scores.mean, 4)}
    artifacts.table("evaluation", [row], f"Held-out evaluation {label}".strip())
    return filed_scores.report_of(completions, scores)


@stage(version=1, time="scoring", place="scoring")
def evaluate_by(report: EvalReport, reward: RewardSpec, reward_source: ContentId, *, label: str = "") -> EvalReport:
    """The evaluation by another reward: its completions are scored, nothing is generated."""
    completions = Completions(
        completions=report.completions,
        samples=report.samples,
        model=report.model,
        num_samples=report.num_samples,
        num_tokens=report.num_tokens,
        finish_reasons={},
    )
    scores = _compute_scores(completions, open_reward(reward, reward_source), reward_source)
    stage_logger().info("reward %s of model %s: %.4f", reward.kind, report.model.short, scores.mean)
    return filed_scores.report_of(completions, scores)


@stage(version=1, concurrency="learner")
def measure_kl(
    report: EvalReport, rival: ContentId, temperature: float, *, num_threads: int | None = None, label: str = ""
) -> Divergence:
    """How far the evaluated model is from ``rival``, on the completions that the evaluation filed."""
    from rollout_core.algorithms.divergence import mean_kl

    objects = current_stage().objects
    model, other = (local_model(objects, one, connections.cache_folder()) for one in (report.model, rival))
    samples = decode_samples(objects.get_bytes(report.samples))
    completions = decode_completions_blob(objects.get_bytes(report.completions))
    prompts = [sample.prompt_token_ids for sample in samples]
    tokens = [row.token_ids for row in completions]
    unmeasured = Divergence(
        model=report.model, rival=rival, num_tokens=report.num_tokens, num_completions=report.num_samples
    )
    try:
        found = mean_kl(model, other, prompts, tokens, temperature=temperature, num_threads=num_threads)
    except ConfigError as error:
        # A latest model from another family is no reason for a run to fail at its end.
        stage_logger().warning("no KL divergence of %s from %s: %s", report.model.short, rival.short, error)
        return unmeasured.model_copy(update={"problem": str(error)})
    stage_logger().info("KL divergence of %s from %s: %.4g nats a token", report.model.short, rival.short, found.exact)
    rows = [{"figure": f"KL ({name})", "nats a token": getattr(found, name)} for name in ("exact", "k1", "k3")]
    artifacts.table("kl", rows, f"KL divergence {label}".strip())
    return unmeasured.model_copy(update=found._asdict())


def _compute_scores(
    completions: Completions,
    reward: RewardFunction,
    reward_source: ContentId,
    *,
    by_part: bool = False,
    shared_as: ContentId | None = None,
) -> Scores:
    """`rollout_core.rewards.scores.compute_scores`; failures are logged and counted."""
    objects = current_stage().objects
    try:
        scores, failures = filed_scores.compute_scores(
            objects, completions, reward, by_part=by_part, shared_as=shared_as
        )
    finally:
        _report_plugins(reward, reward_source)
    if failures:
        named = "; ".join(map(str, failures[:NAMED_FAILURES]))
        stage_logger().warning("%d of %d completions have no score: %s", len(failures), scores.num_samples, named)
        reason = str(failures[0])
        events.emit(events.SamplesSkipped(stage=current_stage().name, samples=len(failures), reason=reason))
    return scores


def _report_plugins(reward: RewardFunction, reward_source: ContentId) -> None:
    """What plugins were started and asked for, and what of it failed, as events, and as spans of the stage; files that
    were edited meanwhile are filed as the reward's."""
    for plugin in reward.plugins:
        figures, name, stage_name = plugin.take_figures(), plugin.manifest.name, current_stage().name
        about = {"plugin": name, "version": plugin.manifest.version, "mode": plugin.manifest.mode.replace("_", "-")}
        for seconds in figures.loaded_seconds:
            events.emit(events.PluginLoaded(**about, seconds=seconds))
        for reload in figures.reloads:
            events.emit(
                events.PluginReloaded(**about, id=reload.code.id, seconds=reload.seconds, problem=reload.problem)
            )
            filed = reward_source, plugin.address, reload.code
            file_plugin(current_stage().objects, *filed, "reward", hot_reloaded=True)
        for error in figures.errors:
            events.emit(events.PluginCallError(plugin=name, stage=stage_name, error=error))
        if figures.calls:
            counted = {"calls": figures.calls, "failed": figures.failed, "slowest_seconds": figures.slowest_seconds}
            events.emit(events.PluginCall(plugin=name, stage=stage_name, seconds=figures.seconds, **counted))
            traces.add_span("plugin_call", figures.seconds, traces.current_traceparent(), plugin=name, **counted)


def _without_score(scores: Scores) -> dict[str, int]:
    """Completions that have none, by why; nothing where there are none."""
    counts = {"reward abstained": scores.num_abstained, "reward failed": scores.num_reward_failed}
    return {why: count for why, count in counts.items() if count}
