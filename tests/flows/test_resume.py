"""Nothing is lost: real processes killed in any stage, then run again, end in the bytes of an undisturbed run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollout_core.config import NightlyConfig, load_config
from rollout_core.runs.figures import curves_of
from rollout_core.runs.run_records import RunHead, RunRecords, runs_under_way, shown_state
from rollout_core.runs.run_samples import sample_sets
from tests.flows.conftest import finished_samples, objects, snapshots_of, wait_for, write_toml
from tests.support.machine import CHROMIUM
from tests.support.pages import chromium, serving

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]

SAMPLES = 160
ROLLOUT = ("-c", "from flows.cli import main; main()")
HEAVY = {"torch", "vllm", "transformers", "matplotlib"}
STAGES = (
    "import_",
    "enqueue_prompts",
    "sft_update",
    "snapshot",
    "evaluate",
    "batch_inference",
    "score_rewards",
    "ppo_",
)


def nightly(
    start_process, config: Path, prefect_server: str, *, stdout: Any = subprocess.PIPE, **settings: str
) -> subprocess.Popen[str]:
    environment = {"PREFECT_API_URL": prefect_server, "COLUMNS": "200", **settings}
    return start_process(*ROLLOUT, "nightly", "--config", str(config), env=environment, stdout=stdout)


def finish(process: subprocess.Popen[str]) -> tuple[str, list[tuple[str, str, str]]]:
    """Final model id and (stage, label, state) of every stage."""
    return read(output_of(process))


def output_of(process: subprocess.Popen[str]) -> str:
    """All that a run printed, which has succeeded."""
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output[-4000:]
    return output


def read(output: str) -> tuple[str, list[tuple[str, str, str]]]:
    """As `finish`."""
    model = re.search(r"^model ([0-9a-f]{64}):", output, re.MULTILINE)
    assert model, output[-4000:]
    rows = []
    for line in output.splitlines():
        parts = re.match(r"(\w+)\s+(.*?)\s*(cached|completed)\s+[\d.]+", line)
        if parts and parts[1].startswith(STAGES):
            rows.append((parts[1], parts[2], parts[3]))
    return model[1], rows


def kill(process: subprocess.Popen[str]) -> None:
    assert process.poll() is None, "it ended before it could be killed:\n" + (process.communicate()[0] or "")[-3000:]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass
class Undisturbed:
    """A run that nothing happens to, made once for the module."""

    folder: Path
    model: str = ""
    """Id of the final model."""

    def run(self, config: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        if not self.model:
            from flows.nightly import nightly as flow

            with monkeypatch.context() as patch:
                for name, value in (
                    ("ROLLOUT_STORAGE", f"file://{self.folder / 'objects'}"),
                    ("ROLLOUT_DATABASE", f"sqlite:///{self.folder / 'rollout.db'}"),
                    ("ROLLOUT_CACHE", str(self.folder / "cache")),
                ):
                    patch.setenv(name, value)
                self.model = flow(load_config(config, NightlyConfig))["model"]
        return self.model


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


def test_killed_in_sft_in_generation_and_in_a_ppo_update_the_next_run_ends_in_the_same_bytes(
    small_nightly, tmp_path, start_process, prefect_server, undisturbed, monkeypatch
):
    config = write_toml(tmp_path / "nightly.toml", small_nightly)
    expected = undisturbed.run(config, monkeypatch)

    first = nightly(start_process, config, prefect_server)
    wait_for(lambda: snapshots_of("sft"), "an SFT snapshot", process=first)
    kill(first)
    sft_step = snapshots_of("sft")[0].step
    assert 0 < sft_step < 24, "killed within SFT"

    second = nightly(start_process, config, prefect_server)
    evaluated = 2 * 32
    wait_for(
        lambda: evaluated < finished_samples() < evaluated + SAMPLES, "part of an iteration's samples", process=second
    )
    kill(second)
    done_before = finished_samples()
    assert evaluated < done_before < evaluated + SAMPLES, "killed within generation"

    third = nightly(start_process, config, prefect_server)
    wait_for(lambda: snapshots_of("ppo"), "a PPO snapshot", process=third)
    kill(third)
    assert snapshots_of("ppo")[0].step < 24, "killed within the first PPO update"

    model, stages = finish(nightly(start_process, config, prefect_server))
    assert model == expected
    states = {(stage, label): state for stage, label, state in stages}
    assert states["sft_update", ""] == "cached"
    assert states["evaluate", "before"] == "cached" and states["evaluate", "after SFT"] == "cached"
    assert states["batch_inference", "iteration 1"] == "cached"
    assert states["ppo_update", "iteration 1"] == "completed"

    pictures = {path.name: path.read_bytes() for path in (tmp_path / "report").glob("*.png")}
    output = output_of(nightly(start_process, config, prefect_server, PYTHONPROFILEIMPORTTIME="1"))
    again, stages = read(output)
    assert again == expected
    computed = {stage for stage, _, state in stages if state != "cached"}
    assert computed <= {"import_model", "import_sft", "import_prompts"}, "a second run finds every stage cached"
    imported = set(re.findall(r"^import time: .*\| +([\w.]+)$", output, re.MULTILINE))
    # By its first import: Python gives no time of what `import_module` names.
    assert "flows.evaluation" in imported and not imported & HEAVY, "what computes nothing needs none of them"
    assert pictures and pictures == {path.name: path.read_bytes() for path in (tmp_path / "report").glob("*.png")}

    records = RunRecords(objects())
    alive = runs_under_way(objects())
    assert [shown_state(head, alive) for head in records.heads()] == ["completed", "completed", "lost", "lost", "lost"]
    head, detail = records.detail(records.find("latest"))
    assert [moment.name for moment in head.held_out] == ["before", "after SFT", "after PPO"]
    assert (detail.facts["checkpoint"], head.counts.get("computed", 0)) == (expected, 0)
    assert [each.label for each in sample_sets(detail)][:3] == ["before", "after SFT", "after PPO"]
    curves = curves_of(objects(), head, detail)
    assert curves["sft_update: loss"].x == list(range(1, 25))
    assert len(curves["reward of iterations"].y) == 2
    if CHROMIUM.find():
        with chromium() as browser:
            look_at_runs(browser, serving(start_process, tmp_path / "ui.log"), records.heads())


def look_at_runs(browser: Any, address: str, heads: Sequence[RunHead]) -> None:
    """The pages of killed runs and of the one that went on from what they had."""
    page = browser.new_page(viewport={"width": 1180, "height": 980}, color_scheme="light")
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address)
    states = page.locator("tbody .state").all_inner_texts()
    assert states == ["completed", "completed", "lost", "lost", "lost"]
    page.goto(f"{address}/runs/{heads[-1].id}")
    assert page.get_by_text("start the run again (by the same command").count() == 1
    page.goto(f"{address}/compare?run={heads[1].id}&run={heads[2].id}")
    page.wait_for_selector(".chart canvas")
    page.goto(f"{address}/runs/{heads[1].id}/samples/0?label=iteration+1&by=advantage")
    assert page.get_by_text("As the loss of ppo_update iteration 1 had them").count() == 1
    assert "advantage " in (page.locator("pre.tokens span").first.get_attribute("title") or "")
    page.goto(f"{address}/runs/{heads[1].id}")
    page.wait_for_selector(".chart canvas")
    assert page.locator(".timeline rect.Cached").count() > 3, "what those before had done"
    assert problems == []


@pytest.mark.campaign
def test_two_runs_of_one_config_at_once_give_one_result(
    small_nightly, tmp_path, start_process, prefect_server, undisturbed, monkeypatch
):
    config = write_toml(tmp_path / "nightly.toml", small_nightly)
    expected = undisturbed.run(config, monkeypatch)
    runs = [nightly(start_process, config, prefect_server) for _ in range(2)]
    assert {finish(run)[0] for run in runs} == {expected}
    # Each update was computed by one of the two: where both name its state, it took the same time.
    found = {(snapshot.id, snapshot.meta["training_seconds"]) for snapshot in snapshots_of("ppo")}
    assert len(found) == len({snapshot.id for snapshot in snapshots_of("ppo")})


def test_a_flipped_bit_in_the_final_checkpoint_is_found_and_recomputed(
    small_nightly, tmp_path, start_process, prefect_server, undisturbed, monkeypatch
):
    config = write_toml(tmp_path / "nightly.toml", small_nightly)
    model = undisturbed.run(config, monkeypatch)
    shutil.copytree(undisturbed.folder / "objects", tmp_path / "objects")
    shutil.copy(undisturbed.folder / "rollout.db", os.environ["ROLLOUT_DATABASE"].removeprefix("sqlite:///"))
    weights = next(file for file in objects().manifest(model).files if file.path == "model.safetensors")
    root = Path(os.environ["ROLLOUT_STORAGE"].removeprefix("file://"))
    blob = root / "cas" / weights.content_id[:2] / weights.content_id[2:4] / weights.content_id
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(bytes(data))
    # Evaluation of the final model is the stage that reads it.
    small_nightly["evaluation"]["sampling"]["max_tokens"] = 13
    run = nightly(start_process, write_toml(config, small_nightly), prefect_server)
    output, _ = run.communicate(timeout=500)
    assert run.returncode == 0, output[-3000:]
    assert weights.content_id in output and "corrupt" in output
    assert f"model {model}:" in output, "recomputed to the same bytes"


def test_a_full_disk_ends_in_one_clear_failure_and_the_next_run_goes_on(
    small_nightly, tmp_path, start_process, prefect_server, undisturbed, monkeypatch
):
    config = write_toml(tmp_path / "nightly.toml", small_nightly)
    expected = undisturbed.run(config, monkeypatch)
    limited = start_process(
        "-c",
        # No file of this process may grow past 300 KB: checkpoints do not fit, as on a disk that is full.
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY));"
        "import rollout_core.base.errors as e; e.RetryHint.delay_for_try = lambda self, retry: 0.0;"
        "from flows.cli import main; main()",
        "nightly",
        "--config",
        str(config),
        env={"PREFECT_API_URL": prefect_server},
    )
    output, _ = limited.communicate(timeout=500)
    assert limited.returncode == 1, output[-3000:]
    assert "File too large" in output.splitlines()[-1] or "File too large" in output
    assert not list(objects().list_refs("results")) or "sft_update" not in output.split("Cached")[0]
    model, _ = finish(nightly(start_process, config, prefect_server))
    assert model == expected
