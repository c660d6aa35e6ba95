from .base import (
    InferenceBackend as InferenceBackend,
    ModelRef as ModelRef,
    Request as Request,
)
from .engines import (
    build_backend as build_backend,
)
from .ledger import (
    SampleLedger as SampleLedger,
)
from .training_samples import (
    Adapted as Adapted,
    TokenSample as TokenSample,
    adapt_rollouts as adapt_rollouts,
    file_experience as file_experience,
)
