"""A program that is run within the walls to find out whether they stand: it does what a hostile one would.

It prints a line of JSON: for each wall, whether it met it, and what it met. Its arguments say what is outside: a
process and a folder, and the limits that it is under. It stands alone, since it sees nothing of this package.
"""

import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import struct
import sys
import time

SECCOMP, NO_NEW_PRIVILEGES, CAPABILITY_VERSION = 21, 39, 0x20080522
NEW_USER, AF_VSOCK = 0x10000000, 40
LIBC = ctypes.CDLL(None, use_errno=True)


def files(outside):
    """Whether it sees nothing of the machine's, and writes to nothing."""
    seen = [path for path in ("/etc/shadow", outside) if os.access(path, os.R_OK)]
    written = [path for path in ("/", "/usr/bin", "/etc", "/dev") if may_write(path)]
    if seen or written:
        return False, f"it sees {', '.join(seen) or 'nothing'} and may write to {', '.join(written) or 'nothing'}"
    return True, "a root of its own, read-only, with what interpreters need"


def may_write(folder):
    path = os.path.join(folder, "rollout-sandbox-probe")
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
    except OSError:
        return False
    os.unlink(path)
    return True


def processes(outside):
    """Whether it sees no process of the machine's."""
    if os.getpid() > 10:
        return False, f"its process has the id {os.getpid()} among those of the machine"
    with contextlib.suppress(ProcessLookupError):
        if outside > 10:
            os.kill(outside, 0)
            return False, f"it can name process {outside} outside"
    return True, "a PID namespace, which ends as one"


def network():
    """Whether no address answers."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
            opened.connect(("192.0.2.1", 9))
    except OSError as error:
        if error.errno in (errno.EAFNOSUPPORT, errno.ENETUNREACH, errno.EPERM, errno.EACCES):
            return True, f"none ({error.strerror})"
        return False, f"a socket fails with {error.strerror}"
    return False, "an address beyond this machine can be reached"


def calls():
    """Whether the kernel's dangerous calls are refused."""
    if LIBC.prctl(SECCOMP, 0, 0, 0, 0) != 2:
        return False, "no filter of system calls"
    if in_child(lambda: LIBC.unshare(NEW_USER) == 0):
        return False, "it may make namespaces"
    with contextlib.suppress(OSError):
        socket.socket(AF_VSOCK, socket.SOCK_STREAM).close()
        return False, "it may open sockets to the host of a virtual machine"
    return True, "seccomp"


def privileges():
    """Whether it has none, and can get none."""
    if LIBC.prctl(NO_NEW_PRIVILEGES, 0, 0, 0, 0) != 1:
        return False, "set-user-id programs would be others"
    held = bytearray(24)
    LIBC.capget(struct.pack("=Ii", CAPABILITY_VERSION, 0), (ctypes.c_char * 24).from_buffer(held))
    if any(held) or os.geteuid() == 0:
        return False, f"user {os.geteuid()}, capabilities {held.hex()}"
    return True, "no capabilities, no new privileges"


def has_memory(size):
    """Whether a child can fill so much: it is refused, or ended."""
    return in_child(lambda: len(b"x" * size) == size)


def in_child(does):
    """What a child says; False where it was ended."""
    process = os.fork()
    if not process:
        try:
            os._exit(0 if does() else 1)
        finally:
            os._exit(1)
    return os.waitpid(process, 0)[1] == 0


def limits(memory, most_processes, disk):
    """Whether memory, processes and disk end where they are to."""
    problems = []
    if has_memory(memory + 2**24):
        problems.append("memory")
    started = []
    try:
        for _ in range(most_processes + 1):
            process = os.fork()
            if not process:
                time.sleep(60)
                os._exit(0)
            started.append(process)
        problems.append("processes")
    except BlockingIOError:
        pass
    for process in started:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    try:
        for number in range(2):  # more than one file: one alone has a limit of its own
            with open(f"fill-{number}", "wb") as file:
                file.write(bytes(disk - 2**17))
        problems.append("disk")
    except OSError:
        pass
    if problems:
        return False, f"no limit of {', '.join(problems)}"
    return True, "memory, processes and disk"


def main():
    """Print what was met."""
    process, file, memory, most_processes, disk = sys.argv[1:]
    found = {
        "files": files(file),
        "processes": processes(int(process)),
        "network": network(),
        "system calls": calls(),
        "privileges": privileges(),
        "limits": limits(int(memory), int(most_processes), int(disk)),
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
