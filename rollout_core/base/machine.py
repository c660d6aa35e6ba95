"""What this machine has for this process: cores, memory, GPUs, disks, and whether its cloud takes it back.

Processor and memory are what the process may use, not what is built in: its affinity and the limits of its control
groups count, those of the groups around its own too. Nothing is imported or begun to find out, torch least of all: a
process that asks keeps its start time, and makes no CUDA context.
"""

from __future__ import annotations

import csv
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NVIDIA_SMI_SECONDS = 10.0
"""The longest wait for NVIDIA's tool."""
_ASK_GPUS = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class GPU:
    """A GPU that this process may use."""

    name: str
    """As its driver calls it."""
    memory_bytes: int | None = None
    """In all; None where the driver does not say, as of a part of a GPU (MIG). So also below."""
    free_bytes: int | None = None
    """Of its memory, not held by any process."""


@dataclass(frozen=True)
class Disk:
    """A file system that this process writes to."""

    path: str
    """The folder that was asked about; it need not be there yet."""
    size_bytes: int
    """Of the whole file system."""
    free_bytes: int
    """What a user may still write there."""


@dataclass(frozen=True)
class Spot:
    """What the cloud says of its machine."""

    cloud: str
    """``aws``, ``gce`` or ``azure``."""
    machine_type: str | None = None
    """What the cloud calls a machine of this size; None where it does not say."""
    notice: str | None = None
    """That the machine is taken back, for people; None: there is no notice."""
    seconds_left: float | None = None
    """Seconds until it is gone; None without a notice."""


@dataclass(frozen=True)
class Machine:
    """What `look_at_machine` found."""

    host: str
    """Name of the machine."""
    cores: int
    """Cores' worth of time that this process may use: `usable_cores`."""
    machine_cores: int
    """Logical processors of the machine."""
    memory_bytes: int
    """That this process may use: the machine's, or the least limit of its control groups."""
    available_bytes: int
    """Of these, what can be had now without swapping."""
    gpus: tuple[GPU, ...] = ()
    """Those that this process may use."""
    disks: Mapping[str, Disk] = field(default_factory=dict)
    """By what they are for: ``objects``, ``temporary``."""
    spot: Spot | None = None
    """None where no cloud was asked, or none answered."""

    def document(self) -> dict[str, Any]:
        """As JSON has it, with the names of the fields."""
        return asdict(self)


def written_folders(storage: str) -> dict[str, Path]:
    """Folders that a run writes to, for `look_at_machine`; ``storage`` is the object store's address, which counts
    where it is a folder."""
    objects = {"objects": Path(storage.removeprefix("file://"))} if storage.startswith("file://") else {}
    return {**objects, "temporary": Path(tempfile.gettempdir())}


def look_at_machine(folders: Mapping[str, Path], spot: Spot | None = None) -> Machine:
    """The inventory. ``folders`` by what they are for, such as `written_folders`; ``spot``: what the cloud says, as
    `spot.look_at_spot` asks it.

    It raises nothing: what cannot be found out is left out.
    """
    available, memory = machine_memory()
    return Machine(
        host=socket.gethostname(),
        cores=usable_cores(),
        machine_cores=os.cpu_count() or 1,
        memory_bytes=memory,
        available_bytes=available,
        gpus=usable_gpus(),
        disks=dict(_disks(folders)),
        spot=spot,
    )


def _disks(folders: Mapping[str, Path]) -> Iterator[tuple[str, Disk]]:
    for name, folder in folders.items():
        try:
            usage = shutil.disk_usage(nearest_folder(folder))
        except OSError:
            continue
        yield name, Disk(str(folder.absolute()), usage.total, usage.free)


# Processor and memory


def bound_cores() -> int:
    """Logical processors that this process may run on, whatever time it gets there."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """Cores' worth of time that this process may use, at least one: what it may run on, or the least quota of its
    control groups, rounded up."""
    quotas = [-(-quota // period) for quota, period in _quotas() if quota > 0 and period > 0]
    return max(1, min([bound_cores(), *quotas]))


def _quotas() -> Iterator[tuple[int, int]]:
    """Microseconds of processor time, and of the clock within which they may be used."""
    for group in _groups("cpu"):
        found = _numbers(group / "cpu.max")  # "max" where there is no quota
        if len(found) == 2:
            yield found[0], found[1]
        quota, period = _numbers(group / "cpu.cfs_quota_us"), _numbers(group / "cpu.cfs_period_us")
        if quota and period:
            yield quota[0], period[0]


def machine_memory() -> tuple[int, int]:
    """Bytes of memory that this process may use: available now, and in total."""
    import psutil  # not needed by commands that only read a configuration, and slow to load

    machine = psutil.virtual_memory()
    available, total = machine.available, machine.total
    for group in _groups("memory"):
        for limit, usage, cache in _MEMORY_FILES:
            limited = _numbers(group / limit)
            if not limited or limited[0] >= total:
                continue
            total = limited[0]
            # What is cached of files is given back when it is needed.
            used = sum(_numbers(group / usage)) - _value(group / "memory.stat", cache)
            available = min(available, total - min(total, max(0, used)))
    return min(available, total), total


_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, usage and what of it is cache, in control groups of version 2 and 1."""


def _groups(controller: str) -> Iterator[Path]:
    """Folders of this process's control groups, of either version, from its own to the outermost that is seen here."""
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controllers if controllers else _CGROUPS
        place = root / own.strip("/")
        # Within a container the path may be the host's, and the container's own group the root.
        for folder in (place, *place.parents):
            if folder.is_dir():
                yield folder
            if folder == root:
                break


def _numbers(file: Path) -> list[int]:
    """The numbers in a file; none where it is not there, or has a word."""
    try:
        return [int(word) for word in file.read_text(encoding="ascii").split()]
    except (OSError, ValueError):
        return []


def _value(file: Path, name: str) -> int:
    """That of a line ``name value``; 0 where there is none."""
    try:
        found = dict(line.split(" ", 1) for line in file.read_text(encoding="ascii").splitlines())
        return int(found.get(name, 0))
    except (OSError, ValueError):
        return 0


# Disks


def nearest_folder(folder: Path) -> Path:
    """``folder``, or what it is to be made in."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.isdir(place))


def free_disk(folder: Path) -> int:
    """Free bytes where ``folder`` is, or is to be made."""
    return shutil.disk_usage(nearest_folder(folder)).free


# GPUs


def usable_gpus() -> tuple[GPU, ...]:
    """GPUs that this process may use: by torch where it computes on them already, else by NVIDIA's own tool, of which
    those that CUDA_VISIBLE_DEVICES lists. None without either."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        places = range(torch.cuda.device_count())
        memory = [torch.cuda.mem_get_info(place) for place in places]
        return tuple(
            GPU(torch.cuda.get_device_name(place), total, free)
            for place, (free, total) in zip(places, memory, strict=True)
        )
    try:
        done = subprocess.run(_ASK_GPUS, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if len(row) == 5]
    return tuple(_visible(rows, os.environ.get("CUDA_VISIBLE_DEVICES")))


def _visible(rows: list[list[str]], wanted: str | None) -> Iterator[GPU]:
    """Those of the tool's rows that ``wanted`` lists, by number or the beginning of an id, up to the first that is
    none, as CUDA reads it; all where it is None."""
    if wanted is None:
        yield from (_gpu(row) for row in rows)
        return
    for name in filter(None, (word.strip() for word in wanted.split(","))):
        if name.startswith("MIG-"):
            yield GPU(name)
            continue
        found = [row for row in rows if row[0] == name or (name.startswith("GPU-") and row[1].startswith(name))]
        if len(found) != 1:
            return
        yield _gpu(found[0])


def _gpu(row: list[str]) -> GPU:
    _, _, name, *memory = row
    total, free = (int(text) * 2**20 if text.isdigit() else None for text in memory)
    return GPU(name, total, free)
