"""The reward of the real run: whether the last number of a completion is the answer."""

import re

from rollout_core.rewards import RewardInput


def score(sample: RewardInput) -> float:
    """1 where the last whole number in the completion is the row's answer, otherwise 0."""
    numbers = re.findall(r"-?\d+", sample.completion)
    return float(bool(numbers) and numbers[-1] == sample.extras["answer"])
