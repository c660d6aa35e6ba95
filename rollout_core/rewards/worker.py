"""In the child process of a user's reward: loads the function, and then scores. Imports little, to start quickly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from rollout_core.base.errors import Fatal, RolloutError, in_words
from rollout_core.rewards.functions import is_batched, load_function
from rollout_core.rewards.scoring import INPUT_FIELDS, RewardFunction, RewardInput, score, whole_batch
from rollout_core.rewards.user_code import UserCode, importable

_loaded: RewardFunction | None = None
_imports = ExitStack()


def handle(request: dict[str, Any], report: Callable[[int], None]) -> Any:
    """Load the function that a request brings the code of, which is the first; score the inputs of any other."""
    global _loaded
    if "code" in request:
        code, kwargs = UserCode.from_document(request["code"]), request["kwargs"]
        _imports.enter_context(importable(code, alone=True))
        function = load_function(code, kwargs)
        _loaded = RewardFunction(code.callable, lambda given: function(given, **kwargs), is_batched(function))
        return None
    reward = _loaded
    assert reward is not None, "the caller loads it first"
    inputs = [RewardInput(**dict(zip(INPUT_FIELDS, row, strict=True))) for row in request["inputs"]]
    at = [whole_batch(inputs)]

    def on_sample(index: int) -> None:
        report(index)
        at[0] = f"sample {index}"

    try:
        return score(reward, inputs, on_sample=on_sample)
    except RolloutError:
        raise
    except BaseException as error:  # whatever it is: here it is no signal to this project
        raise Fatal(f"reward {reward.name} failed on {at[0]}: {in_words(error)}") from error
