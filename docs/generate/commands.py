"""The page of the command line, from the commands' own help."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from deployments.cli import app


def pages() -> dict[str, str]:
    """Markdown by the page's place in the site."""
    lines = ["# Commands", "", "Exit codes: 0 done, 1 a check or a run failed, 2 bad configuration or input.", ""]
    lines.append("[Completion](../quick-start.md#in-your-shell) knows all of them.")
    lines += _section(typer.main.get_command(app), "rollout")
    return {"reference/commands.md": "\n".join(lines) + "\n"}


def _section(command: Any, name: str) -> Iterator[str]:
    """A command's section, and those of the commands below it."""
    below = getattr(command, "commands", None)
    if below is None:
        context = command.make_context(name, [], resilient_parsing=True)
        command = context.command
        usage = " ".join([name, *command.collect_usage_pieces(context)])
        yield from ("", f"## {name}", "", inspect.cleandoc(command.help or ""), "", f"```text\n{usage}\n```", "")
        yield from _parameters(command, context)
    for part, inner in (below or {}).items():
        if not inner.hidden:  # an earlier name
            yield from _section(inner, f"{name} {part}")


def _parameters(command: Any, context: Any) -> Iterator[str]:
    """A table of arguments and options."""
    yield from ("| option | meaning |", "|---|---|")
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            name, meaning = (cell.replace("|", "\\|").replace("\n", " ") for cell in record)
            yield f"| `{name}` | {meaning.replace('[', chr(92) + '[')} |"
