"""What code in a process of its own may take, and what it sees of this process's environment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from rollout_core.base.numerics import machine_memory
from rollout_core.base.processes import search_path
from rollout_core.base.settings import SECRET_LIST, SECRET_PREFIX, allowed_secrets


@dataclass(frozen=True)
class Limits:
    """For all processes that the code makes, together."""

    seconds: float = 300.0
    """Of one call, or of one step where the handler reports how far it is."""
    memory_bytes: int | None = None
    """Resident; None: three quarters of the machine's (or container's) memory."""
    processes: int = 64
    """At the same time, its own among them; threads do not count."""
    output_bytes: int = 16 * 2**20
    """Written to standard output and error in one call."""
    address_space: bool = False
    """Hold the code's own process to ``memory_bytes`` of address space too, so that a large allocation fails at once.
    Not for code that uses torch or a GPU, which reserve far more than they use."""


def allowed_memory(limits: Limits) -> int:
    """Bytes that code under these limits may use."""
    if limits.memory_bytes is not None:
        return limits.memory_bytes
    return machine_memory()[1] * 3 // 4


def gibibytes(num_bytes: int) -> str:
    """As messages show it."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


_SECRET_NAME = re.compile(
    r"(?i)(^|_)(API_?KEY|ACCESS_?KEY|KEY|KEY_ID|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH)(_|$)"
    r"|PASSWORD|SECRET|CREDENTIAL|^PGPASS"
)
_OURS = ("ROLLOUT_", "PREFECT_")
_PASSWORD_IN_ADDRESS = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_PROXIES = re.compile(r"(?i)(https?|all|ftp)_proxy")


def child_environment() -> dict[str, str]:
    """Variables for a process of other people's code, which finds this package where this process did.

    A variable is left out where its name says that it holds a secret (``..._KEY``, ``..._TOKEN``,
    ``...PASSWORD...`` and so on), where its value is an address with a password, and where it is a setting of this
    project or of Prefect, which lead to storage and database. What the code needs of these, such as the key of a
    judge's endpoint, the owner of the worker puts on the list of secrets: with ``ROLLOUT_SECRETS=OPENAI_API_KEY``
    both ``OPENAI_API_KEY`` and ``ROLLOUT_SECRET_OPENAI_API_KEY`` are passed on.
    """
    allowed = allowed_secrets()
    passed = {name: value for name, value in os.environ.items() if _may_pass(name, value, allowed)}
    return passed | {"PYTHONPATH": search_path()}


def _may_pass(name: str, value: str, allowed: frozenset[str]) -> bool:
    if name.removeprefix(SECRET_PREFIX) in allowed or name == SECRET_LIST:
        return True
    if name.startswith(_OURS) or _SECRET_NAME.search(name):
        return False
    return _PROXIES.fullmatch(name) is not None or not _PASSWORD_IN_ADDRESS.search(value)
