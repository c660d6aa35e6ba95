"""Suites: questions, how they are put to a model, how its answers are scored, and the figures that come of it."""

from __future__ import annotations

import difflib
import re
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from rollout_core.base.ids import ContentId
from rollout_core.config.base import DatasetSource, EnvironmentRows, Settings, identity
from rollout_core.config.environments import AnyEnvironment
from rollout_core.config.inference import SamplingParams
from rollout_core.config.rewards import ExactMatchReward, FunctionName, RewardSpec
from rollout_core.config.templates import JinjaTemplate
from rollout_core.config.verifiers import InstructionsReward

PLAIN_METRICS = ("mean", "accuracy")
INSTRUCTION_METRIC = "inst_level_acc"
"""Of single instructions, not of the prompts that have them."""
METRICS_OF_SAMPLES = ("pass", "avg", "maj")
_METRIC = re.compile(rf"({'|'.join(METRICS_OF_SAMPLES)})@([1-9]\d{{0,5}})")


class FunctionRows(Settings):
    """Rows that a function of a Python file makes, an object each; see `docs/evaluation.md`."""

    address_key: ClassVar[str] = "callable"

    kind: Literal["function"]
    callable: FunctionName
    """``path/to/file.py:function`` relative to the working folder, or ``module:function``; without arguments."""

    @property
    def address(self) -> str:
        """Where the rows come from, for people."""
        return self.callable

    def cache_identity(self) -> Any:
        """The content of the rows counts instead."""
        return None


SuiteRows = DatasetSource | FunctionRows


class FewShot(Settings):
    """Answered questions that stand before each question, the same ones for all; a question is never its own
    example."""

    identity_without_default: ClassVar[frozenset[str]] = frozenset({"same", "in_order"})

    rows: SuiteRows
    """Where the examples come from; of the same form as the suite's rows."""
    count: int = Field(default=5, ge=1, le=1000)
    """Examples before each question."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of their choice and order."""
    in_order: bool = False
    """Take the first ones as they stand, not by the seed."""
    same: str | None = Field(default=None, min_length=1)
    """Key of the rows whose value examples share with the question, such as ``subject``."""
    answer: JinjaTemplate = "{{ answer }}"
    """The answer of an example."""
    separator: str = "\n\n"
    """Between examples where the prompt is a text; conversations have turns instead."""


class SuitePrompt(Settings):
    """How a row becomes a prompt: one text, or a conversation of a user's turn, perhaps after the system's."""

    identity_without_default: ClassVar[frozenset[str]] = frozenset({"description"})

    description: JinjaTemplate | None = None
    """Stands once before ``text`` and its examples."""
    text: JinjaTemplate | None = None
    """The whole prompt, as models take it that were not trained to chat."""
    system: JinjaTemplate | None = None
    """The system's turn."""
    user: JinjaTemplate | None = None
    """The user's turn; the model's chat template writes the conversation."""
    few_shot: FewShot | None = None

    @model_validator(mode="after")
    def _one_form(self) -> SuitePrompt:
        if (self.text is None) == (self.user is None):
            raise ValueError("give either text, or user (with system, where there is one)")
        if self.description is not None and self.text is None:
            raise ValueError("description stands before text; in a conversation that is what system is for")
        if self.system is not None and self.text is not None:
            raise ValueError("system is for conversations; give user instead of text, or leave system out")
        return self


class ChoiceScorer(Settings):
    """Each choice of a row is scored by its log-likelihood behind the prompt, and the likeliest one is the answer;
    nothing is generated, as in ``multiple_choice`` of lm-evaluation-harness."""

    kind: Literal["choice"]
    choices: str | tuple[str, ...] = "choices"
    """Key of the row with its choices: a list of texts, or an object of two lists, ``text`` and ``label``. Or keys
    that hold a choice each, such as ``["A", "B", "C", "D"]``."""
    answer_key: str = Field(default="answer", min_length=1)
    """Key of the row that names the right choice."""
    answer_as: Literal["auto", "index", "label", "text"] = "auto"
    """What names it: its index, from 0; its label, which is A, B, C where rows have none of their own; or its text.
    ``auto``: whichever fits; where several do, and differ, the suite is refused."""
    continuation: JinjaTemplate = "{{ choice }}"
    """A template of what is scored of a choice: ``choice`` is its text, ``label``, ``index`` and the row's keys are
    there, too. ``{{ label }}`` scores letters, where the prompt lists the choices."""
    target_delimiter: str = " "
    """Between the prompt and a choice; it counts in no norm."""

    @property
    def reads_answers(self) -> bool:
        """As of rewards."""
        return False


CHOICE_METRICS = ("acc", "acc_norm", "acc_bytes")
FailedAnswers = Literal["leave_out", "wrong", "fail"]


class Suite(Settings):
    """Questions that are put to models, which are compared by what their answers come to."""

    identity_without_default: ClassVar[frozenset[str]] = frozenset({"failed", "environment"})

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """How people call it; letters, digits, dots, dashes."""
    rows: SuiteRows
    """The questions, a row each: of any keys where there is a ``prompt``, otherwise with ``prompt`` or ``messages``."""
    prompt: SuitePrompt | None = None
    """Makes prompts of rows. Default: rows hold them."""
    environment: AnyEnvironment | None = None
    """In which each row, of any keys, is the start of episodes, which it rewards in place of a ``scorer``. Default: a
    question is answered once."""
    sampling: SamplingParams = SamplingParams(temperature=0.0, max_tokens=256)
    """How answers are drawn."""
    samples: int = Field(default=1, ge=1, le=100_000)
    """Answers to each question."""
    scorer: RewardSpec | ChoiceScorer = ExactMatchReward()
    """What an answer earns: any reward; or which choice is the likeliest."""
    threshold: float = 1.0
    """An answer is right from this score on."""
    failed: FailedAnswers = "leave_out"
    """What an answer is that can never be had, as the endpoint refuses its question, say. ``leave_out``: it counts in
    no figure, as one without a score; the report says how many there are. ``wrong``: its score is 0. ``fail``: the
    evaluation ends. One that may be had at another try is waited for in any case."""
    metrics: tuple[str, ...] = ()
    """``mean``: of scores. ``accuracy``: share of right answers, which ``avg@k`` of all k samples and ``pass@1`` are,
    too. ``pass@n``: chance that one of n answers is right. ``maj@k``: share of questions whose most frequent answer is
    right. Default: ``mean`` and ``accuracy``; of several samples ``mean``, ``avg@k``, ``pass@k`` and, where the scorer
    reads an answer, ``maj@k``. Of choices: ``acc``, ``acc_norm``, which divides log-likelihoods by the choices' lengths
    in characters, and ``acc_bytes``, in bytes; by default the first two. ``inst_level_acc``: share of the instructions
    of all prompts that are followed, by a scorer ``instructions`` whose ``value`` is ``share``."""

    def how_answered(self, source: ContentId | None) -> list[Any]:
        """How answers are drawn and scored, by code of id ``source``, as ids of evaluations have it."""
        defaults = {"threshold": 1.0, "failed": "leave_out"}
        changed = {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}
        if self.environment is not None:
            changed["environment"] = identity(self.environment)
        drawn = [identity(self.sampling), self.samples, identity(self.scorer), source]
        return [*drawn, changed] if changed else drawn

    @property
    def chosen_metrics(self) -> tuple[str, ...]:
        """``metrics``, or the default."""
        if self.metrics:
            return self.metrics
        if isinstance(self.scorer, ChoiceScorer):
            return CHOICE_METRICS[:2]
        if self.samples == 1:
            return PLAIN_METRICS
        votes = ("maj",) if self._reads_answers else ()
        return ("mean", *(f"{name}@{self.samples}" for name in ("avg", "pass", *votes)))

    @property
    def _reads_answers(self) -> bool:
        return self.environment is None and self.scorer.reads_answers

    @model_validator(mode="after")
    def _an_environment_scores(self) -> Suite:
        if isinstance(self.rows, EnvironmentRows) and "split" not in self.rows.model_fields_set:
            raise ValueError('rows: say which rows the environment is to make: split = "eval" (held out) or "train"')
        if self.environment is not None and self.environment.start_memory is not None:
            raise ValueError("environment.start_memory: episodes of suites begin with no memory; leave it out")
        for name in ("scorer", "prompt") if self.environment is not None else ():
            if name in self.model_fields_set:
                raise ValueError(f"{name}: the environment begins its episodes and rewards them; leave it out")
        return self

    @model_validator(mode="after")
    def _metrics_can_be_had(self) -> Suite:
        for name in self.metrics:
            self._check_metric(name)
        if len(set(self.metrics)) < len(self.metrics):
            raise ValueError(f"metrics: {', '.join(self.metrics)} names one of them twice")
        return self

    def _check_metric(self, name: str) -> None:
        is_choice = isinstance(self.scorer, ChoiceScorer)
        if name in (CHOICE_METRICS if is_choice else PLAIN_METRICS):
            return
        if name == INSTRUCTION_METRIC:
            if not isinstance(self.scorer, InstructionsReward) or self.scorer.value != "share":
                raise ValueError(
                    f"metrics: {name} counts the instructions that are followed; it needs a scorer of kind "
                    "'instructions' with value = \"share\""
                )
            return
        found = None if is_choice else _METRIC.fullmatch(name)
        if found is None:
            forms = [*PLAIN_METRICS, *(f"{kind}@{self.samples}" for kind in METRICS_OF_SAMPLES)]
            forms = list(CHOICE_METRICS) if is_choice else forms
            close = difflib.get_close_matches(name, forms, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(forms)}"
            raise ValueError(f"metrics: unknown metric {name!r}; {hint}")
        kind, number = found[1], int(found[2])
        if number > self.samples:
            raise ValueError(f"metrics: {name} needs {number} samples of each question, and samples is {self.samples}")
        if kind != "pass" and number != self.samples:
            raise ValueError(f"metrics: {name} is not of all {self.samples} samples; give {kind}@{self.samples}")
        if kind == "maj" and self.environment is not None:
            raise ValueError(f"metrics: {name} counts answers, and an environment reads none; choose another metric")
        if kind == "maj" and not self.scorer.reads_answers:
            raise ValueError(
                f"metrics: {name} needs answers to count, which a scorer of kind {self.scorer.kind!r} does not read; "
                "choose exact_match, math, text, or regex with answer_key"
            )

    @model_validator(mode="after")
    def _choices_are_not_drawn(self) -> Suite:
        if isinstance(self.scorer, ChoiceScorer):
            for name in ("sampling", "samples", "threshold"):
                if getattr(self, name) != type(self).model_fields[name].get_default():
                    raise ValueError(
                        f"{name} is for answers that are drawn and scored, and a scorer of kind 'choice' draws none; "
                        "leave it out"
                    )
        return self

    @model_validator(mode="after")
    def _wrong_is_not_right(self) -> Suite:
        if self.failed == "wrong" and self.threshold <= 0:
            raise ValueError(
                f'failed = "wrong" gives answers that cannot be had a score of 0, which is right from threshold '
                f"{self.threshold:g} on; give a threshold above 0"
            )
        return self

    @model_validator(mode="after")
    def _samples_differ(self) -> Suite:
        if self.samples > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"samples is {self.samples}, and sampling.temperature 0 draws the same answer each time; "
                "give a temperature, or leave out samples"
            )
        return self
