"""Runs inside vLLM's own processes: ids that a model has outputs for and its tokenizer does not know are never drawn.

vLLM finds it by its name, and only an engine whose model has such ids gets it. Masking the end of the logits once
a step costs less than a list of allowed ids with each request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig

KNOWN_IDS = "rollout_known_ids"
"""Key of vLLM's additional configuration: how many ids the tokenizer has."""


class DrawKnownIds(LogitsProcessor):
    """Gives the ids beyond the tokenizer's the probability 0, also where completions are greedy."""

    def __init__(self, vllm_config: VllmConfig, *_: Any) -> None:
        config = vllm_config.additional_config
        assert isinstance(config, dict), "as the engine was given it"
        self._known_ids = config[KNOWN_IDS]

    def apply(self, logits: Tensor) -> Tensor:
        """[B,V] logits, changed in place."""
        logits[:, self._known_ids :] = float("-inf")
        return logits

    def is_argmax_invariant(self) -> bool:
        """An unknown id may have the highest logit."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """It is the same for every request."""


def known_ids_options(known_ids: int) -> dict[str, Any]:
    """Arguments of an engine that draws the first ``known_ids`` ids alone."""
    return {
        "logits_processors": [f"{DrawKnownIds.__module__}:{DrawKnownIds.__qualname__}"],
        "additional_config": {KNOWN_IDS: known_ids},
    }
