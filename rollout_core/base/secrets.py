"""Secrets from the environment: ``ROLLOUT_SECRET_<NAME>``, and only names on the list. Their values are never logged.

A configuration names secrets and may come from anyone who can start a run; the list is the worker's own, so nobody can
have a secret sent where it is not meant to go by naming it.
"""

from __future__ import annotations

import os

from rollout_core.base.errors import ConfigError

PREFIX = "ROLLOUT_SECRET_"
LIST = "ROLLOUT_SECRETS"
"""Setting with the further names that may be asked for, separated by commas."""
ALLOWED = frozenset({"HF_TOKEN"})
"""Names that always may be."""


def allowed_secrets() -> frozenset[str]:
    """Names that may be asked for; what else begins with the prefix is never read."""
    return ALLOWED | frozenset(filter(None, os.environ.get(LIST, "").replace(" ", "").split(",")))


def read_secret(name: str) -> str | None:
    """The secret of this name; None where it is not set or empty. Raises ConfigError for a name that is not allowed."""
    allowed = allowed_secrets()
    if name not in allowed:
        raise ConfigError(
            f"secret {name!r} is not among those allowed here ({', '.join(sorted(allowed))}); its owner adds it to "
            f"{LIST} in the environment of the worker"
        )
    secret = os.environ.get(PREFIX + name, "").strip()  # a mounted file often ends with a line feed
    if not (secret.isascii() and secret.isprintable()):
        raise ConfigError(f"secret {name!r} holds what no key does; expected printable ASCII in {PREFIX}{name}")
    return secret or None


def require_secret(name: str) -> str:
    """As `read_secret`, and ConfigError where it is not set."""
    secret = read_secret(name)
    if secret is None:
        raise ConfigError(f"secret {name!r} is not set; set {PREFIX}{name} in the environment of the worker")
    return secret
