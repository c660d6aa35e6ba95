"""What all configuration shares: strict models, their identity in cache keys, and where models and rows come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rollout_core.base.errors import ConfigError
from rollout_core.base.secrets import refuse_credentials

SCHEMA_VERSION = 1
Address = Annotated[str, AfterValidator(refuse_credentials)]
"""Where something is: shown in logs, file names and tables, so it holds no password."""


class Settings(BaseModel):
    """Base of every configuration model: unknown keys are errors, values never change after parsing."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    identity_without_default: ClassVar[frozenset[str]] = frozenset()
    """Fields that came after results were kept: they stay out of the cache key while they have their default."""

    def cache_identity(self) -> Any:
        """What of this model enters a stage's cache key: by default the identities of all its fields."""
        return {
            name: identity(getattr(self, name))
            for name, field in type(self).model_fields.items()
            if name not in self.identity_without_default
            or getattr(self, name) != field.get_default(call_default_factory=True)
        }


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


class RunInfo(Settings):
    """How people call this run."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    """Label of the run's snapshots and resources; letters, digits, dots, dashes."""
    tags: tuple[str, ...] = ()
    """Free labels shown beside the run."""
    refresh: bool | str = False
    """Compute stages again, each once: true, in this flow run (which resumes after `prefect flow-run retry`);
    a name, such as a date, under that name, so that a killed run resumes when it is started again
    with the same name. Later runs without a refresh find the new results. Samples already in the store's ledger are not
    generated twice either way."""

    resume: str | None = None
    """Training starts from a snapshot: ``latest`` of this run's name and algorithm, or its id or the first digits of
    it. A run that was killed resumes without this when it is started again."""

    def cache_identity(self) -> Any:
        return None


class ModelSource(Settings):
    """Where a model comes from. Its content, not this address, enters cache keys."""

    uri: Address = Field(min_length=1)
    """A folder in Hugging Face format, a hub id such as ``Qwen/Qwen2.5-0.5B-Instruct``, or the content id of a
    checkpoint in the object store."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    tokenizer: Address | None = None
    """Folder or hub id of another tokenizer than the model's own."""
    adapter: Address | None = Field(default=None, min_length=1)
    """A LoRA adapter in peft's format, made for this model: a folder, a hub id, or the content id of one in the object
    store. It is merged into a copy of the weights, once; what is used from then on is that model."""

    def cache_identity(self) -> Any:
        return None  # the content id of the model enters instead


class _Dataset(Settings):
    address_key: ClassVar[str] = "path"
    """The key that says where the rows are."""

    def cache_identity(self) -> Any:
        return None  # the content id of the rows enters instead

    @property
    def address(self) -> str:
        """Where the rows are, for people to read."""
        return getattr(self, self.address_key)


class JsonlDataset(_Dataset):
    """JSON lines."""

    kind: Literal["jsonl_path"] = "jsonl_path"
    path: Address = Field(min_length=1)
    """A file, or a pattern with ``*``, ``?`` or ``**`` whose files are taken in order of their paths."""


class ParquetDataset(_Dataset):
    """Parquet files, a row a row; a null is an absent key."""

    kind: Literal["parquet_path"]
    path: Address = Field(min_length=1)
    """A file, or a pattern with ``*``, ``?`` or ``**`` whose files are taken in order of their paths."""


class HuggingFaceDataset(_Dataset):
    """A data set of the ``datasets`` library."""

    address_key = "uri"

    kind: Literal["hugging_face"]
    uri: Address = Field(min_length=1)
    """A folder of ``save_to_disk``, a folder of data files, or a hub id such as ``trl-lib/ultrafeedback_binarized``."""
    split: str = "train"
    subset: str | None = None
    """Which of a hub id's configurations, where it has several."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""


class StoredDataset(_Dataset):
    """Rows in the object store."""

    address_key = "id"

    kind: Literal["object"]
    id: str = Field(pattern="^[0-9a-f]{8,64}$")
    """Content id of a JSONL or Parquet file, or of a folder of them, or its first digits, at least 8."""


DatasetSource = JsonlDataset | ParquetDataset | HuggingFaceDataset | StoredDataset
