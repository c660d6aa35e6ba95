from .advantages import (
    gae as gae,
    group_advantages as group_advantages,
    masked_whiten as masked_whiten,
)
from .losses import (
    GroupPolicyLoss as GroupPolicyLoss,
    PolicyLoss as PolicyLoss,
    ShapeError as ShapeError,
    ValueLoss as ValueLoss,
    bradley_terry_loss as bradley_terry_loss,
    dpo_loss as dpo_loss,
    grpo_loss as grpo_loss,
    ipo_loss as ipo_loss,
    kl_estimate as kl_estimate,
    kto_loss as kto_loss,
    ppo_policy_loss as ppo_policy_loss,
    ppo_value_loss as ppo_value_loss,
    selected_logprobs as selected_logprobs,
    sft_loss as sft_loss,
    token_logprobs as token_logprobs,
)
