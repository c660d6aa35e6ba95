"""Secrets that are planted in a run and looked for wherever it leaves anything, however it fails."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import pytest
from botocore.session import get_session
from endpoint_server import FaultyServer, config_of, requests, reset, send
from places import use_s3

from rollout_core.base.errors import ConfigError
from rollout_core.config import InferBatchConfig, parse_config
from rollout_core.data.samples import Failure
from rollout_core.inference.openai_http import OpenAIEngine
from tests.objects.object_files import BUCKET
from tests.store.patience import LONG
from tests.store.postgres import PostgresServer

ENDPOINT_KEY = "sk-proj/Qm7+vX2pLr9Tz4Wk8Yn3Bd6Hf1Js5Gc0"
OTHER_KEY = "sk-other-Ua8Rk2Vw6Nx4Pz9Lb1Mt7"
STORAGE_SECRET = "wJ4lrXUtn9FEMIK7MDENGbPx3RfiCY8EX"
DATABASE_PASSWORD = "dB6nQ2xT9kZ4mW7r"
PIECE = 9
"""So many characters of a secret in a row are found, and so a secret that a page of a database cuts in two."""


def sightings(data: bytes, secrets: tuple[str, ...] = (ENDPOINT_KEY, OTHER_KEY, STORAGE_SECRET, DATABASE_PASSWORD)):
    """Pieces of the secrets in some bytes, as they are and as other programs write them."""
    lowered = data.lower()
    for secret in secrets:
        code = base64.b64encode(secret.encode()).decode()
        for form in (secret, quote(secret, safe=""), code, secret.encode().hex()):
            for start in range(len(form) - PIECE + 1):
                piece = form[start : start + PIECE]
                if piece.lower().encode() in lowered and piece.lower() not in ("sk-proj/q", "sk-other-"):
                    yield piece


def status_line(reason: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(f"HTTP/1.1 400 {reason}\r\ncontent-length: 2\r\n\r\n{{}}".encode())

    return answer


def bad_header(text: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(f"HTTP/1.1 200 OK\r\nauthorization={text} is none\r\n\r\n".encode())
        reset(handler)

    return answer


def error(code: int, message: str, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda handler: send(handler, code, {"error": {"message": message}}, headers)


def choice(**fields: Any) -> Callable[[BaseHTTPRequestHandler], None]:
    whole = {"finish_reason": "stop", "text": "fine", **fields}
    return lambda handler: send(handler, 200, {"choices": [whole]})


def repetitions(key: str) -> dict[str, Callable[[BaseHTTPRequestHandler], None]]:
    """Every way of an endpoint to repeat a key, each of which fails one sample."""
    return {
        "an error": error(400, f"Incorrect API key provided: {key}. TOLD-BY-THE-ENDPOINT"),
        "the header": error(400, f"got Authorization: Bearer {key} TOLD-BY-THE-ENDPOINT"),
        "in capitals": error(400, f"unknown key {key.upper()}"),
        "masked": error(400, f"Incorrect API key provided: {key[:7]}{'*' * 20}{key[-4:]}."),
        "a part": error(400, f"the key that begins with {key[:14]}... is unknown"),
        "for a URL": error(400, f"https://docs/?key={quote(key, safe='')}"),
        "base64": error(400, "Basic " + base64.b64encode(f"user:{key}".encode()).decode()),
        "hexadecimal": error(400, key.encode().hex()),
        "JSON in JSON": error(400, json.dumps({"key": key.replace("/", "\\/")})),
        "a later try's": error(500, f"internal error near {key}"),
        "a page": lambda handler: send(handler, 502, f"<html>{key}</html>".encode()),
        "cut at the end": error(400, "x" * 270 + key),
        "the end of a completion": choice(finish_reason=f"blocked for {key}"),
        "the completion": choice(text=f"your key is {key}, isn't it"),
        "a malformed answer": choice(text={key: key}, finish_reason=key),
        "the reason phrase": status_line(f"Bad {key}"),
        "a malformed header": bad_header(key),
        "a header": error(400, "TOLD-BY-THE-ENDPOINT", **{"x-echo": key, "location": f"http://{key}@else"}),
    }


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch, s3: dict[str, Any]) -> None:
    """The endpoint's key is kept by a secret manager."""
    monkeypatch.setenv("ROLLOUT_SECRETS", "ENDPOINT=planted/endpoint")
    monkeypatch.setenv("ROLLOUT_SECRETS_FROM", "environment,aws")
    monkeypatch.setenv("ROLLOUT_SECRET_OTHER", OTHER_KEY)
    use_s3(monkeypatch, {**s3, "secret": STORAGE_SECRET})
    get_session().create_client("secretsmanager").create_secret(Name="planted/endpoint", SecretString=ENDPOINT_KEY)


@pytest.mark.parametrize("way", repetitions(ENDPOINT_KEY))
def test_however_an_endpoint_repeats_the_key_its_sample_fails_without_it(
    server, tiny, tokenizer, monkeypatch, caplog, way
):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("ROLLOUT_SECRETS", "ENDPOINT")
    monkeypatch.setenv("ROLLOUT_SECRET_ENDPOINT", ENDPOINT_KEY)
    engine = OpenAIEngine(config_of(server, api_key="ENDPOINT", dialect="openai", max_retries=1), tiny)
    server.mishaps.extend([repetitions(ENDPOINT_KEY)[way]] * 2)
    [failure] = engine.stream(requests(tokenizer)[:1])
    engine.close()
    assert isinstance(failure, Failure) and failure.reason
    assert list(sightings(failure.reason.encode())) == []
    assert list(sightings(caplog.text.encode())) == []


def test_a_short_key_is_hidden_as_a_word_and_no_reason_to_fail_a_completion(server, tiny, tokenizer, monkeypatch):
    monkeypatch.setenv("ROLLOUT_SECRETS", "ENDPOINT")
    monkeypatch.setenv("ROLLOUT_SECRET_ENDPOINT", "EMPTY")
    engine = OpenAIEngine(config_of(server, api_key="ENDPOINT", dialect="openai", max_retries=0), tiny)
    server.mishaps.extend([choice(text="an EMPTY list"), error(400, "key EMPTY refused: EMPTYING")])
    [completion], [failure] = engine.stream(requests(tokenizer)[:1]), engine.stream(requests(tokenizer)[:1])
    engine.close()
    assert getattr(completion, "text", None) == "an EMPTY list"
    assert isinstance(failure, Failure) and failure.reason.endswith("key *** refused: EMPTYING")


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.close()


def postgres_rows(url: str) -> bytes:
    """Every row of every table, as text."""

    async def read() -> bytes:
        rows = io.BytesIO()
        connection = await asyncpg.connect(url)
        for (name,) in await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"):
            await connection.copy_from_table(name, output=rows)
        await connection.close()
        return rows.getvalue()

    return asyncio.run(read())


def files_below(folder: Path) -> bytes:
    return b"\n".join(file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file())


def bucket_below(s3: dict[str, Any], prefix: str) -> bytes:
    import s3fs

    files = s3fs.S3FileSystem(**s3, use_listings_cache=False)
    found = files.find(f"{BUCKET}/{prefix}")
    return b"\n".join([*map(str.encode, found), *(files.cat_file(path) for path in found)])


@pytest.mark.server
def test_no_secret_is_left_anywhere_by_a_run_however_it_fails(
    server: FaultyServer, tiny_model, tmp_path, monkeypatch, s3, secrets, postgres, prefect_server, caplog, capfd
):
    """A batch whose samples fail in every way and are kept; one that fails for them; one that is refused; and one
    whose database is away. Looked at are the terminal (with the log, down to DEBUG), Prefect's server, PostgreSQL, the
    bucket and all files."""
    from prefect.settings import PREFECT_HOME

    from flows.batch import batch_inference

    caplog.set_level(logging.DEBUG)
    prefix = tmp_path.name
    database = postgres.database_of(tmp_path).replace("postgres@", f"postgres:{DATABASE_PASSWORD}@")
    monkeypatch.setenv("ROLLOUT_STORAGE", f"s3://{BUCKET}/{prefix}/objects")
    monkeypatch.setenv("ROLLOUT_DATABASE", database)
    monkeypatch.chdir(tmp_path)
    ways = list(repetitions(ENDPOINT_KEY).values())
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"sort {n} ="}) + "\n" for n in range(40)))
    document = {
        "run": {"name": "planted"},
        "model": {"uri": str(tiny_model)},
        "sampling": {"max_tokens": 16},
        "input": {"glob": "prompts.jsonl"},
        "output": {"dir": f"s3://{BUCKET}/{prefix}/out", "events": True},
        "failures": {"max_share": 1.0},
        "backend": config_of(server, api_key="ENDPOINT", dialect="openai", max_retries=0).model_dump(),
    }

    def run(**changes: Any) -> Any:
        return batch_inference(parse_config({**document, **changes}, InferBatchConfig))

    server.mishaps.extend(ways)
    written = run()
    assert written["figures"]["failed"] == len(ways)
    server.mishaps.extend(ways * 3)
    with pytest.raises(Exception, match="samples failed"):
        run(failures={"max_share": 0.0}, sampling={"max_tokens": 15}, output={"dir": str(tmp_path / "out2")})
    server.mishaps.clear()
    server.mishaps.extend([error(401, f"Incorrect API key provided: {ENDPOINT_KEY}. TOLD-BY-THE-ENDPOINT")] * 40)
    with pytest.raises(ConfigError, match="refuses access"):
        run(sampling={"max_tokens": 14}, output={"dir": str(tmp_path / "out3")})
    for away in ("mysql://root:{}@host/db", "postgresql://rollout:{}@127.0.0.1:1/db", "postgresql://a:{}@h:x/db"):
        monkeypatch.setenv("ROLLOUT_DATABASE", away.format(DATABASE_PASSWORD))
        with pytest.raises(Exception, match=r"database|postgresql"):
            run()

    _flush_log()
    home = Path(PREFECT_HOME.value())
    _wait_for(lambda: b"TOLD-BY-THE-ENDPOINT" in files_below(home))
    time.sleep(2.0)  # events come a little later than log lines
    terminal = capfd.readouterr()
    sinks = {
        "terminal": (terminal.out + terminal.err).encode(),
        "Prefect's server": files_below(home),
        "PostgreSQL": postgres_rows(postgres.database_of(tmp_path)),
        "the bucket": bucket_below(s3, prefix),
        "files": files_below(tmp_path),
    }
    for sink in ("terminal", "Prefect's server", "PostgreSQL", "the bucket"):
        assert b"TOLD-BY-THE-ENDPOINT" in sinks[sink], f"nothing of the failures is in {sink}"
    assert {sink: list(sightings(data)) for sink, data in sinks.items()} == {sink: [] for sink in sinks}


def _flush_log() -> None:
    from prefect.logging.handlers import APILogHandler

    done = threading.Thread(target=APILogHandler().flush)
    done.start()
    done.join(LONG)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
