"""Places that results are written to, folders, memory and a real S3 server: whole files, one winner, clear faults."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from places import address_of, use_gcs, use_s3

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.inference import folders
from rollout_core.inference.folders import OutputFolder, output_folder
from rollout_core.objects import ObjectStore, buckets, trees
from rollout_core.objects.buckets import RemoteFiles, StreamedUpload
from rollout_core.objects.s3 import S3Files
from tests.objects.object_files import python


@pytest.fixture(params=["path", "file", "memory", "s3", "gcs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OutputFolder:
    monkeypatch.setenv("ROLLOUT_UPLOAD_PART_BYTES", str(5 * 2**20))
    monkeypatch.setenv("ROLLOUT_MAX_BLOB_BYTES", "1000")  # of what the object store holds, so none here
    if request.param == "s3":
        use_s3(monkeypatch, request.getfixturevalue("s3"))
    if request.param == "gcs":
        use_gcs(monkeypatch, request.getfixturevalue("google"))
    return output_folder(address_of(request.param, tmp_path), Path("/nowhere"))


def test_a_file_is_replaced_whole_and_its_mark_changes_with_it(folder: OutputFolder):
    folder.check()
    assert folder.read("f") is None and folder.mark("f") is None
    first = folder.replace("f", [b"one\n", b"two\n"])
    assert folder.read("f") == b"one\ntwo\n" and folder.mark("f") == first
    second = folder.replace("f", iter([b"one\n"]))
    assert folder.read("f") == b"one\n" and folder.mark("f") == second
    assert first != second or first is None
    folder.replace("f", [])
    assert folder.read("f") == b""


@pytest.mark.parametrize("fault", [OSError("the rows' disk is gone"), ValueError("row 7 is no JSON")])
def test_a_file_whose_rows_fail_is_left_as_it_was_and_the_fault_is_theirs(folder: OutputFolder, fault: Exception):
    folder.replace("f", [b"old"])

    def broken():
        yield b"x" * 12 * 2**20  # more than a part: an upload is under way
        assert folder.read("f") == b"old", "the old file stays while the new one is written"
        raise fault

    with pytest.raises(type(fault)) as caught:
        folder.replace("f", broken())
    assert caught.value is fault, "nothing of the place where they were to go"
    assert folder.read("f") == b"old"
    if isinstance(folder, folders.LocalFolder):
        assert os.listdir(Path(folder.where("f")).parent) == ["f"], "no leftovers"
        return
    assert isinstance(folder, folders.BucketFolder)
    files = folder._files
    assert list(files.list("tmp")) == []
    if files.protocol == "s3":
        assert not files.fs.call_s3("list_multipart_uploads", Bucket=files.path("").strip("/")).get("Uploads")


def test_a_fault_of_a_folder_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = output_folder(str(tmp_path / "out"), tmp_path)
    folder.replace("f", [b"old"])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for call in ("wrote", "check"):
        with monkeypatch.context() as patch:
            patch.setattr(trees.Flushing, call, full)
            with pytest.raises(Recoverable, match=f"cannot write {tmp_path}/out/f: No space left on device"):
                folder.replace("f", [b"new"])
        assert folder.read("f") == b"old" and os.listdir(tmp_path / "out") == ["f"]


@pytest.mark.parametrize("size", [1, 1000, 2**19, 2**22])
def test_a_full_disk_is_told_as_that_however_little_is_written_at_once(tmp_path: Path, size: int):
    """And a fault of the rows as theirs, though what they gave so far no longer fits."""
    rows = f"(bytes({size}) for _ in range(2**23 // {size} if {size} > 1 else 2**14))"
    script = f"""
import resource, signal
from pathlib import Path
from rollout_core.base.errors import Recoverable
from rollout_core.inference.folders import output_folder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**13, 2**13))
folder = output_folder({str(tmp_path / "out")!r}, Path("/"))
try:
    folder.replace("f", {rows})
except Recoverable as error:
    print(error)
def rows():
    yield bytes(2**14)
    raise ValueError("row 2")
try:
    folder.replace("f", rows())
except ValueError as error:
    print(error)
"""
    told = python(script).communicate()[0].splitlines()
    assert told[0].startswith(f"cannot write {tmp_path}/out/f: ") and told[1:] == ["row 2"]
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture
def at_google(google: Any, monkeypatch: pytest.MonkeyPatch) -> folders.BucketFolder:
    use_gcs(monkeypatch, google)
    folder = output_folder(address_of("gcs", Path("/nowhere")), Path("/nowhere"))
    assert isinstance(folder, folders.BucketFolder)
    return folder


def names_in(folder: folders.BucketFolder) -> list[str]:
    files = folder._files
    return sorted(path.rpartition("/")[2] for path in files.fs.find(files.path(folder._prefix)))


def damage(monkeypatch: pytest.MonkeyPatch) -> None:
    put = StreamedUpload._put
    monkeypatch.setattr(StreamedUpload, "_put", lambda upload, chunks: put(upload, [b"?" + one[1:] for one in chunks]))


def refuse_copies(monkeypatch: pytest.MonkeyPatch, folder: folders.BucketFolder) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("the service is away")

    monkeypatch.setattr(folder._files.fs, "cp_file", refuse)


@pytest.mark.parametrize(("fault", "told"), [("damage", "its checksum is"), ("copy", "the service is away")])
def test_a_file_that_does_not_arrive_takes_nobodys_place(
    fault: str, told: str, at_google: folders.BucketFolder, monkeypatch: pytest.MonkeyPatch
):
    """S3 compares each request with its checksum; that of a resumable upload to GCS is known at its end."""
    mark = at_google.replace("f", [b"old"])
    damage(monkeypatch) if fault == "damage" else refuse_copies(monkeypatch, at_google)
    with pytest.raises(Recoverable, match=told) as told_of:
        at_google.replace("f", [b"new"])
    assert at_google.where("f") in str(told_of.value) and ".tmp" not in str(told_of.value)
    assert at_google.read("f") == b"old" and at_google.mark("f") == mark
    assert names_in(at_google) == ["f"], "no leftovers"


def test_what_a_killed_process_left_beside_a_file_goes_when_it_is_old(
    at_google: folders.BucketFolder, monkeypatch: pytest.MonkeyPatch
):
    at_google.replace("f", [b"old"])
    at_google.replace("other", [b"old"])
    theirs = [".f.draft", ".f.draft.tmp", f".f.{'0' * 26}.tmp.bak"]
    for name in theirs:
        at_google.create(name, b"somebody's")
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(StreamedUpload, "abort", lambda upload: None)
        killed.setattr(RemoteFiles, "require_arrived", lambda *_, **__: signal.raise_signal(signal.SIGINT))
        at_google.replace("f", [b"new"])
    [left] = [name for name in names_in(at_google) if name not in ("f", "other", *theirs)]
    assert left.startswith(".f.") and left.endswith(".tmp")
    at_google.replace("f", [b"newer"])
    assert left in names_in(at_google), "it may be another process's"
    monkeypatch.setattr(buckets, "LEFT_OVER_SECONDS", 0.0)
    at_google.replace("other", [b"newer"])
    assert left in names_in(at_google), "it is not beside this one"
    at_google.replace("f", [b"newest"])
    assert names_in(at_google) == sorted(["f", "other", *theirs]) and at_google.read("f") == b"newest"


def test_a_large_file_arrives_whole(folder: OutputFolder, monkeypatch: pytest.MonkeyPatch):
    pieces = [bytes([number]) * 2**20 for number in range(13)]
    folder.replace("f", pieces)
    assert folder.read("f") == b"".join(pieces)


GONE = FileNotFoundError("The specified upload does not exist")
"""As the client has what S3 says of an upload that has ended; the server here answers otherwise."""


def joining(folder: OutputFolder, monkeypatch: pytest.MonkeyPatch, join: Callable[..., dict[str, Any]]) -> None:
    """The parts of files are put together by ``join``, which gets a key, the call and its arguments."""
    files = s3_files(folder)
    real = files.call_s3

    def call_s3(method: str, key: str, **arguments: Any) -> dict[str, Any]:
        if method == "complete_multipart_upload":
            return join(key, partial(real, method, key, **arguments), arguments["UploadId"])
        return real(method, key, **arguments)

    monkeypatch.setattr(files, "call_s3", call_s3)


def s3_files(folder: OutputFolder) -> S3Files:
    assert isinstance(folder, folders.BucketFolder) and isinstance(folder._files, S3Files)
    return folder._files


@pytest.mark.parametrize("folder", ["s3"], indirect=True)
def test_an_upload_that_is_completed_again_since_its_answer_was_lost_is_complete(
    folder: OutputFolder, monkeypatch: pytest.MonkeyPatch
):
    def join(key: str, complete: Callable[[], dict[str, Any]], upload: str) -> dict[str, Any]:
        complete()
        raise GONE

    folder.replace("f", [b"old"])
    joining(folder, monkeypatch, join)
    for content in (b"new", b"a longer one"):
        folder.replace("f", [content])
        assert folder.read("f") == content


@pytest.mark.parametrize("folder", ["s3"], indirect=True)
def test_an_upload_that_somebody_gave_up_is_not_taken_for_complete(
    folder: OutputFolder, monkeypatch: pytest.MonkeyPatch
):
    def join(key: str, complete: Callable[[], dict[str, Any]], upload: str) -> dict[str, Any]:
        files.call_s3("abort_multipart_upload", key, UploadId=upload)
        raise GONE

    folder.replace("f", [b"old"])
    files = s3_files(folder)
    joining(folder, monkeypatch, join)
    for name, content in (("f", b"new"), ("g", b"another")):
        with pytest.raises(Recoverable, match=f"/{name} was not written: its upload was given up"):
            folder.replace(name, [content])
    assert folder.read("f") == b"old" and folder.read("g") is None


@pytest.mark.parametrize("method", ["upload_part", "copy"])
def test_an_upload_that_is_gone_while_it_goes_on_is_tried_again(
    s3: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
):
    files = ObjectStore.from_url(address_of("s3", tmp_path), storage_options=s3).files
    assert isinstance(files, S3Files)
    upload, real = files.upload(), files.call_s3

    def call_s3(called: str, key: str, **arguments: Any) -> dict[str, Any]:
        if called == method:
            raise GONE
        answer = real(called, key, **arguments)
        if called == "complete_multipart_upload":
            files.delete(key)
        return answer

    monkeypatch.setattr(files, "call_s3", call_s3)
    upload.write(b"x")
    with pytest.raises(
        Recoverable, match=r"was not written: its upload was given up, or what was uploaded was removed"
    ):
        upload.commit("cas/f")
    upload.abort()
    assert files.stat("cas/f") is None


def test_what_is_missing_where_rows_come_from_is_not_taken_for_a_missing_bucket(folder: OutputFolder):
    def broken():
        yield b"x"
        raise FileNotFoundError("rows.jsonl")

    with pytest.raises(FileNotFoundError, match=r"rows\.jsonl"):
        folder.replace("f", broken())
    assert folder.read("f") is None


def test_one_of_many_writers_makes_a_file(folder: OutputFolder):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: (n, folder.create("run-id", b"%d" % n)), range(8)))
    [winner] = [number for number, won in made if won]
    assert folder.read("run-id") == b"%d" % winner
    assert folder.create("run-id", b"late") is False and folder.read("run-id") == b"%d" % winner


def test_a_local_folder_that_cannot_be_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"file is a file; expected a folder, or one that can be made"):
        output_folder("file/below", tmp_path).check()
    output_folder("new/folder", tmp_path).check()
    assert not (tmp_path / "new").exists()
    (tmp_path / "out" / "f").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"out/f is a folder, but a file of that name is to be written"):
        output_folder("out", tmp_path).check("e", "f")


def test_a_relative_path_starts_at_the_base(tmp_path: Path):
    for address in ("out", "file://./out"):
        assert output_folder(address, tmp_path).where("f") == str(tmp_path / "out" / "f")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ftp://host/x", "URL 'ftp://host/x' is unknown; expected a path, file://, s3://, gs:// or memory://"),
        ("s3://bucket", "URL 's3://bucket' names no place in a bucket; expected s3://bucket/key"),
        ("s3:///x", "URL 's3:///x' names no place in a bucket"),
        ("file://out", "URL 'file://out' names no file; expected file:///absolute or file://./relative"),
    ],
)
def test_an_address_that_cannot_be_is_refused(tmp_path: Path, address: str, message: str):
    with pytest.raises(ConfigError) as caught:
        output_folder(address, tmp_path)
    assert str(caught.value).startswith(message)


def test_a_bucket_that_is_not_there_is_refused(s3: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    use_s3(monkeypatch, s3)
    folder = output_folder("s3://no-such-bucket/out", tmp_path)
    with pytest.raises(ConfigError, match="there is no bucket at s3://no-such-bucket/"):
        folder.check()
    for write in (lambda: folder.create("f", b"x"), lambda: folder.replace("f", [b"x"])):
        with pytest.raises(ConfigError, match="no bucket at s3://no-such-bucket/"):
            write()


def test_options_of_an_object_store_of_the_same_kind_hold(s3: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    objects = ObjectStore.from_url(address_of("s3", tmp_path), storage_options=s3)
    folder = output_folder(address_of("s3", tmp_path) + "-out", tmp_path, objects)
    folder.replace("f", [b"x"])
    assert folder.read("f") == b"x"
