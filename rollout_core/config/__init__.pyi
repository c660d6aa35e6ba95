from .backends import (
    BackendConfig as BackendConfig,
)
from .backends import (
    EngineConfig as EngineConfig,
)
from .backends import (
    OpenAIBackend as OpenAIBackend,
)
from .backends import (
    ScriptedBackend as ScriptedBackend,
)
from .backends import (
    TransformersBackend as TransformersBackend,
)
from .backends import (
    VLLMBackend as VLLMBackend,
)
from .base import (
    SCHEMA_VERSION as SCHEMA_VERSION,
)
from .base import (
    ModelSource as ModelSource,
)
from .base import (
    RunInfo as RunInfo,
)
from .base import (
    Settings as Settings,
)
from .base import (
    identity as identity,
)
from .datasets import (
    DatasetSource as DatasetSource,
)
from .datasets import (
    HuggingFaceDataset as HuggingFaceDataset,
)
from .datasets import (
    JsonlDataset as JsonlDataset,
)
from .datasets import (
    ParquetDataset as ParquetDataset,
)
from .datasets import (
    StoredDataset as StoredDataset,
)
from .learning import (
    BudgetConfig as BudgetConfig,
)
from .learning import (
    HeldOutRows as HeldOutRows,
)
from .learning import (
    LearnerSettings as LearnerSettings,
)
from .learning import (
    LoRAConfig as LoRAConfig,
)
from .learning import (
    LossOn as LossOn,
)
from .learning import (
    OptimizerConfig as OptimizerConfig,
)
from .learning import (
    Padded as Padded,
)
from .learning import (
    ParallelConfig as ParallelConfig,
)
from .learning import (
    SFTSettings as SFTSettings,
)
from .learning import (
    SnapshotPolicy as SnapshotPolicy,
)
from .learning import (
    TrackerName as TrackerName,
)
from .on_policy import (
    AdaptiveKL as AdaptiveKL,
)
from .on_policy import (
    GRPOSettings as GRPOSettings,
)
from .on_policy import (
    ImportanceCorrection as ImportanceCorrection,
)
from .on_policy import (
    OnPolicySettings as OnPolicySettings,
)
from .on_policy import (
    PPOSettings as PPOSettings,
)
from .parsing import (
    apply_overrides as apply_overrides,
)
from .parsing import (
    load_config as load_config,
)
from .parsing import (
    parse_config as parse_config,
)
from .preference import (
    DPOSettings as DPOSettings,
)
from .preference import (
    IPOSettings as IPOSettings,
)
from .preference import (
    KTOSettings as KTOSettings,
)
from .preference import (
    PreferenceSettings as PreferenceSettings,
)
from .preference import (
    RewardModelSettings as RewardModelSettings,
)
from .runs import (
    CONFIG_KINDS as CONFIG_KINDS,
)
from .runs import (
    BatchSampling as BatchSampling,
)
from .runs import (
    DPOAlgorithm as DPOAlgorithm,
)
from .runs import (
    EvaluationConfig as EvaluationConfig,
)
from .runs import (
    FailurePolicy as FailurePolicy,
)
from .runs import (
    GRPOAlgorithm as GRPOAlgorithm,
)
from .runs import (
    InferBatchConfig as InferBatchConfig,
)
from .runs import (
    InputGlob as InputGlob,
)
from .runs import (
    IPOAlgorithm as IPOAlgorithm,
)
from .runs import (
    KTOAlgorithm as KTOAlgorithm,
)
from .runs import (
    NightlyConfig as NightlyConfig,
)
from .runs import (
    OutputDir as OutputDir,
)
from .runs import (
    PPOAlgorithm as PPOAlgorithm,
)
from .runs import (
    PreferenceConfig as PreferenceConfig,
)
from .runs import (
    PromotionConfig as PromotionConfig,
)
from .runs import (
    RewardModelAlgorithm as RewardModelAlgorithm,
)
from .runs import (
    Run as Run,
)
from .runs import (
    RunConfig as RunConfig,
)
from .runs import (
    SFTAlgorithm as SFTAlgorithm,
)
from .runs import (
    TrainDPOConfig as TrainDPOConfig,
)
from .runs import (
    TrainGRPOConfig as TrainGRPOConfig,
)
from .runs import (
    TrainIPOConfig as TrainIPOConfig,
)
from .runs import (
    TrainKTOConfig as TrainKTOConfig,
)
from .runs import (
    TrainPPOConfig as TrainPPOConfig,
)
from .runs import (
    TrainRMConfig as TrainRMConfig,
)
from .runs import (
    TrainSFTConfig as TrainSFTConfig,
)
from .runs import (
    json_schema as json_schema,
)
from .sampling import (
    SamplingParams as SamplingParams,
)
from .structured import (
    ChoiceOutput as ChoiceOutput,
)
from .structured import (
    GrammarOutput as GrammarOutput,
)
from .structured import (
    JsonSchemaOutput as JsonSchemaOutput,
)
from .structured import (
    RegexOutput as RegexOutput,
)
from .structured import (
    StructuredOutput as StructuredOutput,
)
from .workers import (
    AdaptConfig as AdaptConfig,
)
from .workers import (
    DaskConfig as DaskConfig,
)
from .workers import (
    WorkersConfig as WorkersConfig,
)
