"""A stand-in for Google Cloud's services, for tests: logins, the JSON API of Cloud Storage, Secret Manager, and Pub/Sub
(`tests.support.pubsub_service`), as far as this project's clients go.

It enforces what the emulators do not: ``ifGenerationMatch``, whole parts of 256 KiB in resumable uploads, pages of
listings, bearer tokens. https://cloud.google.com/storage/docs/json_api/v1
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google_crc32c import value as crc32c
from ulid import ULID

from tests.support.pubsub_service import PubSub

PART_BYTES = 256 * 2**10


@dataclass
class Stored:
    data: bytes
    generation: int
    updated: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        self.md5 = base64.b64encode(hashlib.md5(self.data).digest()).decode()
        self.crc32c = base64.b64encode(crc32c(self.data).to_bytes(4, "big")).decode()


@dataclass
class Session:
    """A resumable upload."""

    bucket: str
    name: str
    if_generation: str | None
    data: bytearray = field(default_factory=bytearray)
    answer: dict[str, Any] | None = None


class Refused(Exception):
    def __init__(self, status: HTTPStatus, message: str) -> None:
        self.status = status
        super().__init__(message)


class GoogleCloud(ThreadingHTTPServer):
    """What is stored, and how the services behave."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.RLock()
        self.buckets: set[str] = set()
        self.objects: dict[tuple[str, str], Stored] = {}
        self.sessions: dict[str, Session] = {}
        self.secrets: dict[str, bytes] = {}
        self.page_size = 1000
        self.token: str | None = None
        """Without it all are let in."""
        self.num_logins = 0
        self.pubsub = PubSub()
        self.denied: set[str] = set()
        """Permissions that nobody has."""
        self._generation = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed are no error here."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def open_uploads(self) -> list[Session]:
        return [session for session in self.sessions.values() if session.answer is None]

    def store(self, bucket: str, name: str, data: bytes, if_generation: str | None = None) -> dict[str, Any]:
        with self.lock:
            if bucket not in self.buckets:
                raise Refused(HTTPStatus.NOT_FOUND, "The specified bucket does not exist.")
            there = self.objects.get((bucket, name))
            if if_generation is not None and int(if_generation) != (there.generation if there else 0):
                raise Refused(HTTPStatus.PRECONDITION_FAILED, "At least one of the pre-conditions did not hold.")
            self._generation += 1
            self.objects[bucket, name] = Stored(data, self._generation)
            return self.resource(bucket, name)

    def resource(self, bucket: str, name: str) -> dict[str, Any]:
        with self.lock:
            stored = self.objects.get((bucket, name))
            if stored is None:
                raise Refused(HTTPStatus.NOT_FOUND, f"No such object: {bucket}/{name}")
            return {
                "kind": "storage#object",
                "bucket": bucket,
                "name": name,
                "size": str(len(stored.data)),
                "generation": str(stored.generation),
                "metageneration": "1",
                "md5Hash": stored.md5,
                "crc32c": stored.crc32c,
                "timeCreated": stored.updated.isoformat().replace("+00:00", "Z"),
                "updated": stored.updated.isoformat().replace("+00:00", "Z"),
            }

    def listed(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        if bucket not in self.buckets:
            raise Refused(HTTPStatus.NOT_FOUND, "The specified bucket does not exist.")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        entries: dict[str, dict[str, Any] | None] = {}
        for of_bucket, name in sorted(self.objects):
            if of_bucket != bucket or not name.startswith(prefix):
                continue
            head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            entries[prefix + head + found if found else name] = None if found else self.resource(bucket, name)
        size = min(self.page_size, int(query.get("maxResults", 1000)))
        rest = [name for name in sorted(entries) if name > query.get("pageToken", "")]
        page = rest[:size]
        answer: dict[str, Any] = {"kind": "storage#objects"}
        answer["items"] = [entries[name] for name in page if entries[name] is not None]
        answer["prefixes"] = [name for name in page if entries[name] is None]
        if len(rest) > size:
            answer["nextPageToken"] = page[-1]
        return answer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: GoogleCloud

    def log_message(self, *_: object) -> None: ...

    def _serve(self) -> None:
        self.body = self._read()
        parts = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        try:
            if parts.path == "/token":
                return self.log_in()
            if self.server.token is not None and self.headers.get("Authorization") != f"Bearer {self.server.token}":
                raise Refused(HTTPStatus.UNAUTHORIZED, "Invalid Credentials")
            self._route(parts.path)
        except Refused as refused:
            message = {"error": {"code": refused.status.value, "message": str(refused)}}
            self.answer(json.dumps(message).encode(), refused.status)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _serve

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, body: bytes = b"", status: HTTPStatus = HTTPStatus.OK, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer_json(self, value: Any) -> None:
        self.answer(json.dumps(value).encode(), Content_Type="application/json; charset=UTF-8")

    def _route(self, path: str) -> None:
        for pattern, method in ROUTES:
            wanted, _, place = pattern.partition(" ")
            found = re.fullmatch(place, path)
            if self.command in wanted.split("|") and found:
                return method(self, *(group and unquote(group) for group in found.groups()))
        raise Refused(HTTPStatus.NOT_IMPLEMENTED, f"{self.command} {path}")

    def log_in(self) -> None:
        self.server.num_logins += 1
        self.answer_json({"access_token": self.server.token or "any", "expires_in": 3600, "token_type": "Bearer"})

    # Cloud Storage

    def bucket(self, bucket: str) -> None:
        if bucket not in self.server.buckets:
            raise Refused(HTTPStatus.NOT_FOUND, "The specified bucket does not exist.")
        self.answer_json({"kind": "storage#bucket", "name": bucket})

    def permissions(self, bucket: str) -> None:
        if bucket not in self.server.buckets:
            raise Refused(HTTPStatus.NOT_FOUND, "The specified bucket does not exist.")
        asked = parse_qs(urlsplit(self.path).query)["permissions"]
        self.answer_json({"permissions": [name for name in asked if name not in self.server.denied]})

    def list(self, bucket: str) -> None:
        with self.server.lock:
            self.answer_json(self.server.listed(bucket, self.query))

    def metadata(self, bucket: str, name: str) -> None:
        if self.query.get("alt") == "media":
            return self.media(bucket, name)
        self.answer_json(self.server.resource(bucket, name))

    def media(self, bucket: str, name: str) -> None:
        self.server.resource(bucket, name)
        data = self.server.objects[bucket, name].data
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return self.answer(data)
        first, last = int(wanted[1] or 0), min(int(wanted[2] or len(data)), len(data) - 1)
        if first >= len(data):
            raise Refused(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "Requested range not satisfiable")
        place = f"bytes {first}-{last}/{len(data)}"
        self.answer(data[first : last + 1], HTTPStatus.PARTIAL_CONTENT, Content_Range=place)

    def delete(self, bucket: str, name: str) -> None:
        self.server.resource(bucket, name)
        with self.server.lock:
            self.server.objects.pop((bucket, name), None)
        self.answer(status=HTTPStatus.NO_CONTENT)

    def rewrite(self, bucket: str, name: str, to_bucket: str, to_name: str) -> None:
        self.server.resource(bucket, name)
        copied = self.server.store(
            to_bucket, to_name, self.server.objects[bucket, name].data, self.query.get("ifGenerationMatch")
        )
        self.answer_json({"kind": "storage#rewriteResponse", "done": True, "resource": copied})

    def upload(self, bucket: str) -> None:
        if "upload_id" in self.query:
            return self._continue(self.query["upload_id"])
        if_generation = self.query.get("ifGenerationMatch")
        if self.query["uploadType"] == "resumable":
            if bucket not in self.server.buckets:
                raise Refused(HTTPStatus.NOT_FOUND, "The specified bucket does not exist.")
            name = self.query.get("name") or json.loads(self.body)["name"]
            upload_id = str(ULID())
            self.server.sessions[upload_id] = Session(bucket, name, if_generation)
            place = f"http://{self.headers['Host']}{urlsplit(self.path).path}?upload_id={upload_id}"
            return self.answer(Location=place)
        boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])
        assert boundary is not None
        _, about, payload = self.body.split(b"--" + boundary[1].encode(), 2)
        payload = payload[: payload.rindex(b"--" + boundary[1].encode() + b"--")]
        data = re.split(rb"\r?\n\r?\n", payload, maxsplit=1)[1]
        name = json.loads(re.split(rb"\r?\n\r?\n", about, maxsplit=1)[1])["name"]
        data = data.removesuffix(b"\n").removesuffix(b"\r") if b"\r\n\r\n" in payload else data.removesuffix(b"\n")
        self.answer_json(self.server.store(bucket, name, data, if_generation))

    def _continue(self, upload_id: str) -> None:
        session = self.server.sessions.get(upload_id)
        if session is None:
            raise Refused(HTTPStatus.NOT_FOUND, "no such upload")
        if self.command == "DELETE":
            del self.server.sessions[upload_id]
            self.send_response(499, "Client Closed Request")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if session.answer is not None:  # whoever did not hear the answer asks again
            return self.answer_json(session.answer)
        given = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", self.headers["Content-Range"])
        if given is None:
            raise Refused(HTTPStatus.BAD_REQUEST, "malformed Content-Range")
        is_last = given[3] != "*"
        if given[1] is not None:
            first, last = int(given[1]), int(given[2])
            if last - first + 1 != len(self.body) or first > len(session.data):
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the part does not fit")
            if not is_last and len(self.body) % PART_BYTES:
                raise Refused(HTTPStatus.BAD_REQUEST, "parts but the last are multiples of 256 KiB")
            session.data[first:] = self.body
        if is_last and len(session.data) == int(given[3]):
            session.answer = self.server.store(session.bucket, session.name, bytes(session.data), session.if_generation)
            return self.answer_json(session.answer)
        received = {"Range": f"bytes=0-{len(session.data) - 1}"} if session.data else {}
        self.answer(status=HTTPStatus.PERMANENT_REDIRECT, **received)

    # Secret Manager

    def secret(self, project: str, name: str) -> None:
        if "secrets" in self.server.denied:
            raise Refused(HTTPStatus.FORBIDDEN, "Permission 'secretmanager.versions.access' denied")
        value = self.server.secrets.get(name)
        if value is None:
            raise Refused(
                HTTPStatus.NOT_FOUND, f"Secret [projects/{project}/secrets/{name}] not found or has no versions."
            )
        self.answer_json({"name": f"projects/{project}/secrets/{name}/versions/1",
                          "payload": {"data": base64.b64encode(value).decode()}})  # fmt: skip

    # Pub/Sub

    def messages(self, name: str, method: str | None) -> None:
        if "pubsub" in self.server.denied:
            raise Refused(HTTPStatus.FORBIDDEN, "User not authorized to perform this action.")
        try:
            self.answer_json(self.server.pubsub.call(name, method, json.loads(self.body or b"{}")))
        except KeyError:
            raise Refused(HTTPStatus.NOT_FOUND, f"Resource not found (resource={name}).") from None
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from None


ROUTES = [
    (r"GET /storage/v1/b/([^/]+)", Handler.bucket),
    (r"GET /storage/v1/b/([^/]+)/iam/testPermissions", Handler.permissions),
    (r"GET /storage/v1/b/([^/]+)/o", Handler.list),
    (r"GET /storage/v1/b/([^/]+)/o/([^/]+)", Handler.metadata),
    (r"GET /download/storage/v1/b/([^/]+)/o/([^/]+)", Handler.media),
    (r"DELETE /storage/v1/b/([^/]+)/o/([^/]+)", Handler.delete),
    (r"POST /storage/v1/b/([^/]+)/o/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)", Handler.rewrite),
    (r"POST|PUT|DELETE /(?:resumable/)?upload/storage/v1/b/([^/]+)/o", Handler.upload),
    (r"GET /v1/projects/([^/]+)/secrets/([^/]+)/versions/latest:access", Handler.secret),
    (r"GET|POST /v1/(projects/[^/]+/(?:topics|subscriptions)/[^/:]+)(?::(\w+))?", Handler.messages),
]


@contextmanager
def google_cloud(bucket: str) -> Iterator[GoogleCloud]:
    """A server in threads of this process, with one bucket."""
    with GoogleCloud() as server:
        server.buckets.add(bucket)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def service_account(folder: Path, server: GoogleCloud) -> Path:
    """A key file of an account of that cloud, with which clients log in as they do at Google."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    account = {
        "type": "service_account",
        "project_id": "tests",
        "client_email": "rollout@tests.iam.gserviceaccount.com",
        "private_key": pem,
        "private_key_id": "1",
        "token_uri": f"{server.url}/token",
    }
    path = folder / "account.json"
    path.write_text(json.dumps(account))
    return path
