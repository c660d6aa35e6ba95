"""Samples and their completions, also as rows of JSONL blobs.

Every row is one line of JSON with sorted keys; log-probabilities are written as the shortest decimal that reads back to
the same float32. Equal samples give equal bytes, so a blob's content id stands for what was generated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from rollout_core.base.errors import ConfigError, Fatal, well_formed
from rollout_core.base.ids import ContentId, SampleIds, content_id, seed_of
from rollout_core.config import SamplingParams, identity
from rollout_core.data.datasets import PromptRow
from rollout_core.data.text import tokenize_prompts, with_own_bos
from rollout_core.data.turn_ends import turn_ends
from rollout_core.models.facts import known_ids as known_ids_of, max_positions
from rollout_core.models.pretrained import borrowed_tokenizer
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import PromptSet

FinishReason = Literal["stop", "length"]

TopLogprobs = Sequence[tuple[int, float]]
"""Tokens and their log-probabilities in nats, the most likely first; none that could not be drawn."""
TURNS, TURN_REWARDS = "turns", "turn_rewards"
"""Of the extras of an episode's samples where credit goes by turn: which turns its written parts are, from 0, and what
each turn of the whole episode earned by itself, null where nothing was given."""
_DUMP = orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY


@dataclass(slots=True)  # a frozen one takes six times as long to make, and a million are
class Completion:
    """One finished generation."""

    key: str
    token_ids: Sequence[int]
    """Includes the end-of-sequence token when one ended the completion."""
    logprobs: Sequence[float]
    """Log-probability of each token under the distribution it was drawn from (after temperature), nats."""
    text: str
    """Decoded completion without special tokens, the stop string or the stop token."""
    finish_reason: FinishReason
    top_logprobs: Sequence[TopLogprobs] = ()
    """For each token, where ``params.logprobs`` asks for them, the most likely ones under the same distribution."""
    written: Sequence[tuple[int, int]] | None = None
    """Parts of the tokens that the model wrote, from the first to one past the last; None: all. Between them stands
    what an agent's model was given in later turns, with log-probabilities of 0."""
    model_ids: Sequence[str] | None = None
    """Content ids of the weights that drew each of these parts, where they are not all the sample's."""
    usage: Sequence[int] | None = None
    """Tokens of prompt and completion as an endpoint counts them, where they are paid for by that."""
    greedy: bool | None = None
    """Of a continuation that was scored: whether greedy decoding writes the same. None: it was generated."""


@dataclass(frozen=True)
class Failure:
    """A request that cannot be completed; others are not affected."""

    key: str
    reason: str
    """One line for people."""
    passing: bool = False
    """Another try later may succeed (an overloaded endpoint); False where it never will (a prompt that is too long)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", well_formed(self.reason))


Outcome = Completion | Failure


@dataclass(slots=True)  # as above
class Sample:
    """One generation to make: a prompt, tokenised, under its identity."""

    id: ContentId
    prompt: Any
    """The text, or the list of chat messages."""
    prompt_token_ids: list[int]
    index: int
    """Tells repeated samples of one prompt apart."""
    row_id: str | None
    """The input row's own ``id``."""
    extras: dict[str, Any]
    """The input row's further keys."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """That the chat template shows to the model."""
    ends: list[int] = field(default_factory=list)
    """Tokens that end it in addition to the model's own ends: those by which the chat template ends a turn."""
    drawn_as: ContentId | None = None
    """The sample that this one draws again, from the same seed; see `draw_again`."""
    continuation: str = ""
    """A text that is given and is to be scored: nothing is generated. See `rollout_core.data.continuations`."""
    scored: int = 0
    """How many of the last ``prompt_token_ids`` are the continuation's; 0 where they are not known here, as of an
    endpoint without a tokenizer."""

    @property
    def seed(self) -> int:
        """Of its random numbers."""
        return seed_of(self.drawn_as or self.id)


@dataclass(frozen=True)
class SampledCompletion:
    """What was generated for a sample."""

    id: ContentId
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    """``stop``, ``length``, or ``error``."""
    error: str | None = None
    """Why there is no completion."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """The most likely tokens of each position and their log-probabilities, where they were asked for."""
    written: list[list[int]] | None = None
    """First token and one past the last of each part that the model wrote; None: it wrote all of them."""
    model_ids: list[str] | None = None
    """The weights that drew each of these parts, where they are not all the sample's."""
    usage: list[int] | None = None
    """Tokens of prompt and completion by an endpoint's count."""
    greedy: bool | None = None
    """As of `Completion`."""


def make_samples(
    tokenizer: Any,
    rows: Sequence[PromptRow],
    *,
    model: ContentId,
    params: SamplingParams,
    samples_per_prompt: int = 1,
    max_model_len: int | None = None,
    earlier: Sequence[PromptRow] = (),
    known_ids: int | None = None,
    ends: Sequence[int] = (),
) -> list[Sample]:
    """Give every prompt row its samples: tokenised, identified and checked against the context length.

    Equal prompts are numbered by the count of their occurrences before, ``earlier`` rows included; so the ids do not
    depend on how a file is cut into shards. ``known_ids`` and ``ends`` are those of the model's folder
    (`ends_of`). Raises ConfigError naming prompts that leave no room for a completion.
    """
    token_ids = tokenize_prompts(tokenizer, rows)
    if max_model_len is not None:
        refuse_long_prompts(token_ids, params.max_tokens, max_model_len)
    occurrences = occurrences_of(map(_prompt_key, rows), map(_prompt_key, earlier))
    identities, own_bos = identities_of(model, params, known_ids), with_own_bos(tokenizer, rows)
    return identify(
        rows, token_ids, occurrences, identities, samples_per_prompt=samples_per_prompt, own_bos=own_bos, ends=ends
    )


def occurrences_of(keys: Iterable[Hashable], earlier: Iterable[Hashable] = ()) -> list[int]:
    """How often each key stands before its place, in ``earlier`` too."""
    seen, found = Counter(earlier), []
    for key in keys:
        found.append(seen[key])
        seen[key] += 1
    return found


def samples_of_model(
    folder: Path,
    rows: Sequence[PromptRow],
    first: int,
    *,
    model: ContentId,
    params: SamplingParams,
    samples_per_prompt: int,
    max_model_len: int | None = None,
) -> list[Sample]:
    """`make_samples` of the rows from place ``first`` on, for the model in a folder; those before it only count.
    Without ``max_model_len`` the model's own context is the limit."""
    drawn = rows[first:]
    with borrowed_tokenizer(folder) as tokenizer:
        return make_samples(
            tokenizer,
            drawn,
            model=model,
            params=params,
            samples_per_prompt=samples_per_prompt,
            max_model_len=max_model_len or max_positions(folder),
            earlier=rows[:first],
            known_ids=known_ids_of(folder, tokenizer),
            ends=ends_of(folder, tokenizer, drawn, params),
        )


def untokenised_samples(
    rows: Sequence[PromptRow], *, model: ContentId, params: SamplingParams, samples_per_prompt: int
) -> list[Sample]:
    """`make_samples` for a model whose tokenizer is elsewhere, as at an endpoint."""
    occurrences, identities = occurrences_of(map(_prompt_key, rows)), identities_of(model, params, None)
    return identify(rows, [[] for _ in rows], occurrences, identities, samples_per_prompt=samples_per_prompt)


def ends_of(folder: Path, tokenizer: Any, rows: Sequence[PromptRow], params: SamplingParams) -> list[int]:
    """Tokens that end the conversations among the rows in addition to the ends of the model in a folder."""
    if params.ignore_eos or all(row.messages is None for row in rows):
        return []
    return turn_ends(folder, tokenizer)


def identities_of(model: ContentId, params: SamplingParams, known_ids: int | None) -> SampleIds:
    """Ids of samples of a model. Where its vocabulary is padded, what is drawn depends on ``known_ids``, too."""
    return SampleIds(model, params if known_ids is None else {**identity(params), "known_ids": known_ids})


def identify(
    rows: Sequence[PromptRow],
    token_ids: Sequence[list[int]],
    occurrences: Sequence[int],
    identities: SampleIds,
    *,
    samples_per_prompt: int,
    own_bos: Set[int] = frozenset(),
    ends: Sequence[int] = (),
) -> list[Sample]:
    """``samples_per_prompt`` samples of each row, whose prompt occurred so many times before; ``own_bos`` is that of
    `with_own_bos`, ``ends`` are the conversations'."""
    samples = []
    for place, (row, ids, occurrence) in enumerate(zip(rows, token_ids, occurrences, strict=True)):
        prompt, named = prompt_of(row), identified(row)
        if place in own_bos:  # stores may hold samples of the same text behind two BOS tokens, made by earlier versions
            named = {"prompt": prompt, "bos": "once"}
        own_ends = [] if row.messages is None else list(ends)
        if own_ends:
            named = {"messages": prompt, "tools": list(row.tools or ()), "ends": own_ends}
        for index in range(occurrence * samples_per_prompt, (occurrence + 1) * samples_per_prompt):
            samples.append(
                Sample(
                    identities.of(named, index),
                    prompt,
                    ids,
                    index,
                    row.id,
                    row.extras,
                    list(row.tools or ()),
                    own_ends,
                )
            )
    return samples


def draw_again(samples: Iterable[Sample], drawing: str) -> list[Sample]:
    """The same samples under ids of a ``drawing``, which the store has no completions of: they are generated again.

    Seeds stay, so an engine that computes as the one before draws the same tokens.
    """
    return [
        replace(sample, id=content_id("drawing/1", [sample.id, drawing]), drawn_as=sample.drawn_as or sample.id)
        for sample in samples
    ]


def prompt_of(row: PromptRow) -> Any:
    """The text of a row, or its messages, as its samples have them."""
    if row.prompt is not None:
        return row.prompt
    documents = [message.document() for message in row.messages or ()]
    return [{key: value for key, value in document.items() if key != "weight"} for document in documents]


def identified(row: PromptRow) -> Any:
    """What of a row makes its samples: the prompt, and the tools that its template shows to the model."""
    return prompt_of(row) if row.tools is None else {"messages": prompt_of(row), "tools": list(row.tools)}


def _prompt_key(row: PromptRow) -> str | bytes:
    return row.prompt if row.prompt is not None else orjson.dumps(identified(row), option=orjson.OPT_SORT_KEYS)


def refuse_long_prompts(token_ids: Sequence[Sequence[int]], max_tokens: int, max_model_len: int) -> None:
    """Raise ConfigError where a prompt leaves no room for ``max_tokens`` of completion, naming the first and the number
    of the others."""
    problems = [length_problem(len(ids), max_tokens, max_model_len) for ids in token_ids]
    long = [number for number, problem in enumerate(problems, start=1) if problem]
    if long:
        more = f" (and {len(long) - 1} more)" if len(long) > 1 else ""
        raise ConfigError(f"prompt {long[0]}{more}: {problems[long[0] - 1]}")


def length_problem(prompt_tokens: int, max_tokens: int, max_model_len: int | None) -> str | None:
    """Why a prompt of so many tokens cannot be completed, if so."""
    if max_model_len is None or prompt_tokens + max_tokens <= max_model_len:
        return None
    return (
        f"{prompt_tokens} tokens + sampling.max_tokens {max_tokens} exceed the model's context of {max_model_len} "
        "tokens; shorten the prompt or lower sampling.max_tokens"
    )


def file_samples(objects: ObjectStore, samples: Sequence[Sample], model: ContentId) -> PromptSet:
    """Store samples that ``model`` is to complete."""
    return PromptSet(
        samples=objects.put_bytes(encode_samples(samples)),
        model=model,
        num_samples=len(samples),
        num_prompt_tokens=sum(len(sample.prompt_token_ids) for sample in samples),
    )


def encode_samples(samples: Iterable[Sample]) -> bytes:
    """One line a sample."""
    names = [field.name for field in fields(Sample)]
    lines = []
    for sample in samples:
        line = {name: getattr(sample, name) for name in names}
        for name in ("tools", "ends", "drawn_as", "continuation", "scored"):
            if not line[name]:
                del line[name]
        lines.append(orjson.dumps(line, option=_DUMP))
    return b"".join(lines)


def decode_samples(data: bytes) -> list[Sample]:
    """Inverse of `encode_samples`."""
    return [Sample(**{**row, "id": ContentId(row["id"])}) for row in map(orjson.loads, data.splitlines())]


def encode_completion(completion: Completion) -> bytes:
    """One line; the key becomes ``id``. Raises Fatal for a log-probability that is not finite: JSON has none such."""
    logprobs = np.asarray(completion.logprobs, dtype=np.float32)
    row: dict[str, Any] = {
        "id": completion.key,
        "token_ids": completion.token_ids,
        "logprobs": logprobs,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }
    if completion.top_logprobs:
        row["top_logprobs"] = [[(token, np.float32(p)) for token, p in top] for top in completion.top_logprobs]
    if completion.written is not None:
        row["written"] = completion.written
    if completion.model_ids is not None:
        row["model_ids"] = completion.model_ids
    if completion.usage is not None:
        row["usage"] = completion.usage
    if completion.greedy is not None:
        row["greedy"] = completion.greedy
    line = orjson.dumps(row, option=_DUMP)
    # NaN and infinities are written as null, which is quicker to look for than they are.
    if b"null" in line and not np.isfinite(logprobs).all():
        raise Fatal(
            f"sample {completion.key[:12]} has log-probabilities that are not finite; the model's weights are broken, "
            "or dtype overflows: look at the training that made them, or choose another backend.dtype"
        )
    return line


def encode_failure(failure: Failure) -> bytes:
    """One line instead of a completion."""
    row = {
        "id": failure.key,
        "token_ids": [],
        "logprobs": [],
        "text": "",
        "finish_reason": "error",
        "error": failure.reason,
    }
    return orjson.dumps(row, option=_DUMP)


def usage_in(line: bytes) -> list[int] | None:
    """The `usage` of an encoded completion; None where it has none."""
    return orjson.loads(line).get("usage") if b'"usage":[' in line else None


def decode_completions_blob(data: bytes) -> list[SampledCompletion]:
    """Rows of a completions blob, in order."""
    return [SampledCompletion(**{**row, "id": ContentId(row["id"])}) for row in map(orjson.loads, data.splitlines())]
