"""Episodes for tests: a model that says what a function of the conversation gives, token by token, and a place where
its episodes are played."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from rollout_core.agents.adapters.ended import EndedRollout, ended_rollouts, look_up
from rollout_core.agents.adapters.span_samples import adapt_ended
from rollout_core.base.ids import content_id
from rollout_core.config import SamplingParams
from rollout_core.config.environments import AnyEnvironment, PluginEnvironment, PythonEnvironment
from rollout_core.data.samples import Completion
from rollout_core.data.turn_ends import all_ends
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.episodes import Episode, Tally, play_episodes
from rollout_core.environments.hosts import NO_MEMORY, Offer, look_at
from rollout_core.inference.backend import ModelRef, Request
from rollout_core.inference.batch import BatchOptions, Work
from rollout_core.inference.lanes import Lanes
from rollout_core.inference.training_samples import TokenSample
from rollout_core.models.pretrained import load_tokenizer
from rollout_core.objects import ObjectStore
from rollout_core.store import SqlLightningStore
from rollout_core.store.types import RolloutMode

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}<|endoftext|>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PARAMS = SamplingParams(max_tokens=128)
Policy = Callable[[str, int], str]
"""What the model says after a text, with a seed."""


class ActingEngine:
    """A backend that says what ``policy`` gives, as the tokenizer has it, and ends its turn unless it is cut."""

    batch_invariant = True
    max_model_len: int | None = None

    def __init__(self, model: ModelRef, policy: Policy) -> None:
        self.model_id, self._policy = model.content_id, policy
        self._tokenizer = load_tokenizer(model.folder)
        [self._end] = all_ends(model.folder, self._tokenizer)
        self.asked: Counter[str] = Counter()
        """Requests by key."""
        self.answers: dict[tuple[int, ...], list[int]] = {}
        """Token ids of the last answer to each prompt."""

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        waiting = iter(requests)
        while group := list(takewhile(bool, waiting)):
            for request in group:
                assert request is not None
                self.asked[request.key] += 1
                text = self._policy(self._tokenizer.decode(request.prompt_token_ids), request.seed)
                ids = [*self._tokenizer.encode(text), self._end]
                is_cut = len(ids) > request.params.max_tokens
                ids = ids[: request.params.max_tokens]
                self.answers[tuple(request.prompt_token_ids)] = ids
                said = self._tokenizer.decode(ids if is_cut else ids[:-1])
                yield Completion(request.key, ids, [-0.5] * len(ids), said, "length" if is_cut else "stop")

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Engine:
    """What `play_episodes` is given."""

    model: ModelRef
    backend: ActingEngine

    def __post_init__(self) -> None:
        self.model_id, self.batch_invariant = self.model.content_id, True
        self._lanes = Lanes(self.backend)  # type: ignore[arg-type]

    def open(self) -> Any:
        return nullcontext(self._lanes)


@dataclass
class Scene:
    """A folder with an environment, in which episodes are played."""

    folder: Path
    model: ModelRef
    objects: ObjectStore
    works: list[Work] = field(default_factory=list)
    """Of each `play`."""

    def write(self, code: str) -> None:
        """The environment's file."""
        (self.folder / "env.py").write_text(textwrap.dedent(code))

    def engine(self, policy: Policy) -> ActingEngine:
        return ActingEngine(self.model, policy)

    async def play(
        self,
        backend: ActingEngine,
        rows: Sequence[dict[str, Any]],
        *,
        group: int = 1,
        sampling: SamplingParams = PARAMS,
        retry_failed: bool = False,
        worker: str = "w",
        looked_at: bool = True,
        mode: RolloutMode = "train",
        plugin: str | None = None,
        environment: AnyEnvironment | None = None,
        memory: str = NO_MEMORY,
        **settings: Any,
    ) -> Tally:
        """What came of episodes of these rows, ``group`` of each, in the environment of the file, of a ``plugin`` or
        that is given. Unless it is ``looked_at``, no object is made before, and the environment has a step and no
        tools."""
        if environment is None and plugin is None:
            environment = PythonEnvironment(path="env.py:Env", **settings)
        elif environment is None:
            environment = PluginEnvironment(kind="plugin", name=plugin, **settings)
        code = await asyncio.to_thread(EnvironmentCode.of, environment, self.folder)
        async with SqlLightningStore.from_url(self.database) as store:
            tally, work = await play_episodes(
                store,
                self.objects,
                Engine(self.model, backend),  # type: ignore[arg-type]
                code,
                environment,
                look_at(code, environment) if looked_at else Offer([], True),
                sampling,
                self.episodes(rows, group),
                metadata={},
                retry_failed=retry_failed,
                limit=None,
                base=self.folder,
                index_folder=self.folder / "search",
                worker_id=worker,
                options=BatchOptions(mode=mode, deterministic=False, exclusive=False, generator="g", wait_seconds=0.05),
                on_progress=lambda progress: None,
                memory=memory,
            )
        self.works.append(work)
        return tally

    @property
    def database(self) -> str:
        return f"sqlite:///{self.folder / 'store.db'}"

    @staticmethod
    def episodes(rows: Sequence[dict[str, Any]], group: int = 1) -> list[Episode]:
        return [Episode(content_id("episode/1", [row, n]), row) for row in rows for n in range(group)]

    async def ended(self, rows: Sequence[dict[str, Any]], group: int = 1) -> list[EndedRollout]:
        """How the episodes of rows ended."""
        ids = [episode.rollout_id for episode in self.episodes(rows, group)]
        async with SqlLightningStore.from_url(self.database) as store:
            return ended_rollouts(self.objects, await look_up(store, self.objects, ids, self.model.content_id))

    async def num_failed(self, row: dict[str, Any]) -> int:
        """Attempts at the first episode of a row that failed."""
        [episode] = self.episodes([row])
        async with SqlLightningStore.from_url(self.database) as store:
            attempts = await store.query_attempts(episode.rollout_id)
        return sum(attempt.status == "failed" for attempt in attempts)

    async def samples(self, rows: Sequence[dict[str, Any]], group: int = 1) -> list[TokenSample]:
        """What is learned from them."""
        async with SqlLightningStore.from_url(self.database) as store:
            ended = await self.ended(rows, group)
            return (await adapt_ended(store, self.objects, ended, form="trajectory")).samples

    async def spans(self, row: dict[str, Any]) -> list[Any]:
        """Of the latest attempt at the first episode of a row."""
        [episode] = self.episodes([row])
        async with SqlLightningStore.from_url(self.database) as store:
            return list(await store.query_spans(episode.rollout_id, attempt_id="latest"))


def called(name: str, **arguments: Any) -> str:
    """A call of a tool as models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
