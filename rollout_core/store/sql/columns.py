"""The columns that statements of the SQL store read, and the marks that stand for them, such as ``{rollout}``."""

from __future__ import annotations

ROLLOUT = (
    "r.key, r.rollout_id, r.status, r.mode, r.resources_id, r.start_time, r.end_time, r.config, r.attempt_count,"
    " r.last_sequence_id, r.queue_position, r.due_time"
)
PAYLOAD = "p.input, p.metadata"
ATTEMPT = (
    "a.attempt_id, a.sequence_id, a.start_time, a.end_time, a.status, a.worker_id, a.last_heartbeat_time, a.metadata"
)
SPAN = "s.attempt_id, s.span_id, s.sequence_id, s.trace_id, s.parent_id, s.name, s.start_time, s.end_time, s.body"
RESOURCES = "resources_id, create_time, update_time, version, resources"
WORKER = (
    "worker_id, status, heartbeat_stats, last_heartbeat_time, last_dequeue_time, last_busy_time, last_idle_time,"
    " current_rollout_id, current_attempt_id"
)

BY_MARK = {
    "rollout": ROLLOUT,
    "payload": PAYLOAD,
    "attempt": ATTEMPT,
    "span": SPAN,
    "resources": RESOURCES,
    "worker": WORKER,
}

NUM_ROLLOUT = len(ROLLOUT.split(","))
NUM_PAYLOAD = len(PAYLOAD.split(","))
SEQUENCE_ID, BODY = 2, len(SPAN.split(",")) - 1
"""Places of a span's number and body in its row."""
