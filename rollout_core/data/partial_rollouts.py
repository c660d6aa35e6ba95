"""Completions that are drawn in parts: each part by the weights of its iteration, behind all that stands already.

Partial rollouts as in Kimi k1.5 (arXiv:2501.12599, section 2.6.2) and APRIL (arXiv:2509.18521): a long completion is
cut at the end of an iteration and continues in the next. What is carried over is a blob, a line of JSON a completion,
those of a group side by side: the sample it began as, its tokens so far, and which weights drew which of them with
which log-probabilities. The next part's id, and so its seed, follows from these tokens.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import orjson

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, content_id
from rollout_core.config import SamplingParams, identity
from rollout_core.data.datasets import PromptRow, parse_rows
from rollout_core.data.samples import (
    Completion,
    FinishReason,
    Sample,
    SampledCompletion,
    TopLogprobs,
    decode_completions_blob,
    decode_samples,
    encode_completion,
    encode_samples,
    prompt_of,
)
from rollout_core.data.text import decode_completions, text_tokens
from rollout_core.models.pretrained import borrowed_tokenizer
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import lineage_of, maker_for, makers_of
from rollout_core.objects.records import Completions
from rollout_core.objects.retention.unstored import local_model

log = logging.getLogger(__name__)

_NO_STOPS = SamplingParams()
Decode = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], list[str]]
"""Texts of completions, from the tokens of their prompts and their own but an end of their turn."""


@dataclass
class Partial:
    """A completion as far as it is drawn."""

    sample: Sample
    """What it began as: the prompt alone."""
    begun: int
    """Iteration of its first part, from 0."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of each token under the weights that drew it, nats."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    written: list[list[int]] = field(default_factory=list)
    """First token and one past the last of each part that other weights drew than the part before."""
    model_ids: list[str] = field(default_factory=list)
    """The weights that drew each of these parts."""
    finish_reason: FinishReason | None = None
    """None: it continues."""
    text: str | None = None
    """None: not decoded yet."""

    def extend(self, drawn: SampledCompletion, model: ContentId, max_tokens: int) -> None:
        """Add what ``model`` drew behind what is there; at ``max_tokens`` in all it ends as ``length``."""
        start = len(self.token_ids)
        self.token_ids += drawn.token_ids
        self.logprobs += drawn.logprobs
        self.top_logprobs += drawn.top_logprobs or []
        end = len(self.token_ids)
        if self.model_ids[-1:] == [model]:
            self.written[-1][1] = end
        else:
            self.written.append([start, end])
            self.model_ids.append(str(model))
        if drawn.finish_reason == "stop":
            self.finish_reason = "stop"
        elif end >= max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and not start:
            self.text = drawn.text

    def next_part(self, model: ContentId, params: SamplingParams) -> Sample:
        """The sample that continues it."""
        sample = self.sample
        named = [sample.id, model, identity(params), self.token_ids]
        return Sample(
            id=content_id("continued-sample/1", named),
            prompt=sample.prompt,
            prompt_token_ids=[*sample.prompt_token_ids, *self.token_ids],
            index=sample.index,
            row_id=sample.row_id,
            extras=sample.extras,
            ends=sample.ends,
        )

    def line(self) -> bytes:
        """As a row of completions, of one that is finished."""
        assert self.finish_reason is not None and self.text is not None, "finished and decoded"
        return encode_completion(
            Completion(
                key=str(self.sample.id),
                token_ids=self.token_ids,
                logprobs=self.logprobs,
                text=self.text,
                finish_reason=self.finish_reason,
                top_logprobs=self.top_logprobs,
                written=[(start, end) for start, end in self.written],
                model_ids=self.model_ids,
            )
        )


def encode_carried(partials: Sequence[Partial]) -> bytes:
    """One line each; `decode_carried` reads them back."""
    options = orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    return b"".join(orjson.dumps(_row(partial), option=options) for partial in partials)


def _row(partial: Partial) -> dict[str, Any]:
    row = asdict(partial)
    if not row["sample"]["ends"]:
        del row["sample"]["ends"]
    return row


def decode_carried(data: bytes) -> list[Partial]:
    """Inverse of `encode_carried`."""
    rows = map(orjson.loads, data.splitlines())
    return [Partial(**{**row, "sample": _sample(row["sample"])}) for row in rows]


def _sample(row: dict[str, object]) -> Sample:
    return Sample(**{**row, "id": ContentId(row["id"])})  # pyright: ignore[reportArgumentType]


def unfinished(partials: Sequence[Partial]) -> list[Partial]:
    """Those that go on."""
    return [partial for partial in partials if partial.finish_reason is None]


@dataclass(frozen=True)
class Joined:
    """Groups that are whole, and those that go on; completions of a group side by side, the oldest groups first."""

    whole: list[Partial]
    carried: list[Partial]

    @property
    def samples(self) -> bytes:
        """Rows of the whole groups' samples."""
        return encode_samples(partial.sample for partial in self.whole)

    @property
    def completions(self) -> bytes:
        """Their rows of completions."""
        return b"".join(partial.line() for partial in self.whole)


def join_parts(
    carried: Sequence[Partial],
    samples: Sequence[Sample],
    drawn: Sequence[SampledCompletion],
    *,
    model: ContentId,
    number: int,
    group_size: int,
    max_tokens: int,
    decode: Decode,
) -> Joined:
    """Take in what ``model`` drew in iteration ``number`` for ``samples``: first the next parts of those of ``carried``
    that go on, in their order, then new samples. A group is whole once all its completions have ended."""
    waiting = unfinished(carried)
    fresh = [Partial(sample, number) for sample in samples[len(waiting) :]]
    for partial, part in zip([*waiting, *fresh], drawn, strict=True):
        partial.extend(part, model, max_tokens)
    ended = [partial for partial in (*carried, *fresh) if partial.finish_reason is not None and partial.text is None]
    if ended:
        completions = [text_tokens(partial.token_ids, _NO_STOPS, partial.sample.ends) for partial in ended]
        texts = decode([partial.sample.prompt_token_ids for partial in ended], completions)
        for partial, text in zip(ended, texts, strict=True):
            partial.text = text
    groups = list(_groups([*carried, *fresh], group_size))
    return Joined(
        whole=[partial for group in groups if not unfinished(group) for partial in group],
        carried=[partial for group in groups if unfinished(group) for partial in group],
    )


def _groups(partials: Sequence[Partial], size: int) -> Iterator[Sequence[Partial]]:
    return (partials[start : start + size] for start in range(0, len(partials), size))


class JoinedCompletions(Completions):
    """Completions of whole groups, each of which says which weights drew which of its tokens, and what is carried
    over. ``model`` is the weights that drew the last parts."""

    num_carried: int
    """Completions that go on."""
    num_groups_carried: int
    carried: Annotated[ContentId | None, "blob"] = None
    """Of groups that are not whole, as `encode_carried` writes them."""

    def as_completions(self) -> Completions:
        """What is scored and learned from."""
        return self.part(Completions)


def join_completions(
    objects: ObjectStore,
    completions: Completions,
    sampling: SamplingParams,
    *,
    carried: ContentId | None,
    number: int,
    group_size: int,
    models: Path,
) -> tuple[JoinedCompletions, dict[str, int]]:
    """File what iteration ``number`` drew, joined to what was carried into it; and figures of that for people.

    ``sampling`` is that of whole completions, ``models`` the local folder for fetched models."""
    with borrowed_tokenizer(local_model(objects, completions.model, models)) as tokenizer:
        joined = join_parts(
            [] if carried is None else decode_carried(objects.get_bytes(carried)),
            decode_samples(objects.get_bytes(completions.samples)),
            decode_completions_blob(objects.get_bytes(completions.completions)),
            model=completions.model,
            number=number,
            group_size=group_size,
            max_tokens=sampling.max_tokens,
            decode=lambda prompts, ids: decode_completions(
                tokenizer, prompts, [text_tokens(one, sampling) for one in ids]
            ),
        )
    filed = JoinedCompletions(
        completions=objects.put_bytes(joined.completions),
        samples=objects.put_bytes(joined.samples),
        model=completions.model,
        num_samples=len(joined.whole),
        num_tokens=sum(len(partial.token_ids) for partial in joined.whole),
        finish_reasons=dict(sorted(Counter(str(partial.finish_reason) for partial in joined.whole).items())),
        num_carried=len(unfinished(joined.carried)),
        num_groups_carried=len(joined.carried) // group_size,
        carried=objects.put_bytes(encode_carried(joined.carried)) if joined.carried else None,
    )
    return filed, {
        "whole completions": filed.num_samples,
        "of them drawn by several weights": sum(len(partial.model_ids) > 1 for partial in joined.whole),
        "completions that go on": filed.num_carried,
        "groups carried over": filed.num_groups_carried,
    }


@dataclass(frozen=True)
class Carried:
    """What an iteration left to the next."""

    number: int
    """Of the iteration, from 0."""
    partials: ContentId | None
    """Blob of `encode_carried`; None: all its groups were whole."""


def carried_over(objects: ObjectStore, train_state: ContentId, *, group_size: int) -> Carried:
    """What the iteration that left ``train_state`` carried over, for a run with groups of ``group_size``.

    It follows from the completions that were learned from, whose rows hold tokens and weights: samples are the same in
    runs that differ in their learning rate, and in an iteration that nothing was carried into they are those of its
    prompts. Raises ConfigError where what made these completions is not `join_completions`, or its groups are of
    another size.
    """
    update = lineage_of(objects, train_state)
    scores = None if update is None else update.inputs.get("scores")
    joined = None
    if update is not None and isinstance(scores, dict):
        completions = ContentId(scores["completions"])
        joined = maker_for(update, completions, makers_of(objects, completions))
    if joined is None or joined.stage != "join_completions":
        raise ConfigError(
            f"snapshot {train_state.short} was left by an iteration without partial_rollouts, or what that was made of "
            "is not on record any more, so nobody knows which iteration comes next and what continues in it; choose "
            "another snapshot, leave out partial_rollouts, or begin a run with its model as algorithm.base_model"
        )
    # Completions, samples, and what is carried over, as far as there is something.
    partials = joined.outputs[2] if len(joined.outputs) > 2 else None
    if partials is not None and joined.inputs["group_size"] != group_size:
        raise ConfigError(
            f"snapshot {train_state.short} has carried over groups of {joined.inputs['group_size']} completions, and "
            f"samples_per_prompt is {group_size}; take as many as then, or another snapshot"
        )
    if partials is not None and not objects.exists(partials):
        log.warning("what training state %s carried over is not stored any more", train_state.short)
        partials = None
    return Carried(int(joined.inputs["number"]), partials)


def resume_partial(
    objects: ObjectStore,
    train_state: ContentId,
    *,
    group_size: int,
    prompts: ContentId | None,
    warn: Callable[..., None] = log.warning,
) -> Carried:
    """`carried_over`, for a run with ``prompts``, where these are known.

    Two runs whose prompts differ may come to one state, as long as no group of those that do was whole. What the later
    one carried over is then all that is known, so that prompts which are not this run's are warned of.
    """
    carried = carried_over(objects, train_state, group_size=group_size)
    if carried.partials is None or prompts is None:
        return carried
    partials = decode_carried(objects.get_bytes(carried.partials))
    foreign = num_foreign(partials, parse_rows(objects.get_bytes(prompts), f"prompts {prompts.short}", PromptRow))
    if foreign:
        warn(
            "%d of %d completions carried over from training state %s have prompts that are not among this run's: "
            "these were changed since, or another run came to that state, too",
            foreign,
            len(partials),
            train_state.short,
        )
    return carried


def num_foreign(partials: Iterable[Partial], rows: Iterable[PromptRow]) -> int:
    """Completions whose prompts are not among ``rows``."""
    known = {_row_key(prompt_of(row), row.id, row.extras) for row in rows}
    samples = (partial.sample for partial in partials)
    return sum(_row_key(sample.prompt, sample.row_id, sample.extras) not in known for sample in samples)


def _row_key(*of_row: object) -> bytes:
    return orjson.dumps(of_row, option=orjson.OPT_SORT_KEYS)
