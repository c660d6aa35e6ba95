"""How a program is put behind walls: by namespaces made here, by bubblewrap, or not at all.

A mode forks a program's first process, which sets up the rest, starts the program and watches it (`inside`). Only the
program's own process returns from it.
"""

from __future__ import annotations

import errno
import marshal
import os
from collections.abc import Callable

from rollout_core.base import process_tree
from rollout_core.sandbox import inside, kernel, root

TYPE_CHECKING = False  # importing typing would cost each of bubblewrap's programs some milliseconds
if TYPE_CHECKING:
    from typing import Any

WALLS = ("capabilities", "landlock", "system calls")
"""Those that a program puts on itself, in the last moment."""


class Namespaces:
    """Each program in new namespaces of the kernel, made here."""

    def __init__(self, config: dict[str, Any]) -> None:
        is_powerful = _has_mounts()
        if not is_powerful:
            if os.geteuid() == 0 and _is_open_to_all(f"{config['interpreter']}/lib"):
                own_user(config["uid"])  # the kernel counts no processes of its own root
            ids = (os.geteuid(), os.getegid())
            kernel.unshare(kernel.NEW_USER | kernel.NEW_MOUNTS, "a user namespace for an ordinary user")
            kernel.map_ids(ids, ids)
        root.enter(config["interpreter"], config["readable"])
        if is_powerful:
            own_user(config["uid"])
        self._outside = (os.geteuid(), os.getegid())
        self.walls = own_walls()

    def fork(self) -> int:
        """The first process of a program; 0 in it."""
        return kernel.clone(kernel.NAMESPACES)

    def begin(self, header: dict[str, Any], descriptors: inside.Descriptors) -> inside.Program:
        """Of the first process: build the rest, start the program, watch it. Returns in the program alone."""

        def build(fields: dict[str, Any]) -> str:
            kernel.set_host_name("sandbox")
            root.own_place(fields["disk_bytes"], inside.NUM_INODES)
            root.own_folders()
            fields["address_space"] = not root.own_processes()
            return inside.FOLDER

        def prepare() -> None:
            kernel.die_with_parent()
            kernel.map_ids((inside.USER, inside.USER), self._outside)
            kernel.set_dumpable(False)

        return first_process(descriptors, self.walls, prepare, build, inside.in_namespace, extra_processes=1)


def _has_mounts() -> bool:
    """Put this process into a mount namespace of its own where it is root's; False where it is not, or is root's of a
    container that may not."""
    if os.geteuid() != 0:
        return False
    try:
        kernel.unshare(kernel.NEW_MOUNTS, "a mount namespace for root")
    except kernel.Refused:
        return False
    return True


def _is_open_to_all(folder: str) -> bool:
    """Whether any user may read what is in a folder."""
    path = os.path.realpath(folder)
    if os.stat(path).st_mode & 0o5 != 0o5:
        return False
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 0o1:
            return False
    return True


class Bubblewrap:
    """Each program in namespaces that bubblewrap makes. Where this is root, it is called as an unprivileged user, in
    the root that `Namespaces` has, too."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._program = config["program"]
        self._executable = config["executable"]
        self._files = root.FILES
        paths = root.sources(config["interpreter"], config["readable"])
        if _has_mounts():
            root.enter(config["interpreter"], config["readable"], for_programs=False)
            own_user(config["uid"])
            self._files = {}
            # Of the root that is made already, whole folders: a mount costs every program a millisecond.
            folders = sorted({f"/{path.split('/')[1]}" for path in [*paths, *root.FILES]})
            self._binds = [word for path in folders for word in ("--ro-bind", path, path)]
        else:
            self._binds = self._packages_hidden(paths, config["readable"])
        self._binds += self._rest(paths)
        # Compiled once: a program's first process starts with it.
        modules = [(name, compile(text, name, "exec", dont_inherit=True)) for name, text in config["modules"][:-1]]
        self._modules = _memory_file(marshal.dumps(modules))
        self.walls = own_walls()

    def _packages_hidden(self, paths: list[str], readable: list[str]) -> list[str]:
        words = [word for path in paths for word in ("--ro-bind", path, path)]
        for path in root.hidden(paths, readable):
            words += ["--tmpfs", path, "--remount-ro", path]
        return words

    def _rest(self, paths: list[str]) -> list[str]:
        words: list[str] = []
        for path in root.SHORT:
            if os.path.islink(path):
                words += ["--symlink", os.readlink(path), path]
        words += ["--proc", "/proc", "--dir", "/dev"]
        for name in root.DEVICES:
            words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        for path, target in root.links(paths).items():
            words += ["--symlink", target, path]
        return words

    def fork(self) -> int:
        """The process that becomes bubblewrap; 0 in it."""
        return os.fork()

    def begin(self, header: dict[str, Any], descriptors: inside.Descriptors) -> inside.Program:
        """Become bubblewrap, which starts `behind_bubblewrap`."""
        try:
            kernel.die_with_parent()
            texts = {path: _memory_file(text.encode()) for path, text in self._files.items()}
            kept = {*descriptors.all(), self._modules, *texts.values()}
            inside.close_others(kept)
            for descriptor in kept:
                os.set_inheritable(descriptor, True)
            words = [self._program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
            words += ["--uid", str(inside.USER), "--gid", str(inside.USER), "--hostname", "sandbox", *self._binds]
            for path, descriptor in texts.items():
                words += ["--ro-bind-data", str(descriptor), path]
            words += [
                "--perms",
                "0700",
                "--size",
                str(header["disk_bytes"]),
                "--tmpfs",
                inside.PLACE,
                "--remount-ro",
                "/",
            ]
            boot = BOOT_BEHIND.format(modules=self._modules, fields=descriptors.to_fields())
            words += ["--chdir", inside.PLACE, "--", self._executable, "-P", "-s", "-S", "-c", boot]
            os.dup2(descriptors.standard[2], 2)  # for what bubblewrap has to say
            os.execv(self._program, words)
        except BaseException as error:  # noqa: BLE001 - nothing of the launcher's may go on in this process
            inside.tell(descriptors.launcher, {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)


BOOT_BEHIND = """
import marshal, os, sys, types
with open({modules}, "rb") as file:
    for name, code in marshal.loads(os.pread({modules}, os.fstat({modules}).st_size, 0)):
        parent, _, last = name.rpartition(".")
        for package in (parent.partition(".")[0], parent):
            sys.modules.setdefault(package, types.ModuleType(package))
        module = sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules[parent], last, module)
        exec(code, module.__dict__)
sys.modules["rollout_core.sandbox.modes"].behind_bubblewrap({fields}).run()
"""


def behind_bubblewrap(fields: list[Any]) -> inside.Program:
    """Of the first process that bubblewrap starts; returns in the program alone."""

    def prepare() -> None:
        kernel.die_with_parent()
        kernel.set_dumpable(False)

    def build(limits: dict[str, Any]) -> str:
        limits["address_space"] = False
        root.own_folders()
        return inside.FOLDER

    given = inside.Descriptors.from_fields(fields)
    return first_process(given, own_walls(), prepare, build, inside.in_namespace, extra_processes=2)


class Bare:
    """Each program as a process like any other: limits and no wall."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.walls: list[str] = []

    def fork(self) -> int:
        """The process that watches the program; 0 in it."""
        return os.fork()

    def begin(self, header: dict[str, Any], descriptors: inside.Descriptors) -> inside.Program:
        """Of the process that watches: start the program. Returns in the program alone."""

        def prepare() -> None:
            kernel.die_with_parent()
            process_tree.adopt_orphans()

        def build(fields: dict[str, Any]) -> str:
            fields["address_space"] = fields["own_users"] = False
            fields["env"]["HOME"] = fields["env"]["TMPDIR"] = header["folder"]
            return header["folder"]

        def living() -> list[int]:
            return process_tree.below(os.getpid())

        return first_process(descriptors, [], prepare, build, living, extra_processes=0, end=_end_tree)


def _end_tree() -> None:
    process_tree.end_all(os.getpid(), None)


def first_process(
    descriptors: inside.Descriptors,
    walls: list[str],
    prepare: Callable[[], None],
    build: Callable[[dict[str, Any]], str],
    living: Callable[[], list[int]],
    *,
    extra_processes: int,
    end: Callable[[], None] = lambda: None,
) -> inside.Program:
    """Set up what a program needs, start it and watch it, in a process of which only the program returns.

    ``prepare`` comes first, then ``build``, which gets the program's limits and gives its folder.
    ``extra_processes``: how many the kernel counts as the program's that are not. ``end``: what ends processes that do
    not end with this one.
    """
    launcher = descriptors.launcher
    try:
        prepare()
        inside.close_others(set(descriptors.all()))
        request = inside.Request(descriptors.payload)
        request.fields |= {"extra_processes": extra_processes, "own_users": True}
        folder = build(request.fields)
        try:
            request.unpack(folder)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            inside.tell(launcher, {"ended": "disk", "cpu_seconds": 0.0})
            os._exit(0)
        inside.tell(launcher, {"begins": True})
        pid = os.fork()
        if pid == 0:
            return inside.Program(request, descriptors, folder, walls)
    except BaseException as error:  # noqa: BLE001 - nothing of the launcher's may go on in this process
        inside.tell(launcher, {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    try:
        descriptors.close_programs()
        if "capabilities" in walls:
            kernel.drop_capabilities()
        inside.watch(pid, launcher, request.fields, living)
        end()
    finally:
        os._exit(0)


def _memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("rollout-sandbox")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def own_user(uid: int) -> None:
    """Become an unprivileged user, where this is root."""
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        raise kernel.Refused(f"becoming user {uid}", error.errno or 0) from None
    kernel.set_dumpable(True)  # the first process writes its own map of users


def own_walls() -> list[str]:
    """Those that a program can put on itself here."""
    walls: list[str] = list(WALLS)
    try:
        kernel.landlock_version()
    except OSError:
        walls.remove("landlock")
    return walls
