"""What runs where: work pools, deployments, schedules. The deployments themselves are in ``prefect.yaml``."""

from rollout_core.base import moved
from rollout_core.base.own_packages import require_own

require_own("flows", "tasks", "blocks")
moved.alias(
    __name__,
    {
        "doctor": "deployments.health",
        "metrics": "deployments.exporter",
        "spot": "rollout_core.base.spot",
        "ui.app": "deployments.ui.pages",
        "ui.beside": "deployments.ui.mounted",
        "ui.door": "deployments.ui.auth",
        "ui.models": "deployments.ui.model_pages",
        "ui.rollouts": "deployments.ui.rollout_pages",
        "ui.runs": "deployments.ui.run_pages",
        "ui.samples": "deployments.ui.sample_pages",
        "ui.server": "deployments.ui.site",
    },
)
