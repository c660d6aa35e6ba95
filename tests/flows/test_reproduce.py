"""A checkpoint made again elsewhere from the records of its lineage, and the first stage that differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.reproduce import plan_reproduction, reproduce
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.config import TrainGRPOConfig, load_config
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import lineage_of, record_lineage
from tests.flows.conftest import objects

PROJECT = Path(__file__).resolve().parent.parent.parent
STAGES = ["enqueue_prompts iteration 1", "batch_inference iteration 1", "score_rewards iteration 1"]
REWARD = "def score(sample):\n    return len(sample.completion) / 10\n"


@pytest.mark.server
def test_a_checkpoint_is_made_again_elsewhere_byte_for_byte(
    tiny_model, sorting_task, prefect_server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from flows.train import train_grpo

    code = tmp_path / "mine.py"
    code.write_text(REWARD)
    config = load_config(
        PROJECT / "examples" / "grpo-tiny.toml",
        TrainGRPOConfig,
        {
            "algorithm.base_model.uri": str(tiny_model),
            "algorithm.prompts.path": str(sorting_task.prompts),
            "algorithm.iterations": 1,
            "algorithm.prompts_per_iteration": 4,
            "algorithm.samples_per_prompt": 4,
            "algorithm.minibatch_size": 16,
            "algorithm.reward": {"kind": "function", "callable": f"{code}:score"},
            "backend": {"kind": "transformers"},
            "num_threads": 1,
            "numerics": "native",  # this process has chosen its kernels
        },
    )
    model = ContentId(train_grpo(config)["model"])
    code.unlink()  # its filed code is run
    source = objects()
    plan = plan_reproduction(source, model)
    assert [step.title for step in plan.steps] == [*STAGES, "grpo_update iteration 1"]
    assert (plan.problems, plan.notes) == ([], [])

    def again(name: str) -> dict:
        monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / name}")
        monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{tmp_path / name}.db")
        monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / f"{name}-cache"))
        return reproduce(model, source.url)

    assert again("first") == {"same": [step.title for step in plan.steps], "difference": None}
    assert ObjectStore.from_url(f"file://{tmp_path / 'first'}").tree_is_present(model)
    # A record whose scores were others: nothing that follows from them is compared.
    scored = next(step.lineage for step in plan.steps if step.title == STAGES[2])
    there = (hash_bytes(b"other scores"), *scored.outputs[1:])
    changed = scored.model_copy(update={"outputs": (*there, scored.outputs[0])})
    record_lineage(source, changed)
    assert lineage_of(source, scored.outputs[0]) == changed
    found = again("second")
    assert found["same"] == STAGES[:2] and found["difference"]["stage"] == STAGES[2]
    assert found["difference"]["here"] == list(scored.outputs)
    # What it takes may be gone, or be of a version that kept less.
    record_lineage(source, scored.model_copy(update={"arguments": {}}))
    prompts = ContentId(plan.steps[0].lineage.inputs["prompts"])
    source.delete(prompts)
    problems = plan_reproduction(source, model).problems
    assert problems[0] == f"{STAGES[0]}: prompts {prompts.short} is not in {source.url} any more"
    assert problems[1].startswith(f"{STAGES[2]}: its settings cannot be read from the record")
