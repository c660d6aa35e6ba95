"""`rollout cloud doctor`: whether storage, queue, secrets and machine are what runs in a cloud, or here, count on.

Seven checks in a fixed order, each tried for real with the process's own settings and credentials. What is written to
find out is written below ``tmp/`` and removed again; of a doctor that was killed, garbage collection removes it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

from blake3 import blake3
from pydantic import BaseModel
from ulid import ULID

from deployments.probes import free_bytes, look_at_database, one_line
from deployments.spot import Kind, machine_type, metadata
from rollout_core.base.determinism import machine_memory
from rollout_core.base.errors import ConfigError, RolloutError
from rollout_core.base.processes import gibibytes
from rollout_core.base.queue_settings import QUEUE, queue_settings
from rollout_core.base.secret_sources import source_names
from rollout_core.base.settings import ALLOWED, allowed_secrets, max_blob_bytes, read_secret, without_password
from rollout_core.config.base import read_toml
from rollout_core.config.cloud import PROVIDER_OF_SCHEME, parse_cloud, use_cloud
from rollout_core.objects import ObjectStore
from rollout_core.objects.buckets import RemoteFiles
from rollout_core.objects.files import CHUNK_BYTES, storage_faults
from rollout_core.store.bridge.running import look_at_queue
from tasks.runtime.prefect_server import object_store

Provider = Literal["local", "aws", "gcp"]
NAMES = ("reachability", "auth", "object_store", "queue", "secret_store", "compute_hint", "content_id_roundtrip")
ROUNDTRIP_BYTES = 64 * 2**20
CONNECT_SECONDS = 10.0
GCP_PERMISSIONS = tuple(f"storage.objects.{verb}" for verb in ("create", "delete", "get", "list"))
_ASK_GPUS = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
_SPOT: dict[str, Kind] = {"aws": "aws", "gcp": "gce"}


class Check(BaseModel):
    """How one check went."""

    name: str
    status: Literal["pass", "fail"]
    latency_ms: int
    error: str | None = None
    remedy: str | None = None
    """What to do about the error."""
    detail: str | None = None
    """What was seen."""


class Report(BaseModel):
    """All checks, in the order of `NAMES`."""

    checks: tuple[Check, ...]

    @property
    def is_healthy(self) -> bool:
        return all(check.status == "pass" for check in self.checks)

    def as_json(self) -> str:
        """For programs: the checks, and a summary of them."""
        passed = sum(check.status == "pass" for check in self.checks)
        summary = {
            "pass_count": passed,
            "fail_count": len(self.checks) - passed,
            "total_latency_ms": sum(check.latency_ms for check in self.checks),
        }
        return _Document(checks=self.checks, summary=summary).model_dump_json(indent=2, exclude_none=True)


class _Document(Report):
    summary: dict[str, int]


class Failed(Exception):
    """A check that did not pass, and what to do about it."""

    def __init__(self, error: str, remedy: str) -> None:
        self.remedy = remedy
        super().__init__(error)


@dataclass(frozen=True)
class Patient:
    """What is examined."""

    provider: Provider
    objects: ObjectStore

    @property
    def bucket(self) -> RemoteFiles:
        return cast(RemoteFiles, self.objects.files)


def examined(provider: Provider | None, config: Path | None) -> Report:
    """What a doctor finds by the settings of this process and the ``[cloud]`` table of a file; without a provider, of
    theirs.

    Raises ConfigError where they are another provider's, or no settings at all.
    """
    if config is not None:
        cloud = parse_cloud(read_toml(config), str(config))
        if cloud is None:
            raise ConfigError(f"{config}: there is no table [cloud]")
        if provider not in (None, cloud.provider):
            raise ConfigError(f"--provider {provider} does not match cloud.provider {cloud.provider!r} of {config}")
        use_cloud(cloud, str(config))
    with object_store(None) as objects:
        found = PROVIDER_OF_SCHEME.get(objects.url.partition("://")[0])
        if found is None or provider not in (None, found):
            raise ConfigError(
                f"--provider {provider or '?'} does not match the object store {without_password(objects.url)}; set "
                "ROLLOUT_STORAGE, or give a file with a [cloud] table"
            )
        return examine(Patient(found, objects))


def examine(patient: Patient) -> Report:
    """All checks; those that need what failed before them are not tried, and say so."""
    first: dict[str, Callable[[Patient], str]] = {"reachability": _reachability, "auth": _auth}
    independent = {"object_store": _object_store, "queue": _queue, "secret_store": _secrets, "compute_hint": _machine}
    done: dict[str, Check] = {}
    broken: str | None = None
    for name, check in first.items():
        done[name] = _untried(name, broken) if broken else _timed(name, check, patient)
        broken = broken or (name if done[name].status == "fail" else None)
    with ThreadPoolExecutor(len(independent)) as pool:
        needs_storage = {"object_store"}
        running = {
            name: pool.submit(_timed, name, check, patient)
            for name, check in independent.items()
            if not (broken and name in needs_storage)
        }
        for name in independent:
            done[name] = running[name].result() if name in running else _untried(name, cast(str, broken))
    broken = broken or ("object_store" if done["object_store"].status == "fail" else None)
    last = NAMES[-1]
    done[last] = _untried(last, broken) if broken else _timed(last, _roundtrip, patient)
    return Report(checks=tuple(done[name] for name in NAMES))


def _untried(name: str, broken: str) -> Check:
    return Check(
        name=name, status="fail", latency_ms=0, error=f"not tried: {broken} failed", remedy=f"mend {broken} first"
    )


def _timed(name: str, check: Callable[[Patient], str], patient: Patient) -> Check:
    began = time.monotonic()

    def ended(**outcome: Any) -> Check:
        return Check(name=name, latency_ms=round(1000 * (time.monotonic() - began)), **outcome)

    try:
        return ended(status="pass", detail=check(patient))
    except Failed as failed:
        return ended(status="fail", error=one_line(RolloutError(str(failed))), remedy=failed.remedy)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with one part, the others are reported
        return ended(status="fail", error=one_line(error), remedy=_remedy(name, patient))


def _remedy(name: str, patient: Patient) -> str:
    """For what the error does not say itself."""
    grants = {
        "aws": "allow s3:ListBucket of the bucket, and s3:GetObject, s3:PutObject, s3:DeleteObject, "
        "s3:AbortMultipartUpload of what is below its prefix",
        "gcp": "grant roles/storage.objectUser on the bucket",
        "local": "give this user the folder, or choose another by ROLLOUT_STORAGE",
    }
    own = {
        "auth": "log in again, or set the credentials in the environment",
        "queue": "start the database, or correct ROLLOUT_DATABASE; see `rollout ops doctor`",
        "secret_store": "set what is listed in ROLLOUT_SECRETS where ROLLOUT_SECRETS_FROM says",
        "compute_hint": "see the error",
    }
    return own.get(name, grants[patient.provider])


# The checks, each with what it saw


def _reachability(patient: Patient) -> str:
    if patient.provider == "local":
        place = Path(patient.objects.url.removeprefix("file://"))
        nearest = next(folder for folder in (place, *place.parents) if folder.exists())
        if not nearest.is_dir():
            raise Failed(f"{nearest} is no folder", "remove it, or choose another folder by ROLLOUT_STORAGE")
        return f"{place}, on a disk with {free_bytes(place) // 2**20:,} MiB free"
    address = _endpoint(patient)
    try:
        # Any answer will do: by the clients' way, proxies and TLS included.
        urllib.request.urlopen(address, timeout=CONNECT_SECONDS).close()
    except urllib.error.HTTPError:
        pass
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise Failed(
            f"{without_password(address)} does not answer: {reason}",
            "look at DNS, firewall, proxy (HTTPS_PROXY) and region of this machine",
        ) from None
    return without_password(address)


def _endpoint(patient: Patient) -> str:
    """Where the clients send requests."""
    given = patient.objects.storage_options.get("endpoint_url")
    if patient.provider == "gcp":
        host = given or os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
        return host if "://" in host else f"http://{host}"
    given = given or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION") or "us-east-1"
    return given or f"https://s3.{region}.amazonaws.com"


def _auth(patient: Patient) -> str:
    """Who the service takes this process for."""
    return {"aws": _auth_aws, "gcp": _auth_gcp, "local": _auth_local}[patient.provider](patient)


def _auth_aws(patient: Patient) -> str:
    files = patient.bucket
    bucket = files.path("").partition("/")[0]
    with storage_faults("authenticate for", patient.objects.url):
        try:
            files.fs.call_s3("list_objects_v2", Bucket=bucket, MaxKeys=1)
        except FileNotFoundError:
            raise Failed(
                f"there is no bucket {bucket!r}", "create it, or correct the bucket's name in the settings"
            ) from None
    return _aws_identity(patient)


def _aws_identity(patient: Patient) -> str:
    """What AWS's token service calls the caller; other services that speak S3 have none."""
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.session import get_session

    options = patient.objects.storage_options
    given: dict[str, Any] = {"aws_access_key_id": options.get("key"), "aws_secret_access_key": options.get("secret")}
    given["aws_session_token"] = options.get("token")
    patience = Config(connect_timeout=CONNECT_SECONDS, read_timeout=CONNECT_SECONDS, retries={"max_attempts": 1})
    try:
        client = get_session().create_client("sts", config=patience, endpoint_url=options.get("endpoint_url"), **given)
        return f"as {client.get_caller_identity()['Arn']}"
    except (BotoCoreError, ClientError, KeyError):
        return "the bucket lets these credentials in; who they are is not known"


def _auth_gcp(patient: Patient) -> str:
    files = patient.bucket
    bucket = files.path("").partition("/")[0]
    fs = files.fs
    files.require_login()  # also where this process was let in before
    with storage_faults("authenticate for", patient.objects.url):
        asked = "&".join(f"permissions={name}" for name in GCP_PERMISSIONS)
        try:
            granted = fs.call("GET", f"b/{bucket}/iam/testPermissions?{asked}", json_out=True)
        except FileNotFoundError:
            raise Failed(
                f"there is no bucket {bucket!r}", "create it, or correct the bucket's name in the settings"
            ) from None
    missing = sorted(set(GCP_PERMISSIONS) - set(granted.get("permissions", ())))
    if missing:
        raise Failed(f"not permitted: {', '.join(missing)}", "grant roles/storage.objectUser on the bucket")
    credentials = fs.credentials.credentials
    if credentials is None:
        return "anonymous"
    return f"as {getattr(credentials, 'service_account_email', None) or type(credentials).__name__}"


def _auth_local(patient: Patient) -> str:
    place = Path(patient.objects.url.removeprefix("file://"))
    nearest = next(folder for folder in (place, *place.parents) if folder.exists())
    if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
        raise Failed(f"user {os.getuid()} may not write in {nearest}", "give this user the folder (chown, chmod)")
    return f"user {os.getuid()} may write in {nearest}"


def _object_store(patient: Patient) -> str:
    """A small file is put, listed, read, replaced only where that is asked for, and deleted."""
    files, data = patient.objects.files, os.urandom(1000)
    key = f"tmp/{ULID()}"
    try:
        files.write(key, data)
        if files.read(key) != data:
            raise Failed("what was read is not what was written", "look at proxies between this machine and the bucket")
        if key not in [found for found, _ in files.list("tmp")]:
            raise Failed("what was written is not listed", "use a service whose listings are consistent")
        if patient.provider != "local":
            _require_conditions(patient.bucket, key)
    finally:
        files.delete(key)
    if files.stat(key) is not None:
        raise Failed("what was deleted is still there", "see the bucket's retention and object locks")
    return f"{without_password(patient.objects.url)}: put, get, list, delete"


def _require_conditions(files: RemoteFiles, key: str) -> None:
    try:
        with storage_faults("write", files.where(key)):
            files.fs.pipe_file(files.path(key), b"second", mode="create")
    except RolloutError:
        return  # as it should be: there is a file of that name
    raise Failed(
        "the service ignores conditions of writes (If-None-Match)",
        "use one that knows them, or never start two batches into one output folder at the same time",
    )


def _queue(_: Patient) -> str:
    """The store is the queue, and a cloud's may feed it; both are asked, and nothing is put into them."""
    found = look_at_database()
    waiting = "not made yet" if found.rollouts is None else f"{found.rollouts.get('queuing', 0):,} rollouts wait"
    detail = f"{found.address}: {waiting}"
    if not os.environ.get(QUEUE):
        return detail
    try:
        return f"{detail}; {asyncio.run(look_at_queue(queue_settings()))}"
    except ConfigError as error:
        raise Failed(str(error), "mend that, or take the queue out of the settings (ROLLOUT_QUEUE)") from None


def _secrets(patient: Patient) -> str:
    listed = sorted(allowed_secrets() - ALLOWED)
    sources = source_names()
    if not listed:
        if patient.provider == "local" or patient.provider not in sources:
            return "no secrets are listed (ROLLOUT_SECRETS)"
        raise Failed(
            f"secrets come from {', '.join(sources)}, but none are listed",
            "list them in ROLLOUT_SECRETS, or in the allowlist of [cloud.secrets]",
        )
    unset = [name for name in listed if read_secret(name) is None]
    if unset:
        raise Failed(f"not found in {', '.join(sources)}: {', '.join(unset)}", _remedy("secret_store", patient))
    return f"{', '.join(listed)} from {', '.join(sources)}"


def _machine(patient: Patient) -> str:
    cpus, memory = len(os.sched_getaffinity(0)), machine_memory()[1]
    found = f"{cpus} CPUs, {gibibytes(memory)} of memory, {', '.join(_gpus()) or 'no GPU'}"
    try:
        service = metadata(_SPOT.get(patient.provider, "none"))
    except ConfigError:
        return f"{found}; not a machine of this cloud, so no spot notices"
    if service is not None and (size := machine_type(service)) is not None:
        found = f"{size}: {found}"
    notice = service.notice(wait=False) if service is not None else None
    if notice is not None:
        raise Failed(f"{notice.reason}, in {notice.seconds_left:.0f} s", "start no run here")
    return f"{found}; no spot notice"


def _gpus() -> list[str]:
    """As NVIDIA's driver tells them by its own tool; none without it."""
    try:
        done = subprocess.run(_ASK_GPUS, capture_output=True, text=True, timeout=CONNECT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()]


def _roundtrip(patient: Patient) -> str:
    """Larger than any single request, so it goes in parts, and comes back under the same hash."""
    files, salt = patient.objects.files, os.urandom(16)
    size = min(ROUNDTRIP_BYTES, max_blob_bytes() or ROUNDTRIP_BYTES)
    key, sent, began = f"tmp/{ULID()}", blake3(), time.monotonic()
    upload = files.upload()
    try:
        for chunk in _pattern(salt, size):
            sent.update(chunk)
            upload.write(chunk)
        upload.commit(key)
        written = time.monotonic()
        got = blake3()
        for chunk in files.read_chunks(key):
            got.update(chunk)
    finally:
        upload.abort()
        files.delete(key)
    if got.digest() != sent.digest():
        raise Failed(
            "what came back has another hash", "look at proxies between this machine and the bucket, and memory"
        )
    seconds = written - began, time.monotonic() - written
    rates = [size / 2**20 / max(taken, 1e-3) for taken in seconds]
    return f"{size // 2**20} MiB, {rates[0]:.0f} MiB/s there and {rates[1]:.0f} MiB/s back"


def _pattern(salt: bytes, size: int) -> Iterator[bytes]:
    block = salt + bytes(number % 251 for number in range(CHUNK_BYTES - len(salt)))
    yield from islice(_forever(block), size // CHUNK_BYTES)
    yield block[: size % CHUNK_BYTES]


def _forever(block: bytes) -> Iterable[bytes]:
    while True:
        yield block


# For people


def text(report: Report, *, coloured: bool) -> str:
    """A line for each check, below a failed one what to do, and a summary."""
    green, red, plain = ("\x1b[32m", "\x1b[31m", "\x1b[0m") if coloured else ("", "", "")
    lines = []
    for check in report.checks:
        mark = f"{green}✓{plain}" if check.status == "pass" else f"{red}✗{plain}"
        detail = check.detail if check.status == "pass" else f"{red}{check.error}{plain}"
        lines.append(f"{mark} {check.name:<22}{check.latency_ms:>6} ms  {detail}")
        if check.remedy:
            lines.append(f"  -> {check.remedy}")
    passed = sum(check.status == "pass" for check in report.checks)
    total = sum(check.latency_ms for check in report.checks)
    return "\n".join([*lines, "", f"{passed} pass, {len(report.checks) - passed} fail - total {total} ms"])
