"""Lineage: what made an id, and what made that, back to the first inputs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, content_id, hash_bytes
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import (
    Lineage,
    lineage_graph,
    lineage_of,
    record_lineage,
    software_versions,
    trace_descendants,
    trace_lineage,
)

PROMPTS, SAMPLES, SCORES, MODEL, MODEL_AFTER = (hash_bytes(bytes([n])) for n in range(5))


@pytest.fixture
def objects(tmp_path) -> ObjectStore:
    return ObjectStore.from_url(str(tmp_path / "store"))


def made(stage: str, inputs: dict[str, Any], *outputs: ContentId) -> Lineage:
    return Lineage(
        stage=stage,
        version=1,
        key=content_id("test/1", [stage, inputs]),
        inputs=inputs,
        outputs=outputs,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        software=software_versions(),
    )


def stages(found: list[Lineage]) -> list[str]:
    return [lineage.stage for lineage in found]


def test_every_output_leads_to_the_record_of_its_stage(objects: ObjectStore) -> None:
    lineage = made("generate", {"prompts": PROMPTS, "sampling": {"temperature": 0.5}}, SAMPLES, SCORES)
    record = record_lineage(objects, lineage)
    assert lineage_of(objects, SAMPLES) == lineage_of(objects, SCORES) == lineage
    assert objects.get_json(record)["inputs"]["prompts"] == PROMPTS
    assert lineage_of(objects, PROMPTS) is None


def test_the_last_record_of_an_id_counts(objects: ObjectStore) -> None:
    record_lineage(objects, made("first", {}, SAMPLES))
    record_lineage(objects, made("second", {}, SAMPLES))
    assert lineage_of(objects, SAMPLES) == made("second", {}, SAMPLES)


def test_a_trace_is_breadth_first_and_names_each_stage_once(objects: ObjectStore) -> None:
    record_lineage(objects, made("import", {"path": "prompts.jsonl"}, PROMPTS))
    record_lineage(objects, made("generate", {"prompts": {"data": PROMPTS}, "model": MODEL}, SAMPLES))
    record_lineage(objects, made("score", {"samples": [SAMPLES], "text": f"not {PROMPTS}"}, SCORES))
    record_lineage(objects, made("update", {"scores": SCORES, "samples": SAMPLES}, MODEL_AFTER))
    assert stages(trace_lineage(objects, MODEL_AFTER)) == ["update", "generate", "score", "import"]
    assert stages(trace_lineage(objects, SCORES)) == ["score", "generate", "import"]
    assert trace_lineage(objects, MODEL) == []


def test_a_stage_with_two_outputs_appears_once_and_a_cycle_ends(objects: ObjectStore) -> None:
    record_lineage(objects, made("split", {"of": SCORES}, PROMPTS, SAMPLES))
    record_lineage(objects, made("join", {"of": [PROMPTS, SAMPLES]}, SCORES))
    assert stages(trace_lineage(objects, SCORES)) == ["join", "split"]
    assert stages(trace_lineage(objects, SAMPLES)) == ["split", "join"]


def test_ids_within_json_strings_are_followed(objects: ObjectStore) -> None:
    record_lineage(objects, made("import", {}, PROMPTS))
    record_lineage(objects, made("generate", {"record": f'{{"data":"{PROMPTS}"}}'}, SAMPLES))
    assert stages(trace_lineage(objects, SAMPLES)) == ["generate", "import"]


def test_what_was_made_from_an_id_is_found_whoever_else_made_what(objects: ObjectStore) -> None:
    record_lineage(objects, made("generate", {"prompts": {"data": PROMPTS}, "model": MODEL}, SAMPLES))
    record_lineage(objects, made("score", {"samples": [SAMPLES], "text": f"not {PROMPTS}"}, SCORES))
    record_lineage(objects, made("update", {"scores": SCORES, "samples": f'{{"data":"{SAMPLES}"}}'}, MODEL_AFTER))
    assert stages(trace_descendants(objects, PROMPTS)) == ["generate", "score", "update"]
    assert stages(trace_descendants(objects, SCORES)) == ["update"]
    assert trace_descendants(objects, MODEL_AFTER) == []
    # A cycle ends, and what has been made anew since counts no more.
    record_lineage(objects, made("join", {"of": MODEL_AFTER}, PROMPTS))
    assert stages(trace_descendants(objects, PROMPTS)) == ["generate", "score", "update", "join"]
    record_lineage(objects, made("import", {"path": "samples.jsonl"}, SAMPLES))
    assert trace_descendants(objects, MODEL) == []


def test_a_graph_has_a_box_for_each_stage_and_arrows_along_what_it_took(objects: ObjectStore) -> None:
    record_lineage(objects, made("generate", {"prompts": {"data": PROMPTS}, "label": '<"1">'}, SAMPLES))
    record_lineage(objects, made("score", {"samples": [SAMPLES], "again": SAMPLES}, SCORES))
    assert lineage_graph(trace_lineage(objects, SCORES)).splitlines() == [
        "flowchart TD",
        f'    s0["score<br>{SCORES[:12]}"]',
        f'    s1["generate #lt;#quot;1#quot;#gt;<br>{SAMPLES[:12]}"]',
        f'    i{PROMPTS[:12]}(["prompts {PROMPTS[:12]}"])',
        "    s1 --> s0",
        f"    i{PROMPTS[:12]} --> s1",
    ]


def test_a_record_that_is_lost_or_damaged_ends_the_trace(objects: ObjectStore) -> None:
    record_lineage(objects, made("import", {}, PROMPTS))
    lost = record_lineage(objects, made("generate", {"prompts": PROMPTS}, SAMPLES))
    record_lineage(objects, made("score", {"samples": SAMPLES}, SCORES))
    objects.delete(lost)
    assert stages(trace_lineage(objects, SCORES)) == ["score"]
    objects.set_ref(f"lineage/{SAMPLES}", objects.put_json({"stage": 1}))
    with pytest.raises(ConfigError, match="is not a lineage record"):
        lineage_of(objects, SAMPLES)


def test_software_versions_name_python_and_what_computes() -> None:
    assert {"python", "torch"} <= software_versions().keys()
