"""The seccomp program of the sandbox: which system calls a program of others may make.

A call that is newer than this list does not exist (ENOSYS), so what a later kernel brings is closed until somebody has
looked at it. Calls that give no ordinary program anything, and attackers much of the kernel, are refused (EPERM).
Sockets are those of the own machine's file system (AF_UNIX): a network namespace holds no network, but not every
family knows namespaces, and a virtual machine's AF_VSOCK leads to its host.
"""

from __future__ import annotations

import errno
import struct

from rollout_core.sandbox.kernel import MACHINE, NAMESPACES

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_AF_UNIX = 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
"""Type into the terminal of another."""
_LAST_KNOWN = 456
"""The number of the newest call that was looked at, on all machines."""

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CHECKED = {
    "x86_64": {"clone": 56, "clone3": 435, "socket": 41, "socketpair": 53, "ioctl": 16},
    "aarch64": {"clone": 220, "clone3": 435, "socket": 198, "socketpair": 199, "ioctl": 29},
}
_REFUSED = {
    # name: number on x86-64, on arm64
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
    "nfsservctl": (180, 42),
    "personality": (135, 92),
    "syslog": (103, 116),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # Memory that no limit of a process counts:
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}


def call_filter(machine: str = MACHINE) -> bytes:
    """The instructions."""
    column = list(_AUDIT).index(machine)
    checked = _CHECKED[machine]
    refused = sorted(numbers[column] for numbers in _REFUSED.values() if numbers[column] is not None)
    code = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, _AUDIT[machine], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        *_unless(_AT_LEAST, _LAST_KNOWN + 1, errno.ENOSYS),  # also calls of x32, whose numbers are far higher
        *_unless(_EQUAL, checked["clone3"], errno.ENOSYS),  # its flags lie in memory; C libraries go on with clone
    ]
    for number in refused:
        code += _unless(_EQUAL, number, errno.EPERM)
    code += _of_call(checked["clone"], _unless(_ANY_BIT, NAMESPACES, errno.EPERM))
    for name in ("socket", "socketpair"):
        only_unix = [_step(_EQUAL, _AF_UNIX, 1, 0), _error(errno.EAFNOSUPPORT)]
        code += _of_call(checked[name], only_unix)
    terminal = [*_unless(_EQUAL, _TIOCSTI, errno.EPERM), *_unless(_EQUAL, _TIOCLINUX, errno.EPERM)]
    code += _of_call(checked["ioctl"], terminal, argument=1)
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)


def _error(number: int) -> bytes:
    return _step(_RETURN, _ERROR | number)


def _unless(test: int, value: int, number: int) -> list[bytes]:
    """Return an error where the loaded word passes the test."""
    return [_step(test, value, 0, 1), _error(number)]


def _of_call(number: int, body: list[bytes], argument: int = 0) -> list[bytes]:
    """Do ``body`` on the low word of an argument of this call alone, and allow what it lets through."""
    inner = [_step(_LOAD, _ARGUMENTS + 8 * argument), *body, _step(_RETURN, _ALLOW)]
    return [_step(_EQUAL, number, 0, len(inner)), *inner]
