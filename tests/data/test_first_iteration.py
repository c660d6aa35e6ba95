"""Where a run's iterations begin: how many are done, and what is replayed or carried over from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, canonical_json, content_id, hash_bytes
from rollout_core.config import GRPOSettings
from rollout_core.data.datasets import PromptRow, to_jsonl
from rollout_core.data.first_iteration import FirstIteration, resume_iterations
from rollout_core.data.partial_rollouts import Partial, encode_carried, resume_partial
from rollout_core.data.replay import Buffer, Replayed, buffer_behind, replay_groups
from rollout_core.data.samples import Sample
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import Lineage, record_lineage
from rollout_core.objects.records import Scores
from rollout_core.objects.snapshots import FINISHED, SnapshotStore

MODEL = hash_bytes(b"weights")
ABOUT: dict[str, Any] = {"run_id": "run", "algorithm": "grpo"}


def settings(**changes: Any) -> GRPOSettings:
    fields = {"prompts": {"path": "x"}, "optimizer": {"lr": 1e-4}, "iterations": 3, "prompts_per_iteration": 4}
    more = {"samples_per_prompt": 2, "gradient_accumulation": 1, "minibatch_size": 4, **changes}
    return GRPOSettings.model_validate({**fields, **more})


def record(objects: ObjectStore, stage: str, inputs: dict[str, Any], outputs: Sequence[ContentId]) -> None:
    about = {"key": content_id(stage, inputs), "created_at": datetime.now(UTC), "software": {}}
    record_lineage(objects, Lineage(stage=stage, version=1, inputs=inputs, outputs=tuple(outputs), **about))


def state_of(objects: ObjectStore, folder: Path, step: int) -> ContentId:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights").write_bytes(b"trained")
    return SnapshotStore(objects).save(folder, kind="train_state", step=step, label=None, **ABOUT).id


def scored(objects: ObjectStore, number: int) -> tuple[Scores, ContentId]:
    """Two groups of two, as an iteration files them."""
    samples, completions = (
        objects.put_bytes(b"".join(b'{"%s":%d%d}\n' % (what, number, row) for row in range(4))) for what in (b"s", b"c")
    )
    values = objects.put_bytes(canonical_json([0.0, 1.0, None, 1.0]))
    known = {"num_samples": 4, "mean": 2 / 3, "std": 0.5, "num_abstained": 1}
    return Scores(scores=values, completions=completions, **known), samples


def replayed(objects: ObjectStore, number: int, buffer: ContentId | None) -> tuple[Replayed, list[int]]:
    options: Any = {"buffer": buffer, "number": number, "group_size": 2, "seed": 7}
    table = settings(replay={"groups": 1}).replaying
    assert table is not None
    return replay_groups(objects, *scored(objects, number), MODEL, table, **options, **ABOUT)


def test_an_iteration_is_filed_with_what_is_replayed_and_the_buffer_with_the_iteration(tmp_path: Path):
    objects = ObjectStore.from_url(str(tmp_path))
    first, ages = replayed(objects, 0, None)
    assert (first.num_samples, first.num_replayed, ages) == (4, 0, []), "there is nothing yet"
    second, ages = replayed(objects, 1, first.buffer)
    assert (second.num_samples, second.num_replayed, ages) == (6, 1, [1])
    fresh, samples = scored(objects, 1)
    assert objects.get_json(second.scores)[:4] == objects.get_json(fresh.scores)
    assert objects.get_bytes(second.samples).startswith(objects.get_bytes(samples))
    assert second.as_scores() == fresh.model_copy(
        update={name: getattr(second, name) for name in ("scores", "completions", "num_samples", "mean", "std")}
    )
    SnapshotStore(objects).restore(second.buffer, tmp_path / "after")
    assert [group.iteration for group in Buffer.read(tmp_path / "after").groups] == [0, 0, 1, 1]
    saved = SnapshotStore(objects).get(second.buffer)
    assert (saved.kind, saved.step, saved.label) == ("buffer", 2, FINISHED)
    assert json.loads(objects.get_bytes(second.replayed))["num_fresh"] == 4
    with pytest.raises(ConfigError, match="holds groups of 2 completions, and samples_per_prompt is 4"):
        table = settings(replay={"groups": 1}).replaying
        options: Any = {"buffer": first.buffer, "number": 1, "group_size": 4, "seed": 7}
        replay_groups(objects, *scored(objects, 1), MODEL, table, **options, **ABOUT)  # pyright: ignore[reportArgumentType]


def test_a_run_resumes_behind_whole_iterations_with_the_buffer_that_the_last_one_left(tmp_path: Path):
    objects = ObjectStore.from_url(str(tmp_path / "objects"))
    plain = settings()
    state = state_of(objects, tmp_path / "state", step=2 * plain.steps_per_iteration)
    model = SnapshotStore(objects).subtree(state, "model")
    assert resume_iterations(objects, state, plain, None) == FirstIteration(model, state, 2)
    with pytest.raises(ConfigError, match=r"has 2 iterations behind it; raise algorithm\.iterations above that"):
        resume_iterations(objects, state, settings(iterations=2), None)

    again = settings(replay={"groups": 1})
    unknown = resume_iterations(objects, state, again, None)
    assert unknown.buffer is None and buffer_behind(objects, state) is None
    assert [unknown.num_fresh(number, again) for number in (2, 3)] == [4, 3], "the buffer is empty before the third"
    mixed, _ = replayed(objects, 1, None)
    record(objects, "replay_groups", {"number": 1}, mixed.outputs())
    record(objects, "grpo_update", {"replayed": mixed.replayed}, [state])
    found = resume_iterations(objects, state, again, None)
    assert found.buffer == mixed.buffer and found.num_fresh(2, again) == 3
    assert FirstIteration(model).num_fresh(0, again) == 4


def test_a_run_resumes_with_what_was_carried_over_and_says_whose_prompts_it_does_not_know(tmp_path: Path):
    objects = ObjectStore.from_url(str(tmp_path / "objects"))
    rows = [Partial(Sample(hash_bytes(name.encode()), name, [7], 0, None, {}), 0, [1]) for name in "ab"]
    carried, completions = objects.put_bytes(encode_carried(rows)), hash_bytes(b"completions")
    state, samples = state_of(objects, tmp_path / "state", step=5), hash_bytes(b"samples")
    record(objects, "join_completions", {"number": 1, "group_size": 2}, [completions, samples, carried])
    record(objects, "grpo_update", {"samples": samples, "scores": {"completions": completions}}, [state])
    prompts = objects.put_bytes(to_jsonl([PromptRow(prompt="a")]))
    said: list[tuple[Any, ...]] = []

    def warn(*line: Any) -> None:
        said.append(line)

    cut = settings(sampling={"max_tokens": 60}, partial_rollouts={"max_tokens_per_iteration": 20})
    found = resume_iterations(objects, state, cut, prompts, warn)
    assert (found.number, found.carried) == (2, carried), "steps do not tell how many iterations there were"
    [(text, *figures)] = said
    assert figures == [1, 2, state.short] and "prompts that are not among this run's" in text
    assert resume_partial(objects, state, group_size=2, prompts=None, warn=warn).partials == carried
    assert len(said) == 1, "of prompts that are not known yet nothing is said"
