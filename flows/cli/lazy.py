"""Commands whose files are imported when they are called: until then a line of help is all that is known of each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand


class LazyCommand(TyperCommand):
    """A command that stands in a list of commands for the function at `place`, and becomes it when it is called."""

    place: ClassVar[str]
    """Module and name of the function, such as ``"flows.cli.show:show"``."""

    @cached_property
    def loaded(self) -> Any:
        """The command itself, with its options and its whole help."""
        module, _, name = self.place.partition(":")
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        app.command(self.name)(getattr(import_module(module), name))
        return typer.main.get_command(app)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """That of the command itself: it parses the arguments, and is what is invoked."""
        return self.loaded.make_context(info_name, args, parent=parent, **extra)


def add_commands(app: typer.Typer, commands: Mapping[str, tuple[str, str]], *, hidden: bool = False) -> None:
    """Add commands to ``app``: by name, where the function of each is, and the first sentence of its docstring. Earlier
    names of commands are hidden from lists."""
    for name, (place, line) in commands.items():
        app.command(name, cls=type("LazyCommand", (LazyCommand,), {"place": place}), help=line, hidden=hidden)(
            _never_called
        )


def _never_called() -> None:
    """Typer wants a function of each command; a `LazyCommand` is invoked by the context of the loaded one."""
