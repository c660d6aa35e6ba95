"""Whole runs: the content of a TOML file, the parameters of a flow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field, WrapValidator, model_validator

from rollout_core.base.determinism import Numerics, probe_device
from rollout_core.base.ids import is_content_id
from rollout_core.config.base import (
    SCHEMA_VERSION,
    Address,
    Columns,
    DatasetSource,
    EnvironmentRows,
    FilesDataset,
    ModelSource,
    RunCost,
    RunInfo,
    Settings,
    StageTimeouts,
    StoredDataset,
    identity,
)
from rollout_core.config.environments import AnyEnvironment
from rollout_core.config.inference import (
    BackendConfig,
    EndpointModel,
    EngineConfig,
    OpenAIBackend,
    PaidInference,
    PlacementConfig,
    SamplingParams,
    VLLMBackend,
    WorkersConfig,
)
from rollout_core.config.learning import (
    AnyPairSettings,
    DPOSettings,
    IPOSettings,
    KTOSettings,
    LearnerSettings,
    ORPOSettings,
    ReferencedSettings,
    RewardModelSettings,
    SFTSettings,
    SimPOSettings,
)
from rollout_core.config.lm_eval import AnySuite
from rollout_core.config.on_policy import (
    AnyGroupSettings,
    GKDSettings,
    GRPOSettings,
    OnlineDPOSettings,
    OnPolicySettings,
    PPOSettings,
    RLOOSettings,
)
from rollout_core.config.promotion import PromotionConfig
from rollout_core.config.rewards import ExactMatchReward, RewardSpec
from rollout_core.config.training_suites import SuitesConfig, TrainingSuite
from rollout_core.config.variants import reading

AlgorithmT = TypeVar("AlgorithmT", bound=LearnerSettings)


class SFTAlgorithm(SFTSettings):
    """`[algorithm] kind = "sft"`."""

    kind: Literal["sft"] = "sft"
    base_model: ModelSource
    """The model to train."""


def _check_parts(settings: OnPolicySettings, reward_kind: str) -> None:
    """Raises ValueError where parts of a reward are to be compared and it has none."""
    if settings.scores_parts and reward_kind != "composite":
        raise ValueError(
            f'reward_normalization = "each" needs the parts of a "composite" reward; this one is "{reward_kind}"'
        )


class PolicyAlgorithm(OnPolicySettings):
    """What `[algorithm]` has in addition where a policy learns from its own completions."""

    base_model: ModelSource
    """The model to train, which is also the reference of the KL penalty."""
    reward: RewardSpec = ExactMatchReward()
    """What a completion earns."""

    def cache_identity(self) -> Any:
        # With the default reward, which keys have had in them: what another one says is in the scores.
        return {**super().cache_identity(), "kind": self.family, "reward": identity(ExactMatchReward())}

    @model_validator(mode="after")
    def _a_reward_of_parts(self) -> PolicyAlgorithm:
        _check_parts(self, self.reward.kind)
        return self


class PPOAlgorithm(PPOSettings, PolicyAlgorithm):
    """`[algorithm] kind = "ppo"`."""

    kind: Literal["ppo"] = "ppo"


class GRPOAlgorithm(GRPOSettings, PolicyAlgorithm):
    """`[algorithm] kind = "grpo"`."""

    kind: Literal["grpo"] = "grpo"


class RLOOAlgorithm(RLOOSettings, PolicyAlgorithm):
    """`[algorithm] kind = "rloo"`."""


class GKDAlgorithm(GKDSettings, PolicyAlgorithm):
    """`[algorithm] kind = "gkd"`."""


class OnlineDPOAlgorithm(OnlineDPOSettings, PolicyAlgorithm):
    """`[algorithm] kind = "online_dpo"`."""


GroupAlgorithm = Annotated[
    GRPOAlgorithm | RLOOAlgorithm | GKDAlgorithm | OnlineDPOAlgorithm,
    WrapValidator(reading(GRPOAlgorithm, RLOOAlgorithm, GKDAlgorithm, OnlineDPOAlgorithm)),
]
"""`[algorithm]` of the family of GRPO."""


class RewardModelAlgorithm(RewardModelSettings):
    """`[algorithm] kind = "rm"`."""

    kind: Literal["rm"] = "rm"
    base_model: ModelSource
    """A causal language model, whose trunk gets a new head, or a reward model to train further."""


class ReferencedAlgorithm(ReferencedSettings):
    """What learners share that hold a model close to a reference."""

    base_model: ModelSource
    """The model to train."""
    reference: ModelSource | None = None
    """Default: the base model."""

    @model_validator(mode="after")
    def _a_reference_is_for_losses_that_have_one(self) -> ReferencedAlgorithm:
        if self.reference is not None and not self.needs_reference:
            raise ValueError("a reference is given, but this loss compares the policy with none; leave it out")
        return self


class DPOAlgorithm(DPOSettings, ReferencedAlgorithm):
    """`[algorithm] kind = "dpo"`."""


class ORPOAlgorithm(ORPOSettings, ReferencedAlgorithm):
    """`[algorithm] kind = "orpo"`."""


class SimPOAlgorithm(SimPOSettings, ReferencedAlgorithm):
    """`[algorithm] kind = "simpo"`."""


PairAlgorithm = Annotated[
    DPOAlgorithm | ORPOAlgorithm | SimPOAlgorithm, WrapValidator(reading(DPOAlgorithm, ORPOAlgorithm, SimPOAlgorithm))
]
"""`[algorithm]` of the family of DPO."""


class IPOAlgorithm(IPOSettings, ReferencedAlgorithm):
    """`[algorithm] kind = "ipo"`."""


class KTOAlgorithm(KTOSettings, ReferencedAlgorithm):
    """`[algorithm] kind = "kto"`."""


class Run(Settings):
    """What every run has."""

    schema_version: Literal[1] = SCHEMA_VERSION
    """Version of the file format; there is one so far."""
    run: RunInfo = RunInfo()
    cost: RunCost = RunCost()
    timeouts: StageTimeouts = StageTimeouts()
    numerics: Numerics = "native"
    """Arithmetic of the CPU, for the trainer, the engine and all they start. ``native``: the fastest kernels for the
    CPU at hand, another kind of which gives other last bits. ``portable``: the same bytes on every x86-64 machine with
    AVX2, at a price in speed."""

    @model_validator(mode="after")
    def _portable_in_float32(self) -> Run:
        for name, asked in _precisions(self):
            if self.numerics == "portable" and asked in ("bfloat16", "float16") and probe_device() == "cpu":
                raise ValueError(f"{name} is {asked}, but portable numerics hold in float32 on a CPU; change either")
        return self


def _precisions(settings: Settings, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names of all settings that choose a precision, with what they choose."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, Settings):
            yield from _precisions(value, f"{prefix}{name}.")
        elif name in ("dtype", "precision"):
            yield f"{prefix}{name}", value


class TrainingRun(Run):
    """What every run that trains has."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of all random numbers of the run."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the trainer; fixed threads make CPU training repeatable bit for bit. Default: as many as the
    machine has cores, or 1 with portable numerics."""


class TrainConfig(TrainingRun, Generic[AlgorithmT]):
    """A run that trains one model by one algorithm."""

    algorithm: AlgorithmT
    """The algorithm, the model it starts from, and its data."""


class EvaluatedTraining(TrainConfig[AlgorithmT], Generic[AlgorithmT]):
    """A run that trains one model, which may be evaluated by suites."""

    evaluation: SuitesConfig | None = None
    """Suites that are evaluated before and after."""
    backend: EngineConfig | None = None
    """What generates, and answers the questions of suites. Default: vLLM."""

    @property
    def suites(self) -> tuple[TrainingSuite, ...]:
        """Those of ``evaluation``."""
        return () if self.evaluation is None else self.evaluation.suites

    @property
    def engine(self) -> EngineConfig:
        """``backend``, or the default."""
        return self.backend or VLLMBackend()

    @model_validator(mode="after")
    def _evaluated_between_iterations(self) -> EvaluatedTraining[AlgorithmT]:
        if self.evaluation is not None:
            _check_every(self.evaluation, self.algorithm)
        return self


def _check_every(evaluation: SuitesConfig, learner: LearnerSettings) -> None:
    """Raises ValueError where suites are to be evaluated between iterations that there are not, or that overlap."""
    if not isinstance(learner, OnPolicySettings):
        evaluation.refuse_every(f"{learner.family} has no iterations")
    elif learner.async_depth:
        evaluation.refuse_every("with async_depth the engine that would answer draws samples ahead at the same time")
    elif learner.stored_states < learner.iterations and any(entry.watches for entry in evaluation.suites):
        raise ValueError(
            f"a suite selects an iteration or ends training, and with state_every = {learner.state_every} not every "
            "iteration is stored; leave it out"
        )


class PlacedRun(Run):
    """A run whose stages may be placed."""

    placement: PlacementConfig | None = None
    """Where generation, scoring and learning run. Default: in the flow's process."""

    @model_validator(mode="after")
    def _in_the_flows_process(self) -> PlacedRun:
        learners = [value for _, value in self if isinstance(value, OnPolicySettings)]
        if self.placement is not None and self.placement.learning is not None:
            for learner in learners:
                if learner.state_every > 1:
                    raise ValueError(
                        f"placement.learning and state_every = {learner.state_every}: workers have no common place for "
                        "states that are not stored; leave out one of them"
                    )
        if self.placement is not None and any(learner.stored_models < learner.iterations for learner in learners):
            raise ValueError(
                'placement and store_models = "with_states": workers have no common cache for models that are not '
                "stored; leave out one of them"
            )
        if self.placement is not None and any(learner.async_depth for learner in learners):
            raise ValueError("placement and async_depth: stages on workers are not drawn ahead; leave out one of them")
        return self


class TrainSFTConfig(EvaluatedTraining[SFTAlgorithm]):
    """`rollout train sft`."""

    run: RunInfo = RunInfo(name="sft")


class PolicyTraining(EvaluatedTraining[AlgorithmT], PlacedRun, Generic[AlgorithmT]):
    """A run that trains a policy on what it does: completions of prompts, or episodes of an environment."""

    environment: AnyEnvironment | None = None
    """In which each row of ``algorithm.prompts``, of any keys, is the start of episodes, and which rewards them.
    Default: each prompt is completed once, and ``algorithm.reward`` says what that is worth."""
    backend: EngineConfig = VLLMBackend()
    """What generates completions."""

    @model_validator(mode="after")
    def _learns_from_episodes(self) -> PolicyTraining[AlgorithmT]:
        if self.environment is None:
            _refuse_turns(self.algorithm)
            return self
        _refuse_on_workers(self)
        if isinstance(self.algorithm, OnPolicySettings):
            _refuse_what_episodes_lack(self.algorithm)
        return self


def _refuse_turns(settings: Any) -> None:
    """Raises ValueError where credit is to go by the turns of episodes and there are none."""
    if isinstance(settings, OnPolicySettings) and settings.turn_credit is not None:
        raise ValueError('credit = "turn" is of the turns of episodes, and there is no [environment]; leave it out')


def _refuse_on_workers(run: PlacedRun) -> None:
    """Raises ValueError where workers of a cluster are to generate."""
    if run.placement is not None and run.placement.generation is not None:
        raise ValueError("placement.generation: episodes are played in the flow's process; leave it out")


def _refuse_what_episodes_lack(settings: OnPolicySettings) -> None:
    """Raises ValueError for settings of completions of prompts, which episodes of an environment are not."""
    if "reward" in settings.model_fields_set:
        raise ValueError("algorithm.reward: the environment rewards its episodes; leave it out")
    if settings.variant in ("gkd", "online_dpo"):
        raise ValueError(f'algorithm.kind "{settings.variant}" is of single completions of prompts; choose another one')
    if settings.state_every > 1:
        raise ValueError(
            "algorithm.state_every: all training states of a run in an environment are stored; leave it out"
        )
    given = {
        "curriculum": settings.curriculum,
        "partial_rollouts": settings.partial_rollouts,
        "async_depth": settings.async_depth,
        "replay": settings.replaying,
        "dynamic_sampling": settings.redrawing,
        "guards.reward_hacking": settings.guards.reward_hacking,
        "reward_normalization": settings.scores_parts,
    }
    for name, value in given.items():
        if value:
            raise ValueError(f"algorithm.{name} is of completions of prompts, not of episodes; leave it out")


class TrainPPOConfig(PolicyTraining[PPOAlgorithm]):
    """`rollout train ppo`."""

    run: RunInfo = RunInfo(name="ppo")


class TrainGRPOConfig(PolicyTraining[GroupAlgorithm]):
    """`rollout train grpo`."""

    run: RunInfo = RunInfo(name="grpo")


class TrainRMConfig(TrainConfig[RewardModelAlgorithm]):
    """`rollout train rm`."""

    run: RunInfo = RunInfo(name="rm")


class TrainDPOConfig(EvaluatedTraining[PairAlgorithm]):
    """`rollout train dpo`."""

    run: RunInfo = RunInfo(name="dpo")


class TrainIPOConfig(EvaluatedTraining[IPOAlgorithm]):
    """`rollout train ipo`."""

    run: RunInfo = RunInfo(name="ipo")


class TrainKTOConfig(EvaluatedTraining[KTOAlgorithm]):
    """`rollout train kto`."""

    run: RunInfo = RunInfo(name="kto")


class InputGlob(Settings):
    """Prompts to complete."""

    glob: Address = Field(min_length=1)
    """A file, or a pattern with ``*`` or ``?``, of rows that hold ``prompt`` or ``messages``, optional ``id``, more: a
    path, a URL such as ``s3://bucket/prompts/*.jsonl``, or the content id of a file or folder in the object store."""
    format: Literal["jsonl", "parquet"] | None = None
    """Default: what each file's first bytes and name say, as for the ``files`` of a data set."""
    columns: Columns = Field(default_factory=dict)
    """Keys of the rows under other names, as in a data set: ``{prompt = "question"}``."""

    def as_dataset(self) -> DatasetSource:
        """The same rows as those of a data set, of whatever keys."""
        if is_content_id(self.glob):
            return StoredDataset(kind="object", id=self.glob, columns=self.columns)
        return FilesDataset(path=self.glob, columns=self.columns)


class OutputDir(Settings):
    """Where results go; the run id lives there too."""

    dir: Address = Field(min_length=1)
    """A folder, or a URL such as ``s3://bucket/completions``."""
    format: Literal["jsonl", "parquet"] = "jsonl"
    """Of the file ``completions.jsonl`` or ``completions.parquet``."""
    token_ids: bool = False
    """Also write each completion's token ids."""
    logprobs: bool = False
    """Also write the log-probability of each token, in nats."""
    events: bool = False
    """Write a line of JSON to stderr for every sample that finishes, in the process that works on it."""


class BatchSampling(SamplingParams):
    """How tokens are drawn, and how often."""

    n: int = Field(default=1, ge=1)
    """Completions of each prompt; more of them keep those there are."""

    @property
    def params(self) -> SamplingParams:
        """What enters the sample ids: all but ``n``."""
        return SamplingParams.model_validate(self.model_dump(exclude={"n"}))


class FailurePolicy(Settings):
    """What becomes of a run whose samples fail. A failed sample keeps its row in the output, with the reason."""

    max_share: float = Field(default=0.1, ge=0, le=1)
    """The run fails, and writes no output, when more than this share of its samples failed."""


def _refuse_shared_budget(key: str, answering: object) -> None:
    """Raise ValueError for a budget where workers of a cluster generate."""
    if isinstance(answering, PaidInference) and answering.budget is not None:
        raise ValueError(
            f"{key}.budget is kept by one process, and a cluster's workers generate here; give one of both"
        )


class InferBatchConfig(Run):
    """`rollout infer batch`."""

    run: RunInfo = RunInfo(name="batch")
    model: ModelSource
    """The model that completes."""
    sampling: BatchSampling
    input: InputGlob
    output: OutputDir
    workers: WorkersConfig = WorkersConfig()
    placement: PlacementConfig | None = None
    """What `[workers.dask]` says, in the words of the runs that train: shards go where ``generation`` does."""
    failures: FailurePolicy = FailurePolicy()
    backend: BackendConfig = VLLMBackend()
    """What generates completions."""
    environment: AnyEnvironment | None = None
    """What the model acts in: each row of the input begins ``n`` episodes, in place of being completed as often."""

    @model_validator(mode="after")
    def _episodes_of_an_engine(self) -> InferBatchConfig:
        if self.environment is None:
            return self
        if isinstance(self.backend, OpenAIBackend):
            raise ValueError(
                "backend: episodes are continued from token ids, which an endpoint does not give; choose kind vllm or "
                "transformers"
            )
        workers = self.workers.dask is not None or self.workers.count != 1
        refused = {
            "workers: one engine plays all episodes": workers or self.placement is not None,
            "input.format: the first bytes and names of files say it": self.input.format is not None,
            'output.format: episodes are written as "jsonl"': self.output.format != "jsonl",
            "output.events: they are of completions of prompts": self.output.events,
            "environment.start_memory: episodes of a batch begin with no memory": (
                self.environment.start_memory is not None
            ),
        }
        if found := [why for why, is_given in refused.items() if is_given]:
            raise ValueError("; ".join(f"{why}, so leave it out" for why in found))
        return self

    @model_validator(mode="after")
    def _one_cluster(self) -> InferBatchConfig:
        if self.placement is not None and self.placement.generation is None:
            raise ValueError("placement has no table generation, and batch inference only generates; give one")
        if self.placement is not None and (self.workers.dask is not None or self.workers.count != 1):
            raise ValueError("placement and workers.dask or workers.count both say where shards run; give one of them")
        if self.has_budget and self.shard_workers.count > 1:
            raise ValueError("backend.budget has shards come one after another; leave out workers.count")
        if self.shard_workers.dask is not None:
            _refuse_shared_budget("backend", self.backend)
        return self

    @property
    def has_budget(self) -> bool:
        """Whether what generates is an endpoint with a budget."""
        return isinstance(self.backend, OpenAIBackend) and self.backend.budget is not None

    @property
    def shard_workers(self) -> WorkersConfig:
        """``workers``, on the cluster of ``placement`` where that says so."""
        if self.placement is None:
            return self.workers
        return self.workers.model_copy(update={"dask": self.placement.of("generation")})


class EvalConfig(PlacedRun):
    """`rollout eval run`."""

    run: RunInfo = RunInfo(name="eval")
    model: ModelSource | EndpointModel
    """The model that answers: its files, or one at an endpoint."""
    backend: BackendConfig = VLLMBackend()
    """What generates the answers of a model whose files are here."""
    suites: tuple[AnySuite, ...]
    """What it is asked."""

    @model_validator(mode="after")
    def _names_of_their_own(self) -> EvalConfig:
        if not self.suites:
            raise ValueError("suites is empty; give at least one")
        if self.placement is not None and self.placement.generation is not None:
            _refuse_shared_budget("model", self.model)
            _refuse_shared_budget("backend", self.backend)
        names = [suite.name for suite in self.suites]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two suites are named {twice[0]!r}; rename one of them")
        return self


class EvaluationConfig(SuitesConfig):
    """Held-out prompts that decide whether a checkpoint is better, and suites in addition to them."""

    prompts: DatasetSource
    """Held-out prompts."""
    sampling: SamplingParams = SamplingParams(temperature=0.0)
    """How they are completed."""

    @model_validator(mode="after")
    def _prompts_are_held_out(self) -> EvaluationConfig:
        if isinstance(self.prompts, EnvironmentRows) and self.prompts.split != "eval":
            raise ValueError('prompts: rows of split = "train" are learned from; held-out ones are of split = "eval"')
        return self


class NightlyConfig(TrainingRun, PlacedRun):
    """SFT, then PPO or GRPO iterations or DPO, evaluation before and after, promotion, report."""

    run: RunInfo = RunInfo(name="nightly")
    model: ModelSource
    """The model that the night starts from."""
    reward: RewardSpec = ExactMatchReward()
    """What held-out completions are worth, and those of training where there is no ``rm``."""
    environment: AnyEnvironment | None = None
    """In which the rows of ppo's or grpo's prompts, and the held-out ones, are starts of episodes, of any keys, and
    which rewards them. Default: each prompt is completed once."""
    backend: EngineConfig = VLLMBackend()
    """What generates completions."""
    sft: SFTSettings
    """Supervised fine-tuning, which comes first."""
    rm: RewardModelSettings | None = None
    """A reward model, trained on pairs from the fine-tuned model, that ppo or grpo is rewarded by."""
    ppo: PPOSettings | None = None
    """Learning on by PPO."""
    grpo: AnyGroupSettings | None = None
    """Learning on by GRPO, or as its ``kind`` says."""
    dpo: AnyPairSettings | None = None
    """Give one of ppo, grpo and dpo. The reference is the fine-tuned model."""
    evaluation: EvaluationConfig
    """Held-out evaluation before, between and after."""
    promotion: PromotionConfig = PromotionConfig()
    report_dir: str = "data/report"
    """Folder of the report: an HTML page and the curves as PNG."""

    @model_validator(mode="after")
    def _one_policy_algorithm(self) -> NightlyConfig:
        given = [name for name in ("ppo", "grpo", "dpo") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of the tables ppo, grpo and dpo; got {' and '.join(given) or 'none'}")
        if self.rm is not None and self.dpo is not None:
            raise ValueError("the table rm is for ppo and grpo; dpo learns from pairs itself")
        if self.grpo is not None and self.environment is None:
            _check_parts(self.grpo, "model" if self.rm is not None else self.reward.kind)
        _check_every(self.evaluation, self.policy)
        return self

    @model_validator(mode="after")
    def _learns_from_episodes(self) -> NightlyConfig:
        if self.environment is None:
            _refuse_turns(self.policy)
            return self
        settings = self.ppo or self.grpo
        for name in ("rm", "dpo"):
            if settings is None or getattr(self, name) is not None:
                raise ValueError(f"environment: ppo or grpo learns in it, without the table {name}; leave one out")
        if "reward" in self.model_fields_set:
            raise ValueError("reward: the environment rewards its episodes; leave it out")
        for number, guard in enumerate(self.promotion.guards):
            if guard.kind != "suite":
                raise ValueError(
                    f'promotion.guards.{number}: kind "{guard.kind}" looks at completions of prompts, and held-out '
                    "ones are episodes; leave it out, or take a suite"
                )
        _refuse_on_workers(self)
        _refuse_what_episodes_lack(settings)
        return self

    @property
    def policy(self) -> PPOSettings | AnyGroupSettings | AnyPairSettings:
        """Settings of what follows SFT."""
        settings = self.ppo or self.grpo or self.dpo
        assert settings is not None, "validated"
        return settings
