"""The ``[cloud]`` table of a TOML file: where objects, secrets and queue are, in one cloud or on this machine.

It is another way to write settings of the environment, for the process that reads the file: it says where, never what,
so nothing of it enters a cache key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from rollout_core.base.errors import ConfigError
from rollout_core.base.queue_settings import LEASES, QUEUE, QUEUE_DEAD_LETTER, QUEUE_LEASE, QUEUE_TOPIC
from rollout_core.base.secret_sources import SOURCES
from rollout_core.base.settings import SECRET_LIST
from rollout_core.config.base import Settings, parse_config

MIB, GIB = 2**20, 2**30
LEAST_PART_BYTES = 5 * MIB
MOST_BLOB_BYTES = 10 * GIB


class SecretNames(Settings):
    """Secrets that may be read, from the environment or the cloud's secret manager."""

    allowlist: tuple[str, ...] = ()
    """Ids in the secret manager, such as ``rollout/hf-token``, which configurations call ``HF_TOKEN``."""


class _Bucket(Settings):
    bucket: str = Field(min_length=3, pattern=r"^[a-z0-9][a-z0-9._-]+$")
    """Its name, without ``s3://`` or ``gs://``."""
    prefix: str | None = None
    """Below which all is kept, such as ``runs/``."""
    max_snapshot_part_bytes: int = Field(default=5 * GIB, gt=0)
    """Nothing larger is stored as one object. What rollout writes itself are files of 4 GiB at most, but for a tensor
    that is larger."""

    @field_validator("max_snapshot_part_bytes")
    @classmethod
    def _is_below_the_cap(cls, value: int) -> int:
        if value > MOST_BLOB_BYTES:
            raise ValueError("above the 10 GiB hard cap")
        return value


class S3Bucket(_Bucket):
    """Objects on S3."""

    multipart_chunk_bytes: int = 16 * MIB
    """Parts in which large files are sent."""

    @field_validator("multipart_chunk_bytes")
    @classmethod
    def _is_a_part(cls, value: int) -> int:
        if value < LEAST_PART_BYTES:
            raise ValueError("below S3 5 MiB minimum")
        return value


class GCSBucket(_Bucket):
    """Objects on Google Cloud Storage."""

    resumable_chunk_bytes: int = 16 * MIB
    """Parts in which large files are sent; rounded down to a multiple of 256 KiB."""

    @field_validator("resumable_chunk_bytes")
    @classmethod
    def _is_a_part(cls, value: int) -> int:
        if value < LEAST_PART_BYTES:
            raise ValueError("below GCS 5 MiB minimum")
        return value


class SQSQueue(Settings):
    """A queue of messages that become rollouts, on SQS."""

    queue_url: str = Field(pattern=r"^https?://[^/]+/.+$")
    """As SQS gives it, such as ``https://sqs.us-west-2.amazonaws.com/123456789012/rollout``."""
    visibility_timeout_secs: int = Field(default=LEASES["sqs"][2], ge=LEASES["sqs"][0], le=LEASES["sqs"][1])
    """How long a message that was received stays hidden, unless that is renewed."""
    dead_letter_url: str | None = Field(default=None, pattern=r"^https?://[^/]+/.+$")
    """Queue that refused messages are sent to, with the reason; without it the queue's redrive policy takes them."""


class PubSubQueue(Settings):
    """A subscription to messages that become rollouts, on Pub/Sub."""

    topic: str | None = None
    """Which the subscription has to be one of."""
    subscription: str = Field(min_length=3)
    """Its name in the project, or ``projects/PROJECT/subscriptions/NAME``."""
    ack_deadline_secs: int = Field(default=LEASES["pubsub"][2], ge=LEASES["pubsub"][0], le=LEASES["pubsub"][1])
    """How long a message that was received is held, unless that is renewed."""
    dead_letter_topic: str | None = None
    """Topic that refused messages are sent to, with the reason; without it the subscription's policy takes them."""


class LocalCloud(Settings):
    """This machine."""

    provider: Literal["local"] = "local"
    path: str = Field(default="./data/objects", min_length=1)
    """Folder of the object store."""
    secrets: SecretNames = SecretNames()

    def environment(self) -> dict[str, str]:
        """The settings that this table stands for."""
        path = self.path if self.path.startswith(("/", "./", "../")) else f"./{self.path}"
        return {"ROLLOUT_STORAGE": f"file://{path}", **_secrets(self.secrets, None)}


class AWSCloud(Settings):
    """Amazon Web Services."""

    provider: Literal["aws"]
    region: str = Field(min_length=1)
    """Such as ``eu-central-1``."""
    s3: S3Bucket
    sqs: SQSQueue | None = None
    """A queue that `rollout store bridge` empties into the store's."""
    secrets: SecretNames = SecretNames()

    def environment(self) -> dict[str, str]:
        """The settings that this table stands for."""
        place = {"AWS_DEFAULT_REGION": self.region, **_storage("s3", self.s3, self.s3.multipart_chunk_bytes)}
        if self.sqs is not None:
            lease, dead = self.sqs.visibility_timeout_secs, self.sqs.dead_letter_url
            place |= _queue(self.sqs.queue_url, lease, dead, None)
        return place | _secrets(self.secrets, "aws")


class GCPCloud(Settings):
    """Google Cloud."""

    provider: Literal["gcp"]
    project: str = Field(min_length=1)
    """Id of the Google Cloud project."""
    gcs: GCSBucket
    pubsub: PubSubQueue | None = None
    """A subscription that `rollout store bridge` empties into the store's queue."""
    secrets: SecretNames = SecretNames()

    def environment(self) -> dict[str, str]:
        """The settings that this table stands for."""
        place = {"GOOGLE_CLOUD_PROJECT": self.project, **_storage("gs", self.gcs, self.gcs.resumable_chunk_bytes)}
        if self.pubsub is not None:
            whole, queue = self._whole, self.pubsub
            topics = whole("topics", queue.dead_letter_topic), whole("topics", queue.topic)
            place |= _queue(whole("subscriptions", queue.subscription) or "", queue.ack_deadline_secs, *topics)
        return place | _secrets(self.secrets, "gcp")

    def _whole(self, kind: str, name: str | None) -> str | None:
        """A name within the project as the service knows it."""
        return name if name is None or "/" in name else f"projects/{self.project}/{kind}/{name}"


Cloud = LocalCloud | AWSCloud | GCPCloud
_CLOUDS: Mapping[str, type[Cloud]] = {"local": LocalCloud, "aws": AWSCloud, "gcp": GCPCloud}
PROVIDER_OF_SCHEME: Mapping[str, Literal["local", "aws", "gcp"]] = {"s3": "aws", "gs": "gcp", "file": "local"}
"""By how the address of the object store begins."""


def parse_cloud(tables: Mapping[str, Any], name: str) -> Cloud | None:
    """The table ``[cloud]`` of a file's tables; None where there is none.

    Its tables may also stand below the provider's name, as ``[cloud.aws.s3]``. Raises ConfigError as `load_config`.
    """
    table = tables.get("cloud")
    if table is None:
        return None
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name}: cloud: expected a table; got {table!r}")
    provider = table.get("provider", "local")
    model = _CLOUDS.get(provider) if isinstance(provider, str) else None
    if model is None:
        raise ConfigError(f"{name}: cloud.provider: got {provider!r}; expected one of {', '.join(_CLOUDS)}")
    own = {"aws": ("s3", "sqs"), "gcp": ("gcs", "pubsub")}
    for other in {"aws", "gcp"} - {provider}:
        if found := {other, *own[other]} & table.keys():
            raise ConfigError(
                f"{name}: cloud.{min(found)}: belongs to provider {other!r}, and cloud.provider is {provider!r}; a run "
                "is in one cloud"
            )
    below = table.get(provider, {})
    flat = {**{key: value for key, value in table.items() if key != provider}, **below}
    try:
        return parse_config(flat, model, name=f"{name}: cloud")
    except ConfigError as error:
        lines = tuple(line.replace(": cloud: ", ": cloud.", 1) for line in str(error).splitlines())
        raise ConfigError("\n".join(lines), lines) from None


def take_cloud(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """``tables`` without ``[cloud]``, whose settings are those of this process from now on.

    Raises ConfigError where the environment says something else.
    """
    cloud = parse_cloud(tables, name)
    if cloud is not None:
        use_cloud(cloud, name)
    return {key: value for key, value in tables.items() if key != "cloud"}


def use_cloud(cloud: Cloud, name: str) -> None:
    """Make a table's settings those of this process. Raises ConfigError where the environment says something else."""
    wanted = cloud.environment()
    others = [key for key, value in wanted.items() if os.environ.get(key, value) != value]
    if others:
        key = others[0]
        raise ConfigError(
            f"{name}: [cloud] says {key}={wanted[key]}, and the environment {key}={os.environ[key]}; unset one of them"
        )
    os.environ.update(wanted)


def secret_name(secret_id: str) -> str:
    """What configurations call a secret: ``HF_TOKEN`` for ``rollout/hf-token``."""
    return secret_id.rpartition("/")[2].upper().replace("-", "_").replace(".", "_")


def _storage(scheme: str, bucket: _Bucket, part_bytes: int) -> dict[str, str]:
    prefix = (bucket.prefix or "").strip("/")
    return {
        "ROLLOUT_STORAGE": f"{scheme}://{bucket.bucket}" + (f"/{prefix}" if prefix else ""),
        "ROLLOUT_UPLOAD_PART_BYTES": str(part_bytes),
        "ROLLOUT_MAX_BLOB_BYTES": str(bucket.max_snapshot_part_bytes),
    }


def _queue(address: str, lease_seconds: int, dead_letter: str | None, topic: str | None) -> dict[str, str]:
    more = {QUEUE_DEAD_LETTER: dead_letter, QUEUE_TOPIC: topic}
    given = {name: value for name, value in more.items() if value is not None}
    return {QUEUE: address, QUEUE_LEASE: str(lease_seconds), **given}


def _secrets(names: SecretNames, manager: str | None) -> dict[str, str]:
    if not names.allowlist:
        return {}
    listed = ",".join(f"{secret_name(found)}={found}" for found in names.allowlist)
    sources = {} if manager is None else {SOURCES: f"environment,{manager}"}
    return {SECRET_LIST: listed, **sources}
