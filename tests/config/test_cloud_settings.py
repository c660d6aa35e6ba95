"""The ``[cloud]`` table, and secrets from the environment, the Prefect server and the clouds' secret managers."""

from __future__ import annotations

import base64
import logging
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from prefect.blocks.system import Secret

import blocks  # noqa: F401 - it tells where secret blocks are
from rollout_core.base import secret_sources
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.settings import read_secret, require_secret
from rollout_core.config.cloud import parse_cloud, take_cloud
from tests.support.gcp_server import GoogleCloud, service_account

AWS = {"provider": "aws", "region": "us-west-2", "s3": {"bucket": "my-bucket", "prefix": "runs/"}}
GCP = {"provider": "gcp", "project": "mine", "gcs": {"bucket": "my-bucket"}}


def wrong(table: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_cloud({"cloud": table}, "my.toml")
    return str(caught.value)


def test_a_table_stands_for_settings_of_the_environment() -> None:
    aws = parse_cloud({"cloud": {**AWS, "secrets": {"allowlist": ["rollout/hf-token"]}}}, "my.toml")
    assert aws is not None
    assert aws.environment() == {
        "AWS_DEFAULT_REGION": "us-west-2",
        "ROLLOUT_STORAGE": "s3://my-bucket/runs",
        "ROLLOUT_UPLOAD_PART_BYTES": "16777216",
        "ROLLOUT_MAX_BLOB_BYTES": "5368709120",
        "ROLLOUT_SECRETS": "HF_TOKEN=rollout/hf-token",
        "ROLLOUT_SECRETS_FROM": "environment,aws",
    }
    below = {"provider": "aws", "region": "us-west-2", "aws": {"s3": AWS["s3"]}}
    assert parse_cloud({"cloud": below}, "my.toml") == parse_cloud({"cloud": AWS}, "my.toml")
    gcp = parse_cloud({"cloud": GCP}, "my.toml")
    assert gcp is not None and gcp.environment()["ROLLOUT_STORAGE"] == "gs://my-bucket"
    local = parse_cloud({"cloud": {}}, "my.toml")
    assert local is not None and local.environment() == {"ROLLOUT_STORAGE": "file://./data/objects"}
    assert parse_cloud({}, "my.toml") is None


def test_a_queue_of_the_table_is_one_of_the_settings() -> None:
    url = "https://sqs.us-west-2.amazonaws.com/123456789012/rollout"
    aws = parse_cloud({"cloud": {**AWS, "sqs": {"queue_url": url, "dead_letter_url": f"{url}-dead"}}}, "my.toml")
    assert (
        aws is not None
        and aws.environment().items()
        >= {
            "ROLLOUT_QUEUE": url,
            "ROLLOUT_QUEUE_LEASE_SECONDS": "300",
            "ROLLOUT_QUEUE_DEAD_LETTER": f"{url}-dead",
        }.items()
    )
    pubsub = {"topic": "prompts", "subscription": "rollout", "ack_deadline_secs": 60, "dead_letter_topic": "dead"}
    gcp = parse_cloud({"cloud": {**GCP, "pubsub": pubsub}}, "my.toml")
    assert (
        gcp is not None
        and gcp.environment().items()
        >= {
            "ROLLOUT_QUEUE": "projects/mine/subscriptions/rollout",
            "ROLLOUT_QUEUE_LEASE_SECONDS": "60",
            "ROLLOUT_QUEUE_DEAD_LETTER": "projects/mine/topics/dead",
            "ROLLOUT_QUEUE_TOPIC": "projects/mine/topics/prompts",
        }.items()
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {**AWS, "pubsub": {"subscription": "abc"}},
            "cloud.pubsub: belongs to provider 'gcp', and cloud.provider is 'aws'",
        ),
        (
            {**AWS, "s3": {"bucket": "b-1", "multipart_chunk_bytes": 1}},
            "cloud.s3.multipart_chunk_bytes: below S3 5 MiB minimum; got 1",
        ),
        (
            {**GCP, "gcs": {"bucket": "b-1", "resumable_chunk_bytes": 1}},
            "cloud.gcs.resumable_chunk_bytes: below GCS 5 MiB minimum; got 1",
        ),
        (
            {**AWS, "s3": {"bucket": "b-1", "max_snapshot_part_bytes": 2**34}},
            "cloud.s3.max_snapshot_part_bytes: above the 10 GiB hard cap; got 17179869184",
        ),
        (
            {**AWS, "gcs": {"bucket": "b-1"}},
            "cloud.gcs: belongs to provider 'gcp', and cloud.provider is 'aws'; a run is in one cloud",
        ),
        ({**AWS, "gcp": {"gcs": {}}}, "cloud.gcp: belongs to provider 'gcp'"),
        ({**AWS, "regoin": "x"}, "cloud.regoin: unknown key; did you mean 'region'?"),
        ({"provider": "azure"}, "cloud.provider: got 'azure'; expected one of local, aws, gcp"),
        ({"provider": "aws", "region": "x"}, "cloud.s3: required, but not given"),
        ("aws", "cloud: expected a table; got 'aws'"),
    ],
)
def test_a_table_that_is_wrong_is_told_with_its_key(table: Any, message: str) -> None:
    assert wrong(table).startswith(f"my.toml: {message}")


def test_a_file_and_the_environment_may_not_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in parse_cloud({"cloud": AWS}, "x").environment():  # type: ignore[union-attr]
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("ROLLOUT_STORAGE", "s3://other")
    with pytest.raises(
        ConfigError, match=r"says ROLLOUT_STORAGE=s3://my-bucket/runs, and the environment .*s3://other"
    ):
        take_cloud({"cloud": AWS}, "my.toml")
    monkeypatch.setenv("ROLLOUT_STORAGE", "s3://my-bucket/runs")
    assert take_cloud({"cloud": AWS, "seed": 1}, "my.toml") == {"seed": 1}


# Secrets


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_SECRETS", "SERVER_KEY=tests/server-key, PLAIN")
    monkeypatch.setattr(secret_sources, "_kept", {})


def test_only_what_is_listed_is_asked_for(secrets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_SECRETS_FROM", "aws")

    def never(*_: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setitem(secret_sources._sources, "aws", never)
    with pytest.raises(ConfigError, match="secret 'OTHER' is not among those allowed here"):
        read_secret("OTHER")
    assert read_secret("HF_TOKEN") is None, "it is always allowed, but a manager is only asked for what is listed"


def test_the_first_source_that_has_a_secret_gives_it(secrets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setitem(secret_sources._sources, "aws", lambda name, secret_id: asked.append(secret_id) or "of aws")
    monkeypatch.setenv("ROLLOUT_SECRETS_FROM", "environment, aws")
    assert [read_secret("SERVER_KEY"), read_secret("SERVER_KEY"), asked] == ["of aws", "of aws", ["tests/server-key"]]
    monkeypatch.setenv("ROLLOUT_SECRET_SERVER_KEY", "of the environment")
    assert read_secret("SERVER_KEY") == "of the environment"
    for value, message in (("vault", "ROLLOUT_SECRETS_FROM is 'vault'; expected some of environment, prefect"),):
        monkeypatch.setenv("ROLLOUT_SECRETS_FROM", value)
        with pytest.raises(ConfigError, match=message):
            read_secret("PLAIN")


def test_a_secret_that_was_changed_is_read_anew_and_kept_while_its_source_is_away(
    secrets: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    values = iter(["first", "second", Recoverable("away")])

    def source(*_: str) -> str:
        value = next(values)
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setitem(secret_sources._sources, "aws", source)
    monkeypatch.setenv("ROLLOUT_SECRETS_FROM", "aws")
    monkeypatch.setenv("ROLLOUT_SECRETS_SECONDS", "0")
    with caplog.at_level(logging.WARNING):
        assert [read_secret("PLAIN") for _ in range(3)] == ["first", "second", "second"]
    assert "secret PLAIN is used as it was: away" in caplog.text and "second" not in caplog.text
    monkeypatch.setenv("ROLLOUT_SECRETS_SECONDS", "soon")
    with pytest.raises(ConfigError, match="ROLLOUT_SECRETS_SECONDS is 'soon'"):
        read_secret("PLAIN")


def use_aws(monkeypatch: pytest.MonkeyPatch, s3: dict[str, Any]) -> Any:
    for name, value in {
        "AWS_ENDPOINT_URL": s3["endpoint_url"],
        "AWS_ACCESS_KEY_ID": s3["key"],
        "AWS_SECRET_ACCESS_KEY": s3["secret"],
        "AWS_DEFAULT_REGION": "us-east-1",
        "ROLLOUT_SECRETS_FROM": "aws",
    }.items():
        monkeypatch.setenv(name, value)
    return botocore.session.get_session().create_client("secretsmanager")


def test_aws_secrets_manager(
    secrets: None, monkeypatch: pytest.MonkeyPatch, s3: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    manager = use_aws(monkeypatch, s3)
    with pytest.raises(ConfigError, match="not set; set it in AWS Secrets Manager as tests/server-key"):
        require_secret("SERVER_KEY")
    manager.create_secret(Name="tests/server-key", SecretString="sk-aws\n")
    assert read_secret("SERVER_KEY") is None, "what was not there is not asked for again so soon"
    monkeypatch.setenv("ROLLOUT_SECRETS_SECONDS", "0")
    monkeypatch.setattr(secret_sources, "_kept", {})
    caplog.set_level(logging.DEBUG)
    assert require_secret("SERVER_KEY") == "sk-aws"
    assert "secretsmanager" in caplog.text and "sk-aws" not in caplog.text
    manager.put_secret_value(SecretId="tests/server-key", SecretBinary=b"sk-rotated")
    assert require_secret("SERVER_KEY") == "sk-rotated"
    manager.put_secret_value(SecretId="tests/server-key", SecretBinary=b"\xff")
    with pytest.raises(ConfigError, match="bytes that are no UTF-8 text"):
        read_secret("SERVER_KEY")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(Recoverable, match="cannot be asked"):
        read_secret("SERVER_KEY")


def test_google_secret_manager(
    secrets: None,
    monkeypatch: pytest.MonkeyPatch,
    google: GoogleCloud,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(google, "secrets", {"server-key": b"sk-google"})
    monkeypatch.setattr(google, "token", "only-after-login")
    monkeypatch.setenv("ROLLOUT_SECRETS", "SERVER_KEY=server-key,ABSENT")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(service_account(tmp_path, google)))
    monkeypatch.setenv(secret_sources.GCP_ENDPOINT, google.url)
    monkeypatch.setenv("ROLLOUT_SECRETS_FROM", "gcp")
    assert require_secret("SERVER_KEY") == "sk-google"
    assert read_secret("ABSENT") is None
    coded = base64.b64encode(b"sk-google").decode()
    assert caplog.text and not any(text in caplog.text for text in ("sk-google", coded, "only-after-login"))
    monkeypatch.setattr(google, "token", None)
    monkeypatch.setattr(google, "denied", {"secrets"})
    monkeypatch.setenv("ROLLOUT_SECRETS_SECONDS", "0")
    monkeypatch.setattr(secret_sources, "_kept", {})
    with pytest.raises(ConfigError, match=r"'server-key' \(403\); grant roles/secretmanager.secretAccessor"):
        read_secret("SERVER_KEY")


@pytest.mark.server
def test_secret_blocks_of_the_prefect_server(
    secrets: None, monkeypatch: pytest.MonkeyPatch, prefect_server: str
) -> None:
    monkeypatch.setenv("ROLLOUT_SECRETS_FROM", "prefect")
    assert read_secret("PLAIN") is None
    Secret(value="sk-block").save("tests-server-key", _sync=True)  # type: ignore[call-arg]
    assert read_secret("SERVER_KEY") == "sk-block"
