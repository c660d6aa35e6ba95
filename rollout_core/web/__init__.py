"""Servers of this project: where they listen, which requests they answer, and how they say errors."""
