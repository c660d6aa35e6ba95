"""What snapshots that follow each other would take if they were stored as differences, and how fast that goes.

    python benchmarks/deltas.py [STORAGE] [--level 1]

STORAGE is an object store with training states (default: ROLLOUT_STORAGE); each is compared with the one before it of
its algorithm. Of every tensor: whole tensors that did not change (stored once by content); zstd of the bytes; zstd of
the bytes' planes (all first bytes, then all second ones: the exponents of neighbours are alike); and zstd of the planes
of the exclusive or with the tensor of the same name before. Also of the tensors as bfloat16. Ratios are bytes stored to
bytes; speeds are of one thread, in memory.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow
import torch
from safetensors.torch import load_file

from rollout_core.objects import SnapshotStore
from tasks.runtime.prefect_server import object_store

FILES = {"model/model.safetensors": "weights", "optimizer.safetensors": "Adam"}


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().reshape(-1, tensor.element_size())


def planes(raw: np.ndarray) -> bytes:
    return np.ascontiguousarray(raw.T).tobytes()


def measure(now: torch.Tensor, before: torch.Tensor, codec: pyarrow.Codec) -> dict[str, tuple[int, float, float]]:
    """Bytes stored, seconds to write and seconds to read, by method."""
    raw, old = bytes_of(now), bytes_of(before)
    shape = raw.shape
    ways: dict[str, tuple[Callable[[], bytes], Callable[[np.ndarray], np.ndarray]]] = {
        "zstd": (lambda: raw.tobytes(), lambda got: got),
        "planes + zstd": (lambda: planes(raw), lambda got: got.reshape(shape[::-1]).T),
        "xor + planes + zstd": (lambda: planes(raw ^ old), lambda got: got.reshape(shape[::-1]).T ^ old),
    }
    found: dict[str, tuple[int, float, float]] = {"by content": (0 if np.array_equal(raw, old) else raw.size, 0.0, 0.0)}
    for name, (encode, decode) in ways.items():
        started = time.perf_counter()
        packed = codec.compress(encode(), asbytes=True)
        written = time.perf_counter()
        unpacked = np.frombuffer(codec.decompress(packed, raw.size, asbytes=True), np.uint8)
        whole = np.ascontiguousarray(decode(unpacked)).tobytes()
        read = time.perf_counter()
        assert whole == raw.tobytes(), "lossless"
        found[name] = (len(packed), written - started, read - written)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("storage", nargs="?")
    parser.add_argument("--level", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=8, help="so many of the newest")
    asked = parser.parse_args()
    codec = pyarrow.Codec("zstd", compression_level=asked.level)
    totals: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    with object_store(asked.storage) as objects, TemporaryDirectory() as scratch:
        snapshots = SnapshotStore(objects)
        states = [state for state in snapshots.list(kind="train_state") if snapshots.is_present(state.id)]
        pairs = [(now, before) for now, before in pairwise(states) if now.algorithm == before.algorithm]
        for number, (now, before) in enumerate(pairs[: asked.pairs]):
            folders = [Path(scratch) / f"{number}-{place}" for place in ("now", "before")]
            for state, folder in zip((now, before), folders, strict=True):
                snapshots.restore(state.id, folder)
            for file, what in FILES.items():
                loaded = [load_file(folder / file) if (folder / file).exists() else {} for folder in folders]
                for name in loaded[0].keys() & loaded[1].keys():
                    for dtype in {loaded[0][name].dtype, torch.bfloat16}:
                        tensors = [tensors[name].to(dtype) for tensors in loaded]
                        if tensors[0].shape != tensors[1].shape or not tensors[0].numel():
                            continue
                        for way, figures in measure(tensors[0], tensors[1], codec).items():
                            row = totals[what, str(dtype).removeprefix("torch."), way]
                            size = tensors[0].numel() * tensors[0].element_size()
                            for place, figure in enumerate((size, *figures)):
                                row[place] += figure
    print("| of | as | method | stored / size | write, MB/s | read, MB/s |\n|---|---|---|---:|---:|---:|")
    for (what, dtype, way), (size, stored, writing, reading) in sorted(totals.items()):
        speeds = [f"{size / seconds / 1e6:.0f}" if seconds else "" for seconds in (writing, reading)]
        print(f"| {what} | {dtype} | {way} | {stored / size:.3f} | {' | '.join(speeds)} |")


if __name__ == "__main__":
    main()
