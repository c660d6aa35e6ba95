"""A plugin's own test: ``test-cases.jsonl`` in its folder, a line of JSON for each case."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import Field

from rollout_core.base.errors import ConfigError, shown
from rollout_core.config.base import Settings, parse_config
from rollout_core.plugins.identity import PluginCode

TEST_CASES = "test-cases.jsonl"
TEST_SECONDS = 60.0
"""Longest time that the cases of a plugin may take together."""


class Case(Settings):
    """What a plugin is given, and what it answers: each kind has its own keys besides."""

    config: dict[str, Any] = Field(default={})
    """The plugin's configuration."""


CaseT = TypeVar("CaseT", bound=Case)


def read_cases(code: PluginCode, model: type[CaseT]) -> Iterator[tuple[int, CaseT]]:
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
        if not isinstance(value, dict):
            raise ConfigError(f"{name}: got {shown(value)}; expected a case, an object")
        yield number, parse_config(value, model, name=name)
