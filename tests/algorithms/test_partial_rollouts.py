"""Completions drawn in parts: ids, seeds, masks and weights against arithmetic by hand; what does not go with it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from pydantic import ValidationError

from rollout_core.algorithms.experience import Trajectory, build_batch, importance_weights
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, content_id, hash_bytes, seed_of
from rollout_core.config import (
    AgentGRPO,
    GRPOSettings,
    ImportanceCorrection,
    OnlineDPOSettings,
    PPOSettings,
    SamplingParams,
    identity,
)
from rollout_core.data.datasets import PromptRow
from rollout_core.data.partial_rollouts import (
    Carried,
    Joined,
    Partial,
    carried_over,
    decode_carried,
    encode_carried,
    join_parts,
    num_foreign,
    unfinished,
)
from rollout_core.data.samples import Sample, SampledCompletion, decode_completions_blob
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import Lineage, record_lineage

FIRST, SECOND, THIRD = (hash_bytes(name) for name in (b"first", b"second", b"third"))
PART = SamplingParams(max_tokens=2)


def sample(name: str) -> Sample:
    return Sample(hash_bytes(name.encode()), name, [7, 8], 0, f"row {name}", {"answer": name})


def drawn(of: Sample, tokens: list[int], finish: str = "length") -> SampledCompletion:
    return SampledCompletion(of.id, tokens, [-token / 10 for token in tokens], "engine's", finish)


def decode(prompts: Any, completions: Any) -> list[str]:
    assert prompts, "a tokenizer decodes no empty list"
    return [" ".join(map(str, tokens)) for tokens in completions]


def join(
    carried: list[Partial], rows: list[tuple[Sample, SampledCompletion]], model: ContentId, number: int, **more: int
) -> Joined:
    samples, completions = [row[0] for row in rows], [row[1] for row in rows]
    options = {"group_size": 2, "max_tokens": 6, **more}
    return join_parts(carried, samples, completions, model=model, number=number, decode=decode, **options)


def three_iterations() -> tuple[Joined, Joined, Joined]:
    """Two groups of two: b goes on twice and meets the limit, c ends in its second part."""
    a, b, c, d = map(sample, "abcd")
    one = join([], [(a, drawn(a, [1], "stop")), (b, drawn(b, [2, 3])), (c, drawn(c, [4, 5]))], FIRST, 0, group_size=1)
    assert [partial.sample.prompt for partial in one.whole] == ["a"], "a group of one is whole by itself"
    one = join([], [(a, drawn(a, [1], "stop")), (b, drawn(b, [2, 3]))], FIRST, 0)
    parts = [partial.next_part(SECOND, PART) for partial in unfinished(one.carried)]
    rows = [(parts[0], drawn(parts[0], [3, 1])), (c, drawn(c, [4, 5])), (d, drawn(d, [6], "stop"))]
    two = join(decode_carried(encode_carried(one.carried)), rows, SECOND, 1)
    parts = [partial.next_part(THIRD, PART) for partial in unfinished(two.carried)]
    rows = [(parts[0], drawn(parts[0], [9, 9])), (parts[1], drawn(parts[1], [5], "stop"))]
    return one, two, join(decode_carried(encode_carried(two.carried)), rows, THIRD, 2)


def test_groups_are_whole_once_all_their_completions_have_ended():
    one, two, three = three_iterations()
    assert not one.whole and not two.whole, "a waits for b, d for c"
    assert [partial.sample.prompt for partial in three.whole] == ["a", "b", "c", "d"] and not three.carried
    assert [partial.begun for partial in three.whole] == [0, 0, 1, 1]
    rows = decode_completions_blob(three.completions)
    assert [row.token_ids for row in rows] == [[1], [2, 3, 3, 1, 9, 9], [4, 5, 5], [6]]
    assert [row.finish_reason for row in rows] == ["stop", "length", "stop", "stop"]
    assert [row.text for row in rows] == ["engine's", "2 3 3 1 9 9", "4 5 5", "engine's"]
    assert [row.written for row in rows] == [[[0, 1]], [[0, 2], [2, 4], [4, 6]], [[0, 2], [2, 3]], [[0, 1]]]
    assert [row.model_ids for row in rows] == [[FIRST], [FIRST, SECOND, THIRD], [SECOND, THIRD], [SECOND]]
    samples = [orjson.loads(line) for line in three.samples.splitlines()]
    assert [row["prompt_token_ids"] for row in samples] == [[7, 8]] * 4
    assert [row["id"] for row in samples] == [row.id for row in rows] == [sample(name).id for name in "abcd"]


def test_the_next_part_is_named_by_all_that_stands_before_it():
    one, _, _ = three_iterations()
    [partial] = unfinished(one.carried)
    part = partial.next_part(SECOND, PART)
    named = [sample("b").id, SECOND, identity(PART), [2, 3]]
    assert part.id == content_id("continued-sample/1", named)
    assert part.prompt_token_ids == [7, 8, 2, 3] and (part.row_id, part.extras) == ("row b", {"answer": "b"})
    others = [partial.next_part(THIRD, PART), partial.next_part(SECOND, SamplingParams(max_tokens=2, seed=1))]
    partial.token_ids[-1] = 4
    others.append(partial.next_part(SECOND, PART))
    assert len({part.id, *(other.id for other in others)}) == 4
    assert len({seed_of(part.id), *(seed_of(other.id) for other in others)}) == 4


def test_two_parts_by_the_same_weights_are_one():
    partial = Partial(sample("a"), 0)
    for tokens, model in (([1, 2], FIRST), ([3, 4], FIRST), ([5, 6], SECOND)):
        partial.extend(drawn(partial.sample, tokens), model, 99)
    assert (partial.written, partial.model_ids) == ([[0, 4], [4, 6]], [FIRST, SECOND])
    assert partial.finish_reason is None


def record(objects: ObjectStore, stage: str, inputs: dict[str, Any], *outputs: ContentId) -> None:
    about = {"key": content_id(stage, [inputs, *outputs]), "created_at": datetime.now(UTC), "software": {}}
    record_lineage(objects, Lineage(stage=stage, version=1, inputs=inputs, outputs=outputs, **about))


def learned(objects: ObjectStore, run: str, stage: str, samples: ContentId, **inputs: Any) -> tuple[ContentId, Carried]:
    """A training state, and what was carried over by the iteration of ``run`` that left it."""
    state, completions = (hash_bytes(f"{run} {name}".encode()) for name in ("state", "completions"))
    partials = objects.put_bytes(f"of {run}".encode()) if inputs.pop("carries", True) else None
    outputs = [completions, samples, *([partials] if partials else [])]
    record(objects, stage, {"group_size": 2, **inputs}, *outputs)
    record(objects, "grpo_update", {"samples": samples, "scores": {"completions": completions}}, state)
    return state, Carried(inputs.get("number", 0), partials)


def test_a_run_goes_on_with_what_its_own_iteration_carried_over(tmp_path: Path):
    """Runs of a sweep learn from the same samples, whose next parts other weights have drawn."""
    objects = ObjectStore.from_url(str(tmp_path))
    samples, prompts = hash_bytes(b"samples"), hash_bytes(b"prompts")
    sweep = [learned(objects, run, "join_completions", samples, number=1) for run in ("high", "low")]
    record(objects, "enqueue_prompts", {}, prompts)
    into = {"completions": {"samples": prompts}, "number": 4, "carries": False}
    short = learned(objects, "all of it short", "join_completions", prompts, **into)
    assert short[1] == Carried(4, None)
    for state, carried in (*sweep, short):
        assert carried_over(objects, state, group_size=2) == carried
    with pytest.raises(ConfigError, match="groups of 2 completions, and samples_per_prompt is 4; take as many as then"):
        carried_over(objects, sweep[0][0], group_size=4)
    assert carried_over(objects, short[0], group_size=4) == short[1], "no groups are carried over"
    whole, _ = learned(objects, "whole", "batch_inference", prompts)
    for state in (whole, hash_bytes(b"forgotten")):
        with pytest.raises(ConfigError, match="by an iteration without partial_rollouts, or what that was made of"):
            carried_over(objects, state, group_size=2)


def test_prompts_of_another_run_are_told_by_all_of_their_row():
    _, two, _ = three_iterations()
    rows = [PromptRow(prompt=name, id=f"row {name}", extras={"answer": name}) for name in "abc"]
    assert num_foreign(decode_carried(encode_carried(two.carried)), rows) == 1, "d is not among them"
    rows[2].extras["answer"] = "another"
    assert num_foreign(two.carried, rows) == 2


def test_every_token_is_trained_and_weighed_by_the_weights_that_drew_it():
    """Row b: drawn with logprobs -t/10; the trainer says -0.5 for all, so w = exp(t/10 - 0.5), at most 1.2."""
    _, _, three = three_iterations()
    trajectories = [
        Trajectory([7, 8], row.token_ids, row.logprobs, 1.0, row.finish_reason == "length", row.written)
        for row in decode_completions_blob(three.completions)
    ]
    batch = build_batch(trajectories)
    assert batch.mask.tolist()[1:3] == [[True] * 6, [True] * 3 + [False] * 3]
    assert batch.truncated.tolist() == [False, True, False, False]
    old = batch.columns["old_logprobs"]
    assert old[1].tolist() == pytest.approx([-0.2, -0.3, -0.3, -0.1, -0.9, -0.9])
    weights = importance_weights(torch.full((4, 6), -0.5), old, batch.mask, ImportanceCorrection(cap=1.2))
    by_hand = [2.718281828 ** (token / 10 - 0.5) for token in (2, 3, 3, 1)]
    assert weights[1].tolist() == pytest.approx([*by_hand, 1.2, 1.2])


FIELDS: dict[str, Any] = {
    "prompts": {"path": "x"},
    "optimizer": {"lr": 1e-4},
    "sampling": {"max_tokens": 60},
    "partial_rollouts": {"max_tokens_per_iteration": 20},
}


def test_a_correction_is_the_default_and_updates_are_named_by_what_they_learn_from():
    cut = GRPOSettings.model_validate(FIELDS)
    assert cut.correction == ImportanceCorrection()
    assert (cut.part_sampling.max_tokens, cut.parts_per_completion) == (20, 3)
    assert cut.known_steps_per_iteration is None
    plain = GRPOSettings.model_validate({**FIELDS, "partial_rollouts": None})
    assert plain.correction is None and plain.part_sampling is plain.sampling and plain.parts_per_completion == 1
    assert "partial_rollouts" not in identity(plain)
    assert identity(cut) == identity(
        GRPOSettings.model_validate({**FIELDS, "partial_rollouts": None, "correction": {}})
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"partial_rollouts": {"max_tokens_per_iteration": 25}}, "25, and sampling.max_tokens 60; expected a half"),
        ({"partial_rollouts": {"max_tokens_per_iteration": 60}}, "60, and sampling.max_tokens 60; expected a half"),
        ({"correction": None}, "need a correction"),
        ({"sampling": {"max_tokens": 60, "stop": ["\n"]}}, "sampling.stop: a stop string may begin in one part"),
        ({"failed": "leave_out"}, 'failed = "leave_out"'),
        ({"replay": {"groups": 2}}, "partial_rollouts and replay"),
        ({"dynamic_sampling": {}}, "partial_rollouts and dynamic_sampling"),
        ({"optimizer": {"lr": 1e-4, "schedule": "cosine"}}, "optimizer.schedule = 'cosine': nobody knows how many"),
        ({"optimizer": {"lr": 1e-4, "warmup_ratio": 0.1}}, "optimizer.warmup_ratio = 0.1: .*take optimizer.warmup_st"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], problem: str):
    with pytest.raises(ValidationError, match=problem):
        GRPOSettings.model_validate({**FIELDS, **changes})


def test_agents_are_refused_and_other_learners_take_it():
    assert PPOSettings.model_validate(FIELDS).correction == ImportanceCorrection()
    OnlineDPOSettings.model_validate({**FIELDS, "loss": "online_dpo", "async_depth": 1})
    with pytest.raises(ValidationError, match="partial_rollouts\n  Input should be None"):
        AgentGRPO.model_validate({**FIELDS, "base_model": {"uri": "x"}})


def test_a_conversation_that_goes_on_ends_where_its_turn_does():
    a, b = (replace(sample(name), ends=[9]) for name in "ab")
    one = join([], [(a, drawn(a, [1, 2])), (b, drawn(b, [3, 9], "stop"))], FIRST, 0)
    carried = decode_carried(encode_carried(one.carried))
    [part] = [partial.next_part(SECOND, PART) for partial in unfinished(carried)]
    assert part.ends == [9]
    two = join(carried, [(part, drawn(part, [4, 9], "stop"))], SECOND, 1)
    assert [partial.text for partial in two.whole] == ["1 2 4", "engine's"]
    assert b'"ends"' not in encode_carried(join([], [(sample("c"), drawn(sample("c"), [1]))] * 2, FIRST, 0).carried)
