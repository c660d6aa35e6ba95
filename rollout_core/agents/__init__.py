"""Agents: any program becomes trainable without a change of its code."""
