from .agents import (
    enqueue_tasks as enqueue_tasks,
    import_agent as import_agent,
    look_up_rollouts as look_up_rollouts,
    run_agents as run_agents,
)
from .checkpoints import (
    snapshot as snapshot,
)
from .collect import (
    collect_samples as collect_samples,
)
from .generate import (
    batch_inference as batch_inference,
    enqueue_prompts as enqueue_prompts,
)
from .imports import (
    import_model as import_model,
    import_pairs as import_pairs,
    import_prompts as import_prompts,
    import_reward as import_reward,
    import_sft as import_sft,
    import_unpaired as import_unpaired,
)
from .learn import (
    dpo_update as dpo_update,
    grpo_update as grpo_update,
    kto_update as kto_update,
    ppo_update as ppo_update,
    rm_update as rm_update,
    sft_update as sft_update,
)
from .online import (
    serve_policy as serve_policy,
    take_live_batch as take_live_batch,
)
from .promotion import (
    latest_model as latest_model,
    promote as promote,
    roll_back as roll_back,
)
from .score import (
    evaluate as evaluate,
    evaluate_by as evaluate_by,
    score_rewards as score_rewards,
)
