"""Trackers of plugins, of kind ``tracker``: what a call asks them, and how figures get there while steps are trained.

A call's payload has ``method`` and ``series``, the id of a curve: ``open`` with ``title`` and ``run``, whose result has
``step``, the last one that it has of the curve or 0; and ``log`` with ``step`` and ``figures``, numbers by name, null
where one is not finite. A thread of its own calls, so that no step waits for a tracker.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from queue import Empty, Full, Queue
from typing import Any

from pydantic import Field

from rollout_core.base.errors import ConfigError, Fatal, shown
from rollout_core.base.ids import ContentId
from rollout_core.config.base import Settings
from rollout_core.config.learning import PluginTracker
from rollout_core.plugins.cases import TEST_CASES, Case
from rollout_core.plugins.host import PluginProcess
from rollout_core.plugins.identity import PluginCode

log = logging.getLogger(__name__)

ADAPTER = f"{__name__}:adapt"
MOST_WAITING = 10_000
"""Rows; those that come while so many wait are not delivered."""
MOST_FAILURES = 8
"""Of calls one after another, after which it is not called any more."""
MOST_CHARACTERS = 500
"""Of an error, which may have what the plugin wrote last."""
FINISH_SECONDS = 10.0
"""At the end of an update, for what waits to be delivered."""
_hung: set[ContentId] = set()
"""Plugins that held up the end of an update of this process: they hold up no further one."""


class Delivery:
    """A plugin that gets the rows of a curve, each once and in order, as well as it can."""

    def __init__(self, spec: PluginTracker, code: PluginCode, series: str, *, title: str, run: str) -> None:
        """Raises ConfigError for a configuration that the plugin refuses, and Fatal for one that held up an earlier
        update. Starts no process: the thread does."""
        if code.id in _hung:
            raise Fatal("it held up the end of an earlier update, and gets nothing any more")
        self._name, self._code = code.name, code
        self._plugin = _process(spec, code)
        self._about = {"series": series, "title": title, "run": run}
        self._rows: Queue[tuple[int, dict[str, float | None]] | None] = Queue(MOST_WAITING)
        self._num_rows = self._num_lost = self._num_failures = 0
        self._counting = threading.Lock()
        self._first_error = ""
        self._has_ended = False
        self._thread = threading.Thread(target=self._deliver, name=f"tracker {code.name}", daemon=True)
        self._thread.start()

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        """Have a row delivered, soon."""
        self._num_rows += 1
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        try:
            self._rows.put_nowait((step, finite))
        except Full:
            self._lose(f"{MOST_WAITING} rows were waiting already")

    def finish(self) -> None:
        """Deliver what waits, for `FINISH_SECONDS` at most, and end the plugin. Says what was not delivered."""
        with suppress(Full):  # it hangs, and is ended
            self._rows.put(None, timeout=FINISH_SECONDS)
            self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            self._has_ended = True
            _hung.add(self._code.id)
            self._lose(f"it had not taken it {FINISH_SECONDS:g} s after the last step", 0)
            while self._thread.is_alive():
                self._plugin.end()
                self._thread.join(0.1)
        self._plugin.close()
        if self._num_lost:
            log.warning(
                "tracker plugin %s: %d of %d rows were not delivered; first: %s",
                self._name, self._num_lost, self._num_rows, self._first_error,
            )  # fmt: skip

    def _lose(self, reason: str, rows: int = 1) -> None:
        with self._counting:
            self._num_lost += rows
        if not self._first_error:
            self._first_error = reason[:MOST_CHARACTERS]
            log.warning("tracker plugin %s: a row was not delivered: %s", self._name, self._first_error)

    def _deliver(self) -> None:
        known: int | None = None
        while (row := self._next()) is not None:
            if self._has_ended or self._num_failures == MOST_FAILURES:
                self._lose("it is not called any more")
                continue
            step, figures = row
            try:
                if known is None:
                    known = _last_step(self._plugin, self._about)
                if step > known:
                    about = {"series": self._about["series"], "step": step, "figures": figures}
                    self._plugin.call({"method": "log", **about}, _problem)
                self._num_failures = 0
            except Exception as error:  # noqa: BLE001 - whatever a tracker does, a curve is not worth a run
                self._num_failures += 1
                known = None  # a plugin that was started again knows no series yet
                self._lose(str(error))

    def _next(self) -> tuple[int, dict[str, float | None]] | None:
        """The next row; None behind the last one."""
        with suppress(Empty):  # whoever ended this may have found no room for its mark
            return self._rows.get(timeout=0.1 if self._has_ended else None)
        return None


def _process(spec: PluginTracker, code: PluginCode) -> PluginProcess:
    return PluginProcess(code, spec.config, adapter=ADAPTER, on_line=log.info, most_failures=None)


def _last_step(plugin: PluginProcess, about: Mapping[str, Any]) -> int:
    def problem_with(result: Any) -> str | None:
        step = result.get("step") if isinstance(result, dict) else None
        if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
            return None
        return f"answered with {shown(result)}; expected step, a number from 0 on"

    return plugin.call({"method": "open", **about}, problem_with)["step"]


def _problem(result: Any) -> str | None:
    return None if isinstance(result, dict) else f"answered with {shown(result)}; expected an object"


class FiguresOfStep(Settings):
    """A row of a test case."""

    step: int = Field(ge=1)
    """Its number."""
    figures: dict[str, float]
    """By name."""


class TrackerCase(Case):
    """A case of a tracker: it gets rows, and says which it has."""

    rows: tuple[FiguresOfStep, ...]
    """That it gets, in order."""
    last_step: int = Field(ge=0)
    """That it says it has of the curve then."""


def start(code: PluginCode, config: Mapping[str, Any]) -> None:
    """Start a plugin with a configuration, and end it. Raises ConfigError."""
    with closing(_process(PluginTracker(kind="plugin", name=code.name, config=dict(config)), code)) as plugin:
        plugin.start()


def failed_cases(
    code: PluginCode, cases: Sequence[tuple[int, TrackerCase]], on_line: Callable[[str], None]
) -> list[str]:
    """Put test cases to a plugin, which is started for each; what is wrong, a line for each."""
    failures: list[str] = []
    for number, case in cases:
        about = {"series": "test case", "title": "test case", "run": "test"}
        plugin = PluginProcess(code, case.config, adapter=ADAPTER, on_line=on_line)
        with closing(plugin):
            try:
                _last_step(plugin, about)
                for row in case.rows:
                    given = {"series": about["series"], "step": row.step, "figures": row.figures}
                    plugin.call({"method": "log", **given}, _problem)
                got: Any = _last_step(plugin, about)
            except (ConfigError, Fatal) as error:
                got = error
        if got != case.last_step:
            failures.append(f"{TEST_CASES}:{number}: got {got}; expected {case.last_step}")
    return failures


def adapt(name: str, made: Any) -> Callable[[Any], Any]:
    """In a Python plugin's process: its factory made an object with ``log(series, step, figures)`` and, where it keeps
    what it gets, ``open(series, title, run)``, which returns the last step that it has."""
    if not callable(getattr(made, "log", None)):
        raise ConfigError(f"plugin {name}: its factory returned {shown(made)}; expected an object with a method log")

    def answer(payload: Any) -> Any:
        given = {key: value for key, value in payload.items() if key != "method"}
        if payload["method"] == "open":
            opening = getattr(made, "open", None)
            return {"step": 0 if opening is None else opening(**given)}
        made.log(**given)
        return {}

    return answer
