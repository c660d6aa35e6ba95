"""Portable arithmetic: the same bytes whatever the machine has beyond AVX2, and never a silent exception."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_core.base import determinism
from rollout_core.base.determinism import NUMERICS, arithmetic, differing, require_numerics
from rollout_core.base.errors import ConfigError
from rollout_core.config import (
    NightlyConfig,
    OptimizerConfig,
    TransformersBackend,
    VLLMBackend,
    apply_overrides,
    identity,
    load_config,
    parse_config,
)
from rollout_core.config.rewards import ModelReward
from tests.golden.fence import ALGORITHMS, TRAIN_STATES, train_states

PROJECT = Path(__file__).resolve().parents[2]

AS_IT_IS: dict[str, str] = {}
A_LESSER_MACHINE = {
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW",
}
"""As far as settings go: MKL and the C library find no AVX-512."""
A_USER_S_OWN = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "AVX",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}


def in_child(folder: Path, *names: str, **environment: str) -> dict[str, str]:
    """Content ids that another process computes."""
    done = subprocess.run(
        [sys.executable, str(ALGORITHMS), str(folder), *names],
        env={**os.environ, **environment},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_portable_training_ends_in_these_bytes():
    """An update of each algorithm; those of sft and ppo were written on a Xeon, the others on an EPYC."""
    complaint = TRAIN_STATES.complaint(train_states())
    assert not complaint, complaint


OF_EACH_FAMILY = ("sft", "dpo", "ppo", "gkd")


@pytest.mark.parametrize(
    ("machine", "names"),
    [
        pytest.param(A_LESSER_MACHINE, OF_EACH_FAMILY, id="lesser"),
        pytest.param(A_USER_S_OWN, OF_EACH_FAMILY, id="set otherwise"),
        pytest.param(A_LESSER_MACHINE, (), id="lesser, each algorithm", marks=pytest.mark.campaign),
        pytest.param(A_USER_S_OWN, (), id="set otherwise, each algorithm", marks=pytest.mark.campaign),
    ],
)
def test_where_libraries_find_less_it_ends_in_the_same_bytes(machine: dict[str, str], names: tuple[str, ...]):
    found, kept = train_states(*names, **machine)["train states"], TRAIN_STATES.read()["train states"]
    assert found == [line for line in kept if not names or line.split()[0] in names]


@pytest.mark.campaign
def test_native_training_ends_in_other_bytes_where_libraries_find_less(tmp_path: Path):
    """Else the states above would show nothing."""
    import torch

    has_more = torch.backends.cpu.get_cpu_capability() == "AVX512"
    lesser = {**A_LESSER_MACHINE, "ATEN_CPU_CAPABILITY": "avx2"} if has_more else A_USER_S_OWN
    assert in_child(tmp_path / "here", "sft")["sft"] != in_child(tmp_path / "there", "sft", **lesser)["sft"]


@pytest.mark.campaign
@pytest.mark.engine
def test_a_portable_engine_and_ppo_on_what_it_writes_give_the_same_bytes_where_libraries_find_less(tmp_path: Path):
    here = in_child(tmp_path / "here", "engine", **{NUMERICS: "portable"})
    lesser = in_child(tmp_path / "lesser", "engine", **A_LESSER_MACHINE, **{NUMERICS: "portable"})
    assert here == lesser and set(here) == {"completions", "engine"}


def refusal(code: str, **environment: str) -> str:
    """The last line of a Python that fails."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, cwd=PROJECT, capture_output=True, text=True
    )
    assert done.returncode != 0
    return done.stderr.splitlines()[-1]


def test_a_process_that_computed_before_it_was_held_is_refused():
    code = (
        "import torch; torch.ones(100, 100) @ torch.ones(100, 100)\n"
        "from rollout_core.base.determinism import hold_numerics, require_numerics\n"
        "hold_numerics('portable'); require_numerics('portable')"
    )
    line = refusal(code, ATEN_CPU_CAPABILITY="default")
    assert "ConfigError" in line and "AVX2 kernels; it has chosen DEFAULT" in line and f"{NUMERICS}=portable" in line
    line = refusal(code, ATEN_CPU_CAPABILITY="avx2", MKL_CBWR="AVX2")
    assert "MKL has chosen branch" in line and f"{NUMERICS}=portable" in line


def test_the_command_holds_its_process_before_a_configuration_is_checked_by_torch():
    code = (
        "from pathlib import Path; from flows.cli.starting import load_run\n"
        "from rollout_core.config import TrainSFTConfig\n"
        "asked = {'algorithm.optimizer.kind': 'Adafactor', 'algorithm.optimizer.warmup_steps': 1}\n"
        "config = load_run(Path('examples/sft-tiny.toml'), TrainSFTConfig, asked)\n"
        "import sys; assert 'torch' in sys.modules\n"
        "from rollout_core.base.determinism import require_numerics; require_numerics(config.numerics)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True)


def test_a_process_that_was_not_held_refuses_a_portable_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(NUMERICS, raising=False)
    require_numerics("native")
    with pytest.raises(ConfigError, match=r"was not started for it.*ROLLOUT_NUMERICS=portable"):
        require_numerics("portable")
    monkeypatch.setenv(NUMERICS, "portabel")
    with pytest.raises(ConfigError, match="ROLLOUT_NUMERICS is 'portabel'; expected native or portable"):
        require_numerics("native")


def test_portable_results_have_keys_of_their_own_and_native_ones_no_mark(monkeypatch: pytest.MonkeyPatch):
    config = load_config(PROJECT / "examples" / "nightly-tiny.toml", NightlyConfig)
    parts = [config.sft, config.ppo, VLLMBackend(), TransformersBackend(), ModelReward(model="m")]
    monkeypatch.delenv(NUMERICS, raising=False)
    native = [identity(part) for part in parts]
    monkeypatch.setenv(NUMERICS, "portable")
    portable = [identity(part) for part in parts]
    assert not any("numerics" in named for named in native)
    assert all(named["numerics"] == "portable" for named in portable)
    assert "num_threads" not in native[2] and portable[2]["num_threads"] == 1


def test_portable_runs_in_half_precision_are_refused():
    plain = json.loads(load_config(PROJECT / "examples" / "nightly-tiny.toml", NightlyConfig).model_dump_json())
    for key in ("sft.precision", "backend.dtype"):
        with pytest.raises(ConfigError, match=f"{key} is bfloat16, but portable numerics hold in float32"):
            parse_config(apply_overrides(plain, {key: "bfloat16", "numerics": "portable"}), NightlyConfig)
        parse_config(apply_overrides(plain, {key: "bfloat16"}), NightlyConfig)


def test_optimizers_whose_square_roots_differ_by_make_of_cpu_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(NUMERICS, "portable")
    for kind, options in (("RMSprop", {}), ("NAdam", {}), ("adamw", {"foreach": True})):
        with pytest.raises(ValueError, match="with portable numerics use adamw, adam, sgd or Adafactor"):
            OptimizerConfig(kind=kind, lr=1e-3, options=options)
    for kind in ("adamw", "sgd", "Adafactor"):
        OptimizerConfig(kind=kind, lr=1e-3)


def test_arithmetic_names_what_decides_over_last_bits(monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.delenv(NUMERICS, raising=False)
    with determinism.cpu_threads(1):
        here = arithmetic()
    assert here["numerics"] == "native" and here["torch"] == torch.__version__
    assert here["instructions"] == torch.backends.cpu.get_cpu_capability() and here["threads"] == 1
    assert differing(here, here) == ""
    assert differing({**here, "instructions": "AVX1024"}, here).startswith("instructions AVX1024 (here ")


def test_what_a_flow_run_s_parameters_ask_for():
    from tasks.runtime import requested_numerics

    assert requested_numerics({"config": {"numerics": "portable"}}) == "portable"
    assert requested_numerics({"config": {}}) is None
    assert requested_numerics({"config": {"numerics": "native"}, "overrides": {"numerics": "portable"}}) == "portable"
    assert requested_numerics({"config": {"numerics": "portable"}, "overrides": None}) == "portable"
