"""Requests to an HTTP endpoint as a stream: many under way at once, each tried again while that may help.

They run on an event loop in a thread of their own. What else is in the endpoint's batches is not ours to know, so its
answers are not repeatable to the last bit, and every sample is committed as it comes. An endpoint that is gone does not
turn the rest of a run into failures: once as many samples in a row as may be under way (and at least 8) got no answer,
the stream ends with Recoverable, or its requests are not sent any more (`EndpointStream.gives_up`).
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.data.samples import Completion, Failure, Outcome
from rollout_core.inference.backend import GathersStream, Request
from rollout_core.inference.endpoint import Endpoint, Malformed, Refused, counted_tokens
from rollout_core.inference.spending import Account, BudgetSpent, Charge, Metered

POLL_SECONDS = 0.02
"""Time between looks for further requests while there are none."""
LONE_FAILURES = 8
"""Fewer in a row may be a fault of those requests."""
_END: Any = object()
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Asked:
    outcome: Outcome
    answered: bool
    """Also where the answer is of no use."""


class EndpointStream(GathersStream):
    """The stream of an `InferenceBackend` over HTTP; a subclass says what a request is, and what an answer means."""

    batch_invariant = False
    gives_up = True
    """Whether the stream ends where nothing is answered any more. Else `ask` is to look at ``is_gone``."""

    def __init__(self, endpoint: Endpoint, max_concurrency: int) -> None:
        self._endpoint, self._most = endpoint, max_concurrency
        self._silent = 0
        """Samples in a row that got no answer."""
        self._done = queue.SimpleQueue[Future[_Asked] | None]()
        """Of the stream under way."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-endpoint", daemon=True)
        self._thread.start()

    @property
    def patience(self) -> int:
        """So many samples without an answer in a row are no fault of theirs."""
        return max(LONE_FAILURES, self._most)

    @property
    def is_gone(self) -> bool:
        """Whether nothing is answered any more."""
        return self._silent >= self.patience

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run it on the stream's own loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def ask(self, request: Request) -> Outcome:
        """The outcome of a request. Raises Malformed for an answer that is none."""
        raise NotImplementedError("a backend implements ask")

    async def post(
        self,
        key: str,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[Mapping[str, Any]], Awaitable[Outcome]],
        account: Account,
        *,
        api: str,
        max_bytes: int,
        longest_answer: int,
        paced: int | None = None,
    ) -> Outcome:
        """What ``read`` makes of the answer to a body; what it takes counts in ``account``.

        ``longest_answer`` in tokens; ``paced``: tokens that it is reckoned to take of a limit by the minute, where they
        are not all that it can take. Raises as `Endpoint.post`, and BudgetSpent where there is no budget for it.
        """
        charge = most = account.most(body, longest_answer)
        paced = most.tokens if paced is None else paced
        meter = Metered(account, most)
        try:
            try:
                answer = await self._endpoint.post(path, body, max_bytes, tokens=paced, meter=meter)
            except (Refused, ConfigError):
                meter.end(lost=False)
                raise
            prompt, given = counted_tokens(answer, api)
            if prompt is not None and given is not None:
                charge = account.charge(prompt, given)
                self._endpoint.pace.give_back(paced - charge.tokens)
            outcome = await read(answer)
            if isinstance(outcome, Completion):
                charge = _charge(account, outcome, charge)
        except BaseException:
            # Also where the process stops, or another request ends the stream: the endpoint works on, and is paid.
            meter.took(charge)
            raise
        meter.took(charge, key if isinstance(outcome, Completion) else None)
        return outcome

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Outcome]:
        waiting = iter(requests)
        error: BaseException | None = None
        self._done = done = queue.SimpleQueue[Future[_Asked] | None]()
        in_flight: set[Future[_Asked]] = set()
        exhausted, self._silent = False, 0
        try:
            while True:
                paused = False
                while not exhausted and len(in_flight) < self._most:
                    request = next(waiting, _END)
                    if request is _END or request is None:
                        exhausted, paused = request is _END, request is None
                        break
                    future = asyncio.run_coroutine_threadsafe(self._complete(request), self._loop)
                    in_flight.add(future)
                    future.add_done_callback(done.put)
                if not in_flight:
                    if error is not None:
                        raise error
                    return
                try:
                    future = done.get(timeout=POLL_SECONDS if paused else None)
                except queue.Empty:
                    continue
                if future is None:  # interrupted
                    return
                in_flight.remove(future)
                try:
                    asked = future.result()
                except BudgetSpent as raised:
                    # What is under way is paid for, so it is waited for.
                    error, exhausted = error or raised, True
                    continue
                self._silent = 0 if asked.answered else self._silent + 1
                if self.gives_up and self.is_gone and isinstance(asked.outcome, Failure):
                    raise Recoverable(
                        f"{self._silent} samples in a row got no answer, the last: {asked.outcome.reason}"
                    )
                yield asked.outcome
        finally:
            for future in in_flight:
                future.cancel()

    def interrupt(self) -> None:
        """See `InferenceBackend`: an answer may be as far away as its tries take."""
        self._done.put(None)

    async def _complete(self, request: Request) -> _Asked:
        try:
            outcome = await self.ask(request)
        except Malformed as error:
            # It is an answer, and the next one may be sound.
            return _Asked(self._failure(request, f"the answer is malformed: {error}", passing=True), answered=True)
        if isinstance(outcome, Failure):
            failure = self._failure(request, outcome.reason, passing=outcome.passing)
            return _Asked(failure, answered=not outcome.passing or self.is_refused(failure))
        if self._endpoint.gives_key_away(outcome.text):
            reason = "the answer repeats the endpoint's key, which is not kept"
            return _Asked(self._failure(request, reason, passing=True), answered=True)
        return _Asked(outcome, answered=True)

    def is_refused(self, failure: Failure) -> bool:
        """Whether the endpoint is there and refused it, though it may take it another time."""
        return False

    def _failure(self, request: Request, reason: str, *, passing: bool) -> Failure:
        return Failure(request.key, self._endpoint.fit_to_show(reason), passing)

    def close(self) -> None:
        self.run(_cancel_others())  # to the end: other engines share their turns, and budgets what they reserve
        self.run(self._endpoint.close())
        # The threads in which answers were tokenised; they would outlive the loop.
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _charge(account: Account, completion: Completion, charge: Charge) -> Charge:
    """By the completion's own count, where it has one that can be; else it gets that of ``charge``."""
    if completion.usage is None:
        completion.usage = charge.prompt_tokens, charge.answer_tokens
    return account.charge(completion.usage[0], completion.usage[1])


async def _cancel_others() -> None:
    """End all other tasks of the loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
