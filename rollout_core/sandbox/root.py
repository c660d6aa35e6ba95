"""The one file system that programs see: what an interpreter needs, read-only, and nothing else of this machine.

The launcher makes it once, in a mount namespace of its own, and changes into it. What it has then are the system's
programs and libraries, the interpreter, folders that the caller names, five devices, and an ``/etc`` of four files.
Each program gets a copy of these mounts with a place of its own to write to.
"""

from __future__ import annotations

import os
import stat

from rollout_core.sandbox import kernel
from rollout_core.sandbox.inside import FOLDER, PLACE, TEMPORARY, USER

SYSTEM = ("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/include", "/usr/share")
LOCAL = ("/usr/local/bin", "/usr/local/lib", "/etc/alternatives")
SHORT = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
"""Links into ``/usr`` on most systems, folders on others."""
DEVICES = ("null", "zero", "full", "random", "urandom")
PACKAGES = ("site-packages", "dist-packages")
"""Folders of libraries that people have installed; hidden unless the caller asks for them."""
COPIED = "/etc/ld.so.cache"
FILES = {
    "/etc/passwd": f"user:x:{USER}:{USER}::{FOLDER}:/bin/sh\n",
    "/etc/group": f"user:x:{USER}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
}
LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/shm": TEMPORARY,
}
_PLACES = ("/mnt", "/media", "/srv", "/opt", "/run", "/boot", "/sys", "/home", "/tmp")
"""Where the new file system may be made: seen by the launcher alone, and only until it changes into it."""


def sources(interpreter: str, readable: list[str]) -> list[str]:
    """Folders of this machine that programs see under their own names, none within another."""
    wanted = [*SYSTEM, *LOCAL, f"{interpreter}/bin", f"{interpreter}/lib", *readable]
    wanted += [path for path in SHORT if not os.path.islink(path)]
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in wanted if os.path.isdir(path) or os.path.isfile(path)}):
        if not any(path == other or path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept


def hidden(paths: list[str], readable: list[str]) -> list[str]:
    """Folders of installed libraries within those that are seen."""
    found = []
    for path in paths:
        for folder in (path, *_subfolders(path)):
            found += [f"{folder}/{name}" for name in PACKAGES if os.path.isdir(f"{folder}/{name}")]
    shown = [os.path.normpath(path) for path in readable]
    return [path for path in found if not any(path == item or item.startswith(f"{path}/") for item in shown)]


def _subfolders(path: str) -> list[str]:
    if os.path.basename(path) != "lib":
        return []
    return [f"{path}/{name}" for name in os.listdir(path) if name.startswith(("python", "pypy"))]


def enter(interpreter: str, readable: list[str], *, for_programs: bool = True) -> None:
    """Make the file system and change into it. The mount namespace is this process's own already.

    ``for_programs``: False where programs get another one, made by bubblewrap, which needs a folder ``/tmp`` for that.
    """
    kernel.mount("", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
    paths = sources(interpreter, readable)
    masks = hidden(paths, readable)
    new = next(
        place
        for place in _PLACES
        if os.path.isdir(place) and not any(path == place or path.startswith(f"{place}/") for path in paths)
    )
    cache = _content(COPIED)
    kernel.mount("tmpfs", new, flags=kernel.NO_SUID | kernel.NO_DEVICES, options="size=1m,mode=0755")
    for path in ("/dev", "/etc", "/proc", PLACE, "/empty", *([] if for_programs else ["/tmp"])):
        os.makedirs(new + path, exist_ok=True)
    for path in paths:
        _bind(path, new + path)
        kernel.set_mount_flags(new + path, kernel.READ_ONLY | kernel.NO_SUID | kernel.NO_DEVICES)
    for path in masks:
        _bind(f"{new}/empty", new + path)
        kernel.set_mount_flags(new + path, kernel.READ_ONLY)
    for name in DEVICES:
        _bind(f"/dev/{name}", f"{new}/dev/{name}")
    for path in SHORT:
        if os.path.islink(path):
            os.symlink(os.readlink(path), new + path)
    for path, target in links(paths).items():
        if for_programs or path != "/tmp":
            os.symlink(target, new + path)
    for path, text in {**FILES, COPIED: cache}.items():
        if text:
            _write(new + path, text.encode() if isinstance(text, str) else text)
    # The kernel lets a program's namespaces have their own only where another is in sight.
    _bind("/proc", f"{new}/proc")
    kernel.set_mount_flags(new, kernel.READ_ONLY, recursive=False)
    kernel.pivot_root(new)


def links(paths: list[str]) -> dict[str, str]:
    """Symbolic links of the root, and where they lead."""
    is_free = not any(path == "/tmp" or path.startswith("/tmp/") for path in paths)
    return LINKS | ({"/tmp": TEMPORARY} if is_free else {})


def own_folders() -> None:
    """Make those of the place to write to."""
    for path in (FOLDER, TEMPORARY):
        os.makedirs(path, exist_ok=True)


def own_place(disk_bytes: int, inodes: int) -> None:
    """Mount the one place to write to, of this size."""
    flags = kernel.NO_SUID | kernel.NO_DEVICES
    kernel.mount("tmpfs", PLACE, flags=flags, options=f"size={disk_bytes},nr_inodes={inodes},mode=0700")


def own_processes() -> bool:
    """Mount this PID namespace's table of processes; False where the kernel does not allow it, as in containers that
    hide parts of theirs. An empty folder stands there then."""
    flags = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC | kernel.READ_ONLY
    try:
        kernel.mount("proc", "/proc", source="proc", flags=flags, options="subset=pid")
    except kernel.Refused:
        kernel.mount("tmpfs", "/proc", flags=flags, options="size=4k,mode=0555")
        return False
    return True


def _bind(source: str, target: str) -> None:
    if stat.S_ISDIR(os.stat(source).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _write(target, b"")
    kernel.mount("", target, source=source, flags=kernel.BIND | kernel.RECURSIVE)


def _write(path: str, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.write(descriptor, content)
    os.close(descriptor)


def _content(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
