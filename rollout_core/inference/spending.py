"""What answers of endpoints have taken, and a budget that they do not exceed.

A call under way has all reserved that it could take: a token for each byte of the prompt, which no tokenizer of bytes
exceeds, and the longest answer. When its answer comes, what the endpoint counted takes the place of that.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import orjson

from rollout_core.base.errors import Fatal
from rollout_core.config.inference import TokenBudget

MARGIN = 16
"""Tokens of a prompt besides its text and the names of its parts: where it begins and ends."""
_PROMPT_KEYS = ("prompt", "system", "messages", "tools")
"""Of a body: what an endpoint makes the prompt of."""


class Priced(Protocol):
    """An endpoint whose answers are paid for."""

    @property
    def name(self) -> str:
        """Model and address, for people."""
        ...

    def price_of(self, prompt_tokens: int, answer_tokens: int) -> float:
        """Money for so many tokens."""
        ...


def most_prompt_tokens(body: Mapping[str, Any]) -> int:
    """Tokens that the prompt of a request's body cannot exceed: those that are given, or one for each byte of JSON."""
    given = [body[key] for key in _PROMPT_KEYS if key in body]
    return MARGIN + (len(given[0]) if given and isinstance(body.get("prompt"), list) else len(orjson.dumps(given)))


class Charge(NamedTuple):
    """What an answer took."""

    endpoint: str
    """Model and address."""
    prompt_tokens: int
    answer_tokens: int
    money: float

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens


class BudgetSpent(Fatal):
    """The next request could take more than the budget has left."""


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
    """What a run has taken of the endpoints that share a budget. Safe for threads, and for several event loops."""

    what: str = "judging"
    """That is paid for, for people."""
    charges: dict[str, Charge] = field(default_factory=dict)
    """By question, or sample: one that is there again costs nothing again."""
    _settled: dict[str, Spent] = field(default_factory=dict)
    """By endpoint, of answers that are not among `charges` any more."""
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

    async def reserve(self, charge: Charge, budget: TokenBudget | None) -> Reservation:
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

    def _problem(self, charge: Charge, budget: TokenBudget) -> str | None:
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
            f"{self.what} has taken {taken} of its budget, and the next request may take {more}; it was not sent. All "
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

    def settle(self, questions: Iterable[str]) -> None:
        """Forget which of these were answered, so that a run of millions does not hold them all; they stay counted."""
        with self._lock:
            for question in questions:
                if (charge := self.charges.pop(question, None)) is not None:
                    self._settled.setdefault(charge.endpoint, Spent()).add(*charge[1:])

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def add_to(self, found: dict[str, Spent], counted: set[str]) -> None:
        """Add what each endpoint took to what is ``found`` by endpoint, but for questions that are ``counted``."""
        with self._lock:
            new = [charge for question, charge in self.charges.items() if question not in counted]
            for charge in (*new, *self._lost):
                found.setdefault(charge.endpoint, Spent()).add(*charge[1:])
            for name, spent in self._settled.items():
                found.setdefault(name, Spent()).add(
                    spent.prompt_tokens, spent.answer_tokens, spent.money, spent.answers
                )
            counted |= self.charges.keys()


class Metered:
    """The tries of one request, held against a budget (a `Meter`)."""

    def __init__(self, account: Account, most: Charge) -> None:
        self._account, self._most = account, most
        self._under_way: Reservation | None = None

    async def begin(self) -> None:
        """Reserve what a try may take. Raises BudgetSpent."""
        self._under_way = await self._account.spending.reserve(self._most, self._account.budget)

    def end(self, *, lost: bool) -> None:
        """The try came to no answer."""
        self.took(self._most if lost else None)

    def took(self, charge: Charge | None, question: str | None = None) -> None:
        """The try, if one is under way, has ended as `Spending.end` says."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._account.spending.end(under_way, charge, question)


@dataclass(frozen=True)
class Account:
    """In what the answers of an endpoint are counted, and what they may come to."""

    endpoint: Priced
    budget: TokenBudget | None = None
    spending: Spending = field(default_factory=Spending)

    def charge(self, prompt_tokens: int, answer_tokens: int) -> Charge:
        """What an answer of so many tokens takes."""
        endpoint = self.endpoint
        return Charge(endpoint.name, prompt_tokens, answer_tokens, endpoint.price_of(prompt_tokens, answer_tokens))

    def most(self, body: Mapping[str, Any], longest_answer: int) -> Charge:
        """What the answer to a body, of at most so many tokens, can take."""
        return self.charge(most_prompt_tokens(body), longest_answer)

    def note(self, question: str, usage: Sequence[int]) -> Charge:
        """Count in an answer that is kept, by the `usage` of its completion, if it is not."""
        charge = self.charge(usage[0], usage[1])
        self.spending.note(question, charge)
        return charge

    def settle(self, questions: Iterable[str]) -> None:
        """These are all answered. Without a budget, which must count nothing twice, they are forgotten one by one."""
        if self.budget is None:
            self.spending.settle(questions)


@dataclass
class RunSpending:
    """What a run has taken of all that answers in one role."""

    what: str = "judging"
    _by_budget: dict[str, Spending] = field(default_factory=dict)
    _noted: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, name: str) -> Spending:
        """Of what shares a budget: the judges of a reward, by `Judges.reward`, or an endpoint that generates, by its
        name."""
        with self._lock:
            return self._by_budget.setdefault(name, Spending(self.what))

    def note_filed(self, filed: str, read: Callable[[], Iterable[tuple[str, str, Charge]]]) -> None:
        """Count in what a stage of the run took, by what it filed as ``filed``, which is read the first time that it is
        met: whose budget it is, the question, and what its answer took."""
        if filed in self._noted:
            return
        for name, question, charge in read():
            self.of(name).note(question, charge)
        self._noted.add(filed)

    def all(self) -> list[Spending]:
        """Of each budget."""
        with self._lock:
            return list(self._by_budget.values())


def spent_by_endpoint(spendings: Iterable[Spending]) -> dict[str, Spent]:
    """What each endpoint took; a question of several budgets counts once."""
    found: dict[str, Spent] = {}
    counted: set[str] = set()
    for spending in spendings:
        spending.add_to(found, counted)
    return found
