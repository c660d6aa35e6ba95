"""What the stages of a flow run did, for the closing report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from rollout_core.ids import ContentId


@dataclass(frozen=True)
class StageEntry:
    """One call of a stage."""

    stage: str
    label: str
    state: str
    """``Cached``, ``Completed`` or ``Failed``."""
    seconds: float
    inputs: tuple[ContentId, ...]
    outputs: tuple[ContentId, ...]

    @property
    def computed(self) -> bool:
        """False when the result came from the cache."""
        return self.state != "Cached"

    def row(self) -> dict[str, str | float]:
        """For a table: state, seconds, first digits of the content ids in and out."""
        return {
            "stage": self.stage,
            "label": self.label,
            "state": "cached" if self.state == "Cached" else self.state.lower(),
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
