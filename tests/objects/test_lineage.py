"""Lineage: what made an id, and what made that, back to the first inputs."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from openlineage.client.event_v2 import Job, Run, RunEvent

from rollout_core.base.errors import ConfigError, RolloutError
from rollout_core.base.ids import ContentId, content_id, hash_bytes
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import (
    Lineage,
    in_order,
    lineage_of,
    makers_of,
    record_lineage,
    software_versions,
    trace_descendants,
    trace_lineage,
)
from rollout_core.objects.lineage_graph import as_mermaid, as_svg, as_text, lineage_graph
from rollout_core.objects.openlineage import events
from rollout_core.objects.origins import (
    MAX_SOURCES,
    Imported,
    Source,
    code_behind,
    ids_at,
    imports_behind,
    record_import,
    source_of_files,
    sources_of,
)
from rollout_core.objects.retention.garbage import Scope, collect_garbage
from rollout_core.objects.verification import verify_store
from tests.support.machine import DOT, require

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


def later(lineage: Lineage, hours: float, **changes: Any) -> Lineage:
    return lineage.model_copy(update={"created_at": lineage.created_at + timedelta(hours=hours), **changes})


def test_content_keeps_all_its_makers_and_of_a_call_that_is_made_again_the_last_record(objects: ObjectStore) -> None:
    first, second = made("first", {}, SAMPLES), later(made("second", {}, SAMPLES), 1)
    again = later(first, 2)
    for lineage in (second, first, again):
        record_lineage(objects, lineage)
    assert makers_of(objects, SAMPLES) == [second, again]
    assert lineage_of(objects, SAMPLES) == again


ZEROS = hash_bytes(b"[0.0, 0.0]")


def iterations(objects: ObjectStore, *, named: bool) -> list[Lineage]:
    """Updates of three iterations of which all rewards are 0, each from the model of the one before, on two nights
    that begin with other prompts. Of the second night the first iteration is scored before the first one's is learnt
    from, as it may be on another machine."""
    updates: list[Lineage] = []
    for night in range(2):
        model = MODEL
        record_lineage(
            objects, made("import", {"path": str(night)}, prompts := hash_bytes(f"prompts {night}".encode()))
        )
        for number in range(3):
            blobs = (hash_bytes(f"{what} {night} {number}".encode()) for what in ("samples", "completions", "model"))
            samples, completions, after = blobs
            when, label = 10.0 * night + number, f"night {night} iteration {number}"
            drawn = later(made("generate", {"prompts": prompts, "model": model, "label": label}, samples), when)
            answered = later(made("infer", {"samples": samples, "label": label}, completions, samples), when)
            record = {"completions": completions, "samples": samples}
            scored = later(made("score", {"completions": record, "label": label}, ZEROS, completions), when + 0.1)
            inputs = {"scores": {"scores": ZEROS, "completions": completions}, "samples": samples, "model": model}
            updated = made("update", {**inputs, "label": label}, after)
            makers = {ZEROS: scored.key, completions: answered.key} if named else {}
            updates.append(later(updated, when + (20.0 if night == 0 else 0.2), makers=makers))
            for lineage in (drawn, answered, scored, updates[-1]):
                record_lineage(objects, lineage)
            model = after
    return updates


@pytest.mark.parametrize("named", [True, False])
def test_of_equal_content_lineage_names_the_maker_that_the_consumer_had_it_from(objects, named: bool) -> None:
    """Rewards that are all 0 are one blob, whichever iterations of whichever night made them."""
    updates = iterations(objects, named=named)
    for night, last in enumerate((updates[2], updates[5])):
        found = trace_lineage(objects, last.outputs[0])
        labels = {str(lineage.inputs["label"]) for lineage in found if lineage.stage != "import"}
        assert labels == {f"night {night} iteration {number}" for number in range(3)}
        assert [lineage.inputs["path"] for lineage in found if lineage.stage == "import"] == [str(night)]
        assert len(found) == 3 * 4 + 1
        # Whoever makes it again makes rewards before what is learnt from them.
        stages_in_order = stages(in_order(found))
        assert stages_in_order == ["import", *["generate", "infer", "score", "update"] * 3]
        # A drawing and a text say the same.
        graph = lineage_graph(found)
        names = {node.name: node.title for node in graph.nodes}
        arrows = {(names[start], names[end]) for start, end in graph.edges}
        for number in range(3):
            about = f"night {night} iteration {number}"
            assert (f"score {about}", f"update {about}") in arrows
        assert sum(start.startswith("score") for start, _ in arrows) == 3
        assert as_text(found, asked=last.outputs[0]).count(f"{ZEROS.short}  score night {night} iteration 2") == 1
    # And downwards: what one night's prompts led to, not what learnt from rewards that are the same.
    prompts = hash_bytes(b"prompts 1")
    down = trace_descendants(objects, prompts)
    assert len(down) == 12 and all("night 1" in str(lineage.inputs["label"]) for lineage in down)
    # Asked for itself, it was made by all of them.
    assert len(makers_of(objects, ZEROS)) == 6
    text = as_text(trace_lineage(objects, ZEROS), asked=ZEROS)
    assert "the same content was made 6 times: score night 0 iteration 0, " in text


def test_what_a_stage_passes_on_from_a_list_and_models_that_settings_name_lead_on(objects: ObjectStore) -> None:
    """Selected groups that are all groups are the completions as they came; a reward model stands in settings."""
    reward_model = hash_bytes(b"reward model")
    record_lineage(objects, made("rm_update", {"dataset": PROMPTS}, reward_model, hash_bytes(b"train state")))
    record_lineage(objects, made("generate", {"prompts": PROMPTS}, SAMPLES))
    reward = {"kind": "model", "model": reward_model}
    record_lineage(
        objects, later(made("score", {"completions": {"of": SAMPLES}, "reward": reward}, SCORES, SAMPLES), 1)
    )
    selected = later(made("select", {"rounds": [{"scores": SCORES, "of": SAMPLES}]}, SCORES, SAMPLES), 2)
    record_lineage(objects, selected)
    # A run of an earlier version named the one that passed it on.
    inputs = {"scores": {"scores": SCORES, "of": SAMPLES}}
    record_lineage(objects, later(made("update", inputs, MODEL), 3, makers={SCORES: selected.key}))
    assert stages(trace_lineage(objects, MODEL)) == ["update", "generate", "score", "rm_update"]
    assert stages(trace_descendants(objects, reward_model)) == ["score", "update"]


def test_catalogues_are_not_told_that_equal_content_is_one_data_set(objects: ObjectStore) -> None:
    updates = iterations(objects, named=True)
    documents = [json.loads(line) for line in events(trace_lineage(objects, updates[2].outputs[0]))]

    def names_of(job: str, way: str) -> list[str]:
        found = [document for document in documents if document["job"]["name"] == f"{job}/1"]
        return [one["name"] for document in found for one in document[way] if one["name"].startswith(ZEROS)]

    made_as, taken_as = names_of("score", "outputs"), names_of("update", "inputs")
    assert len(set(made_as)) == 3 and made_as == taken_as


def test_a_single_record_that_another_iteration_wrote_over_is_not_taken_for_the_maker(objects: ObjectStore) -> None:
    """As stores of earlier versions have it, which kept the last maker of equal content alone."""
    updates = iterations(objects, named=False)
    for name in objects.ref_names(f"makers/{ZEROS}"):
        last = objects.get_ref(name)
        objects.delete_ref(name)
    assert last is not None
    objects.set_ref(f"lineage/{ZEROS}", last)
    [kept] = makers_of(objects, ZEROS)
    owner = next(update for update in updates if update.inputs["label"] == kept.inputs["label"])
    for update in updates:
        found = trace_lineage(objects, update.outputs[0])
        assert (kept in found) == (owner in found)


def test_garbage_collection_follows_the_makers_of_what_is_kept_alone(objects: ObjectStore) -> None:
    """The other nights' completions are not kept for ever because their rewards were all 0 as well."""
    zeros = objects.put_bytes(b"[0.0, 0.0]")
    completions = [objects.put_bytes(b'{"night":%d}' % night) for night in range(3)]
    for night, made_of in enumerate(completions):
        record_lineage(
            objects, later(made("score", {"completions": made_of, "label": str(night)}, zeros, made_of), night)
        )
        record_lineage(objects, made("infer", {"prompts": PROMPTS, "label": str(night)}, made_of))
    kept = objects.put_json({"scores": zeros, "completions": completions[1]})
    objects.set_ref("labels/kept", kept)
    collect_garbage(objects, min_age=timedelta(0), keep_notes=timedelta(0))
    assert [objects.exists(one) for one in completions] == [False, True, False]
    assert [maker.inputs["label"] for maker in makers_of(objects, zeros)] == ["1"]
    # What took it names its maker, though that one's other results are gone and another one's are there.
    taken = objects.put_json({"stage": "evaluate"})
    named = made("score", {"completions": completions[1], "label": "1"}, zeros, completions[1])
    record_lineage(objects, made("score", {"completions": (there := objects.put_bytes(b"[]"))}, zeros, there))
    record_lineage(
        objects, made("evaluate", {"scores": zeros}, taken).model_copy(update={"makers": {zeros: named.key}})
    )
    objects.set_ref("labels/kept", taken)
    collect_garbage(objects, min_age=timedelta(0), keep_notes=timedelta(0))
    assert objects.exists(completions[1]) and not objects.exists(there)
    assert [lineage.key for lineage in trace_lineage(objects, taken)][1] == named.key
    # Where nothing tells, all that may have made it stays, also where weights are not kept.
    objects.set_ref("labels/kept", zeros)
    record_lineage(objects, made("score", {"completions": (other := objects.put_bytes(b"{}"))}, zeros, other))
    collect_garbage(objects, min_age=timedelta(0), keep_notes=timedelta(0))
    scope = Scope(weights_of_inputs=False)
    collect_garbage(objects, min_age=timedelta(0), keep_notes=timedelta(0), scope=scope)
    assert objects.exists(completions[1]) and objects.exists(other)
    assert not verify_store(objects).damage


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
    # A cycle ends.
    record_lineage(objects, made("join", {"of": MODEL_AFTER}, PROMPTS))
    assert stages(trace_descendants(objects, PROMPTS)) == ["generate", "score", "update", "join"]
    # What is made again from elsewhere leaves what took it before as it was.
    record_lineage(objects, later(made("import", {"path": "samples.jsonl"}, SAMPLES), 1))
    assert stages(trace_descendants(objects, MODEL))[:3] == ["generate", "score", "update"]


def test_a_graph_has_a_box_for_each_stage_and_arrows_along_what_it_took(objects: ObjectStore) -> None:
    record_lineage(objects, made("generate", {"prompts": {"data": PROMPTS}, "label": '<"1">'}, SAMPLES))
    record_lineage(objects, made("score", {"samples": [SAMPLES], "again": SAMPLES}, SCORES))
    assert as_mermaid(lineage_graph(trace_lineage(objects, SCORES))).splitlines() == [
        "flowchart TD",
        f'    s0["score<br>{SCORES[:12]}"]',
        f'    s1["generate #lt;#quot;1#quot;#gt;<br>{SAMPLES[:12]}"]',
        f'    i{PROMPTS[:12]}(["prompts {PROMPTS[:12]}"])',
        "    s1 --> s0",
        f"    i{PROMPTS[:12]} --> s1",
    ]


def test_a_text_names_where_everything_came_from(objects: ObjectStore) -> None:
    record_lineage(objects, made("generate", {"prompts": {"data": PROMPTS}, "label": "a\x1b[31m"}, SAMPLES))
    record_lineage(objects, made("score", {"samples": [SAMPLES, MODEL], "seed": 7, "by": "it"}, SCORES))
    source = Source(
        kind="data", address="p.jsonl", place="/data/p.jsonl", size_bytes=1500, num_files=1, hub_id="org/set"
    )
    record_import(objects, PROMPTS, source.model_copy(update={"imported_at": datetime(2026, 1, 1, tzinfo=UTC)}))
    found = trace_lineage(objects, SCORES)
    text = as_text(found, imports_behind(objects, SCORES, found), asked=SCORES)
    assert text.splitlines() == [
        f"{SCORES.short}* was made by 2 stages",
        "",
        "score  2026-01-01 00:00 UTC",
        f"  made {SCORES.short}*",
        f"  from samples      {SAMPLES.short}  generate a?[31m",
        f"       samples      {MODEL.short}",
        "  with by it, seed 7",
        "",
        "generate a?[31m  2026-01-01 00:00 UTC",
        f"  made {SAMPLES.short}",
        f"  from prompts      {PROMPTS.short}  p.jsonl",
        "",
        "brought in",
        f"  {PROMPTS.short}  data p.jsonl, 1.5 kB, first 2026-01-01 00:00 UTC",
        f"  {'':13} /data/p.jsonl",
        f"  {'':13} org/set",
    ]
    down = as_text(trace_descendants(objects, PROMPTS), asked=PROMPTS, down=True)
    assert down.startswith(f"{PROMPTS.short}* led to 2 stages\n\ngenerate")
    assert f"prompts      {PROMPTS.short}*\n" in down


def test_an_image_shows_every_stage_once_and_inputs_near_what_takes_them() -> None:
    require(DOT)
    ids = [hash_bytes(f"{number}".encode()) for number in range(40)]
    names = [f'<{number}> &amp; "\\N" \x1b' for number in range(40)]
    found = [made("update", {"model": ids[n - 1], "base": MODEL, "label": names[n]}, ids[n]) for n in range(1, 40)]
    address = "https://example.org/a?b=<1>&c=" + "x" * 60
    source = Source(kind="data", address=address, size_bytes=1, num_files=1)
    image = as_svg(
        lineage_graph(found, [Imported(outputs=(ids[0],), sources=(source,))]),
        asked=ids[39],
        link=lambda one: f"/m/{one}",
    )
    root = ElementTree.fromstring(image)
    svg, xlink = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
    links = list(root.iter(f"{svg}a"))
    titles = [link.get(f"{xlink}title", "").split("\n") for link in links]
    shown = 'update <7> &amp; "?N" ?'
    assert [title for title in titles if title[0].startswith("update <7>")] == [[shown, ids[7]]]
    assert [title for title in titles if title[0] == "model"] == [["model", address, ids[0]]]
    assert 1 < sum(title[0] == "base" for title in titles) < 10
    assert [link.get(f"{xlink}href") for link in links].count(f"/m/{ids[39]}") == 1
    groups = [group.get("class", "").split() for group in root.iter(f"{svg}g")]
    assert sum("asked" in kinds for kinds in groups) == 1
    assert sum("input" in kinds for kinds in groups) == sum(title[0] in ("base", "model") for title in titles)
    texts = [text.text for text in root.iter(f"{svg}text")]
    assert texts.count(shown) == 1 and f"…{address[-43:]}" in texts


def test_without_graphviz_an_image_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"has no dot: install graphviz \(apt-get install graphviz\)"):
        as_svg(lineage_graph([made("update", {}, MODEL)]))
    (tmp_path / "dot").write_text("no program")
    with pytest.raises(RolloutError, match="dot cannot be run: Permission denied"):
        as_svg(lineage_graph([made("update", {}, MODEL)]))


def test_events_of_openlineage_are_what_its_library_takes() -> None:
    found = [
        made("update", {"model": MODEL, "scores": SCORES, "settings": {"lr": 0.1}}, MODEL_AFTER),
        made("score", {"samples": SAMPLES}, SCORES),
    ]
    places = ["s3://bucket/prompts/*.jsonl", "/data/prompts.jsonl"]
    sources = tuple(Source(kind="data", address=place, place=place, size_bytes=1, num_files=1) for place in places)
    lines = list(events(found, [Imported(outputs=(SAMPLES,), sources=sources)]))
    assert lines == list(events(found, [Imported(outputs=(SAMPLES,), sources=sources)]))
    documents = [json.loads(line) for line in lines]
    by_job = {document["job"]["name"]: document for document in documents}
    score, update = by_job["score/1"], by_job["update/1"]
    assert [one["name"] for one in score["outputs"]] == [SCORES] and SCORES in [one["name"] for one in update["inputs"]]
    assert [(link["namespace"], link["name"]) for link in score["inputs"][0]["facets"]["symlinks"]["identifiers"]] == [
        ("s3://bucket", "prompts/*.jsonl"),
        ("file", "/data/prompts.jsonl"),
    ]
    parameters = {one["key"]: one.get("value") for one in update["run"]["facets"]["executionParameters"]["parameters"]}
    assert parameters["settings"] == '{"lr": 0.1}' and "software.python" in parameters
    for document in documents:
        assert (
            document["schemaURL"].endswith("OpenLineage.json#/$defs/RunEvent") and document["eventType"] == "COMPLETE"
        )
        kept = {name: document[name] for name in ("eventTime", "producer")}
        run, job = document["run"], document["job"]
        again = RunEvent(run=Run(run["runId"]), job=Job(job["namespace"], job["name"]), **kept)  # which it checks
        assert again.run.runId == run["runId"]


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


def test_what_is_passed_on_keeps_the_record_of_how_it_was_made(objects: ObjectStore) -> None:
    """Completions name the samples that they are of: lineage goes on through these to the prompts."""
    record_lineage(objects, made("enqueue_prompts", {"prompts": PROMPTS}, SAMPLES))
    record_lineage(objects, made("batch_inference", {"prompts": {"samples": SAMPLES}}, SCORES, SAMPLES))
    assert stages(trace_lineage(objects, SCORES)) == ["batch_inference", "enqueue_prompts"]
    assert stages(trace_descendants(objects, PROMPTS)) == ["enqueue_prompts", "batch_inference"]


def test_sources_are_listed_once_each_and_never_hide_how_something_was_made(objects: ObjectStore) -> None:
    data = objects.put_bytes(b"{}\n")

    def brought_in(address: str, **fields: Any) -> None:
        record_import(objects, data, Source(kind="data", address=address, size_bytes=3, num_files=1, **fields))

    record_lineage(objects, made("join", {"of": SCORES}, data))
    for address in ("rows.jsonl", "copy.jsonl", "rows.jsonl"):
        brought_in(address)
    first, second = sources_of(objects, data)
    assert [first.address, second.address] == ["rows.jsonl", "copy.jsonl"]
    assert stages(trace_lineage(objects, data)) == ["join"]
    assert [item.sources for item in imports_behind(objects, data, [])] == [(first, second)]
    # What was made of it leads to it, and an address to what was read from there.
    assert imports_behind(objects, MODEL, [made("sft_update", {"dataset": data}, MODEL)])[0].outputs == (data,)
    assert ids_at(objects, "copy.jsonl", Path.cwd()) == [data] and ids_at(objects, "other.jsonl", Path.cwd()) == []
    for number in range(MAX_SOURCES + 3):
        brought_in("hub/rows", revision=str(number))
    assert len(sources_of(objects, data)) == MAX_SOURCES
    # A record that is lost is left out, and written again by the next import.
    objects.delete_ref(objects.ref_names(f"imports/{data}")[0])
    objects.set_ref(f"imports/{data}/damaged", objects.put_json({"kind": 1}))
    assert len(sources_of(objects, data)) == MAX_SOURCES - 1


def test_sources_live_as_long_as_what_they_are_about(objects: ObjectStore) -> None:
    """Also those of code, which has no blob of its own: its files are kept for what was scored by it."""
    data, lost, code = (objects.put_bytes(text) for text in (b"{}\n", b"{ }\n", b'{"main": null}'))
    reward = content_id("reward/1", "code")
    for content, files in ((data, {}), (lost, {}), (reward, {"score": code})):
        record_import(objects, content, Source(kind="data", address="x", size_bytes=3, num_files=1, code=files))
    scores = objects.put_bytes(b"[1.0]")
    record_lineage(objects, made("score_rewards", {"reward_source": reward, "rows": data}, scores))
    objects.set_ref("labels/kept", scores)
    collect_garbage(objects, min_age=timedelta(0))
    assert [len(sources_of(objects, content)) for content in (data, lost, reward)] == [1, 0, 1]
    assert code_behind(objects, reward) == {"score": code} and objects.exists(code)
    assert not verify_store(objects).damage


def test_secrets_of_addresses_are_in_no_record(tmp_path: Path) -> None:
    for address in (
        "https://user:pass-word@host/x?sig=abc",
        "s3://bucket/x?AWSSecretKey=abc",
        "https://host/x?token=abc",
    ):
        shown = source_of_files("data", address, []).model_dump_json()
        assert "pass-word" not in shown and "abc" not in shown
