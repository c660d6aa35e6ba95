"""The object store where something around it fails: full disks, missing rights, clouds that refuse or do not answer."""

from __future__ import annotations

import binascii
import os
import pickle
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType

import pytest

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.objects import ObjectStore
from rollout_core.objects.files import storage_faults
from rollout_core.objects.object_store import blob_key
from tests.objects.object_files import NOTHING, keys, python, write_tree
from tests.support.machine import ROOT, require


def test_a_file_system_that_is_full_is_recoverable_and_shows_nothing_half(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    require(ROOT)
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        objects = ObjectStore.from_url(str(mount / "store"))
        kept = objects.put_bytes(b"kept")
        puts = [lambda: objects.put_bytes(bytes(2**21)), lambda: objects.put_stream(bytes(2**20) for _ in range(20))]
        for put in puts:
            with pytest.raises(Recoverable, match="No space left on device; free some space") as caught:
                put()
            assert isinstance(caught.value.__cause__, OSError)
            assert caught.value.hint.delay_seconds >= 10
        assert list(dict(objects.blobs())) == [kept]
        assert keys(objects, "tmp") == []

        elsewhere = ObjectStore.from_url(str(tmp_path / "store"))
        tree = elsewhere.put_tree(write_tree(tmp_path / "source", {"a": b"1", "b": bytes(2**21)}))
        with pytest.raises(Recoverable, match="No space left"):
            elsewhere.get_tree(tree, mount / "tree")
        assert [p.name for p in mount.iterdir()] == ["store"]
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_file_size_limit_is_recoverable_and_shows_nothing_half(tmp_path: Path) -> None:
    local = ObjectStore.from_url(f"file://{tmp_path}/store")
    code = """
import resource, sys
from rollout_core.base.errors import Recoverable
from rollout_core.objects import ObjectStore
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
objects = ObjectStore.from_url(sys.argv[1])
for put in (lambda: objects.put_bytes(bytes(2**21)), lambda: objects.put_stream(bytes(2**20) for _ in range(9))):
    try:
        put()
    except Recoverable as error:
        print(error)
"""
    output, _ = python(code, local.url).communicate(timeout=300)
    assert output.count("File too large; free some space") == 2
    assert dict(local.blobs()) == {}
    assert keys(local, "tmp") == []


def test_a_folder_without_permission_is_a_config_error() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        objects = ObjectStore.from_url(f"{folder}/store")
        content_id = objects.put_bytes(b"private")
        os.chmod(objects.files.where(blob_key(content_id)), 0o000)
        os.chmod(objects.files.where("tmp"), 0o555)
        for action, attempt in {
            "write": lambda: objects.put_bytes(b"other"),
            "read": lambda: objects.get_bytes(content_id),
        }.items():
            error = error_in_unprivileged_child(attempt)
            assert isinstance(error, ConfigError)
            assert str(error).startswith(f"cannot {action}")
            assert str(error).endswith("Permission denied; expected a place this process may read and write")
        os.chmod(objects.files.where("tmp"), 0o755)


def error_in_unprivileged_child(function: Callable[[], object]) -> Exception | None:
    """What ``function`` raises in a forked child that is not root, to whom permissions do not apply."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        error: Exception | None = None
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            function()
        except Exception as caught:  # noqa: BLE001 - handed to the parent
            error = caught
        os.write(send, pickle.dumps(error))
        os._exit(0)
    os.close(send)
    with open(receive, "rb") as answer:
        error = pickle.load(answer)  # noqa: S301
    os.waitpid(child, 0)
    return error


class Service(BaseHTTPRequestHandler):
    """Answers every request by ``answer``."""

    protocol_version = "HTTP/1.1"  # clients wait for "100 Continue" before they send a body

    def answer(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer()

    do_HEAD = do_PUT = do_GET

    def say(self, status: int, body: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def broken_s3() -> Iterator[tuple[dict, list]]:
    """Options for a server that answers every request with the status and code in the list."""
    status: list = [503, "SlowDown"]

    class Handler(Service):
        def answer(self) -> None:
            self.say(
                status[0], f"<Error><Code>{status[1]}</Code><Message>{status[1]}, said the server</Message></Error>"
            )

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = {"endpoint_url": f"http://127.0.0.1:{server.server_port}", "key": "k", "secret": "s"}
    yield {**options, "config_kwargs": {"retries": {"max_attempts": 0}}}, status
    server.shutdown()


def test_a_throttled_bucket_is_recoverable_and_a_refused_one_a_config_error(broken_s3) -> None:
    options, status = broken_s3
    objects = ObjectStore.from_url("s3://bucket", storage_options=options)
    status[:] = 503, "SlowDown"
    with pytest.raises(Recoverable, match=r"cannot write s3://bucket/cas/.*SlowDown.*try again"):
        objects.put_bytes(b"x")
    status[:] = 403, "AccessDenied"
    for attempt in (lambda: objects.put_bytes(b"x"), lambda: objects.get_bytes(NOTHING), lambda: objects.get_ref("a")):
        with pytest.raises(ConfigError, match=r"cannot .*; expected a place this process may read and write"):
            attempt()


def test_who_may_not_list_uploads_gives_up_none(broken_s3, caplog: pytest.LogCaptureFixture) -> None:
    options, status = broken_s3
    status[:] = 403, "AccessDenied"
    assert ObjectStore.from_url("s3://bucket", storage_options=options).files.drop_uploads(1e12, dry_run=False) == 0
    assert "uploads that nobody completed stay where they are: cannot give up old uploads" in caplog.text


@pytest.mark.parametrize(
    ("status_code", "code", "advice"),
    [
        (400, "ExpiredToken", r"credentials are wrong or have expired \(ExpiredToken\): renew them"),
        (403, "InvalidAccessKeyId", r"credentials are wrong or have expired \(InvalidAccessKeyId\): renew them"),
        (403, "SignatureDoesNotMatch", "credentials are wrong or have expired"),
        (400, "AuthorizationHeaderMalformed", r"in another region .*: set AWS_DEFAULT_REGION"),
        (403, "RequestTimeTooSkewed", "clock is wrong .*: keep it by NTP"),
    ],
)
def test_what_trying_again_does_not_help_is_told_with_the_remedy(
    broken_s3, status_code: int, code: str, advice: str
) -> None:
    options, status = broken_s3
    objects = ObjectStore.from_url("s3://bucket", storage_options=options)
    status[:] = status_code, code
    for attempt in (lambda: objects.put_bytes(b"x"), lambda: objects.get_ref("a")):
        with pytest.raises(ConfigError, match=advice):
            attempt()
    if status_code == 400:  # the answer to HEAD says no more
        with pytest.raises(ConfigError, match="the credentials are wrong or have expired: renew them"):
            objects.exists(NOTHING)


@pytest.fixture
def s3_of_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dict, Callable[[str], None], set]]:
    """Options for a server that refuses expired access keys, what writes another one into the shared credentials file,
    and the keys that have expired."""
    expired: set[str] = set()
    file = tmp_path / "credentials"

    def renew(key: str) -> None:
        text = f"[default]\naws_access_key_id={key}\naws_secret_access_key=s\naws_session_token=t\n"
        file.write_text(text)

    class Handler(Service):
        def answer(self) -> None:
            is_refused = any(f"Credential={key}/" in self.headers["Authorization"] for key in expired)
            listing = "<ListBucketResult><Contents><Key>refs/a</Key><Size>1</Size></Contents></ListBucketResult>"
            if is_refused:
                self.say(400, "<Error><Code>ExpiredToken</Code></Error>")
            else:
                self.say(200, listing, {"ETag": '"e"', "Last-Modified": "Wed, 12 Oct 2022 17:50:00 GMT"})

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"endpoint_url": f"http://127.0.0.1:{server.server_port}"}, renew, expired
    server.shutdown()


def test_temporary_credentials_that_expire_are_read_again_and_waited_for(s3_of_a_day, tmp_path: Path) -> None:
    """A process cannot change its storage options and environment, but somebody may renew the file of credentials."""
    options, renew, expired = s3_of_a_day
    renew("FIRST")
    objects = ObjectStore.from_url("s3://bucket", storage_options=options)
    attempts = [
        lambda: objects.put_bytes(os.urandom(8)),
        lambda: objects.exists(NOTHING),
        lambda: list(objects.files.list("refs")),
    ]
    for number, attempt in enumerate(attempts):
        attempt()
        expired.add(f"KEY{number - 1}" if number else "FIRST")
        for again in attempts:
            with pytest.raises(
                Recoverable, match=r"the temporary credentials have expired .*renew them there"
            ) as caught:
                again()
            assert caught.value.hint.delay_seconds >= 10, "whoever renews them may be late"
        (tmp_path / "credentials").write_text("")  # somebody is writing it
        for again in attempts:
            with pytest.raises(Recoverable, match="temporary credentials have expired"):
                again()
        renew(f"KEY{number}")
    for attempt in attempts:
        attempt()


def test_expired_credentials_of_the_environment_are_final(s3_of_a_day, monkeypatch: pytest.MonkeyPatch) -> None:
    options, _, expired = s3_of_a_day
    expired.add("FIXED")
    values = {"AWS_ACCESS_KEY_ID": "FIXED", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    objects = ObjectStore.from_url("s3://bucket/fixed", storage_options={**options, "default_block_size": 2**23})
    for attempt in (lambda: objects.put_bytes(b"x"), lambda: list(objects.files.list("refs"))):
        with pytest.raises(ConfigError, match=r"credentials are wrong or have expired \(ExpiredToken\): renew them"):
            attempt()


def test_a_missing_bucket_is_a_config_error_when_writing(s3: dict) -> None:
    objects = ObjectStore.from_url("s3://no-such-bucket/x", storage_options=s3)
    for put in (lambda: objects.put_bytes(b"x"), lambda: objects.put_stream(bytes(5 * 2**20) for _ in range(8))):
        with pytest.raises(ConfigError, match="no bucket at s3://no-such-bucket/x"):
            put()
    assert not objects.exists(NOTHING)


def test_a_service_that_cannot_be_reached_is_recoverable(s3: dict) -> None:
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        options = {**s3, "endpoint_url": f"http://127.0.0.1:{nobody_listens.getsockname()[1]}"}
        options["config_kwargs"] = {"retries": {"max_attempts": 0}}
        with pytest.raises(Recoverable, match="a passing fault, try again"):
            ObjectStore.from_url("s3://bucket/x", storage_options=options).put_bytes(b"x")


def test_errors_of_cloud_clients_are_ours_and_bugs_are_not_hidden() -> None:
    from botocore.exceptions import NoCredentialsError, ReadTimeoutError
    from gcsfs.retry import HttpError

    expected = [
        (NoCredentialsError(), ConfigError, "credentials"),
        (HttpError({"code": 401, "message": "who are you"}), ConfigError, "credentials"),
        (OSError("Forbidden: bucket/x\nno access"), ConfigError, "may read and write"),
        (HttpError({"code": 429, "message": "slow down"}), Recoverable, "try again"),
        (ReadTimeoutError(endpoint_url="http://x"), Recoverable, "try again"),
        (binascii.Error("a checksum that was damaged on its way"), Recoverable, "try again"),
        (TypeError("a bug"), TypeError, "a bug"),
    ]
    for error, kind, text in expected:
        with pytest.raises(kind, match=text), storage_faults("read", "somewhere"):
            raise error
