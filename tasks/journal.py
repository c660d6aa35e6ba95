"""What the stages of a flow run did, for the closing report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from rollout_core.base.ids import ContentId

CHECKED = "Checked"
"""State of a stage that always checks and rarely has to act: an import of unchanged files, a promotion."""


@dataclass(frozen=True)
class StageEntry:
    """One call of a stage."""

    stage: str
    label: str
    state: str
    """``Cached``, ``Completed``, ``Checked`` or ``Failed``."""
    seconds: float
    inputs: tuple[ContentId, ...]
    outputs: tuple[ContentId, ...]

    @property
    def computed(self) -> bool:
        """False when the result came from the cache, or there was nothing to compute."""
        return self.state not in ("Cached", CHECKED)

    def row(self) -> dict[str, str | float]:
        """For a table: state, seconds, first digits of the content ids in and out."""
        return {
            "stage": self.stage,
            "label": self.label,
            "state": self.state.lower(),
            "seconds": round(self.seconds, 3),
            "in": " ".join(content_id.short for content_id in self.inputs),
            "out": " ".join(content_id.short for content_id in self.outputs),
        }


@dataclass
class Journal:
    """Entries in order of finishing."""

    entries: list[StageEntry] = field(default_factory=list)

    def add(self, entry: StageEntry) -> None:
        """Note one call."""
        self.entries.append(entry)


_current: ContextVar[Journal | None] = ContextVar("rollout_journal", default=None)


@contextmanager
def keep_journal() -> Iterator[Journal]:
    """Collect what stages called inside the block do."""
    journal = Journal()
    token = _current.set(journal)
    try:
        yield journal
    finally:
        _current.reset(token)


def current_journal() -> Journal | None:
    """The journal of the flow run, if one is kept."""
    return _current.get()
