"""The kinds of runs there are, by the names that commands and schemas know them by."""

from __future__ import annotations

from typing import Any

from rollout_core.config.agents import LearnOnlineConfig, TrainAgentConfig, TunePromptConfig
from rollout_core.config.runs import (
    InferBatchConfig,
    NightlyConfig,
    Run,
    TrainDPOConfig,
    TrainGRPOConfig,
    TrainIPOConfig,
    TrainKTOConfig,
    TrainPPOConfig,
    TrainRMConfig,
    TrainSFTConfig,
)

CONFIG_KINDS: dict[str, type[Run]] = {
    "nightly": NightlyConfig,
    "train-sft": TrainSFTConfig,
    "train-ppo": TrainPPOConfig,
    "train-grpo": TrainGRPOConfig,
    "train-rm": TrainRMConfig,
    "train-dpo": TrainDPOConfig,
    "train-ipo": TrainIPOConfig,
    "train-kto": TrainKTOConfig,
    "infer-batch": InferBatchConfig,
    "train-agent": TrainAgentConfig,
    "tune-prompt": TunePromptConfig,
    "learn-online": LearnOnlineConfig,
}


def json_schema() -> dict[str, Any]:
    """JSON Schema of every run configuration, by kind."""
    return {name: model.model_json_schema() for name, model in CONFIG_KINDS.items()}
