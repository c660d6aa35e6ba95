"""rollout_core: post-training stages, ledger, snapshots and learners, true without an orchestrator.

Nothing here imports Prefect. Heavy libraries (torch, vllm, transformers) are imported only by the modules that need
them, so importing this package, or any module of plain data in it, costs little.
"""

from rollout_core.base import moved

moved.alias(
    __name__,
    {
        "base.garbage": "rollout_core.base.collector",
        "housekeeping": "rollout_core.objects.retention",
        "housekeeping.cleaning": "rollout_core.objects.retention.housekeeping",
        "housekeeping.usage": "rollout_core.objects.retention.usage",
        "objects.gc": "rollout_core.objects.retention.garbage",
        "objects.giving_up": "rollout_core.objects.retention.pruning",
        "objects.leases": "rollout_core.objects.retention.leases",
        "objects.sweeps": "rollout_core.objects.retention.sweeps",
        "objects.unstored": "rollout_core.objects.retention.unstored",
        "promotion.adapter": "rollout_core.exports.adapter",
        "promotion.export": "rollout_core.exports.hugging_face",
        "promotion.gguf_file": "rollout_core.models.gguf_writing",
        "promotion.model_card": "rollout_core.exports.model_card",
        "store.http.errors": "rollout_core.web.errors",
        "store.http.listening": "rollout_core.web.listening",
        "store.http.threads": "rollout_core.web.threads",
        "store.loops": "rollout_core.base.loops",
        "store.span_fields": "rollout_core.store.encoded_spans",
        "store.sql.stored_spans": "rollout_core.store.stored_spans",
    },
)

__version__ = "0.2.0"
DISTRIBUTION = "rollout-post-training"
"""What pip calls this project; `rollout` there is somebody else's."""
