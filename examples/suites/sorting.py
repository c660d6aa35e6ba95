"""A suite in Python: its settings, its questions and its scorer in one file.

rollout eval run MODEL --suite examples/suites/sorting.py
"""

import random

suite = {
    "name": "sorting",
    "prompt": {
        "text": "Sort these numbers: {{ numbers }}\nSorted:",
        "few_shot": {"count": 2, "answer": " {{ answer }}"},
    },
    "sampling": {"temperature": 0.0, "max_tokens": 24, "stop": ["\n"]},
    "metrics": ["mean", "accuracy"],
}


def rows(first: int = 0):
    for seed in range(first, first + 20):
        numbers = random.Random(seed).sample(range(100), 5)
        sorted_numbers = " ".join(map(str, sorted(numbers)))
        yield {"id": f"sort-{seed}", "numbers": " ".join(map(str, numbers)), "answer": sorted_numbers}


def examples():
    return rows(first=1000)


def score(sample) -> float:
    """The share of numbers that stand in their place."""
    wanted, found = sample.extras["answer"].split(), sample.completion.split()
    return sum(one == other for one, other in zip(wanted, found, strict=False)) / len(wanted)
