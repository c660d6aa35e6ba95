"""Secrets of plugins, of kind ``secret-source``: ``ROLLOUT_SECRETS_FROM`` names one as ``plugin:NAME``.

A call's payload is ``{"name": ..., "id": ...}``; its result ``{"value": text}``, or null where there is none of that
name. The plugin is started for each question and ended with it. Nothing that it writes or answers is logged, shown or
filed, as it may be part of a secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, Fatal, Recoverable, Stopped
from rollout_core.base.secret_sources import Source
from rollout_core.plugins.cases import TEST_CASES, Case
from rollout_core.plugins.discovery import find_plugin
from rollout_core.plugins.host import PluginProcess
from rollout_core.plugins.identity import PluginCode

ADAPTER = f"{__name__}:adapt"


def plugin_source(plugin: str) -> Source:
    """What asks the plugin of this name, as it is where it is found then."""

    def ask(name: str, secret_id: str) -> str | None:
        code = find_plugin(plugin, Path(), kind="secret-source")
        return ask_plugin(code, name, secret_id)

    return ask


def ask_plugin(code: PluginCode, name: str, secret_id: str) -> str | None:
    """The secret; None where the plugin has none of this name. Raises Recoverable where it cannot tell."""
    with closing(_process(code, {})) as plugin:
        try:
            return plugin.call({"name": name, "id": secret_id}, _problem)["value"]
        except Stopped:
            raise
        except (Fatal, ConfigError, Recoverable):
            # Not from the error, whose text may hold what the plugin wrote.
            reason = f"plugin {code.name} did not tell secret {name!r}: its call failed"
    raise Recoverable(f"{reason}, and what it wrote is not shown; try `rollout plugins test {code.folder}`")


def _process(code: PluginCode, config: Mapping[str, Any]) -> PluginProcess:
    return PluginProcess(code, config, adapter=ADAPTER, on_line=lambda line: None)


def _problem(result: Any) -> str | None:
    value = result.get("value", 0) if isinstance(result, dict) else 0
    return None if value is None or isinstance(value, str) else "answered otherwise; expected value, a text or null"


class SecretCase(Case):
    """A case of a source of secrets, whose values are no secrets."""

    name: str
    """Of the secret."""
    value: str | None
    """That it has; null: there is none."""


def start(code: PluginCode, config: Mapping[str, Any]) -> None:
    """Start a plugin, and end it. Raises ConfigError."""
    with closing(_process(code, config)) as plugin:
        plugin.start()


def failed_cases(
    code: PluginCode, cases: Sequence[tuple[int, SecretCase]], on_line: Callable[[str], None]
) -> list[str]:
    """Put test cases to a plugin; what is wrong, a line for each. What it writes is shown here."""
    failures: list[str] = []
    for number, case in cases:
        with closing(PluginProcess(code, case.config, adapter=ADAPTER, on_line=on_line)) as plugin:
            try:
                got: Any = plugin.call({"name": case.name, "id": case.name}, _problem)["value"]
            except (ConfigError, Fatal) as error:
                got = error
        if isinstance(got, Exception) or got != case.value:
            failures.append(f"{TEST_CASES}:{number}: got {got}; expected {case.value}")
    return failures


def adapt(name: str, made: Any) -> Callable[[Any], Any]:
    """In a Python plugin's process: its factory made a function of a secret's name and its id."""
    if not callable(made):
        raise ConfigError(f"plugin {name}: its factory returned no function; expected one of a secret's name and id")

    def answer(payload: Any) -> Any:
        return {"value": made(payload["name"], payload["id"])}

    return answer
