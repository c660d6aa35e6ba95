"""The flow that tunes a prompt: runs to a report, is killed and resumes, and asks its critic nothing twice."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config import TunePromptConfig, parse_config
from rollout_core.store import SqlLightningStore
from tests.agents.scripted_chat import completion, scripted_chat
from tests.flows.conftest import write_toml
from tests.flows.test_train_agent import TEMPLATE

pytestmark = pytest.mark.server

AGENT = """
import os
import openai
from rollout_core.agents import rollout


@rollout
def agent(task, llm, prompt_template, rollout):
    with open(os.environ["AGENT_RUNS"], "a") as runs:
        runs.write(rollout.rollout_id + "\\n")
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    prompt = prompt_template.format(question=task["question"])
    client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": prompt}])
    return min(4, prompt.count("please")) / 4
"""


class Critic:
    """Critic and editor in one: the editor adds a "please" or takes one away, by the seed it is sent."""

    def __init__(self, act: Callable[[int], int | None] = lambda number: None) -> None:
        self.asked: list[str] = []
        self.act = act

    def __call__(self, request: dict[str, Any]) -> dict[str, Any] | int:
        assert request["messages"][0]["role"] == "system"
        self.asked.append(json.dumps([request["model"], request["messages"], request["seed"]]))
        number = len(self.asked)
        if (status := self.act(number)) is not None:
            return status
        if request["model"] == "critic":
            assert "SCRIPTED" in request["messages"][1]["content"], "what the model said"
            return completion(number, {"content": "It is not polite enough."})
        template = re.findall(r"<template>\n(.*?)\n</template>", request["messages"][1]["content"], re.DOTALL)[-1]
        better = f"{template} please" if request["seed"] % 5 else f"{template} now"
        return completion(number, {"content": f"<template>\n{better}\n</template>"})


@pytest.fixture
def work(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an agent, its tasks, and a model that has a chat template."""
    shutil.copytree(tiny_model, tmp_path / "model")
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [json.dumps({"question": f"sort {number} 1 ="}) + "\n" for number in range(2, 7)]
    (tmp_path / "tasks.jsonl").write_text("".join(rows))
    (tmp_path / "held-out.jsonl").write_text('{"question": "sort 9 8 ="}\n')
    (tmp_path / "seed.txt").write_text("Do {question}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENT_RUNS", str(tmp_path / "runs.txt"))
    return tmp_path


def document(url: str, **changes: Any) -> dict[str, Any]:
    return {
        "run": {"name": "prompt-test"},
        "agent": {"function": "agent.py:agent", "timeout_seconds": 60},
        "model": {"uri": "model"},
        "template": {"path": "seed.txt", "name": "instruction"},
        "tasks": {"path": "tasks.jsonl"},
        "evaluation": {"tasks": {"path": "held-out.jsonl"}, "sampling": {"max_tokens": 8}},
        "sampling": {"max_tokens": 8},
        "critic": {"url": url, "model": "critic", "editor": "editor"},
        "search": {"rounds": 2, "beam_width": 2, "branch_factor": 1, "gradient_batch_size": 2, "val_batch_size": 2},
        "backend": {"kind": "scripted"},
        "runners": {"where": "threads", "concurrency": 4},
        "report_dir": "report",
        **changes,
    }


def published(work: Path) -> dict[str, Any] | None:
    """The latest resources of the store."""

    async def look() -> dict[str, Any] | None:
        async with SqlLightningStore.from_url(f"sqlite:///{work / 'rollout.db'}") as store:
            latest = await store.get_latest_resources()
            return None if latest is None else dict(latest.resources)

    return asyncio.run(look())


def test_a_prompt_is_tuned_to_a_report_and_again_from_the_cache(prefect_server: str, work: Path):
    from flows.prompts import tune_prompt

    critic = Critic()
    with scripted_chat(critic) as url:
        config = parse_config(document(url), TunePromptConfig)
        first = tune_prompt(config)
        asked, runs = list(critic.asked), (work / "runs.txt").read_text().splitlines()
        again = tune_prompt(config)
    assert again == first
    assert critic.asked == asked and (work / "runs.txt").read_text().splitlines() == runs
    assert len(asked) == 8, "2 rounds of 2 rewritings, each a critique and an edit"
    assert len(set(runs)) == len(runs), "no rollout is run twice"
    assert first["promoted"] and first["held_out"] == {"before": 0.0, "after": first["scores"][-1]}
    assert first["scores"] == sorted(first["scores"]) and first["scores"][-1] >= 0.25
    best = (work / "report" / "best-template.txt").read_text()
    assert best.startswith("Do {question} ") and best.count("please") / 4 == first["held_out"]["after"]
    latest = published(work)
    assert latest is not None and latest["instruction"].template == best
    page = (work / "report" / "index.html").read_text()
    assert best in page and "critique_prompt" in page and "edit_prompt" in page


RUN = """
from rollout_core.config import TunePromptConfig, load_config
from flows.prompts import tune_prompt
print(tune_prompt(load_config("run.toml", TunePromptConfig))["template"])
"""


@pytest.mark.campaign
def test_killed_in_the_middle_and_started_again_the_critic_is_not_asked_again(
    prefect_server: str, work: Path, start_process: Any
):
    processes: list[subprocess.Popen[bytes]] = []

    def kill(number: int) -> int | None:
        if number == 5:  # the second round's first critique, which it never gets
            processes[0].kill()
            return 500
        return None

    critic = Critic(kill)
    with scripted_chat(critic) as url:
        write_toml(work / "run.toml", document(url))
        processes.append(start_process("-c", RUN, cwd=work, stdout=(work / "run.log").open("w")))
        assert processes[0].wait(240) == -9, (work / "run.log").read_text()
        assert len(critic.asked) == 5
        finished = (work / "runs.txt").read_text().splitlines()
        done = subprocess.run([sys.executable, "-c", RUN], cwd=work, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    counts = Counter(critic.asked)
    assert [text for text, count in counts.items() if count > 1] == [critic.asked[4]] and len(counts) == 8
    runs = (work / "runs.txt").read_text().splitlines()
    assert runs[: len(finished)] == finished and not set(runs[len(finished) :]) & set(finished)
    assert "please" not in done.stderr and "Do {question}" not in done.stderr, "the log has no prompts"


def test_answers_that_cannot_be_used_leave_the_first_template(prefect_server: str, work: Path):
    from flows.prompts import tune_prompt

    with scripted_chat(lambda request: completion(1, {"content": "Make it {shorter}"})) as url:
        result = tune_prompt(parse_config(document(url), TunePromptConfig))
    assert not result["promoted"] and result["scores"] == [0.0, 0.0]
    assert (work / "report" / "best-template.txt").read_text() == "Do {question}"
    assert published(work) is None


def test_a_call_that_is_refused_ends_the_run_and_shows_no_key(
    prefect_server: str, work: Path, monkeypatch: pytest.MonkeyPatch
):
    from flows.prompts import tune_prompt

    monkeypatch.setenv("ROLLOUT_SECRETS", "CRITIC")
    monkeypatch.setenv("ROLLOUT_SECRET_CRITIC", "sk-0123456789abcdef")
    critic = Critic(lambda number: 401)
    with scripted_chat(critic) as url:
        keyed = {"url": url, "model": "critic", "api_key": "CRITIC"}
        with pytest.raises(ConfigError, match=r"refuses the call: .*401.*; look at \[critic\]") as caught:
            tune_prompt(parse_config(document(url, critic=keyed), TunePromptConfig))
    assert len(critic.asked) == 1 and "0123456789abcdef" not in str(caught.value)
