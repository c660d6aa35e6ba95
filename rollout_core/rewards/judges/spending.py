"""What judging has taken, and a budget that it does not exceed.

A call under way has all reserved that it could take: a token for each byte of the question, which no tokenizer of bytes
exceeds, and the longest answer. When its answer comes, what the endpoint counted takes the place of that.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollout_core.base.errors import Fatal
from rollout_core.config.judges import JudgeBudget

MARGIN = 16
"""Tokens of a message besides its text: its role, and where it begins and ends."""


class Charge(NamedTuple):
    """What an answer took."""

    judge: str
    """Model and address."""
    prompt_tokens: int
    answer_tokens: int
    money: float

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens


class BudgetSpent(Fatal):
    """The next question could take more than the budget has left."""


@dataclass
class Spent:
    """What one endpoint took."""

    answers: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    money: float = 0.0

    def add(self, charge: Charge) -> None:
        """Count an answer in."""
        self.answers += 1
        self.prompt_tokens += charge.prompt_tokens
        self.answer_tokens += charge.answer_tokens
        self.money += charge.money

    def __str__(self) -> str:
        money = f", {self.money:.4f} of money" if self.money else ""
        tokens = f"{self.prompt_tokens:,} tokens of questions and {self.answer_tokens:,} of answers"
        return f"{self.answers:,} answers, {tokens}{money}"


@dataclass
class Reservation:
    """Of a call under way."""

    charge: Charge
    """The most that it may take."""


@dataclass
class Spending:
    """What a run has taken of one reward's judges. Safe for threads, and for the event loops of several endpoints."""

    charges: dict[str, Charge] = field(default_factory=dict)
    """By question: one that is there again costs nothing again."""
    _lost: list[Charge] = field(default_factory=list)
    """Calls whose answers were lost on the way: they are counted in full, for the endpoint may."""
    _reserved: dict[int, Charge] = field(default_factory=dict)
    _waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _tokens: int = 0
    _money: float = 0.0

    @property
    def tokens(self) -> int:
        """Of all that is counted."""
        with self._lock:
            return self._tokens

    @property
    def money(self) -> float:
        """Of all that is counted."""
        with self._lock:
            return self._money

    def note(self, question: str, charge: Charge) -> None:
        """Count an answer in, if it is not."""
        with self._lock:
            if question not in self.charges:
                self.charges[question] = charge
                self._add(charge)

    def _add(self, charge: Charge) -> None:
        self._tokens += charge.tokens
        self._money += charge.money

    async def reserve(self, charge: Charge, budget: JudgeBudget | None) -> Reservation:
        """Set aside what a call may take; where that is not there, wait for calls under way to leave some. Raises
        BudgetSpent where it is not there and none is under way."""
        while True:
            event = asyncio.Event()
            with self._lock:
                problem = None if budget is None else self._problem(charge, budget)
                if problem is None:
                    reservation = Reservation(charge)
                    self._reserved[id(reservation)] = charge
                    return reservation
                if not self._reserved:
                    raise BudgetSpent(problem)
                self._waiting.append((asyncio.get_running_loop(), event))
            await event.wait()

    def _problem(self, charge: Charge, budget: JudgeBudget) -> str | None:
        tokens = sum(each.tokens for each in self._reserved.values())
        money = sum(each.money for each in self._reserved.values())
        if budget.tokens is not None and self._tokens + tokens + charge.tokens > budget.tokens:
            key, taken = "tokens", f"{self._tokens:,} of {budget.tokens:,} tokens"
            more = f"{charge.tokens:,}"
        elif budget.money is not None and self._money + money + charge.money > budget.money:
            key, taken = "money", f"{self._money:.4f} of the {budget.money:g} of money"
            more = f"{charge.money:.4f}"
        else:
            return None
        return (
            f"judging has taken {taken} of its budget, and the next question may take {more}; it was not asked. All "
            f"answers are kept: raise budget.{key} and run the same again, and it continues where it stopped"
        )

    def settle(self, reservation: Reservation, question: str, charge: Charge | None) -> None:
        """The call has ended; it took ``charge``, or nothing."""
        with self._lock:
            if self._reserved.pop(id(reservation), None) is not None and charge is not None:
                self.note(question, charge)
            self._wake()

    def lose(self, reservation: Reservation) -> None:
        """The answer to the call was lost."""
        with self._lock:
            if (charge := self._reserved.pop(id(reservation), None)) is not None:
                self._lost.append(charge)
                self._add(charge)
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def all_charges(self) -> list[tuple[str | None, Charge]]:
        """With the question of each answer; of one that was lost without."""
        with self._lock:
            return [*self.charges.items(), *((None, charge) for charge in self._lost)]


@dataclass
class RunSpending:
    """What a run has taken of all judges."""

    _by_reward: dict[str, Spending] = field(default_factory=dict)
    _noted: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, reward: str) -> Spending:
        """Of the judges of one reward, by `Judges.reward`."""
        with self._lock:
            return self._by_reward.setdefault(reward, Spending())

    def note_judged(self, name: str, read: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Count in what a scoring of the run took, by what was filed of it under ``name`` (`Scores.judged`), which is
        read the first time that it is met."""
        if name in self._noted:
            return
        for judgement in read():
            spending = self.of(judgement["reward"])
            for question, charge in judgement["charges"].items():
                spending.note(question, Charge(*charge))
        self._noted.add(name)

    def all(self) -> list[Spending]:
        """Of each reward."""
        with self._lock:
            return list(self._by_reward.values())


def spent_by_judge(spendings: Iterable[Spending]) -> dict[str, Spent]:
    """What each endpoint took; a question of several rewards counts once."""
    found: dict[str, Spent] = {}
    counted: set[str] = set()
    for question, charge in (pair for each in spendings for pair in each.all_charges()):
        if question is None or question not in counted:
            found.setdefault(charge.judge, Spent()).add(charge)
        if question is not None:
            counted.add(question)
    return found
