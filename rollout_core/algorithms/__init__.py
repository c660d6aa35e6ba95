"""Learners: pure losses and advantages, one training loop, and the algorithms that feed it."""
