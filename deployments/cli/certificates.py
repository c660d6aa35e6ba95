"""`rollout ops certificates`: an authority of one's own, and certificates for machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import Debug, one_line_errors
from rollout_core.web.certificates import AUTHORITY, CERTIFICATE, KEY, issue


def certificates(
    machines: Annotated[list[str], typer.Argument(metavar="MACHINE...", help="Host names or addresses.")],
    folder: Annotated[Path, typer.Option("--folder", help="Where the authority and its certificates lie.")] = Path(
        "data/tls"
    ),
    debug: Debug = False,
) -> None:
    """Issue certificates for machines, by an authority of one's own.

    The authority is made where there is none. A machine's certificate is good for what it serves and for what it asks;
    one that does not end within 30 days stays. Take to each machine its own certificate and key, and ca.pem; keep
    ca.key.pem where this command runs.
    """
    with one_line_errors(debug):
        for issued in issue(folder.resolve(), machines):
            files = issued.files
            said = "issued" if issued.is_new else "unchanged"
            typer.echo(f"{issued.machine}: {said}, valid until {files.ends():%Y-%m-%d}")
            typer.echo(f"  export {AUTHORITY}={files.authority}")
            typer.echo(f"  export {CERTIFICATE}={files.certificate}")
            typer.echo(f"  export {KEY}={files.key}")
