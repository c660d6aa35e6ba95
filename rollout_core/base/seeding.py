"""The determinism preamble, and the state of every random number generator as plain JSON.

`seed_everything` comes first in a process that trains: one seed, one machine type and one number of threads then give
one result, bit for bit. `capture_rng` and `restore_rng` carry the generators of random, numpy, torch and its CUDA
devices over to another process.
"""

from __future__ import annotations

import base64
import os
import random
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.base.numerics import check_numerics, default_threads, hold_numerics

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
            "Call rollout_core.base.seeding.prepare_environment() first, or set the variable in the environment",
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
