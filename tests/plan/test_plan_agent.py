"""The plan of a run that trains an agent: what is wrong is said before an engine starts."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config import LearnOnlineConfig, TrainAgentConfig, TunePromptConfig, apply_overrides, parse_config
from rollout_core.plans.agent_plan import plan_agent, plan_online, plan_prompt
from rollout_core.store.reachable import plain_connections
from tests.flows.kills import free_port

AGENT = """
from rollout_core.agents import rollout
@rollout
def agent(task, llm): return 1.0
def plain(task, llm): return 1.0
"""


@pytest.fixture
def work(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, template in (("model", "{{ messages[0].content }}"), ("without", None)):
        shutil.copytree(tiny_model, tmp_path / name)
        settings = tmp_path / name / "tokenizer_config.json"
        found = json.loads(settings.read_text()) | ({} if template is None else {"chat_template": template})
        settings.write_text(json.dumps(found))
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    (tmp_path / "tasks.jsonl").write_text('{"question": "a"}\n{"question": "b", "answer": 3}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"question": "a"}\n[]\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(**changes: Any) -> dict[str, Any]:
    document = {
        "agent": {"function": "agent.py:agent"},
        "backend": {"kind": "transformers"},
        "algorithm": {
            "kind": "grpo",
            "base_model": {"uri": "model"},
            "prompts": {"path": "tasks.jsonl"},
            "optimizer": {"lr": 1e-4},
        },
        "evaluation": {"tasks": {"path": "tasks.jsonl"}},
    }
    changed = apply_overrides(document, {key.replace("__", "."): value for key, value in changes.items()})
    return plan_agent(parse_config(changed, TrainAgentConfig), Path.cwd(), plain_connections())


def test_facts_of_a_sound_run(work: Path):
    facts = plan()
    assert (facts["training tasks"], facts["held-out tasks"]) == (2, 2)
    assert facts["agent"].startswith("agent.py:agent (")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent__function": "agent.py:agnt"}, "agent.function: agent agent.py:agnt: there is no 'agnt'; did you mean"),
        ({"agent__function": "agent.py:plain"}, "is a function; expected a function decorated with @rollout"),
        ({"agent__function": "nowhere.py:agent"}, "agent.function: agent file .*nowhere.py does not exist"),
        ({"agent__function": "broken.py:agent"}, "fails on import: .*no_such_module"),
        ({"algorithm__base_model__uri": "without"}, "tokenizer has no chat template"),
        ({"algorithm__prompts__path": "empty.jsonl"}, "algorithm.prompts.path: "),
        ({"algorithm__prompts__path": "bad.jsonl"}, "bad.jsonl:2"),
        ({"evaluation__tasks__path": "missing.jsonl"}, "evaluation.tasks.path: .*missing.jsonl"),
        ({"runners__host": "0.0.0.0"}, "beyond this machine, and there is no api_key"),
        ({"runners__api_key": "AGENTS", "runners__host": "0.0.0.0"}, "no address to connect to; give public_host"),
        ({"runners__api_key": "AGENTS"}, "runners.api_key: secret 'AGENTS'"),
        ({"runners__where": "elsewhere"}, "runners from elsewhere need to know a key"),
        ({"runners__where": "dask", "runners__api_key": "AGENTS"}, "need both where"),
        (
            {"runners__where": "dask", "runners__dask": {"address": "tcp://127.0.0.1:1"}},
            "runners on Dask's workers need to know a key",
        ),
        ({"run__resume": "latest"}, "run.resume: a run of an agent resumes by itself"),
        ({"algorithm__sampling__top_p": 0.5}, "on-policy training needs samples of the policy itself"),
        ({"promotion__enabled": True, "evaluation": None}, "nothing is held out to judge by"),
        ({"promotion__guards": [{"kind": "length"}]}, r"promotion.guards \(length\) look at completions of"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(work: Path, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        plan(**changes)
    assert len(str(caught.value).splitlines()) == 1, caught.value


def test_what_an_agent_imports_may_be_where_its_runners_are_alone(work: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLOUT_SECRETS", "AGENTS")
    monkeypatch.setenv("ROLLOUT_SECRET_AGENTS", "a key")
    runners = {"runners__where": "elsewhere", "runners__api_key": "AGENTS"}
    (work / "elsewhere.py").write_text(f"import no_such_module\n{AGENT}")
    facts = plan(agent__function="elsewhere.py:agent", **runners)
    assert "agent.function (agent file" in facts["not checked"] and "'no_such_module'" in facts["not checked"]
    with pytest.raises(ConfigError, match="expected a function decorated with @rollout"):
        plan(agent__function="agent.py:plain", **runners)


def test_a_dask_scheduler_is_looked_for(work: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLOUT_SECRETS", "AGENTS")
    monkeypatch.setenv("ROLLOUT_SECRET_AGENTS", "a key")
    dask = {"runners__where": "dask", "runners__dask": {"address": "tcp://127.0.0.1:1"}, "runners__api_key": "AGENTS"}
    with pytest.raises(ConfigError, match="no Dask scheduler answers at tcp://127"):
        plan(**dask)


def plan_tuning(**changes: Any) -> dict[str, Any]:
    document = {
        "agent": {"function": "agent.py:agent"},
        "backend": {"kind": "transformers"},
        "model": {"uri": "model"},
        "template": {"text": "Answer {question}"},
        "tasks": {"path": "tasks.jsonl"},
        "evaluation": {"tasks": {"path": "tasks.jsonl"}},
        "critic": {"url": "http://127.0.0.1:9/v1", "model": "critic"},
    }
    changed = apply_overrides(document, {key.replace("__", "."): value for key, value in changes.items()})
    return plan_prompt(parse_config(changed, TunePromptConfig), Path.cwd(), plain_connections())


def test_facts_of_a_sound_search(work: Path):
    (work / "prompt.txt").write_text("Answer {{ question }} as {{ form }}\n")
    facts = plan_tuning(template={"path": "prompt.txt", "engine": "jinja"})
    assert (facts["tasks"], facts["held-out tasks"], facts["placeholders"]) == (2, 2, "form, question")
    assert "critic (the endpoint does not answer" in facts["not checked"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template__text": "Answer"}, "template: no placeholder is in it"),
        ({"template__text": "Answer {question"}, "template: the template cannot be read: "),
        ({"template": {"path": "missing.txt"}}, "template: the template .*missing.txt cannot be read"),
        ({"template": {"path": "empty.jsonl"}}, "template: the template .*empty.jsonl is empty"),
        ({"template": {}}, "template: expected either a text or the path of a file"),
        ({"template__name": "llm"}, "the resource 'llm' is the model"),
        ({"tasks__path": "empty.jsonl"}, "tasks.path: "),
        ({"evaluation__tasks__path": "bad.jsonl"}, "bad.jsonl:2"),
        ({"model__uri": "without"}, "tokenizer has no chat template"),
        ({"critic__api_key": "CRITIC"}, "critic.api_key: secret 'CRITIC'"),
        ({"critic__url": "critic"}, "critic.url: expected an address such as"),
        ({"run__resume": "latest"}, "run.resume: a search resumes by itself"),
    ],
)
def test_what_is_wrong_with_a_search_is_said_in_one_line(work: Path, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        plan_tuning(**changes)
    assert len(str(caught.value).splitlines()) == 1, caught.value


ONLINE_GRPO = {"kind": "grpo", "base_model": {"uri": "model"}, "samples_per_prompt": 8, "optimizer": {"lr": 1e-4}}


def plan_learning(**changes: Any) -> dict[str, Any]:
    document = {
        "algorithm": {"kind": "ppo", "base_model": {"uri": "model"}, "optimizer": {"lr": 1e-4}},
        "backend": {"kind": "transformers"},
        "runners": {"model_port": free_port()},
    }
    changed = apply_overrides(document, {key.replace("__", "."): value for key, value in changes.items()})
    return plan_online(parse_config(changed, LearnOnlineConfig), Path.cwd(), plain_connections())


def test_facts_of_sound_online_learning(work: Path):
    agent = {"function": "agent.py:agent"}
    facts = plan_learning(agent=agent, evaluation={"tasks": {"path": "tasks.jsonl"}}, runners={"model_port": 8123})
    assert facts["held-out tasks"] == 2 and facts["live agents call"] == "http://127.0.0.1:8123/v1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runners": {}}, "give runners.model_port a fixed port"),
        ({"work_live": True}, r"work_live needs runners that know what to do; give an \[agent\]"),
        ({"evaluation": {"tasks": {"path": "tasks.jsonl"}}}, r"an evaluation needs runners .* give an \[agent\]"),
        ({"agent__function": "agent.py:agent"}, "an agent is given, but no work for it"),
        ({"agent": {"function": "agent.py:plain"}, "work_live": True}, "expected a function decorated with @rollout"),
        (
            {"agent": {"function": "agent.py:agent"}, "work_live": True, "form": "transition"},
            "differ from those of the run",
        ),
        ({"promotion__enabled": False}, "promotion is switched off"),
        ({"live__max_rollouts": 8}, "max_rollouts is 8, fewer than min_rollouts, 64"),
        ({"algorithm__prompts": {"path": "tasks.jsonl"}}, "what is learnt from are live rollouts; leave out prompts"),
        ({"algorithm__optimizer__schedule": "linear"}, "nobody knows how many updates"),
        ({"algorithm__iterations": 3}, r"iterations has no effect on live rollouts, see \[live\] and max_updates"),
        ({"algorithm__prompts_per_iteration": 3}, "prompts_per_iteration has no effect on live rollouts"),
        (
            {"algorithm": ONLINE_GRPO, "live": {"min_rollouts": 4, "max_rollouts": 6}},
            "live.max_rollouts is 6, fewer than the 8 rollouts of equal input that are compared",
        ),
        ({"runners": {"model_port": 8123, "port": 8123}}, "port and model_port are both 8123"),
        ({"algorithm__sampling__top_p": 0.5}, "on-policy training needs samples of the policy itself"),
        ({"runners__api_key": "LIVE"}, "runners.api_key: secret 'LIVE'"),
        ({"run__resume": "latest"}, "run.resume: online learning resumes by itself"),
    ],
)
def test_what_is_wrong_with_online_learning_is_said_in_one_line(work: Path, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        plan_learning(**changes)
    assert len(str(caught.value).splitlines()) == 1, caught.value


def test_a_port_that_somebody_has_is_said(work: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"runners.model_port: cannot listen on 127.0.0.1:{port}"):
            plan_learning(runners__model_port=port)
