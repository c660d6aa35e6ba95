"""`rollout doctor cloud`: whether storage, queue, secrets and machine are what runs in a cloud, or here, count on.

Seven checks, each tried for real with the process's own settings and credentials. What is written to
find out is written below ``tmp/`` and removed again; of a doctor that was killed, garbage collection removes it.
"""

from __future__ import annotations

import asyncio
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

from blake3 import blake3
from ulid import ULID

from deployments.probes import Check, Level, check, look_at_database, machine_text, one_line
from rollout_core.base.errors import ConfigError, RolloutError
from rollout_core.base.machine import free_disk, look_at_machine
from rollout_core.base.queue_settings import QUEUE, queue_settings
from rollout_core.base.secret_sources import source_names
from rollout_core.base.settings import ALLOWED, allowed_secrets, max_blob_bytes, read_secret, without_password
from rollout_core.base.spot import Kind, look_at_spot, metadata
from rollout_core.config.base import read_toml
from rollout_core.config.cloud import PROVIDER_OF_SCHEME, parse_cloud, use_cloud
from rollout_core.objects import ObjectStore
from rollout_core.objects.buckets import RemoteFiles
from rollout_core.objects.files import CHUNK_BYTES, storage_faults
from rollout_core.store.bridge.bridge_program import look_at_queue
from tasks.runtime.prefect_server import object_store

Provider = Literal["local", "aws", "gcp"]
SECTION = "cloud"
NOT_TRIED = "not tried"
ROUNDTRIP_BYTES = 64 * 2**20
CONNECT_SECONDS = 10.0
GCP_PERMISSIONS = tuple(f"storage.objects.{verb}" for verb in ("create", "delete", "get", "list"))
_SPOT: dict[str, Kind] = {"aws": "aws", "gcp": "gce"}


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


def examined(provider: Provider | None, config: Path | None) -> list[Check]:
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


def examine(patient: Patient) -> list[Check]:
    """All trials, side by side; one that needs another waits for it, and is not made where that one failed."""
    running: dict[str | None, Future[Check]] = {}
    with ThreadPoolExecutor(len(TRIALS)) as pool:
        for name, trial in TRIALS.items():
            running[name] = pool.submit(_tried, name, trial, patient, running.get(trial.needs))
    return [done.result() for done in running.values()]


def _tried(name: str, trial: Trial, patient: Patient, needed: Future[Check] | None) -> Check:
    before = None if needed is None else needed.result()
    began = time.monotonic()

    def ended(problem: Level | None, got: str, advice: str = "") -> Check:
        found = check(name, problem, got, trial.expected, advice)
        latency_ms = round(1000 * (time.monotonic() - began))
        return found.model_copy(update={"section": SECTION, "latency_ms": latency_ms})

    if before is not None and before.level is Level.FAIL:
        if before.got.startswith(NOT_TRIED):
            return ended(Level.FAIL, before.got, before.advice)
        return ended(Level.FAIL, f"{NOT_TRIED}: {before.name} failed", f"mend {before.name} first")
    try:
        return ended(None, trial.make(patient))
    except Failed as failed:
        return ended(Level.FAIL, one_line(RolloutError(str(failed))), failed.remedy)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with one part, the others are reported
        return ended(Level.FAIL, one_line(error), _remedy(name, patient))


def document(checks: Sequence[Check]) -> dict[str, Any]:
    """The checks as `rollout cloud doctor --format json` has them, and the flow of that name."""
    shared = [{"name": each.name, "latency_ms": each.latency_ms} for each in checks]
    outcomes = [
        {"status": "pass", "detail": each.got}
        if each.level is Level.OK
        else {"status": "fail", "error": each.got, "remedy": each.advice}
        for each in checks
    ]
    return {"checks": [about | outcome for about, outcome in zip(shared, outcomes, strict=True)]}


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
        "queue": "start the database, or correct ROLLOUT_DATABASE; see `rollout doctor`",
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
        return f"{place}, on a disk with {free_disk(place) // 2**20:,} MiB free"
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
    try:
        service = metadata(_SPOT.get(patient.provider, "none"))
    except ConfigError:
        return f"{machine_text(look_at_machine({}))}; not a machine of this cloud, so no spot notices"
    found = look_at_machine({}, None if service is None else look_at_spot(service))
    if found.spot is not None and found.spot.notice is not None:
        raise Failed(f"{found.spot.notice}, in {found.spot.seconds_left:.0f} s", "start no run here")
    return f"{machine_text(found)}; no spot notice"


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


@dataclass(frozen=True)
class Trial:
    """One thing that is tried."""

    make: Callable[[Patient], str]
    """Returns what was seen, for people."""
    expected: str
    needs: str | None = None
    """What has to pass before."""


TRIALS = {
    "reachability": Trial(_reachability, "storage that can be reached"),
    "auth": Trial(_auth, "storage that lets this process in", needs="reachability"),
    "object_store": Trial(_object_store, "small files are put, listed, read and deleted", needs="auth"),
    "queue": Trial(_queue, "a store that answers, and the queue that feeds it, if there is one"),
    "secret_store": Trial(_secrets, "every secret that is listed"),
    "compute_hint": Trial(_machine, "a machine that stays"),
    "content_id_roundtrip": Trial(_roundtrip, "the bytes that were sent", needs="object_store"),
}
"""In the order in which they are shown; what one needs comes before it."""
