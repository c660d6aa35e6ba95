"""Chat completions in OpenAI's form, each of which is a sample of the ledger: what asks for them, and is killed, gets
the same answers again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from rollout_core.base.ids import ContentId, SampleIds, canonical_json
from rollout_core.config import AnyBackend, EndpointModel, SamplingParams
from rollout_core.data.samples import (
    Completion,
    FinishReason,
    Sample,
    SampledCompletion,
    decode_completions_blob,
    identities_of,
)
from rollout_core.data.turn_ends import turn_ends
from rollout_core.inference.backend import ModelRef, Request, unsupported
from rollout_core.inference.batch import request_of
from rollout_core.inference.chat_api import NO_ROOM, Answered, ApiError, Ask, Writer, read_ask
from rollout_core.inference.on_demand import OnDemand
from rollout_core.inference.served_engine import Encoder, Tokenized
from rollout_core.models.bounded.tokenizing import Chat
from rollout_core.models.facts import known_ids, max_positions
from rollout_core.models.pretrained import load_tokenizer

LONGEST_ANSWER = 2048
"""Tokens of an answer of an endpoint, where nobody says how long one may be."""
TOKEN_CHARACTERS = 4
"""About, of a token."""
_THOUGHT = "<think>"


@dataclass(frozen=True)
class Asker:
    """Who asks: the same question of another one is another sample."""

    task: str
    sample_id: str
    epoch: int
    role: str | None = None
    """Of the model that is asked; None is the one that is evaluated."""

    @property
    def row_id(self) -> str:
        """Of the question that it is about."""
        return f"{self.task}/{self.sample_id}"


@dataclass(frozen=True)
class KeptAnswer:
    """An answer that was given."""

    asker: Asker
    sample: Sample
    line: bytes
    """Of a completions blob."""
    completion: SampledCompletion
    """What the line holds."""

    @property
    def num_tokens(self) -> int:
        """By the endpoint's count where its tokens have no ids here."""
        return len(self.completion.token_ids) or (self.completion.usage or (0, 0))[1]


class KeptChat:
    """A model that answers chats through the ledger; in one event loop, inside `OnDemand.running`.

    Args:
        demand: completes samples of the model.
        backend: what answers; of a model at an endpoint nothing is tokenised here.
        limit: longest sequence, in tokens, where the backend has a limit of its own.
    """

    def __init__(self, demand: OnDemand, model: ModelRef, backend: AnyBackend, *, limit: int | None) -> None:
        self._demand, self._model, self._backend = demand, model, backend
        self._is_here = not isinstance(backend, EndpointModel)
        self._tokenizer: Any = load_tokenizer(model.folder) if self._is_here else None
        self._limit = (limit or max_positions(model.folder)) if self._is_here else None
        self._known_ids = known_ids(model.folder, self._tokenizer) if self._is_here else None
        self._ends: Sequence[int] = turn_ends(model.folder, self._tokenizer) if self._is_here else ()
        self._writer = Writer(self._tokenizer, "model", parses_tools=self._is_here)
        self._encoder = Encoder()
        self._asked: Counter[bytes] = Counter()
        self._firsts: dict[int, int] = {}
        """By number of the question, how often the same was asked before."""
        self._answers: dict[ContentId, KeptAnswer] = {}
        self.num_without_room = 0
        """Questions that left no room for an answer."""

    @property
    def answers(self) -> Collection[KeptAnswer]:
        """All that were given."""
        return self._answers.values()

    async def answer(self, asker: Asker, body: Mapping[str, Any], *, number: int) -> dict[str, Any]:
        """The answer to a request's JSON. A question that is asked again as its answer came too late has the ``number``
        that it had, and the same answer; else one that was asked before draws anew.

        Raises ApiError where it cannot be answered, and as `OnDemand.complete`.
        """
        ask = read_ask(body, is_chat=True, sampling=None, vocab_size=0)
        chat = cast(Chat, ask.prompts[0])
        for name, reason in () if isinstance(self._backend, EndpointModel) else unsupported(ask.params, self._backend):
            raise ApiError(400, f"{name}: {reason}", name, "unsupported_parameter")
        prompt, params = await self._prompt(ask, chat)
        samples = self._samples(ask, chat, prompt, params, asker, number)
        answered = await asyncio.gather(*(self._complete(sample, params, asker) for sample in samples))
        return self._written(ask, answered, prompt)

    async def _prompt(self, ask: Ask, chat: Chat) -> tuple[Tokenized, SamplingParams]:
        if self._is_here:
            prompt = await self._encoder.encode(self._tokenizer, chat)
            try:
                params = ask.params_of(len(prompt.token_ids), self._limit, None)
            except ApiError as error:
                self.num_without_room += error.code == NO_ROOM
                raise
        elif ask.wants_logprobs:
            raise ApiError(400, "log-probabilities are not kept of a model at an endpoint", "logprobs")
        elif ask.has_tools:
            reason = "tools are not sent to a model at an endpoint; evaluate its files, or leave the task out"
            raise ApiError(400, reason, "tools", "unsupported_parameter")
        else:
            prompt = Tokenized("", [])
            params = ask.params.model_copy(update={"max_tokens": ask.max_tokens or LONGEST_ANSWER})
        # A seed of the request's makes its draws others, and equal requests draw differently with it, too.
        return prompt, params.model_copy(update={"seed": ask.seed})

    def _samples(
        self, ask: Ask, chat: Chat, prompt: Tokenized, params: SamplingParams, asker: Asker, number: int
    ) -> list[Sample]:
        ends = [] if params.ignore_eos else list(self._ends)
        named = {
            "messages": list(chat.messages),
            "tools": list(chat.tools),
            "ends": ends,
            "asked_by": [asker.role, asker.task, asker.sample_id, asker.epoch],
        }
        identities = identities_of(self._model.content_id, params, self._known_ids)
        if number not in self._firsts:
            self._firsts[number] = self._next(identities, named, ask.count)
        first = self._firsts[number]
        extras = {"task": asker.task, "sample_id": asker.sample_id, "epoch": asker.epoch}
        return [
            Sample(
                identities.of(named, index),
                list(chat.messages),
                list(prompt.token_ids),
                index,
                asker.row_id,
                extras,
                [dict(tool) for tool in chat.tools],
                ends,
            )
            for index in range(first, first + ask.count)
        ]

    def _next(self, identities: SampleIds, named: Any, count: int) -> int:
        """How often the same was asked before by the same asker."""
        key = canonical_json([named, identities.of(named, 0)])
        first = self._asked[key]
        self._asked[key] += count
        return first

    async def _complete(
        self, sample: Sample, params: SamplingParams, asker: Asker
    ) -> tuple[Request, SampledCompletion]:
        line = await self._demand.complete(sample, params)
        [found] = decode_completions_blob(line)
        if found.error is not None:
            raise ApiError(400, found.error)
        self._answers[sample.id] = KeptAnswer(asker, sample, line, found)
        return request_of(sample, params), found

    def _written(
        self, ask: Ask, answered: Sequence[tuple[Request, SampledCompletion]], prompt: Tokenized
    ) -> dict[str, Any]:
        pairs = [Answered(replace(request, prompt_text=prompt.text), _completion(found)) for request, found in answered]
        answer = self._writer.answer(ask, pairs, "chatcmpl-kept", 0)
        if prompt.text.rstrip().endswith(_THOUGHT):  # the template began the thought, so the text lacks its beginning
            for choice in answer["choices"]:
                if "</think>" in (text := choice["message"]["content"] or ""):
                    choice["message"]["content"] = f"{_THOUGHT}{text}"
        usages = [found.usage for _, found in answered if found.usage is not None]
        if usages:
            asked, given = usages[0][0], sum(usage[1] for usage in usages)
            answer["usage"] = {"prompt_tokens": asked, "completion_tokens": given, "total_tokens": asked + given}
        return answer

    def num_tokens(self, text: str) -> int:
        """Of a text; about, where the tokenizer is at an endpoint."""
        if self._tokenizer is None:
            return len(text) // TOKEN_CHARACTERS
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def close(self) -> None:
        """Tokenise nothing more."""
        self._encoder.close()


def _completion(found: SampledCompletion) -> Completion:
    return Completion(
        str(found.id),
        found.token_ids,
        found.logprobs,
        found.text,
        cast(FinishReason, found.finish_reason),
        found.top_logprobs or (),
    )
