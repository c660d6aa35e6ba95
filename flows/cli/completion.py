"""`rollout completion`: what a shell needs to complete the command's words."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

VARIABLE = "_ROLLOUT_COMPLETE"
"""A shell that asks for completions calls the command with this set."""
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
