"""Secrets from the environment: ``ROLLOUT_SECRET_<NAME>``, and only names on the list. Never logged."""

from __future__ import annotations

import os

PREFIX = "ROLLOUT_SECRET_"
ALLOWED = frozenset({"HF_TOKEN"})
"""Names that may be asked for; what else begins with the prefix is never read."""


def read_secret(name: str) -> str | None:
    """The secret of this name; None where it is not set or empty. Raises KeyError for a name that is not allowed."""
    if name not in ALLOWED:
        raise KeyError(f"secret {name!r} is not among those allowed: {', '.join(sorted(ALLOWED))}")
    return os.environ.get(PREFIX + name) or None
