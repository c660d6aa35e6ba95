"""The program of the python and shell tools within a sandbox: it runs what the model wrote, in a process below its own.

It stands alone, of the standard library's small parts. Its argument is ``channel``, where it answers requests over
descriptor 3 until that is closed, or ``once``, where it reads one from its input and writes the answer to its output. A
message is two lengths of 8 bytes, JSON of the first length, and bytes of the second: contents of files, and in answers
what was written before them.

A process of Python is kept between requests that say so. All that a request's process wrote comes back by its beginning
and its end; what is between them is counted as it streams. Whatever the model's program does to this one, it harms its
own answers alone: who reads them takes them for the program's.
"""

import _ast
import contextlib
import json
import os
import select
import signal
import sys
import time

CHANNEL = 3
LENGTH_BYTES = 8
READ_BYTES = 65536
CONTINUATION = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that begin no character."""
SETTLED_NS = 50_000_000
"""A file that changed less than this ago may change again with the same time of change, as clocks of kernels tick."""
END_SECONDS = 2.0
"""For what a process has written before its end to be read, where others hold its output open."""


class Kept:
    """The beginning and the end of what a process writes."""

    def __init__(self, most, flood):
        self.head, self.tail, self.num_cut = bytearray(), bytearray(), 0
        self.total = 0
        self._most, self._flood = most, flood

    def add(self, chunk):
        self.total += len(chunk)
        room = self._most - len(self.head)
        if room > 0:
            self.head += chunk[:room]
            chunk = chunk[room:]
        self.tail += chunk
        if len(self.tail) > 2 * self._most:
            self._cut()

    def _cut(self):
        dropped, self.tail = self.tail[: -self._most], self.tail[-self._most :]
        self.num_cut += len(dropped.translate(None, CONTINUATION))

    def end(self):
        """Keep no more than is to be kept."""
        if len(self.tail) > self._most:
            self._cut()

    @property
    def is_flooded(self):
        return self.total > self._flood


class Work:
    """A process that runs what the model wrote, its output, and where it says that it has come to its end."""

    def __init__(self, run):
        reading, writing = os.pipe()
        self.output = reading
        asked, self.ask = os.pipe()
        self.said, saying = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                nothing = os.open("/dev/null", os.O_RDONLY)
                os.dup2(nothing, 0)
                os.dup2(writing, 1)
                os.dup2(writing, 2)
                if asked <= 4 or saying <= 4:  # lower ones are free only where they were closed on purpose
                    os._exit(1)
                os.dup2(asked, 3, inheritable=False)
                os.dup2(saying, 4, inheritable=False)
                os.closerange(5, 65536)
                code = run(3, 4)
            finally:
                os._exit(code)
        for descriptor in (asked, saying, writing):
            os.close(descriptor)
        os.set_blocking(reading, False)
        self.status: int | None = None

    def end(self):
        """End it and its group."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                kill(self.pid, signal.SIGKILL)
        if self.status is None:
            _, self.status = os.waitpid(self.pid, 0)

    def close(self):
        self.end()
        for descriptor in (self.output, self.ask, self.said):
            os.close(descriptor)

    def has_ended(self):
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
        return self.status is not None

    def watch(self, kept, deadline, woken, number, caller):
        """How it ended: ``done`` where it says so of the request of this number, ``exit``, ``time``, ``output``, or
        ``left`` where the caller is gone."""
        poll = select.poll()
        for descriptor in (self.output, self.said, woken):
            poll.register(descriptor, select.POLLIN)
        if caller is not None:
            poll.register(caller, select.POLLRDHUP)
        while True:
            rest = deadline - time.monotonic()
            if rest <= 0:
                return "time", 0
            events = dict(poll.poll(rest * 1000 + 1))
            if woken in events:
                os.read(woken, 4096)
            if self.output in events and not self.drain(kept):
                poll.unregister(self.output)  # it has closed its output, and may still run
            if kept.is_flooded:
                return "output", 0
            if caller in events:
                return "left", 0
            if self.said in events:
                # Not whole where the model's program wrote there itself, which is then ended when its time is up.
                record = os.read(self.said, LENGTH_BYTES + 1)
                if record[:-1] == number.to_bytes(LENGTH_BYTES, "big"):
                    self.drain(kept)
                    return "done", record[-1]
                if not record:
                    poll.unregister(self.said)
            if self.has_ended() and self.status is not None:
                self.drain(kept)
                return "exit", os.waitstatus_to_exitcode(self.status)

    def drain(self, kept):
        """Read what is there; False where no more can come."""
        until = time.monotonic() + END_SECONDS
        while time.monotonic() < until and not kept.is_flooded:
            try:
                chunk = os.read(self.output, READ_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            kept.add(chunk)
        return True


# Python


def interpret(home):
    """What runs in the interpreter's process: each request's source, in the names of those before it."""

    def run(asked, saying):
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        # Line by line, so that what a process wrote before it is ended is there.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
        main = sys.modules["__main__"] = type(sys)("__main__")
        names = main.__dict__
        sys.argv = [""]
        if sys.path[0] != home:
            sys.path.insert(0, home)
        sources, number = {}, 0
        while True:
            size = _read(asked, LENGTH_BYTES)
            if size is None:
                return 0
            content = _read(asked, int.from_bytes(size, "big"))
            if content is None:
                return 0
            source = content.decode("utf-8", "surrogatepass")
            number += 1
            failed = _executed(source, f"<call {number}>", names, sources)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # the model may have put anything there
                    stream.flush()
            os.write(saying, number.to_bytes(LENGTH_BYTES, "big") + bytes([failed]))

    return run


def _executed(source, name, names, sources):
    sources[name] = source
    try:
        tree = compile(source, name, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
        assert isinstance(tree, _ast.Module)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), names)
        if isinstance(last, _ast.Expr):
            value = eval(compile(_ast.Expression(last.value), name, "eval", dont_inherit=True), names)
            if value is not None:
                names["_"] = value
                sys.stdout.write(f"{value!r}\n")
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
        return 1 if error.code else 0
    except BaseException as error:  # noqa: BLE001 - as the interpreter does at its top
        _show(error, sources)
        return 1
    return 0


def _show(error, sources):
    try:
        import linecache
        import traceback

        for name, source in sources.items():
            lines = [f"{line}\n" for line in source.split("\n")]
            linecache.cache[name] = (len(source), None, lines, name)
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(type(error), error.with_traceback(trace), trace)
    except BaseException:  # noqa: BLE001 - such as of an error whose text cannot be made
        with contextlib.suppress(BaseException):
            sys.stderr.write(f"{type(error).__name__} (its message cannot be shown)\n")


# Shell


def command(home, source, programs):
    """What runs in the shell's process. ``programs``: the paths of those that may be called; None: any."""

    def run(asked, saying):
        os.close(asked)
        os.close(saying)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(home)
        if programs is None:
            for shell in ("bash", "sh"):
                try:
                    os.execvp(shell, [shell, "-c", source])
                except FileNotFoundError:
                    continue
            return 127
        # Names of programs are found in the shell's table alone, as its search path leads nowhere. The table and the
        # path cannot be changed once the shell is restricted.
        table = "".join(f"hash -p '{path}' '{name}'; " for name, path in programs.items())
        # `set -r` alone leaves the path as it is in the command of `bash -c`.
        fixed = "readonly PATH SHELL ENV BASH_ENV; set -r"
        os.execvp("bash", ["bash", "-c", f'PATH=/nonexistent; {table}{fixed}; eval "$1"', "bash", source])

    return run


def found_programs(names):
    """By name, where the search path has each of these."""
    found = {}
    for name in names:
        for folder in os.environ.get("PATH", "").split(":"):
            path = os.path.join(folder, name)
            if os.path.isfile(path) and os.access(path, os.X_OK):
                found[name] = path
                break
    return found


# Files


class Folder:
    """The episode's files here, and how they were after the last request."""

    def __init__(self, home):
        self.home = home
        self.known = {}

    def take(self, head, blob):
        """Change them as the request says. Raises OSError where they do not fit."""
        offset = 0
        for path in head["removed"]:
            self.remove(path)
        for path in head["folders"]:
            self.make(path)
        latest = time.time_ns() - SETTLED_NS
        for path, mode, size, changed_ns in head["files"]:
            self.make(os.path.dirname(path))
            self.remove(path)
            descriptor = os.open(f"{self.home}/{path}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
            rest = blob[offset : offset + size]
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            # In the past, so that a change a moment later is seen.
            os.utime(descriptor, ns=(latest, min(changed_ns, latest)))
            os.close(descriptor)
            offset += size
        self.known = self.found()[0]

    def make(self, path):
        try:
            os.makedirs(f"{self.home}/{path}", exist_ok=True)
        except FileExistsError:
            self.remove(path)
            os.makedirs(f"{self.home}/{path}", exist_ok=True)

    def remove(self, path):
        for call in (os.unlink, os.rmdir):
            try:
                call(f"{self.home}/{path}")
                return
            except OSError:
                pass

    def found(self, most=1 << 30):
        """By path, what each file or folder is, and those that are not taken."""
        found, left = {}, []
        waiting = [""]
        while waiting:
            prefix = waiting.pop()
            try:
                entries = list(os.scandir(f"{self.home}/{prefix}"))
            except OSError:
                left.append(prefix)
                continue
            for entry in entries:
                path = prefix + entry.name
                try:
                    state = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if len(found) >= most or len(path) > 1000 or entry.is_symlink():
                    left.append(path)
                elif entry.is_dir(follow_symlinks=False):
                    found[path] = None
                    waiting.append(path + "/")
                elif entry.is_file(follow_symlinks=False):
                    found[path] = (state.st_size, state.st_mtime_ns, state.st_ino, state.st_mode & 0o100)
                else:
                    left.append(path)
        return found, left

    def changes(self, most_files, most_bytes):
        """What of an answer says how files have changed, and the contents of those that did."""
        now, left = self.found(most_files)
        files, contents, total = [], [], 0
        for path, state in now.items():
            if state is None or self.known.get(path, 0) == state:
                continue
            try:
                if total + state[0] > most_bytes:
                    raise OSError
                with open(f"{self.home}/{path}", "rb") as file:
                    content = file.read(most_bytes - total)
            except OSError:
                left.append(path)
                continue
            files.append([path, 0o755 if state[3] else 0o644, len(content), state[1]])
            contents.append(content)
            total += len(content)
        folders = [path for path, state in now.items() if state is None and self.known.get(path, 0) is not None]
        removed = [path for path in self.known if path not in now]
        settled = time.time_ns() - SETTLED_NS
        self.known = {path: state if state is None or state[1] < settled else () for path, state in now.items()}
        head = {"files": files, "folders": folders, "removed": removed, "left": left[:20], "num_left": len(left)}
        return head, b"".join(contents)


# Requests


class Supervisor:
    """Answers requests."""

    def __init__(self, home, caller=None):
        self.home = home
        self.folder = Folder(home)
        self.python = None
        self.number = 0
        """Of the request, of those that the interpreter has had."""
        self.caller = caller
        self.woken, waking = os.pipe()
        for descriptor in (self.woken, waking):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)

    def answer(self, head, blob):
        """What a request comes to."""
        try:
            self.folder.take(head, blob)
        except OSError as error:
            return {"problem": f"the files of the folder do not fit into the sandbox: {error.strerror}"}, b""
        kept = Kept(head["keep"], head["flood"])
        if head["kind"] == "python":
            ended, code = self._python(head, kept)
        else:
            programs = None if head["programs"] is None else found_programs(head["programs"])
            work = Work(command(self.home, head["source"], programs))
            ended, code = work.watch(kept, time.monotonic() + head["seconds"], self.woken, 0, self.caller)
            work.close()
        kept.end()
        changes, contents = self.folder.changes(head["most_files"], head["most_bytes"])
        outcome = {"ended": ended, "code": code, "head": len(kept.head), "tail": len(kept.tail), "cut": kept.num_cut}
        return outcome | changes, kept.head + kept.tail + contents

    def _python(self, head, kept):
        if self.python is None:
            self.python, self.number = Work(interpret(self.home)), 0
        self.number += 1
        source = head["source"].encode("utf-8", "surrogatepass")
        deadline = time.monotonic() + head["seconds"]
        with contextlib.suppress(OSError):  # it has ended since
            _write(self.python.ask, len(source).to_bytes(LENGTH_BYTES, "big") + source)
        ended, code = self.python.watch(kept, deadline, self.woken, self.number, self.caller)
        if ended != "done":
            self.python.close()
            self.python = None
        return ended, code


def _read(descriptor, size):
    parts = []
    while size:
        chunk = os.read(descriptor, min(size, 1 << 20))
        if not chunk:
            return None
        parts.append(chunk)
        size -= len(chunk)
    return b"".join(parts)


def _write(descriptor, data):
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _message(head, blob):
    text = json.dumps(head).encode()
    return b"".join((len(text).to_bytes(LENGTH_BYTES, "big"), len(blob).to_bytes(LENGTH_BYTES, "big"), text, blob))


def _received(descriptor):
    """A message; None where there are no more."""
    lengths = _read(descriptor, 2 * LENGTH_BYTES)
    if lengths is None:
        return None
    head = _read(descriptor, int.from_bytes(lengths[:LENGTH_BYTES], "big"))
    blob = _read(descriptor, int.from_bytes(lengths[LENGTH_BYTES:], "big"))
    return None if head is None or blob is None else (json.loads(head), blob)


def main():
    """Answer requests until there are no more."""
    if sys.argv[1:] == ["once"]:
        home = os.path.abspath("episode")
        os.makedirs(home)
        os.chdir(home)
        asked = _received(0)
        assert asked is not None, "the caller has written one"
        _write(1, _message(*Supervisor(home).answer(*asked)))
        return
    os.unlink(__file__)  # it is none of the episode's files
    os.set_inheritable(CHANNEL, False)
    supervisor = Supervisor(os.getcwd(), CHANNEL)
    while True:
        asked = _received(CHANNEL)
        if asked is None:
            break
        answer = _message(*supervisor.answer(*asked))
        with contextlib.suppress(OSError):  # the caller is gone, which the next request says
            _write(CHANNEL, answer)
    if supervisor.python is not None:
        supervisor.python.close()


if __name__ == "__main__":
    main()
