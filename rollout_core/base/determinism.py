"""What makes results repeatable: the device and arithmetic that this machine computes with (its own, or one that gives
the same bytes on every x86-64 machine with AVX2), seeds, and the state of every random number generator as plain JSON.

Libraries choose their kernels by the CPU they find, and other kernels round otherwise. ``portable`` holds all of
them to what every such machine has, by settings that each library documents. They read them when they first compute, so
a process is held before it imports torch, and its children inherit it. Nothing is taken on trust: `check_numerics` asks
the libraries themselves, before anything is computed.

`seed_everything` comes first in a process that trains: one seed, one machine type and one number of threads then
give one result, bit for bit. `capture_rng` and `restore_rng` carry the generators of random, numpy, torch and its CUDA
devices over to another process.
"""

from __future__ import annotations

import base64
import gc
import importlib.util
import os
import random
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from rollout_core.base.errors import ConfigError

_BUILT_FOR = re.compile(r"^(cuda|hip)\b[^=\n]*= *(\S+)", re.MULTILINE)


@cache
def probe_device() -> str:
    """``cuda`` or ``cpu``."""
    if not _may_have_gpus():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def release_gpu_memory() -> None:
    """Give back what torch keeps of the GPU's memory in this process for tensors to come: an engine may need it."""
    if "torch" in sys.modules and probe_device() == "cuda":
        import torch

        gc.collect()
        torch.cuda.empty_cache()


def _may_have_gpus() -> bool:
    """False where torch is a build for CPUs alone, as the file says that it takes this from itself.

    Cache keys name the device, so every run asks, also one that computes nothing and needs no torch, whose import takes
    seconds.
    """
    found = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return True
    file = Path(found.origin).with_name("version.py")
    try:
        said = dict(_BUILT_FOR.findall(file.read_text(encoding="utf-8")))
    except OSError:
        return True
    return said.get("cuda") != "None" or said.get("hip") != "None"


def num_gpus() -> int:
    """GPUs that processes of this machine can share out among themselves."""
    if not _may_have_gpus():
        return 0
    import torch

    return torch.cuda.device_count()


def mixed_precision(asked: str) -> str:
    """``float32`` or ``bfloat16``: what a precision of ``auto`` means here, else ``asked`` itself."""
    if asked != "auto":
        return asked
    if probe_device() != "cuda":
        return "float32"
    import torch

    return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"


Numerics = Literal["native", "portable"]

NUMERICS = "ROLLOUT_NUMERICS"
"""Environment variable: ``portable`` holds a process, and all it starts, whatever its configuration says."""
PORTABLE: Final = "portable"
PORTABLE_ENVIRONMENT = {
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

_CPU = Path("/proc/cpuinfo")
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
        os.environ.update({**PORTABLE_ENVIRONMENT, NUMERICS: PORTABLE})


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
    if "torch" in sys.modules or not _is_held():
        check_numerics()


def _is_held() -> bool:
    """Whether torch, once it is imported, will find what holds it, on a CPU that has what portable arithmetic needs.

    Whoever computes asks the libraries themselves (`check_numerics`); a run whose results are all there never does.
    """
    try:
        flags = re.search(r"^flags\s*:(.*)$", _CPU.read_text(), re.MULTILINE)
    except OSError:
        return False
    has_avx2 = flags is not None and "avx2" in flags[1].split()
    return has_avx2 and all(os.environ.get(name) == value for name, value in PORTABLE_ENVIRONMENT.items())


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


ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "0"}
"""Set where absent: without the first, cuBLAS may add in another order; without the second, Python orders sets of
strings by chance."""

RNG_STATE_VERSION = 1


@dataclass(frozen=True)
class Preparation:
    """What `prepare_environment` did."""

    set_now: tuple[str, ...]
    """Variables that were absent."""
    too_late: tuple[str, ...]
    """Of those, the ones this process has already read; only its child processes profit."""


def prepare_environment() -> Preparation:
    """Set the variables that determinism needs, where the user has not. Call it before torch is imported.

    Warns when torch was imported without CUBLAS_WORKSPACE_CONFIG: CUDA work may then differ from run to run. Python
    reads PYTHONHASHSEED only when it starts, so setting it here always counts as too late; nothing in this package
    depends on the order of a set. Where ROLLOUT_NUMERICS says so, the process is held to portable arithmetic.
    """
    hold_numerics()
    set_now = tuple(name for name in ENVIRONMENT if name not in os.environ)
    os.environ.update({name: ENVIRONMENT[name] for name in set_now})
    read_already = {"PYTHONHASHSEED"} | ({"CUBLAS_WORKSPACE_CONFIG"} if "torch" in sys.modules else set())
    too_late = tuple(name for name in set_now if name in read_already)
    if "CUBLAS_WORKSPACE_CONFIG" in too_late:
        warnings.warn(
            "torch was imported before CUBLAS_WORKSPACE_CONFIG was set; on a GPU, results may not repeat bit for bit. "
            "Call rollout_core.base.determinism.prepare_environment() first, or set the variable in the environment",
            RuntimeWarning,
            stacklevel=2,
        )
    return Preparation(set_now, too_late)


def seed_everything(seed: int, *, deterministic: bool = True, num_threads: int | None = None) -> None:
    """Seed random, numpy and torch (CUDA too), and make torch repeat itself bit for bit.

    ``deterministic`` chooses deterministic kernels, no cuDNN autotuning and full float32 products; False leaves the
    choice to torch. ``num_threads`` fixes the CPU threads, on whose number the last bits of sums depend; without it
    they are as many as the machine has, or in portable arithmetic 1.
    Raises ConfigError for a seed outside [0, 2**32), and where a library does not keep to portable arithmetic.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed is {seed}; expected a number from 0 to 2**32 - 1")
    prepare_environment()
    import numpy
    import torch

    check_numerics()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = False
    if deterministic:
        torch.set_float32_matmul_precision("highest")
    threads = num_threads or default_threads()
    if threads is not None:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class RngState:
    """State of every global generator. Equal states continue with equal numbers."""

    python: tuple[int, bytes, float | None]
    """Version, 625 words, and the half of a Gaussian pair that is still to be given out."""
    numpy: tuple[bytes, int, int, float]
    """Of the Mersenne Twister: 624 words, position, whether a Gaussian is left, that Gaussian."""
    torch: bytes
    cuda: tuple[bytes, ...] = ()
    """One state a visible device; none if the process has not used CUDA."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object; words and bytes in base64, words little-endian."""
        version, words, gaussian = self.python
        keys, position, has_gaussian, left_gaussian = self.numpy
        return {
            "version": RNG_STATE_VERSION,
            "python": [version, _text(words), gaussian],
            "numpy": [_text(keys), position, has_gaussian, left_gaussian],
            "torch": _text(self.torch),
            "cuda": [_text(state) for state in self.cuda],
        }

    @classmethod
    def from_json(cls, document: Any) -> RngState:
        """Inverse of `to_json`. Raises ConfigError for anything else."""
        try:
            if document["version"] != RNG_STATE_VERSION:
                raise ConfigError(
                    f"RNG state has version {document['version']}; this software reads {RNG_STATE_VERSION}"
                )
            version, words, gaussian = document["python"]
            keys, position, has_gaussian, left_gaussian = document["numpy"]
            return cls(
                python=(int(version), _bytes(words), None if gaussian is None else float(gaussian)),
                numpy=(_bytes(keys), int(position), int(has_gaussian), float(left_gaussian)),
                torch=_bytes(document["torch"]),
                cuda=tuple(_bytes(state) for state in document["cuda"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"not an RNG state: {type(error).__name__}: {error}") from error


def capture_rng(*, host_seed: int | None = None) -> RngState:
    """The state of all generators now.

    The generators of random and numpy are the whole process's: other threads (an orchestrator's client that jitters its
    retries) draw from them too. With ``host_seed`` these two start anew from it, so that the state, and what follows
    from it, is the same in every run; call `restore_rng` with the result to continue from there.
    """
    import numpy
    import torch

    host = random if host_seed is None else random.Random(host_seed)
    host_arrays = numpy.random if host_seed is None else numpy.random.RandomState(host_seed % 2**32)
    version, words, gaussian = host.getstate()
    _, keys, position, has_gaussian, left_gaussian = host_arrays.get_state()
    return RngState(
        python=(version, numpy.asarray(words, dtype="<u4").tobytes(), gaussian),
        numpy=(numpy.asarray(keys, dtype="<u4").tobytes(), int(position), int(has_gaussian), float(left_gaussian)),
        torch=torch.get_rng_state().numpy().tobytes(),
        cuda=tuple(state.numpy().tobytes() for state in torch.cuda.get_rng_state_all())
        if torch.cuda.is_initialized()
        else (),
    )


def restore_rng(state: RngState) -> None:
    """Continue all generators from ``state``. States of CUDA devices that this process does not have are left out.

    Raises ConfigError for a state that the libraries refuse.
    """
    import numpy
    import torch

    try:
        version, words, gaussian = state.python
        random.setstate((version, tuple(numpy.frombuffer(words, dtype="<u4").tolist()), gaussian))
        keys, position, has_gaussian, left_gaussian = state.numpy
        twister = numpy.frombuffer(keys, dtype="<u4").astype(numpy.uint32)
        numpy.random.set_state(("MT19937", twister, position, has_gaussian, left_gaussian))
        torch.set_rng_state(_byte_tensor(state.torch))
        for device, cuda_state in zip(range(torch.cuda.device_count()), state.cuda, strict=False):
            torch.cuda.set_rng_state(_byte_tensor(cuda_state), device)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise ConfigError(f"RNG state does not fit this Python, numpy or torch: {error}") from error


def _byte_tensor(data: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
