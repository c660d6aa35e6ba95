"""A plugin that runs: its files as they were read, in a folder of its own; its process, which is started, asked, ended
where a call fails, and started again.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.base.isolation.child import Child, Ended, Interrupted
from rollout_core.base.locks import scratch_folder
from rollout_core.base.processes import Limits
from rollout_core.base.stopping import raise_if_stopping
from rollout_core.plugins.identity import PluginCode, file_times, read_plugin
from rollout_core.plugins.manifest import check_config

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
"""Before a plugin whose calls fail is started again; doubled from one to the next."""
MOST_FAILURES = 8
"""Calls that end the plugin's process one after another; the last of them fails for good."""
MOST_ERRORS = 20
MAX_SOCKET_PATH = 107
_POLL_SECONDS = 0.1
_SIDECAR, _IN_PROCESS = "rollout_core.plugins.sidecar:handle", "rollout_core.plugins.in_process:handle"


class CallFailed(Fatal):
    """A call came to no answer, and cost what it was about. ``str`` names the plugin."""


@dataclass(frozen=True)
class Reload:
    """Edited files of a plugin that was at work, which were taken, or refused."""

    code: PluginCode
    """The plugin as it is called from then on."""
    seconds: float
    problem: str = ""
    """Why they were refused."""


@dataclass
class CallFigures:
    """What calls of a plugin came to."""

    calls: int = 0
    failed: int = 0
    seconds: float = 0.0
    slowest_seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    """Of those that failed, the first `MOST_ERRORS`."""
    loaded_seconds: list[float] = field(default_factory=list)
    """What each start took."""
    reloads: list[Reload] = field(default_factory=list)
    """Of files that were edited meanwhile."""


def start_request(code: PluginCode, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What `in_process.load`, or `sidecar.Sidecar`, needs to know of a plugin whose files are in ``folder``; the socket
    of a sidecar is next to it. Raises ConfigError where no socket can have that name."""
    manifest = code.manifest
    request: dict[str, Any] = {
        "name": manifest.name,
        "folder": str(folder),
        "config": dict(config),
        "network": manifest.has_network,
        "gpu": manifest.runtime.gpu,
    }
    if (sidecar := manifest.entry.sidecar) is not None:
        path = folder.parent / "s"
        path.unlink(missing_ok=True)
        if len(str(path).encode()) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"plugin {manifest.name}: its socket would be {path}; expected at most {MAX_SOCKET_PATH} bytes: "
                "set TMPDIR to a folder of a shorter name"
            )
        of_program = {"command": list(sidecar.command), "protocol": sidecar.protocol, "socket_path": str(path)}
        request |= {"version": manifest.version, "kind": manifest.kind, **of_program}
    elif (entry := manifest.entry.in_process) is not None:
        request |= {"package": code.package, "entry": {"module": entry.module, "factory": entry.factory}}
    return request


class PluginProcess:
    """A plugin with a configuration, in a process of its own. Calls take turns.

    ``adapter``: of a Python plugin, ``module:function`` that makes of its name, and what its factory made, the function
    that answers payloads. ``on_line`` gets what the plugin writes to its output, and what is to be said of it. One that
    ``reloads`` looks before each call whether the plugin's folder still has the files that run, and takes those that it
    has. Where it cannot be started from them it says why, and continues with the files before. ``most_failures``: calls
    one after another that end its process, the last of which fails for good; None: any number may.
    """

    def __init__(
        self,
        code: PluginCode,
        config: Mapping[str, Any],
        *,
        adapter: str,
        on_line: Callable[[str], None],
        reloads: bool = False,
        most_failures: int | None = MOST_FAILURES,
    ) -> None:
        """Raises ConfigError for a configuration that the plugin's schema refuses. Starts nothing."""
        self.code = code
        manifest = code.manifest
        check_config(manifest, config, code.files)
        if sys.platform != "linux":
            raise ConfigError(f"plugin {code.name}: plugins run in processes of their own, which needs Linux")
        self._config = dict(config)
        self._adapter = adapter
        self._on_line = on_line
        self._lock = threading.Lock()
        self._failures = 0
        self._most_failures = most_failures
        self.num_starts = 0
        """How often it was started: what it keeps in memory is that of the last start."""
        self._figures = CallFigures()
        self._reloads = reloads
        self._file_times: object = None
        self._reload_problem = ""
        self._child = self._new_child()
        self._folder: Path | None = None
        self._scratch = ExitStack()
        self._end = weakref.finalize(self, self._scratch.close)

    def _new_child(self) -> Child:
        manifest = self.code.manifest
        memory = manifest.runtime.memory_mib
        return Child(
            _SIDECAR if manifest.mode == "sidecar" else _IN_PROCESS,
            Limits(
                seconds=manifest.limits.call_seconds,
                memory_bytes=None if memory is None else memory * 2**20,
                processes=manifest.limits.processes,
            ),
            on_line=lambda line: self._on_line(f"plugin {manifest.name}: {line}"),
            prepare=self._prepare,
            prepare_seconds=manifest.limits.start_seconds,
        )

    def start(self) -> None:
        """Start it where it does not run. Raises ConfigError where it cannot be, or refuses its configuration."""
        with self._lock:
            self._child.start()

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._child.is_running

    def take_figures(self) -> CallFigures:
        """Of the calls and starts since they were last taken."""
        with self._lock:
            taken, self._figures = self._figures, CallFigures()
        return taken

    def call(self, payload: Any, problem_with: Callable[[Any], str | None] = lambda result: None) -> Any:
        """What it answers, a JSON value. ``problem_with`` says, in a form that follows "it", why a value is no answer.

        Raises CallFailed where it answers with an error, not as it should, or not at all, Recoverable where the machine
        is to blame, and Fatal for the last of ``most_failures`` that ended its process.
        """
        with self._lock:
            if self._reloads:
                self._reload_if_edited()
            began = time.monotonic()
            try:
                answer = self._answer(payload)
                if "error" in answer:
                    raise CallFailed(f"plugin {self.code.name}: it says: {answer['error']}")
                if (problem := problem_with(answer["result"])) is not None:
                    raise CallFailed(f"plugin {self.code.name}: it {problem}")
                return answer["result"]
            except Fatal as error:
                self._figures.failed += 1
                if len(self._figures.errors) < MOST_ERRORS:
                    self._figures.errors.append(str(error))
                raise
            finally:
                seconds = time.monotonic() - began
                self._figures.calls += 1
                self._figures.seconds += seconds
                self._figures.slowest_seconds = max(seconds, self._figures.slowest_seconds)

    def _answer(self, payload: Any) -> dict[str, Any]:
        """With ``result`` or its own ``error``."""
        if self._failures:
            self._pause()
        try:
            answer = self._asked(payload)
        except Interrupted as error:
            raise Recoverable(f"plugin {self.code.name} was interrupted: its process {error.reason}") from error
        except (Fatal, ConfigError) as error:
            raise self._failure(error) from error
        self._failures = 0
        return answer

    def _asked(self, payload: Any) -> dict[str, Any]:
        answer = self._child.call({"payload": payload})
        if "gone" in answer:
            self._on_line(
                f"plugin {self.code.name}: it ended with {answer['gone']} between calls, and is started again"
            )
            self._child.close()
            answer = self._child.call({"payload": payload})
        if "gone" in answer:
            raise Fatal(f"ended with {answer['gone']} as soon as it was ready")
        return answer

    def _failure(self, error: Fatal | ConfigError) -> Fatal:
        """Whatever state the plugin is in after it, the next call starts it anew."""
        self._child.close()
        self._failures += 1
        begin = f"plugin {self.code.name}: "
        text = str(error) if str(error).startswith(begin) else f"{begin}it {error}"
        if self._most_failures is None or self._failures < self._most_failures:
            return CallFailed(text)
        count, self._failures = self._failures, 0
        return Fatal(f"{text}. That was call {count} that failed so, one after another; the plugin is not asked again")

    def _pause(self) -> None:
        seconds = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (self._failures - 1))
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            raise_if_stopping(f"starting plugin {self.code.name} again")
            time.sleep(min(left, _POLL_SECONDS))

    def _prepare(self, ask: Callable[[Any], Any]) -> None:
        manifest, began = self.code.manifest, time.monotonic()
        request = start_request(self.code, self._config, self._unpacked())
        request["answer_bytes"] = manifest.limits.answer_bytes
        if manifest.mode != "sidecar":
            request["adapter"] = self._adapter
        try:
            ask({"start": request})
        except Ended as error:
            raise ConfigError(f"plugin {manifest.name} cannot be started: it {error}") from error
        except Interrupted as error:
            raise Recoverable(f"plugin {manifest.name} was not started: its process {error.reason}") from error
        self.num_starts += 1
        seconds = time.monotonic() - began
        self._figures.loaded_seconds.append(seconds)
        mode = manifest.mode.replace("_", " ")
        self._on_line(f"plugin_loaded {manifest.title} ({self.code.id.short}), {mode}, in {seconds:.2f} s")

    def _reload_if_edited(self) -> None:
        before, began = self.code, time.monotonic()
        folder = before.folder
        if not folder.is_dir():
            return  # filed code, on a machine that has no such folder
        try:
            if (times := file_times(folder)) == self._file_times:
                return
            self._file_times = times
            edited = read_plugin(folder, package=self.code.package)
            if edited.id == self.code.id:
                return
            self._take(edited)
            problem = ""
        except ConfigError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{error.filename or folder}: {error.strerror or error}"
            self._replace(before)  # its own copy of the files may be half of each
        if problem and problem == self._reload_problem:
            return  # said already
        self._reload_problem = problem
        seconds = time.monotonic() - began
        self._figures.reloads.append(Reload(self.code, seconds, problem))
        about = f"{self.code.manifest.title} ({self.code.id.short})"
        if problem:
            self._on_line(f"plugin_reloaded {about}: edited files are not taken, and those it has stay: {problem}")
        else:
            self._on_line(f"plugin_reloaded {about}, in {seconds:.2f} s")

    def _take(self, edited: PluginCode) -> None:
        """Raises ConfigError where it cannot be; it is then as before."""
        before = self.code
        if (edited.name, edited.manifest.kind) != (before.name, before.manifest.kind):
            got, expected = (f"{code.manifest.kind} {code.name}" for code in (edited, before))
            raise ConfigError(f"plugin {before.name}: its manifest is of {got} now; expected {expected}")
        check_config(edited.manifest, self._config, edited.files)
        if self._reloads_itself(edited):
            self.code = edited
            return
        self._replace(edited)
        try:
            self._child.start()
        except ConfigError:
            self._replace(before)
            raise

    def _reloads_itself(self, edited: PluginCode) -> bool:
        """Whether a sidecar that runs says that it runs the edited files, which are in its working folder by then."""
        before, folder = self.code, self._folder
        is_sidecar = before.manifest.mode == "sidecar" and self._child.is_running
        if not is_sidecar or folder is None or edited.manifest != before.manifest:
            return False
        for path in before.files.keys() - edited.files.keys():
            (folder / path).unlink(missing_ok=True)
        edited.write(folder.parent)
        changed = before.files.keys() ^ edited.files.keys()
        changed |= {path for path in before.files.keys() & edited.files if before.files[path] != edited.files[path]}
        try:
            answer = self._child.call({"reload": {"files": sorted(changed)}})
        except (Fatal, Recoverable):
            return False  # it is started again, which is as good
        result = answer.get("result")
        return isinstance(result, dict) and result.get("reloaded") is True

    def _replace(self, code: PluginCode) -> None:
        self._end_child()
        self.code, self._failures = code, 0
        self._child = self._new_child()

    def _unpacked(self) -> Path:
        if self._folder is None:
            self._folder = self.code.write(self._scratch.enter_context(scratch_folder("plugin")))
        return self._folder

    def end(self) -> None:
        """End its process, also amid a call of another thread, which then raises Recoverable."""
        self._child.end()

    def close(self) -> None:
        """End it, after a sidecar was asked to; a later call starts it anew."""
        with self._lock:
            self._end_child()

    def _end_child(self) -> None:
        if self._child.is_running and self.code.manifest.mode == "sidecar":
            with suppress(Fatal, Recoverable):
                self._child.call({"shutdown": True})
        self._child.close()
        self._scratch.close()
        self._folder = None
