"""The process's engine as the requests of a server use it: one lane that stays open, an engine that is started anew
when it died, weights that are replaced between requests."""

from __future__ import annotations

import asyncio
import heapq
import logging
from array import array
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future as ThreadFuture
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

from blake3 import blake3

from rollout_core.base.errors import ConfigError, Recoverable, in_words
from rollout_core.base.ids import canonical_json
from rollout_core.base.stopping import in_thread
from rollout_core.config import EngineConfig, SamplingParams
from rollout_core.data.samples import Failure, Outcome
from rollout_core.data.text import encode_once, render_chats
from rollout_core.data.turn_ends import turn_ends
from rollout_core.inference.backend import ModelRef, Request, unsupported
from rollout_core.inference.chat_api import Answered, ApiError, Ask, BareText, Prompt, Writer
from rollout_core.inference.engines import EngineOf
from rollout_core.inference.lanes import Lanes
from rollout_core.models.bounded.tokenizing import Chat, Problem
from rollout_core.models.pretrained import load_tokenizer

T = TypeVar("T")

log = logging.getLogger(__name__)

MOST_DEATHS = 3
"""In a row, without a completion between them; then the engine is not started again."""


@dataclass(frozen=True)
class Served:
    """What answers at present."""

    model: ModelRef
    sampling: SamplingParams | None
    tokenizer: Any
    writer: Writer
    turn_ends: Sequence[int]
    """Tokens that end the assistant's turn in addition to the model's own ends."""


@dataclass(frozen=True)
class Tokenized:
    """A prompt as text, where it was one, and as token ids."""

    text: str
    token_ids: Sequence[int]


class ServedEngine:
    """A model on this process's engine; everything is called in one event loop.

    Args:
        parses_tools: whether tool calls in Hermes' form are read from texts.
        seed: requests without a seed of their own draw theirs from it.
    """

    def __init__(
        self, config: EngineConfig, name: str, *, parses_tools: bool, seed: int, say: Callable[[str], None]
    ) -> None:
        self._config, self._name, self._parses_tools, self._seed, self._say = config, name, parses_tools, seed, say
        self._served: Served | None = None
        self._problem: ApiError | None = None
        """Why nothing can be answered until another model is loaded."""
        self._session: _Session | None = None
        self._failures = 0
        """Of the engine, since its last completion."""
        self._changing = asyncio.Lock()
        self._opening = asyncio.Lock()
        self._is_open, self._is_idle = asyncio.Event(), asyncio.Event()
        self._is_open.set()
        self._is_idle.set()
        self._holds = self._lends = self._under_way = 0
        self._seeds = _Seeds()
        self._numbers = count()
        self._encoder = Encoder()
        self._has_warned = False

    @property
    def problem(self) -> str | None:
        """Why nothing can be answered until another model is loaded."""
        return None if self._problem is None else str(self._problem)

    @property
    def num_running(self) -> int:
        """Sequences that the engine works on, or has finished in its last step."""
        return 0 if self._session is None else self._session.num_running

    # Requests

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[Served]:
        """Inside the block a request is under way. Waits while the engine is lent or changed; raises ApiError where no
        model answers."""
        while not self._is_open.is_set():
            await self._is_open.wait()
        if self._problem is not None or self._served is None:
            raise self._problem or ApiError(503, "no model is loaded")
        self._under_way += 1
        self._is_idle.clear()
        try:
            yield self._served
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._is_idle.set()

    async def complete(self, served: Served, ask: Ask) -> list[Answered]:
        """The completions that a request asks for, those of one prompt together. Raises ApiError."""
        for name, reason in unsupported(ask.params, self._config):
            raise ApiError(400, f"{name}: {reason}", name, "unsupported_parameter")
        if ask.ruled and not self._has_warned:
            self._has_warned = True
            log.warning(
                "A request asks for another %s than the server's sampling parameters, which rule; others are not "
                "reported",
                ", ".join(ask.ruled),
            )
        prompts = await asyncio.gather(*(self._encoder.encode(served.tokenizer, prompt) for prompt in ask.prompts))
        session = await self._running(served)
        most = None if served.sampling is None else served.sampling.max_tokens
        params = [ask.params_of(len(prompt.token_ids), session.max_model_len, most) for prompt in prompts]
        origin = [self._seed, served.model.content_id, served.sampling and served.sampling.seed]
        with self._seeds.drawn(canonical_json(origin), [prompt.token_ids for prompt in prompts], ask) as seeds:
            ends = served.turn_ends if ask.is_chat and not ask.params.ignore_eos else ()
            requests = [
                Request(
                    f"served-{next(self._numbers)}", prompt.token_ids, own, seed, prompt_text=prompt.text, ends=ends
                )
                for prompt, own, drawn in zip(prompts, params, seeds, strict=True)
                for seed in drawn
            ]
            outcomes = await session.complete(requests)
            self._failures = 0
            return [Answered(*pair) for pair in zip(requests, map(_completion, outcomes), strict=True)]  # pyright: ignore[reportArgumentType]

    async def _running(self, served: Served) -> _Session:
        """The engine with the served model, started if it does not run."""
        if (session := self._session) is not None and session.error is None:
            return session
        async with self._opening:
            if self._session is not None and self._session.error is not None:
                error = self._session.error
                await self._leave()
                self._count_failure(error)
            if self._problem is not None:
                raise self._problem
            if self._session is None:
                try:
                    self._session = await _Session.open(EngineOf(self._config, served.model, self._say))
                except Exception as error:
                    self._count_failure(error)
                    raise self._problem or _unavailable(error) from error
            return self._session

    def _count_failure(self, error: BaseException) -> None:
        self._failures += 1
        log.warning("The engine failed: %s", in_words(error))
        if self._failures >= MOST_DEATHS:
            times = f"the engine failed {self._failures} times in a row and is not started again"
            self._problem = ApiError(500, f"{times}; last: {in_words(error)}")

    # Changes

    async def load(self, model: ModelRef, sampling: SamplingParams | None) -> None:
        """Answer with this model from now on; requests under way end first. Where that fails, requests are answered
        with 503 and the reason, which is raised."""
        for name, reason in unsupported(sampling or SamplingParams(), self._config):
            raise ConfigError(f"sampling.{name}: {reason}")
        async with self._held(), self._changing:
            before = self._served
            try:
                if before is None or before.model != model or self._problem is not None:
                    self._served = None
                    await self._leave()
                    if before is None or before.model.content_id != model.content_id:
                        self._seeds = _Seeds()
                    self._failures, self._problem = 0, None
                    before = await self._ready(model)
                self._served = replace(before, sampling=sampling)
                self._has_warned = False
                if not self._lends:
                    await self._running(self._served)
            except BaseException as error:
                self._served = None
                reason = error.__cause__ or error
                self._problem = ApiError(503, f"the model {model.content_id.short} was not loaded: {in_words(reason)}")
                if isinstance(error, ApiError) and isinstance(error.__cause__, Exception):
                    raise error.__cause__ from None
                raise

    async def _ready(self, model: ModelRef) -> Served:
        tokenizer = await _in_thread(lambda: load_tokenizer(model.folder))
        ends = await _in_thread(lambda: turn_ends(model.folder, tokenizer))
        return Served(model, None, tokenizer, Writer(tokenizer, self._name, self._parses_tools), ends)

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[None]:
        """Inside the block no request is under way, and new ones wait."""
        self.hold()
        try:
            await self._is_idle.wait()
            yield
        finally:
            self.release()

    def hold(self) -> None:
        """Let new requests wait until `release`."""
        self._holds += 1
        self._is_open.clear()

    def release(self) -> None:
        """Undo one `hold`."""
        self._holds -= 1
        if not self._holds:
            self._is_open.set()

    async def lend(self) -> None:
        """Release the engine when requests under way have ended; new ones wait for `take_back`."""
        self.hold()
        self._lends += 1
        try:
            await self._is_idle.wait()
            async with self._changing:
                await self._leave()
        except BaseException:
            self.take_back()
            raise

    def take_back(self) -> None:
        """Undo one `lend`; the next request has the engine again."""
        self._lends -= 1
        self.release()

    async def close(self) -> None:
        """Release the engine; what is under way fails."""
        self._problem = ApiError(503, "the server is being stopped")
        await self._leave()
        self._encoder.close()

    async def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _completion(outcome: Outcome) -> Any:
    if isinstance(outcome, Failure):
        raise ApiError(503 if outcome.passing else 400, outcome.reason)
    return outcome


def _unavailable(error: BaseException) -> ApiError:
    passing = isinstance(error, Recoverable) or not isinstance(error, ConfigError)
    return ApiError(503 if passing else 500, f"the engine is not available: {in_words(error)}")


async def _in_thread(call: Callable[[], T]) -> T:
    """The result of a call that may block for long; the process does not wait for it at its end."""
    return await asyncio.shield(asyncio.wrap_future(in_thread(call)))


class _Session:
    """A lane of the running engine, and who waits for which outcome. It ends by itself where the engine fails."""

    def __init__(self, opened: AbstractContextManager[Lanes], lanes: Lanes) -> None:
        self._opened = opened
        self.max_model_len = lanes.max_model_len
        self.error: Exception | None = None
        """What the engine failed with."""
        # Batch inference may share the engine, and would wait for this lane's end.
        self._lane = lanes.open(keeps_turn=False)
        self._waiting: dict[str, asyncio.Future[Outcome]] = {}
        self._task = asyncio.create_task(self._run())

    @classmethod
    async def open(cls, engine: EngineOf) -> _Session:
        """Enter the process's engine, which may take long."""
        opened = engine.open()
        entered = in_thread(opened.__enter__)
        try:
            return cls(opened, await asyncio.shield(asyncio.wrap_future(entered)))
        except asyncio.CancelledError:
            entered.add_done_callback(lambda found: _leave_at_once(opened, found))
            raise

    async def _run(self) -> None:
        try:
            while True:
                for outcome in await self._lane.outcomes():
                    future = self._waiting.pop(outcome.key, None)
                    if future is not None and not future.done():
                        future.set_result(outcome)
        except asyncio.CancelledError:
            reason = ApiError(503, "the engine was given up")
        except Exception as error:  # noqa: BLE001 - whatever the backend raised
            self.error = error
            reason = _unavailable(error)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ApiError(reason.status, reason.message))
        self._waiting.clear()
        await _in_thread(self._exit)

    def _exit(self) -> None:
        self._lane.close()
        error = self.error
        # The pool drops an engine that a user left with an error.
        self._opened.__exit__(*((type(error), error, error.__traceback__) if error is not None else (None, None, None)))

    @property
    def num_running(self) -> int:
        """Requests without an outcome."""
        return len(self._waiting)

    async def complete(self, requests: Sequence[Request]) -> list[Outcome]:
        """Outcomes in the order of the requests. Raises ApiError where the engine fails meanwhile."""
        if self.error is not None:
            raise _unavailable(self.error)
        loop = asyncio.get_running_loop()
        futures = {request.key: loop.create_future() for request in requests}
        self._waiting |= futures
        self._lane.submit(requests)
        try:
            return await asyncio.gather(*futures.values())
        finally:
            left = {key for key in futures if self._waiting.pop(key, None) is not None}
            if left and self.error is None:
                self._lane.withdraw(left)

    async def close(self) -> None:
        """Leave the engine."""
        if self.error is None:
            self._task.cancel()
        await asyncio.wait([self._task])


def _leave_at_once(opened: AbstractContextManager[Lanes], entered: ThreadFuture[Lanes]) -> None:
    if entered.exception() is None:
        opened.__exit__(None, None, None)


class Encoder:
    """Prompts on their way to token ids: those that come while others are worked on go together."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Chat | str | BareText, asyncio.Future[Tokenized | Problem]]] = []
        self._task: asyncio.Task[None] | None = None

    async def encode(self, tokenizer: Any, prompt: Prompt) -> Tokenized:
        """Raises ApiError where template or tokenizer refuse the prompt."""
        if not isinstance(prompt, Chat | str | BareText):
            return Tokenized("", prompt)
        future: asyncio.Future[Tokenized | Problem] = asyncio.get_running_loop().create_future()
        self._waiting.append((tokenizer, prompt, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        found = await future
        if isinstance(found, Problem):
            raise ApiError(400, f"the prompt: {found.reason}", "messages" if isinstance(prompt, Chat) else "prompt")
        return found

    async def _run(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            tokenizer = group[0][0]
            prompts = [prompt for _, prompt, _ in group]
            try:
                found = await _in_thread(lambda: _tokenized_apart(tokenizer, prompts))  # noqa: B023 - awaited at once
            except Recoverable as error:
                for _, _, future in group:
                    if not future.done():
                        future.set_exception(ApiError(503, in_words(error)))
                continue
            for (_, _, future), one in zip(group, found, strict=True):
                if not future.done():
                    future.set_result(one)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _tokenized_apart(tokenizer: Any, prompts: Sequence[Chat | str | BareText]) -> list[Tokenized | Problem]:
    """Of all prompts together, or of each alone where that fails: one must not harm the others."""
    try:
        return _tokenized(tokenizer, prompts)
    except Recoverable:  # no fault of a prompt: this process is to stop, say
        raise
    except Exception as error:  # noqa: BLE001 - each request is answered, whatever template or tokenizer raised
        if len(prompts) == 1:
            return [Problem(in_words(error))]
        return [one for prompt in prompts for one in _tokenized_apart(tokenizer, [prompt])]


def _tokenized(tokenizer: Any, prompts: Sequence[Chat | str | BareText]) -> list[Tokenized | Problem]:
    found: dict[int, Tokenized | Problem] = {}
    chats = [(place, prompt) for place, prompt in enumerate(prompts) if isinstance(prompt, Chat)]
    rendered = zip(chats, render_chats(tokenizer, [chat for _, chat in chats]), strict=True)
    texts: dict[bool, list[tuple[int, str]]] = defaultdict(list)
    for (place, _), text in rendered:
        if isinstance(text, Problem):
            found[place] = text
        else:
            texts[False].append((place, text))
    texts[False] += [(place, prompt.text) for place, prompt in enumerate(prompts) if isinstance(prompt, BareText)]
    texts[True] = [(place, prompt) for place, prompt in enumerate(prompts) if isinstance(prompt, str)]
    for special_tokens, some in texts.items():
        encoded = encode_once(tokenizer, [text for _, text in some], special_tokens=special_tokens)
        for (place, text), ids in zip(some, encoded, strict=True):
            if isinstance(ids, Problem):
                found[place] = ids
            else:
                found[place] = Tokenized(text, ids) if ids else Problem("has no tokens; give at least one character")
    return [found[place] for place in range(len(prompts))]


class _Seeds:
    """Seeds of requests that give none: each follows from its prompt and how many requests had that prompt before.

    So the set of answers to equal prompts does not depend on the order in which they come. The number of a request that
    failed is used again.
    """

    def __init__(self) -> None:
        self._asked: Counter[bytes] = Counter()
        self._unused: defaultdict[bytes, list[int]] = defaultdict(list)

    def drawn(self, origin: bytes, prompts: Sequence[Sequence[int]], ask: Ask) -> _Drawn:
        """Seeds for ``ask.count`` completions of each prompt."""
        return _Drawn(self, origin, prompts, ask)

    def take(self, key: bytes) -> int:
        """The lowest number that no request with this prompt has."""
        if key in self._unused:
            unused = self._unused[key]
            number = heapq.heappop(unused)
            if not unused:
                del self._unused[key]
            return number
        self._asked[key] += 1
        return self._asked[key] - 1

    def give_back(self, key: bytes, number: int) -> None:
        """A request failed."""
        heapq.heappush(self._unused[key], number)


class _Drawn:
    """The seeds of one request; given back where it fails."""

    def __init__(self, seeds: _Seeds, origin: bytes, prompts: Sequence[Sequence[int]], ask: Ask) -> None:
        self._seeds, self._origin, self._prompts, self._ask = seeds, origin, prompts, ask
        self._taken: list[tuple[bytes, int]] = []

    def __enter__(self) -> list[list[int]]:
        numbers = range(self._ask.count)
        if self._ask.seed is not None:
            own = [(self._ask.seed + number) % 2**31 for number in numbers]
            return [own for _ in self._prompts]
        found = []
        for prompt in self._prompts:
            key = blake3(self._origin + b"\x00" + array("q", prompt).tobytes()).digest(16)
            taken = [(key, self._seeds.take(key)) for _ in numbers]
            self._taken += taken
            found.append([_seed_of(key, number) for _, number in taken])
        return found

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for key, number in self._taken:
                self._seeds.give_back(key, number)


def _seed_of(key: bytes, number: int) -> int:
    return int.from_bytes(blake3(key + number.to_bytes(8, "big")).digest(8), "big") % 2**31
