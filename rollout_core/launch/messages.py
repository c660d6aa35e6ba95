"""What a rank tells its launcher, in lines of JSON through a pipe: data report, start of training, steps, errors (as
`rollout_core.base.errors` writes them)."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

PIPE = "ROLLOUT_RANK_PIPE"
"""Environment variable: number of the open file that messages go to."""


class Messenger:
    """Writes messages, or none where no launcher listens."""

    def __init__(self) -> None:
        number = os.environ.get(PIPE)
        self._file = os.fdopen(int(number), "w", encoding="utf-8") if number else None
        self._lock = threading.Lock()

    def send(self, kind: str, content: Any) -> None:
        """One message, out when this returns."""
        if self._file is None:
            return
        with self._lock:
            self._file.write(json.dumps([kind, content]) + "\n")
            self._file.flush()
