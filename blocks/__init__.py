"""Prefect blocks: saved, typed settings that build a `rollout_core` object.

Object storage is also the place where Prefect keeps task results.

Register them with ``prefect block register -m blocks``.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from prefect.blocks.core import Block
from prefect.filesystems import WritableFileSystem
from pydantic import Field, PrivateAttr, SecretStr

from blocks.secrets import RolloutSecrets
from blocks.tracker import ExperimentTracker
from rollout_core.base.errors import ConfigError, MissingObject
from rollout_core.objects import ObjectStore
from rollout_core.objects.files import RESULT_REFS
from rollout_core.objects.retention.run_leases import renew_ref
from rollout_core.store import SqlLightningStore

__all__ = ["ContentAddressedStorage", "ExperimentTracker", "RolloutDatabase", "RolloutSecrets"]


class ContentAddressedStorage(WritableFileSystem):
    """Task results by content: a result's key is a ref, the ref names a blob, and the blob is verified when read."""

    _block_type_name = "Content Addressed Storage"
    _block_type_slug = "content-addressed-storage"

    url: str = Field(
        default="file://./data/objects",
        description="Where objects live: file:///folder, s3://bucket/prefix, gs://bucket/prefix or memory://name.",
    )
    storage_options: SecretStr = Field(
        default=SecretStr("{}"),
        description="JSON of options for the file system, such as endpoint, key and secret. Never logged.",
    )
    _objects: ObjectStore | None = PrivateAttr(default=None)

    @classmethod
    def over(cls, objects: ObjectStore) -> ContentAddressedStorage:
        """A storage of this object store, for this process only."""
        storage = cls(url=objects.url)
        storage._objects = objects
        return storage

    def objects(self) -> ObjectStore:
        """The object store at ``url``. Raises ConfigError for a URL or options that cannot be one."""
        if self._objects is None:
            self._objects = ObjectStore.from_url(self.url, storage_options=self._options())
        return self._objects

    def _options(self) -> dict[str, Any]:
        try:
            return json.loads(self.storage_options.get_secret_value())
        except ValueError as error:
            raise ConfigError("storage_options of the storage block is not JSON") from error

    def _resolve_path(self, path: str) -> None:
        """Asked by Prefect for a file path of a result; results here have none besides their key."""

    # Prefect reads and writes results through the plain names, passing _sync=True.
    def read_path(self, path: str, _sync: bool = True) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Bytes stored under the result key ``path``, verified. Raises MissingObject, CorruptObject or CorruptRef."""
        content_id = self.objects().get_ref(f"{RESULT_REFS}/{path}")
        if content_id is None:
            raise MissingObject(path, f"no result is stored under key {path} in {self.url}")
        return self.objects().get_bytes(content_id)

    def write_path(self, path: str, content: bytes, _sync: bool = True) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Store ``content`` durably under the result key ``path``. Writing what is already there changes nothing."""
        objects = self.objects()
        content_id = objects.put_bytes(content)
        if objects.cached_ref(f"{RESULT_REFS}/{path}") != content_id:
            objects.set_ref(f"{RESULT_REFS}/{path}", content_id)

    async def aread_path(self, path: str) -> bytes:
        """`read_path` for coroutines."""
        return await asyncio.to_thread(self.read_path, path)

    async def awrite_path(self, path: str, content: bytes) -> None:
        """`write_path` for coroutines."""
        await asyncio.to_thread(self.write_path, path, content)

    def use(self, path: str) -> None:
        """Have the result under key ``path``, if there is one, count as used now: housekeeping then leaves it."""
        renew_ref(self.objects(), f"{RESULT_REFS}/{path}")

    def forget(self, path: str) -> None:
        """Drop the result under key ``path``, so that it is computed again."""
        self.objects().delete_ref(f"{RESULT_REFS}/{path}")


class RolloutDatabase(Block):
    """Where rollouts, attempts, spans and resources live."""

    _block_type_name = "Rollout Database"
    _block_type_slug = "rollout-database"

    url: SecretStr = Field(
        default=SecretStr("sqlite:///./data/rollout.db"),
        description="sqlite:///file or postgresql://user:password@host/database. A secret: it may hold a password.",
    )

    def store(self) -> SqlLightningStore:
        """A store over this database; close it after use."""
        return SqlLightningStore.from_url(self.url.get_secret_value())
