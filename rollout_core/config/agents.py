"""Settings of agents, of the runners that they run on, and of the runs that learn from what they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from rollout_core.config.base import (
    SECRET_NAME,
    Address,
    DatasetSource,
    JsonlDataset,
    ModelSource,
    RunInfo,
    Settings,
)
from rollout_core.config.experience import ImportanceCorrection
from rollout_core.config.inference import SCHEDULER_ADDRESS, EndpointAddress, EngineConfig, SamplingParams, VLLMBackend
from rollout_core.config.on_policy import AdvantageSettings, GRPOSettings, OnPolicySettings, PPOSettings
from rollout_core.config.promotion import PromotionConfig
from rollout_core.config.runs import Run, TrainingRun

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class AgentConfig(Settings):
    """A program that works on tasks and calls a model."""

    function: str = Field(pattern=r"^[^:]+:[A-Za-z_]\w*$")
    """``path/to/agent.py:name`` or ``package.module:name`` of a LitAgent: a function decorated with ``@rollout``, or an
    instance."""
    timeout_seconds: float | None = Field(default=600.0, gt=0)
    """Longest time of an attempt."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts at a task, where earlier ones fail, run out of time, or lose their runner."""
    form: Literal["trajectory", "transition"] = "trajectory"
    """Whether turns that continue each other are one training sample, or each turn is one."""
    tool_parser: Literal["hermes"] | None = "hermes"
    """How the model writes tool calls; None: what it writes is text."""

    def cache_identity(self) -> Any:
        """What an attempt depends on; the agent's code enters by its content."""
        return {
            "timeout_seconds": self.timeout_seconds,
            "max_attempts": self.max_attempts,
            "tool_parser": self.tool_parser,
        }


class DaskRunnersConfig(Settings):
    """A Dask cluster whose workers have agents work: one process of runners on each, whichever come and go."""

    address: Address = Field(pattern=SCHEDULER_ADDRESS)
    """Of the running scheduler, such as ``tcp://scheduler:8786``, or ``tls://...``."""


class RunnersConfig(Settings):
    """Who works on the tasks. Changes speed only."""

    where: Literal["processes", "threads", "dask", "elsewhere"] = "processes"
    """``processes`` of this machine; ``threads`` of the flow's own process; processes of the workers of a ``dask``
    cluster; or only those that connect from ``elsewhere`` (`rollout agent work`), which may join in any case."""
    dask: DaskRunnersConfig | None = None
    """The cluster, for ``where = "dask"``."""
    count: int = Field(default=2, ge=1)
    """Processes of this machine."""
    concurrency: int = Field(default=8, ge=1)
    """Tasks that each process (on Dask: of each worker), or this one's threads, work on at a time."""
    host: str = "127.0.0.1"
    """Where store and model listen for runners; other than on loopback only with an ``api_key``."""
    public_host: str | None = None
    """This machine's name or address as runners elsewhere see it; default: ``host``."""
    port: int = Field(default=0, ge=0, lt=65536)
    """Port of the store; 0: any free one."""
    model_port: int = Field(default=0, ge=0, lt=65536)
    """Port of the model; 0: any free one."""
    api_key: str | None = Field(default=None, pattern=SECRET_NAME)
    """NAME of the secret that runners elsewhere show: ``ROLLOUT_SECRET_<NAME>`` in the worker's environment, where
    ``ROLLOUT_SECRETS`` must list it; so too in those of Dask's workers, for it never travels with a task."""
    max_restarts: int = Field(default=3, ge=0)
    """How often in a row a runner process that died is replaced before the run fails."""
    worker_timeout_seconds: float = Field(default=60.0, ge=3)
    """A worker that sent no heartbeat for so long counts as dead, and its tasks are tried again."""
    wait_seconds: float = Field(default=600.0, gt=0)
    """A run fails that has had tasks, but no runner at all, for so long."""

    @model_validator(mode="after")
    def _keyed_beyond_this_machine(self) -> RunnersConfig:
        if self.api_key is None and self.host not in LOOPBACK:
            raise ValueError(f"host is {self.host!r}, beyond this machine, and there is no api_key; name a secret")
        if self.where == "elsewhere" and self.api_key is None:
            raise ValueError("runners from elsewhere need to know a key; name a secret as api_key")
        if (self.where == "dask") != (self.dask is not None):
            raise ValueError(
                'runners on a Dask cluster need both where = "dask" and its address as [runners.dask]; got '
                f'where = "{self.where}" and {"no" if self.dask is None else "an"} address'
            )
        if self.dask is not None:
            self._check_dask(self.dask.address)
        if self.where == "elsewhere" and self.worker_timeout_seconds < 30:
            raise ValueError(
                f"worker_timeout_seconds is {self.worker_timeout_seconds}, and runners from elsewhere send a heartbeat "
                "every 10 s; give at least 30"
            )
        if self.host in ("0.0.0.0", "::") and self.public_host is None:
            raise ValueError(f"host is {self.host!r}, which is no address to connect to; give public_host")
        if self.port and self.port == self.model_port:
            raise ValueError(f"port and model_port are both {self.port}; store and model listen on one each")
        if self.public_host is not None and not self.model_port:
            raise ValueError("public_host needs a model_port that runners elsewhere reach")
        return self

    def _check_dask(self, address: str) -> None:
        if self.api_key is None:
            raise ValueError("runners on Dask's workers need to know a key; name a secret as api_key")
        if self.host in LOOPBACK and urlsplit(address).hostname not in LOOPBACK:
            raise ValueError(
                f"host is {self.host!r}, which Dask's workers at {address} do not reach; give a host, such as 0.0.0.0 "
                "with a public_host"
            )

    def cache_identity(self) -> Any:
        return None


def _refuse_what_prompts_have(settings: AdvantageSettings) -> None:
    if settings.guards.reward_hacking is not None:
        raise ValueError("guards.reward_hacking completes held-out prompts, and agents have tasks; leave it out")
    if settings.curriculum is not None:
        raise ValueError("curriculum orders prompts, and agents have tasks; leave it out")
    if settings.replay is not None:
        raise ValueError("replay is of completions of prompts, which agents' rollouts are not; leave it out")
    if settings.turn_credit is not None:
        raise ValueError('credit = "turn" is of the episodes of an [environment], and agents have none; leave it out')


class AgentGRPO(GRPOSettings):
    """`[algorithm] kind = "grpo"`. ``prompts`` are the tasks: rows of any keys, each given to the agent as it is."""

    kind: Literal["grpo"] = "grpo"
    base_model: ModelSource
    """The model to train, which is also the reference of the KL penalty."""
    failed: Literal["stop", "leave_out"] = "leave_out"
    async_depth: Literal[0] = 0
    """Agents' rollouts are not drawn ahead of training."""
    partial_rollouts: None = None
    """Nor are they cut."""
    state_every: Literal[1] = 1
    """All training states are stored."""

    @model_validator(mode="before")
    @classmethod
    def _of_whole_rollouts(cls, data: Any) -> Any:
        loss = data.get("loss") if isinstance(data, Mapping) else None
        if loss in ("gkd", "online_dpo"):
            raise ValueError(f'"{loss}" is of single completions of prompts, which agents\' rollouts are not')
        return data

    @model_validator(mode="after")
    def _rollouts_are_not_drawn_again(self) -> AgentGRPO:
        _refuse_what_prompts_have(self)
        if self.reward_normalization == "each":
            raise ValueError("agents' rollouts have one reward each; leave reward_normalization out")
        if self.dynamic_sampling is not None:
            raise ValueError(
                "dynamic_sampling draws completions of prompts again, and agents' rollouts are not; leave it out"
            )
        return self


class AgentPPO(PPOSettings):
    """`[algorithm] kind = "ppo"`. ``prompts`` are the tasks: rows of any keys, each given to the agent as it is."""

    kind: Literal["ppo"] = "ppo"
    base_model: ModelSource
    """The model to train, which is also the reference of the KL penalty."""
    failed: Literal["stop", "leave_out"] = "leave_out"
    async_depth: Literal[0] = 0
    """Agents' rollouts are not drawn ahead of training."""
    partial_rollouts: None = None
    """Nor are they cut."""
    state_every: Literal[1] = 1
    """All training states are stored."""

    @model_validator(mode="after")
    def _no_held_out_prompts(self) -> AgentPPO:
        _refuse_what_prompts_have(self)
        return self


class AgentEvaluation(Settings):
    """Held-out tasks that decide whether a checkpoint is better."""

    tasks: DatasetSource
    """Held-out tasks."""
    sampling: SamplingParams = SamplingParams(temperature=0.0, max_tokens=256)
    """How the model answers in them."""


class TrainAgentConfig(TrainingRun):
    """`rollout agent train`."""

    run: RunInfo = RunInfo(name="agent")
    agent: AgentConfig
    algorithm: AgentGRPO | AgentPPO
    """How the model learns, and from which tasks."""
    backend: EngineConfig = VLLMBackend()
    """What serves the model that the agent calls."""
    runners: RunnersConfig = RunnersConfig()
    evaluation: AgentEvaluation | None = None
    promotion: PromotionConfig = PromotionConfig(enabled=False)
    """For runs with an ``evaluation``."""
    report_dir: Address = "data/agent-report"
    """Folder of the report: a page with curves, and traces drawn as trees."""

    @model_validator(mode="after")
    def _promoted_by_evaluation(self) -> TrainAgentConfig:
        self.promotion.refuse_guards()
        if self.promotion.enabled and self.evaluation is None:
            raise ValueError("promotion is enabled, but nothing is held out to judge by; give an [evaluation]")
        return self


class LiveTraffic(Settings):
    """`[live]`: which rollouts of live traffic are learnt from, and when."""

    min_rollouts: int = Field(default=64, ge=1)
    """This many rollouts that can be learnt from make an update."""
    max_rollouts: int | None = Field(default=None, ge=1)
    """The most of an update; of more the latest are taken. Default: four times ``min_rollouts``."""
    max_staleness: int = Field(default=1, ge=0)
    """Samples of weights more than this many promotions back are left out."""
    reward_patience_seconds: float = Field(default=300.0, ge=0)
    """So long after its end a rollout may get its reward, or others of equal input to be compared with."""
    poll_seconds: float = Field(default=5.0, gt=0)
    """Between looks for ended rollouts."""

    @model_validator(mode="after")
    def _enough_for_an_update(self) -> LiveTraffic:
        if self.max_rollouts is not None and self.max_rollouts < self.min_rollouts:
            raise ValueError(f"max_rollouts is {self.max_rollouts}, fewer than min_rollouts, {self.min_rollouts}")
        return self

    def cache_identity(self) -> Any:
        return None


LIVE = JsonlDataset(path="live")


def _check_online(settings: OnPolicySettings) -> None:
    if settings.prompts != LIVE:
        raise ValueError("what is learnt from are live rollouts; leave out prompts")
    for name in ("iterations", "prompts_per_iteration"):
        if getattr(settings, name) != type(settings).model_fields[name].default:
            raise ValueError(f"{name} has no effect on live rollouts, see [live] and max_updates; leave it out")
    if settings.optimizer.schedule != "constant":
        raise ValueError(f"optimizer.schedule is {settings.optimizer.schedule!r}, but nobody knows how many updates")


class OnlineGRPO(AgentGRPO):
    """`[algorithm] kind = "grpo"` of online learning: live rollouts of equal input are compared. What says which
    prompts an iteration takes has no effect."""

    prompts: DatasetSource = LIVE
    """Not to be given."""
    correction: ImportanceCorrection | None = ImportanceCorrection()
    """Old log-probabilities are then the trainer's own, and tokens weighed by how likely the engine drew them. On by
    default: a rollout may end under newer weights than it began with."""

    @model_validator(mode="after")
    def _learns_from_live_rollouts(self) -> OnlineGRPO:
        _check_online(self)
        return self


class OnlinePPO(AgentPPO):
    """`[algorithm] kind = "ppo"` of online learning. What says which prompts an iteration takes has no effect."""

    prompts: DatasetSource = LIVE
    """Not to be given."""
    correction: ImportanceCorrection | None = ImportanceCorrection()
    """Old log-probabilities are then the trainer's own, and tokens weighed by how likely the engine drew them. On by
    default: a rollout may end under newer weights than it began with."""

    @model_validator(mode="after")
    def _learns_from_live_rollouts(self) -> OnlinePPO:
        _check_online(self)
        return self


class OnlineEvaluation(Settings):
    """Held-out tasks that decide whether new weights answer. The agent works on them with the sampling of live calls,
    because the new weights answer those too while they are tried: there is one engine."""

    tasks: DatasetSource
    """Held-out tasks."""


class LearnOnlineConfig(TrainingRun):
    """`rollout agent online`."""

    run: RunInfo = RunInfo(name="online")
    algorithm: OnlineGRPO | OnlinePPO
    """How the model learns, from which tasks."""
    live: LiveTraffic = LiveTraffic()
    form: Literal["trajectory", "transition"] = "trajectory"
    """Whether turns of a rollout that continue each other are one training sample, or each turn is one."""
    tool_parser: Literal["hermes"] | None = "hermes"
    """How the model writes tool calls; None: what it writes is text."""
    agent: AgentConfig | None = None
    """What works on the held-out tasks, and with ``work_live`` on live ones."""
    work_live: bool = False
    """Whether runners of this run work on live rollouts as well. Otherwise the live service has runners of its own."""
    backend: EngineConfig = VLLMBackend()
    """What serves the model that live agents call."""
    runners: RunnersConfig = RunnersConfig()
    """``host``, ``model_port`` and ``api_key`` are where live agents find the model."""
    evaluation: OnlineEvaluation | None = None
    """Without it every update is promoted."""
    promotion: PromotionConfig = PromotionConfig()
    max_updates: int | None = Field(default=None, ge=1)
    """After so many, over all runs of this name, the run ends; default: never."""
    max_hours: float | None = Field(default=None, gt=0)
    """After so long without an update under way the run ends; default: never."""
    report_dir: Address = "data/online-report"
    """Folder of the report."""

    @model_validator(mode="after")
    def _served_where_agents_find_it(self) -> LearnOnlineConfig:
        if not self.runners.model_port:
            raise ValueError("live agents must find the model after a restart; give runners.model_port a fixed port")
        if self.agent is None and (self.evaluation is not None or self.work_live):
            why = "work_live" if self.work_live else "an evaluation"
            raise ValueError(f"{why} needs runners that know what to do; give an [agent]")
        if self.agent is not None and (self.evaluation is None and not self.work_live):
            raise ValueError("an agent is given, but no work for it: give held-out tasks, or work_live")
        if self.agent is not None and (self.agent.form, self.agent.tool_parser) != (self.form, self.tool_parser):
            raise ValueError("agent.form and agent.tool_parser differ from those of the run; give both alike")
        group = self.algorithm.group_size
        if (self.live.max_rollouts or group) < group:
            raise ValueError(
                f"live.max_rollouts is {self.live.max_rollouts}, fewer than the {group} rollouts of equal input that "
                "are compared (algorithm.samples_per_prompt)"
            )
        self.promotion.refuse_guards()
        if not self.promotion.enabled:
            raise ValueError("promotion is switched off, but online learning serves what it promotes; leave that out")
        if self.promotion.approval == "person":
            raise ValueError(
                'promotion.approval is "person", but online learning uses what it promotes and waits for nobody; '
                "leave that out"
            )
        return self


class TemplateSource(Settings):
    """`[template]`: the prompt to begin with."""

    name: str = Field(default="prompt", min_length=1)
    """Name of the resource as which the agent gets it."""
    engine: Literal["f-string", "jinja"] = "f-string"
    """Syntax of its placeholders."""
    text: str | None = Field(default=None, min_length=1)
    """The template itself."""
    path: Address | None = Field(default=None, min_length=1)
    """Path of a file with the text; either this or ``text``."""

    @model_validator(mode="after")
    def _one_template(self) -> TemplateSource:
        if (self.text is None) == (self.path is None):
            raise ValueError("expected either a text or the path of a file")
        if self.name == "llm":
            raise ValueError("the resource 'llm' is the model; give the template another name")
        return self


class CriticConfig(Settings):
    """`[critic]`: the models that criticize and rewrite templates, behind an OpenAI-compatible endpoint."""

    url: EndpointAddress
    """Up to and with the version, such as ``https://api.openai.com/v1``."""
    model: str = Field(min_length=1)
    """Name of the critic there."""
    editor: str | None = Field(default=None, min_length=1)
    """Name of the model that rewrites; default: the critic."""
    api_key: str | None = Field(default=None, pattern=SECRET_NAME)
    """NAME of the secret that is the endpoint's key: ``ROLLOUT_SECRET_<NAME>`` in the worker's environment, where
    ``ROLLOUT_SECRETS`` must list it."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of the critic."""
    max_asks: int = Field(default=3, ge=1)
    """How often an answer that cannot be used, or a call that fails, is asked for."""
    timeout_seconds: float = Field(default=300.0, gt=0)
    """Longest wait for an answer."""

    def cache_identity(self) -> Any:
        return {
            "url": self.url,
            "model": self.model,
            "editor": self.editor or self.model,
            "temperature": self.temperature,
            "max_asks": self.max_asks,
        }


class PromptSearch(Settings):
    """`[search]`: a beam search over templates."""

    rounds: int = Field(default=3, ge=1)
    """Rounds of critique and edit."""
    beam_width: int = Field(default=4, ge=1)
    """Templates that a round leaves."""
    branch_factor: int = Field(default=4, ge=1)
    """Rewritings of each."""
    gradient_batch_size: int = Field(default=4, ge=1)
    """Tasks that a critique is made from."""
    val_batch_size: int = Field(default=16, ge=1)
    """Tasks that the templates of a round are compared on."""


class TunePromptConfig(Run):
    """`rollout agent tune`."""

    run: RunInfo = RunInfo(name="prompt")
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of all random numbers of the run."""
    agent: AgentConfig
    model: ModelSource
    """Behind the agent."""
    template: TemplateSource
    tasks: DatasetSource
    """Rows of any keys, each given to the agent as it is, to criticize templates by and to compare them on."""
    sampling: SamplingParams = SamplingParams(temperature=0.0, max_tokens=256)
    """Of the agent's calls on these tasks."""
    evaluation: AgentEvaluation
    """Held-out tasks, which the first and the best template work on: no choice of the search is made by them."""
    critic: CriticConfig
    search: PromptSearch = PromptSearch()
    backend: EngineConfig = VLLMBackend()
    """What serves the model that the agent calls."""
    runners: RunnersConfig = RunnersConfig()
    promote: bool = True
    """Publish the best template in the store's latest resources if its held-out reward is higher than the first's."""
    report_dir: Address = "data/prompt-report"
    """Folder of the report, and of the best template as ``best-template.txt``."""
