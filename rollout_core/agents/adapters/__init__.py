"""Adapters: from the spans of a rollout to what an algorithm learns from."""
