"""Rewards that verify an answer: by mathematics, a pattern, a JSON Schema, a database, or the instructions of a prompt.

Each takes part of the completion as the answer (`Extraction`) and holds it against keys of the prompt's row.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from rollout_core.base.settings import refuse_credentials
from rollout_core.config.reward_settings import RewardSettings
from rollout_core.sandbox.programs import SandboxKind


def _compiles(pattern: str) -> str:
    import regex

    try:
        regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_compiles)]
"""A regular expression, as the package ``regex`` reads it."""


class Extraction(RewardSettings):
    """Which part of a completion is the answer. A completion without such a part has no answer and earns 0."""

    take: Literal["all", "boxed", "after", "between", "code", "pattern"] = "all"
    """The whole completion; what stands in LaTeX's ``\\boxed{}``, between its matching braces; the rest of the line
    after ``marker``; what stands between ``start`` and ``end``; the contents of a fenced block of code; group 1 of
    ``pattern``, or all that it matches."""
    marker: str | None = Field(default=None, min_length=1)
    """Such as ``####``, as GSM8K has it."""
    start: str | None = Field(default=None, min_length=1)
    """Such as ``<answer>``."""
    end: str | None = Field(default=None, min_length=1)
    """Such as ``</answer>``."""
    pattern: Pattern | None = None
    """A regular expression, in which ``.`` matches line ends, too."""
    language: str | None = Field(default=None, min_length=1)
    """Of ``code``: take blocks that name this language, or none."""
    which: Literal["last", "first"] = "last"
    """Which of several."""

    _KEYS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "after": ("marker",),
        "between": ("start", "end"),
        "pattern": ("pattern",),
    }

    @model_validator(mode="after")
    def _has_what_it_takes(self) -> Extraction:
        needed = self._KEYS.get(self.take, ())
        allowed = (*needed, *(("language",) if self.take == "code" else ()))
        for name in ("marker", "start", "end", "pattern", "language"):
            given = getattr(self, name) is not None
            if name in needed and not given:
                raise ValueError(f'take = "{self.take}" needs {name}')
            if given and name not in allowed:
                raise ValueError(f'take = "{self.take}" has no use for {name}; leave it out')
        return self


class VerifiedReward(RewardSettings):
    """What rewards share that verify an answer in a process of their own."""

    timeout_seconds: float = Field(default=10.0, gt=0, le=3600, allow_inf_nan=False)
    """Longest time for one answer. One that takes longer, or ends the process that verifies it, earns 0 and is
    counted in the log; the other answers are verified in a new process."""
    memory_mb: int = Field(default=2048, ge=128)
    """Memory of a process that verifies answers, in MiB."""

    def cache_identity(self) -> Any:
        """All of it: what passes a limit earns 0."""
        return self.model_dump(mode="json")


class MathReward(VerifiedReward):
    """1 where the answer is mathematically the row's, else 0: numbers, fractions, sets, intervals, equations and units
    in LaTeX or plain text, compared by Math-Verify (``pip install 'rollout-post-training[verify]'``)."""

    kind: Literal["math"] = "math"
    answer_key: str = Field(default="answer", min_length=1)
    """Key of the prompt's row that holds the answer: a number, or text in LaTeX or plain. A list: any of them."""
    extract: Extraction | None = None
    """Where the answer stands. Default: the last boxed expression, else the last expression in LaTeX, else the last
    number."""
    decimals: int = Field(default=6, ge=0, le=15)
    """Decimal places to which numbers are compared."""

    @property
    def row_keys(self) -> tuple[str, ...]:
        return (self.answer_key,)

    @property
    def reads_answers(self) -> bool:
        return True


class RegexReward(VerifiedReward):
    """1 where the answer matches a regular expression, else 0; or where what it finds is the row's answer."""

    kind: Literal["regex"] = "regex"
    pattern: Pattern
    """A regular expression, as the package ``regex`` reads it."""
    match: Literal["search", "full"] = "search"
    """Whether it may match any part, or has to match the whole of it."""
    answer_key: str | None = Field(default=None, min_length=1)
    """Key of the prompt's row that group 1 of the last match has to be equal to, without white space around it.
    Default: that it matches is enough."""
    ignore_case: bool = False
    """Upper and lower case count as the same."""
    extract: Extraction = Extraction()
    """Where the answer stands."""

    @model_validator(mode="after")
    def _has_a_group(self) -> RegexReward:
        import regex

        if self.answer_key is not None and not regex.compile(self.pattern).groups:
            raise ValueError("answer_key is compared with group 1 of the pattern, which has no group")
        return self

    @property
    def row_keys(self) -> tuple[str, ...]:
        return () if self.answer_key is None else (self.answer_key,)

    @property
    def reads_answers(self) -> bool:
        return self.answer_key is not None


class SchemaReward(VerifiedReward):
    """1 where the answer is JSON of a JSON Schema, else 0."""

    kind: Literal["schema"] = "schema"
    json_schema: dict[str, Any] | None = None
    """The schema. Default: each row has its own."""
    schema_key: str = Field(default="schema", min_length=1)
    """Key of the prompt's row that holds its schema, an object or its JSON text, where ``json_schema`` is left out."""
    share: bool = False
    """Give JSON that the schema does not fit the share of its properties that do fit theirs, halved; so JSON earns
    something and a wrong field costs less than all."""
    extract: Extraction | None = None
    """Where the JSON stands. Default: the last fenced block where there is one, else the whole completion."""

    @model_validator(mode="after")
    def _is_a_schema(self) -> SchemaReward:
        if self.json_schema is not None:
            from jsonschema import Draft202012Validator, SchemaError

            try:
                Draft202012Validator.check_schema(self.json_schema)
            except SchemaError as error:
                raise ValueError(f"json_schema is no JSON Schema: {error.message}") from None
        return self

    @property
    def row_keys(self) -> tuple[str, ...]:
        return () if self.json_schema is not None else (self.schema_key,)


class SqlReward(VerifiedReward):
    """1 where the answer is a query that gives the rows of the row's own query on an SQLite file, else 0. The file is
    opened read-only, and its content is part of the scores' id."""

    kind: Literal["sql"] = "sql"
    database: str = Field(min_length=1)
    """An SQLite file, relative to the working folder."""
    answer_key: str = Field(default="query", min_length=1)
    """Key of the prompt's row that holds the query whose rows are right; or a list of rows, each a list of values."""
    ordered: bool | None = None
    """Whether the order of rows counts. Default: where the row's query ends in ORDER BY at its top level."""
    extract: Extraction | None = None
    """Where the query stands. Default: the last fenced block where there is one, else the whole completion."""

    @property
    def row_keys(self) -> tuple[str, ...]:
        return (self.answer_key,)


class InstructionsReward(VerifiedReward):
    """Whether a completion follows the instructions that its row names, by the checks of IFEval (arXiv:2311.07911)."""

    kind: Literal["instructions"] = "instructions"
    ids_key: str = Field(default="instruction_id_list", min_length=1)
    """Key of the prompt's row with the list of instructions, such as ``length_constraints:number_words``."""
    kwargs_key: str = Field(default="kwargs", min_length=1)
    """Key of the prompt's row with the arguments of each of them, in the same order."""
    value: Literal["all", "share"] = "all"
    """1 where all are followed; or the share of those that are."""
    loose: bool = False
    """Count an instruction as followed where it is without the first line, the last line, or asterisks, too."""

    @property
    def row_keys(self) -> tuple[str, ...]:
        return (self.ids_key, self.kwargs_key)


class TextReward(VerifiedReward):
    """How near the answer is to the row's as text: 0 or 1 where the two are compared, 0 to 1 where their overlap is
    measured. BLEU, chrF and ROUGE are those of sacrebleu and rouge-score (``pip install
    'rollout-post-training[verify]'``)."""

    kind: Literal["text"] = "text"
    compare: Literal["exact", "normalised", "numeric", "contains", "f1", "bleu", "chrf", "rouge"] = "normalised"
    """``exact``: the same characters. ``normalised``: the same words, without case, punctuation and articles, as SQuAD
    has it. ``numeric``: the last number is the same. ``contains``: the row's answer occurs in it. ``f1``: overlap of
    words, normalised, as SQuAD has it. ``bleu``, ``chrf``: of a sentence, divided by 100. ``rouge``: ROUGE-L's F."""
    answer_key: str = Field(default="answer", min_length=1)
    """Key of the prompt's row that holds the answer, a text or a number; or a list of them, of which the one that gives
    most counts. BLEU and chrF take all of a list as their references."""
    extract: Extraction = Extraction()
    """Where the answer stands."""
    ignore_case: bool = False
    """Upper and lower case count as the same; for ``exact`` and ``contains``, as the others have rules of their own."""

    @property
    def measures_overlap(self) -> bool:
        """Whether packages of the extra ``verify`` compare."""
        return self.compare in ("bleu", "chrf", "rouge")

    @model_validator(mode="after")
    def _case_counts_somewhere(self) -> TextReward:
        if self.ignore_case and self.compare not in ("exact", "contains"):
            raise ValueError(f'compare = "{self.compare}" has a rule of its own for case; leave out ignore_case')
        return self

    @property
    def row_keys(self) -> tuple[str, ...]:
        return (self.answer_key,)

    @property
    def reads_answers(self) -> bool:
        return self.compare in ("exact", "normalised", "numeric", "f1")


class CodeSandbox(RewardSettings):
    """Where programs run that a model wrote (`docs/sandbox.md`)."""

    kind: SandboxKind = "auto"
    """``auto``: walls of the kernel, made here or by bubblewrap; ``http``: a service on another machine; ``none``: no
    wall at all."""
    url: Annotated[str, AfterValidator(refuse_credentials)] = ""
    """Of ``http``."""
    image: str = Field(default="python:3.11-slim", min_length=1)
    """Of ``docker`` and ``gvisor``, and of a ``command`` with the placeholder ``{image}``."""
    command: tuple[str, ...] = ()
    """Of ``command``: what runs a program, with placeholders."""
    python: str | None = None
    """Interpreter of programs in Python. Default: the one that runs this, without its packages. That of a virtual
    environment brings its packages."""
    packages: tuple[str, ...] = ()
    """Folders in which programs in Python find further modules, as absolute paths."""
    api_key: str | None = Field(default=None, pattern=r"^[A-Z][A-Z0-9_]*$")
    """Of ``http``: NAME of the secret that is the service's key: ``ROLLOUT_SECRET_<NAME>`` in the worker's environment,
    where ``ROLLOUT_SECRETS`` must list it."""

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> CodeSandbox:
        for name, kind in (("url", "http"), ("command", "command")):
            if bool(getattr(self, name)) != (self.kind == kind):
                raise ValueError(f'{name} goes with kind = "{kind}", which needs it; this is kind = "{self.kind}"')
        if self.api_key is not None and self.kind != "http":
            raise ValueError(f'api_key goes with kind = "http"; this is kind = "{self.kind}"')
        if self._has_own_image and (self.python is not None or self.packages):
            raise ValueError(
                f'kind = "{self.kind}" runs programs by what is there, not by python or packages of this machine; '
                "leave them out"
            )
        if self.image != type(self).model_fields["image"].default and not self._takes_image:
            raise ValueError(
                f'image goes with kind = "docker", "gvisor" or a command with {{image}}; this is kind = "{self.kind}"'
            )
        for path in self.packages:
            if not os.path.isabs(path) or os.path.normpath(path) == "/":
                raise ValueError(f"packages holds {path!r}; expected an absolute path other than /")
        return self

    @property
    def _has_own_image(self) -> bool:
        return self.kind in ("docker", "gvisor", "command", "http")

    @property
    def _takes_image(self) -> bool:
        return self.kind in ("docker", "gvisor") or any("{image}" in word for word in self.command)

    def cache_identity(self) -> Any:
        """Where programs run decides no score, but what they find there does: the image, the command, or the version of
        the interpreter with the packages. Of a service only that it is one: what it has is its operator's."""
        found: dict[str, Any] = {"image": self.image} if self._takes_image else {}
        if self.kind == "command":
            found["command"] = list(self.command)
        elif self.kind == "http":
            found["service"] = True
        elif not self._takes_image:
            version = ".".join(map(str, sys.version_info[:2]))
            found |= {"python": self.python or version, "packages": list(self.packages)}
        return found


class CodeReward(RewardSettings):
    """Whether a program does what its row's tests ask for, run in a sandbox: the share of cases that pass, or all."""

    kind: Literal["code"] = "code"
    check: Literal["tests", "output"] = "tests"
    """By unit tests in Python, or by what the program writes for given inputs."""
    tests_key: str = Field(default="tests", min_length=1)
    """Key of the prompt's row with unit tests: a text, or a list of them, each of asserts, of functions ``test_*`` or
    of ``check(candidate)``."""
    entry_point_key: str = Field(default="entry_point", min_length=1)
    """Key of the prompt's row with the name of the function that ``check(candidate)`` is called with, if it has one."""
    objects: bool | None = None
    """Whether a program may answer unit tests with objects of its own classes, whose methods answer as it likes.
    Default: where the tests name a class of it, by a capital letter."""
    cases_key: str = Field(default="cases", min_length=1)
    """Key of the prompt's row with cases of ``output``: a list of ``{"input": ..., "output": ...}``, or an object of
    two lists, ``inputs`` and ``outputs``."""
    compare: Literal["exact", "lines", "tokens", "numbers"] = "lines"
    """How written and expected output are held against each other: as they are; without spaces at the ends of lines;
    word by word; the same with numbers that may differ by a millionth, where one of them is no integer."""
    language: str = Field(default="python", min_length=1)
    """Of the program; unit tests are of Python."""
    value: Literal["all", "share"] = "all"
    """1 where all cases pass; or the share of those that do."""
    extract: Extraction | None = None
    """Where the program stands. Default: the last fenced block where there is one, else the whole completion."""
    cpu_seconds: float = Field(default=5.0, gt=0, le=3600, allow_inf_nan=False)
    """Processor time of a case (of unit tests: of all)."""
    timeout_seconds: float = Field(default=30.0, gt=0, le=36_000, allow_inf_nan=False)
    """Longest time for it. Keep it well above ``cpu_seconds``, so that a busy machine decides no score."""
    memory_mb: int = Field(default=512, ge=32)
    """Memory of a program's processes together, in MiB."""
    max_processes: int = Field(default=32, ge=1)
    """Of a program at the same time, threads among them."""
    disk_mb: int = Field(default=64, ge=1)
    """Of all files that a program writes, in MiB; they lie in memory."""
    sandbox: CodeSandbox | Literal["none"] = CodeSandbox()
    """Where programs run. ``"none"``, written out, runs them without any wall, as this user."""

    @model_validator(mode="after")
    def _has_tests_of_its_language(self) -> CodeReward:
        if self.check == "tests" and self.language != "python":
            raise ValueError(
                f'check = "tests" runs unit tests in Python, and language is {self.language!r}; check output'
            )
        kind = "none" if isinstance(self.sandbox, str) else self.sandbox.kind
        if self.check == "tests" and kind in ("docker", "gvisor", "command"):
            raise ValueError(
                f'check = "tests" links two programs, which kind = "{kind}" cannot; use namespaces, bubblewrap or '
                'http, or check = "output"'
            )
        return self

    @property
    def row_keys(self) -> tuple[str, ...]:
        return (self.tests_key,) if self.check == "tests" else (self.cases_key,)

    def cache_identity(self) -> Any:
        """Where programs run decides no score, and what they find there does."""
        place = CodeSandbox() if isinstance(self.sandbox, str) else self.sandbox
        return {**self.model_dump(mode="json"), "sandbox": place.cache_identity()}


Verified = MathReward | RegexReward | SchemaReward | SqlReward | InstructionsReward | TextReward
"""The rewards that verify an answer in a process of their own."""
