"""`rollout completion`: what a shell needs to complete the command's words; and values that it completes."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

VARIABLE = "_ROLLOUT_COMPLETE"
"""A shell that asks for completions calls the command with this set."""
_MOST_RUNS = 50
_ZSH_BEGINS = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i -D }"
"""A zsh whose start files do not call compinit, as that of a new user, has no completion to add to."""


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print what completes this command in a shell: ``source <(rollout completion bash)``."""
    from typer.completion import get_completion_script  # pyright: ignore[reportPrivateImportUsage]

    script = get_completion_script(prog_name="rollout", complete_var=VARIABLE, shell=shell)
    if shell == "zsh":
        script = script.replace("\n", f"\n{_ZSH_BEGINS}\n", 1)
    typer.echo(script)


def answer_shells() -> None:
    """Have the command answer a shell that asks for completions."""
    if VARIABLE in os.environ:
        from typer.completion import completion_init  # pyright: ignore[reportPrivateImportUsage]

        completion_init()


def kinds(incomplete: str) -> list[str]:
    """Kinds of configurations that `rollout init` writes."""
    from rollout_core.plans.first_config import KINDS

    return [kind for kind in KINDS if kind.startswith(incomplete)]


def recorded_runs(incomplete: str) -> list[tuple[str, str]]:
    """Ids and names of runs, with what they are, where they can be had at once: from a folder."""
    from rollout_core.base.errors import RolloutError
    from rollout_core.base.settings import locations
    from rollout_core.objects import ObjectStore
    from rollout_core.runs.records import RunRecords

    url = locations().storage
    if not url.startswith("file://"):
        return []
    try:
        records = RunRecords(ObjectStore.from_url(url))
        heads = records.heads(limit=_MOST_RUNS)
    except (RolloutError, OSError):  # a shell has no use for an error
        return []
    found = [("latest", "the last run")]
    found += [(records.short(head.id), f"{head.name}, {head.flow}, {head.began:%m-%d %H:%M}") for head in heads]
    found += [(name, "the last run of this name") for name in dict.fromkeys(head.name for head in heads)]
    return [(word, meaning) for word, meaning in found if word.startswith(incomplete)]
