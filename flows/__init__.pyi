from .agent import (
    train_agent as train_agent,
)
from .batch import (
    batch_inference as batch_inference,
)
from .online import (
    learn_online as learn_online,
)
from .prompts import (
    tune_prompt as tune_prompt,
)
from .train import (
    train_dpo as train_dpo,
    train_grpo as train_grpo,
    train_ipo as train_ipo,
    train_kto as train_kto,
    train_ppo as train_ppo,
    train_rm as train_rm,
    train_sft as train_sft,
)
