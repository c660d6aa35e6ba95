"""What can be known of training before it starts: settings, rows, tokenizer, reward and resources held together."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_core import DISTRIBUTION
from rollout_core.algorithms import plugin_tracker
from rollout_core.base.determinism import num_gpus
from rollout_core.base.errors import ConfigError, near
from rollout_core.base.settings import HOT_RELOAD, hot_reload
from rollout_core.config import (
    BackendConfig,
    DatasetSettings,
    DatasetSource,
    DemonstrationSource,
    EngineConfig,
    EnvironmentRows,
    EvalConfig,
    EvaluatedTraining,
    HeldOutRows,
    KLGuard,
    LearnerSettings,
    ModelSource,
    NightlyConfig,
    OnPolicySettings,
    PlacedRun,
    PolicyAlgorithm,
    PreferenceSettings,
    PromotionConfig,
    PromptsGuard,
    RewardGuard,
    RunInfo,
    ScriptedBackend,
    SequenceConfig,
    SFTSettings,
    TrainConfig,
    TrainingSuite,
)
from rollout_core.config.environments import EnvironmentConfig, PythonEnvironment
from rollout_core.config.judges import JudgeEndpoint, JudgeReward
from rollout_core.config.learning import PluginTracker
from rollout_core.config.optimizers import EIGHT_BITS
from rollout_core.config.promotion import MIN_PROMPTS, Guard, SuiteGuard
from rollout_core.config.rewards import FunctionReward, ModelReward, RewardSpec, plain_rewards
from rollout_core.config.runs import ReferencedAlgorithm
from rollout_core.data.curriculum import check_keys, in_words
from rollout_core.data.datasets import PromptRow, TaskRow
from rollout_core.data.training_data import RowForm, look_at_rows, pair_form, sft_form, unpaired_form
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.conversation import check_turns
from rollout_core.environments.hosts import Offer, look_at, rows_of
from rollout_core.environments.tools.mcp import ask_servers
from rollout_core.environments.tools.toolbox import ToolResources, check_tools
from rollout_core.environments.using import all_schemas
from rollout_core.evaluation.moments import suite_of
from rollout_core.launch.own_loss import check_own_loss, with_code
from rollout_core.models.bounded.inspecting import check_training
from rollout_core.models.facts import (
    check_reference,
    check_reward_model,
    check_teacher,
    is_known_trainable,
    remember_trainable,
)
from rollout_core.models.locating import describe, mark_of_source
from rollout_core.plans.cluster import check_placement
from rollout_core.plans.memory_and_disk import (
    Left,
    Outcome,
    States,
    disk_needs,
    left_behind,
    memory_needs,
    row_tokens,
    state_bytes,
    states_of,
    steps_of_rows,
    stored_of,
    training_of,
)
from rollout_core.plans.plan import Plan, context_limit
from rollout_core.plans.suite_plan import Asked, check_answering, check_suite
from rollout_core.plugins.discovery import find_plugin
from rollout_core.plugins.identity import PluginCode
from rollout_core.rewards.call_forms import CallForm
from rollout_core.rewards.loading import load_reward
from rollout_core.rewards.source_ids import read_source
from rollout_core.store.reachable import Connections

if TYPE_CHECKING:
    from rollout_core.data.tokenized import DataReport


log = logging.getLogger(__name__)

DATA_REPORT = "data report"
RESOURCES = "resources"
"""Facts that are tables of their own."""


@dataclass
class LearnerPlan(Plan):
    """A plan of a run that trains."""

    _counted: dict[str, dict[str, int]] = field(default_factory=dict)
    """By the keys of learners, how many parameters `training_of` takes to have adapters, or to be cut."""
    _forms: dict[str, CallForm] = field(default_factory=dict)
    """How the users' reward functions that were loaded are called, by their names."""
    _unloadable: set[str] = field(default_factory=set)
    """Addresses of environments that are known not to load."""
    _left: Left = field(default_factory=Left)
    """What the learners that were looked at leave on the disk."""
    _outcomes: dict[str, Outcome] = field(default_factory=dict)
    """What stays of them, by the names of their algorithms."""
    run_name: str = ""
    keeps_last: bool = False
    """Whether its run keeps only the last training state."""
    _has_plugins: bool = False

    def done(self) -> dict[str, Any]:
        """As of every plan. With ``--hot-reload`` there is what can be reloaded, where this process finds it."""
        if hot_reload() is not None:
            if not self.violations and not self._has_plugins:
                self.violations.append("--hot-reload: got no plugin; expected a reward of kind 'plugin'")
            if self.placed:
                self.violations.append(
                    "--hot-reload: got [placement]; expected none, as other machines do not see the files of plugins"
                )
        return super().done()

    def learner(self, what: str, settings: LearnerSettings) -> None:
        """What the settings of every learner ask of machine and model is there."""
        self._trackers(what, settings)
        asked = {
            f"optimizer.kind: {EIGHT_BITS}": settings.optimizer.kind == EIGHT_BITS,
            "lora.quantization: nf4": settings.lora is not None and settings.lora.quantization == "nf4",
        }
        if "learning" not in self.placed and not find_spec("bitsandbytes"):
            self.violations += [
                f"{what}.{name} is of bitsandbytes, which is not installed; install {DISTRIBUTION}[{EIGHT_BITS}]"
                for name, is_asked in asked.items()
                if is_asked
            ]
        self._own_loss(what, settings)
        self._processes(what, settings)
        self._layers(what, settings)
        self._architecture(what, settings)

    def _architecture(self, what: str, settings: LearnerSettings) -> None:
        """The trainer can do what the model's architecture asks; of what it is trained into, too."""
        source, facts = self.model_source, self.model_facts
        if source is None or facts is None:
            return
        is_reward_model = settings.family == "rm"
        notes, mark = (self.objects, mark_of_source(source, self.base)) if self.trusts_notes else (None, None)
        if notes is not None and mark is not None and is_known_trainable(notes, mark, is_reward_model=is_reward_model):
            return

        def look() -> None:
            with describe(source, self.base, self.objects) as found:
                check_training(found.folder, is_reward_model=is_reward_model)
            # The files may have been written meanwhile: then nothing was found of those that are there now.
            if notes is not None and mark is not None and mark == mark_of_source(source, self.base):
                self.note(partial(remember_trainable, notes, mark, is_reward_model=is_reward_model))

        self.check(what, look)

    def _layers(self, what: str, settings: LearnerSettings) -> None:
        """The layers that are to have adapters, or to be cut, are there and are counted."""
        source, is_plain = self.model_source, settings.lora is None and not settings.parallel.cuts_matrices
        if is_plain or self.model_facts is None or source is None:
            return
        architecture = _architecture()

        def look() -> dict[str, int]:
            with describe(source, self.base, self.objects) as found:
                if settings.lora is None:
                    return {"cut_parameters": architecture.count_cut(found.folder, settings.parallel)}
                counts = architecture.count_adapted(found.folder, settings.lora)
            if counts.left_out and not settings.lora.target_modules:
                shares = [f"{name} ({number / counts.all:.0%})" for name, number in counts.left_out.items()]
                self.facts["layers without adapters"] = f"{', '.join(shares)} of the parameters; they stay as they are"
            return {"trained_parameters": counts.trained, "quantized_parameters": counts.quantized}

        self._counted[what] = self.check(what, look) or {}

    def _trackers(self, what: str, settings: LearnerSettings) -> None:
        """The software of every tracker is installed, and every plugin starts."""
        wanted = () if "learning" in self.placed else settings.trackers
        for tracker in wanted:
            if isinstance(tracker, PluginTracker):
                self.check(f"{what}.trackers", lambda tracker=tracker: self._tracker_plugin(tracker))
        names = [tracker for tracker in wanted if not isinstance(tracker, PluginTracker)]
        missing = [name for name in names if find_spec(name) is None]
        self.violations += [
            f"{what}.trackers: {name} is not installed; install {DISTRIBUTION}[{name}]" for name in missing
        ]

    def _tracker_plugin(self, tracker: PluginTracker) -> None:
        code = find_plugin(tracker.name, self.base, tracker.path, kind="tracker")
        plugin_tracker.start(code, tracker.config)
        self.facts[f"plugin {code.name}"] = f"{code.manifest.version} in {code.folder}"

    def _own_loss(self, what: str, settings: LearnerSettings) -> None:
        """A loss of the user's own can be loaded and called. What it imports need not be installed on this machine
        where another one learns."""
        if settings.own_loss is None:
            return
        if "learning" in self.placed:
            self.check(f"{what}.loss", lambda: with_code(settings, self.base))
        else:
            self.check(f"{what}.loss", lambda: check_own_loss(settings, self.base, log.info))

    def _processes(self, what: str, settings: LearnerSettings) -> None:
        """A GPU for each process, where there are GPUs, and an object store that all of them reach."""
        if not settings.has_own_processes:
            return
        nproc = settings.parallel.nproc
        self.facts["processes"] = nproc
        gpus = 0 if "learning" in self.placed else num_gpus()
        if gpus and nproc > gpus:
            self.violations.append(f"{what}.parallel.nproc: {nproc} processes, and {gpus} GPUs for them")
        if self.objects is not None and self.objects.url.startswith("memory://"):
            self.violations.append(
                f"{what}: it is trained in other processes, but the object store {self.objects.url} exists in this one "
                "only; set ROLLOUT_STORAGE to a folder or bucket, or leave out async_depth and parallel.nproc"
            )

    def resources(
        self, what: str, name: str, settings: LearnerSettings, sequence_tokens: int, states: States, **models: int
    ) -> None:
        """An estimate of memory and disk, with what earlier updates of the run leave there; an error only where the
        certain part of it exceeds all there is, with what may be stored already.

        ``name`` is the algorithm's; ``what`` is the key of the learner, which `learner` has looked at; ``models`` as of
        `training_of`.
        """
        if self.model_facts is None:
            return
        training = training_of(settings, sequence_tokens, **self._counted.get(what, {}), **models)
        url = "" if self.objects is None else self.objects.url
        folder = Path(url.removeprefix("file://")) if url.startswith("file://") else None
        size, before = self.model_facts.size, self._left
        self._outcomes[name] = Outcome(
            states.ends, state_bytes(size, training), (states.models - 1) * size.weight_bytes
        )
        found = disk_needs(size, training, folder, states, before)
        if folder is not None and self.objects is not None and any(need.problem for need in found):
            states = replace(states, stored=stored_of(self.objects, self.run_name, self._outcomes, size))
            found = disk_needs(size, training, folder, states, before)
        self._left = left_behind(size, training, states, before, keeps_last=self.keeps_last)
        needs = ([] if "learning" in self.placed else memory_needs(size, training)) + found
        resources = self.facts.setdefault(RESOURCES, {}) if needs else {}
        for need in needs:
            resources[f"{name} {need.what} (estimate)"] = need.text
            self.violations += [f"{name}: {need.problem}"] if need.problem else []

    def teacher(self, what: str, settings: LearnerSettings, longest: int) -> int:
        """A teacher is there, reads the same ``longest`` token ids, and is cut as the student; its bytes as float32."""
        own, source = self.model_source, settings.teacher
        if source is None or own is None:
            return 0

        def look() -> int:
            with (
                describe(own, self.base, self.objects) as model,
                describe(source, self.base, self.objects) as teacher,
            ):
                facts = teacher.inspect()
                if facts.is_reward_model:
                    raise ConfigError(f"{source.uri} is a reward model, and a teacher writes text")
                check_teacher(model.folder, teacher.folder, longest)
                _check_cut(teacher.folder, settings)
                return facts.size.weight_bytes

        return self.check(f"{what}.distillation.teacher", look) or 0

    def sequence_length(self, what: str, sequence: SequenceConfig) -> None:
        """Rows are cut at no more than the model has positions."""
        positions = self.max_positions
        if positions is not None and sequence.max_length > positions:
            self.violations.append(
                f"{what}.sequence.max_length: {sequence.max_length} tokens, but the model has {positions} positions"
            )

    def sft(self, what: str, settings: SFTSettings) -> None:
        """Rows of the SFT file, what of them is trained, and sequences no longer than the model."""
        self.learner(what, settings)
        self.sequence_length(what, settings.sequence)
        training_rows = sft_form(settings)
        report = self.training_rows(f"{what}.dataset", settings.dataset, training_rows)
        if report is not None:
            self.facts["sft rows"] = report.num_rows
            self.facts["trained tokens"] = report.num_trained_tokens
            self.facts["truncated rows"] = report.num_truncated
            self.facts[DATA_REPORT] = report.figures()
        self._budget(settings, report)
        self.curriculum(what, settings, training_rows, report)
        self.held_out_rows(f"{what}.evaluation.dataset", settings.evaluation, training_rows)
        longest = row_tokens(report, settings.sequence.max_length)
        teacher = self.teacher(what, settings, longest)
        states = states_of(settings, steps_of_rows(settings, report), keeps_last=self.keeps_last)
        self.resources(what, "sft", settings, longest, states, frozen_bytes=teacher)

    def preferences(self, what: str, kind: str, settings: PreferenceSettings) -> DataReport | None:
        """Rows of a learner from preferences, of which ``kind`` is the usual name, and its settings."""
        rows = unpaired_form(settings) if kind == "kto" else pair_form(settings, need_prompts=kind != "rm")
        self.sequence_length(what, settings.sequence)
        self.learner(what, settings)
        report = self.training_rows(f"{what}.dataset", settings.dataset, rows)
        self._budget(settings, report)
        self.curriculum(what, settings, rows, report)
        self.held_out_rows(f"{what}.evaluation.dataset", settings.evaluation, rows)
        tokens = row_tokens(report, settings.sequence.max_length)
        states = states_of(settings, steps_of_rows(settings, report), keeps_last=self.keeps_last)
        self.resources(what, kind, settings, tokens, states, rows=1 if kind == "kto" else 2)
        return report

    def training_rows(self, what: str, dataset: DemonstrationSource, asked: RowForm[Any, Any]) -> DataReport | None:
        """What becomes of the rows of a data set; without a tokenizer they are only read.

        Where an earlier run, or plan, has tokenised the same rows, its report is taken.
        """
        rows = self.stream(dataset, asked.row)

        def look() -> DataReport | None:
            found = self.model_facts
            if found is None:
                rows.check()
                return None
            options = {"objects": self.objects, "tokenizer_id": found.tokenizer_id, "keep": self.trusts_notes}
            return look_at_rows(rows, self.load_tokenizer, asked, **options)

        return self.check(f"{what}.{dataset.address_key}", look)

    def _budget(self, settings: DatasetSettings, report: DataReport | None) -> None:
        """Say where passes over the data end training before the steps that are asked for."""
        budget = settings.budget
        if report is None or budget.epochs is None or budget.max_steps is None:
            return
        steps = steps_of_rows(settings, report)
        if steps is not None and steps < budget.max_steps:
            self.facts["budget"] = (
                f"epochs = {budget.epochs} ends training after {steps} optimizer steps, before max_steps = "
                f"{budget.max_steps}; leave out epochs for as many steps"
            )

    def curriculum(
        self, what: str, settings: DatasetSettings, asked: RowForm[Any, Any], report: DataReport | None
    ) -> None:
        """Rows have what the curriculum orders them by."""
        curriculum = settings.curriculum
        if curriculum is None or report is None:
            return
        rows = self.stream(settings.dataset, asked.row)
        self.check(f"{what}.curriculum.key", lambda: check_keys(curriculum, rows, rows.place))
        steps = steps_of_rows(settings, report)
        self.facts["curriculum"] = in_words(curriculum, report.num_examples, steps, "step")

    def held_out_rows(self, what: str, evaluation: HeldOutRows | None, rows: RowForm[Any, Any]) -> None:
        """Rows of an evaluation during training, read and tokenised like the training rows."""
        report = None if evaluation is None else self.training_rows(what, evaluation.dataset, rows)
        if report is not None:
            self.facts["held-out rows"] = report.num_rows
            self.reading(what, report.reading)

    def on_policy(self, what: str, settings: OnPolicySettings, backend: BackendConfig) -> Sequence[PromptRow] | None:
        """Training prompts."""
        rows = self.prompt_rows(f"{what}.prompts", settings.prompts)
        is_cut = settings.partial_rollouts is not None
        self.sampling(f"{what}.sampling", settings.sampling, backend, in_parts=is_cut)
        if (again := settings.replaying) is not None:
            self.facts["replay"] = f"{again.groups} prompts of each iteration, from the last {again.capacity}"
        self.facts |= {"partial rollouts": settings.parts_in_words} if is_cut else {}
        self.facts["training prompts"] = len(rows or ())
        curriculum = settings.curriculum
        if curriculum is not None and rows is not None:
            self.check(f"{what}.curriculum.key", lambda: check_keys(curriculum, rows))
            self.facts["curriculum"] = in_words(curriculum, len(rows), settings.iterations, "iteration")
        self.learner(what, settings)
        where = f"{what}.prompts.{settings.prompts.address_key}"
        longest = self.prompts(where, rows, context_limit(backend), settings.sampling)
        longest += settings.sampling.max_tokens
        self.resources(
            what,
            settings.family,
            settings,
            longest,
            states_of(
                settings,
                settings.steps_per_iteration,
                settings.iterations,
                stored=settings.stored_states,
                models=settings.stored_models,
                keeps_last=self.keeps_last,
            ),
            trained_models=settings.trained_models,
            frozen_bytes=self.teacher(what, settings, longest),
            frozen_models=int(settings.lora is None and settings.loads_reference),
            rows=settings.rows_per_item,
        )
        return rows

    def tasks(self, what: str, dataset: DatasetSource) -> int:
        """Rows of tasks; their number."""
        stream = self.stream(dataset, TaskRow)
        rows = self.check(f"{what}.{dataset.address_key}", lambda: sum(1 for _ in stream))
        self.reading(what, stream.remarks())
        if rows == 0:
            self.violations.append(f"{what}.{dataset.address_key}: {dataset.address} has no rows; expected tasks")
        return rows or 0

    def starts(self, what: str, dataset: DatasetSource, environment: EnvironmentConfig) -> int:
        """Rows with which episodes begin; their number."""
        if not isinstance(dataset, EnvironmentRows):
            return self.tasks(what, dataset)
        if environment.address in self._unloadable:
            return 0
        # Its tools make no rows, so their servers are not asked for this.
        rows = self.check(what, lambda: rows_of(EnvironmentCode.of(environment, self.base, {}), environment, dataset))
        return len(rows or ())

    def environment(self, what: str, config: EnvironmentConfig) -> Offer | None:
        """The environment can be loaded, an object of it be made, and the model's template write its episodes. What it
        offers; None where that cannot be said."""
        key = f"{what}.path" if isinstance(config, PythonEnvironment) else what
        served = self.check(f"{what}.tools", lambda: ask_servers(config.tools, self.base))
        code = None if served is None else self.check(key, lambda: EnvironmentCode.of(config, self.base, served))
        offer = None if code is None else self.check(key, lambda: look_at(code, config))
        if code is None or offer is None:
            self._unloadable.add(config.address)
            return None
        self.check(f"{what}.tools", lambda: check_tools(config.tools, self.base))
        resources = ToolResources(
            config.tools, index_folder=self.base, base=self.base, served=code.served, plugins=code.tool_plugins
        )
        try:
            tools = self.check(f"{what}.tools", lambda: all_schemas(offer, resources))
        finally:
            resources.close()
        if tools is None:
            return offer
        names = [tool["function"]["name"] for tool in tools]
        shown = f"{len(names)} tools ({', '.join(names)})" if names else "no tools"
        found = self.check(f"{what}.tools", lambda: code.id(config, self.base))
        self.facts[what] = f"{config.address} ({'' if found is None else found.short}), {shown}"
        for plugin in (code.code, *code.tool_plugins.values()):
            if isinstance(plugin, PluginCode):
                self.facts[f"plugin {plugin.name}"] = f"{plugin.manifest.version} in {plugin.folder}"
        remarks = [offer.note] if offer.note else []
        if self.has_chat_template is False:
            self.violations.append(
                f"{what}: the model's tokenizer has no chat template, and episodes are chats; give one as "
                "chat_template in the same table as its uri"
            )
        elif self.model_facts is not None:
            remark = self.check(what, lambda: check_turns(self.load_tokenizer(), tools, config.tool_role))
            remarks += [remark] if remark else []
        if remarks:
            self.facts[f"{what}, to look at"] = "; ".join(remarks)
        return offer

    def episodes(
        self, what: str, settings: OnPolicySettings, environment: EnvironmentConfig, backend: EngineConfig
    ) -> None:
        """What a policy learns from that acts in an environment."""
        offer = self.environment("environment", environment)
        self.facts["training rows"] = self.starts(f"{what}.prompts", settings.prompts, environment)
        gives_by_turn = offer is None or offer.has_turn_reward or settings.discounts_turns
        if settings.turn_credit is not None and not gives_by_turn:
            self.violations.append(
                f'{what}.credit is "turn", and environment {environment.address} has no method turn_reward; write one, '
                "or leave credit out"
            )
        self.sampling(f"{what}.sampling", settings.sampling, backend)
        self.learner(what, settings)
        limits = (environment.max_tokens, context_limit(backend) or self.max_positions)
        longest = min((limit for limit in limits if limit is not None), default=0)
        self.resources(
            what,
            settings.family,
            settings,
            longest,
            states_of(settings, None, settings.iterations, keeps_last=self.keeps_last),
            trained_models=settings.trained_models,
            frozen_models=int(settings.lora is None and settings.loads_reference),
        )

    def reward(self, what: str, spec: RewardSpec) -> None:
        """The reward's code can be loaded; reward models are there and read the policy's token ids."""
        self.check(what, lambda: self._load_reward(spec))
        for part in plain_rewards(spec):
            if isinstance(part, ModelReward):
                self.check(what, lambda uri=part.model: self._reward_model(uri))
            for judge in part.judges if isinstance(part, JudgeReward) else ():
                self.check(f"{what}.judges", lambda judge=judge: _try_judge(judge))

    def _load_reward(self, spec: RewardSpec) -> None:
        source = read_source(spec, self.base)
        self._has_plugins |= bool(source.plugins)
        loaded = load_reward(spec, base=self.base, source=source)
        loaded.close()
        self.facts |= {
            f"plugin {plugin.name}": f"{plugin.manifest.version} in {plugin.folder}"
            for plugin in source.plugins.values()
        }
        self._forms |= loaded.forms
        self.facts |= {f"reward {name}": form.in_words for name, form in loaded.forms.items() if form.takes != "sample"}

    def _reward_model(self, uri: str) -> None:
        with describe(ModelSource(uri=uri), self.base, self.objects) as found:
            facts = found.inspect()
            check_reward_model(found.folder)
        own = self.model_facts
        if own is None or own.tokenizer_id == facts.tokenizer_id:
            return
        if facts.tokenizer.get_vocab() != self.load_tokenizer().get_vocab():
            raise ConfigError(
                f"the tokenizer of reward model {uri!r} has another vocabulary than the policy's, whose token ids it "
                "is to score; train it from a model with the policy's tokenizer"
            )

    def hacking_guard(self, what: str, settings: OnPolicySettings, reward: RewardSpec, backend: BackendConfig) -> None:
        """What a guard against reward hacking looks at is there; ``reward`` is that of training."""
        guard, what = settings.guards.reward_hacking, f"{what}.guards.reward_hacking"
        if guard is None:
            return
        if guard.reward is not None:
            self.reward(f"{what}.reward", guard.reward)
        key = f"{what}.prompts.{guard.prompts.address_key}"
        rows = self.prompt_rows(f"{what}.prompts", guard.prompts)
        if rows is not None and not rows:
            self.violations.append(f"{key}: {guard.prompts.address} has no rows; expected held-out prompts")
        self.prompts(key, rows, context_limit(backend), settings.sampling)
        self.answers(key, rows, guard.reward or reward)

    def suites(self, entries: Sequence[TrainingSuite], backend: BackendConfig) -> dict[str, Asked | None]:
        """The suites by which the run evaluates its models can be put to them; by name, what `check_suite` returns."""
        found: dict[str, Asked | None] = {}
        for place, entry in enumerate(entries):
            key = f"evaluation.suites.{place}"
            suite = self.check(f"{key}.suite", partial(suite_of, entry, self.base, self.objects))
            if suite is not None and suite.name in found:
                self.violations.append(f"{key}: two suites are named {suite.name!r}; rename one of them")
            elif suite is not None:
                found[suite.name] = asked = check_suite(self, suite, backend)
                self.metric(f"{key}.metric", suite.name, asked, entry.metric)
                when = "before and after each phase" + (f", every {entry.every} iterations" if entry.every else "")
                words = "" if asked is None else f"{asked.words}{asked.counted}, "
                self.facts.setdefault("suites", {})[suite.name] = words + when
        return found

    def metric(self, what: str, suite: str, asked: Asked | None, name: str | None) -> None:
        """A suite that asks this has the metric of this name, if one is given."""
        known = None if asked is None else asked.metrics
        if name is not None and known is not None and name not in known:
            self.violations.append(f"{what}: suite {suite} has no {name!r}; {near(name, known)}")

    def evidence(self, what: str, promotion: PromotionConfig, num_held_out: int | None) -> None:
        """An interval can be had of so many held-out prompts; None: their number is not known."""
        if promotion.confidence and num_held_out is not None and num_held_out < MIN_PROMPTS:
            self.violations.append(
                f"{what}.confidence: {num_held_out} held-out prompts are too few for an interval; give at least "
                f"{MIN_PROMPTS}, or leave it out"
            )

    def answers(self, what: str, rows: Sequence[PromptRow] | None, spec: RewardSpec) -> None:
        """Every row has what rewards read of it, and some the keys that a function takes."""
        kinds = {key: part.kind for part in plain_rewards(spec) for key in part.row_keys}
        for key, kind in kinds.items():
            missing = [(number, row) for number, row in enumerate(rows or (), start=1) if key not in row.extras]
            if missing:
                (number, row), *others = missing
                more = f" (and {len(others)} more rows)" if others else ""
                self.violations.append(
                    f"{what}: row {number} has no {key!r}, which the {kind} reward reads{more}; {near(key, row.extras)}"
                )
        found = {key for row in rows or () for key in row.extras}
        for part in plain_rewards(spec):
            if isinstance(part, JudgeReward) and part.human_key is not None and rows:
                self._people(what, rows, part, found)
        for name in [part.callable for part in plain_rewards(spec) if isinstance(part, FunctionReward)]:
            required = self._forms[name].required if rows and name in self._forms else ()
            self.violations += [
                f"{what}: no row has {key!r}, which reward {name} takes; {near(key, found)}"
                for key in required
                if key not in found
            ]

    def _people(self, what: str, rows: Sequence[PromptRow], judge: JudgeReward, found: Collection[str]) -> None:
        """Some rows have a person's judgement, and each is one that can be compared."""
        if judge.human_key not in found:
            lacking = near(judge.human_key or "", found)
            self.violations.append(f"{what}: no row has {judge.human_key!r}, the judge's human_key; {lacking}")
        for number, row in enumerate(rows, start=1):
            try:
                judge.human_judgement(row.extras)
            except ConfigError as error:
                self.violations.append(f"{what}: row {number}: {error}")
                return


def _try_judge(judge: JudgeEndpoint) -> None:
    from rollout_core.rewards.judges.engine import try_judge

    try_judge(judge)


def _plan_of(run: RunInfo, base: Path, connections: Connections | None, *, keep: bool) -> LearnerPlan:
    keeps_last = run.keep_states == "last"
    return LearnerPlan(base, connections, trusts_notes=keep, run_name=run.name, keeps_last=keeps_last)


def plan_training(
    config: TrainConfig[Any], base: Path, connections: Connections | None = None, *, keep: bool = False
) -> dict[str, Any]:
    """Check a run that trains one model. Raises ConfigError naming all that is wrong.

    ``keep`` in the object store what was tokenised for it and what was found, and trust what was found before.
    """
    plan = _plan_of(config.run, base, connections, keep=keep)
    settings: Any = config.algorithm
    on_policy: Any = config if isinstance(config.algorithm, PolicyAlgorithm) else None
    plan.places()
    if isinstance(config, PlacedRun):
        _placement(plan, config)
    plan.resume(config.run, settings.family, on_policy and settings)
    plan.known_model("algorithm.base_model", settings.base_model, may_be_reward_model=settings.family == "rm")
    if on_policy is not None:
        plan.backend("backend", on_policy.backend)
    if on_policy is not None and on_policy.environment is not None:
        plan.no_resume(config.run, "a run in an environment resumes by itself when it is started again; leave it out")
        plan.episodes("algorithm", settings, on_policy.environment, on_policy.backend)
    elif on_policy is not None:
        rows = plan.on_policy("algorithm", settings, on_policy.backend)
        plan.reward("algorithm.reward", settings.reward)
        plan.answers(f"algorithm.prompts.{settings.prompts.address_key}", rows, settings.reward)
        plan.hacking_guard("algorithm", settings, settings.reward, on_policy.backend)
    elif isinstance(settings, SFTSettings):
        plan.sft("algorithm", settings)
    else:
        _reference(plan, settings)
        report = plan.preferences("algorithm", settings.family, settings)
        if report is not None:
            plan.facts |= {"rows": report.num_rows, "examples": report.num_examples, DATA_REPORT: report.figures()}
    if isinstance(config, EvaluatedTraining) and config.suites:
        if on_policy is None:
            plan.backend("backend", config.engine)
        plan.suites(config.suites, config.engine)
    return plan.done()


def _placement(plan: LearnerPlan, config: PlacedRun) -> None:
    """There are workers for what is placed."""
    plan.place(config.placement)
    if config.placement is not None:
        check_placement(plan, config.placement, plan.placed)


def _reference(plan: LearnerPlan, settings: PreferenceSettings) -> None:
    """The reference is there, of the model's architecture, and reads the same token ids."""
    if not isinstance(settings, ReferencedAlgorithm) or settings.reference is None:
        return
    source, own = settings.reference, settings.base_model

    def look() -> None:
        with describe(own, plan.base, plan.objects) as model, describe(source, plan.base, plan.objects) as reference:
            check_reference(model.folder, reference.folder)
            _check_cut(reference.folder, settings)

    plan.check("algorithm.reference", look)


def _check_cut(folder: Path, settings: LearnerSettings) -> None:
    """A model that is read in addition to the trained one can be split as that one is."""
    if settings.parallel.cuts_matrices:
        _architecture().count_cut(folder, settings.parallel)


def _architecture():
    """The module that builds models. It imports torch, which most plans do without."""
    from rollout_core.models import architecture

    return architecture


def plan_nightly(
    config: NightlyConfig, base: Path, connections: Connections | None = None, *, keep: bool = False
) -> dict[str, Any]:
    """Check a nightly run; ``keep`` as of `plan_training`. Raises ConfigError naming all that is wrong."""
    plan = _plan_of(config.run, base, connections, keep=keep)
    if hot_reload() is not None:
        plan.violations.append(f"{HOT_RELOAD} is set; expected not, as a nightly run promotes a model by its rewards")
    plan.places()
    _placement(plan, config)
    plan.no_resume(config.run, "a nightly run resumes by itself when it is started again; leave it out")
    plan.known_model("model", config.model)
    plan.backend("backend", config.backend)
    plan.sft("sft", config.sft)
    for kind, settings in (("rm", config.rm), ("dpo", config.dpo)):
        report = None if settings is None else plan.preferences(kind, kind, settings)
        if report is not None:
            plan.facts[f"{kind} rows"] = report.num_rows
    if config.environment is not None:
        return _nightly_in(plan, config, config.environment)
    held_out = plan.prompt_rows("evaluation.prompts", config.evaluation.prompts)
    held_out_key = f"evaluation.prompts.{config.evaluation.prompts.address_key}"
    plan.prompts(held_out_key, held_out, context_limit(config.backend), config.evaluation.sampling)
    plan.sampling("evaluation.sampling", config.evaluation.sampling, config.backend)
    plan.reward("reward", config.reward)
    on_policy = config.ppo or config.grpo
    if on_policy is not None:
        policy = on_policy.family
        rows = plan.on_policy(policy, on_policy, config.backend)
        plan.hacking_guard(policy, on_policy, ModelReward(model="rm") if config.rm else config.reward, config.backend)
        if config.rm is None:
            plan.answers(f"{policy}.prompts.{on_policy.prompts.address_key}", rows, config.reward)
    plan.answers(held_out_key, held_out, config.reward)
    plan.facts["held-out prompts"] = len(held_out or ())
    plan.evidence("promotion", config.promotion, None if held_out is None else len(held_out))
    suites = plan.suites(config.evaluation.suites, config.backend)
    for number, guard in enumerate(config.promotion.guards):
        _guard(plan, f"promotion.guards.{number}", guard, config, held_out)
        if isinstance(guard, SuiteGuard):
            _suite_guard(plan, f"promotion.guards.{number}", guard, suites)
    plan.output_folder("report_dir", config.report_dir)
    return plan.done()


def _nightly_in(plan: LearnerPlan, config: NightlyConfig, environment: EnvironmentConfig) -> dict[str, Any]:
    """The rest of a plan of a night in an environment."""
    settings = config.ppo or config.grpo
    assert settings is not None, "validated"
    plan.episodes(settings.family, settings, environment, config.backend)
    plan.facts["held-out rows"] = num_rows = plan.starts("evaluation.prompts", config.evaluation.prompts, environment)
    plan.sampling("evaluation.sampling", config.evaluation.sampling, config.backend)
    plan.evidence("promotion", config.promotion, num_rows or None)
    suites = plan.suites(config.evaluation.suites, config.backend)
    for number, guard in enumerate(config.promotion.guards):
        if isinstance(guard, SuiteGuard):
            _suite_guard(plan, f"promotion.guards.{number}", guard, suites)
    plan.output_folder("report_dir", config.report_dir)
    return plan.done()


def plan_suites(config: EvalConfig, base: Path, connections: Connections | None = None) -> dict[str, Any]:
    """Check an evaluation by suites. Raises ConfigError naming all that is wrong."""
    plan = LearnerPlan(base, connections)
    plan.places()
    plan.no_resume(config.run, "an evaluation resumes by itself when it is started again; leave it out")
    _placement(plan, config)
    backend = check_answering(plan, config)
    asked = [(suite, check_suite(plan, suite, backend)) for suite in config.suites]
    plan.facts["questions"] = {suite.name: found.words for suite, found in asked if found is not None}
    return plan.done()


def _drawn_tokens(plan: LearnerPlan, what: str, guard: KLGuard, config: NightlyConfig) -> None:
    """Held-out tokens are drawn from the model's plain distribution, as k1 and k3 want them."""
    bent = [f"evaluation.sampling.{name}" for name in config.evaluation.sampling.bending]
    if isinstance(config.backend, ScriptedBackend):
        bent = ["backend.kind 'scripted'", *bent]
    if bent:
        plan.violations.append(
            f"{what}.estimator: {guard.estimator} is computed from the log-probabilities of tokens that the model drew "
            f'from its own distribution, and with {", ".join(bent)} held-out tokens are not; take estimator "exact", '
            "or sample them plainly at a temperature above 0"
        )


def _guard(
    plan: LearnerPlan, what: str, guard: Guard, config: NightlyConfig, held_out: Sequence[PromptRow] | None
) -> None:
    """What a guard of the promotion looks at is there."""
    if isinstance(guard, KLGuard) and guard.estimator != "exact":
        _drawn_tokens(plan, what, guard, config)
    if isinstance(guard, RewardGuard | PromptsGuard) and guard.reward is not None:
        plan.reward(f"{what}.reward", guard.reward)
    if isinstance(guard, RewardGuard):
        plan.answers(f"{what}.reward", held_out, guard.reward)
    if isinstance(guard, PromptsGuard):
        rows = plan.prompt_rows(f"{what}.prompts", guard.prompts)
        key = f"{what}.prompts.{guard.prompts.address_key}"
        if rows is not None and not rows:
            plan.violations.append(f"{key}: {guard.prompts.address} has no rows; expected prompts")
        plan.prompts(key, rows, context_limit(config.backend), config.evaluation.sampling)
        plan.answers(key, rows, guard.reward or config.reward)


def _suite_guard(plan: LearnerPlan, what: str, guard: SuiteGuard, suites: Mapping[str, Asked | None]) -> None:
    """The suite of a guard is one of the run's, with the metric and enough questions."""
    if guard.name not in suites:
        named = f"evaluation.suites has {', '.join(suites)}" if suites else "there are no evaluation.suites"
        plan.violations.append(f"{what}.name: {guard.name!r} is no suite of this run; {named}")
        return
    asked = suites[guard.name]
    plan.metric(f"{what}.metric", guard.name, asked, guard.metric)
    if guard.min_questions is not None and asked is not None and asked.num_questions < guard.min_questions:
        plan.violations.append(
            f"{what}.min_questions is {guard.min_questions}, and suite {guard.name} has {asked.num_questions} questions"
        )
    if guard.confidence and asked is not None and asked.num_questions < MIN_PROMPTS:
        plan.violations.append(
            f"{what}.confidence: {asked.num_questions} questions are too few for an interval; give at least "
            f"{MIN_PROMPTS}, or leave it out"
        )
