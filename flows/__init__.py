"""Flows: order, fan-out and placement of stages; and the `rollout` command."""
