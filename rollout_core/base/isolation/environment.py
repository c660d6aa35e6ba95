"""The environment that other people's code gets: this process's own, without what holds secrets.

A variable is left out where its name says that it holds one (``..._KEY``, ``..._TOKEN``, ``...PASSWORD...`` and so on),
where its value is an address with a password, and where it is a setting of this project or of Prefect, which lead to
storage and database. What the code needs of these, such as the key of a judge's endpoint, the owner of the worker puts
on the list that all secrets have to be on: with ``ROLLOUT_SECRETS=OPENAI_API_KEY`` both ``OPENAI_API_KEY`` and
``ROLLOUT_SECRET_OPENAI_API_KEY`` are passed on.
"""

from __future__ import annotations

import os
import re

from rollout_core.base.processes import search_path
from rollout_core.base.secrets import LIST, PREFIX, allowed_secrets

_SECRET_NAME = re.compile(
    r"(?i)(^|_)(API_?KEY|ACCESS_?KEY|KEY|KEY_ID|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH)(_|$)"
    r"|PASSWORD|SECRET|CREDENTIAL|^PGPASS"
)
_OURS = ("ROLLOUT_", "PREFECT_")
_PASSWORD_IN_ADDRESS = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_PROXIES = re.compile(r"(?i)(https?|all|ftp)_proxy")


def child_environment() -> dict[str, str]:
    """Variables for a process of other people's code, which finds this package where this process did."""
    allowed = allowed_secrets()
    passed = {name: value for name, value in os.environ.items() if _may_pass(name, value, allowed)}
    return passed | {"PYTHONPATH": search_path()}


def _may_pass(name: str, value: str, allowed: frozenset[str]) -> bool:
    if name.removeprefix(PREFIX) in allowed or name == LIST:
        return True
    if name.startswith(_OURS) or _SECRET_NAME.search(name):
        return False
    return _PROXIES.fullmatch(name) is not None or not _PASSWORD_IN_ADDRESS.search(value)
