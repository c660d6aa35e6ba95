"""Calls of Linux that Python 3.11 has no function for: namespaces, mounts, capabilities, landlock.

Everything here is of the standard library alone: the launcher, which has imported nothing else, runs it. Each call
raises OSError, whose message names the step, so that a report can say which wall the kernel refuses.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

# These calls keep the interpreter's lock, since `clone` returns in the child, too.
_LIBC = ctypes.PyDLL(None, use_errno=True) if sys.platform == "linux" else None
_LIBC_SYSCALL = getattr(_LIBC, "syscall", None)

NEW_MOUNTS = 0x00020000
NEW_CGROUPS = 0x02000000
NEW_UTS = 0x04000000
NEW_IPC = 0x08000000
NEW_USER = 0x10000000
NEW_PIDS = 0x20000000
NEW_NET = 0x40000000
NAMESPACES = NEW_MOUNTS | NEW_CGROUPS | NEW_UTS | NEW_IPC | NEW_USER | NEW_PIDS | NEW_NET
"""What every program gets anew."""
_CHILD_SIGNAL = 17

READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
"""Of a mount, with the same values in `mount` and in `set_mount_flags`."""
REMOUNT, BIND, RECURSIVE, PRIVATE = 32, 4096, 16384, 1 << 18
_DETACH = 2
_AT_RECURSIVE = 0x8000
_AT_CWD = -100

_PDEATHSIG, _DUMPABLE, _SECCOMP, _CAPBSET_DROP, _NO_NEW_PRIVS = 1, 4, 22, 24, 38
_SECCOMP_FILTER = 2
_CAPABILITY_VERSION = 0x20080522

_NUMBERS = {
    "x86_64": {"clone": 56, "capset": 126, "pivot_root": 155},
    "aarch64": {"clone": 220, "capset": 91, "pivot_root": 41},
}
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
"""The same number on both."""
MACHINE = os.uname().machine


class Refused(OSError):
    """The kernel refuses a step. ``step`` says which, in a form that follows "the kernel refuses"."""

    def __init__(self, step: str, number: int) -> None:
        super().__init__(number, f"{step}: {os.strerror(number)}")
        self.step = step

    def __str__(self) -> str:
        return str(self.strerror)


def is_supported() -> bool:
    """Whether this is a machine whose calls are known here."""
    return sys.platform == "linux" and MACHINE in _NUMBERS and sys.byteorder == "little"


def _checked(step: str, result: int) -> int:
    if result < 0:
        raise Refused(step, ctypes.get_errno())
    return result


def _call(name: str, *arguments: object) -> int:
    assert _LIBC is not None
    return getattr(_LIBC, name)(*arguments)


def _syscall(step: str, number: int, *arguments: int | bytes | None) -> int:
    assert _LIBC_SYSCALL is not None
    # As whole words: the kernel reads all 64 bits of each.
    words = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    return _checked(step, _LIBC_SYSCALL(ctypes.c_long(number), *words))


def clone(flags: int) -> int:
    """Fork into new namespaces; 0 in the child. As `os.fork` for the interpreter, which must have one thread."""
    hooks = ctypes.pythonapi
    hooks.PyOS_BeforeFork()
    pid = -1
    try:
        pid = _syscall(f"new namespaces ({flags:#x})", _NUMBERS[MACHINE]["clone"], flags | _CHILD_SIGNAL, 0, 0, 0, 0)
    finally:
        if pid == 0:
            hooks.PyOS_AfterFork_Child()
        else:
            hooks.PyOS_AfterFork_Parent()
    return pid


def unshare(flags: int, step: str) -> None:
    """Put this process into new namespaces."""
    _checked(step, _call("unshare", flags))


def map_ids(inside: tuple[int, int], outside: tuple[int, int]) -> None:
    """Have the one user and group of this new user namespace be these outside."""
    (user, group), (uid, gid) = inside, outside
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {uid} 1"), ("gid_map", f"{group} {gid} 1")):
        try:
            descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            raise Refused(f"writing {name} of the user namespace", error.errno or 0) from None


def mount(kind: str, target: str, *, source: str = "none", flags: int = 0, options: str = "") -> None:
    """`mount(2)`."""
    done = _call(
        "mount",
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        options.encode() if options else None,
    )
    _checked(f"mounting {kind or source} at {target}", done)


def set_mount_flags(target: str, flags: int, *, recursive: bool = True) -> None:
    """Set flags of the mount at ``target``, and of those below it."""
    attributes = struct.pack("=QQQQ", flags, 0, 0, 0)
    step = f"making {target} read-only" if flags & READ_ONLY else f"setting flags of {target}"
    at = _AT_RECURSIVE if recursive else 0
    _syscall(step, _MOUNT_SETATTR, _AT_CWD, target.encode(), at, attributes, len(attributes))


def pivot_root(new_root: str) -> None:
    """Make a mount the root of this process's mount namespace, and detach the old root."""
    os.chdir(new_root)
    _syscall("changing the root", _NUMBERS[MACHINE]["pivot_root"], b".", b".")
    _checked("detaching the old root", _call("umount2", b".", _DETACH))
    os.chdir("/")


def set_host_name(name: str) -> None:
    """Of this process's UTS namespace."""
    _checked("naming the host", _call("sethostname", name.encode(), ctypes.c_size_t(len(name))))


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that made it ends."""
    _checked("ending with the parent", _call("prctl", _PDEATHSIG, 9, 0, 0, 0))


def set_dumpable(is_dumpable: bool) -> None:
    """Whether processes of the same user may look into this one: its memory, descriptors and environment."""
    _checked("hiding from other processes", _call("prctl", _DUMPABLE, int(is_dumpable), 0, 0, 0))


def drop_capabilities() -> None:
    """Give up every capability, for good and for all that is executed later."""
    for capability in range(64):
        if _call("prctl", _CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # the kernel knows no further one
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _syscall("giving up capabilities", _NUMBERS[MACHINE]["capset"], header, bytes(24))


def forbid_new_privileges() -> None:
    """Have set-user-id programs be ordinary ones."""
    _checked("forbidding new privileges", _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0))


def filter_calls(program: bytes) -> None:
    """Have the kernel ask this seccomp program (BPF instructions) before each system call, for good."""
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    _checked("filtering system calls", _call("prctl", _SECCOMP, _SECCOMP_FILTER, head, 0, 0))


# Landlock

_READ = 1 << 0 | 1 << 2 | 1 << 3
"""Execute, read files, list folders."""
_WRITE = 1 << 1
_DEVICES = 1 << 6 | 1 << 11
"""Making character and block devices."""
_TRUNCATE = 1 << 14
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""About files, by the version that brought them."""
_TCP_BIND_CONNECT, _TCP_VERSION = 3, 4
_SOCKETS_AND_SIGNALS, _SCOPE_VERSION = 3, 6


def landlock_version() -> int:
    """Of the kernel; raises where it has none."""
    return _syscall("landlock", _LANDLOCK_CREATE, None, 0, 1)


def landlock(writable: str, devices: str) -> None:
    """Let this process, and all it starts, write below ``writable``, use what is in ``devices``, and only read
    elsewhere; bind and connect no TCP socket; signal nobody else."""
    version = landlock_version()
    rights = _RIGHTS[max(known for known in _RIGHTS if known <= version)]
    rules = struct.pack(
        "=QQQ",
        rights,
        _TCP_BIND_CONNECT if version >= _TCP_VERSION else 0,
        _SOCKETS_AND_SIGNALS if version >= _SCOPE_VERSION else 0,
    )
    size = 24 if version >= _SCOPE_VERSION else 16 if version >= _TCP_VERSION else 8
    ruleset = _syscall("landlock's rules", _LANDLOCK_CREATE, rules[:size], size, 0)
    allowed = {"/": _READ, writable: rights & ~_DEVICES, devices: rights & (_READ | _WRITE | _TRUNCATE)}
    for path, access in allowed.items():
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _syscall(f"landlock's rule for {path}", _LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", access, folder), 0)
        os.close(folder)
    _syscall("landlock", _LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)
