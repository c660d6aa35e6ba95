"""Stages: retryable, cached Prefect tasks over `rollout_core` functions."""
