"""Keeping an object store in order: what is given up, by the rules of `Retention`; and what uses how much."""
