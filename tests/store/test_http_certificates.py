"""Both ends of a store's connections know each other by certificates of one authority, and talk to nobody else."""

from __future__ import annotations

import stat
import subprocess
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.store import LightningStoreClient
from rollout_core.web import certificates
from rollout_core.web.certificates import AUTHORITY, CERTIFICATE, KEY, TLSFiles, issue
from tests.flows.conftest import wait_for

HERE = "127.0.0.1"


def files_of(folder: Path, machine: str = HERE) -> TLSFiles:
    return issue(folder, [machine])[0].files


def variables(files: TLSFiles) -> dict[str, str]:
    return {AUTHORITY: files.authority, CERTIFICATE: files.certificate, KEY: files.key}


@pytest.fixture(params=["1", "2"], ids=["one process", "workers"])
def address(
    request: pytest.FixtureRequest, tmp_path: Path, start_process: Callable[..., subprocess.Popen[str]]
) -> Iterator[str]:
    """Of a server with a certificate for this machine."""
    command = ["store", "serve", "--database", f"sqlite:///{tmp_path / 'store.db'}", "--port", "0", "--tls"]
    log = (tmp_path / "server.log").open("wb")
    with log:
        process = start_process(
            "-m", "rollout_core", *command, "--workers", request.param,
            env=variables(files_of(tmp_path / "tls")), stdout=log,
        )  # fmt: skip

    def lines() -> list[str]:
        return (tmp_path / "server.log").read_text().splitlines()

    wait_for(lambda: any(line.startswith("serving at ") for line in lines()), "the server", process=process)
    yield next(line for line in lines() if line.startswith("serving at ")).removeprefix("serving at ")
    assert not [line for line in lines() if "ERROR" in line or "Traceback" in line]


async def ask(address: str, tls: TLSFiles | None) -> int:
    async with LightningStoreClient(address, retry_delays=(), tls=tls) as store:
        await store.enqueue_rollout({"question": 1})
        return len(await store.query_rollouts())


async def test_a_server_and_its_clients_know_each_other(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ours, others = tmp_path / "tls", tmp_path / "others"
    assert address.startswith("https://127.0.0.1:")
    assert await ask(address, files_of(ours)) == 1
    for name, value in variables(files_of(ours)).items():
        monkeypatch.setenv(name, value)
    assert await ask(address, None) == 2, "those of the environment"

    strange = files_of(others)
    with pytest.raises(ConfigError, match=f"the certificate of {address} is refused: .*expected one of the authority"):
        await ask(address, strange)
    with pytest.raises(Recoverable, match="or takes no client with this machine's certificate"):
        await ask(address, TLSFiles(files_of(ours).authority, strange.certificate, strange.key))
    with pytest.raises(Recoverable, match="no answer"):
        await ask(address.replace("https", "http"), None)
    with pytest.raises(ConfigError, match=r"mismatch|not valid for"):
        await ask(address.replace(HERE, "localhost"), files_of(ours))
    assert await ask(address, files_of(ours)) == 3, "none of these did anything"


def test_certificates_are_issued_once_and_keys_are_their_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = issue(tmp_path, [HERE, "host.example", "::1"])
    assert [issued.is_new for issued in first] == [True] * 3
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert [issued.is_new for issued in issue(tmp_path, [HERE, "host.example", "::1"])] == [False] * 3
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.name.endswith(".key.pem") else 0o644), path
    monkeypatch.setattr(certificates, "EARLY_DAYS", 366)
    assert f"ends on {first[0].files.ends():%Y-%m-%d}; issue it anew" in (first[0].files.warning() or "")
    [again] = issue(tmp_path, [HERE])
    assert again.is_new and again.files == first[0].files
    assert before[f"{HERE}.pem"] != (tmp_path / f"{HERE}.pem").read_bytes()
    assert again.files.ends() - first[0].files.ends() < timedelta(minutes=10)


def test_a_machine_whose_key_was_lost_gets_another_certificate(tmp_path: Path):
    files = files_of(tmp_path)
    Path(files.key).unlink()
    assert issue(tmp_path, [HERE])[0].is_new
    Path(files.certificate).write_bytes(Path(files.authority).read_bytes())
    assert issue(tmp_path, [HERE])[0].is_new
    assert not issue(tmp_path, [HERE])[0].is_new


def test_an_authority_that_is_not_whole_is_not_replaced(tmp_path: Path):
    files_of(tmp_path)
    (tmp_path / "ca.key.pem").unlink()
    with pytest.raises(ConfigError, match=r"ca\.key\.pem is missing next to .*ca\.pem; put it back, or remove both"):
        files_of(tmp_path)


@pytest.mark.parametrize("machine", ["", "../up", "a b", "ca", "ca.key", "worker.KEY", "-x", "a/b"])
def test_what_is_no_machine_is_refused(tmp_path: Path, machine: str):
    with pytest.raises(ConfigError, match="is no name or address of a machine"):
        issue(tmp_path / "tls", [HERE, machine])
    assert not (tmp_path / "tls").exists()


def test_files_that_are_of_no_use_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files, other = files_of(tmp_path), files_of(tmp_path, "other")
    with pytest.raises(ConfigError, match=r"other\.key\.pem are no certificate with its key"):
        TLSFiles(files.authority, files.certificate, other.key).client_context()
    with pytest.raises(ConfigError, match=r"none\.pem is no certificate of an authority: No such file"):
        TLSFiles(str(tmp_path / "none.pem"), files.certificate, files.key).server_options()
    monkeypatch.setenv(AUTHORITY, files.authority)
    monkeypatch.setenv(KEY, files.key)
    with pytest.raises(ConfigError, match=r"ROLLOUT_TLS_CERTIFICATE is not set; .* go together"):
        TLSFiles.from_environment()
    with pytest.raises(ConfigError, match="with certificates it is https://host:port"):
        LightningStoreClient("http://127.0.0.1:1", tls=files)


def test_the_command_issues_what_serve_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in (AUTHORITY, CERTIFICATE, KEY):
        monkeypatch.delenv(name, raising=False)
    serve = ["store", "serve", "--database", f"sqlite:///{tmp_path / 'db'}", "--port", "0", "--tls"]
    refused = CliRunner().invoke(app, serve)
    assert refused.exit_code == 2 and "`rollout ops certificates` issues such files" in refused.stderr
    done = CliRunner().invoke(app, ["ops", "certificates", HERE, "--folder", str(tmp_path)])
    assert done.exit_code == 0, done.output
    named = dict(line.split()[1].split("=") for line in done.output.splitlines() if "export" in line)
    assert named == variables(files_of(tmp_path))
    assert Path(named[KEY]).exists()
