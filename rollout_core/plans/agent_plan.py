"""What can be known of training an agent before it starts."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout_core.agents.apo import placeholders, read_source
from rollout_core.agents.code import AgentCode, check_agent
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.settings import require_secret
from rollout_core.config import (
    AgentConfig,
    AgentGRPO,
    AgentPPO,
    CriticConfig,
    DaskConfig,
    EngineConfig,
    LearnOnlineConfig,
    OpenAIBackend,
    RunnersConfig,
    TemplateSource,
    TrainAgentConfig,
    TunePromptConfig,
)
from rollout_core.inference.openai_http import try_endpoint
from rollout_core.plans.cluster import check_cluster
from rollout_core.plans.learner_plan import LearnerPlan
from rollout_core.plans.memory_and_disk import states_of
from rollout_core.plans.plan import context_limit
from rollout_core.store.reachable import Connections
from rollout_core.web.listening import listen

log = logging.getLogger(__name__)


class AgentPlan(LearnerPlan):
    """A plan of a run that has agents work."""

    def agent(self, what: str, config: AgentConfig, runners: RunnersConfig) -> None:
        """The agent's code can be read, and loaded by a runner. What it imports need not be installed on this machine
        where all runners are on others."""
        code = self.check(f"{what}.function", lambda: AgentCode.read(config.function, self.base))
        if code is not None:
            missing = self.check(f"{what}.function", lambda: check_agent(code, log.info))
            if missing is not None and runners.where in ("dask", "elsewhere"):
                self.unchecked.append(f"{what}.function ({missing}; the runners load it where they are)")
            elif missing is not None:
                self.violations.append(f"{what}.function: {missing}")
            self.facts["agent"] = f"{config.function} ({code.id.short})"
        if self.has_chat_template is False:
            self.violations.append(
                f"{what}: the model's tokenizer has no chat template, and agents talk in chats; give one as "
                "chat_template in the same table as its uri"
            )

    def policy(self, what: str, settings: AgentGRPO | AgentPPO, backend: EngineConfig) -> None:
        """The learner of what an agent does: its settings, and what it needs for sequences as long as the engine's."""
        self.learner(what, settings)
        states = states_of(settings, None, settings.iterations, keeps_last=self.keeps_last)
        if self.keeps_last:
            states = replace(states, models=settings.iterations)  # those of agents' iterations stay
        self.resources(
            what,
            settings.family,
            settings,
            context_limit(backend) or self.max_positions or 0,
            states,
            trained_models=settings.trained_models,
            frozen_models=int(settings.lora is None and settings.loads_reference),
        )

    def runners(self, what: str, config: RunnersConfig) -> None:
        """The key that runners elsewhere show is there, and the Dask cluster answers that they are to run on."""
        key = config.api_key
        if key is not None:
            self.check(f"{what}.api_key", lambda: require_secret(key))
        dask = config.dask
        if dask is not None:
            found = self.check(f"{what}.dask", lambda: check_cluster(DaskConfig(address=dask.address)))
            self.facts["Dask cluster"] = found

    def model_address(self, what: str, config: RunnersConfig) -> None:
        """Where live agents are to find the model nobody else listens."""
        host, port = config.host, config.model_port
        self.check(f"{what}.model_port", lambda: listen(host, port).close())
        self.facts["live agents call"] = f"http://{config.public_host or host}:{port}/v1"

    def template(self, what: str, source: TemplateSource) -> None:
        """The template can be read, and asks for something."""
        template = self.check(what, lambda: read_source(source, self.base))
        if template is None:
            return
        names = sorted(placeholders(template))
        if not names:
            shape = "{task}" if source.engine == "f-string" else "{{ task }}"
            self.violations.append(
                f"{what}: no placeholder is in it, so every task gets the same prompt; write {shape}"
            )
        self.facts["placeholders"] = ", ".join(names)

    def critic(self, what: str, config: CriticConfig) -> None:
        """The critic's key is there; an endpoint that does not list its models is not checked further."""
        key = config.api_key
        if key is not None and self.check(f"{what}.api_key", lambda: require_secret(key)) is None:
            return
        self.facts["critic"] = f"{config.model} at {config.url}"
        asked = OpenAIBackend(url=config.url, served_model=config.model, api_key=key)
        try:
            try_endpoint(asked)
        except (ConfigError, Recoverable) as error:
            self.unchecked.append(f"{what} ({str(error).partition(';')[0]})")


def plan_agent(config: TrainAgentConfig, base: Path, connections: Connections | None = None) -> dict[str, Any]:
    """Check a run that trains an agent. Raises ConfigError naming all that is wrong."""
    plan, settings = AgentPlan(base, connections, keeps_last=config.run.keep_states == "last"), config.algorithm
    plan.places()
    plan.no_resume(config.run, "a run of an agent resumes by itself when it is started again; leave it out")
    plan.model("algorithm.base_model", settings.base_model)
    plan.backend("backend", config.backend)
    plan.agent("agent", config.agent, config.runners)
    plan.runners("runners", config.runners)
    plan.facts["training tasks"] = plan.tasks("algorithm.prompts", settings.prompts)
    plan.sampling("algorithm.sampling", settings.sampling, config.backend)
    plan.policy("algorithm", settings, config.backend)
    if config.evaluation is not None:
        plan.facts["held-out tasks"] = num_tasks = plan.tasks("evaluation.tasks", config.evaluation.tasks)
        plan.evidence("promotion", config.promotion, num_tasks or None)
        plan.sampling("evaluation.sampling", config.evaluation.sampling, config.backend)
    plan.output_folder("report_dir", config.report_dir)
    return plan.done()


def plan_prompt(config: TunePromptConfig, base: Path, connections: Connections | None = None) -> dict[str, Any]:
    """Check a run that tunes an agent's prompt. Raises ConfigError naming all that is wrong."""
    plan = AgentPlan(base, connections)
    plan.places()
    plan.no_resume(config.run, "a search resumes by itself when it is started again; leave it out")
    plan.model("model", config.model)
    plan.backend("backend", config.backend)
    plan.agent("agent", config.agent, config.runners)
    plan.runners("runners", config.runners)
    plan.template("template", config.template)
    plan.critic("critic", config.critic)
    plan.facts["tasks"] = plan.tasks("tasks", config.tasks)
    plan.sampling("sampling", config.sampling, config.backend)
    plan.facts["held-out tasks"] = plan.tasks("evaluation.tasks", config.evaluation.tasks)
    plan.sampling("evaluation.sampling", config.evaluation.sampling, config.backend)
    plan.output_folder("report_dir", config.report_dir)
    return plan.done()


def plan_online(config: LearnOnlineConfig, base: Path, connections: Connections | None = None) -> dict[str, Any]:
    """Check a run that learns from live traffic. Raises ConfigError naming all that is wrong."""
    plan, settings = AgentPlan(base, connections), config.algorithm
    plan.places()
    plan.no_resume(config.run, "online learning resumes by itself when it is started again; leave it out")
    plan.model("algorithm.base_model", settings.base_model)
    plan.backend("backend", config.backend)
    if config.agent is not None:
        plan.agent("agent", config.agent, config.runners)
    plan.runners("runners", config.runners)
    plan.model_address("runners", config.runners)
    plan.sampling("algorithm.sampling", settings.sampling, config.backend)
    plan.policy("algorithm", settings, config.backend)
    if config.evaluation is not None:
        plan.facts["held-out tasks"] = num_tasks = plan.tasks("evaluation.tasks", config.evaluation.tasks)
        plan.evidence("promotion", config.promotion, num_tasks or None)
    plan.output_folder("report_dir", config.report_dir)
    return plan.done()
