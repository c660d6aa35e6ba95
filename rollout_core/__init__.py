"""rollout_core: post-training stages, ledger, snapshots and learners, true without an orchestrator.

Nothing here imports Prefect. Heavy libraries (torch, vllm, transformers) are imported only by the modules that need
them, so importing this package, or any module of plain data in it, costs little.
"""

import os

from rollout_core.base import moved

moved.alias(
    __name__,
    {
        "agents.adapters.base": "rollout_core.agents.adapters.adapter",
        "agents.adapters.messages": "rollout_core.agents.adapters.chat_messages",
        "agents.adapters.samples": "rollout_core.agents.adapters.span_samples",
        "agents.adapters.tokens": "rollout_core.agents.adapters.token_sequences",
        "agents.agent": "rollout_core.agents.lit_agent",
        "agents.fleet": "rollout_core.agents.runner_fleet",
        "agents.online": "rollout_core.agents.online_learning",
        "agents.operations": "rollout_core.agents.operation_spans",
        "agents.processes": "rollout_core.agents.runner_processes",
        "agents.proxy.app": "rollout_core.agents.proxy.proxy_app",
        "agents.proxy.delivery": "rollout_core.agents.proxy.call_delivery",
        "agents.proxy.forwarding": "rollout_core.agents.proxy.upstream_requests",
        "agents.proxy.pools": "rollout_core.agents.proxy.upstream_pools",
        "agents.proxy.server": "rollout_core.agents.proxy.proxy_server",
        "agents.queue": "rollout_core.agents.run_queue",
        "agents.running": "rollout_core.agents.agent_calls",
        "agents.supervision": "rollout_core.agents.run_supervision",
        "base.garbage": "rollout_core.base.collector",
        "data.advantages": "rollout_core.data.advantage_rows",
        "data.files": "rollout_core.data.row_files",
        "housekeeping": "rollout_core.objects.retention",
        "housekeeping.cleaning": "rollout_core.objects.retention.rounds",
        "housekeeping.usage": "rollout_core.objects.retention.usage",
        "inference.base": "rollout_core.inference.backend",
        "inference.runs": "rollout_core.inference.batch_runs",
        "objects.gc": "rollout_core.objects.retention.garbage",
        "objects.giving_up": "rollout_core.objects.retention.pruning",
        "objects.imports": "rollout_core.objects.origins",
        "objects.leases": "rollout_core.objects.retention.run_leases",
        "objects.store": "rollout_core.objects.object_store",
        "objects.sweeps": "rollout_core.objects.retention.sweeps",
        "objects.unstored": "rollout_core.objects.retention.unstored",
        "plans.resources": "rollout_core.plans.memory_and_disk",
        "promotion.adapter": "rollout_core.exports.adapter",
        "promotion.bootstrap": "rollout_core.evaluation.bootstrap",
        "promotion.export": "rollout_core.exports.hugging_face",
        "promotion.gguf_file": "rollout_core.models.gguf_writing",
        "promotion.model_card": "rollout_core.exports.model_card",
        "runs.records": "rollout_core.runs.run_records",
        "runs.samples": "rollout_core.runs.run_samples",
        "store.base": "rollout_core.store.contract",
        "store.bridge.running": "rollout_core.store.bridge.bridge_program",
        "store.connections": "rollout_core.store.reachable",
        "store.forwarding": "rollout_core.store.forwarding_store",
        "store.http.errors": "rollout_core.web.http_errors",
        "store.http.listening": "rollout_core.web.listening",
        "store.http.metrics": "rollout_core.store.http.server_metrics",
        "store.http.serve": "rollout_core.store.http.program",
        "store.http.threads": "rollout_core.web.threads",
        "store.loops": "rollout_core.base.loops",
        "store.memory.store": "rollout_core.store.memory.memory_store",
        "store.span_fields": "rollout_core.store.encoded_spans",
        "store.sql.leases": "rollout_core.store.sql.row_leases",
        "store.sql.queries": "rollout_core.store.sql.sql_queries",
        "store.sql.queue": "rollout_core.store.sql.sql_queue",
        "store.sql.store": "rollout_core.store.sql.sql_store",
        "store.sql.stored_spans": "rollout_core.store.stored_spans",
    },
)

__version__ = "0.2.0"
DISTRIBUTION = "rollout-post-training"
"""What pip calls this project; `rollout` there is somebody else's."""

if os.environ.get("ROLLOUT_LOG"):
    # Every process of this project imports this package, whoever started it.
    from rollout_core.base.logs import take_form

    take_form()
