"""Suites of runs that train: evaluated at every moment, once a model, and never in the way of training."""

from __future__ import annotations

import html
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rollout_core.config import CONFIG_KINDS, EvalConfig, NightlyConfig, load_config, parse_config
from rollout_core.evaluation.reports import SuiteReport
from rollout_core.runs.evaluations import evaluated_models, find_evaluated
from rollout_core.runs.figures import REWARD, curves_of
from rollout_core.runs.run_records import RunDetail, RunHead, RunRecords
from rollout_core.runs.run_samples import own_evaluations, sample_sets
from tests.evaluation import inspected
from tests.evaluation.lm_eval_tasks import write_tasks
from tests.flows.conftest import finished_samples, objects, small_grpo, wait_for

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

ROLLOUT = ("-c", "from flows.cli import main; main()")


def last_run() -> tuple[RunHead, RunDetail]:
    records = RunRecords(objects())
    return records.detail(records.find("latest"))


def states(detail: RunDetail) -> dict[str, str]:
    """Of the stages, by title."""
    return {f"{call.stage} {call.label}".strip(): call.state for call in detail.calls}


@pytest.fixture
def suite(tmp_path: Path, sorting_task: Any) -> dict[str, Any]:
    """Long answers are worth more here, which untrained models give."""
    rows = sorting_task.held_out.read_text().splitlines(keepends=True)[:8]
    (tmp_path / "questions.jsonl").write_text("".join(rows))
    return {
        "name": "long",
        "rows": {"path": str(tmp_path / "questions.jsonl")},
        "sampling": {"temperature": 0.0, "max_tokens": 12},
        "scorer": {"kind": "expression", "expression": "num_characters / 100"},
        "metrics": ["mean"],
    }


@pytest.fixture
def with_suites(small_nightly: dict[str, Any], suite: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A nightly run of seconds with a suite in its file and one in a file of its own."""
    small_nightly["sft"]["budget"] = {"max_steps": 8}
    small_nightly["ppo"] |= {"iterations": 3, "prompts_per_iteration": 32, "epochs": 1, "minibatch_size": 16}
    (tmp_path / "drawn.toml").write_text(
        f'name = "drawn"\nrows = {{ path = "{tmp_path}/questions.jsonl" }}\nsamples = 3\n'
        "sampling = { temperature = 1.0, max_tokens = 6 }\n"
    )
    small_nightly["evaluation"]["suites"] = [{"suite": suite, "every": 1}, {"suite": str(tmp_path / "drawn.toml")}]
    return small_nightly


MOMENTS = ["before", "after SFT", "after iteration 1", "after iteration 2", "after PPO"]


def test_models_are_evaluated_at_every_moment_and_never_twice(
    prefect_server: str, with_suites: dict[str, Any], suite: dict[str, Any], tmp_path: Path
):
    from flows.evaluate import evaluate_suites
    from flows.nightly import nightly

    def evaluate(model: str) -> SuiteReport:
        document = {"model": {"uri": model}, "backend": {"kind": "transformers"}, "suites": [suite]}
        return SuiteReport.model_validate(evaluate_suites(EvalConfig.model_validate(document))["reports"][0])

    evaluated = evaluate(with_suites["model"]["uri"])
    drawn = finished_samples()
    result = nightly(parse_config(with_suites, NightlyConfig))
    head, detail = last_run()
    found = states(detail)
    assert found["batch_inference suite long, before"] == found["report_suite suite long, before"] == "Cached"
    reports = {call.label: SuiteReport.model_validate(of) for call, of in detail.results("SuiteReport")}
    assert list(reports) == [
        *(f"suite {name}, {moment}" for moment in MOMENTS[:2] for name in ("long", "drawn")),
        *(f"suite long, {moment}" for moment in MOMENTS[2:4]),
        *(f"suite {name}, after PPO" for name in ("long", "drawn")),
    ]
    assert reports["suite long, before"] == evaluated and reports["suite long, after PPO"].model == result["model"]

    # The other way round nothing is generated, either.
    asked = finished_samples()
    assert asked == drawn + 3 * 32 + 3 * 32 + 4 * 8 + 3 * 24
    assert evaluate(result["model"]) == reports["suite long, after PPO"]
    assert finished_samples() == asked

    # The run's record, its curves and its samples.
    assert head.suites == ("long", "drawn") and list(result["held_out"]) == ["before", "after SFT", "after PPO"]
    curves = curves_of(objects(), head, detail)
    assert len(curves[REWARD].y) == 3 and curves[REWARD].y == list(result["rewards"])
    curve = curves["suite long: mean"]
    assert curve.labels == MOMENTS and curve.x == [1, 2, 3, 4, 5]
    values = [reports[f"suite long, {moment}"].headline for moment in MOMENTS]
    assert curve.y == [value.value for value in values]
    assert all(low <= y <= high for low, y, high in zip(curve.lower, curve.y, curve.upper, strict=True))
    assert len(curves["suite drawn: pass@3"].y) == 3
    assert [each.label for each in own_evaluations(detail)] == ["before", "after SFT", "after PPO"]
    assert {each.label for each in sample_sets(detail) if each.is_held_out} >= set(reports)
    model = find_evaluated(evaluated_models(RunRecords(objects())), result["model"])
    assert set(model.reports) == {"long", "drawn"}

    # The report, the morning's message and the summary say what fell.
    folder = Path(result["report"])
    page = (folder / "index.html").read_text()
    gain = values[-1].value - values[0].value
    assert gain < 0, "an untrained model ends no answer"
    line = f"suite long: mean {values[0].value:.4f} (before) -> {values[-1].value:.4f}, gain {gain:.4f}, 0.95 interval "
    assert f'<li class="wrong">{html.escape(line)}' in page and "<td>drawn</td><td>pass@3</td>" in page
    assert (folder / "suite-long.png").read_bytes()[:4] == b"\x89PNG" and 'src="suite-drawn.png"' in page
    assert detail.facts["fell"].startswith(line) and detail.facts["suite long"].startswith("mean 0.")

    # A guard looks at the same reports.
    fell = values[0].value - values[-1].value
    for max_drop, said in ((fell - 1e-6, "refused"), (fell + 1e-6, "passed")):
        with_suites["promotion"] = {"guards": [{"kind": "suite", "name": "long", "max_drop": max_drop}]}
        guarded = nightly(parse_config(with_suites, NightlyConfig))
        page = (Path(guarded["report"]) / "index.html").read_text()
        assert f"<li>guard {said}: {html.escape(line)}" in page
        assert (f"a guard refused it: {line}" in last_run()[0].reason) == (said == "refused")
    assert finished_samples() == asked

    # They are in nobody's key: the same run without them finds its training cached, and with them again everything.
    del with_suites["evaluation"]["suites"], with_suites["promotion"]
    plain = nightly(parse_config(with_suites, NightlyConfig))
    assert plain["model"] == result["model"]
    _, detail = last_run()
    computed = [call.stage for call in detail.calls if call.state == "Completed"]
    assert all(stage.startswith(("import_", "snapshot")) for stage in computed), computed
    assert finished_samples() == asked


def test_tasks_of_lm_eval_are_read_once_and_asked_at_every_moment(
    prefect_server: str, with_suites: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Their figures select an iteration, guard the promotion and are in the report, as those of any suite."""
    from flows.evaluate import evaluate_suites
    from flows.nightly import nightly

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_tasks(folder)
    tasks = {
        "kind": "lm_eval",
        "name": "theirs",
        "tasks": ["all_sums", "chosen", "told"],
        "include_path": str(folder),
        "bootstrap_iters": 100,
    }
    entry = {"suite": tasks, "every": 1, "select": "best", "metric": "told/perplexity"}
    guard = {"kind": "suite", "name": "theirs", "metric": "chosen/acc_norm", "max_drop": 1.0}
    with_suites["ppo"]["iterations"] = 2
    with_suites["evaluation"]["suites"] = [entry]
    with_suites["promotion"] = {"guards": [guard]}
    result = nightly(parse_config(with_suites, NightlyConfig))
    _, detail = last_run()
    reports = {call.label: SuiteReport.model_validate(of) for call, of in detail.results("SuiteReport")}
    moments = [*MOMENTS[:4], "after PPO"]
    assert list(reports) == [f"suite theirs, {moment}" for moment in moments]
    imports = [call for call in detail.calls if call.stage == "import_lm_eval"]
    assert [call.label for call in imports] == ["suite theirs, questions"]
    assert reports["suite theirs, before"].headline.name == "all_sums/exact_match,strict"
    assert reports["suite theirs, before"].num_questions == 24

    told = {moment: reports[f"suite theirs, {moment}"].figure("told/perplexity").value for moment in moments[2:4]}
    best = min(told, key=lambda moment: told[moment])
    assert detail.facts["selected"].startswith(
        f"{best.removeprefix('after ')}, with the lowest told/perplexity on suite"
    )
    assert reports["suite theirs, after PPO"].figure("told/perplexity").value == pytest.approx(told[best], rel=1e-3)
    curves = curves_of(objects(), *last_run())
    assert curves["suite theirs: told/perplexity"].labels == moments
    page = (Path(result["report"]) / "index.html").read_text()
    line = "suite theirs: chosen/acc_norm "
    assert f"<li>guard passed: {line}" in page and "<td>theirs</td><td>told/perplexity</td>" in page

    # `rollout eval run` asks the same.
    asked = finished_samples()
    document = {"model": {"uri": result["model"]}, "backend": {"kind": "transformers"}, "suites": [tasks]}
    found = evaluate_suites(EvalConfig.model_validate(document))["reports"][0]
    assert SuiteReport.model_validate(found) == reports["suite theirs, after PPO"] and finished_samples() == asked


def test_tasks_of_inspect_ai_are_found_once_and_asked_at_every_moment(
    prefect_server: str, with_suites: dict[str, Any], chat_base: Path, tmp_path: Path
):
    """Their figures guard the promotion and are in the report, as those of any suite."""
    from flows.evaluate import evaluate_suites
    from flows.nightly import nightly

    shutil.copy(str(inspected.__file__), tmp_path / "asked.py")
    tasks = {
        "kind": "inspect",
        "name": "theirs",
        "tasks": [f"{tmp_path}/asked.py@sums"],
        "limit": 3,
        "generate_config": {"max_tokens": 8},
    }
    with_suites["model"]["uri"] = str(chat_base)
    with_suites["ppo"]["iterations"] = 2
    with_suites["evaluation"]["suites"] = [{"suite": tasks, "every": 1}]
    with_suites["promotion"] = {"guards": [{"kind": "suite", "name": "theirs", "max_drop": 1.0}]}
    result = nightly(parse_config(with_suites, NightlyConfig))
    _, detail = last_run()
    reports = {call.label: SuiteReport.model_validate(of) for call, of in detail.results("SuiteReport")}
    moments = [*MOMENTS[:3], "after PPO"]
    assert list(reports) == [f"suite theirs, {moment}" for moment in moments]
    imports = [call for call in detail.calls if call.stage == "import_inspect"]
    assert [call.label for call in imports] == ["suite theirs, questions"]
    assert {(each.headline.name, each.num_questions, each.num_samples) for each in reports.values()} == {
        ("accuracy", 3, 6)
    }
    assert curves_of(objects(), *last_run())["suite theirs: accuracy"].labels == moments
    page = (Path(result["report"]) / "index.html").read_text()
    assert "<li>guard passed: suite theirs: accuracy " in page and "<td>theirs</td><td>accuracy</td>" in page

    # `rollout eval run` asks the same.
    asked = finished_samples()
    document = {"model": {"uri": result["model"]}, "backend": {"kind": "transformers"}, "suites": [tasks]}
    found = evaluate_suites(EvalConfig.model_validate(document))["reports"][0]
    assert SuiteReport.model_validate(found) == reports["suite theirs, after PPO"] and finished_samples() == asked


def test_training_of_other_flows_is_evaluated_before_and_after(
    prefect_server: str, suite: dict[str, Any], tiny_model: Path, sorting_task: Any
):
    from flows.train import train_grpo, train_sft

    evaluation = {"suites": [{"suite": suite}]}
    sft = {
        "seed": 5,
        "num_threads": 1,
        "run": {"name": "tuned"},
        "backend": {"kind": "transformers"},
        "evaluation": evaluation,
        "algorithm": {
            "kind": "sft",
            "base_model": {"uri": str(tiny_model)},
            "dataset": {"path": str(sorting_task.sft)},
            "budget": {"max_steps": 2},
            "sequence": {"max_length": 64},
            "optimizer": {"lr": 1e-3},
        },
    }
    done = train_sft(parse_config(sft, CONFIG_KINDS["train-sft"]))  # pyright: ignore[reportArgumentType]
    _, detail = last_run()
    assert [call.label for call, _ in detail.results("SuiteReport")] == ["suite long, before", "suite long, after SFT"]
    assert [of["model"] for _, of in detail.results("SuiteReport")][1] == done["model"]
    assert detail.facts["suite long"].startswith("mean ")

    keys = {"iterations": 2, "prompts_per_iteration": 8, "samples_per_prompt": 2, "minibatch_size": 8}
    grpo = small_grpo(tiny_model, sorting_task, "groups", **keys, sampling={"max_tokens": 8}, optimizer={"lr": 1e-4})
    grpo["evaluation"] = {"suites": [{"suite": suite, "every": 1}]}
    train_grpo(parse_config(grpo, CONFIG_KINDS["train-grpo"]))  # pyright: ignore[reportArgumentType]
    head, detail = last_run()
    labels = [call.label for call, _ in detail.results("SuiteReport")]
    assert labels == [f"suite long, {moment}" for moment in ("before", "after iteration 1", "after GRPO")]
    assert states(detail)["batch_inference suite long, before"] == "Cached"
    assert len(curves_of(objects(), head, detail)[REWARD].y) == 2


def test_training_ends_by_a_suite_and_the_result_is_the_iteration_that_it_selects(
    prefect_server: str, suite: dict[str, Any], tiny_model: Path, sorting_task: Any
):
    """The suite's figure never changes, so the first iteration is the best and the second one too many."""
    from flows.train import train_grpo

    keys = {"iterations": 4, "prompts_per_iteration": 8, "samples_per_prompt": 2, "minibatch_size": 8}
    grpo = small_grpo(tiny_model, sorting_task, "ended", **keys, sampling={"max_tokens": 8}, optimizer={"lr": 1e-3})

    def train() -> tuple[dict[str, Any], RunDetail]:
        done = train_grpo(parse_config(grpo, CONFIG_KINDS["train-grpo"]))  # pyright: ignore[reportArgumentType]
        return done, last_run()[1]

    # The whole run keeps its last model alone.
    _, detail = train()
    models = [result["model"] for _, result in detail.results("Checkpoint")]
    assert len(set(models)) == 4 and not objects().tree_is_present(models[0])

    same = {**suite, "scorer": {"kind": "expression", "expression": "0.5"}, "name": "same"}
    grpo["evaluation"] = {"suites": [{"suite": same, "every": 1, "select": "best", "patience": 1}]}
    for _ in range(2):
        done, detail = train()
        assert done["model"] == models[0] and objects().tree_is_present(models[0])
        assert len(done["rewards"]) == 2
        reports = {call.label: of["model"] for call, of in detail.results("SuiteReport")}
        assert list(reports.items())[1:] == [
            ("suite same, after iteration 1", models[0]),
            ("suite same, after iteration 2", models[1]),
            ("suite same, after GRPO", models[0]),
        ]
        assert detail.facts["selected"] == "iteration 1, with the highest mean on suite same (0.5000)"
        assert detail.facts["ended"].startswith(
            "after iteration 2, as the last 1 evaluations brought no higher mean on"
        )


def test_killed_in_the_middle_of_a_suite_the_next_run_asks_only_what_is_missing(
    prefect_server: str, small_nightly: dict[str, Any], tmp_path: Path, start_process: Any, sorting_task: Any
):
    rows = [{"prompt": f"sort {n} {n + 1} =", "answer": str(n)} for n in range(60)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small_nightly["backend"] = {"kind": "scripted", "delay_seconds": 0.03}
    small_nightly["sft"]["budget"] = {"max_steps": 2}
    del small_nightly["ppo"]
    pairs = tmp_path / "pairs.jsonl"
    pair = {"chosen": "1", "rejected": "2"}
    pairs.write_text("".join(json.dumps({"prompt": f"sort {n} 1 =", **pair}) + "\n" for n in range(4)))
    small_nightly["dpo"] = {
        "dataset": {"path": str(pairs)},
        "budget": {"max_steps": 1},
        "optimizer": {"lr": 1e-4},
        "sequence": {"max_length": 64},
    }
    suite = {
        "name": "many",
        "rows": {"path": str(tmp_path / "many.jsonl")},
        "samples": 4,
        "sampling": {"temperature": 1.0, "max_tokens": 64},
        "scorer": {"kind": "text", "compare": "contains"},
    }
    small_nightly["evaluation"]["suites"] = [{"suite": suite}]
    config = tmp_path / "nightly.json"
    config.write_text(json.dumps(small_nightly))

    def run() -> subprocess.Popen[str]:
        code = (
            "import json, sys; from rollout_core.config import NightlyConfig, parse_config;"
            "from flows.nightly import nightly;"
            f"nightly(parse_config(json.load(open({str(config)!r})), NightlyConfig))"
        )
        return start_process("-c", code, env={"PREFECT_API_URL": prefect_server})

    held_out = len(sorting_task.held_out.read_text().splitlines())
    process = run()
    wait_for(lambda: finished_samples() >= held_out + 20, "20 answers to the suite", process=process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = finished_samples()
    assert held_out + 20 <= kept < held_out + 240
    process = run()
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output[-4000:]
    assert finished_samples() == 3 * (held_out + 240)
    _, detail = last_run()
    reports = [SuiteReport.model_validate(of) for _, of in detail.results("SuiteReport")]
    assert [report.num_samples for report in reports] == [240, 240, 240]
    wanted = [float(row["answer"] in f"SCRIPTED:{row['prompt']}") for row in rows]
    assert [objects().get_json(report.questions)["values"]["mean"] for report in reports] == [wanted] * 3


def test_the_example_is_planned(tmp_path: Path):
    config = load_config(Path(__file__).resolve().parents[2] / "examples" / "nightly-suites.toml", NightlyConfig)
    assert [entry.every for entry in config.evaluation.suites] == [None, 2]
