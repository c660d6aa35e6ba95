"""What it takes to make a result again, by recorded calls alone; with real stages: tests/flows/test_reproduce.py."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import ContentId, content_id
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import Lineage, record_lineage
from rollout_core.runs.reproduction import Plan, Step, plan_reproduction, reproduce


@pytest.fixture
def there() -> ObjectStore:
    return ObjectStore.from_url("memory://reproduction/there")


def record(objects: ObjectStore, stage: str, inputs: dict[str, Any], output: bytes, **more: Any) -> ContentId:
    """A call of a stage that made a blob."""
    made = objects.put_bytes(output)
    key = content_id("test-call/1", [stage, inputs])
    common = {"version": 1, "created_at": datetime.now(UTC), "software": {}}
    record_lineage(objects, Lineage(stage=stage, key=key, inputs=inputs, outputs=(made,), **{**common, **more}))
    return made


def read(lineage: Lineage) -> dict[str, Any]:
    return lineage.inputs


STAGES = {"cut": read, "join": read}


def test_calls_are_planned_in_order_with_what_no_call_makes(there: ObjectStore):
    rows = there.put_bytes(b"rows")
    cut = record(there, "cut", {"rows": rows, "label": "first"}, b"cut")
    joined = record(there, "join", {"rows": cut}, b"joined")
    plan = plan_reproduction(there, joined, STAGES)
    assert [step.title for step in plan.steps] == ["cut first", "join"]
    assert (list(plan.first_inputs), list(plan.problems), plan.numerics) == ([rows], [], "native")
    with pytest.raises(NotFound, match="no stage recorded that it made"):
        plan_reproduction(there, rows, STAGES)


def test_what_is_gone_or_cannot_be_called_is_a_problem_with_the_name_of_its_call(there: ObjectStore):
    rows = there.put_bytes(b"rows of another")
    cut = record(there, "cut", {"rows": rows}, b"cut of another")
    there.delete(rows)

    def refuse(lineage: Lineage) -> dict[str, Any]:
        raise ConfigError("its settings cannot be read")

    plan = plan_reproduction(there, cut, {"cut": refuse})
    assert plan.problems == [
        f"cut: rows {rows.short} is not in {there.url} any more",
        "cut: its settings cannot be read",
    ]
    with pytest.raises(ConfigError, match="its settings cannot be read"):
        reproduce(there, there, plan, lambda step: ())


def test_the_comparison_ends_at_the_first_call_with_other_ids(there: ObjectStore):
    here = ObjectStore.from_url("memory://reproduction/here")
    rows = there.put_bytes(b"three rows")
    cut = record(there, "cut", {"rows": rows}, b"three cut")
    joined = record(there, "join", {"rows": cut}, b"three joined")
    plan = plan_reproduction(there, joined, STAGES)

    def call(step: Step) -> list[ContentId]:
        assert here.exists(rows), "what no call makes is copied first"
        return [here.put_bytes({"cut": b"three cut", "join": b"another"}[step.lineage.stage])]

    found = reproduce(there, here, plan, call)
    assert found["same"] == ["cut"]
    assert found["difference"] == {"stage": "join", "there": [joined], "here": [here.put_bytes(b"another")]}


def test_steps_of_both_numerics_cannot_be_made_again_in_one_process():
    def step(numerics: str) -> Step:
        common = {"version": 1, "created_at": datetime.now(UTC), "software": {}, "inputs": {}, "outputs": ()}
        key = content_id("test-call/1", numerics)
        return Step(Lineage(stage="cut", key=key, arithmetic={"numerics": numerics}, **common), {})

    assert Plan([step("portable")], [], [], []).numerics == "portable"
    with pytest.raises(ConfigError, match="make it again in two parts"):
        _ = Plan([step("portable"), step("native")], [], [], []).numerics
