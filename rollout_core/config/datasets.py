"""Where rows come from. Their content, not these addresses, enters cache keys."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from rollout_core.config.base import Address, Settings


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
