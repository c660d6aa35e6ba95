"""What a process may use of its machine: by its affinity, its control groups, its GPUs and its disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from rollout_core.base import machine
from rollout_core.base.machine import (
    GPU,
    Spot,
    bound_cores,
    look_at_machine,
    machine_memory,
    usable_cores,
    usable_gpus,
    written_folders,
)

GIB = 2**30


def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, files: dict[str, str]) -> None:
    """Control groups of this process, as the kernel shows them: ``own`` as /proc/self/cgroup, ``files`` by their path
    below /sys/fs/cgroup."""
    (tmp_path / "own").write_text(own)
    for path, text in files.items():
        (tmp_path / "groups" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / path).write_text(text)
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "groups")


def test_cores_are_those_of_the_affinity():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " + (
        "from rollout_core.base.machine import bound_cores, usable_cores; print(bound_cores(), usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 4),
        ("0::/pods/one\n", {"pods/cpu.max": "200000 100000\n", "pods/one/cpu.max": "max 100000\n"}, 2),
        ("0::/of/the/host\n", {"cpu.max": "300000 100000\n"}, 3),
        ("4:memory:/\n1:cpu,acct:/a\n", {"cpu,acct/a/cpu.cfs_quota_us": "2", "cpu,acct/a/cpu.cfs_period_us": "1"}, 2),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ("", {}, 4),
    ],
)  # fmt: skip
def test_a_quota_of_a_control_group_or_of_one_around_it_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, files: dict[str, str], cores: int
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    groups(monkeypatch, tmp_path, own, files)
    assert usable_cores() == cores
    assert bound_cores() == 4, "a quota changes no number of threads"


def test_memory_is_the_least_limit_less_what_is_used_and_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    files = {"memory.max": "max", "pod/memory.max": str(2 * GIB), "pod/memory.current": str(GIB)}
    files |= {"pod/memory.stat": f"anon 1\ninactive_file {GIB // 4}\n", "pod/box/memory.max": str(GIB)}
    files |= {"pod/box/memory.current": str(GIB // 2), "pod/box/memory.stat": f"inactive_file {GIB // 4}\n"}
    groups(monkeypatch, tmp_path, "0::/pod/box\n", files)
    assert machine_memory() == (3 * GIB // 4, GIB)


def test_memory_of_control_groups_of_version_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    files = {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/a/memory.limit_in_bytes": str(GIB)}
    files |= {"memory/a/memory.usage_in_bytes": str(GIB), "memory/a/memory.stat": f"total_inactive_file {GIB // 2}"}
    groups(monkeypatch, tmp_path, "9:name=systemd:/x\n4:memory:/a\n0::/\n", files)
    assert machine_memory() == (GIB // 2, GIB)


def test_without_limits_memory_is_the_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    groups(monkeypatch, tmp_path, "0::/\n", {"memory.max": "max\n"})
    available, total = machine_memory()
    assert total == psutil.virtual_memory().total and 0 < available <= total


@pytest.fixture
def nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A program of that name that prints what the tool of a machine with two GPUs printed."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\necho '0, GPU-11aa, NVIDIA H200, 143771, 143000'\necho '1, GPU-22bb, NVIDIA H200, 143771, [N/A]'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tool


FIRST = GPU("NVIDIA H200", 143771 * 2**20, 143000 * 2**20)
SECOND = GPU("NVIDIA H200", 143771 * 2**20, None)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, (FIRST, SECOND)),
        ("1,0", (SECOND, FIRST)),
        ("GPU-22bb", (SECOND,)),
        ("0,7,1", (FIRST,)),
        ("", ()),
        ("-1", ()),
        ("MIG-33cc", (GPU("MIG-33cc"),)),
    ],
)
def test_gpus_are_those_that_cuda_would_show(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, found: tuple[GPU, ...]
):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert usable_gpus() == found


def test_a_tool_that_fails_or_talks_nonsense_means_no_gpu(nvidia_smi: Path):
    nvidia_smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because'\nexit 9\n")
    assert usable_gpus() == ()
    nvidia_smi.write_text("#!/bin/sh\necho 'No devices were found'\n")
    assert usable_gpus() == ()


def test_an_inventory_is_json_and_needs_no_folder_and_no_torch(tmp_path: Path):
    code = (
        "import json, sys; from rollout_core.base.machine import look_at_machine, written_folders; "
        "found = look_at_machine(written_folders(sys.argv[1])); "
        "print(json.dumps([found.document(), 'torch' in sys.modules]))"
    )
    storage = f"file://{tmp_path / 'not' / 'yet'}"
    done = subprocess.run([sys.executable, "-c", code, storage], capture_output=True, text=True, check=True)
    found, has_torch = json.loads(done.stdout)
    assert not has_torch
    assert found["disks"]["objects"]["path"] == str(tmp_path / "not" / "yet")
    assert 0 < found["disks"]["objects"]["free_bytes"] <= found["disks"]["objects"]["size_bytes"]
    assert found["disks"].keys() == {"objects", "temporary"} and found["spot"] is None
    assert 1 <= found["cores"] <= found["machine_cores"]
    assert 0 < found["available_bytes"] <= found["memory_bytes"]
    assert not (tmp_path / "not").exists(), "nothing is made to find out"


def test_a_bucket_is_no_disk_and_what_the_cloud_says_is_passed_on():
    spot = Spot("gce", "n2-standard-8", "Google Cloud preempts this machine", 30.0)
    found = look_at_machine(written_folders("s3://bucket/prefix"), spot)
    assert found.disks.keys() == {"temporary"}
    assert found.document()["spot"] == asdict(spot)
