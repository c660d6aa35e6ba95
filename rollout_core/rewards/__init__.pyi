from .loading import (
    load_reward as load_reward,
)
from .scoring import (
    RewardFunction as RewardFunction,
)
from .scoring import (
    RewardInput as RewardInput,
)
from .scoring import (
    batch_reward as batch_reward,
)
from .scoring import (
    score as score,
)
from .source_ids import (
    RewardSource as RewardSource,
)
from .source_ids import (
    read_source as read_source,
)
from .source_ids import (
    source_id as source_id,
)
from .source_ids import (
    source_of as source_of,
)
