"""Stages: retryable, cached Prefect tasks over ``rollout_core``. Each is one module-level function under `stage`.

Names are imported when they are first used. The decorator itself is `tasks.runtime.stage.stage`, and
what stages and flows run on is in `tasks.runtime`.
"""

import lazy_loader

from rollout_core.base import moved
from rollout_core.base.own_packages import require_own

require_own("blocks")
moved.alias(
    __name__,
    {
        "arguments": "tasks.runtime.arguments",
        "artifact_sender": "tasks.runtime.artifact_sender",
        "artifacts": "tasks.runtime.artifacts",
        "connections": "tasks.runtime.connections",
        "curriculum": "tasks.generate",
        "events": "tasks.runtime.events",
        "leases": "tasks.runtime.stage_leases",
        "logs": "tasks.runtime.journal",
        "partial_rollouts": "tasks.generate",
        "placing": "tasks.runtime.placement",
        "rehearsing": "tasks.runtime.dry_run",
        "replay": "tasks.score",
        "runtime.leases": "tasks.runtime.stage_leases",
        "stage": "tasks.runtime.stage",
        "time_limits": "tasks.runtime.time_limits",
    },
)

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
