"""A plugin's own test: ``test-cases.jsonl`` in its folder, a line of JSON for each case."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from rollout_core.base.errors import ConfigError
from rollout_core.config.base import Settings, parse_config
from rollout_core.plugins.identity import PluginCode

TEST_CASES = "test-cases.jsonl"
TEST_SECONDS = 60.0
"""Longest time that the cases of a plugin may take together."""


class Case(Settings):
    """What a plugin is given, and what it answers."""

    config: dict[str, Any] = Field(default={})
    """The plugin's configuration."""
    input: dict[str, Any]
    """Of a reward, fields of the sample, such as ``prompt`` and ``completion``."""
    reward: float | None
    """Of a reward, what it is; null: it abstains."""


def read_cases(code: PluginCode) -> Iterator[tuple[int, Case]]:
    """The cases with their lines. Raises ConfigError where there are none, and for one that is none."""
    lines = code.files.get(TEST_CASES, b"").decode("utf-8", "replace").splitlines()
    found = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise ConfigError(f"plugin {code.name}: got no test cases; expected lines of {TEST_CASES} in {code.folder}")
    for number, line in found:
        name = f"{code.folder / TEST_CASES}:{number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{name}: got what is no JSON ({error}); expected a case") from None
        yield number, parse_config(value if isinstance(value, dict) else {"input": value}, Case, name=name)
