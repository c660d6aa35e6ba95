"""Rewards that are checked and not judged."""
