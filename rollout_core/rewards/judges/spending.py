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

    def add(self, prompt_tokens: int, answer_tokens: int, money: float, answers: int = 1) -> None:
        """Count answers in."""
        self.answers += answers
        self.prompt_tokens += prompt_tokens
        self.answer_tokens += answer_tokens
        self.money += money

    def __str__(self) -> str:
        money = f", {self.money:.4f} of money" if self.money else ""
        tokens = f"{self.prompt_tokens:,} tokens of prompts and {self.answer_tokens:,} of answers"
        return f"{self.answers:,} answers, {tokens}{money}"


@dataclass(eq=False)
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
    """Of calls whose answers are not kept: those that were lost on the way count in full, for they may be billed."""
    _reserved: set[Reservation] = field(default_factory=set)
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
                    self._reserved.add(reservation)
                    return reservation
                if not self._reserved:
                    raise BudgetSpent(problem)
                self._waiting.append((asyncio.get_running_loop(), event))
            await event.wait()

    def _problem(self, charge: Charge, budget: JudgeBudget) -> str | None:
        tokens = sum(each.charge.tokens for each in self._reserved)
        money = sum(each.charge.money for each in self._reserved)
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

    def end(self, reservation: Reservation, charge: Charge | None = None, question: str | None = None) -> None:
        """The call has ended, and took ``charge``, or nothing; without a ``question`` its answer is not kept."""
        with self._lock:
            self._reserved.remove(reservation)
            if charge is not None and question is not None and question not in self.charges:
                self.note(question, charge)
            elif charge is not None:  # also a second answer to a question
                self._lost.append(charge)
                self._add(charge)
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def all_charges(self) -> list[tuple[str | None, Charge]]:
        """With the question of each answer; of one that is not kept without."""
        with self._lock:
            return [*self.charges.items(), *((None, charge) for charge in self._lost)]


class Metered:
    """The tries of one question, held against a budget (a `Meter`)."""

    def __init__(self, spending: Spending, most: Charge, budget: JudgeBudget | None) -> None:
        self._spending, self._most, self._budget = spending, most, budget
        self._under_way: Reservation | None = None

    async def begin(self) -> None:
        """Reserve what a try may take. Raises BudgetSpent."""
        self._under_way = await self._spending.reserve(self._most, self._budget)

    def end(self, *, lost: bool) -> None:
        """The try came to no answer."""
        self.took(self._most if lost else None)

    def took(self, charge: Charge | None, question: str | None = None) -> None:
        """The try, if one is under way, has ended as `Spending.end` says."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._spending.end(under_way, charge, question)


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
            found.setdefault(charge.judge, Spent()).add(*charge[1:])
        if question is not None:
            counted.add(question)
    return found
