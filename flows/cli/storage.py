"""How commands name object stores, what is in them, and databases."""

from __future__ import annotations

from typing import Annotated

import typer

StoragePath = Annotated[
    str | None,
    typer.Option(
        "--storage",
        "--storage-path",
        "--object-path",
        help="URL, path or block:SLUG/NAME of the object store; default: ROLLOUT_STORAGE.",
    ),
]
ShortId = Annotated[str, typer.Argument(help="Content id, or its first digits, at least 8.")]
DatabaseURL = Annotated[
    str, typer.Option("--database", help="sqlite:///path/to/file.db, or postgresql://user@host/name.")
]
