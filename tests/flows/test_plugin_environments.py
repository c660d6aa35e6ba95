"""Training and evaluation in environments that plugins have: an edited plugin is played anew and nothing before it is
computed again, and what was played is filed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.reproduce import plan_reproduction, reproduce
from rollout_core.base.ids import ContentId
from rollout_core.config import EvalConfig, TrainGRPOConfig, TrainPPOConfig, parse_config
from rollout_core.objects.origins import imported_ids, sources_of
from rollout_core.plans.learner_plan import plan_suites, plan_training
from rollout_core.plugins.scaffold import write_plugin
from tests.flows.conftest import objects, write_toml
from tests.flows.test_playing import SAMPLING, TEMPLATE, document

pytestmark = pytest.mark.server
WORDS = {"kind": "plugin", "name": "words", "config": {"word": "1"}, "max_turns": 3}


@pytest.fixture
def work(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model that has a chat template, and rows."""
    shutil.copytree(tiny_model, tmp_path / "model")
    settings = tmp_path / "model" / "tokenizer_config.json"
    template = "{% if tools %}tools: {{ tools[0].function.name }}<|endoftext|>\n{% endif %}" + TEMPLATE
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"digits": f"{number} 1"}) + "\n" for number in range(6)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def grpo(**environment: Any) -> dict[str, Any]:
    given = document()
    given["environment"] = WORDS | environment
    given["algorithm"] |= {"iterations": 1, "samples_per_prompt": 2, "minibatch_size": 2}
    return given


@pytest.mark.parametrize("mode", ["in-process", "sidecar"])
def test_an_edited_plugin_is_played_anew_and_what_was_played_is_filed(
    prefect_server: str, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
):
    from flows.train import train_grpo
    from tasks.runtime.planning import plan_run

    folder = work / "plugins/words"
    write_plugin("env-harness", "words", folder, mode)
    config = parse_config(grpo(), TrainGRPOConfig)
    model = ContentId(train_grpo(config)["model"])

    def states() -> dict[str, str]:
        return {call.stage: call.state for call in plan_run("train-grpo", config).calls if call.state != "checked"}

    played = states()
    assert set(played.values()) == {"cached"}
    code = folder / ("plugin.py" if mode == "in-process" else "main.py")
    text = code.read_text()
    code.write_text(text + "\n# edited\n")
    edited = states()
    assert edited["enqueue_episodes"] == "computed" and "cached" not in set(edited.values())
    code.write_text(text)
    (work / "data/rollout/plugins").mkdir(parents=True)
    folder.rename(work / "data/rollout/plugins/elsewhere")
    assert states() == played, "where it lies does not count"

    filed = {source.address for name in imported_ids(objects()) for source in sources_of(objects(), name)}
    assert "plugin words 0.1.0" in filed

    shutil.rmtree(work / "data")
    source = objects()
    plan = plan_reproduction(source, model)
    assert plan.problems == []
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'again'}")
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / "again-cache"))
    assert reproduce(model, source.url) == {"same": [step.title for step in plan.steps], "difference": None}


def test_every_kind_of_run_that_plays_plans_a_plugin(work: Path):
    write_plugin("env-harness", "words", work / "plugins/words", "sidecar")
    facts = plan_training(parse_config(grpo(), TrainGRPOConfig), work)
    assert facts["environment"].startswith("plugin words (")
    assert facts["environment"].endswith("1 tools (letter)")
    ppo = grpo()
    ppo["algorithm"] = {**ppo["algorithm"], "kind": "ppo"}
    ppo["algorithm"].pop("samples_per_prompt")
    assert plan_training(parse_config(ppo, TrainPPOConfig), work)["environment"].startswith("plugin words (")
    suite = {"name": "words", "rows": {"path": "rows.jsonl"}, "environment": WORDS, "sampling": SAMPLING}
    given = {"model": {"uri": "model"}, "backend": {"kind": "transformers"}, "suites": [suite]}
    assert plan_suites(parse_config(given, EvalConfig), work)["questions"] == {"words": "6 episodes"}
    path = write_toml(work / "run.toml", grpo(config={}))
    result = CliRunner().invoke(app, ["train", "grpo", "--config", str(path), "--dry-run"])
    assert result.exit_code == 2
    assert "environment: plugin words: config: 'word' is a required property" in result.output
