from .facts import (
    ModelFacts as ModelFacts,
    describe_model as describe_model,
)
from .locating import (
    import_model as import_model,
)
from .messages import (
    ChatMessage as ChatMessage,
)
from .pretrained import (
    load_causal_lm as load_causal_lm,
    load_tokenizer as load_tokenizer,
)
