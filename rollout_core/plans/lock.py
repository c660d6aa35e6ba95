"""The lock of a plan: what a run computes with, in a file with an id, so that a run can be held to what was planned.

It says what is known before the run: the configuration, inputs by their content, what of both and of code enters the
cache key of each stage, versions of stages and of software. How much of the run is already done is no part of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rollout_core.base.errors import ConfigError, shown
from rollout_core.base.ids import ContentId, content_id
from rollout_core.config import Run

FORMAT = "rollout-plan/1"
NOT_HELD = ("locked", "refresh", "tags")
"""Keys of ``run`` that may be others: what is computed again is computed as before."""
MOST_LINES = 20
"""Differences that are named, so that a wholly other run does not print thousands."""
_LONGEST_SHOWN = 100
"""Characters of a value that is written out; of a longer one the content id is."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlannedInput(_Strict):
    """What a stage brings in: rows, a model, code."""

    stage: str
    label: str
    ids: tuple[str, ...]
    """Content ids of what it gives."""

    @property
    def title(self) -> str:
        """For people."""
        return titled(self.stage, self.label)


class PlannedCall(_Strict):
    """A call of a stage."""

    stage: str
    version: int
    label: str
    inputs: dict[str, Any]
    """By name, what enters the key, or ``{"content": id}`` of it where that is long."""
    results: tuple[str, ...]
    """Names of the inputs that other calls give, which are not known before the run."""

    @property
    def title(self) -> str:
        """For people."""
        return titled(self.stage, self.label)


class PlanLock(_Strict):
    """A plan that runs can be held to."""

    format: Literal["rollout-plan/1"] = FORMAT
    software: dict[str, str]
    """Version by name of package."""
    settings: Any
    """The configuration, as of `held_settings`."""
    inputs: tuple[PlannedInput, ...]
    calls: tuple[PlannedCall, ...]
    """In order, as if nothing were cached."""
    is_open: bool
    """Whether results decide which calls follow."""

    @property
    def id(self) -> ContentId:
        """Of all that the plan says."""
        return content_id("plan/1", self.model_dump(mode="json"))

    def write(self, path: Path) -> None:
        """Write the file, with the plan's id. Raises ConfigError where it cannot be written."""
        document = {"id": self.id, **self.model_dump(mode="json")}
        try:
            path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: the plan cannot be written: {error.strerror}; give another file") from error


def read_lock(path: Path) -> PlanLock:
    """The plan in a file of `PlanLock.write`. Raises ConfigError where it is none, or was changed since."""
    again = "write it with `rollout plan --lock FILE`"
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: the plan cannot be read: {error.strerror}; {again}") from error
    except ValueError:
        raise ConfigError(f"{path}: got no JSON; expected a plan: {again}") from None
    if not isinstance(document, Mapping) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, Mapping) else document
        raise ConfigError(f"{path}: got format {shown(found)}; expected {FORMAT!r}: {again}")
    try:
        lock = PlanLock.model_validate({key: value for key, value in document.items() if key != "id"})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {where}: {first['msg']}; expected a plan: {again}") from None
    if document.get("id") != lock.id:
        raise ConfigError(f"{path}: its id is {shown(document.get('id'))}, but it says what has {lock.id!r}; {again}")
    return lock


def held_settings(config: Run) -> dict[str, Any]:
    """All that the configuration of a run says, but for `NOT_HELD`."""
    return config.model_dump(mode="json", exclude={"run": set(NOT_HELD)})


def titled(stage: str, label: str) -> str:
    """A call, for people."""
    return f"{stage} {label}".strip()


def planned_call(
    stage: str, version: int, label: str, inputs: Mapping[str, Any], results: Iterable[str] = ()
) -> PlannedCall:
    """A call with the identities ``inputs``, of which those called ``results`` are not known before the run."""
    unknown = set(results)
    return PlannedCall(
        stage=stage,
        version=version,
        label=label,
        inputs={name: _short(value) for name, value in inputs.items() if name not in unknown},
        results=tuple(sorted(unknown)),
    )


def _short(value: Any) -> Any:
    text = json.dumps(value, ensure_ascii=False)
    return value if len(text) <= _LONGEST_SHOWN else {"content": content_id("plan-value/1", value)}


def differences(planned: PlanLock, now: PlanLock) -> list[str]:
    """In what two plans differ, a line each; of many the first."""
    found = [
        *(f"{name}: planned {had}, now {has}" for name, had, has in _differing(planned.software, now.software)),
        *(f"settings.{key}: planned {had}, now {has}" for key, had, has in _differing(planned.settings, now.settings)),
        *_of_inputs(planned.inputs, now.inputs),
    ]
    # Settings and inputs lead to differences of many calls, which say nothing more.
    found = found or [*_of_calls(planned.calls, now.calls)]
    if not found and planned.id != now.id:
        found = [f"is_open: planned {planned.is_open}, now {now.is_open}"]
    return found[:MOST_LINES] + ([f"and {len(found) - MOST_LINES} more"] if len(found) > MOST_LINES else [])


def call_differences(planned: PlannedCall, now: Mapping[str, Any], version: int) -> list[str]:
    """In what a call with the identities ``now``, of a stage of ``version``, differs from what was planned."""
    of_version = [] if version == planned.version else [f"version: planned {planned.version}, now {version}"]
    called = planned_call(planned.stage, version, planned.label, now, planned.results)
    return of_version + [
        f"{key}: planned {had}, now {has}" for key, had, has in _differing(planned.inputs, called.inputs)
    ]


def _of_inputs(planned: Sequence[PlannedInput], now: Sequence[PlannedInput]) -> Iterator[str]:
    for had, has in zip(planned, now, strict=False):
        if had.title != has.title:
            yield f"inputs: planned {had.title}, now {has.title}"
            return
        if had != has:
            yield f"{had.title}: planned content {_ids(had.ids)}, now {_ids(has.ids)}"
    if len(planned) != len(now):
        yield f"inputs: planned {len(planned)}, now {len(now)}"


def _of_calls(planned: Sequence[PlannedCall], now: Sequence[PlannedCall]) -> Iterator[str]:
    for had, has in zip(planned, now, strict=False):
        if had.title != has.title:
            yield f"calls: planned {had.title}, now {has.title}"
            return
        if had.results != has.results:
            yield f"{had.title}: of results planned {', '.join(had.results)}, now {', '.join(has.results)}"
        elif had != has:
            yield from (f"{had.title}: {line}" for line in call_differences(had, has.inputs, has.version))
    if len(planned) != len(now):
        only, more = ("planned", planned) if len(planned) > len(now) else ("now", now)
        first = more[min(len(planned), len(now))].title
        yield f"calls: planned {len(planned)}, now {len(now)}; {first} is {only} alone"


def _differing(planned: Any, now: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """Dotted keys under which two documents differ, with both values for people."""
    if planned == now:
        return
    if isinstance(planned, Mapping) and isinstance(now, Mapping) and "content" not in planned:
        for name in dict.fromkeys([*planned, *now]):
            had, has = planned.get(name, _NOTHING), now.get(name, _NOTHING)
            yield from _differing(had, has, f"{key}.{name}" if key else str(name))
        return
    yield key, _text(planned), _text(now)


_NOTHING = object()


def _text(value: Any) -> str:
    if value is _NOTHING:
        return "nothing"
    if isinstance(value, Mapping) and set(value) == {"content"}:
        return f"content {str(value['content'])[:8]}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def _ids(ids: Sequence[str]) -> str:
    return ", ".join(content[:8] for content in ids) or "nothing"
