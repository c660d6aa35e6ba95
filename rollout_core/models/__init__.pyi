from .chat import (
    ChatMessage as ChatMessage,
)
from .facts import (
    ModelFacts as ModelFacts,
    describe_model as describe_model,
)
from .model_import import (
    import_model as import_model,
)
from .tokenizers import (
    load_tokenizer as load_tokenizer,
)
from .weights import (
    load_causal_lm as load_causal_lm,
)
