"""Where trackers report to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from prefect.blocks.core import Block
from pydantic import ConfigDict, Field, SecretStr, field_validator

from rollout_core.base.settings import DEFAULT_TRACKING, refuse_credentials


class ExperimentTracker(Block):
    """Where the trackers of a configuration keep files, and which server of W&B or MLflow gets the figures.

    A variable that the worker's environment has itself, such as ``WANDB_MODE``, counts in place of the block's."""

    model_config = ConfigDict(hide_input_in_errors=True)
    """An address that is refused may hold a password."""

    _block_type_name = "Experiment Tracker"
    _block_type_slug = "experiment-tracker"

    folder: str = Field(default=DEFAULT_TRACKING, description="Folder for files of TensorBoard and other trackers.")
    wandb_mode: Literal["online", "offline", "disabled"] | None = Field(default=None, description="WANDB_MODE.")
    wandb_base_url: str | None = Field(default=None, description="WANDB_BASE_URL: a W&B server of your own.")
    wandb_entity: str | None = Field(default=None, description="WANDB_ENTITY: team or user that gets the runs.")
    wandb_api_key: SecretStr | None = Field(default=None, description="WANDB_API_KEY. Never logged.")
    mlflow_tracking_uri: str | None = Field(
        default=None, description="MLFLOW_TRACKING_URI: an MLflow server, without user and password."
    )
    mlflow_tracking_username: str | None = Field(default=None, description="MLFLOW_TRACKING_USERNAME.")
    mlflow_tracking_password: SecretStr | None = Field(
        default=None, description="MLFLOW_TRACKING_PASSWORD. Never logged."
    )

    @field_validator("wandb_base_url", "mlflow_tracking_uri")
    @classmethod
    def _without_credentials(cls, address: str | None) -> str | None:
        return None if address is None else refuse_credentials(address)

    def place(self) -> Path:
        """The folder."""
        return Path(self.folder)

    def environment(self) -> dict[str, str]:
        """Variables by which trackers know where to report to, without those that are set already."""
        found: dict[str, str] = {}
        for name in type(self).model_fields:
            value = getattr(self, name) if name.startswith(("wandb_", "mlflow_")) else None
            if value is not None and name.upper() not in os.environ:
                found[name.upper()] = value.get_secret_value() if isinstance(value, SecretStr) else value
        return found
