"""Episodes of an environment: many at a time, whose turns share the engine's batches.

An episode is a rollout of the store. Each answer of the model is a sample of the ledger, kept before the environment
gets it; so an attempt that fails, or is killed, is played again with the answers that are kept, up to where the
environment does something else than before. Spans of an attempt are stored when it ends, and then it does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import orjson

from rollout_core.base.errors import Conflict
from rollout_core.base.ids import content_id, seed_of
from rollout_core.base.locks import scratch_folder
from rollout_core.config import SamplingParams
from rollout_core.config.environments import EnvironmentConfig
from rollout_core.data.samples import Completion, FinishReason, Sample, decode_completions_blob, identities_of
from rollout_core.data.turn_ends import turn_ends
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.conversation import Turns
from rollout_core.environments.hosts import NO_MEMORY, Hosts, Offer, Place
from rollout_core.environments.protocol import EnvironmentFailed, HostEnded
from rollout_core.environments.tools.toolbox import ToolResources
from rollout_core.environments.using import EpisodeTools, tools_of_episode
from rollout_core.inference.backend import ModelRef, Request
from rollout_core.inference.batch import BatchOptions, Progress, Work, request_of
from rollout_core.inference.chat_api import Answered, Writer
from rollout_core.inference.engines import EngineOf
from rollout_core.inference.ledger import is_gone
from rollout_core.inference.on_demand import OnDemand
from rollout_core.models.facts import known_ids, max_positions
from rollout_core.models.pretrained import load_tokenizer
from rollout_core.objects import ObjectStore
from rollout_core.store import (
    Attempt,
    AttemptedRollout,
    AttemptUpdate,
    EnqueueRolloutRequest,
    LightningStore,
    Rollout,
    Span,
)
from rollout_core.store.semconv import (
    AGL_ANNOTATION,
    AGL_EXCEPTION,
    AGL_OBJECT,
    AGL_OPERATION,
    EPISODE_MEMORY,
    EPISODE_TURN,
    LLM_CALL,
    ChoiceAttributes,
    LightningSpanAttributes,
    LlmCallAttributes,
    RewardAttributes,
)
from rollout_core.store.spans import TraceStatus
from rollout_core.store.types import RolloutMode

log = logging.getLogger(__name__)

EPISODE_KIND = "episode"
"""In the metadata of rollouts that are episodes."""
REWARD, TOTAL = "reward", "total"
"""Name of a reward that is one number, and of the sum of several."""
ENDED = "rollout.episode.ended"
"""Attribute of the reward's span: why the episode ended."""
TURN_REWARD = "turn"
"""Name of what a turn earned by itself."""
CHUNK = 1_000
"""Episodes that are looked up at once."""
MOST_DEATHS = 20
"""Of processes in which an episode was without being to blame; then it has one of its own."""
MOST_ALONE = 4
"""Episodes that have processes of their own at a time."""


@dataclass(frozen=True)
class Episode:
    """One to play."""

    rollout_id: str
    row: dict[str, Any]
    """That `reset` gets."""

    @property
    def seed(self) -> int:
        """That `reset` gets: the same for all episodes of a row."""
        return seed_of(content_id("episode-seed/1", self.row))


@dataclass
class Played:
    """What came of an attempt."""

    spans: list[Span] = field(default_factory=list)
    reward: float | None = None
    ended: str = ""
    num_turns: int = 0
    num_tokens: int = 0


@dataclass
class Tally:
    """How far episodes are."""

    total: int
    done: int = 0
    failed: int = 0
    """For good."""
    attempts_failed: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    environment_seconds: float = 0.0
    first_failure: str | None = None


class Player:
    """Plays episodes with one model; in one event loop, inside `OnDemand.running`.

    Args:
        demand: completes samples of the model.
        resources: what the tools of the settings share.
        folder: for the files of episodes under way.
        limit: longest sequence, in tokens, where the backend has a limit of its own.
    """

    def __init__(
        self,
        store: LightningStore,
        demand: OnDemand,
        hosts: Hosts,
        offer: Offer,
        resources: ToolResources,
        folder: Path,
        model: ModelRef,
        settings: EnvironmentConfig,
        sampling: SamplingParams,
        *,
        worker_id: str,
        options: BatchOptions,
        limit: int | None,
    ) -> None:
        self._store, self._demand, self._hosts, self._offer = store, demand, hosts, offer
        self._resources, self._folder = resources, folder
        self._model, self._settings, self._sampling = model, settings, sampling
        self._worker_id, self._options = worker_id, options
        tokenizer = load_tokenizer(model.folder)
        self._turns = Turns(model.folder, tokenizer)
        self._known_ids = known_ids(model.folder, tokenizer)
        self._ends = list(turn_ends(model.folder, tokenizer))
        self._writer = Writer(tokenizer, "model", parses_tools=settings.tool_parser == "hermes")
        limits = [each for each in (limit or max_positions(model.folder), settings.max_tokens) if each is not None]
        self._limit = min(limits, default=None)
        self._alone = asyncio.Semaphore(MOST_ALONE)
        keys = LlmCallAttributes
        self._about = {
            keys.MODEL_ID.value: model.content_id,
            f"{keys.REQUEST.value}.temperature": sampling.temperature,
            f"{keys.REQUEST.value}.max_tokens": sampling.max_tokens,
        }
        """Attributes of every turn."""

    async def play(
        self, episodes: Sequence[Episode], metadata: Mapping[str, Any], tally: Tally, *, retry_failed: bool
    ) -> None:
        """Play those that have not ended, so many at a time as the settings say. One that failed as often as it may is
        left as it is, unless it is to be tried again (``retry_failed``). Raises what ends the engine or the store."""
        standing = await self._standing([episode.rollout_id for episode in episodes])
        places = asyncio.Semaphore(self._settings.episodes_at_once)

        async def play(episode: Episode) -> None:
            rollout = standing.get(episode.rollout_id)
            while True:
                failures = 0 if rollout is None else await self._failures(rollout, retry_failed)
                if failures is None or failures >= self._settings.max_attempts:
                    tally.done += 1
                    tally.failed += failures is not None
                    return
                if rollout is not None and await self._is_others(rollout):
                    await asyncio.sleep(self._options.wait_seconds)
                else:
                    async with places:
                        if await self._play(episode, metadata, rollout is not None, failures, tally):
                            return
                # Another worker has it, or took it over.
                rollout = (await self._standing([episode.rollout_id])).get(episode.rollout_id)

        tasks = [asyncio.create_task(play(episode)) for episode in episodes]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _standing(self, rollout_ids: Sequence[str]) -> dict[str, Rollout]:
        found: dict[str, Rollout] = {}
        for start in range(0, len(rollout_ids), CHUNK):
            rollouts = await self._store.query_rollouts(rollout_id_in=rollout_ids[start : start + CHUNK])
            found |= {rollout.rollout_id: rollout for rollout in rollouts}
        return found

    async def _is_others(self, rollout: Rollout) -> bool:
        """Whether a worker that seems alive is at work on an episode."""
        if rollout.status not in ("preparing", "running") or not isinstance(rollout, AttemptedRollout):
            return False
        attempt = rollout.attempt
        if attempt.worker_id in (None, self._worker_id) or is_gone(attempt.worker_id):
            return False
        worker = await self._store.get_worker_by_id(str(attempt.worker_id))
        beat = None if worker is None else worker.last_heartbeat_time
        return max(attempt.start_time, beat or 0.0) >= time.time() - self._options.stale_after_seconds

    async def _failures(self, rollout: Rollout, retry_failed: bool) -> int | None:
        """Of attempts at an episode; None where one has succeeded."""
        if rollout.status == "succeeded":
            return None
        if retry_failed:
            return 0
        attempts = await self._store.query_attempts(rollout.rollout_id)
        return sum(attempt.status == "failed" for attempt in attempts)

    async def _play(
        self, episode: Episode, metadata: Mapping[str, Any], is_known: bool, failures: int, tally: Tally
    ) -> bool:
        """Attempts, until one succeeds or there may be no more; False where another worker took the episode over."""
        alone = False
        while failures < self._settings.max_attempts:
            attempt = await self._begin(episode, metadata, is_known)
            if attempt is None:
                return False
            is_known = True
            played, problem, alone = await self._attempt(episode, attempt, alone)
            if not await self._end(attempt, played, problem):
                return False
            if problem is None:
                tally.endings[played.ended] += 1
                break
            failures += 1
            tally.attempts_failed += 1
            said = f"episode {episode.rollout_id[:12]}, attempt {failures}: {problem}"
            tally.first_failure = tally.first_failure or said
            log.warning("%s", said)
        else:
            tally.failed += 1
        tally.done += 1
        return True

    async def _begin(self, episode: Episode, metadata: Mapping[str, Any], is_known: bool) -> Attempt | None:
        """A new attempt; None where another worker was quicker to begin an episode that was unknown."""
        if not is_known:
            request = EnqueueRolloutRequest(
                input=episode.row,
                mode=cast(RolloutMode, self._options.mode),
                metadata=dict(metadata),
                rollout_id=episode.rollout_id,
            )
            [attempt] = await self._store.start_first_attempts([request], worker_id=self._worker_id)
            return attempt
        return (await self._store.start_attempt(episode.rollout_id, self._worker_id)).attempt

    async def _attempt(self, episode: Episode, attempt: Attempt, alone: bool) -> tuple[Played, str | None, bool]:
        """What came of it; why it failed, if it did; and whether the next one is to be alone in its process."""
        deaths = 0
        while True:
            played = Played()
            try:
                async with AsyncExitStack() as stack:
                    if alone:
                        await stack.enter_async_context(self._alone)
                    # By the attempt: what an earlier one left behind is another object.
                    place = await stack.enter_async_context(self._hosts.place(attempt.attempt_id, alone=alone))
                    about = self._offer, place, self._resources, episode.row, self._folder
                    tools = await stack.enter_async_context(tools_of_episode(*about))
                    await self._turn_by_turn(episode, attempt, place, tools, played)
                return played, None, alone
            except EnvironmentFailed as error:
                return played, str(error), alone
            except HostEnded as error:
                deaths += 1
                if alone:
                    return played, str(error), alone
                alone = error.is_suspect or deaths >= MOST_DEATHS

    # One attempt

    async def _turn_by_turn(
        self, episode: Episode, attempt: Attempt, place: Place, tools: EpisodeTools, played: Played
    ) -> None:
        spans = _Spans(attempt, played.spans)
        about = self._about | ({LlmCallAttributes.TOOLS.value: _json(tools.schemas)} if tools.schemas else {})
        new = await place.call("reset", episode.row, episode.seed)
        prompt = await self._turns.first(new, tools.schemas)
        ids, text = list(prompt.token_ids), prompt.text
        for number in range(self._settings.max_turns):
            room = self._sampling.max_tokens if self._limit is None else self._limit - len(ids)
            if room < max(1, self._sampling.min_tokens):
                if not played.num_turns:
                    raise EnvironmentFailed(
                        f"the first messages have {len(ids)} tokens, and an episode may have {self._limit} "
                        "(environment.max_tokens, or what the engine takes): there is no room for an answer"
                    )
                played.ended = "no room"
                break
            began = time.time()
            params = self._sampling.model_copy(update={"max_tokens": min(room, self._sampling.max_tokens)})
            request, completion = await self._ask(episode, number, ids, new, params, text)
            message = self._writer.message(Answered(request, completion), has_tools=bool(tools.schemas))
            spans.turn(number, began, about, new, ids, completion, message)
            played.num_turns, played.num_tokens = number + 1, played.num_tokens + len(completion.token_ids)
            ids += completion.token_ids
            if completion.finish_reason == "length":
                played.ended = "length"
                break
            answers, is_done = await self._answers(place, tools, message, spans, number)
            if self._offer.has_turn_reward:
                spans.turn_reward(number, await place.call("turn_reward"))
            if is_done or answers is None:
                played.ended = "done"
                break
            new = answers
            prompt = await self._turns.behind(completion.token_ids, new)
            ids, text = [*ids, *prompt.token_ids], prompt.text
        else:
            played.ended = "max turns"
        is_cut = played.ended != "done"
        reward = 0.0 if is_cut and self._settings.truncated == "zero" else await place.call("reward")
        played.reward = spans.reward(reward, played.ended)
        if self._settings.episodic_memory:
            spans.memory(await place.call("save_memory"))
        try:
            await place.call("close")
        except EnvironmentFailed as error:  # the episode is over, and what it earned is known
            log.warning("episode %s: %s", episode.rollout_id[:12], error)
            await place.give_up()

    async def _answers(
        self, place: Place, tools: EpisodeTools, message: dict[str, Any], spans: _Spans, number: int
    ) -> tuple[list[dict[str, Any]] | None, bool]:
        """What follows the model's message, and whether the episode is over."""
        calls = message.get("tool_calls")
        if calls and self._offer.has_call_tools:
            began = time.time()
            following = await place.call("call_tools", {**message, "content": message["content"] or ""})
            said = {each.get("tool_call_id"): each["content"] for each in following or () if each["role"] == "tool"}
            for call in calls:
                found = {"text": said.get(call["id"], ""), "is_error": False}
                spans.tool(number, began, call["function"]["name"], call["function"]["arguments"], found)
            return (None, True) if following is None else (self._in_known_roles(following), False)
        if calls:
            answers = []
            for call in calls:
                began = time.time()
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                found = await tools.call(name, arguments)
                spans.tool(number, began, name, arguments, found)
                answers.append((call, found["text"]))
                if found["done"]:
                    return None, True
            return self._answered(answers), False
        if not self._offer.has_step:
            return None, True
        following = await place.call("step", {**message, "content": message["content"] or ""})
        return following, following is None

    def _answered(self, answers: Sequence[tuple[Mapping[str, Any], str]]) -> list[dict[str, Any]]:
        """What tools answered to calls, as messages: one for each, or one of the user's."""
        if self._settings.tool_role == "user":
            return [{"role": "user", "content": "\n".join(text for _, text in answers)}]
        return [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}
            for call, text in answers
        ]

    def _in_known_roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages of an environment, of which those of tools are the user's where the template knows no other."""
        if self._settings.tool_role == "tool":
            return messages
        return [
            {"role": "user", "content": message["content"]} if message["role"] == "tool" else message
            for message in messages
        ]

    async def _ask(
        self,
        episode: Episode,
        number: int,
        ids: list[int],
        new: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        text: str,
    ) -> tuple[Request, Completion]:
        """An answer of the model. Raises Fatal where there is none for good."""
        ends = [] if params.ignore_eos else self._ends
        named = {"episode": episode.rollout_id, "turn": number, "token_ids": ids, "ends": ends}
        identity = identities_of(self._model.content_id, params, self._known_ids).of(named, 0)
        extras = {"episode": episode.rollout_id, "turn": number}
        sample = Sample(identity, [dict(one) for one in new], list(ids), 0, None, extras, [], list(ends))
        [found] = decode_completions_blob(await self._demand.complete(sample, params))
        if found.error is not None:
            raise EnvironmentFailed(f"the model gave no answer in turn {number + 1}: {found.error}")
        completion = Completion(
            str(found.id), found.token_ids, found.logprobs, found.text, cast(FinishReason, found.finish_reason)
        )
        request = request_of(sample, params)
        return replace(request, prompt_text=text), completion

    async def _end(self, attempt: Attempt, played: Played, problem: str | None) -> bool:
        """Store what an attempt did, then that it is over; False where another one superseded it."""
        if problem is not None:
            _Spans(attempt, played.spans).failure(problem)
        await self._store.add_many_spans(played.spans)
        update = AttemptUpdate(
            rollout_id=attempt.rollout_id,
            attempt_id=attempt.attempt_id,
            status="succeeded" if problem is None else "failed",
        )
        [ended] = await self._store.update_many_attempts([update], fenced=True)
        return not isinstance(ended, Conflict)

    def close(self) -> None:
        """Tokenise nothing more."""
        self._turns.close()


class _Spans:
    """Records what an attempt does, as the spans of an agent that did the same."""

    def __init__(self, attempt: Attempt, spans: list[Span]) -> None:
        self._attempt, self._spans = attempt, spans

    def _add(self, name: str, attributes: dict[str, Any], began: float, problem: str | None = None) -> None:
        failed = None if problem is None else TraceStatus(status_code="ERROR", description=problem)
        place = len(self._spans) + 1
        trace = content_id("episode-trace/1", [self._attempt.rollout_id, self._attempt.attempt_id])
        self._spans.append(
            Span.from_attributes(
                rollout_id=self._attempt.rollout_id,
                attempt_id=self._attempt.attempt_id,
                sequence_id=place,
                trace_id=trace[:32],
                span_id=f"{place:016x}",
                name=name,
                attributes=attributes,
                start_time=began,
                end_time=time.time(),
                status=failed,
            )
        )

    def turn(
        self,
        number: int,
        began: float,
        about: Mapping[str, Any],
        new: Sequence[Mapping[str, Any]],
        prompt_ids: Sequence[int],
        completion: Completion,
        message: Mapping[str, Any],
    ) -> None:
        """An answer of the model, to ``new`` messages behind those of the turn before."""
        keys, choice = LlmCallAttributes, f"{LlmCallAttributes.CHOICES.value}.0."
        attributes = {
            **about,
            EPISODE_TURN: number,
            keys.INPUT_MESSAGES.value: _json(new),
            keys.OUTPUT_MESSAGES.value: _json([message]),
            keys.PROMPT_TOKEN_IDS.value: list(prompt_ids),
            choice + ChoiceAttributes.TOKEN_IDS.value: list(completion.token_ids),
            choice + ChoiceAttributes.LOGPROBS.value: [float(value) for value in completion.logprobs],
            choice + ChoiceAttributes.FINISH_REASON.value: completion.finish_reason,
        }
        self._add(LLM_CALL, attributes, began)

    def tool(self, number: int, began: float, name: str, arguments: str, found: Mapping[str, Any]) -> None:
        """A call of a tool."""
        keys = LightningSpanAttributes
        attributes = {
            EPISODE_TURN: number,
            keys.OPERATION_NAME.value: name,
            keys.OPERATION_INPUT.value: arguments,
            keys.OPERATION_OUTPUT.value: found["text"],
        }
        self._add(AGL_OPERATION, attributes, began, found["text"] if found["is_error"] else None)

    def turn_reward(self, number: int, given: float | None) -> None:
        """What a turn earned by itself, if anything was given for it."""
        if given is not None:
            self._add(AGL_ANNOTATION, {EPISODE_TURN: number, **_named_reward(0, TURN_REWARD, given)}, time.time())

    def reward(self, given: float | Mapping[str, float], ended: str) -> float:
        """What the episode earned: the sum of several, which are kept under their names; returns it."""
        parts = given if isinstance(given, Mapping) else {}
        total = sum(parts.values()) if parts else cast(float, given)
        attributes: dict[str, Any] = {ENDED: ended}
        for place, (name, value) in enumerate([(TOTAL if parts else REWARD, total), *parts.items()]):
            attributes |= _named_reward(place, name, value)
        self._add(AGL_ANNOTATION, attributes, time.time())
        return total

    def memory(self, note: str | None) -> None:
        """What the episode leaves for later ones, as JSON, if anything."""
        if note is not None:
            self._add(AGL_OBJECT, {EPISODE_MEMORY: note}, time.time())

    def failure(self, problem: str) -> None:
        """Why an attempt failed."""
        attributes = {"exception.type": EnvironmentFailed.__name__, "exception.message": problem}
        self._add(AGL_EXCEPTION, attributes, time.time(), problem)


def _named_reward(place: int, name: str, value: float) -> dict[str, Any]:
    prefix = f"{LightningSpanAttributes.REWARD.value}.{place}."
    return {prefix + RewardAttributes.REWARD_NAME.value: name, prefix + RewardAttributes.REWARD_VALUE.value: value}


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


async def play_episodes(
    store: LightningStore,
    objects: ObjectStore,
    engine: EngineOf,
    code: EnvironmentCode,
    settings: EnvironmentConfig,
    offer: Offer,
    sampling: SamplingParams,
    episodes: Sequence[Episode],
    *,
    metadata: Mapping[str, Any],
    retry_failed: bool,
    limit: int | None,
    base: Path,
    index_folder: Path,
    worker_id: str,
    options: BatchOptions,
    on_progress: Callable[[Progress], None],
    memory: str = NO_MEMORY,
) -> tuple[Tally, Work]:
    """Play episodes with the model of ``engine`` until each has ended, whether it succeeded or failed for good. What
    they came to is in the store. ``base``: the working folder of the paths that tools name; ``index_folder``: where
    indexes of corpora are kept; ``memory``: what they begin with, as JSON, where the environment has one. Raises what
    ends the engine or the store, and ConfigError where the environment cannot be loaded."""
    tally = Tally(len(episodes))

    def note(progress: Progress) -> None:
        on_progress(replace(progress, done=tally.done, total=tally.total))

    demand = OnDemand(store, objects, engine, worker_id=worker_id, options=options, on_progress=note)
    hosts = Hosts(code, settings, memory)
    resources = ToolResources(
        settings.tools, index_folder=index_folder, base=base, served=code.served, plugins=code.tool_plugins
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, resources.close)
        await asyncio.to_thread(resources.start)
        folder = stack.enter_context(scratch_folder("episodes"))
        await stack.enter_async_context(demand.running())
        stack.push_async_callback(hosts.close)
        player = Player(
            store, demand, hosts, offer, resources, folder, engine.model, settings, sampling,
            worker_id=worker_id, options=options, limit=limit,
        )  # fmt: skip
        stack.callback(player.close)
        await player.play(episodes, {**metadata, "kind": EPISODE_KIND}, tally, retry_failed=retry_failed)
    return tally, demand.work
