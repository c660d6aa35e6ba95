from .backend import (
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
    file_experience as file_experience,
)
