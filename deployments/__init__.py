"""What runs where: work pools, deployments, schedules. The deployments themselves are in ``prefect.yaml``."""

from rollout_core.base.own_packages import require_own

require_own("flows", "tasks", "blocks")
