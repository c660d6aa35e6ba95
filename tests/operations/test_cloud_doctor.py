"""`rollout doctor cloud`: seven checks, what each failure advises, exit codes; and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from botocore.session import get_session
from gcsfs import GCSFileSystem
from typer.testing import CliRunner

from deployments import cloud_doctor
from deployments.cli import app
from rollout_core.base import secret_sources
from rollout_core.objects import ObjectStore
from tests.objects.object_files import BUCKET, keys
from tests.support.gcp_server import GoogleCloud, service_account

NAMES = list(cloud_doctor.TRIALS)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a [cloud] table sets is gone after the test; smaller transfers than in earnest."""
    for name in ("ROLLOUT_UPLOAD_PART_BYTES", "ROLLOUT_MAX_BLOB_BYTES", "ROLLOUT_SECRETS", "ROLLOUT_SECRETS_FROM"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(secret_sources, "_kept", {})
    monkeypatch.setattr(cloud_doctor, "ROUNDTRIP_BYTES", 12 * 2**20 + 5)
    monkeypatch.chdir(tmp_path)
    # Otherwise it has the service and the login that an earlier test's environment named.
    monkeypatch.setattr(GCSFileSystem, "_cache", {})


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["cloud", "doctor", *arguments, "--format", "json"])
    return done.exit_code, json.loads(done.stdout) if done.exit_code < 2 else {"error": done.stderr}


def failures(report: dict[str, Any]) -> dict[str, str]:
    assert [check["name"] for check in report["checks"]] == NAMES
    failed = [check for check in report["checks"] if check["status"] == "fail"]
    assert all(check["remedy"] for check in failed)
    assert report["summary"]["pass_count"] + report["summary"]["fail_count"] == len(NAMES)
    assert report["summary"]["fail_count"] == len(failed)
    return {check["name"]: check["error"] for check in failed}


def details(report: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["detail"] for check in report["checks"] if check["status"] == "pass"}


def test_this_machine(tmp_path: Path) -> None:
    code, report = run("--provider", "local")
    assert (code, failures(report)) == (0, {})
    assert all(check["latency_ms"] >= 0 and "error" not in check for check in report["checks"])
    assert [path for path in (tmp_path / "objects").rglob("*") if path.is_file()] == []
    shown = CliRunner().invoke(app, ["doctor", "cloud", "--provider", "local"]).stdout
    assert shown.startswith("cloud\nok  reachability") and shown.endswith("\n\n7 ok\n")
    done = CliRunner().invoke(app, ["doctor", "cloud", "--json"])
    assert done.exit_code == 0
    assert [check["name"] for check in json.loads(done.stdout)["checks"]] == NAMES


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "objects").write_text("x")
    code, report = run("--provider", "local")
    found = failures(report)
    assert code == 1 and found["reachability"] == f"{tmp_path / 'objects'} is no folder"
    assert found["auth"] == found["object_store"] == "not tried: reachability failed"
    assert "queue" not in found


@pytest.fixture
def on_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, s3: dict[str, Any]) -> Path:
    """A file with a table for the tests' S3."""
    for name in ("ROLLOUT_STORAGE", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3["endpoint_url"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3["secret"])
    path = tmp_path / "aws.toml"
    path.write_text(f"""
[cloud]
provider = "aws"
region = "us-east-1"
[cloud.s3]
bucket = "{BUCKET}"
prefix = "{tmp_path.name}/"
[cloud.secrets]
allowlist = ["doctor/some-key"]
""")
    return path


def test_aws(on_aws: Path, tmp_path: Path, s3: dict[str, Any]) -> None:
    code, report = run("--provider", "aws", "--config", str(on_aws))
    assert code == 1
    assert failures(report) == {"secret_store": "not found in environment, aws: SOME_KEY"}
    manager = get_session().create_client("secretsmanager", region_name="us-east-1")
    manager.create_secret(Name="doctor/some-key", SecretString="PLANTED")
    secret_sources._kept.clear()
    code, report = run("--provider", "aws", "--config", str(on_aws))
    assert (code, failures(report)) == (0, {})
    assert "PLANTED" not in json.dumps(report)
    assert details(report)["auth"].startswith("as arn:aws:")
    objects = ObjectStore.from_url(f"s3://{BUCKET}/{tmp_path.name}", storage_options=s3)
    assert [key for folder in ("tmp", "cas", "refs", "corrupt") for key in keys(objects, folder)] == []


def test_a_queue_that_feeds_the_stores(on_aws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLLOUT_QUEUE", "ROLLOUT_QUEUE_LEASE_SECONDS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    client = get_session().create_client("sqs", region_name="us-east-1")
    url = client.create_queue(QueueName="doctor")["QueueUrl"]
    on_aws.write_text(f'{on_aws.read_text()}\n[cloud.sqs]\nqueue_url = "{url}"\n')
    code, report = run("--provider", "aws", "--config", str(on_aws))
    assert code == 1 and failures(report)["queue"].startswith("SQS queue doctor has no dead letters")
    policy = {"deadLetterTargetArn": "arn:aws:sqs:us-east-1:123456789012:doctor-dead", "maxReceiveCount": 5}
    client.create_queue(QueueName="doctor-dead")
    client.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": json.dumps(policy)})
    _, report = run("--provider", "aws", "--config", str(on_aws))
    assert details(report)["queue"].endswith(
        "SQS queue doctor: 0 messages wait; refused ones go where its redrive policy says"
    )


def test_a_bucket_that_is_not_there_and_a_service_that_is_away(on_aws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_aws.write_text(on_aws.read_text().replace(f'"{BUCKET}"', '"no-such-bucket"'))
    code, report = run("--provider", "aws", "--config", str(on_aws))
    found = failures(report)
    assert code == 1 and found["auth"] == "there is no bucket 'no-such-bucket'"
    assert found["content_id_roundtrip"] == "not tried: auth failed"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    code, report = run("--provider", "aws", "--config", str(on_aws))
    assert code == 1 and failures(report)["reachability"].startswith("http://127.0.0.1:9 does not answer: ")


def test_google_cloud(google: GoogleCloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", google.url)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(service_account(tmp_path, google)))
    monkeypatch.setenv("ROLLOUT_STORAGE", f"gs://{BUCKET}/{tmp_path.name}")
    monkeypatch.setattr(google, "token", f"only-after-login-{tmp_path.name}")
    code, report = run("--provider", "gcp")
    assert (code, failures(report)) == (0, {})
    assert google.num_logins > 0 and google.open_uploads == []
    assert "rollout@tests" in details(report)["auth"]
    assert [name for _, name in google.objects if name.startswith(tmp_path.name)] == []
    monkeypatch.setattr(google, "denied", {"storage.objects.delete"})
    code, report = run("--provider", "gcp")
    assert code == 1 and failures(report)["auth"] == "not permitted: storage.objects.delete"
    monkeypatch.setattr(google, "token", "another")
    code, report = run("--provider", "gcp")
    assert code == 1 and "expected valid credentials" in failures(report)["auth"]


def test_settings_that_are_no_settings_or_another_providers_are_refused(on_aws: Path, tmp_path: Path) -> None:
    (tmp_path / "none.toml").write_text("seed = 1\n")
    for arguments, message in (
        (("--provider", "gcp", "--config", str(on_aws)), "--provider gcp does not match cloud.provider 'aws' of "),
        (("--provider", "aws"), "--provider aws does not match the object store file://"),
        (("--provider", "aws", "--config", "none.toml"), "none.toml: there is no table [cloud]"),
        (("--provider", "aws", "--config", "absent.toml"), "absent.toml: no such config file"),
    ):
        code, report = run(*arguments)
        assert code == 2 and report["error"].startswith(f"rollout: {message}"), report


@pytest.mark.server
def test_as_a_flow_it_fails_with_what_to_do(
    prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployments.cloud_check import cloud_doctor as flow

    assert [check["status"] for check in flow()["checks"]] == ["pass"] * len(NAMES)
    (tmp_path / "objects2").write_text("x")
    monkeypatch.setenv("ROLLOUT_STORAGE", str(tmp_path / "objects2"))
    with pytest.raises(Exception, match=r"reachability: .* is no folder; remove it, or choose another"):
        flow()
