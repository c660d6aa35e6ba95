from .batch import (
    batch_inference as batch_inference,
)
from .local_server import (
    prefect_server as prefect_server,
)
from .preference import (
    train_dpo as train_dpo,
    train_ipo as train_ipo,
    train_kto as train_kto,
    train_rm as train_rm,
)
from .train import (
    train_grpo as train_grpo,
    train_ppo as train_ppo,
    train_sft as train_sft,
)
