"""Blocks of the Prefect server by reference: secrets, and where trackers report to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect import get_client
from pydantic import SecretStr

import blocks
from blocks import ExperimentTracker, RolloutSecrets
from rollout_core.base import secret_sources
from rollout_core.base.errors import ConfigError
from rollout_core.base.settings import read_secret, require_secret
from rollout_core.config import TrainSFTConfig, parse_config
from tasks.runtime.connections import tracker

pytestmark = pytest.mark.server


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch, prefect_server: str) -> None:
    """A block with two, of which one may be read."""
    monkeypatch.setattr(secret_sources, "_kept", {})
    monkeypatch.setenv("ROLLOUT_SECRETS", "SERVER_KEY, ABSENT")
    monkeypatch.setenv("ROLLOUT_SECRETS_FROM", "environment, block:rollout-secrets/team")
    values = {"SERVER_KEY": "sk-of-the-team", "OTHER": "sk-other"}
    RolloutSecrets(secrets=values).save("team", overwrite=True, _sync=True)  # type: ignore[arg-type, call-arg]


def test_a_block_gives_the_secrets_that_are_listed_and_no_others(secrets: None, monkeypatch: pytest.MonkeyPatch):
    assert read_secret("SERVER_KEY") == "sk-of-the-team" and read_secret("ABSENT") is None
    with pytest.raises(ConfigError, match="'OTHER' is not among those allowed"):
        read_secret("OTHER")
    assert read_secret("HF_TOKEN") is None, "it is always allowed, but a block is only asked for what is listed"
    with pytest.raises(ConfigError, match="block:rollout-secrets/team of the Prefect server under ABSENT"):
        require_secret("ABSENT")
    monkeypatch.setenv("ROLLOUT_SECRET_SERVER_KEY", "sk-here")
    assert read_secret("SERVER_KEY") == "sk-here", "the environment stands first"


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("block:rollout-secrets/nobody", "names no block of the Prefect server"),
        ("block:rollout-database/team", "is no block of secrets; expected block:rollout-secrets/NAME"),
        ("block:rollout-secrets", "is no block of secrets"),
    ],
)
def test_an_address_that_names_no_block_of_secrets_is_refused(
    secrets: None, monkeypatch: pytest.MonkeyPatch, address: str, problem: str
):
    monkeypatch.setenv("ROLLOUT_SECRETS_FROM", address)
    with pytest.raises(ConfigError, match=problem):
        read_secret("SERVER_KEY")


def test_secrets_of_blocks_are_shown_nowhere(secrets: None):
    kept = ExperimentTracker(wandb_api_key="sk-wandb", mlflow_tracking_password="sk-mlflow")  # type: ignore[arg-type]
    kept.save("hidden", overwrite=True, _sync=True)  # type: ignore[call-arg]
    shown = [repr(kept), repr(RolloutSecrets.load("team", _sync=True))]  # type: ignore[call-arg]
    with get_client(sync_client=True) as client:
        for name, slug in (("team", "rollout-secrets"), ("hidden", "experiment-tracker")):
            shown.append(str(client.read_block_document_by_name(name, slug, include_secrets=False).data))
    for text in shown:
        assert "sk-" not in text and "***" in text


def test_a_tracker_is_a_folder_or_a_block(prefect_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROLLOUT_TRACKING", str(tmp_path))
    assert tracker().place() == tmp_path and tracker().environment() == {}
    monkeypatch.setenv("ROLLOUT_TRACKING", "block:experiment-tracker/team")
    with pytest.raises(ConfigError, match="'block:experiment-tracker/team' names no block"):
        tracker()
    block = ExperimentTracker(
        folder="curves", wandb_mode="offline", wandb_api_key=SecretStr("sk-1"), mlflow_tracking_uri="http://m"
    )
    block.save("team", overwrite=True, _sync=True)  # type: ignore[call-arg]
    assert tracker().place() == Path("curves")
    wanted = {"WANDB_MODE": "offline", "WANDB_API_KEY": "sk-1", "MLFLOW_TRACKING_URI": "http://m"}
    assert tracker().environment() == wanted
    monkeypatch.setenv("WANDB_MODE", "online")
    assert tracker().environment() == {name: wanted[name] for name in wanted if name != "WANDB_MODE"}
    with pytest.raises(ValueError, match="holds a user, password or key") as caught:
        ExperimentTracker(mlflow_tracking_uri="https://me:hunter2@m.example")
    assert "hunter2" not in str(caught.value)


def test_an_update_reports_to_where_the_block_says(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, sorting_task
):
    from flows.train import train_sft

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_ENTITY", raising=False)
    ExperimentTracker(folder="curves", wandb_entity="team").save("curves", overwrite=True, _sync=True)  # type: ignore[call-arg]
    monkeypatch.setenv("ROLLOUT_TRACKING", "block:experiment-tracker/curves")
    settings = {
        "kind": "sft",
        "base_model": {"uri": str(tiny_model)},
        "dataset": {"path": str(sorting_task.sft)},
        "budget": {"max_steps": 2},
        "minibatch_size": 4,
        "optimizer": {"lr": 1e-3},
        "sequence": {"max_length": 64},
        "trackers": ["tensorboard"],
    }
    train_sft(parse_config({"num_threads": 1, "algorithm": settings}, TrainSFTConfig))
    assert len(list((tmp_path / "curves" / "tensorboard").rglob("events.out.tfevents.*"))) == 1
    assert "WANDB_ENTITY" not in os.environ, "it was there for the update alone"


def test_all_blocks_are_registered_by_one_command(prefect_server: str):
    command = [sys.executable, "-m", "prefect", "block", "register", "--module", "blocks"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with get_client(sync_client=True) as client:
        for name in blocks.__all__:
            kind = getattr(blocks, name)
            assert client.read_block_type_by_slug(kind._block_type_slug).name == kind._block_type_name
