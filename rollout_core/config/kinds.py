"""The kinds of runs there are, by the names that commands and schemas know them by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.config.agents import LearnOnlineConfig, TrainAgentConfig, TunePromptConfig
from rollout_core.config.base import Settings, parse_config
from rollout_core.config.evaluation import Suite
from rollout_core.config.inspect_ai import InspectSuite
from rollout_core.config.lm_eval import LmEvalSuite
from rollout_core.config.runs import (
    EvalConfig,
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
    "evaluate-suites": EvalConfig,
    "train-agent": TrainAgentConfig,
    "tune-prompt": TunePromptConfig,
    "learn-online": LearnOnlineConfig,
}

SUITE_KINDS: dict[str, type[Settings]] = {"suite": Suite, "suite-lm-eval": LmEvalSuite, "suite-inspect": InspectSuite}
"""Files of suites, by the name that `rollout schema` knows them by."""


def kind_of(tables: Mapping[str, Any], name: str) -> str:
    """The kind of run that a file's tables are of. Raises ConfigError where that is not clear, or with what is wrong
    with them as the kind that they come nearest to."""
    wrong: dict[str, ConfigError] = {}
    fitting = []
    for kind, model in CONFIG_KINDS.items():
        try:
            parse_config(tables, model, name=name)
            fitting.append(kind)
        except ConfigError as error:
            wrong[kind] = error
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        nearest = min(wrong, key=lambda kind: len(wrong[kind].violations or (wrong[kind],)))
        raise ConfigError(f"as a configuration of {nearest}: {wrong[nearest]}", wrong[nearest].violations)
    raise ConfigError(f"{name} fits several kinds of runs ({', '.join(fitting)}); say which by --kind")


def json_schema() -> dict[str, Any]:
    """JSON Schema of every run configuration, by kind, and of files of suites."""
    return {kind: schema_of(kind) for kind in {**CONFIG_KINDS, **SUITE_KINDS}}


def schema_of(kind: str) -> dict[str, Any]:
    """JSON Schema of this kind of configuration or file of suites. Raises ConfigError where there is none."""
    models: dict[str, type[Settings]] = {**CONFIG_KINDS, **SUITE_KINDS}
    if kind not in models:
        raise ConfigError(f"no kind of configuration is named {kind!r}; expected one of {', '.join(models)}")
    return models[kind].model_json_schema()
