"""An OpenAI-compatible endpoint as a backend: many requests under way at once, each tried again while that may help.

Requests run on an event loop in a thread of their own. What else is in the endpoint's batches is not ours to know, so
its answers are not repeatable to the last bit, and every sample is committed as it comes. An endpoint that is gone does
not turn the rest of a run into failures: once as many samples in a row as may be under way (and at least 8) got no
answer, the stream ends with Recoverable. An answer that is malformed fails its own sample, to be asked for again by the
next run.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.ids import ContentId
from rollout_core.config import OpenAIBackend
from rollout_core.data.samples import Completion, Failure, Outcome
from rollout_core.inference.backend import GathersStream, ModelRef, Request
from rollout_core.inference.endpoint import Endpoint, Malformed, Passing, Refused
from rollout_core.inference.openai_wire import OtherDialect, body_of, longest_answer, no_vllm, outcome_of, path_of
from rollout_core.models.facts import known_ids, vocab_size
from rollout_core.models.pretrained import load_tokenizer

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


class OpenAIEngine(GathersStream):
    """An `InferenceBackend` over HTTP.

    Raises ConfigError when the endpoint refuses access or serves no such model, Recoverable when it does not answer.
    """

    batch_invariant = False

    def __init__(self, config: OpenAIBackend, model: ModelRef) -> None:
        self._config = config
        self._done = queue.SimpleQueue[Future[_Asked] | None]()
        """Of the stream under way."""
        self._understood = False
        """It has answered in the configured dialect, so it is no fault of the configuration where it does not."""
        self.update_weights(model)
        self._endpoint = Endpoint(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-endpoint", daemon=True)
        self._thread.start()
        try:
            self._served, self._limit = self._run(_look_up(self._endpoint, config))
        except BaseException:
            self.close()
            raise

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    @property
    def model_id(self) -> ContentId:
        return self._model.content_id

    @property
    def max_model_len(self) -> int | None:
        return self._config.max_model_len or self._limit

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Outcome]:
        waiting = iter(requests)
        self._done = done = queue.SimpleQueue[Future[_Asked] | None]()
        in_flight: set[Future[_Asked]] = set()
        exhausted, silent = False, 0
        try:
            while True:
                paused = False
                while not exhausted and len(in_flight) < self._config.max_concurrency:
                    request = next(waiting, _END)
                    if request is _END or request is None:
                        exhausted, paused = request is _END, request is None
                        break
                    future = asyncio.run_coroutine_threadsafe(self._complete(request), self._loop)
                    in_flight.add(future)
                    future.add_done_callback(done.put)
                if not in_flight:
                    return
                try:
                    future = done.get(timeout=POLL_SECONDS if paused else None)
                except queue.Empty:
                    continue
                if future is None:  # interrupted
                    return
                in_flight.remove(future)
                asked = future.result()
                silent = 0 if asked.answered else silent + 1
                if silent >= max(LONE_FAILURES, self._config.max_concurrency) and isinstance(asked.outcome, Failure):
                    raise Recoverable(f"{silent} samples in a row got no answer, the last: {asked.outcome.reason}")
                yield asked.outcome
        finally:
            for future in in_flight:
                future.cancel()

    def interrupt(self) -> None:
        """See `InferenceBackend`: an answer may be as far away as its tries take."""
        self._done.put(None)

    async def _complete(self, request: Request) -> _Asked:
        try:
            outcome = await self._ask(request)
        except Malformed as error:
            # It is an answer, and the next one may be sound.
            return _Asked(self._failure(request, f"the answer is malformed: {error}", passing=True), answered=True)
        if isinstance(outcome, Failure):
            failure = self._failure(request, outcome.reason, passing=outcome.passing)
            return _Asked(failure, answered=not outcome.passing)
        if self._endpoint.gives_key_away(outcome.text):
            reason = "the answer repeats the endpoint's key, which is not kept"
            return _Asked(self._failure(request, reason, passing=True), answered=True)
        return _Asked(outcome, answered=True)

    def _failure(self, request: Request, reason: str, *, passing: bool) -> Failure:
        return Failure(request.key, self._endpoint.fit_to_show(reason), passing)

    async def _ask(self, request: Request) -> Outcome:
        """Raises Malformed for an answer that is no outcome."""
        config, tokenizer = self._config, self._tokenizer
        body = body_of(config, self._served, tokenizer, request)
        try:
            answer = await self._endpoint.post(path_of(config), body, longest_answer(request))
        except Passing as error:
            return Failure(request.key, str(error), passing=True)
        except Refused as error:
            return Failure(request.key, str(error))
        try:
            # Off the loop: tokenising a long text holds up no other request.
            outcome = await asyncio.to_thread(outcome_of, config, tokenizer, request, answer, self._vocab_size)
        except OtherDialect:
            if not self._understood:
                raise no_vllm(config) from None
            raise Malformed("it lacks token ids or log-probabilities") from None
        self._understood = self._understood or isinstance(outcome, Completion)
        return outcome

    def update_weights(self, model: ModelRef) -> None:
        """The answers are taken for those of ``model`` from now on; what the endpoint serves stays as it is."""
        self._tokenizer = load_tokenizer(model.folder)
        self._vocab_size = known_ids(model.folder, self._tokenizer) or vocab_size(model.folder)
        self._model = model

    def close(self) -> None:
        self._run(self._endpoint.close())
        # The threads in which answers were tokenised; they would outlive the loop.
        self._run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _look_up(endpoint: Endpoint, config: OpenAIBackend) -> tuple[str, int | None]:
    """Name of the served model, and the longest sequence it takes, where the endpoint tells."""
    try:
        models = {model["id"]: model for model in await endpoint.models()}
    except Passing as error:
        raise Recoverable(f"the endpoint does not answer: {error}") from error
    except (Refused, Malformed) as error:
        raise ConfigError(f"{config.url}: {error}") from error
    named = endpoint.fit_to_show(", ".join(sorted(models)) or "none")
    wanted = config.served_model
    if wanted is None and len(models) != 1:
        raise ConfigError(f"{config.url} serves {len(models)} models ({named}); name one as backend.served_model")
    name = wanted or next(iter(models))
    if name not in models:
        raise ConfigError(f"{config.url} serves no model {name!r}, but {named}; look at backend.served_model")
    limit = models[name].get("max_model_len")
    return name, limit if type(limit) is int and limit > 0 else None


def try_endpoint(config: OpenAIBackend) -> None:
    """Look once whether the endpoint answers and serves the model.

    Raises ConfigError where it never will, Recoverable where it does not answer now.
    """

    async def look() -> None:
        once = config.model_copy(update={"max_retries": 0, "timeout_seconds": 10.0})
        endpoint = Endpoint(once)
        try:
            await _look_up(endpoint, once)
        finally:
            await endpoint.close()

    # In a thread of its own, as the caller's may have a loop that runs.
    with ThreadPoolExecutor(1) as threads:
        threads.submit(asyncio.run, look()).result()
