"""Agents as classes and functions."""

from __future__ import annotations

import pytest

from rollout_core.agents import FunctionalLitAgent, LitAgent, llm_rollout, prompt_rollout, rollout
from rollout_core.base.errors import ConfigError
from rollout_core.store import LLM, Attempt, AttemptedRollout, PromptTemplate, ProxyLLM, Rollout

ROLLOUT = AttemptedRollout(
    rollout_id="r", input=1, start_time=0, attempt=Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=0)
)
RESOURCES = {
    "template": PromptTemplate(template="{x}", engine="f-string"),
    "main": LLM(endpoint="http://one/v1", model="one"),
    "other": LLM(endpoint="http://two/v1", model="two"),
}


def test_arguments_come_by_name(caplog):
    @rollout
    def agent(llm, task, prompt_template, rollout, resources, extra=5):
        """What it does."""
        return task, llm.model, prompt_template.template, rollout.rollout_id, sorted(resources), extra

    assert agent.rollout(7, RESOURCES, ROLLOUT) == (7, "one", "{x}", "r", ["main", "other", "template"], 5)
    assert "the agent gets the first one" in caplog.text
    caplog.clear()
    promoted = {"policy": LLM(endpoint="", model="weights")} | {name: RESOURCES[name] for name in ("main", "template")}
    assert agent.rollout(7, promoted, ROLLOUT)[1] == "one" and not caplog.text, "nobody answers at no address"
    assert agent.__doc__ == "What it does." and not agent.is_async()
    assert agent(RESOURCES["main"], 1, RESOURCES["template"], ROLLOUT, {}, extra=2)[5] == 2, "it is still the function"


def test_a_default_stands_where_the_resources_have_none():
    @rollout
    def agent(task, llm=None, prompt_template="no template"):
        return llm and llm.model, prompt_template

    assert agent.rollout(1, {}, ROLLOUT) == (None, "no template")
    assert agent.rollout(1, {"main": RESOURCES["main"]}, ROLLOUT) == ("one", "no template")


async def test_the_wrong_flavour_says_which_is_right():
    async def waits(task, llm):
        return llm.model

    def blocks(task, llm):
        return llm.model

    assert await llm_rollout(waits).rollout_async(1, RESOURCES, ROLLOUT) == "one"
    with pytest.raises(RuntimeError, match="call rollout_async"):
        llm_rollout(waits).rollout(1, RESOURCES, ROLLOUT)
    with pytest.raises(RuntimeError, match=r"call rollout$"):
        await llm_rollout(blocks).rollout_async(1, RESOURCES, ROLLOUT)


def test_a_proxy_is_stripped_unless_asked_for():
    proxied = {"main": ProxyLLM(endpoint="http://host/v1", model="m")}

    def agent(task, llm):
        return type(llm), llm.get_base_url("r", "a")

    assert llm_rollout(agent).rollout(1, proxied, ROLLOUT) == (LLM, "http://host/rollout/r/attempt/a/v1")
    assert llm_rollout(strip_proxy=False)(agent).rollout(1, proxied, ROLLOUT)[0] is ProxyLLM
    bare = Rollout(rollout_id="r", input=1, start_time=0)
    with pytest.raises(ConfigError, match="needs the attempt"):
        llm_rollout(agent).rollout(1, proxied, bare)


@pytest.mark.parametrize(
    ("decorate", "function", "message"),
    [
        (rollout, lambda task: 1, "neither of the parameters llm and prompt_template"),
        (rollout, lambda llm: 1, "needs a parameter task"),
        (rollout, lambda task, llm, client: 1, "give any other a default"),
        (llm_rollout, lambda task: 1, "has no parameter llm"),
        (prompt_rollout, lambda task: 1, "has no parameter prompt_template"),
        (FunctionalLitAgent, lambda: 1, "needs a parameter task"),
    ],
)
def test_functions_that_are_no_agents_are_refused_at_once(decorate, function, message):
    with pytest.raises(ConfigError, match=message):
        decorate(function)


def test_missing_resources_are_named():
    with pytest.raises(ConfigError, match=r"asks for a PromptTemplate, but the resources are \{'main': 'LLM'\}"):
        prompt_rollout(lambda task, prompt_template: 1).rollout(1, {"main": RESOURCES["main"]}, ROLLOUT)


async def test_an_agent_without_a_method_says_so():
    with pytest.raises(NotImplementedError, match="LitAgent defines neither"):
        LitAgent().rollout(1, {}, ROLLOUT)
    with pytest.raises(NotImplementedError, match="LitAgent defines neither"):
        await LitAgent().validation_rollout_async(1, {}, ROLLOUT)


def test_an_agent_holds_neither_trainer_nor_runner_and_says_so():
    agent = rollout(lambda task, llm: 1.0)
    assert vars(LitAgent()) == {}
    with pytest.raises(ConfigError, match="no tracer now"):
        _ = agent.tracer
    for name in ("trainer", "runner"):
        with (
            pytest.warns(FutureWarning, match=f"^the {name} goes"),
            pytest.raises(ConfigError, match=f"no {name} here"),
        ):
            getattr(agent, name)


@pytest.mark.parametrize("engine", ["f-string", "jinja"])
def test_templates_render_values_and_refuse_the_rest(engine):
    def render(template, **values):
        return PromptTemplate(template=template, engine=engine).format(**values)

    assert render("{x}!" if engine == "f-string" else "{{ x }}!", x="hi") == "hi!"
    secret = ["{x.__class__}", "{x[0]}"] if engine == "f-string" else ["{{ x.__class__.__mro__ }}"]
    for template in [*secret, "{y}" if engine == "f-string" else "{{ y }}", "{" if engine == "f-string" else "{{"]:
        with pytest.raises(ConfigError, match="template"):
            render(template, x="hi")
    with pytest.raises(NotImplementedError, match="poml"):
        PromptTemplate(template="", engine="poml").format()
