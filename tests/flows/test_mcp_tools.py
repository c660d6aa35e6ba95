"""Training in an environment with the tools of an MCP server."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config import TrainGRPOConfig, parse_config
from rollout_core.plans.learner_plan import plan_training
from tests.environments.test_mcp import RAW
from tests.flows.test_playing import document, work

pytestmark = pytest.mark.server
__all__ = ["work"]
LISTED = [{"name": "act", "description": "Act.", "inputSchema": {"type": "object"}}]


def asking(**settings: Any) -> TrainGRPOConfig:
    tool = {"kind": "mcp", "name": "raw", "command": [sys.executable, "server.py", "tools.json"], **settings}
    return parse_config(document(tools=[tool]), TrainGRPOConfig)


def test_what_a_server_has_is_planned_and_played_anew_where_it_changes(prefect_server: str, work: Path):
    from flows.train import train_grpo

    shutil.copy(RAW, work / "server.py")
    (work / "tools.json").write_text(json.dumps(LISTED))
    planned = plan_training(asking(), work)["environment"]
    assert planned.endswith("1 tools (raw_act)")
    trained = train_grpo(asking())
    played = (work / "episodes.jsonl").read_text()
    assert train_grpo(asking())["model"] == trained["model"]
    assert (work / "episodes.jsonl").read_text() == played
    (work / "tools.json").write_text(json.dumps([{**LISTED[0], "description": "Act now."}]))
    assert plan_training(asking(), work)["environment"] != planned
    train_grpo(asking())
    assert (work / "episodes.jsonl").read_text().count("\n") == 2 * played.count("\n")
    with pytest.raises(ConfigError, match=r"environment\.tools: MCP server raw .* has no tool 'atc' \(only\)"):
        plan_training(asking(only=["atc"]), work)
