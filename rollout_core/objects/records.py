"""Results of stages, small frozen records that carry content ids and counts, stored as JSON.

A record holds no wall-clock time, host name or run id: equal inputs give equal records, so that a record's own content
id can stand for the stage's outcome. Fields typed `BlobId` or `TreeId` name what the record needs in object storage; a
cached record counts only while all of that is still there, but for what is known not to be stored (`unstored`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from rollout_core.base.ids import ContentId

BlobId = Annotated[ContentId, "blob"]
TreeId = Annotated[ContentId, "tree"]
SnapshotId = Annotated[ContentId, "snapshot"]
RecordT = TypeVar("RecordT", bound="Record")


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

    def part(self, kind: type[RecordT]) -> RecordT:
        """A record of ``kind`` with its fields from this one."""
        return kind.model_validate(self.model_dump(include=set(kind.model_fields)))


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
    """The outcome of the samples of one shard, in its order."""

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


def _counts_of_nothing(record: Scores | EvalReport) -> set[str]:
    return {name for name in ("num_abstained", "num_reward_failed") if not getattr(record, name)}


class Scores(Record):
    """A reward for each completion, in order."""

    scores: BlobId
    """JSON list of floats; ``null`` for a completion without a score."""
    completions: BlobId
    num_samples: int
    mean: float
    """Of those that have a score; ``std``, too."""
    std: float
    num_left_out: int = 0
    """Samples that were to be scored and have no completion."""
    num_abstained: int = 0
    """Completions without a score: the reward abstained."""
    num_reward_failed: int = 0
    """Completions without a score: the reward failed on them."""
    rollouts: BlobId | None = None
    """JSON list: for each sample the number of the rollout it is part of; None where each is one by itself."""
    group_size: int = 1
    """Where ``rollouts`` are given, so many whose numbers follow each other are compared with each other."""
    parts: BlobId | None = None
    """JSON: ``names`` and ``weights`` of a composite reward's parts and, a row a sample, their ``values``."""
    judged: BlobId | None = None
    """JSON: what judges said of each completion, and what their answers took."""

    def cache_identity(self) -> Any:
        """Without ``parts`` where there are none, nor counts of nothing: updates kept before there were any are
        found. Nor with what judges said, and took, besides the scores."""
        without = {"judged"} | ({"parts"} if self.parts is None else set())
        return self.model_dump(mode="json", exclude=_counts_of_nothing(self) | without)


class SelectedGroups(Record):
    """Groups of completions that are learned from, out of all that an iteration drew."""

    scores: BlobId
    """As of `Scores`."""
    completions: BlobId
    samples: BlobId
    num_samples: int
    num_groups: int
    """Groups whose rewards differ, of all that were drawn; those that were not wanted are counted, too."""
    num_drawn: int
    """Groups that were drawn."""
    mean: float
    std: float
    mean_drawn: float
    """Mean reward of all that were drawn; that of the groups kept says little of the policy."""
    num_left_out: int = 0
    """Samples that were to be scored and have no completion."""
    num_abstained: int = 0
    """Of all that were drawn, as of `Scores`; ``num_reward_failed``, too."""
    num_reward_failed: int = 0
    parts: BlobId | None = None
    """As of `Scores`."""

    def as_scores(self) -> Scores:
        """What an update takes."""
        return self.part(Scores)


class AgentSource(Record):
    """An agent's code as it was read."""

    id: ContentId
    """What attempts depend on: the agent's name and code, wherever the files lay."""
    function: str
    code: BlobId
    """The files, as `UserCode.document`."""

    def cache_identity(self) -> Any:
        """The code, not the folder that it was read in."""
        return self.id


class AgentPrompt(Record):
    """A prompt template that an agent gets as a resource."""

    name: str
    """Of the resource."""
    engine: Literal["f-string", "jinja"]
    """Syntax of the template."""
    text: BlobId


class EnvironmentSource(Record):
    """An environment's code as it was read."""

    id: ContentId
    """What episodes depend on: the name and the code, wherever the files lay."""
    path: str
    code: BlobId
    """The files, as `UserCode.document` or `PluginCode.document`."""
    adapted: dict[str, Any] | None = None
    """Of an environment of another project, or a plugin: versions or files, and settings, of which `id` is made. None:
    a user's own code."""
    served: dict[str, dict[str, Any]] | None = None
    """What the MCP servers of its tools had, which is part of `id`. None: there are none."""
    tool_plugins: dict[str, BlobId] = {}
    """Plugins that give tools, by name: the files of each, as `PluginCode.document`."""

    def cache_identity(self) -> Any:
        """The code, not the folder that it was read in."""
        return self.id


class AgentTasks(Record):
    """Tasks as rollouts of the store, for an agent to work on."""

    rollouts: BlobId
    """A line of JSON each: its id and the task; those of one task side by side."""
    model: ContentId
    """Whose answers the agent gets."""
    num_tasks: int
    num_rollouts: int


class AgentRollouts(Record):
    """The outcome of rollouts, frozen: their ended attempts with the content of their spans."""

    rollouts: BlobId
    """A line of JSON each, see `rollout_core.agents.adapters.ended.EndedRollout`."""
    model: ContentId
    num_rollouts: int
    num_spans: int
    statuses: dict[str, int]
    """Rollouts by status."""
    num_rewards: int
    """Rollouts that succeeded with a finite reward."""
    mean_reward: float
    """Of all; one without a reward counts as 0."""


class EpisodicMemory(Record):
    """What an environment remembers, with what the episodes of an iteration left."""

    memory: SnapshotId
    """Of kind ``episodic_memory``."""
    num_notes: int
    """Episodes that left something."""
    size_bytes: int


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
        return self.part(Scores)


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
    """JSON: the rows of the data set by outcome, where there was one."""
    advantages: ContentId | None = None
    """`rollout_core.data.advantage_rows` of what it learned from, where there are any. They are for people to look at:
    nothing stands on them, so that an update of an earlier version and the same one made again have the same
    outcome."""

    def cache_identity(self) -> Any:
        """What stages that are given it depend on."""
        return self.model_dump(exclude={"advantages"})


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
    """As of `Scores`."""
    num_samples: int
    mean_reward: float
    """Of those that have a score."""
    num_tokens: int
    num_abstained: int = 0
    """Completions without a score: the reward abstained."""
    num_reward_failed: int = 0
    """Completions without a score: the reward failed on them."""
    judged: BlobId | None = None
    """As of `Scores`."""

    def cache_identity(self) -> Any:
        """Without counts of nothing: what was kept before there were any is found. Nor with what judges said."""
        return self.model_dump(mode="json", exclude=_counts_of_nothing(self) | {"judged"})


class Divergence(Record):
    """How far the new model's distribution is from a rival's on its own held-out completions.

    Means over their tokens, nats a token, as of `rollout_core.algorithms.divergence.MeanKL`; None where the two do not
    read the same token ids, for the reason that ``problem`` gives.
    """

    model: ContentId
    rival: ContentId
    num_tokens: int
    num_completions: int
    exact: float | None = None
    k1: float | None = None
    k3: float | None = None
    problem: str | None = None
