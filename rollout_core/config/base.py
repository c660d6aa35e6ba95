"""What all configuration shares: strict models, their identity in cache keys, where models and rows come from; and how
TOML and overrides become such models, with one line for each thing wrong.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)

from rollout_core.base.errors import ConfigError
from rollout_core.base.settings import refuse_credentials, without_passwords
from rollout_core.config.described import Described
from rollout_core.config.plugin_use import PluginUse

SCHEMA_VERSION = 1
Address = Annotated[str, AfterValidator(refuse_credentials)]
"""Where something is: shown in logs, file names and tables, so it holds no password."""
SECRET_NAME = r"^[A-Z][A-Z0-9_]*$"
"""As names of secrets are written."""


class Settings(Described):
    """Base of every configuration model: unknown keys are errors, values never change after parsing."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    identity_without_default: ClassVar[frozenset[str]] = frozenset()
    """Fields that came after results were kept: they stay out of the cache key while they have their default."""

    @model_validator(mode="before")
    @classmethod
    def _tables_begin_from_their_defaults(cls, data: Any) -> Any:
        """A table of which some keys are given has what its default here says for the others, as one without any has:
        ``[evaluation.sampling] max_tokens = 64`` is greedy."""
        if not isinstance(data, Mapping):
            return data
        partial = {name: given for name, given in _table_defaults(cls).items() if isinstance(data.get(name), Mapping)}
        return {**data, **{name: {**given, **data[name]} for name, given in partial.items()}} if partial else data

    def cache_identity(self) -> Any:
        """What of this model enters a stage's cache key: by default the identities of all its fields."""
        return {
            name: identity(getattr(self, name))
            for name, field in type(self).model_fields.items()
            if name not in self.identity_without_default
            or getattr(self, name) != field.get_default(call_default_factory=True)
        }


@cache
def _table_defaults(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """What defaults of tables say that the tables' own keys do not."""
    found = {
        name: field.default for name, field in model.model_fields.items() if type(field.default) is field.annotation
    }
    tables = {name: default for name, default in found.items() if isinstance(default, BaseModel)}
    given = {name: default.model_dump(mode="json", exclude_unset=True) for name, default in tables.items()}
    return {name: keys for name, keys in given.items() if keys}


def identity(value: Any) -> Any:
    """What of a stage input enters its cache key, as JSON. Raises ConfigError for what is no id or small value."""
    if isinstance(value, BaseModel) and hasattr(value, "cache_identity"):
        return value.cache_identity()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, BaseModel):
        return {name: identity(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): identity(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [identity(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ConfigError(
        f"a stage input of type {type(value).__name__} has no identity; give content ids and small typed values"
    )


def non_identity_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a stage that `identity` shortens, in full and as JSON. With both the stage can be called again."""
    whole = {name: _whole(value) for name, value in inputs.items()}
    return {name: value for name, value in whole.items() if value != identity(inputs[name])}


beside_identity = non_identity_inputs
"""The former name, for code that imports it."""


def as_given(settings: BaseModel) -> dict[str, Any]:
    """What of ``settings`` was given, as JSON that is parsed to the same: without defaults, as some follow from other
    keys, but with the kinds that distinguish tables."""
    return _given(settings, settings.model_dump(mode="json"))


def _given(value: Any, dumped: Any) -> Any:
    if isinstance(value, BaseModel):
        given = value.model_fields_set | {"kind"}
        return {name: _given(getattr(value, name), item) for name, item in dumped.items() if name in given}
    if isinstance(value, Mapping):
        return {name: _given(item, dumped[str(name)]) for name, item in value.items()}
    return list(map(_given, value, dumped)) if isinstance(value, list | tuple) else dumped


def _whole(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list | tuple) else value


class RunInfo(Settings):
    """How people call this run."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    """Label of the run's snapshots and resources; letters, digits, dots, dashes."""
    tags: tuple[str, ...] = ()
    """Free labels shown with the run."""
    refresh: bool | str = False
    """Compute stages again, each once: true, in this flow run (which resumes after `prefect flow-run retry`);
    a name, such as a date, under that name, so that a killed run resumes when it is started again
    with the same name. Later runs without a refresh find the new results. Completions are not generated again, either
    way: those of samples that the store has are taken from it."""

    resume: str | None = None
    """Training starts from a snapshot: ``latest`` of this run's name and algorithm, or its id or the first digits of
    it. A run that was killed resumes without this when it is started again."""

    keep_states: Literal["last", "all"] = "last"
    """Training states of iterations and updates, and models of iterations, that stay: the last one of the run, each
    deleted once a later one is stored; or all, until housekeeping comes by. Labelled states and promoted models stay in
    any case. What was deleted is computed again where somebody asks for it. Changes no result."""

    locked: str | None = None
    """File of ``rollout plan --lock``, relative to the working folder: the run ends before its first stage where it
    would differ from that plan, and at the stage or import that does."""

    def cache_identity(self) -> Any:
        return None


class StageTimeouts(Settings):
    """The longest time, in seconds, that one try of a stage may take. Then it keeps what it has, ends, and is tried
    again as after any passing fault, up to three times; the next try continues from there.

    Where no limit is right for every model and data set, the default is none; what hangs there is found by a limit of
    its own.
    """

    importing: float | None = Field(default=43_200.0, gt=0)
    """Models and rows, from files or a hub, into the object store."""
    generating: float | None = Field(default=None, gt=0)
    """Samples. An engine without a token is replaced after ``backend.hang_timeout_seconds``; an answer of an endpoint
    is waited for ``backend.timeout_seconds``."""
    scoring: float | None = Field(default=None, gt=0)
    """Rewards, and evaluations. Each call of a reward has a limit of its own."""
    learning: float | None = Field(default=None, gt=0)
    """Updates of weights. ``budget`` says how long training lasts."""
    agents: float | None = Field(default=None, gt=0)
    """Runs of agents, and live traffic. Each rollout has a limit of its own."""
    filing: float | None = Field(default=21_600.0, gt=0)
    """All else: what looks up, promotes, and writes results."""

    def cache_identity(self) -> Any:
        return None


class RunCost(Settings):
    """Prices, by which the run's summary says what it cost. Only what was computed counts: what was cached cost
    nothing."""

    per_hour: float = Field(default=0.0, ge=0)
    """Price of the machine, for each hour in which a stage was computed."""
    per_gpu_hour: float = Field(default=0.0, ge=0)
    """Price of each of the machine's GPUs, for each such hour, in addition to ``per_hour``."""
    currency: str = Field(default="USD", pattern=r"^[A-Za-z]{1,8}$")
    """Ends the sum; nothing is converted."""

    def cache_identity(self) -> Any:
        return None


_ALWAYS_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"} | {
    f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
}
_NO_VARIABLES = set(["true", "false", "none", "and", "or", "not", "is", "in", "if", "else", "for", "self", "loop"])


def is_template_text(chat_template: str) -> bool:
    """Whether it is a chat template's text, and not the path of a file."""
    return any(mark in chat_template for mark in ("{%", "{{", "{#", "\n"))


class ModelSource(Settings):
    """Where a model comes from. Its content, not this address, enters cache keys."""

    uri: Address = Field(min_length=1)
    """A folder in Hugging Face format, a GGUF file, a hub id such as ``Qwen/Qwen2.5-0.5B-Instruct``, or the content id
    of a checkpoint in the object store. A GGUF file is made a folder with weights in bfloat16, once; on the hub it is
    ``owner/name/file.gguf``."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    tokenizer: Address | None = None
    """Folder or hub id of another tokenizer than the model's own."""
    adapter: Address | None = Field(default=None, min_length=1)
    """A LoRA adapter in peft's format, made for this model: a folder, a hub id, or the content id of one in the object
    store. It is merged into a copy of the weights, once; what is used from then on is that model."""
    chat_template: Annotated[str, AfterValidator(refuse_credentials)] | None = Field(default=None, min_length=1)
    """Another chat template than the tokenizer's: a file, or the template's text. It is part of the model from then on:
    of its id, of what is trained from it, and of what is exported."""
    chat_template_kwargs: Mapping[str, JsonValue] = Field(default_factory=dict)
    """Variables of the chat template, such as ``{enable_thinking = false}``; part of the model, as the template is."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _names_of_their_own(cls, given: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        for name in given:
            if not (name.isascii() and name.isidentifier()) or name.lower() in _NO_VARIABLES:
                raise ValueError(f"{name!r} is no variable of a template")
            if name in _ALWAYS_GIVEN:
                raise ValueError(f"{name!r} is given by rows and tokenizer, not by a setting; leave it out")
        return given

    @property
    def changes_template(self) -> bool:
        """Whether the model gets another chat template than its own, or values for it."""
        return self.chat_template is not None or bool(self.chat_template_kwargs)

    def cache_identity(self) -> Any:
        return None  # the content id of the model enters instead


class ColumnSource(Settings):
    """Which column of the rows is read as one of ours, and as what."""

    column: str | None = Field(default=None, min_length=1)
    """The key or column in the rows; default: the same name."""
    type: Literal["text", "int", "float", "bool", "json"] | None = None
    """What its values are read as, which in CSV are all text; ``json``: text that holds JSON, such as a list of
    messages. Default: as they are."""


Columns = Mapping[str, str | ColumnSource]


class _Dataset(Settings):
    address_key: ClassVar[str] = "path"
    """The key that says where the rows are."""

    columns: Columns = Field(default_factory=dict)
    """Keys of the rows under other names, ours = theirs: ``{prompt = "question"}``. A table declares a type, too:
    ``{answer = {column = "solution", type = "int"}}``."""
    format: Literal["alpaca", "sharegpt"] | None = None
    """What rows are that others made: ``alpaca``: ``instruction``, ``input``, ``output``; ``sharegpt``:
    ``conversations`` of ``from`` and ``value``. Default: found by the keys of rows that have none of ours."""

    def cache_identity(self) -> Any:
        return None  # the content id of the rows enters instead

    @property
    def address(self) -> str:
        """Where the rows are, for people to read."""
        return getattr(self, self.address_key)


class _FileDataset(_Dataset):
    path: Address = Field(min_length=1)
    """A file, or a pattern with ``*``, ``?`` or ``**`` whose files are taken in order of their paths. What each of them
    is, first bytes and name say: JSON lines, a JSON array, CSV or TSV, all of them also compressed by gzip, zstd, bzip2
    or xz; Parquet or Arrow."""


class FilesDataset(_FileDataset):
    """Files of rows."""

    kind: Literal["files"] = "files"


class JsonlDataset(_FileDataset):
    """The same as ``files``, by the name of JSON lines."""

    kind: Literal["jsonl_path"] = "jsonl_path"


class ParquetDataset(_FileDataset):
    """The same as ``files``, by the name of Parquet."""

    kind: Literal["parquet_path"]


class HuggingFaceDataset(_Dataset):
    """A data set of the ``datasets`` library."""

    address_key = "uri"

    kind: Literal["hugging_face"]
    uri: Address = Field(min_length=1)
    """A folder of ``save_to_disk``, a folder of data files, or a hub id such as ``trl-lib/ultrafeedback_binarized``."""
    split: str = "train"
    """Split of the data set."""
    subset: str | None = None
    """Which of a hub id's configurations, where it has several."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""


class StoredDataset(_Dataset):
    """Rows in the object store."""

    address_key = "id"

    kind: Literal["object"]
    id: str = Field(pattern="^[0-9a-f]{8,64}$")
    """Content id of a file of rows, or of a folder of them, or its first digits, at least 8."""


class PluginDataset(PluginUse, _Dataset):
    """Rows that a plugin gives, of kind ``data-source``."""

    address_key = "name"

    max_rows: int | None = Field(default=None, ge=1)
    """So many are taken, the first ones; an endless source needs it. Default: all."""


class EpisodesDataset(_Dataset):
    """Episodes that an earlier run played in an environment, as conversations."""

    address_key = "run"

    kind: Literal["episodes"]
    run: Address = Field(min_length=1)
    """Name of the run, of several the last; or the first digits of its id. Held-out episodes are left out."""
    min_reward: float | None = None
    """Least reward of an episode that is taken."""
    best: float = Field(default=1.0, gt=0, le=1)
    """Share of the episodes that is taken, after ``min_reward``: those with the highest rewards."""

    @model_validator(mode="after")
    def _rows_have_their_form(self) -> EpisodesDataset:
        if self.columns or self.format is not None:
            raise ValueError("episodes are conversations as they are; leave out columns and format")
        return self


class EnvironmentRows(Settings):
    """Rows that the environment of the run or suite makes itself, as those of other projects do."""

    address_key: ClassVar[str] = "kind"

    kind: Literal["environment"]
    split: Literal["train", "eval"] = "train"
    """To learn from, or held out: no row of one is one of the other."""
    size: int | None = Field(default=None, ge=1, le=10_000_000)
    """Number of rows. Default: all that there are; 1,000 where they are generated."""
    seed: int = Field(default=0, ge=0, lt=2**30)
    """Of rows that are generated."""

    def cache_identity(self) -> Any:
        return None  # the content id of the rows enters instead

    @property
    def address(self) -> str:
        """Where the rows come from, for people."""
        return f"the environment ({self.split})"


DatasetSource = (
    FilesDataset | JsonlDataset | ParquetDataset | HuggingFaceDataset | StoredDataset | PluginDataset | EnvironmentRows
)
DemonstrationSource = DatasetSource | EpisodesDataset
"""Where rows are that an answer of the model is learned from as it is."""


SettingsT = TypeVar("SettingsT", bound=Settings)

ELSEWHERE = {
    "learning_rate": ("optimizer.lr",),
    "lr_scheduler_type": ("optimizer.schedule",),
    "warmup_ratio": ("optimizer.warmup_ratio",),
    "num_train_epochs": ("budget.epochs", "epochs"),
    "num_epochs": ("budget.epochs", "epochs"),
    "batch_size": ("minibatch_size",),
    "per_device_train_batch_size": ("minibatch_size",),
    "max_length": ("sequence.max_length",),
    "max_seq_length": ("sequence.max_length",),
    "max_seq_len": ("max_length", "sequence.max_length"),
    "packing": ("sequence.max_length",),
    "ppo_max_token_len_per_gpu": ("max_tokens_per_microbatch",),
    "max_new_tokens": ("max_tokens", "sampling.max_tokens"),
    "max_completion_length": ("sampling.max_tokens",),
    "num_generations": ("samples_per_prompt",),
    "num_return_sequences": ("n",),
    "do_sample": ("temperature",),
    "model_name_or_path": ("uri", "model.uri", "base_model.uri"),
    "output_dir": ("output.dir",),
}
"""What transformers and TRL call a key, and what it is called here; of several the first that there is."""


EXPLAINED = {"explained": True}
"""Context of a validation whose errors `parse_config` explains."""


def load_config(
    path: str | Path,
    model: type[SettingsT],
    overrides: Mapping[str, Any] | None = None,
    options: Mapping[str, str] | None = None,
) -> SettingsT:
    """Read a TOML file as ``model``. ``overrides`` maps dotted keys to values, such as ``{"ppo.iterations": 3}``;
    ``options`` names what gave those that ``--set`` did not.

    Raises ConfigError with one line for each thing wrong: the file or option, the key, what was got and what was
    expected.
    """
    return parse_config(read_toml(path), model, name=str(path), overrides=overrides, options=options)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError where it cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not readable as TOML: {error}") from error


def parse_config(
    data: Mapping[str, Any],
    model: type[SettingsT],
    *,
    name: str = "config",
    overrides: Mapping[str, Any] | None = None,
    options: Mapping[str, str] | None = None,
) -> SettingsT:
    """Validate ``data`` as ``model``; raises ConfigError as `load_config` does."""
    merged = apply_overrides(data, overrides or {})
    try:
        return model.model_validate(merged, context=EXPLAINED)
    except ValidationError as error:
        origins = {key: (options or {}).get(key, "--set") for key in overrides or {}}
        own = set(_violations(data, model)) if origins else set()
        violations = tuple(
            f"{name if line in own else _option(line, origins) or name}: {line}"
            for line in _explain(error, model, merged)
        )
        raise ConfigError("\n".join(violations), violations) from None


def _violations(data: Mapping[str, Any], model: type[BaseModel]) -> list[str]:
    try:
        model.model_validate(data, context=EXPLAINED)
    except ValidationError as error:
        return list(_explain(error, model, data))
    return []


def _option(line: str, origins: Mapping[str, str]) -> str | None:
    """The options that gave the value, or part of the table, that a line is about."""
    about = line.partition(":")[0] + "."
    given = [option for key, option in origins.items() if about.startswith(f"{key}.") or f"{key}.".startswith(about)]
    return ", ".join(dict.fromkeys(given)) or None


def apply_overrides(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``data`` with dotted keys replaced. Raises ConfigError where a key leads through a plain value."""
    result = _copy(data)
    for dotted, value in overrides.items():
        *parents, leaf = dotted.split(".")
        table = result
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {dotted}: {parent!r} is a plain value, not a table")
        table[leaf] = value
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return list(value) if isinstance(value, list | tuple) else value


def _explain(error: ValidationError, model: type[BaseModel], data: Any) -> Iterator[str]:
    seen: set[str] = set()
    for item in _of_the_kind_meant(error.errors(), data):
        location = _plain_location(item["loc"], data)
        dotted = ".".join(str(part) for part in location) or "(top level)"
        if item["type"] == "extra_forbidden":
            hint = _nearest_key(model, item["loc"])
            line = f"{dotted}: unknown key" + (f"; did you mean {hint!r}?" if hint else "")
        elif item["type"] == "missing":
            line = f"{dotted}: required, but not given"
        elif item["type"] == "model_type":
            dotted = ".".join(str(part) for part in _key_of(item["loc"], data)) or "(top level)"
            line = f"{dotted}: Input should be a valid dictionary; got {_shown(item['input'])}"
        elif item["type"] in ("literal_error", "model_attributes_type"):
            line = f"{dotted}: {item['msg']}; got {_shown(item['input'])}"
        elif location[-1:] == ["api_key"]:
            line = f"{dotted}: {item['msg']}; expected the NAME of a secret, such as SERVER_KEY"  # it may be the key
        else:
            # Of a whole table, such as one with a key of another algorithm, the message names what is wrong.
            got = "" if isinstance(item["input"], Mapping) else f"; got {_shown(item['input'])}"
            line = f"{dotted}: {item['msg'].removeprefix('Value error, ')}{got}"
        if line not in seen:
            seen.add(line)
            yield line


def _of_the_kind_meant(errors: list[Any], data: Any) -> list[Any]:
    """Without what a union's members say of a table whose ``kind`` is another's; where it is nobody's, one line."""
    refusing = {
        tuple(item["loc"][:-1]): item
        for item in errors
        if item["loc"][-1:] == ("kind",)
        and (
            item["type"] in ("literal_error", "missing")
            or (item["type"] == "extra_forbidden" and len(item["loc"]) > 1)  # of a member that has no kind
        )
        and _key_of(item["loc"][:-1], data) == _key_of(item["loc"][:-2], data)
    }
    kept = [item for item in errors if not any(item["loc"][: len(member)] == member for member in refusing)]
    for union in dict.fromkeys(member[:-1] for member in refusing):
        if any(item["loc"][: len(union)] == union and len(item["loc"]) > len(union) for item in kept):
            continue
        kinds = [item for member, item in refusing.items() if member[:-1] == union and item["type"] == "literal_error"]
        if kinds:
            expected = " or ".join(item["ctx"]["expected"] for item in kinds)
            kept.append({**kinds[0], "msg": f"Input should be {expected}"})
    return kept


def _key_of(location: tuple[int | str, ...], data: Any) -> list[int | str]:
    """The parts of ``location`` that are keys of the file."""
    return _plain_location((*location, ""), data)[:-1]


def _shown(value: Any) -> str:
    text = without_passwords(repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


def _plain_location(location: tuple[int | str, ...], data: Any) -> list[int | str]:
    """Drops the names of union members that pydantic puts into a location, which are no keys of the file."""
    plain: list[int | str] = []
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if (isinstance(data, Mapping) and part in data) or (
            isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)
        ):
            data = data[part]  # pyright: ignore[reportCallIssue, reportArgumentType]
            plain.append(part)
        elif last and not str(part).startswith("function-"):  # of a member that has validators of its own
            plain.append(part)
    return plain


def _nearest_key(model: type[BaseModel], location: tuple[int | str, ...]) -> str | None:
    """The key that was meant, as it stands below the same table: one alike, of the same name in a table below, or the
    one that other libraries call so."""
    candidates: set[str] = set(model.model_fields)
    models: list[type[BaseModel]] = [model]
    for part in location[:-1]:
        members = [member for member in models if part in member.model_fields]
        if members:
            models = [m for member in members for m in _models_in(member.model_fields[str(part)].annotation)]
        else:
            # A member with validators stands there as ``function-after[check(), Name]``.
            name = str(part).rstrip("]").rpartition(" ")[2]
            models = [member for member in models if member.__name__ == name] or models
        candidates = {name for member in models for name in member.model_fields}
    wanted = str(location[-1])
    below = {key.rpartition(".")[2]: key for member in models for key in _keys_below(member)}
    known = [name for name in ELSEWHERE.get(wanted, ()) if name in candidates or name in below.values()]
    close = difflib.get_close_matches(wanted, candidates, n=1, cutoff=0.6)
    return next(iter([*known, *([below[wanted]] if wanted in below else []), *close]), None)


def _keys_below(model: type[BaseModel]) -> Iterator[str]:
    """Keys of the tables in a model's tables, such as ``optimizer.lr``; the shallowest come last."""
    for name, field in model.model_fields.items():
        if get_origin(field.annotation) in (tuple, list):
            continue  # which of its tables would be meant is not known
        for inner in _models_in(field.annotation):
            yield from (f"{name}.{key}" for key in inner.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
