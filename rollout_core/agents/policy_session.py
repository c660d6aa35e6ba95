"""A policy while agents use it and it learns: its learner, the weights behind the proxy, its rollouts run and read."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rollout_core.agents.adapters.ended import earned_rewards
from rollout_core.agents.adapters.span_samples import adapt_rollouts
from rollout_core.agents.adapters.token_sequences import SampleForm
from rollout_core.agents.algorithm import (
    AGENT_KIND,
    Algorithm,
    Dataset,
    PatientStore,
    enqueue_once,
    retrying,
    set_aside,
    wait_until_finished,
)
from rollout_core.agents.proxy.proxy_server import LLMProxy
from rollout_core.agents.session import POLICY, RESOURCE, PolicyServer, ServedPolicy
from rollout_core.algorithms.context import UpdateContext
from rollout_core.base.errors import ConfigError, RolloutError
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.settings import locations
from rollout_core.base.stopping import in_thread, is_stopping
from rollout_core.config import (
    EngineConfig,
    JsonlDataset,
    ModelSource,
    OnPolicySettings,
    SamplingParams,
    VLLMBackend,
    identity,
)
from rollout_core.config.agents import AgentGRPO, AgentPPO
from rollout_core.inference.backend import ModelRef
from rollout_core.inference.serving import EngineServer
from rollout_core.inference.training_samples import Adapted, Failed, file_experience
from rollout_core.launch import run_update
from rollout_core.launch.own_loss import with_code
from rollout_core.models.locating import import_model
from rollout_core.objects import Checkpoint, Experience, ObjectStore
from rollout_core.objects.retention.garbage import UPDATE_REFS
from rollout_core.objects.retention.unstored import is_whole, local_model
from rollout_core.store import (
    EnqueueRolloutRequest,
    LightningStore,
    LightningStoreThreaded,
    NamedResources,
    RolloutConfig,
    RolloutMode,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_SECONDS = 10.0


@dataclass(frozen=True)
class PolicyOptions:
    """What GRPO, PPO and OnlineLearning have in common, in addition to the learner's settings.

    Raises ConfigError for a number that cannot be meant.
    """

    name: str
    """Of the run. Started again under its name, with the same store and storage, it resumes where it was; take another
    name when the agent has changed."""
    seed: int = 0
    backend: EngineConfig = field(default_factory=VLLMBackend)
    """What generates."""
    server: PolicyServer | None = None
    """What serves the weights; default: an EngineServer of the backend."""
    storage: str | Path | ObjectStore | None = None
    """URL or folder of the object store; default: ROLLOUT_STORAGE."""
    cache: str | Path | None = None
    """Local folder for models; default: ROLLOUT_CACHE."""
    form: SampleForm = "trajectory"
    """See ``adapt_rollouts``."""
    timeout_seconds: float | None = 600.0
    """Longest time of an attempt."""
    max_attempts: int = 3
    """Of a task whose attempts fail, run out of time, or whose runner dies."""
    num_threads: int | None = None
    """CPU threads of the learner."""

    def __post_init__(self) -> None:
        if not self.name or self.max_attempts < 1 or (self.timeout_seconds is not None and self.timeout_seconds <= 0):
            raise ConfigError(
                f"name is {self.name!r}, max_attempts {self.max_attempts}, timeout_seconds {self.timeout_seconds}; "
                "expected a name, 1 or more, and seconds above 0 or None"
            )

    @property
    def rollout_config(self) -> RolloutConfig:
        """Of every rollout that the algorithm enqueues."""
        return retrying(self.timeout_seconds, self.max_attempts)

    def objects(self) -> ObjectStore:
        """The object store."""
        if isinstance(self.storage, ObjectStore):
            return self.storage
        return ObjectStore.from_url(str(self.storage or locations().storage))


class PolicyLearner:
    """PPO or GRPO on what agents did, one update after the other.

    An update is identified by what it starts from, what it learns from, its settings and its seed. One that was
    interrupted resumes from its last snapshot and ends in the same weights; one that was finished is not computed
    again, as long as the object store has its outcome.

    Args:
        settings: GRPO compares groups of ``samples_per_prompt`` rollouts of a task; PPO takes rollouts one by one.
        model: content id of the model to start from, or where it comes from. It is also the reference.
        objects: where models and states are kept.
        cache: local folder for models.
        base: folder that relative paths of ``model`` start from; default: the working folder.
        num_threads: CPU threads; None: as torch chooses.
        name: what people call the run.
    """

    def __init__(
        self,
        settings: OnPolicySettings,
        model: ContentId | ModelSource,
        objects: ObjectStore,
        *,
        cache: Path,
        base: Path | None = None,
        seed: int = 0,
        num_threads: int | None = None,
        name: str = "agent",
    ) -> None:
        self.settings = with_code(settings, base or Path.cwd())
        self.objects = objects
        self.reference = import_model(model, objects, base or Path.cwd()) if isinstance(model, ModelSource) else model
        self.model: ContentId = self.reference
        """The weights that the next update starts from."""
        self.train_state: ContentId | None = None
        self._cache = cache
        self._seed = seed
        self._num_threads = num_threads
        self._name = name
        self._stop = threading.Event()

    @property
    def model_ref(self) -> ModelRef:
        """The current weights in a local folder, for an engine."""
        return self.ref_of(self.model)

    def ref_of(self, model: ContentId) -> ModelRef:
        """Any model of the object store in a local folder."""
        return ModelRef(model, local_model(self.objects, model, self._cache))

    def stop(self) -> None:
        """Have an update under way keep its state and end with Stopped; from any thread."""
        self._stop.set()

    def update(self, adapted: Adapted, iteration: int) -> Checkpoint:
        """Learn from samples of the current weights, which the outcome replaces. Raises ConfigError where nothing can
        be learnt from them, Stopped after ``stop``."""
        return self.learn(self.file(adapted, failed=self.settings.failed), iteration)

    def file(self, adapted: Adapted, *, failed: Failed) -> Experience:
        """File samples as `learn` takes them. Raises ConfigError where nothing can be learnt from them."""
        return file_experience(self.objects, adapted, failed=failed, group_size=self.settings.group_size)

    def learn(self, experience: Experience, iteration: int) -> Checkpoint:
        """``update`` from filed samples."""
        ref = f"{UPDATE_REFS}{self._key(experience)}"
        checkpoint = self._finished(ref)
        if checkpoint is None:
            checkpoint = self._train(experience, iteration)
            self.objects.set_ref(ref, self.objects.put_json(checkpoint.model_dump(mode="json")))
        else:
            logger.info("Update %d of %s was done before: model %s", iteration + 1, self._name, checkpoint.model.short)
            self.settings.guards.check_done(checkpoint.summary, f"Update {iteration + 1}")
        self.start_from(checkpoint.model, checkpoint.train_state)
        return checkpoint

    def start_from(self, model: ContentId, train_state: ContentId | None) -> None:
        """Have the next update start there."""
        self.model, self.train_state = model, train_state

    def _key(self, experience: Experience) -> ContentId:
        made_from = [self.model, self.train_state, self.reference, experience.model_dump(mode="json")]
        return content_id("agent-update/3", [self.settings.update, *made_from, identity(self.settings), self._seed])

    def _finished(self, ref: str) -> Checkpoint | None:
        """The outcome of an update, if all of it is still there."""
        try:
            found = self.objects.get_ref(ref)
            if found is None:
                return None
            checkpoint = Checkpoint.model_validate(self.objects.get_json(found))
            return checkpoint if is_whole(checkpoint, self.objects, to_load=True) else None
        except RolloutError as error:  # it is made again, with the same outcome
            logger.warning("The noted outcome of an update cannot be read, so it is computed again: %s", error)
            return None

    def _train(self, experience: Experience, iteration: int) -> Checkpoint:
        title = f"{self._name}, update {iteration + 1}"
        # The same in all updates of a run, which draw one curve together.
        series = content_id("series/1", [self._name, self.reference, identity(self.settings), self._seed])
        context = UpdateContext(
            objects=self.objects,
            cache=self._cache,
            key=self._key(experience),
            run_id=series[:26],
            seed=self._seed,
            run_name=self._name,
            series=series,
            base_model=self.reference,
            num_threads=self._num_threads,
            is_stopping=lambda: self._stop.is_set() or is_stopping(),
            on_step=lambda row: logger.info("%s: step %d, loss %.4f", title, row["step"], row.get("loss", 0.0)),
            on_start=lambda first, last: logger.info("%s: from step %d of %d", title, first, last) if first else None,
        )
        inputs = {"model": self.model, "train_state": self.train_state, "reference": self.reference}
        return run_update(
            self.settings.update,
            context,
            settings=self.settings,
            scores=experience.as_scores(),
            samples=experience.samples,
            **inputs,
        )


@dataclass(frozen=True)
class Evaluation:
    """What came of held-out tasks."""

    mean_reward: float
    """Rollouts without a reward count as 0; NaN if none has one."""
    num_rollouts: int
    num_without_reward: int


class PolicySession:
    """A policy while agents use it and it learns."""

    def __init__(
        self,
        options: PolicyOptions,
        learner: PolicyLearner,
        policy: ServedPolicy,
        store: LightningStore,
        initial_resources: NamedResources | None,
    ) -> None:
        self.learner = learner
        self.store = PatientStore(store)
        self.serving: ContentId = learner.model
        """The weights that answer."""
        self._options = options
        self._policy = policy
        self._initial_resources = initial_resources or {}

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are drawn in training."""
        return self.learner.settings.sampling

    async def load(self, model: ContentId, sampling: SamplingParams) -> None:
        """Let other weights answer, drawing as given. Agents' calls wait meanwhile, none fails."""
        await self._policy.load(await to_thread(lambda: self.learner.ref_of(model)), sampling)
        self.serving = model

    async def publish(self) -> str:
        """Store the resources with which agents reach the policy; the id follows from the weights that answer."""
        llm = self._policy.as_resource(self.sampling)
        others = {name: resource for name, resource in self._initial_resources.items() if name != RESOURCE}
        name = f"{self._options.name}-{content_id('agent-resources/1', [self._options.name, self.serving]).short}"
        # Under the same id as before a restart: the proxy's address has changed for those that wait.
        return (await self.store.update_resources(name, {RESOURCE: llm, **others})).resources_id

    async def run_tasks(
        self, tasks: Sequence[tuple[str, Any]], resources_id: str, mode: RolloutMode, metadata: dict[str, Any]
    ) -> list[str]:
        """Have runners work on tasks, given with the ids of their rollouts, and return the ids when all have finished
        and their calls are stored. Those that finished in an earlier run are not run again."""
        config = self._options.rollout_config
        requests = [
            EnqueueRolloutRequest(
                rollout_id=name,
                input=task,
                mode=mode,
                resources_id=resources_id,
                config=config,
                metadata={"kind": AGENT_KIND, **metadata},
            )
            for name, task in tasks
        ]
        ids = await enqueue_once(self.store, requests)
        while True:
            finished = await wait_until_finished(self.store, ids, _LOOK_SECONDS)
            if len(finished) == len(ids):
                break
            logger.info("%s: %d of %d rollouts have finished", self._options.name, len(finished), len(ids))
        await self.flush()
        return ids

    async def flush(self) -> None:
        """Wait until all calls that have ended are stored."""
        await self._policy.proxy.flush()

    async def evaluate(self, dataset: Dataset, resources_id: str, sampling: SamplingParams) -> Evaluation:
        """Have the weights that answer work on each task of ``dataset`` once."""
        parts = ["agent-evaluation/1", self._options.name, self.serving, identity(sampling)]
        tasks = [
            (content_id("agent-rollout/1", [*parts, place, dataset[place]]), dataset[place])
            for place in range(len(dataset))
        ]
        if sampling != self.sampling:
            await self.load(self.serving, sampling)
        try:
            ids = await self.run_tasks(tasks, resources_id, "val", {"run": self._options.name, "model": self.serving})
        finally:
            if sampling != self.sampling:
                await self.load(self.serving, self.sampling)
        rewards = await earned_rewards(self.store, ids)
        mean = math.fsum(rewards) / len(ids) if rewards else math.nan
        return Evaluation(mean, len(ids), len(ids) - len(rewards))

    async def adapt(self, rollout_ids: Sequence[str]) -> Adapted:
        """Samples of the policy's calls."""
        return await adapt_rollouts(
            self.store, self.learner.objects, rollout_ids, form=self._options.form, model=POLICY
        )

    async def learn(self, adapted: Adapted, number: int) -> Checkpoint:
        """An update, in a thread; a run that ends meanwhile has it keep its state."""
        return await to_thread(lambda: self.learner.update(adapted, number), on_cancel=self.learner.stop)


async def to_thread(call: Callable[[], T], *, on_cancel: Callable[[], None] = lambda: None) -> T:
    """The result of a blocking call in another thread, which has ended when this returns, also when it is cancelled."""
    done = threading.Event()

    def work() -> T:
        try:
            return call()
        finally:
            done.set()

    future = asyncio.wrap_future(in_thread(work))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.to_thread(done.wait)
        future.cancel()
        raise


class PolicyAlgorithm(Algorithm):
    """What algorithms share that train a policy of their own."""

    def __init__(self, settings: AgentGRPO | AgentPPO, options: PolicyOptions) -> None:
        self.settings = settings
        self._options = options
        self.checkpoint: Checkpoint | None = None
        """The outcome of the last update; None before the first."""

    def make_learner(self, objects: ObjectStore) -> PolicyLearner:
        """The learner at its start, its model filed in the object store."""
        options = self._options
        return PolicyLearner(
            self.settings,
            self.settings.base_model,
            objects,
            cache=Path(options.cache or locations().cache),
            seed=options.seed,
            num_threads=options.num_threads,
            name=options.name,
        )

    @asynccontextmanager
    async def session(
        self, resume: Callable[[PolicyLearner], None] = lambda learner: None
    ) -> AsyncIterator[PolicySession]:
        """Serve the policy for the length of the block, behind the trainer's proxy or one of its own. ``resume`` may
        have the learner start from later weights."""
        options, store, given = self._options, self.get_store(), self.get_llm_proxy()
        await set_aside(store, options.name)
        learner = await to_thread(lambda: self.make_learner(options.objects()))
        await to_thread(lambda: resume(learner))
        folder = await to_thread(lambda: learner.model_ref)
        # Keys of their own: other users of this machine get no answers, and write no calls into what is learnt from.
        key = None if options.server is not None else secrets.token_urlsafe(24)
        server = options.server or EngineServer(options.backend, name=POLICY, seed=options.seed, api_key=key)
        proxy = given or LLMProxy(store=_for_threads(store), api_key=secrets.token_urlsafe(24))
        policy = ServedPolicy(server, proxy, server_key=key, owns_proxy=given is None)
        try:
            await policy.load(folder, learner.settings.sampling)
            yield PolicySession(options, learner, policy, store, self.get_initial_resources())
        finally:
            await policy.close()


def _for_threads(store: LightningStore) -> LightningStore:
    return store if store.capabilities.get("thread_safe") else LightningStoreThreaded(store)


def policy_settings(
    kind: type[AgentGRPO] | type[AgentPPO],
    model: str | Path | ModelSource | None,
    settings: AgentGRPO | AgentPPO | None,
    *,
    num_rollouts: int,
    lr: float,
    temperature: float,
    max_tokens: int,
    learner: Mapping[str, Any] | None,
    **fields: Any,
) -> AgentGRPO | AgentPPO:
    """Those given, or else settings of a learner whose tasks are those of the trainer, ``num_rollouts`` an update.
    Raises ConfigError for what is missing or wrong."""
    if settings is not None and model is not None:
        raise ConfigError("got a model and settings; settings have a base_model, so leave the model out")
    if settings is not None:
        return settings
    if model is None:
        raise ConfigError("there is no model to train; give a folder, a hub id or a content id, or settings")
    source = model if isinstance(model, ModelSource) else ModelSource(uri=str(model))
    given = {
        "prompts": JsonlDataset(path="train_dataset"),
        "base_model": source,
        "optimizer": {"lr": lr},
        "sampling": SamplingParams(temperature=temperature, max_tokens=max_tokens),
        "minibatch_size": min(8, num_rollouts),
        "gradient_accumulation": -(-num_rollouts // 8),
    }
    try:
        return kind.model_validate({**given, **fields, **(learner or {})})
    except ValueError as error:
        raise ConfigError(f"the learner's settings are wrong: {error}") from error
