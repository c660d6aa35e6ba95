"""Rewards are loaded and checked before anything is generated, and every score is a finite float or a named failure."""

from __future__ import annotations

import math
import os
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.config import identity
from rollout_core.config.rewards import (
    CompositeReward,
    ExactMatchReward,
    ExpressionReward,
    FunctionReward,
    ModelReward,
    RewardSpec,
    WeightedReward,
    plain_rewards,
    with_models,
)
from rollout_core.rewards.loading import load_reward
from rollout_core.rewards.scoring import RewardFunction, RewardInput, batch_reward, judge, score, within_share
from rollout_core.rewards.source_ids import source_id

SAMPLES = [RewardInput("2+2?", "4", {"answer": "4"}, "stop", 1, "s-0"), RewardInput("3+3?", "7", {"answer": "6"})]


def write(path: Path, code: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(code), encoding="utf-8")
    return path


def exact(completion: str, answer: Any, **options: Any) -> float:
    reward = load_reward(ExactMatchReward(**options))
    return score(reward, [RewardInput("?", completion, {"answer": answer})])[0]


# -- exact match -------------------------------------------------------------------------------------------------------


def test_exact_match_scores_one_or_zero():
    assert score(load_reward(ExactMatchReward()), SAMPLES) == [1.0, 0.0]


def test_exact_match_strips_and_ignores_case_by_option():
    assert exact(" Paris\n", "Paris") == 1.0
    assert exact(" Paris\n", "Paris", strip=False) == 0.0
    assert exact("paris", "Paris") == 0.0
    assert exact("STRASSE", "straße", ignore_case=True) == 1.0


def test_exact_match_compares_other_answers_by_their_json_text():
    assert (
        exact("42", 42) == exact("4.5", 4.5) == exact("true", True) == exact("null", None) == exact("[1]", [1]) == 1.0
    )
    assert exact("True", True) == 0.0


def test_a_whole_float_is_the_whole_number_that_it_was():
    """pandas makes floats of a column of integers with a gap."""
    assert exact("42", 42.0) == exact("42.0", 42.0) == exact(" -7\n", -7.0) == exact("1e+20", 1e20) == 1.0
    assert exact("100000000000000000000", 1e20) == exact("0", -0.0) == 1.0
    assert exact("42.5", 42.0) == exact("4", 42.0) == exact("42.0", 42) == exact("42", "42.0") == 0.0


def test_answers_are_compared_in_one_form_of_unicode():
    composed, apart = "caf\u00e9", "cafe\u0301"
    assert exact(composed, apart) == exact(apart, composed) == 1.0
    assert exact(apart.upper(), composed, ignore_case=True) == 1.0
    assert exact("cafe", composed) == 0.0


def test_a_row_without_the_answer_is_named():
    reward = load_reward(ExactMatchReward(answer_key="answer"))
    with pytest.raises(Fatal, match=r"exact_match\(answer\) failed on sample 0 \(x\): .*did you mean 'anwser'\?"):
        score(reward, [RewardInput("?", "4", {"anwser": "4"}, id="x")])


# -- specs -------------------------------------------------------------------------------------------------------------


def test_specs_are_told_apart_by_their_kind():
    parse = TypeAdapter(RewardSpec).validate_python
    assert parse({"kind": "exact_match"}) == ExactMatchReward()
    assert parse({"kind": "function", "callable": "a.b:c.d"}) == FunctionReward(callable="a.b:c.d")
    with pytest.raises(ValidationError, match="extra_forbidden"):
        parse({"kind": "exact_match", "answerkey": "x"})


@pytest.mark.parametrize("name", ["", "score", "module.score", "module:", ":score", "file.py:2x", "file.py:a b"])
def test_a_callable_names_its_source_and_its_function(name: str):
    with pytest.raises(ValidationError, match=r"expected module:function or path/to/file\.py:function"):
        FunctionReward(callable=name)


# -- loading -----------------------------------------------------------------------------------------------------------


def test_a_function_of_a_file_is_called_with_sample_and_kwargs(tmp_path: Path):
    write(tmp_path / "r/mine.py", "def length(sample, *, scale=1):\n    return len(sample.completion) * scale\n")
    reward = load_reward(FunctionReward(callable="r/mine.py:length", kwargs={"scale": 3}), base=tmp_path)
    assert score(reward, SAMPLES) == [3.0, 3.0] and reward.name == "r/mine.py:length"


def test_a_file_may_define_dataclasses_and_import_its_neighbours(tmp_path: Path):
    write(tmp_path / "neighbour_of_reward.py", "BONUS = 2.0\n")
    write(
        tmp_path / "mine.py",
        """
        from __future__ import annotations
        from dataclasses import dataclass
        from neighbour_of_reward import BONUS

        @dataclass
        class Judge:
            strict: bool = True

            @staticmethod
            def score(sample):
                return BONUS
        """,
    )
    path_before = list(sys.path)
    assert score(load_reward(FunctionReward(callable=f"{tmp_path}/mine.py:Judge.score")), SAMPLES) == [2.0, 2.0]
    assert sys.path == path_before


def test_a_function_of_a_module_beside_the_config_is_found(tmp_path: Path):
    write(tmp_path / "reward_pack/rules.py", "def zero(sample):\n    return 0\n")
    assert score(load_reward(FunctionReward(callable="reward_pack.rules:zero"), base=tmp_path), SAMPLES) == [0.0, 0.0]


def test_an_edited_reward_is_loaded_anew_in_the_same_process(tmp_path: Path):
    for name, callable_ in (("edited_file.py", "edited_file.py:r"), ("edited_module.py", "edited_module:r")):
        spec = FunctionReward(callable=callable_)
        got = []
        for value in ("1", "2.5"):
            write(tmp_path / name, f"def r(sample):\n    return {value}\n")
            got += score(load_reward(spec, base=tmp_path), SAMPLES[:1])
        assert got == [1.0, 2.5], name


def test_a_batch_reward_takes_the_whole_list(tmp_path: Path):
    write(
        tmp_path / "mine.py",
        """
        from rollout_core.rewards import batch_reward

        @batch_reward
        def rank(samples, *, top=1.0):
            return (top - i for i, _ in enumerate(samples))

        def plain(samples):
            return [0] * len(samples)

        plain.batch_reward = True
        """,
    )
    rank = load_reward(FunctionReward(callable="mine.py:rank", kwargs={"top": 5}), base=tmp_path)
    assert rank.batched and score(rank, SAMPLES) == [5.0, 4.0] and score(rank, []) == []
    assert score(load_reward(FunctionReward(callable="mine.py:plain"), base=tmp_path), SAMPLES) == [0.0, 0.0]


BROKEN = """
class Judge: ...
weight = 3
async def later(sample): ...
def nothing(): ...
def scored(sample, threshold): ...
def solution(solution_str, ground_truth): ...
def _hidden(sample): ...
"""


@pytest.mark.parametrize(
    ("callable_", "expected"),
    [
        ("mine.py:score", "reward mine.py:score: there is no 'score'; did you mean 'scored'?"),
        ("mine.py:zzz", "reward mine.py:zzz: there is no 'zzz'; found: Judge, later, nothing, scored, solution"),
        ("mine.py:Judge.x", "reward mine.py:Judge.x: there is no 'x'; found: nothing"),
        ("mine.py:weight", "reward mine.py:weight is of type int; expected a function that returns a number"),
        ("mine.py:Judge", "reward mine.py:Judge is of type type; expected a function that returns a number"),
        (
            "mine.py:nothing",
            "reward mine.py:nothing has the signature (), but is called with (sample): too many positional arguments; "
            "expected (sample), (samples) under batch_reward, or TRL's (prompts, completions, **kwargs)",
        ),
        (
            "mine.py:solution",
            "reward mine.py:solution has the signature (solution_str, ground_truth), but is called with (sample): "
            "missing a required argument: 'ground_truth'; expected (sample), (samples) under batch_reward, or TRL's",
        ),
        (
            "mine.py:scored",
            "reward mine.py:scored has the signature (sample, threshold), but is called with (sample): "
            "missing a required argument: 'threshold'",
        ),
        ("nime.py:r", "reward file {base}/nime.py does not exist; did you mean 'mine.py'?"),
        ("nowhere/mine.py:r", "reward file {base}/nowhere/mine.py does not exist; found: nothing"),
        ("no_such_module_xyz:r", "reward module no_such_module_xyz cannot be found; install it, run from the folder"),
        ("no_such_package_xyz.m:r", "reward module no_such_package_xyz.m cannot be found; install it"),
        ("raising_pack.m:r", "reward module raising_pack.m cannot be found; install it"),
        ("mine.py:weight.x", "reward mine.py:weight.x: there is no 'x'; found: as_integer_ratio, bit_count"),
        ("raises.py:r", "reward file {base}/raises.py fails on import: ZeroDivisionError: division by zero"),
        ("raises:r", "reward module raises fails on import: ZeroDivisionError: division by zero"),
        ("syntax.py:r", "reward file {base}/syntax.py fails on import: SyntaxError:"),
        ("exits.py:r", "reward file {base}/exits.py fails on import: SystemExit: 3"),
    ],
)
def test_a_reward_that_cannot_work_is_refused_when_loaded(tmp_path: Path, callable_: str, expected: str):
    write(tmp_path / "mine.py", BROKEN)
    write(tmp_path / "raises.py", "1 / 0\n")
    write(tmp_path / "raising_pack/__init__.py", "1 / 0\n")
    write(tmp_path / "syntax.py", "def r(:\n")
    write(tmp_path / "exits.py", "raise SystemExit(3)\n")
    with pytest.raises(ConfigError) as caught:
        load_reward(FunctionReward(callable=callable_), base=tmp_path)
    assert str(caught.value).startswith(expected.replace("{base}", str(tmp_path)))


def test_kwargs_the_function_does_not_take_are_refused(tmp_path: Path):
    write(tmp_path / "mine.py", "def r(sample, *, scale=1): ...\n")
    with pytest.raises(
        ConfigError, match=r"called with \(sample, scael=2\): got an unexpected keyword argument 'scael'"
    ):
        load_reward(FunctionReward(callable="mine.py:r", kwargs={"scael": 2}), base=tmp_path)


def test_a_file_that_fails_is_imported_again_once_it_is_mended(tmp_path: Path):
    spec = FunctionReward(callable="mine.py:r")
    write(tmp_path / "mine.py", "import no_such_module_abc\n")
    with pytest.raises(ConfigError, match="no_such_module_abc"):
        load_reward(spec, base=tmp_path)
    write(tmp_path / "no_such_module_abc.py", "")
    write(tmp_path / "mine.py", "import no_such_module_abc\ndef r(sample): return 1\n")
    assert score(load_reward(spec, base=tmp_path), SAMPLES[:1]) == [1.0]


# -- TRL's form --------------------------------------------------------------------------------------------------------


TRL = """
def plain(completions, **kwargs):
    return [float(len(each)) for each in completions]

def with_prompts(prompts, completions, **kwargs):
    return [None if prompt.startswith("3") else 1.0 for prompt in prompts]

def with_answer(completions, answer, **kwargs):
    assert kwargs["completion_ids"] == [[7], [8, 9]] and kwargs["level"] == [None, 2] and "trainer_state" not in kwargs
    return [float(each == right) for each, right in zip(completions, answer)]

def exactly(completions, answer, trainer_state, threshold=0.5):
    assert trainer_state is None
    return [threshold] * len(completions)

def ids_only(completion_ids, **kwargs):
    return [len(ids) for ids in completion_ids]

async def awaited(prompts, completions, **kwargs):
    return [float(len(each)) for each in completions]
"""
ROWS = [
    RewardInput("2+2?", "4", {"answer": "4"}, token_ids=[7]),
    RewardInput("3+3?", "7!", {"answer": "6", "level": 2}, token_ids=[8, 9]),
]


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", [1.0, 2.0]),
        ("with_prompts", [1.0, None]),
        ("with_answer", [1.0, 0.0]),
        ("exactly", [0.5, 0.5]),
        ("ids_only", [1.0, 2.0]),
        ("awaited", [1.0, 2.0]),
    ],
)
def test_rewards_written_for_trl_work_as_they_are(tmp_path: Path, name: str, expected: list[Any], in_process: bool):
    write(tmp_path / "mine.py", TRL)
    reward = load_reward(FunctionReward(callable=f"mine.py:{name}", in_process=in_process), base=tmp_path)
    assert not reward.separable and score(reward, ROWS) == expected
    reward.close()


def test_completions_of_chats_are_lists_of_messages_as_in_trl(tmp_path: Path):
    code = """
    def r(prompts, completions, **kwargs):
        assert prompts == [[{"role": "user", "content": "2+2?"}]]
        return [float(messages == [{"role": "assistant", "content": "4"}]) for messages in completions]
    """
    write(tmp_path / "mine.py", code)
    reward = load_reward(FunctionReward(callable="mine.py:r", in_process=True), base=tmp_path)
    assert score(reward, [RewardInput([{"role": "user", "content": "2+2?"}], "4")]) == [1.0]


def test_a_column_that_no_row_has_is_named(tmp_path: Path):
    write(tmp_path / "mine.py", "def r(completions, anwser, **kwargs): return [1.0] * len(completions)\n")
    reward = load_reward(FunctionReward(callable="mine.py:r", in_process=True), base=tmp_path)
    assert reward.forms["mine.py:r"].required == ("anwser",)
    with pytest.raises(Fatal, match=r"rows have no 'anwser', which reward mine\.py:r takes; did you mean 'answer'\?"):
        score(reward, ROWS)


def test_the_form_is_told_in_words(tmp_path: Path):
    code = "def one(sample): ...\nasync def many(samples): ...\nmany.batch_reward = True\n"
    write(tmp_path / "mine.py", code + "def trl(completions, answer, **kwargs): ...\n")
    found = {
        name: load_reward(FunctionReward(callable=f"mine.py:{name}", in_process=True), base=tmp_path)
        for name in ("one", "many", "trl")
    }
    told = {name: reward.forms[f"mine.py:{name}"].in_words for name, reward in found.items()}
    assert told == {
        "one": "called with one sample",
        "many": "called with the list of all samples, awaited",
        "trl": "TRL's form: called with lists over all samples of completions, answer, every other key of the rows",
    }


# -- async -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_process", [False, True])
def test_async_rewards_of_one_sample_wait_at_the_same_time(tmp_path: Path, in_process: bool):
    """Each waits until all have begun; one after another they would never end."""
    code = """
    import asyncio

    begun = []
    async def r(sample):
        begun.append(sample)
        while len(begun) < 4:
            await asyncio.sleep(0)
        return {"a": 1.0, "b": None}[sample.completion]
    """
    write(tmp_path / "mine.py", code)
    spec = FunctionReward(callable="mine.py:r", in_process=in_process, max_failed_share=0.25)
    reward = load_reward(spec, base=tmp_path)
    found = judge(reward, [RewardInput("q", completion) for completion in "aabc"])
    reward.close()
    assert reward.separable and found[:3] == [1.0, 1.0, None]
    assert str(found[3]) == "reward mine.py:r failed on sample 3: KeyError: 'c'"
    assert len(within_share(reward, found)) == 1


def test_a_recoverable_fault_of_an_async_reward_passes_through():
    async def throttled(sample: RewardInput) -> float:
        raise Recoverable("judge is overloaded")

    with pytest.raises(Recoverable, match="judge is overloaded"):
        score(RewardFunction("judge", throttled, is_async=True), SAMPLES)


def test_what_an_async_reward_keeps_lives_from_call_to_call(tmp_path: Path):
    code = """
    import asyncio

    loops = set()
    async def r(sample):
        loops.add(asyncio.get_running_loop())
        return len(loops)
    """
    write(tmp_path / "mine.py", code)
    reward = load_reward(FunctionReward(callable="mine.py:r"), base=tmp_path)
    assert [score(reward, SAMPLES[:1]) for _ in range(2)] == [[1.0], [1.0]]
    reward.close()


# -- signals -----------------------------------------------------------------------------------------------------------


ALARM = """
import signal

def r(sample):
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.alarm(100)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    return 1.0
"""


def in_a_thread(call: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_a_reward_that_sets_alarms_works_in_a_process_of_its_own(tmp_path: Path):
    write(tmp_path / "mine.py", ALARM)
    reward = load_reward(FunctionReward(callable="mine.py:r"), base=tmp_path)
    assert in_a_thread(lambda: score(reward, SAMPLES)) == [1.0, 1.0]
    reward.close()


def test_a_reward_that_sets_alarms_in_a_thread_of_this_process_is_told_what_to_do(tmp_path: Path):
    write(tmp_path / "mine.py", ALARM)
    reward = load_reward(FunctionReward(callable="mine.py:r", in_process=True), base=tmp_path)
    assert score(reward, SAMPLES) == [1.0, 1.0], "of a main thread"
    with pytest.raises(Fatal, match=r"^reward mine\.py:r imports signal, .*leave in_process out"):
        in_a_thread(lambda: score(reward, SAMPLES))


# -- identity ----------------------------------------------------------------------------------------------------------


def test_source_id_follows_settings_and_source_but_not_the_place(tmp_path: Path):
    one = write(tmp_path / "one/mine.py", "def r(sample): return 1\n")
    write(tmp_path / "two/other.py", "def r(sample): return 1\n")

    def identity(callable_: str, base: str = "one", **kwargs: Any) -> str:
        return source_id(FunctionReward(callable=callable_, kwargs=kwargs), tmp_path / base)

    first = identity("mine.py:r")
    assert identity("other.py:r", "two") == identity(f"{one}:r") == first
    assert identity("mine.py:s") != first and identity("mine.py:r", scale=2) != first
    module = identity("mine:r")
    write(one, "def r(sample): return 2\n")
    assert identity("mine.py:r") != first and identity("mine:r") != module


def test_source_id_follows_the_users_own_code_that_is_imported(tmp_path: Path):
    write(tmp_path / "mine.py", "import json\nimport numpy\nfrom helper import W\nfrom pack import part\n")
    write(tmp_path / "helper.py", "from deeper import D\nW = 1\n")
    write(tmp_path / "deeper.py", "D = 1\n")
    write(tmp_path / "pack/__init__.py", "")
    write(tmp_path / "pack/part.py", "from . import other\n")
    write(tmp_path / "pack/other.py", "O = 1\n")
    seen = {source_id(FunctionReward(callable="mine.py:r"), tmp_path)}
    for name in ("helper.py", "deeper.py", "pack/__init__.py", "pack/part.py", "pack/other.py"):
        with (tmp_path / name).open("a") as file:
            file.write("X = 1\n")
        seen.add(source_id(FunctionReward(callable="mine.py:r"), tmp_path))
    assert len(seen) == 6
    write(tmp_path / "unused.py", "U = 1\n")
    assert source_id(FunctionReward(callable="mine.py:r"), tmp_path) in seen


def test_source_id_follows_relative_imports_out_of_a_package(tmp_path: Path):
    for name in ("pack/__init__.py", "pack/rewards/__init__.py"):
        write(tmp_path / name, "")
    write(tmp_path / "pack/rewards/mine.py", "from ..common import W\n")
    write(tmp_path / "pack/common.py", "W = 1\n")
    before = source_id(FunctionReward(callable="pack.rewards.mine:r"), tmp_path)
    write(tmp_path / "pack/common.py", "W = 2\n")
    assert source_id(FunctionReward(callable="pack.rewards.mine:r"), tmp_path) != before


@pytest.mark.parametrize(
    "exported",
    ["__all__ = ['sub']", "__all__ = []\n__all__ += ('sub',)", "__all__ = [name for name in ('sub',)]"],
)
def test_source_id_follows_what_a_star_imports(tmp_path: Path, exported: str):
    write(tmp_path / "pack/__init__.py", f"{exported}\n")
    write(tmp_path / "mine.py", "from pack import *\ndef r(sample): return sub.V\n")
    found = []
    for value in (1.0, 2.0):
        write(tmp_path / "pack/sub.py", f"V = {value}\n")
        spec = FunctionReward(callable="mine.py:r")
        reward = load_reward(spec, base=tmp_path)
        found.append((source_id(spec, tmp_path), score(reward, SAMPLES)[0]))
        reward.close()
    assert found[0][0] != found[1][0] and [value for _, value in found] == [1.0, 2.0]


def test_a_project_under_the_prefix_of_the_interpreter_is_the_users_own(tmp_path: Path, monkeypatch):
    """As in containers, where the prefix is /usr/local and a project may be /usr/local/app."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    write(tmp_path / "app/rewards/mine.py", "from helper import W\n")
    write(tmp_path / "app/helper.py", "W = 1\n")
    before = source_id(FunctionReward(callable="rewards/mine.py:r"), tmp_path / "app")
    write(tmp_path / "app/helper.py", "W = 2\n")
    assert source_id(FunctionReward(callable="rewards/mine.py:r"), tmp_path / "app") != before


def test_source_id_of_a_rule_follows_its_settings():
    assert source_id(ExactMatchReward()) == source_id(ExactMatchReward())
    assert source_id(ExactMatchReward()) != source_id(ExactMatchReward(strip=False))


def test_source_id_does_not_run_the_file(tmp_path: Path):
    write(tmp_path / "mine.py", "raise RuntimeError\n")
    source_id(FunctionReward(callable="mine.py:r"), tmp_path)
    source_id(FunctionReward(callable="mine:r"), tmp_path)


def test_source_id_without_a_source_file():
    assert source_id(FunctionReward(callable="time:time")) != source_id(FunctionReward(callable="sys:exit"))
    with pytest.raises(ConfigError, match=r"nothing\.py does not exist"):
        source_id(FunctionReward(callable="nothing.py:r"))


def test_source_ids_are_pinned(tmp_path: Path):
    """Changing them computes every reward again."""
    mine = write(tmp_path / "mine.py", "def r(sample): return 1\n")
    assert source_id(ExactMatchReward()).short == "5eeef8189440"
    assert source_id(FunctionReward(callable=f"{mine}:r", kwargs={"scale": 0.5})).short == "f712b84af382"


# -- scoring -----------------------------------------------------------------------------------------------------------


def constant(value: Any, batched: bool = False) -> RewardFunction:
    return RewardFunction("mine", lambda given: value, batched)


def test_none_abstains():
    assert score(constant(None), SAMPLES) == [None, None]
    assert score(constant([None, np.float32(0.5)], batched=True), SAMPLES) == [None, 0.5]


def test_a_failure_stays_with_its_sample_up_to_a_share():
    def picky(sample: RewardInput) -> float:
        return 1 / len(sample.completion)

    samples = [RewardInput("q", "ab"), RewardInput("q", "", id="s-1"), RewardInput("q", "abcd"), RewardInput("q", "")]
    reward = RewardFunction("picky", picky, max_failed_share=0.5)
    found = judge(reward, samples)
    assert [found[0], found[2]] == [0.5, 0.25]
    assert str(found[1]) == "reward picky failed on sample 1 (s-1): ZeroDivisionError: division by zero"
    assert within_share(reward, found) == [found[1], found[3]]
    with pytest.raises(
        Fatal, match=r"^reward picky failed on sample 1 .*It failed on 2 of 4 samples, more than max_failed_share = 0.4"
    ):
        within_share(replace(reward, max_failed_share=0.4), found)
    with pytest.raises(Fatal, match=r"division by zero$"):
        within_share(replace(reward, max_failed_share=0.0), found)


@pytest.mark.parametrize(
    "value",
    [1, True, 0.5, Fraction(1, 2), np.float32(0.5), np.int64(3), np.bool_(True), np.array(2.0), torch.tensor(1.5)],
)
def test_numbers_of_every_kind_become_floats(value: Any):
    (got,) = score(constant(value), SAMPLES[:1])
    assert type(got) is float and got == float(value)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, "1", 1j, [1.0], 10**400, np.float32("nan"), torch.zeros(2), {}]
)
def test_anything_but_a_finite_number_is_fatal(value: Any):
    with pytest.raises(Fatal, match=r"reward mine returned .* for sample 0 \(s-0\); expected a finite number"):
        score(constant(value), SAMPLES)
    with pytest.raises(Fatal, match=r"reward mine returned .* for sample 1; expected a finite number"):
        score(constant([0, value], batched=True), SAMPLES)


def test_a_raising_reward_is_fatal_and_names_the_sample():
    def picky(sample: RewardInput) -> float:
        return 1 / (sample.completion != "7")

    with pytest.raises(Fatal, match="reward picky failed on sample 1: ZeroDivisionError: ") as caught:
        score(RewardFunction("picky", picky), SAMPLES)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_recoverable_fault_of_a_reward_passes_through():
    def throttled(sample: RewardInput) -> float:
        raise Recoverable("judge is overloaded")

    for batched in (False, True):
        with pytest.raises(Recoverable, match="judge is overloaded"):
            score(RewardFunction("judge", throttled, batched), SAMPLES)


def test_a_batch_reward_returns_one_number_for_each_sample():
    with pytest.raises(Fatal, match="reward mine returned 1 numbers for 2 samples"):
        score(constant([1.0], batched=True), SAMPLES)
    with pytest.raises(Fatal, match=r"reward mine returned 1\.0; expected a list of numbers"):
        score(constant(1.0, batched=True), SAMPLES)
    assert score(constant(np.array([1.0, 2.0]), batched=True), SAMPLES) == [1.0, 2.0]


def test_a_batch_reward_that_raises_while_it_yields_is_fatal_too():
    def broken(samples: list[RewardInput]):
        yield 1.0
        raise KeyError("x")

    with pytest.raises(Fatal, match="failed on the batch of 2 samples: KeyError: 'x'"):
        score(RewardFunction("mine", batch_reward(broken), batched=True), SAMPLES)


def test_rewards_load_without_torch():
    """Planning reads reward specs; it must stay quick."""
    code = "import rollout_core.rewards, rollout_core.data.datasets, sys; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


# -- combinations ------------------------------------------------------------------------------------------------------


def combinations() -> tuple[CompositeReward, ExpressionReward]:
    exact, model = ExactMatchReward(), ModelReward(model="here")
    return (
        CompositeReward(parts=(WeightedReward(weight=2.0, reward=exact), WeightedReward(weight=-1.0, reward=model))),
        ExpressionReward(expression="right + quality", rewards={"right": exact, "quality": model}),
    )


def test_a_composite_is_the_weighted_sum_of_its_parts(tmp_path: Path):
    mine = write(tmp_path / "mine.py", "def length(sample): return len(sample.completion)\n")
    parts = (
        WeightedReward(weight=2.0, reward=ExactMatchReward()),
        WeightedReward(weight=-0.5, reward=FunctionReward(callable=f"{mine}:length")),
    )
    samples = [RewardInput("q", "42", {"answer": "42"}), RewardInput("q", "1", {"answer": "42"})]
    composite = load_reward(CompositeReward(parts=(*parts, parts[0])))
    assert score(load_reward(CompositeReward(parts=parts)), samples) == [1.0, -0.5]
    assert [(part.name, part.weight) for part in composite.parts] == [
        ("exact_match", 2.0),
        ("length", -0.5),
        ("exact_match 2", 2.0),
    ]
    assert score(composite.parts[1].reward, samples) == [2.0, 1.0]


def test_parts_that_abstain_leave_their_weight_to_the_others(tmp_path: Path):
    """Weights 3 and -1, 4 by their sizes: alone the first counts 4 / 3 times, alone the second 4 times."""
    code = """
    def first(sample): return sample.extras.get("first")
    def second(sample): return sample.extras.get("second")
    def third(sample): return 9.0
    """
    mine = write(tmp_path / "mine.py", code)
    parts = tuple(
        WeightedReward(weight=weight, reward=FunctionReward(callable=f"{mine}:{name}", in_process=True))
        for name, weight in (("first", 3.0), ("second", -1.0), ("third", 0.0))
    )
    given = [{"first": 2.0, "second": 1.0}, {"first": 2.0}, {"second": 1.0}, {}]
    samples = [RewardInput("q", "a", extras) for extras in given]
    assert score(load_reward(CompositeReward(parts=parts)), samples) == [5.0, 8.0, -4.0, None]
    both = {"one": parts[0].reward, "other": parts[1].reward}
    expression = ExpressionReward(expression="one + other", rewards=both)
    assert score(load_reward(expression), samples) == [3.0, None, None, None]


def test_an_expression_knows_its_rewards_and_the_sample():
    spec = ExpressionReward(
        expression="(right if not truncated else -1) - num_tokens / 10 + num_characters",
        rewards={"right": ExactMatchReward()},
    )
    samples = [
        RewardInput("q", "42", {"answer": "42"}, num_tokens=5),
        RewardInput("q", "42", {"answer": "42"}, finish_reason="length", num_tokens=5),
    ]
    assert score(load_reward(spec), samples) == [2.5, 0.5]


def test_an_expression_that_fails_names_the_sample():
    spec = ExpressionReward(expression="1 / num_tokens")
    samples = [RewardInput("q", "a", num_tokens=1), RewardInput("q", "a", id="s-1")]
    with pytest.raises(Fatal, match=r"reward 1 / num_tokens failed on sample 1 \(s-1\): ZeroDivisionError"):
        score(load_reward(spec), samples)


def test_a_part_that_fails_is_named_itself():
    spec = CompositeReward(parts=(WeightedReward(reward=ExactMatchReward()),))
    with pytest.raises(Fatal, match=r"reward exact_match\(answer\) failed on sample 0"):
        score(load_reward(spec), [RewardInput("q", "a")])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expression": "right", "rewards": {}}, "unknown name 'right'"),
        ({"expression": "1", "rewards": {"truncated": {"kind": "exact_match"}}}, "would hide the sample's own figure"),
        ({"expression": "__import__('os')"}, "unknown function"),
    ],
)
def test_an_expression_is_checked_when_it_is_read(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ExpressionReward.model_validate(fields)


def test_reward_models_are_named_by_content_wherever_they_stand():
    for spec in combinations():
        assert [
            part.model for part in plain_rewards(with_models(spec, lambda uri: "there")) if part.kind == "model"
        ] == ["there"]
        assert source_id(spec) != source_id(with_models(spec, lambda uri: "there"))
    assert with_models(ExactMatchReward(), lambda uri: "there") == ExactMatchReward()


def test_source_id_of_a_combination_follows_the_source_of_its_parts(tmp_path: Path):
    mine = write(tmp_path / "mine.py", "def r(sample): return 1\n")
    there = write(tmp_path / "there/mine.py", "def r(sample): return 1\n")

    def combined(file: Path) -> list[CompositeReward | ExpressionReward]:
        reward = FunctionReward(callable=f"{file}:r")
        return [
            CompositeReward(parts=(WeightedReward(reward=reward),)),
            CompositeReward(parts=(WeightedReward(weight=2.0, reward=reward),)),
            ExpressionReward(expression="mine", rewards={"mine": reward}),
            ExpressionReward(expression="-mine", rewards={"mine": reward}),
        ]

    before = [source_id(spec) for spec in combined(mine)]
    assert len(set(before)) == 4
    assert [source_id(spec) for spec in combined(there)] == before, "where the file lies does not matter"
    assert [identity(spec) for spec in combined(there)] == [identity(spec) for spec in combined(mine)]
    write(mine, "def r(sample): return 2\n")
    assert not set(before) & {source_id(spec) for spec in combined(mine)}
