"""Every run as a typed, strict description: the TOML schema, the flows' parameters and the published JSON Schema.

Alternatives are plain unions of models with a Literal ``kind`` (the orchestrator's run form shows those as tabs).
Unknown keys are refused with the nearest known key. Values that change speed but never results say so; they stay out of
cache keys (`cache_identity`).
"""

from __future__ import annotations

from rollout_core.config.backends import BackendConfig, ScriptedBackend, TransformersBackend, VLLMBackend
from rollout_core.config.base import SCHEMA_VERSION, ModelSource, RunInfo, SamplingParams, Settings, identity
from rollout_core.config.learning import (
    AdaptiveKL,
    BudgetConfig,
    GRPOSettings,
    ImportanceCorrection,
    JsonlDataset,
    LearnerSettings,
    LossOn,
    OnPolicySettings,
    OptimizerConfig,
    Padded,
    PPOSettings,
    SFTSettings,
    SnapshotPolicy,
)
from rollout_core.config.parsing import apply_overrides, load_config, parse_config
from rollout_core.config.runs import (
    CONFIG_KINDS,
    EvaluationConfig,
    GRPOAlgorithm,
    InferBatchConfig,
    InputGlob,
    NightlyConfig,
    OutputDir,
    PPOAlgorithm,
    PromotionConfig,
    RunConfig,
    SFTAlgorithm,
    TrainGRPOConfig,
    TrainPPOConfig,
    TrainSFTConfig,
    WorkersConfig,
    json_schema,
)

__all__ = [
    "CONFIG_KINDS",
    "SCHEMA_VERSION",
    "AdaptiveKL",
    "BackendConfig",
    "BudgetConfig",
    "EvaluationConfig",
    "GRPOAlgorithm",
    "GRPOSettings",
    "ImportanceCorrection",
    "InferBatchConfig",
    "InputGlob",
    "JsonlDataset",
    "LearnerSettings",
    "LossOn",
    "ModelSource",
    "NightlyConfig",
    "OnPolicySettings",
    "OptimizerConfig",
    "OutputDir",
    "PPOAlgorithm",
    "PPOSettings",
    "Padded",
    "PromotionConfig",
    "RunConfig",
    "RunInfo",
    "SFTAlgorithm",
    "SFTSettings",
    "SamplingParams",
    "ScriptedBackend",
    "Settings",
    "SnapshotPolicy",
    "TrainGRPOConfig",
    "TrainPPOConfig",
    "TrainSFTConfig",
    "TransformersBackend",
    "VLLMBackend",
    "WorkersConfig",
    "apply_overrides",
    "identity",
    "json_schema",
    "load_config",
    "parse_config",
]
