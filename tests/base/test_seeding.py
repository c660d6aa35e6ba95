"""One seed gives one sequence of numbers, and a captured state continues it in any process."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout_core.base.determinism import (
    ENVIRONMENT,
    RngState,
    capture_rng,
    prepare_environment,
    restore_rng,
    seed_everything,
)
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import canonical_json, hash_bytes

DRAW = """
def draw():
    import random, numpy, torch
    return [random.random(), random.gauss(0, 1), random.randrange(10**9), float(numpy.random.rand()),
            float(numpy.random.standard_normal()), int(numpy.random.randint(10**9)), float(torch.rand(())),
            float(torch.randn(())), torch.randperm(20).tolist(),
            torch.nn.functional.dropout(torch.ones(9)).tolist()]
"""
_namespace: dict = {}
exec(DRAW, _namespace)
draw = _namespace["draw"]


def in_new_process(code: str, *, stdin: str = "", **environment: str) -> str:
    """Standard output of ``code``, run by a Python that inherits nothing of the environment but what is given."""
    done = subprocess.run(
        [sys.executable, "-c", DRAW + code],
        input=stdin,
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.fixture(autouse=True)
def _process_settings_as_before() -> Iterator[None]:
    state, threads = capture_rng(), torch.get_num_threads()
    deterministic, precision = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield
    restore_rng(state)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision(precision)


# -- seeds -------------------------------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_numbers_of_every_library():
    seed_everything(7)
    first = draw()
    seed_everything(7)
    assert draw() == first
    seed_everything(8)
    assert all(a != b for a, b in zip(draw()[:9], first[:9], strict=True))


def test_a_seed_gives_the_same_numbers_in_a_new_process():
    seed_everything(7)
    here = draw()  # at once: threads that other tests left behind draw, too
    got = in_new_process(
        "from rollout_core.base.determinism import seed_everything; seed_everything(7); "
        "import json; print(json.dumps(draw()))"
    )
    assert json.loads(got) == here


def test_seeding_switches_determinism_on():
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("medium")
    seed_everything(0, num_threads=1)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_num_threads() == 1
    seed_everything(0, deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed: int):
    with pytest.raises(ConfigError, match="expected a number from 0 to"):
        seed_everything(seed)


# -- environment -------------------------------------------------------------------------------------------------------


def test_the_environment_is_prepared_before_torch_is_imported():
    got = in_new_process(
        "import warnings; warnings.simplefilter('error')\n"
        "import os, sys; from rollout_core.base.determinism import prepare_environment, seed_everything\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "done = prepare_environment(); seed_everything(1)\n"
        "print(done.set_now, done.too_late, os.environ['CUBLAS_WORKSPACE_CONFIG'], os.environ['PYTHONHASHSEED'])"
    )
    assert got.strip() == "('CUBLAS_WORKSPACE_CONFIG', 'PYTHONHASHSEED') ('PYTHONHASHSEED',) :4096:8 0"


def test_preparing_after_torch_warns_once_and_says_so(monkeypatch: pytest.MonkeyPatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name)
    with pytest.warns(RuntimeWarning, match="torch was imported before CUBLAS_WORKSPACE_CONFIG was set"):
        assert prepare_environment().too_late == ("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepare_environment().set_now == ()


def test_settings_of_the_user_win(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    done = prepare_environment()
    assert done.set_now == () and done.too_late == ()


# -- capture and restore -----------------------------------------------------------------------------------------------


def test_a_restored_state_continues_every_library():
    seed_everything(3)
    random.gauss(0, 1)  # leaves the other half of a pair behind
    np.random.standard_normal()
    state = capture_rng()
    expected = draw()
    draw()
    restore_rng(state)
    assert draw() == expected
    restore_rng(state)
    assert capture_rng() == state


def test_a_state_survives_json_and_a_new_process():
    seed_everything(4)
    draw()
    random.gauss(0, 1)
    text = canonical_json(capture_rng().to_json()).decode()
    here = [draw(), capture_rng().to_json()]
    got = in_new_process(
        "import json, sys; from rollout_core.base.determinism import RngState, capture_rng, restore_rng\n"
        "restore_rng(RngState.from_json(json.load(sys.stdin)))\n"
        "print(json.dumps([draw(), capture_rng().to_json()]))",
        stdin=text,
    )
    assert json.loads(got) == here
    assert RngState.from_json(json.loads(text)).to_json() == json.loads(text)


def test_the_json_form_is_pinned():
    """Made by CPython 3.11, numpy 2.3 and torch 2.13 from seed 0; a change needs a new RNG_STATE_VERSION."""
    seed_everything(0)
    document = capture_rng().to_json()
    assert sorted(document) == ["cuda", "numpy", "python", "torch", "version"]
    assert document["version"] == 1
    assert document["python"][0] == 3 and document["python"][2] is None
    assert (
        hash_bytes(canonical_json([document["python"], document["numpy"], document["torch"]])).short == "b22389018172"
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 2}, "RNG state has version 2; this software reads 1"),
        ({"torch": "not base64!"}, "not an RNG state: "),
        ({"numpy": [1, 2]}, "not an RNG state: "),
        ({"python": None}, "not an RNG state: "),
    ],
)
def test_a_malformed_state_is_refused(change: dict, expected: str):
    with pytest.raises(ConfigError, match=expected):
        RngState.from_json({**capture_rng().to_json(), **change})
    with pytest.raises(ConfigError, match="not an RNG state"):
        RngState.from_json([])


def test_a_state_that_a_library_refuses_is_an_error():
    state = capture_rng()
    for broken in (
        RngState(state.python, state.numpy, b"short"),
        RngState(state.python, (b"", *state.numpy[1:]), state.torch),
        RngState((3, b"", None), state.numpy, state.torch),
    ):
        with pytest.raises(ConfigError, match="does not fit"):
            restore_rng(broken)


def test_states_of_devices_beyond_those_at_hand_are_left_out():
    state = capture_rng()
    at_hand = tuple(torch.cuda.get_rng_state(device).numpy().tobytes() for device in range(torch.cuda.device_count()))
    restore_rng(RngState(state.python, state.numpy, state.torch, cuda=(*at_hand, b"no such device")))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_generators_are_seeded_captured_and_restored():
    seed_everything(5)
    first = torch.rand(4, device="cuda").tolist()
    state = RngState.from_json(capture_rng().to_json())
    second = torch.rand(4, device="cuda").tolist()
    restore_rng(state)
    assert torch.rand(4, device="cuda").tolist() == second != first
    seed_everything(5)
    assert torch.rand(4, device="cuda").tolist() == first
