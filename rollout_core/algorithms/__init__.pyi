from .advantages import (
    gae as gae,
    group_advantages as group_advantages,
    masked_whiten as masked_whiten,
)
from .context import (
    UpdateContext as UpdateContext,
)
from .dataset_updates import (
    preference_update as preference_update,
    rm_update as rm_update,
    sft_update as sft_update,
)
from .experience import (
    OnPolicyUpdate as OnPolicyUpdate,
    PolicyBatch as PolicyBatch,
    Trajectory as Trajectory,
    build_batch as build_batch,
    completion_forward as completion_forward,
)
from .loop import (
    Algorithm as Algorithm,
    LoopHooks as LoopHooks,
    MinibatchLoss as MinibatchLoss,
    build_accelerator as build_accelerator,
    build_optimizer as build_optimizer,
    train as train,
)
from .losses import (
    OddsRatioLoss as OddsRatioLoss,
    ShapeError as ShapeError,
    bradley_terry_loss as bradley_terry_loss,
    dpo_loss as dpo_loss,
    ipo_loss as ipo_loss,
    kto_loss as kto_loss,
    orpo_loss as orpo_loss,
    selected_logprobs as selected_logprobs,
    sft_loss as sft_loss,
    simpo_loss as simpo_loss,
    token_logprobs as token_logprobs,
)
from .on_policy import (
    GRPO as GRPO,
    PPO as PPO,
    KLController as KLController,
)
from .on_policy_updates import (
    grpo_update as grpo_update,
    ppo_update as ppo_update,
)
from .policy import (
    NLLOutput as NLLOutput,
    Policy as Policy,
    PolicyOutput as PolicyOutput,
    ValueModel as ValueModel,
)
from .policy_losses import (
    GroupPolicyLoss as GroupPolicyLoss,
    PolicyLoss as PolicyLoss,
    ValueLoss as ValueLoss,
    grpo_loss as grpo_loss,
    kl_estimate as kl_estimate,
    ppo_policy_loss as ppo_policy_loss,
    ppo_value_loss as ppo_value_loss,
)
from .state import (
    TrainState as TrainState,
)
from .supervised import (
    SFT as SFT,
)
from .training import (
    train_to_end as train_to_end,
)
