"""A user's reward runs the code that its id names, in a process whose end fails the scoring and nothing else."""

from __future__ import annotations

import os
import struct
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.config.rewards import FunctionReward
from rollout_core.rewards import source_ids
from rollout_core.rewards.loading import load_reward
from rollout_core.rewards.scoring import RewardInput, score
from rollout_core.rewards.source_ids import read_source, source_id, source_of

SAMPLES = [RewardInput("2+2?", "4", {"answer": "4"}, id="s-0"), RewardInput("3+3?", "7", id="s-1")]


def write(path: Path, code: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(code), encoding="utf-8")
    return path


def scores(base: Path, **options: Any) -> list[float]:
    reward = load_reward(FunctionReward(callable="mine.py:r", **options), base=base)
    try:
        return score(reward, SAMPLES)
    finally:
        reward.close()


# -- the code that runs is the code of the id --------------------------------------------------------------------------


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("edited", ["mine.py", "helper_of_mine.py"])
def test_what_is_edited_after_the_id_was_taken_is_not_run(tmp_path: Path, edited: str, in_process: bool):
    write(tmp_path / "mine.py", "from helper_of_mine import W\ndef r(sample): return 1 * W\n")
    write(tmp_path / "helper_of_mine.py", "W = 1\n")
    spec = FunctionReward(callable="mine.py:r", in_process=in_process)
    first = source_id(spec, tmp_path)
    file = tmp_path / edited
    write(file, file.read_text().replace("1", "5"))

    def score_as(wanted: str) -> list[float]:
        reward = load_reward(spec, base=tmp_path, source=source_of(spec, tmp_path, wanted))
        return score(reward, SAMPLES[:1])

    assert score_as(first) == [1.0]
    assert score_as(source_id(spec, tmp_path)) == [5.0]
    assert score_as(first) == [1.0], "both versions in one process"


def test_another_process_refuses_code_that_is_not_that_of_the_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "mine.py", "def r(sample): return 1\n")
    spec = FunctionReward(callable="mine.py:r")
    first = source_id(spec, tmp_path)
    monkeypatch.setattr(source_ids, "_held", {})  # as where the id was taken elsewhere
    assert source_of(spec, tmp_path, first).id == first
    write(tmp_path / "mine.py", "def r(sample): return 2\n")
    with pytest.raises(ConfigError, match=r"the code of reward mine\.py:r is not what it was when the run began"):
        source_of(spec, tmp_path, first)


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("callable_", ["mine.py:r", "edited_pack.mine:r"])
def test_an_edited_helper_module_is_run_as_it_is_now(tmp_path: Path, callable_: str, in_process: bool):
    """In one process: several flows, a notebook, a worker."""
    spec = FunctionReward(callable=callable_, in_process=in_process)
    code = "def r(sample):\n    from edited_helper import W\n    return W\n"
    write(tmp_path / "mine.py", code)
    write(tmp_path / "edited_pack/__init__.py", "")
    write(tmp_path / "edited_pack/mine.py", "from edited_pack.deeper import r\n")
    write(tmp_path / "edited_pack/deeper.py", code)
    got = []
    for value in ("1", "2.5"):
        write(tmp_path / "edited_helper.py", f"W = {value}\n")
        got += score(load_reward(spec, base=tmp_path), SAMPLES[:1])
    assert got == [1.0, 2.5]


def test_packages_that_a_dotted_name_leads_through_count_and_are_not_run_to_find_it(tmp_path: Path):
    write(tmp_path / "leading_pack/__init__.py", "import os\nW = 1\nos._exit(0)\n")
    write(tmp_path / "leading_pack/mine.py", "def r(sample): return 1\n")
    spec = FunctionReward(callable="leading_pack.mine:r")
    first = source_id(spec, tmp_path)
    write(tmp_path / "leading_pack/__init__.py", "W = 2\n")
    assert source_id(spec, tmp_path) != first


def test_what_this_project_brings_is_no_code_of_the_users(tmp_path: Path):
    write(tmp_path / "mine.py", "from rollout_core.rewards import batch_reward\ndef r(sample): return 1\n")
    source = read_source(FunctionReward(callable="mine.py:r"), tmp_path)
    assert source.codes["mine.py:r"].imported == {}


def test_names_of_the_standard_library_are_its_own(tmp_path: Path):
    write(tmp_path / "colorsys.py", "raise AssertionError\n")
    write(tmp_path / "mine.py", "import colorsys\ndef r(sample): return colorsys.ONE_THIRD * 3\n")
    assert scores(tmp_path) == [1.0, 1.0]


def test_a_file_named_like_a_package_that_is_loaded_is_refused(tmp_path: Path):
    write(tmp_path / "pydantic.py", "W = 1\n")
    write(tmp_path / "mine.py", "import rollout_core.rewards\nfrom pydantic import W\ndef r(sample): return W\n")
    with pytest.raises(ConfigError, match=r"imports pydantic from .*pydantic\.py, but .* is loaded under that name"):
        scores(tmp_path, in_process=True)


# -- what goes wrong fails the scoring ---------------------------------------------------------------------------------

BAD_ENDS = {
    "os._exit(0)": "it ended its process with exit code 0",
    "time.sleep(20)": "it took longer than 1 s",
    "os.write(1, b'x' * 17_000_000)": "it wrote more than 16 MiB of output",
    "eaten = b'x' * 300_000_000; time.sleep(5)": "MiB of memory; 150 MiB are allowed",
    "[os.fork() for _ in range(5)]; time.sleep(5)": "processes at once; 8 are allowed",
    "sys.exit(0)": "SystemExit: 0",
    "raise GeneratorExit": "GeneratorExit",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise Unshowable": "Unshowable: (its message cannot be shown: __str__ raises ZeroDivisionError)",
    "return Unshowable()": "returned a Unshowable whose __repr__ raises",
    "raise ValueError('half a \\ud83d')": "ValueError: half a \\ud83d",
    "os.kill(os.getpid(), 40)": "it was killed by signal 40",
}


@pytest.mark.parametrize("line", BAD_ENDS)
def test_a_reward_that_goes_wrong_is_named_with_sample_and_reason(tmp_path: Path, line: str):
    """Each is bounded: at most 32 processes, 300 MB, 20 seconds."""
    write(
        tmp_path / "mine.py",
        f"""
        import os, sys, time

        class Unshowable(BaseException):
            def __str__(self): return str(1 / 0)
            __repr__ = __str__

        def r(sample):
            if sample.id == "s-1":
                {line}
            return 1.0
        """,
    )
    timeout = {"timeout_seconds": 1.0} if "sleep(20)" in line else {}
    with pytest.raises(Fatal) as caught:
        scores(tmp_path, memory_mb=150, max_processes=8, **timeout)
    told = str(caught.value)
    assert told.startswith("reward mine.py:r ") and "sample 1" in told and BAD_ENDS[line] in told
    told.encode()


def test_a_file_that_only_a_computed_import_names_is_refused(tmp_path: Path):
    """Nothing would notice its changes."""
    write(tmp_path / "hidden.py", "W = 1\n")
    write(tmp_path / "mine.py", "import importlib\ndef r(sample): return importlib.import_module('hid' + 'den').W\n")
    with pytest.raises(Fatal, match=r"imports hidden from .*hidden\.py, which no import statement of its files names"):
        scores(tmp_path)
    write(tmp_path / "mine.py", "import hidden, importlib\ndef r(sample): return importlib.import_module('hidden').W\n")
    assert scores(tmp_path) == [1.0, 1.0]


@pytest.mark.parametrize(
    "line", ["runpy.run_module('hid' + 'den')['W']", "float(len(pkgutil.get_data('hid' + 'den', 'data.txt')))"]
)
def test_no_other_way_runs_or_reads_a_file_that_was_not_read(tmp_path: Path, line: str):
    write(tmp_path / "hidden" / "__init__.py", "W = 1.0\n")
    write(tmp_path / "hidden" / "__main__.py", "W = 1.0\n")
    write(tmp_path / "hidden" / "data.txt", "12\n")
    write(tmp_path / "mine.py", f"import pkgutil, runpy\ndef r(sample): return {line}\n")
    with pytest.raises(Fatal, match="which no import statement of its files names"):
        scores(tmp_path)


def test_libraries_may_look_for_what_the_users_files_happen_to_be_named_like(tmp_path: Path):
    """`find_spec` runs nothing; transformers, for one, looks for its extras so."""
    write(tmp_path / "datasets.py", "raise AssertionError\n")
    write(
        tmp_path / "mine.py",
        "from importlib.util import find_spec\ndef r(sample): return float(find_spec('datasets') is not None)\n",
    )
    assert scores(tmp_path) == [1.0, 1.0]


@pytest.mark.parametrize(
    "line",
    ["sys.exit(0)", "raise GeneratorExit", "raise Unshowable", "return Unshowable()", "raise Exits", "raise Exits(1)"],
)
def test_trusted_rewards_in_the_runs_own_process_are_named_too(tmp_path: Path, line: str):
    write(
        tmp_path / "mine.py",
        f"""
        import sys

        class Unshowable(Exception):
            def __str__(self): return str(1 / 0)
            __repr__ = __str__

        class Exits(Exception):
            def __str__(self): sys.exit(len(self.args))

        def r(sample):
            {line}
        """,
    )
    with pytest.raises(Fatal, match=r"reward mine\.py:r .* sample 0 \(s-0\)"):
        scores(tmp_path, in_process=True)


def test_a_batch_that_goes_wrong_is_named_as_a_whole(tmp_path: Path):
    write(tmp_path / "mine.py", "import os\ndef r(samples): os._exit(3)\nr.batch_reward = True\n")
    with pytest.raises(Fatal, match=r"reward mine\.py:r failed on the batch of 2 samples: it ended its process with"):
        scores(tmp_path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [("os._exit(0)", "it ended its process with exit code 0"), ("time.sleep(20)", "it took longer than 1 s")],
)
def test_a_reward_that_cannot_be_loaded_is_bad_configuration(tmp_path: Path, line: str, reason: str):
    write(tmp_path / "mine.py", f"import os, time\n{line}\ndef r(sample): return 1\n")
    with pytest.raises(ConfigError, match=rf"reward mine\.py:r cannot be loaded: {reason}"):
        scores(tmp_path, timeout_seconds=1.0)


def test_a_recoverable_fault_crosses_with_its_hint_and_the_process_goes_on(tmp_path: Path):
    write(
        tmp_path / "mine.py",
        """
        from rollout_core.base.errors import Recoverable, RetryHint

        class Overloaded(Recoverable): ...

        calls = []

        def r(sample):
            calls.append(sample)
            if len(calls) == 1:
                raise Overloaded("judge is overloaded", RetryHint(7.0, 8.0))
            return len(calls)
        """,
    )
    reward = load_reward(FunctionReward(callable="mine.py:r"), base=tmp_path)
    with pytest.raises(Recoverable, match=r"^judge is overloaded$") as caught:
        score(reward, SAMPLES)
    assert caught.value.hint.delay_seconds == 7.0
    assert score(reward, SAMPLES) == [2.0, 3.0]
    reward.close()
    with pytest.raises(Recoverable):
        score(reward, SAMPLES)  # a new process


def test_calls_from_several_threads_load_a_new_process_once(tmp_path: Path):
    write(tmp_path / "mine.py", "print('loaded')\ndef r(sample): return 1\n")
    lines: list[str] = []
    reward = load_reward(FunctionReward(callable="mine.py:r"), base=tmp_path, on_line=lines.append)
    reward.close()
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: score(reward, SAMPLES), range(4))) == [[1.0, 1.0]] * 4
    reward.close()
    assert lines == ["reward mine.py:r: loaded"] * 2


def test_a_reward_that_once_cannot_be_loaded_again_is_loaded_by_a_later_call(tmp_path: Path):
    mark = tmp_path / "service-is-down"
    code = f"import os\nif os.path.exists({str(mark)!r}): raise ValueError('down')\ndef r(sample): return 1\n"
    write(tmp_path / "mine.py", code)
    reward = load_reward(FunctionReward(callable="mine.py:r"), base=tmp_path)
    reward.close()
    mark.touch()
    for _ in range(2):
        with pytest.raises(Fatal, match="ValueError: down"):
            score(reward, SAMPLES)
    mark.unlink()
    assert score(reward, SAMPLES) == [1.0, 1.0]
    reward.close()


def test_a_killed_reward_is_worth_another_try(tmp_path: Path):
    """The machine may have run out of memory."""
    write(
        tmp_path / "mine.py",
        """
        import os, pathlib

        def r(sample):
            mark = pathlib.Path("was-killed")
            if sample.id == "s-1" and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), 9)
            return 1.0
        """.replace("was-killed", str(tmp_path / "was-killed")),
    )
    reward = load_reward(FunctionReward(callable="mine.py:r"), base=tmp_path)
    with pytest.raises(Recoverable, match=r"^reward mine\.py:r was interrupted on sample 1 \(s-1\): .* SIGKILL"):
        score(reward, SAMPLES)
    assert score(reward, SAMPLES) == [1.0, 1.0]
    reward.close()


# -- values ------------------------------------------------------------------------------------------------------------


def test_samples_and_scores_cross_exactly(tmp_path: Path):
    write(
        tmp_path / "mine.py",
        """
        import struct

        def r(sample, *, expected):
            assert [sample.prompt, sample.completion, dict(sample.extras), sample.finish_reason, sample.num_tokens,
                    sample.id, list(sample.prompt_token_ids), list(sample.token_ids)] == expected, sample
            return struct.unpack("d", bytes.fromhex(sample.extras["float"]))[0]
        """,
    )
    for value in (0.1, -0.0, 5e-324, 1 / 3, 1.7976931348623157e308):
        chat = [{"role": "user", "content": "ü"}]
        extras = {"float": struct.pack("d", value).hex(), "large": 2**70, "none": None, "list": [1.5, {"a": True}]}
        sample = RewardInput(chat, "ß\x00", extras, "length", 3, None, (1, 2), [3, 4, 5])
        expected = [chat, "ß\x00", extras, "length", 3, None, [1, 2], [3, 4, 5]]
        spec = FunctionReward(callable="mine.py:r", kwargs={"expected": expected})
        [got] = score(load_reward(spec, base=tmp_path), [sample])
        assert struct.pack("d", got) == struct.pack("d", value)


def test_what_a_reward_writes_is_told_with_its_name(tmp_path: Path):
    write(tmp_path / "mine.py", "def r(sample):\n    print('looked at', sample.id)\n    return 1\n")
    lines: list[str] = []
    reward = load_reward(FunctionReward(callable="mine.py:r"), base=tmp_path, on_line=lines.append)
    score(reward, SAMPLES)
    assert lines == ["reward mine.py:r: looked at s-0", "reward mine.py:r: looked at s-1"]


def test_a_reward_has_a_process_of_its_own_that_stays_from_call_to_call(tmp_path: Path):
    write(tmp_path / "mine.py", "import os\ndef r(sample): return os.getpid()\n")
    reward = load_reward(FunctionReward(callable="mine.py:r"), base=tmp_path)
    first = score(reward, SAMPLES)
    assert first == score(reward, SAMPLES) and first[0] != os.getpid()
