"""Runs inside vLLM's worker process, imported by name before the model loads."""

from __future__ import annotations

import vllm._custom_ops

# On a CPU, linear layers keep pre-packed oneDNN copies of their weights, which a reload in place does not refresh: the
# engine would go on with the old weights, silently. Without oneDNN they use the weights themselves.
vllm._custom_ops._supports_onednn = False


class InPlaceReload:
    """Marks the worker as safe for `reload_weights`; importing this module is what matters."""
