"""Flows: order, fan-out and placement of stages; and the `rollout` command."""

from rollout_core.seeding import prepare_environment

# Every process that runs a flow imports this package first, before torch reads its environment.
prepare_environment()
