from .loading import (
    load_reward as load_reward,
)
from .scoring import (
    RewardFunction as RewardFunction,
    RewardInput as RewardInput,
    batch_reward as batch_reward,
    score as score,
)
from .source_ids import (
    RewardSource as RewardSource,
    read_source as read_source,
    source_id as source_id,
    source_of as source_of,
)
