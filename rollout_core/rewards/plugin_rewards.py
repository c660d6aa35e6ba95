"""Rewards of plugins, of kind ``reward-model``: what a call asks them, and what of their answers counts.

A call's payload is ``{"inputs": [...]}``, an object for each sample with the fields of `RewardInput`; its result is
``{"rewards": [...]}``, for each of them a number, null where the plugin abstains, or ``{"error": text}``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from rollout_core.base.errors import ConfigError, Fatal, near, shown
from rollout_core.base.ids import canonical_json
from rollout_core.base.settings import hot_reload
from rollout_core.config.rewards import PluginReward
from rollout_core.plugins.cases import TEST_CASES, Case
from rollout_core.plugins.host import CallFailed, PluginProcess
from rollout_core.plugins.identity import PluginCode
from rollout_core.plugins.manifest import Manifest
from rollout_core.rewards.call_forms import form_of
from rollout_core.rewards.scoring import (
    INPUT_FIELDS,
    RewardFunction,
    RewardInput,
    Score,
    as_called,
    as_plain,
    judge,
    places,
)

ADAPTER = f"{__name__}:adapt"


class RewardCase(Case):
    """A case of a reward."""

    input: dict[str, Any]
    """Fields of the sample, such as ``prompt`` and ``completion``."""
    reward: float | None
    """What it is; null: it abstains."""


class PluginScores:
    """The reward of a plugin, which is started now. Raises ConfigError where it cannot be."""

    def __init__(self, spec: PluginReward, code: PluginCode, on_line: Callable[[str], None]) -> None:
        self._name = spec.name
        self.address = spec.address
        reloads = hot_reload() is not None
        self._plugin = PluginProcess(code, spec.config, adapter=ADAPTER, on_line=on_line, reloads=reloads)
        self.close, self.take_figures = self._plugin.close, self._plugin.take_figures
        try:
            self._plugin.start()
        except BaseException:
            self.close()
            raise

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score | Fatal]:
        """The reward of each input; of those of a call that failed, the failure. Raises as `PluginProcess.call`, but
        for `CallFailed`."""
        known = list(places(inputs))
        found: list[Score | Fatal] = []
        while len(found) < len(inputs):
            part = slice(len(found), len(found) + self.manifest.limits.batch_size)
            found += self._scores(inputs[part], known[part])
        return found

    @property
    def manifest(self) -> Manifest:
        """Of the plugin as it is called now."""
        return self._plugin.code.manifest

    def _scores(self, inputs: Sequence[RewardInput], known: Sequence[str]) -> list[Score | Fatal]:
        rows = [{name: as_plain(sample, name) for name in INPUT_FIELDS} for sample in inputs]

        def problem_with(result: Any) -> str | None:
            rewards = result.get("rewards") if isinstance(result, dict) else None
            if isinstance(rewards, list) and len(rewards) == len(inputs):
                return None
            return f"answered with {shown(result)}; expected rewards, a list of {len(inputs)}"

        try:
            rewards = self._plugin.call({"inputs": rows}, problem_with)["rewards"]
        except CallFailed as error:
            return [Fatal(f"reward {self._name} failed on {place}: {error}") for place in known]
        return [self._score(*each) for each in zip(rewards, known, places(inputs), strict=True)]

    def _score(self, value: Any, place: str, place_in_call: str) -> Score | Fatal:
        if isinstance(value, dict) and isinstance(value.get("error"), str):
            error = value["error"]
            if error.startswith(f"reward {self._name} "):  # a Python plugin's, which names the sample itself
                return Fatal(error.replace(place_in_call, place, 1))
            return Fatal(f"reward {self._name} failed on {place}: {error}")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            return Fatal(f"reward {self._name} answered with {shown(value)} for {place}; expected a number or null")
        return value  # whether it is finite is looked at with every reward's


def failed_cases(
    code: PluginCode, cases: Sequence[tuple[int, RewardCase]], on_line: Callable[[str], None]
) -> list[str]:
    """Put test cases to a plugin, which is started for each configuration of them; what is wrong, a line for each."""
    failures: list[str] = []
    for _, group in groupby(cases, key=lambda case: canonical_json(case[1].config)):
        of_config = list(group)
        spec = PluginReward(kind="plugin", name=code.name, config=of_config[0][1].config)
        scores = PluginScores(spec, code, on_line)
        try:
            reward = RewardFunction(code.name, scores, batched=True)
            for number, case in of_config:
                [got] = judge(reward, [_sample(code, number, case)])
                if isinstance(got, Fatal) or got != case.reward:
                    failures.append(f"{TEST_CASES}:{number}: got {got}; expected {case.reward}")
        finally:
            scores.close()
    return failures


def _sample(code: PluginCode, number: int, case: RewardCase) -> RewardInput:
    if unknown := sorted(case.input.keys() - set(INPUT_FIELDS)):
        raise ConfigError(
            f"{code.folder / TEST_CASES}:{number}: input.{unknown[0]}: unknown field; {near(unknown[0], INPUT_FIELDS)}"
        )
    if missing := [name for name in ("prompt", "completion") if name not in case.input]:
        raise ConfigError(f"{code.folder / TEST_CASES}:{number}: input.{missing[0]}: required, but not given")
    return RewardInput(**case.input)


def adapt(name: str, made: Any) -> Callable[[Any], Any]:
    """In a Python plugin's process: what its factory made is called as a reward function is, in any of its forms."""
    form = form_of(made, name, {})
    reward = RewardFunction(name, as_called(made, form, {}, name), form.takes_all, is_async=form.is_async)
    loop = asyncio.Runner()

    def answer(payload: Any) -> Any:
        inputs = [RewardInput(**row) for row in payload["inputs"]]
        found = judge(reward, inputs, run=loop.run)
        return {"rewards": [{"error": str(value)} if isinstance(value, Fatal) else value for value in found]}

    return answer
