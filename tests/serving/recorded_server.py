"""The server of a model as a process of its own, with answers recorded: ``python recorded_server.py FOLDER DATABASE``.
The engine is `upstream.py`, whose notes lie in the folder."""

from __future__ import annotations

import sys
from pathlib import Path

from rollout_core.serving.program import ServingSettings, serve
from rollout_core.serving.recording import RecordSettings
from tests.serving.fronts import replica_in


def main() -> None:
    folder, database = sys.argv[1:]
    settings = ServingSettings("127.0.0.1", 0, record=RecordSettings(1.0, database))

    def announce(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    serve("tiny", lambda: replica_in(Path(folder)), settings, announce, max_together=8)


if __name__ == "__main__":
    main()
