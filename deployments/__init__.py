"""What runs where: work pools, deployments, schedules. The deployments themselves are in ``prefect.yaml``."""
