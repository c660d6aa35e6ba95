"""Results of stages: small frozen records that carry content ids and counts, stored as JSON.

A record holds no wall-clock time, host name or run id: equal inputs give equal records, so that a record's own content
id can stand for the stage's outcome. Fields typed `BlobId` or `TreeId` name what the record needs in object storage; a
cached record counts only while all of that is still there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from rollout_core.base.ids import ContentId

BlobId = Annotated[ContentId, "blob"]
TreeId = Annotated[ContentId, "tree"]
SnapshotId = Annotated[ContentId, "snapshot"]


class Record(BaseModel):
    """Base of every stage result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def is_final(self) -> bool:
        """False where computing the stage again may do better; such a result counts for its own run only."""
        return True

    def references(self) -> Iterator[tuple[Literal["blob", "tree", "snapshot"], ContentId]]:
        """What of the object store this record stands on."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            for kind in ("blob", "tree", "snapshot"):
                if kind in field.metadata and value is not None:
                    yield kind, value

    def outputs(self) -> tuple[ContentId, ...]:
        """Content ids whose origin this record explains."""
        return tuple(content_id for _, content_id in self.references())


class Model(Record):
    """A model folder in Hugging Face format, in the object store."""

    model: TreeId
    num_parameters: int | None = None


class Dataset(Record):
    """A JSONL file in the object store, in canonical form."""

    data: BlobId
    num_rows: int


class PromptSet(Record):
    """Samples to generate, tokenised, and enqueued in the store as rollouts of the same ids."""

    samples: BlobId
    """JSONL, a row a sample: id, prompt or messages, prompt_token_ids, index, extras."""
    model: ContentId
    num_samples: int
    num_prompt_tokens: int


class Completions(Record):
    """What the engine generated for a `PromptSet`, in its order."""

    completions: BlobId
    """JSONL, a row a sample: id, token_ids, logprobs, text, finish_reason."""
    samples: BlobId
    model: ContentId
    num_samples: int
    num_tokens: int
    finish_reasons: dict[str, int]
    num_left_out: int = 0
    """Samples of the prompt set that failed, or were to be compared with one that did."""


class PromptShards(Record):
    """A prompt set of any size, cut into shards of rows."""

    index: BlobId
    """JSON: ids of the shards, in order, and their numbers of rows."""
    num_rows: int
    shard_size: int
    num_chats: int
    """Rows that are conversations."""


class ShardCompletions(Record):
    """What became of the samples of one shard, in its order."""

    completions: BlobId
    """JSONL, a row a sample: id, token_ids, logprobs, text, finish_reason; error, where it failed."""
    rows: BlobId
    """The shard."""
    model: ContentId
    num_samples: int
    num_failed: int
    num_passing: int
    """Of those failed, the ones that another run tries again."""
    num_prompt_tokens: int
    num_tokens: int
    finish_reasons: dict[str, int]
    lengths: tuple[int, ...]
    """Completions by length, in buckets of equal width from 1 to ``max_tokens``."""
    first_failure: str | None = None
    """Why the first failed sample did."""

    @property
    def is_final(self) -> bool:
        return not self.num_passing


class Scores(Record):
    """A reward for each completion, in order."""

    scores: BlobId
    """JSON list of floats."""
    completions: BlobId
    num_samples: int
    mean: float
    std: float
    num_left_out: int = 0
    """Samples that were to be scored and have no completion."""
    rollouts: BlobId | None = None
    """JSON list: for each sample the number of the rollout it is part of; None where each is one by itself."""
    group_size: int = 1
    """Where ``rollouts`` are told, so many whose numbers follow each other are compared with each other."""


class Experience(Record):
    """Token-level samples of stored rollouts with their rewards, as the updates of PPO and GRPO take them."""

    samples: BlobId
    completions: BlobId
    scores: BlobId
    rollouts: BlobId
    """JSON list: for each sample the number of the rollout it is part of."""
    group_size: int
    """So many rollouts whose numbers follow each other are of one task."""
    num_samples: int
    num_truncated: int
    """Cut at the length limit."""
    left_out: dict[str, int]
    """Rollouts by why nothing is learnt from them."""
    mean: float
    std: float

    def as_scores(self) -> Scores:
        """The rewards by themselves."""
        return Scores(
            scores=self.scores,
            completions=self.completions,
            num_samples=self.num_samples,
            mean=self.mean,
            std=self.std,
            rollouts=self.rollouts,
            group_size=self.group_size,
        )


class Checkpoint(Record):
    """A trained model and the state from which its training continues."""

    model: TreeId
    train_state: SnapshotId
    metrics: BlobId
    """JSONL, a row an optimizer step."""
    algorithm: str
    step: int
    summary: dict[str, float]
    """The last figures, by the names practitioners know."""
    data_report: Annotated[ContentId | None, "blob"] = None
    """JSON: what became of the rows of the data set, where there was one."""


class SnapshotRecord(Record):
    """A train state, verified and labelled for people."""

    snapshot: SnapshotId
    model: TreeId
    label: str
    step: int
    size_bytes: int


class EvalReport(Record):
    """Held-out reward of a model."""

    model: ContentId
    completions: BlobId
    samples: BlobId
    scores: BlobId
    num_samples: int
    mean_reward: float
    num_tokens: int
