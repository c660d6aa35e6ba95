"""Automatic prompt optimization: a beam search over one prompt template, in which a critic reads what agents did with a
template, an editor rewrites it, and tasks decide which rewritings stay (after arXiv:2305.03495).

The search itself, up to the messages that are sent and the answers that are read, is free of I/O and of chance that is
not seeded: `placeholders`, `critic_messages`, `editor_messages`, `read_template`, `children_of`, `keep_best`. The class
`APO` runs it by a store's rollouts and an OpenAI-compatible endpoint.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import re
import statistics
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
from openai import AsyncOpenAI

from rollout_core.agents.adapters.chat_messages import OpenAIMessages, TraceToMessages
from rollout_core.agents.adapters.ended import earned_reward
from rollout_core.agents.algorithm import (
    AGENT_KIND,
    Algorithm,
    Dataset,
    PatientStore,
    enqueue_once,
    retrying,
    set_aside,
    wait_until_finished,
)
from rollout_core.base.errors import ConfigError, Recoverable, in_words
from rollout_core.base.ids import content_id
from rollout_core.base.templates import variables_of
from rollout_core.config import TemplateSource
from rollout_core.inference.endpoint import PASSING_STATUSES
from rollout_core.store import EnqueueRolloutRequest, PromptTemplate, RolloutMode, Span

logger = logging.getLogger(__name__)

ChatMessages = list[dict[str, str]]

_SHOWN_CHARACTERS = 4_000
"""Of each rollout, what a critic gets to read."""
_FIRST_WAIT_SECONDS = 0.5

_CRITIC = """\
You review prompt templates for a program that works on tasks with a language model. You get the template that was used,
and for some tasks what was said and the reward that the outcome earned (higher is better). Find out what in the wording
of the template made good outcomes good and bad ones bad. Answer with a short list of concrete faults and of changes
that would raise the reward on tasks of this kind, not only on those shown. Do not write the new template."""
_EDITOR = """\
You rewrite prompt templates. You get a template, notes on its faults, and the names of its placeholders. Write a better
template that follows the notes. Keep every placeholder exactly as it is written, use no other, and solve no particular
task in the template. Answer with the whole new template between <template> and </template>."""


class MalformedAnswer(ValueError):
    """An editor's answer that is no usable template. The message is for the editor to read."""


# The search


@dataclass(frozen=True)
class Candidate:
    """A template in the search."""

    number: int
    """In order of their making; the seed is 0."""
    template: PromptTemplate
    parent: int | None = None
    score: float = -math.inf
    """Mean reward on the tasks of the last evaluation; none before the first."""

    @property
    def name(self) -> str:
        """For logs."""
        return f"v{self.number}"


@dataclass(frozen=True)
class Experience:
    """What one rollout did with a template."""

    reward: float | None
    status: str
    conversations: Sequence[OpenAIMessages] = ()


def placeholders(template: PromptTemplate) -> frozenset[str]:
    """Names of the values that a template asks for. Raises ConfigError for one that cannot be read."""
    if template.engine == "poml":
        raise ConfigError("templates of the engine poml cannot be optimized; give an f-string or a jinja template")
    try:
        if template.engine == "jinja":
            return variables_of(template.template)
        fields = [name for _, name, _, _ in string.Formatter().parse(template.template) if name is not None]
    except Exception as error:
        raise ConfigError(f"the template cannot be read: {in_words(error)}") from error
    return frozenset(fields)


def read_source(source: TemplateSource, base: Path) -> PromptTemplate:
    """The template of a configuration. Raises ConfigError for one that is missing, cannot be read, or is empty."""
    text = source.text
    if text is None:
        path = base / str(source.path)
        try:
            text = path.read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the template {path} cannot be read: {in_words(error)}; expected a text file") from error
        if not text.strip():
            raise ConfigError(f"the template {path} is empty")
    template = PromptTemplate(template=text, engine=source.engine)
    placeholders(template)
    return template


def critic_messages(template: PromptTemplate, experiences: Sequence[Experience]) -> ChatMessages:
    """What the critic is asked."""
    parts = [f"The template ({template.engine}):\n<template>\n{template.template}\n</template>"]
    for number, item in enumerate(experiences, start=1):
        said = "\n".join(
            json.dumps(message, ensure_ascii=False) for talk in item.conversations for message in talk["messages"]
        )
        shown = said if len(said) <= _SHOWN_CHARACTERS else f"{said[:_SHOWN_CHARACTERS]} [cut]"
        reward = "none" if item.reward is None else f"{item.reward:g}"
        parts.append(f"Task {number}: {item.status}, reward {reward}\n{shown or '[nothing was said]'}")
    return [{"role": "system", "content": _CRITIC}, {"role": "user", "content": "\n\n".join(parts)}]


def editor_messages(template: PromptTemplate, critique: str) -> ChatMessages:
    """What the editor is asked."""
    names = ", ".join(sorted(placeholders(template))) or "none"
    text = (
        f"The template ({template.engine}):\n<template>\n{template.template}\n</template>\n\n"
        f"Its placeholders: {names}\n\nNotes:\n{critique}"
    )
    return [{"role": "system", "content": _EDITOR}, {"role": "user", "content": text}]


def read_template(answer: str, seed: PromptTemplate) -> PromptTemplate:
    """The template in an editor's answer. Raises MalformedAnswer for one that is missing, cannot be rendered, or has
    other placeholders than ``seed``."""
    found = re.findall(r"<template>\n?(.*?)\n?</template>", answer, re.DOTALL)
    if len(found) != 1 or not found[0].strip():
        raise MalformedAnswer(
            f"The answer has {len(found)} templates; write one, which is not empty, between <template> and </template>."
        )
    template = seed.model_copy(update={"template": found[0]})
    wanted = placeholders(seed)
    try:
        given = placeholders(template)
        template.format(**dict.fromkeys(wanted, "x"))
    except ConfigError as error:
        raise MalformedAnswer(f"The template cannot be used: {error}.") from error
    if given != wanted:
        raise MalformedAnswer(
            f"The template has the placeholders {sorted(given)}; it must have exactly {sorted(wanted)}."
        )
    return template


def keep_best(candidates: Sequence[Candidate], beam_width: int) -> list[Candidate]:
    """The candidates with the highest scores, of equal ones the older; of equal templates the oldest alone."""
    return sorted(different(candidates), key=lambda item: (-item.score, item.number))[:beam_width]


def different(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of equal templates the oldest alone; in the order given."""
    oldest = {item.template.template: item.number for item in sorted(candidates, key=lambda item: -item.number)}
    return [item for item in candidates if oldest[item.template.template] == item.number]


class Beam:
    """The templates that a search continues with, the best first, and how many it has made."""

    def __init__(self, seed: PromptTemplate, width: int, branch_factor: int) -> None:
        self.candidates = [Candidate(0, seed)]
        self._width, self._branch_factor = width, branch_factor
        self._num_made = 1

    @property
    def best(self) -> Candidate:
        """Of the last round."""
        return self.candidates[0]

    def parents(self) -> list[Candidate]:
        """The parent of each child of a round: all of the beam in turn, so that also one that is not full yet has
        ``beam_width * branch_factor`` children."""
        beam = self.candidates
        return [beam[place % len(beam)] for place in range(self._width) for _ in range(self._branch_factor)]

    def children(self, written: Sequence[PromptTemplate | None]) -> list[Candidate]:
        """What was made of each of ``parents``, numbered; those that gave nothing have no child."""
        pairs = [(parent, text) for parent, text in zip(self.parents(), written, strict=True) if text is not None]
        made = [Candidate(number, text, parent.number) for number, (parent, text) in enumerate(pairs, self._num_made)]
        self._num_made += len(made)
        return made

    def keep(self, judged: Sequence[Candidate]) -> None:
        """The best of them are the beam of the next round."""
        self.candidates = keep_best(judged, self._width)


@dataclass(frozen=True)
class PromptWriter:
    """A critic and an editor behind an OpenAI-compatible endpoint."""

    client: AsyncOpenAI
    critic: str
    editor: str
    temperature: float = 1.0
    max_asks: int = 3
    """How often an answer that cannot be used, or a call that fails, is asked for again."""
    name: str = "apo"
    """For logs, which never show a template."""

    async def critique(
        self, template: PromptTemplate, experiences: Sequence[Experience], draw: random.Random
    ) -> str | None:
        """What the critic finds wrong with a template; None where its answers are empty. Raises as `ask`."""
        for asked in range(self.max_asks):
            critique = await self.ask(self.critic, critic_messages(template, experiences), draw.randrange(2**31))
            if critique.strip():
                return critique
            logger.warning("%s: answer %d of the critic is empty", self.name, asked + 1)
        return None

    async def edit(self, template: PromptTemplate, critique: str, draw: random.Random) -> PromptTemplate | None:
        """A rewriting of a template; None where the editor gave none that can be used. Raises as `ask`."""
        messages = editor_messages(template, critique)
        for asked in range(self.max_asks):
            answer = await self.ask(self.editor, messages, draw.randrange(2**31))
            try:
                return read_template(answer, template)
            except MalformedAnswer as error:
                logger.warning("%s: answer %d of the editor is refused", self.name, asked + 1)
                reply = {"role": "user", "content": f"{error} Write the whole template again."}
                messages = [*messages, {"role": "assistant", "content": answer}, reply]
        return None

    async def ask(self, model: str, messages: ChatMessages, seed: int) -> str:
        """What a model answers. Raises Recoverable after ``max_asks`` failing calls, and what is wrong with the call
        itself at once."""
        for tried in range(1, self.max_asks + 1):
            try:
                answer = await self.client.chat.completions.create(
                    model=model,
                    messages=messages,  # pyright: ignore[reportArgumentType] - roles as plain text
                    temperature=self.temperature,
                    seed=seed,
                )
                return _text_of(answer)
            except (openai.APIError, json.JSONDecodeError, _NoCompletion) as error:
                status = error.status_code if isinstance(error, openai.APIStatusError) else 500
                if status < 500 and status not in PASSING_STATUSES:
                    raise
                logger.warning("%s: call %d of %s failed: %s", self.name, tried, model, type(error).__name__)
                if tried == self.max_asks:
                    raise Recoverable(f"{model} did not answer in {tried} calls: {in_words(error)}") from error
                await asyncio.sleep(_FIRST_WAIT_SECONDS * 2 ** (tried - 1))
        raise AssertionError("the last failing call raises")


class _NoCompletion(Exception):
    """A success without a completion, as gateways send it."""


def _text_of(answer: Any) -> str:
    """Raises _NoCompletion: the client checks nothing of what it hands on."""
    try:
        return (answer.choices[0].message.content or "") if answer.choices != [] else ""
    except (AttributeError, IndexError, KeyError, TypeError):
        raise _NoCompletion("its answer is no chat completion") from None


# By rollouts and an endpoint


@dataclass(frozen=True)
class SearchRound:
    """What a round has come to."""

    number: int
    """From 1; 0 is the seed's evaluation."""
    beam: Sequence[Candidate]
    best: Candidate
    """Of all so far, with its score on all validation tasks."""


@dataclass
class _Run:
    """A search under way."""

    resource: str
    train: Dataset
    val: Dataset
    best: Candidate | None = None
    rounds: list[SearchRound] = field(default_factory=list)


class APO(Algorithm):
    """Beam search for a better prompt template among the initial resources.

    ``Trainer(algorithm=APO(AsyncOpenAI()), initial_resources={"prompt": PromptTemplate(...)}).fit(agent, tasks,
    val_dataset=held_out)``; then ``get_best_prompt()``. A run that is started again with the same store runs no
    finished rollout again as long as the endpoint answers the same.

    Args:
        async_openai_client: any OpenAI-compatible chat endpoint.
        gradient_model: the critic's name there.
        apply_edit_model: the editor's.
        diversity_temperature: with which both write.
        gradient_batch_size: training tasks that a critique is made from.
        val_batch_size: validation tasks that a round's candidates are compared on.
        beam_width: templates that a round leaves.
        branch_factor: children of each.
        beam_rounds: rounds.
        rollout_batch_timeout: seconds that the rollouts of a template may take; later ones are cancelled.
        run_initial_validation: let the seed work on all validation tasks first, as the one to beat. Otherwise the
            first round's best template counts as better.
        timeout_seconds: longest time of an attempt; None: no limit but that of its template.
        max_attempts: of a task whose attempts fail, run out of time, or whose runner dies.
        missing_reward: what a rollout without a reward, such as a failed one, counts.
        max_asks: how often an answer that cannot be used, or a call that fails, is asked for again.
        seed: what tasks and candidates are drawn by; also sent with each call, for endpoints that heed it.
        name: of the run, see ``PolicyOptions``.
    """

    def __init__(
        self,
        async_openai_client: AsyncOpenAI,
        *,
        gradient_model: str = "gpt-5-mini",
        apply_edit_model: str = "gpt-4.1-mini",
        diversity_temperature: float = 1.0,
        gradient_batch_size: int = 4,
        val_batch_size: int = 16,
        beam_width: int = 4,
        branch_factor: int = 4,
        beam_rounds: int = 3,
        rollout_batch_timeout: float = 3600.0,
        timeout_seconds: float | None = 600.0,
        max_attempts: int = 3,
        run_initial_validation: bool = True,
        missing_reward: float = 0.0,
        max_asks: int = 3,
        seed: int = 0,
        name: str = "apo",
    ) -> None:
        counts = {
            "gradient_batch_size": gradient_batch_size,
            "val_batch_size": val_batch_size,
            "beam_width": beam_width,
            "branch_factor": branch_factor,
            "beam_rounds": beam_rounds,
            "max_asks": max_asks,
        }
        if wrong := [f"{key} is {value}" for key, value in counts.items() if value < 1]:
            raise ConfigError(f"{', '.join(wrong)}; expected 1 or more")
        if rollout_batch_timeout <= 0:
            raise ConfigError(f"rollout_batch_timeout is {rollout_batch_timeout}; expected seconds above 0")
        self._writer = PromptWriter(
            async_openai_client, gradient_model, apply_edit_model, diversity_temperature, max_asks, name
        )
        self._gradient_batch_size, self._val_batch_size = gradient_batch_size, val_batch_size
        self._beam_width, self._branch_factor, self._beam_rounds = beam_width, branch_factor, beam_rounds
        self._timeout = rollout_batch_timeout
        self._config = retrying(timeout_seconds, max_attempts)
        self._run_initial_validation = run_initial_validation
        self._missing_reward = missing_reward
        self._seed, self._name = seed, name
        self._last: _Run | None = None

    def get_best_prompt(self) -> PromptTemplate:
        """The template with the highest mean reward on all validation tasks. Raises ConfigError before there is one."""
        if self._last is None or self._last.best is None:
            raise ConfigError("no template has been evaluated yet; run the algorithm by Trainer.fit first")
        return self._last.best.template

    @property
    def history(self) -> list[SearchRound]:
        """What each round has come to."""
        return [] if self._last is None else self._last.rounds

    def get_seed_prompt_template(self) -> tuple[str, PromptTemplate]:
        """Name and value of the template to start from. Raises ConfigError unless there is exactly one."""
        resources = self.get_initial_resources() or {}
        found = [(name, item) for name, item in resources.items() if isinstance(item, PromptTemplate)]
        if len(found) != 1:
            raise ConfigError(
                f"the initial resources have {len(found)} prompt templates; expected the one to be optimized"
            )
        placeholders(found[0][1])
        return found[0]

    async def run(self, train_dataset: Dataset | None = None, val_dataset: Dataset | None = None) -> None:
        name, seed = self.get_seed_prompt_template()
        if not train_dataset or not val_dataset:
            raise ConfigError("APO needs tasks to criticize by and others to judge by; give train_dataset, val_dataset")
        await set_aside(self.get_store(), self._name)
        run = self._last = _Run(name, train_dataset, val_dataset)
        beam = Beam(seed, self._beam_width, self._branch_factor)
        if self._run_initial_validation:
            run.best = await self._evaluated(run, beam.best, range(len(val_dataset)), "initial")
            run.rounds.append(SearchRound(0, beam.candidates, run.best))
            logger.info("%s: the seed has mean reward %.4f", self._name, run.best.score)
        for number in range(1, self._beam_rounds + 1):
            written = await asyncio.gather(
                *(self._rewritten(run, parent, number, place) for place, parent in enumerate(beam.parents()))
            )
            children = beam.children(written)
            places = self._draw("validation", number).sample(
                range(len(val_dataset)), min(self._val_batch_size, len(val_dataset))
            )
            judged = await asyncio.gather(
                *(self._evaluated(run, item, places, f"round {number}") for item in [*beam.candidates, *children])
            )
            beam.keep(judged)
            leader = await self._evaluated(run, beam.best, range(len(val_dataset)), "best")
            if run.best is None or leader.score > run.best.score:
                run.best = leader
            run.rounds.append(SearchRound(number, beam.candidates, run.best))
            logger.info(
                "%s, round %d of %d: %d new templates, best %s with mean reward %.4f",
                self._name,
                number,
                self._beam_rounds,
                len(children),
                run.best.name,
                run.best.score,
            )
        assert run.best is not None, "there was a round"
        await self._publish(run, run.best.template)

    def _draw(self, *parts: Any) -> random.Random:
        return random.Random(content_id("apo-draw/1", [self._seed, *parts]))

    async def _rewritten(self, run: _Run, parent: Candidate, number: int, place: int) -> PromptTemplate | None:
        """A rewriting of a template; None where the editor gave none that can be used."""
        draw = self._draw("gradient", number, place)
        places = draw.sample(range(len(run.train)), min(self._gradient_batch_size, len(run.train)))
        tasks = [run.train[chosen] for chosen in places]
        experiences = await self._experiences(run, parent.template, tasks, "train", [number, place])
        critique = await self._writer.critique(parent.template, experiences, draw)
        if critique is None:
            return None
        rewritten = await self._writer.edit(parent.template, critique, draw)
        if rewritten is None:
            logger.warning(
                "%s: no usable rewriting of %s in %d answers", self._name, parent.name, self._writer.max_asks
            )
        return rewritten

    async def _evaluated(self, run: _Run, item: Candidate, places: Sequence[int], label: str) -> Candidate:
        """The candidate with its mean reward on those validation tasks. No task is run twice with a template."""
        tasks = [run.val[place] for place in places]
        found = await self._experiences(run, item.template, tasks, "val", list(places))
        rewards = [self._missing_reward if each.reward is None else each.reward for each in found]
        score = statistics.fmean(rewards)
        logger.info("%s, %s: %s has mean reward %.4f on %d tasks", self._name, label, item.name, score, len(rewards))
        return replace(item, score=score)

    async def _publish(self, run: _Run, template: PromptTemplate) -> str:
        others = {key: item for key, item in (self.get_initial_resources() or {}).items() if key != run.resource}
        name = content_id("apo-resources/1", [self._name, template.engine, template.template])
        resources = {run.resource: template, **others}
        return (await self.get_store().update_resources(f"{self._name}-{name.short}", resources)).resources_id

    async def _experiences(
        self, run: _Run, template: PromptTemplate, tasks: Sequence[Any], mode: RolloutMode, drawn: Sequence[int]
    ) -> list[Experience]:
        """What agents do with a template. Training tasks are run anew for each critique, whose place is ``drawn``;
        validation tasks once, by their places."""
        store, resources_id = PatientStore(self.get_store()), await self._publish(run, template)
        keys = [[*drawn, place] for place in range(len(tasks))] if mode == "train" else [[place] for place in drawn]
        made_from = [self._name, self._seed, template.engine, template.template, mode]
        requests = [
            EnqueueRolloutRequest(
                rollout_id=content_id("apo-rollout/1", [*made_from, *key, task]),
                input=task,
                mode=mode,
                resources_id=resources_id,
                config=self._config,
                metadata={"kind": AGENT_KIND, "run": self._name},
            )
            for key, task in zip(keys, tasks, strict=True)
        ]
        ids = await enqueue_once(store, requests)
        finished = await wait_until_finished(store, ids, self._timeout)
        in_time = {rollout.rollout_id for rollout in finished}
        # One that ends just now keeps its status, and counts.
        late = await store.cancel_rollouts([rollout_id for rollout_id in ids if rollout_id not in in_time])
        if cancelled := sum(rollout.status == "cancelled" for rollout in late):
            logger.warning("%s: %d of %d rollouts took too long and were cancelled", self._name, cancelled, len(ids))
        if (proxy := self.get_llm_proxy()) is not None:
            await proxy.flush()
        spans: dict[str, list[Span]] = {}
        for span in await store.query_many_spans(ids):
            spans.setdefault(span.rollout_id, []).append(span)
        status = {rollout.rollout_id: rollout.status for rollout in [*finished, *late]}
        adapter = self._adapter if isinstance(self._adapter, TraceToMessages) else TraceToMessages()
        return [
            Experience(
                earned_reward(status[rollout_id], spans.get(rollout_id, [])),
                status[rollout_id],
                adapter.adapt(spans.get(rollout_id, [])),
            )
            for rollout_id in ids
        ]
