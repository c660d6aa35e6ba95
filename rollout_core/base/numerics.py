"""What this machine computes with, asked of torch and never left to a fallback that would hide a broken driver; and its
arithmetic: its own, or one that gives the same bytes on every x86-64 machine with AVX2.

Libraries choose their kernels by the CPU they find, and other kernels round otherwise. ``portable`` holds all of them
to what every such machine has, by settings that each library documents. They read them when they first compute, so a
process is held before it imports torch, and its children inherit it. Nothing is taken on trust: `check_numerics` asks
the libraries themselves, before anything is computed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from rollout_core.base.errors import ConfigError

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@cache
def probe_device() -> str:
    """``cuda`` or ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def num_gpus() -> int:
    """GPUs that processes of this machine can share out among themselves."""
    import torch

    return torch.cuda.device_count()


def mixed_precision(asked: str) -> str:
    """``float32`` or ``bfloat16``: what a precision of ``auto`` means here, else ``asked`` itself."""
    import torch

    if asked != "auto":
        return asked
    return "bfloat16" if probe_device() == "cuda" and torch.cuda.is_bf16_supported() else "float32"


def machine_memory() -> tuple[int, int]:
    """Bytes of the machine's memory, as far as its control group lets us: available now, and in total."""
    import psutil  # not needed by commands that only read a configuration, and slow to load

    machine = psutil.virtual_memory()
    limits = [machine.total]
    for file in map(Path, _CGROUP_LIMITS):
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(machine.available, *limits), min(limits)


Numerics = Literal["native", "portable"]

NUMERICS = "ROLLOUT_NUMERICS"
"""Environment variable: ``portable`` holds a process, and all it starts, whatever its configuration says."""
PORTABLE: Final = "portable"
ENVIRONMENT = {
    # PyTorch's own vector kernels.
    "ATEN_CPU_CAPABILITY": "avx2",
    # Matrix products. The one branch that takes the same path on Intel's and on other processors: for these the branch
    # AVX2 means whatever suits the machine.
    "MKL_CBWR": "COMPATIBLE",
    "MKL_DYNAMIC": "FALSE",
    # Not used in float32; held in case a model or a later torch does.
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OMP_DYNAMIC": "FALSE",
    # vLLM would take as many threads as the machine has cores, and divide a sequence among them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
}
DEFAULT_THREADS = 1
"""CPU threads of portable arithmetic where none are configured: last bits of sums depend on their number."""

_WIDER = ("avx512", "avx10", "avx_", "amx")
_MKL_BRANCH = 1
_MKL_COMPATIBLE = 3
_REMEDY = f'Set {NUMERICS}=portable in the environment before Python starts, or numerics = "native"'


def current_numerics() -> Numerics:
    """What this process is held to."""
    return PORTABLE if os.environ.get(NUMERICS) == PORTABLE else "native"


def is_portable() -> bool:
    """Whether this process is held to portable arithmetic."""
    return current_numerics() == PORTABLE


def hold_numerics(asked: str | None = None) -> None:
    """Hold this process and its children to portable arithmetic, if ``asked`` or the environment says so.

    Comes before torch is imported; afterwards it has an effect on children only, as `check_numerics` finds.
    """
    if asked == PORTABLE or is_portable():
        os.environ.update({**ENVIRONMENT, NUMERICS: PORTABLE})


def require_numerics(asked: Numerics) -> None:
    """Raises ConfigError unless this process computes as ``asked``. Portable arithmetic is a native one, too."""
    given = os.environ.get(NUMERICS, "native")
    if given not in ("native", PORTABLE):
        raise ConfigError(f"{NUMERICS} is {given!r}; expected native or portable")
    if asked == PORTABLE and not is_portable():
        raise ConfigError(
            f'numerics = "portable", but this process was not started for it, and torch may have chosen its kernels. '
            f"{_REMEDY}"
        )
    check_numerics()


def is_portable_here() -> bool:
    """Whether what is computed next is portable: a GPU computes in its own way in either case."""
    return is_portable() and probe_device() == "cpu"


def check_numerics(dtype: str = "float32") -> None:
    """Raises ConfigError where arithmetic is to be portable, and a library does not keep to it in ``dtype``."""
    if not is_portable_here():
        return
    if dtype != "float32":
        raise ConfigError(f'numerics = "portable" holds in float32 on a CPU, not in {dtype}; choose float32')
    _check_libraries()


@cache
def _check_libraries() -> None:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if capability != "AVX2":
        raise ConfigError(
            f'numerics = "portable" needs PyTorch\'s AVX2 kernels; it has chosen {capability}, because the CPU lacks '
            f"AVX2 or because torch was used before it could be held. {_REMEDY}"
        )
    branch = _mkl_branch()
    if branch != _MKL_COMPATIBLE:
        found = "this torch is built without MKL" if branch is None else f"MKL has chosen branch {branch}"
        raise ConfigError(
            f"numerics = \"portable\" needs MKL's branch COMPATIBLE ({_MKL_COMPATIBLE}); {found}. Use PyTorch's own "
            f"builds for x86-64. {_REMEDY}"
        )


def _mkl_branch() -> int | None:
    """MKL's branch of conditional numerical reproducibility, as `mkl_cbwr_get` numbers them; None without MKL."""
    import ctypes
    from pathlib import Path

    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not torch.backends.mkl.is_available() or not library.is_file():
        return None
    # Torch has MKL linked in, which hides the plain name.
    branch = getattr(ctypes.CDLL(str(library)), "mkl_serv_cbwr_get", None)
    return None if branch is None else int(branch(_MKL_BRANCH))


def hide_wider_instructions() -> None:
    """Make torch report a CPU without anything beyond AVX2; vLLM chooses its own kernels by that."""
    import torch.cpu

    known = torch.cpu.get_capabilities()
    held = {name: value and not name.startswith(_WIDER) for name, value in known.items()}
    torch.cpu.get_capabilities = lambda: held


def numerics_identity() -> dict[str, str]:
    """What of the arithmetic enters cache keys: that it is portable.

    The native kind has no name there: a result counts on every machine, whichever made it.
    """
    return {"numerics": PORTABLE} if is_portable_here() else {}


def default_threads() -> int | None:
    """CPU threads where no number is configured; None: as many as the machine has."""
    return DEFAULT_THREADS if is_portable_here() else None


def arithmetic() -> dict[str, Any]:
    """What decides over last bits in this process, for records that people and later runs compare.

    Empty where nothing was computed by torch.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    of_software = {"numerics": current_numerics(), "torch": str(torch.__version__)}
    if probe_device() == "cuda":
        return {**of_software, "device": torch.cuda.get_device_name()}
    instructions = torch.backends.cpu.get_cpu_capability()
    return {**of_software, "device": "cpu", "instructions": instructions, "threads": torch.get_num_threads()}


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How two results of `arithmetic` differ, as a sentence; empty where they agree."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name, 'unknown')} (here {now.get(name, 'unknown')})" for name in names)


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Let torch use ``count`` CPU threads inside the block; None: as many as it does."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
