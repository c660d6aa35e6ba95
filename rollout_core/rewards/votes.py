"""Answers of completions, as votes among samples of one question count them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rollout_core.base.errors import ConfigError
from rollout_core.config.rewards import ExactMatchReward, RewardSpec
from rollout_core.config.verifiers import VerifiedReward
from rollout_core.rewards.answers import comparable
from rollout_core.rewards.verifiers.process import VerifierProcesses


def read_answers(spec: RewardSpec, completions: Sequence[str], on_line: Callable[[str], None]) -> list[str | None]:
    """The answer of each completion, in a form that equal answers share; None where it has none, or an empty one.

    ``on_line`` gets a line about completions whose answer could not be read. Raises ConfigError for a reward that reads
    no answers.
    """
    if not spec.reads_answers:
        raise ConfigError(f"a reward of kind {spec.kind!r} reads no answers")
    if isinstance(spec, ExactMatchReward):
        found = [comparable(text, strip=spec.strip, ignore_case=spec.ignore_case) for text in completions]
        return [answer or None for answer in found]
    assert isinstance(spec, VerifiedReward), "the others read none"
    processes = VerifierProcesses(spec, Path(), {}, on_line)
    try:
        return [answer or None for answer in processes.answers(completions)]
    finally:
        processes.close()
