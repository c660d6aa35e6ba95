"""Leases: names that one holder at a time may have, for as long as it renews them, by the database's own clock.

A lease is taken from its holder only once its time has passed since it was last renewed, by one of any number who try.
Whoever takes it gets a higher epoch, and from then on the earlier holder can neither renew nor release it: it is
fenced. Machines' clocks play no part, so they may differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.store.sql.database import Database
from rollout_core.store.sql.dialect import Transaction

FORGET_SECONDS = 7 * 24 * 3600.0
"""After which a lease that nobody renewed leaves no row; its epochs then begin anew."""
_FORGET_AT_ONCE = 100

_TAKE = """
INSERT INTO leases (name, owner, epoch, expires_at) VALUES (?, ?, 1, {clock} + ?)
ON CONFLICT (name) DO UPDATE SET
    owner = excluded.owner,
    epoch = leases.epoch + CASE WHEN leases.owner = excluded.owner THEN 0 ELSE 1 END,
    expires_at = {clock} + ?
WHERE leases.expires_at < {clock} OR leases.owner = excluded.owner
RETURNING epoch
"""
# What an upsert compares is the row as it is once it is locked, and the clock of that moment.
_RENEW = "UPDATE leases SET expires_at = {clock} + ? WHERE name = ? AND owner = ? AND epoch = ? RETURNING epoch"
_HOLDER = "SELECT owner, epoch, expires_at - {clock} FROM leases WHERE name = ?"
_FORGET = """
DELETE FROM leases WHERE name IN (
    SELECT r.name FROM leases r WHERE r.expires_at < {clock} - ? ORDER BY r.expires_at LIMIT ? {lock_free}
)
"""


@dataclass(frozen=True)
class Lease:
    """What its holder knows of it."""

    name: str
    owner: str
    epoch: int
    """Rises with each taking by another owner; those of a name never fall while it is in use."""


@dataclass(frozen=True)
class Holding:
    """A lease as others see it."""

    owner: str
    epoch: int
    seconds_left: float
    """Until it may be taken; below 0: it may be."""


class LeaseBook:
    """The leases of a store. Each method is one transaction; all raise Recoverable while the database is away."""

    def __init__(self, database: Database[Any]) -> None:
        self._database = database

    async def take(self, name: str, owner: str, *, seconds: float) -> Lease | Holding:
        """The lease of this name for ``seconds``, or who has it now.

        ``owner`` names this one holding: two that are the same could both believe they have it. Taking what one has
        renews it, so a call whose outcome is unknown can be repeated.
        """
        if not 0 < seconds < float("inf"):
            raise ConfigError(f"a lease of {seconds!r} seconds was asked for; expected a positive number")

        def take(tx: Transaction) -> Lease | Holding:
            tx.run(_FORGET, FORGET_SECONDS, _FORGET_AT_ONCE)
            taken = tx.row(_TAKE, name, owner, seconds, seconds)
            if taken is not None:
                return Lease(name, owner, taken[0])
            holding = _find(tx, name)
            assert holding is not None, "its row kept this one from being written"
            return holding

        return await self._database.write(take, watched=False, undo=_give_back)

    async def renew(self, lease: Lease, *, seconds: float) -> bool:
        """Have it for ``seconds`` from now. False once another has taken it, for good; one that has merely run out is
        renewed."""

        def renew(tx: Transaction) -> bool:
            return tx.row(_RENEW, seconds, lease.name, lease.owner, lease.epoch) is not None

        return await self._database.write(renew, watched=False)

    async def release(self, lease: Lease) -> bool:
        """Let others take it at once. False, and nothing is done, where another has taken it."""
        return await self._database.write(lambda tx: _release(tx, lease), watched=False)

    async def holding(self, name: str) -> Holding | None:
        """Who took it last; None where nobody did."""
        return await self._database.read(lambda tx: _find(tx, name))


def _find(tx: Transaction, name: str) -> Holding | None:
    found = tx.row(_HOLDER, name)
    return None if found is None else Holding(*found)


def _release(tx: Transaction, lease: Lease) -> bool:
    return tx.row(_RENEW, -1.0, lease.name, lease.owner, lease.epoch) is not None


def _give_back(tx: Transaction, taken: Any) -> None:
    for lease in taken:
        if isinstance(lease, Lease):
            _release(tx, lease)
