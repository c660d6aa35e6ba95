from .backends import (
    BackendConfig as BackendConfig,
    EngineConfig as EngineConfig,
    OpenAIBackend as OpenAIBackend,
    ScriptedBackend as ScriptedBackend,
    TransformersBackend as TransformersBackend,
    VLLMBackend as VLLMBackend,
)
from .base import (
    SCHEMA_VERSION as SCHEMA_VERSION,
    ModelSource as ModelSource,
    RunInfo as RunInfo,
    Settings as Settings,
    identity as identity,
)
from .datasets import (
    DatasetSource as DatasetSource,
    HuggingFaceDataset as HuggingFaceDataset,
    JsonlDataset as JsonlDataset,
    ParquetDataset as ParquetDataset,
    StoredDataset as StoredDataset,
)
from .learning import (
    BudgetConfig as BudgetConfig,
    HeldOutRows as HeldOutRows,
    LearnerSettings as LearnerSettings,
    LoRAConfig as LoRAConfig,
    LossOn as LossOn,
    OptimizerConfig as OptimizerConfig,
    ParallelConfig as ParallelConfig,
    SequenceConfig as SequenceConfig,
    SFTSettings as SFTSettings,
    SnapshotPolicy as SnapshotPolicy,
    TrackerName as TrackerName,
)
from .on_policy import (
    AdaptiveKL as AdaptiveKL,
    GRPOSettings as GRPOSettings,
    ImportanceCorrection as ImportanceCorrection,
    OnPolicySettings as OnPolicySettings,
    PPOSettings as PPOSettings,
)
from .parsing import (
    apply_overrides as apply_overrides,
    load_config as load_config,
    parse_config as parse_config,
)
from .preference import (
    DPOSettings as DPOSettings,
    IPOSettings as IPOSettings,
    KTOSettings as KTOSettings,
    PreferenceSettings as PreferenceSettings,
    RewardModelSettings as RewardModelSettings,
)
from .runs import (
    CONFIG_KINDS as CONFIG_KINDS,
    BatchSampling as BatchSampling,
    DPOAlgorithm as DPOAlgorithm,
    EvaluationConfig as EvaluationConfig,
    FailurePolicy as FailurePolicy,
    GRPOAlgorithm as GRPOAlgorithm,
    InferBatchConfig as InferBatchConfig,
    InputGlob as InputGlob,
    IPOAlgorithm as IPOAlgorithm,
    KTOAlgorithm as KTOAlgorithm,
    NightlyConfig as NightlyConfig,
    OutputDir as OutputDir,
    PPOAlgorithm as PPOAlgorithm,
    PreferenceConfig as PreferenceConfig,
    PromotionConfig as PromotionConfig,
    RewardModelAlgorithm as RewardModelAlgorithm,
    Run as Run,
    RunConfig as RunConfig,
    SFTAlgorithm as SFTAlgorithm,
    TrainDPOConfig as TrainDPOConfig,
    TrainGRPOConfig as TrainGRPOConfig,
    TrainIPOConfig as TrainIPOConfig,
    TrainKTOConfig as TrainKTOConfig,
    TrainPPOConfig as TrainPPOConfig,
    TrainRMConfig as TrainRMConfig,
    TrainSFTConfig as TrainSFTConfig,
    json_schema as json_schema,
)
from .sampling import (
    SamplingParams as SamplingParams,
)
from .structured import (
    ChoiceOutput as ChoiceOutput,
    GrammarOutput as GrammarOutput,
    JsonSchemaOutput as JsonSchemaOutput,
    RegexOutput as RegexOutput,
    StructuredOutput as StructuredOutput,
)
from .workers import (
    AdaptConfig as AdaptConfig,
    DaskConfig as DaskConfig,
    WorkersConfig as WorkersConfig,
)
