"""The stages of online learning: a policy is served to live traffic, and what that has finished becomes a batch."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_core.agents.live import OnlineState, with_retries
from rollout_core.agents.live_policy import LivePolicy
from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import run_async
from rollout_core.config import LearnOnlineConfig
from rollout_core.objects.local_trees import forget_local_tree
from rollout_core.objects.records import AgentRollouts, AgentSource, Record
from rollout_core.promotion.history import Change, change_latest
from rollout_core.store import LLM, NamedResources
from tasks.agents import sessions
from tasks.runtime import connections, events
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, retry, stage

NOT_HELD_OUT = "nothing is held out"
"""Why a model became the latest that nothing was compared with."""

_live = LivePolicy(sessions, connections.open_store, connections.cache_folder, stage_logger)


class ServedModel(Record):
    """A model that answers live agents."""

    model: ContentId
    url: str


class LiveBatch(Record):
    """What is to be learnt from."""

    rollouts: AgentRollouts | None
    """None: the time was up before there was enough."""


@stage(version=1, cached=False, time="agents")
def serve_policy(
    model: ContentId,
    config: LearnOnlineConfig,
    source: AgentSource | None,
    *,
    promoted: bool = False,
    label: str = "",
) -> ServedModel:
    """Have a model answer live agents, without their noticing, and publish where they find it as the resource ``llm``;
    with ``promoted`` the model itself too, under the name of `[promotion]`."""
    objects = current_stage().objects
    url = run_async(_live.serve(objects, config, source, model))
    resources: NamedResources = {}
    if promoted:
        # With held-out tasks `promote` has done so, with its evidence.
        change = Change("promote", config.promotion.resource, model, f"flow run {current_stage().run_id}", NOT_HELD_OUT)
        run_async(with_retries(lambda: change_latest(_live.store, objects, change)))
        events.emit(events.Promoted(resource=change.resource, model=model, reason=NOT_HELD_OUT))
        resources[config.promotion.resource] = LLM(endpoint="", model=model, sampling_parameters={})
    run_async(_live.publish(config, resources))
    return ServedModel(model=model, url=url)


@stage(version=1, cached=False, time="agents")
def take_live_batch(
    model: ContentId,
    config: LearnOnlineConfig,
    source: AgentSource | None,
    *,
    seconds: float | None = None,
    label: str = "",
) -> LiveBatch:
    """Wait until live traffic has finished enough rollouts to learn from, and note which, with the content of their
    spans; from then on they are the run's batch until it is concluded. None after ``seconds`` without."""
    objects = current_stage().objects
    # After a try in which the engine failed it is loaded again.
    run_async(_live.serve(objects, config, source, model))
    rollouts = run_async(_live.next_batch(objects, config, model, seconds))
    if rollouts is not None:
        left_out = _live.state.left_out
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "none"
        stage_logger().info("%d live rollouts to learn from; left out: %s", rollouts.num_rollouts, reasons)
    return LiveBatch(rollouts=rollouts)


def begin_online(config: LearnOnlineConfig, start: ContentId) -> OnlineState[AgentRollouts]:
    """How far the run of this name is; what it finds is read from there. Raises ConfigError where it began with
    another model."""
    objects = connections.objects()
    state = retry(lambda: OnlineState[AgentRollouts].begin(objects, _ref(config), config.run.name, start))
    _live.begin(state, lambda: save_online(config, state))
    return state


def save_online(config: LearnOnlineConfig, state: OnlineState[AgentRollouts]) -> None:
    """Note how far the run is."""
    retry(lambda: state.save(connections.objects(), _ref(config)))


def _ref(config: LearnOnlineConfig) -> str:
    return f"learn-online/{config.run.name}"


def forget_models(models: Iterable[ContentId]) -> None:
    """Take models that answer no more out of this machine's cache, which would else grow with every update. Who needs
    one fetches it again."""
    for model in models:
        forget_local_tree(model, connections.cache_folder())


def close_live() -> None:
    """Serve nothing more to live traffic: runners end first, calls under way get a few seconds."""
    _live.close()
