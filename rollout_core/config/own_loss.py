"""A loss of the user's own in place of an algorithm's: ``loss = {path = "my.py:loss"}``."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rollout_core.base.errors import ConfigError
from rollout_core.config.base import Settings
from rollout_core.config.rewards import FunctionName

POLICY_LOSS = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "mask")
PAIR_LOSS = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
LABEL_LOSS = ("policy", "ref", "desirable", "kl")


class OwnLoss(Settings):
    """A function of yours that computes what a token, a pair or an answer adds to the loss. It is called with torch
    tensors by these names, and with ``kwargs``; log-probabilities are float32, in nats:

    ``ppo``, ``grpo``: ``logprobs``, ``old_logprobs``, ``ref_logprobs``, ``advantages``, all [B,T], and ``mask``, [B,T]
    bool, True = a token that is learned from. Elsewhere all are 0. ``ref_logprobs`` is None where no reference is
    loaded (``kl_coef = 0``). Returns the loss of each token, [B,T]; what it is divided by, and what ``kl_coef``,
    ``entropy_coef`` and ``value_coef`` add, follow from the algorithm's keys as for the built-in loss.

    ``dpo``, ``ipo``, ``online_dpo``: ``policy_chosen``, ``policy_rejected``, ``ref_chosen``, ``ref_rejected``;
    ``orpo``, ``simpo``: the first two. [P], an answer each: the sum over its tokens with ``dpo`` and ``online_dpo``,
    else their mean. Returns the loss of each pair, [P], of which a step takes the mean.

    ``kto``: ``policy`` and ``ref``, [B], sums over an answer's tokens, ``desirable``, [B] bool, and ``kl``, a scalar of
    0 or more without a gradient. Returns the loss of each answer, [B], of which a step takes the mean.

    Gradients flow through ``logprobs``, ``policy_chosen``, ``policy_rejected`` and ``policy``.
    """

    path: FunctionName
    """``path/to/file.py:function`` relative to the working folder, or ``module:function``. The code is part of the
    cache key, with what of your own it imports; where it lies is not."""
    kwargs: dict[str, Any] = Field(default={})
    """Further keyword arguments of each call."""
    code: dict[str, Any] | None = None
    """The code as it was read. A run fills it in when it starts; leave it out."""

    def cache_identity(self) -> Any:
        if self.code is None:
            raise ConfigError(
                f"the code of loss {self.path} has not been read; use the settings that "
                "rollout_core.launch.own_loss.with_code returns"
            )
        return {"function": self.path.rpartition(":")[2], "kwargs": self.kwargs, **self.code["identity"]}
