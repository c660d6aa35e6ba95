"""What buckets do that folders do not: pages of listings, conditions, uploads that were abandoned, refused credentials,
services that fail in the middle; and ids that are the same whoever holds the bytes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from google.oauth2.credentials import Credentials

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.ids import hash_bytes
from rollout_core.objects import ObjectStore, SnapshotStore
from rollout_core.objects.object_store import blob_key
from rollout_core.objects.retention.garbage import collect_garbage
from tests.objects.object_files import BUCKET, TREE, empty_store, in_pieces, keys, read_tree, write_tree
from tests.support.faulty_proxy import KINDS, faulty_proxy
from tests.support.gcp_server import GoogleCloud

T = TypeVar("T")


@pytest.fixture(params=["s3", "gcs"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return empty_store(request, request.param, tmp_path)


def test_what_was_saved_on_s3_and_copied_to_gcs_is_restored_to_the_same_id(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    s3, gcs = (empty_store(request, kind, tmp_path) for kind in ("s3", "gcs"))
    saved = SnapshotStore(s3).save(write_tree(tmp_path / "state", TREE), run_id="run", step=3, algorithm="sft")
    for key, _ in [*s3.files.list("cas"), *s3.files.list("refs")]:  # as `aws s3 cp` and `gcloud storage cp` do
        gcs.files.write(key, s3.files.read(key))
    assert dict(gcs.blobs()).keys() == dict(s3.blobs()).keys()
    assert SnapshotStore(gcs).restore(saved.id, tmp_path / "restored") == saved
    assert read_tree(tmp_path / "restored") == TREE
    again = SnapshotStore(gcs).save(tmp_path / "restored", run_id="run", step=3, algorithm="sft")
    assert again.id == saved.id


def test_a_listing_of_several_pages_is_whole(google: GoogleCloud, gcs: dict, tmp_path: Path) -> None:
    objects = ObjectStore.from_url(f"gs://{BUCKET}/{tmp_path.name}", storage_options=gcs)
    ids = {objects.put_bytes(str(number).encode()) for number in range(20)}
    for number in range(20):
        objects.set_ref(f"labels/{number:02}", min(ids))
    google.page_size = 3
    try:
        assert set(dict(objects.blobs())) == ids
        assert objects.ref_names("labels") == [f"labels/{number:02}" for number in range(20)]
    finally:
        google.page_size = 1000


def test_garbage_is_collected_in_a_bucket(bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket.files, "settle_seconds", 0.0)
    kept, dropped = bucket.put_json({"kept": True}), bucket.put_bytes(b"dropped")
    bucket.set_ref("labels/kept", kept)
    time.sleep(1.1)  # S3 counts whole seconds
    report = collect_garbage(bucket, min_age=timedelta(0))
    assert report.deleted_blobs == 1
    assert bucket.exists(kept) and not bucket.exists(dropped)
    assert keys(bucket, "tmp") == keys(bucket, "sweeps") == []


def test_an_upload_that_nobody_completed_is_given_up_by_the_collection(s3: dict, tmp_path: Path) -> None:
    objects = ObjectStore.from_url(f"s3://{BUCKET}/{tmp_path.name}", storage_options=s3)
    objects.files.settle_seconds = 0.0
    upload = objects.files.upload()  # as a killed process leaves it
    upload.write(bytes(20 * 2**20))
    reports = [
        collect_garbage(objects, min_age=age, dry_run=dry_run)
        for age, dry_run in [(timedelta(hours=1), False), (timedelta(0), True), (timedelta(0), False)]
    ]
    assert [report.deleted_leftovers for report in reports] == [0, 1, 1]
    assert collect_garbage(objects, min_age=timedelta(0)).deleted_leftovers == 0
    upload.abort()


def test_what_is_larger_than_the_settings_allow_is_refused(
    bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_MAX_BLOB_BYTES", "1000")
    small = ObjectStore.from_url(bucket.url, storage_options=bucket.storage_options)
    small.files.whole_write_bytes = 500
    small.put_bytes(bytes(1000))
    for put in (lambda: small.put_bytes(bytes(1001)), lambda: small.put_stream(in_pieces(bytes(1001), 400))):
        with pytest.raises(ConfigError, match=r"more than 1,000 bytes \(ROLLOUT_MAX_BLOB_BYTES, or"):
            put()
    assert len(dict(small.blobs())) == 1 and keys(small, "tmp") == []


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("5242879", "ROLLOUT_UPLOAD_PART_BYTES is 5242879, below S3's minimum of 5 MiB"),
        ("16 MiB", "ROLLOUT_UPLOAD_PART_BYTES is '16 MiB'; expected a whole number of bytes"),
    ],
)
def test_parts_that_s3_would_refuse_are_refused_at_once(
    value: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_UPLOAD_PART_BYTES", value)
    with pytest.raises(ConfigError, match=problem):
        ObjectStore.from_url("s3://bucket/x")


def test_parts_grow_and_take_pieces_of_any_size(s3: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_UPLOAD_PART_BYTES", str(5 * 2**20))
    monkeypatch.setattr("rollout_core.objects.s3.PARTS_OF_ONE_SIZE", 2)
    monkeypatch.setattr("rollout_core.objects.s3.BYTES_IN_FLIGHT", 10 * 2**20)
    objects = ObjectStore.from_url(f"s3://{BUCKET}/{tmp_path.name}", storage_options=s3)
    objects.files.whole_write_bytes = 0
    data = random.Random(7).randbytes(47 * 2**20 + 1)
    content_id = objects.put_stream(in_pieces(data, 2**20 + 3))
    path = objects.files.path(blob_key(content_id))
    for place, size in enumerate((5, 5, 10, 10, 15), 1):
        part = objects.files.fs.call_s3("head_object", Bucket=BUCKET, Key=path.partition("/")[2], PartNumber=place)
        assert part["ContentLength"] == size * 2**20, place
    assert objects.get_bytes(content_id) == data
    big = objects.put_stream(in_pieces(data[: 12 * 2**20], 12 * 2**20))
    assert objects.get_bytes(big) == data[: 12 * 2**20], "a piece of more than two parts"


@pytest.mark.parametrize("asked", ["when_supported", "when_required"])
def test_a_large_file_has_checksums_of_its_parts_unless_the_client_is_to_send_none(
    s3: dict, tmp_path: Path, asked: str
) -> None:
    options = {**s3, "config_kwargs": {"request_checksum_calculation": asked}}
    objects = ObjectStore.from_url(f"s3://{BUCKET}/{tmp_path.name}", storage_options=options)
    objects.files.whole_write_bytes = 0
    (tmp_path / "file").write_bytes(random.Random(7).randbytes(17 * 2**20))
    content_id = objects.put_file(tmp_path / "file")
    key = objects.files.path(blob_key(content_id)).partition("/")[2]
    found = objects.files.fs.call_s3("head_object", Bucket=BUCKET, Key=key, ChecksumMode="ENABLED")
    assert ("ChecksumCRC32" in found) == (asked == "when_supported")
    objects.get_file(content_id, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "file").read_bytes()


def test_a_wrong_token_is_told_at_once(google: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("gcsfs waited to ask again")

    monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(sleep=never))
    monkeypatch.setattr(google, "token", "right")
    options = {"endpoint_url": google.url, "token": Credentials(token="wrong")}
    objects = ObjectStore.from_url(f"gs://{BUCKET}/x", storage_options=options)
    with pytest.raises(ConfigError, match="expected valid credentials in the environment or in the storage options"):
        objects.get_ref("a")


def persistently(attempt: Callable[[], T]) -> T:
    """As stages do: passing faults are tried again."""
    for _ in range(20):
        try:
            return attempt()
        except Recoverable as error:
            last = error
    raise last


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_no_fault_of_the_service_changes_what_is_stored_or_read(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # gcsfs waits up to half a minute between its tries; here a tenth of that.
    waits = SimpleNamespace(sleep=lambda seconds: asyncio.sleep(seconds / 10))
    monkeypatch.setattr("gcsfs.retry.asyncio", waits)
    clean = empty_store(request, kind, tmp_path)
    options: dict[str, Any] = clean.storage_options
    make = random.Random(5)
    blobs = [make.randbytes(size) for size in [200] * 16 + [150_000] * 6]
    large = make.randbytes(9 * 2**20)
    with faulty_proxy(options["endpoint_url"], rate=0.05) as proxy:
        spoiled = ObjectStore.from_url(clean.url, storage_options={**options, "endpoint_url": proxy.url})
        spoiled.files.whole_write_bytes = 2**20
        with ThreadPoolExecutor(12) as pool:
            puts = [pool.submit(persistently, lambda data=data: spoiled.put_bytes(data)) for data in blobs]
            stream = pool.submit(persistently, lambda: spoiled.put_stream(in_pieces(large, 2**20)))
            ids = [put.result() for put in puts]
            refs = [
                pool.submit(persistently, lambda name=f"r/{number}", named=named: spoiled.set_ref(name, named))
                for number, named in enumerate(ids)
            ]
            assert stream.result() == hash_bytes(large)
            for ref in refs:
                ref.result()
            got = [pool.submit(persistently, lambda named=named: spoiled.get_bytes(named)) for named in ids]
            streamed = pool.submit(persistently, lambda: b"".join(spoiled.stream(hash_bytes(large))))
            listed = pool.submit(persistently, lambda: dict(spoiled.list_refs("r")))
            assert [data.result() for data in got] == blobs
            assert streamed.result() == large
            assert listed.result() == {f"r/{number}": named for number, named in enumerate(ids)}
        assert set(proxy.done) >= set(KINDS), f"{proxy.done}: each kind came up"
    clean.files.drop_uploads(time.time() + 60, dry_run=False)  # whose begin was not heard of
    assert set(dict(clean.blobs())) == {*ids, hash_bytes(large)}
    for content_id in [*ids, hash_bytes(large)]:
        assert hash_bytes(clean.files.read(blob_key(content_id))) == content_id
    assert keys(clean, "corrupt") == []
