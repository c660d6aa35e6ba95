"""A dry run: a flow's own code runs, and none of its stages does.

A stage whose result is stored gives that; what only brings inputs in is done on a copy of the object store; any other
gives a stand-in, a record of the right class whose content ids belong to nothing. A stage that is given such an id has
a key that nothing is stored under. So every call is looked up under the very key that the run would use, as far as the
ids are known, and the rest is counted as work to do.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from blocks import ContentAddressedStorage
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, content_id
from rollout_core.config import Run
from rollout_core.objects.lineage import software_versions
from rollout_core.objects.records import Record
from rollout_core.plans.lock import PlanLock, PlannedCall, PlannedInput, held_settings, planned_call
from tasks.runtime.arguments import spread_arguments
from tasks.runtime.held_run import imported_ids

CallState = Literal["cached", "continued", "computed", "checked"]
InDryRun = Callable[..., Record | None]
"""Takes the place of the function of a stage that is never cached, with its arguments by name; None: a stand-in."""


class DryRunStage(Protocol):
    """What a dry run asks of a stage, see `tasks.runtime.stage.Stage`."""

    name: str
    version: int
    cached: bool
    imports: bool
    record: Any
    in_dry_run: InDryRun | None

    def identities(self, inputs: dict[str, Any]) -> dict[str, Any]: ...

    def find(self, inputs: dict[str, Any]) -> Record | None: ...

    def step_done(self, inputs: dict[str, Any]) -> int | None: ...

    def carry_out(self, inputs: dict[str, Any]) -> Record: ...


@dataclass(frozen=True)
class DryRunCall:
    """A call of a stage, and what the run would do at it."""

    stage: str
    label: str
    state: CallState
    """``checked``: what is never cached, and rarely has to act."""
    step: int | None = None
    """Where an interrupted update resumes."""


def _cannot_be_locked(why: str) -> ConfigError:
    return ConfigError(f"the plan cannot be locked: {why}; let a run import it first, then lock the plan")


class StagesEnd(Exception):
    """What follows in the flow calls no stage."""


@dataclass
class DryRun:
    """A dry run under way."""

    storage: ContentAddressedStorage
    """Over a copy that takes what is written."""
    out_of_reach: Callable[[dict[str, Any]], str | None] = lambda inputs: None
    """Why an import with these arguments cannot be done now, if so."""
    calls: list[DryRunCall] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What cannot be known before the run, as sentences."""
    is_open: bool = False
    """Whether nobody knows which stages follow."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the flow's own plan found."""
    settings: Any = None
    """Of the configuration, those that a plan holds."""
    is_cold: bool = False
    """Nothing that runs made before counts, so that what is noted does not change with their progress; the calls are
    noted with their inputs."""
    fetches: bool = False
    """What a run would download, convert or merge first is done, as the run follows at once."""
    planned: list[PlannedCall] = field(default_factory=list)
    imported: list[PlannedInput] = field(default_factory=list)
    _placeholders: set[str] = field(default_factory=set)

    def call(self, stage: DryRunStage, inputs: dict[str, Any]) -> Record:
        """Take the place of a call."""
        label = str(spread_arguments(inputs).get("label", ""))
        if self.is_cold:
            return self._planned_call(stage, label, inputs)
        if not stage.cached:
            self.calls.append(DryRunCall(stage.name, label, "checked"))
            found = self._unstored(stage, inputs)
        else:
            found = stage.find(inputs)
            step = None if found is not None else stage.step_done(inputs)
            state = "cached" if found is not None else "computed" if step is None else "continued"
            self.calls.append(DryRunCall(stage.name, label, state, step))
        return self.placeholder(stage.record) if found is None else found

    def _planned_call(self, stage: DryRunStage, label: str, inputs: dict[str, Any]) -> Record:
        if stage.imports:
            known = len(self.remarks)
            found = stage.carry_out(inputs) if self.fetches else self._unstored(stage, inputs)
            if found is None:
                title = f"{stage.name} {label}".strip()
                raise _cannot_be_locked("; ".join(self.remarks[known:]) or f"{title} is not known before the run")
            self.imported.append(PlannedInput(stage=stage.name, label=label, ids=imported_ids(found)))
            return found
        given = stage.identities(inputs)
        results = [name for name, value in given.items() if self._is_of_a_result(value)]
        self.planned.append(planned_call(stage.name, stage.version, label, given, results))
        return self.placeholder(stage.record)

    def _is_of_a_result(self, value: Any) -> bool:
        if isinstance(value, Mapping):
            return any(map(self._is_of_a_result, value.values()))
        if isinstance(value, list | tuple):
            return any(map(self._is_of_a_result, value))
        return isinstance(value, str) and value in self._placeholders

    def not_kept(self, why: str) -> None:
        """The walk ends, as ``why`` says, where it would go on once a run has filed its inputs."""
        if self.is_cold:
            raise _cannot_be_locked(why)
        self.remarks.append(why)

    def lock(self) -> PlanLock:
        """What this walk, which was cold, found."""
        return PlanLock(
            software=software_versions(),
            settings=self.settings,
            inputs=tuple(self.imported),
            calls=tuple(self.planned),
            is_open=self.is_open,
        )

    def _unstored(self, stage: DryRunStage, inputs: dict[str, Any]) -> Record | None:
        why = self.out_of_reach(inputs) if stage.imports else None
        if why is not None:
            self.remarks.append(why)
            return None
        if stage.in_dry_run is not None:
            return stage.in_dry_run(**inputs)
        return stage.carry_out(inputs) if stage.imports else None

    def placeholder(self, kind: type[Any]) -> Any:
        """A record whose ids belong to nothing; its figures are zeros."""
        hints = typing.get_type_hints(kind, include_extras=False)
        return kind.model_construct(**{name: self._value(hints[name]) for name in kind.model_fields})

    def _value(self, annotation: Any) -> Any:
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin in (typing.Union, types.UnionType):
            return None if type(None) in arguments else self._value(arguments[0])
        if origin is Literal:
            return arguments[0]
        kind = origin or annotation
        if kind is ContentId:
            made = content_id("stand-in/1", len(self._placeholders))
            self._placeholders.add(made)
            return made
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return self.placeholder(kind)
        return {} if kind is Mapping else kind()

    def is_placeholder(self, content: str) -> bool:
        """Whether this id belongs to nothing."""
        return content in self._placeholders


_current: ContextVar[DryRun | None] = ContextVar("rollout_rehearsal", default=None)


@contextmanager
def running_dry(dry_run: DryRun) -> Iterator[None]:
    """Stages that are called inside the block run dry."""
    token = _current.set(dry_run)
    try:
        yield
    finally:
        _current.reset(token)


def current_dry_run() -> DryRun | None:
    """The dry run that this is part of; None: the stages run."""
    return _current.get()


def end_of_stages(remark: str = "") -> None:
    """What follows in a flow calls no stage, or nobody knows which, as ``remark`` says: a dry run ends here."""
    dry_run = _current.get()
    if dry_run is not None:
        dry_run.remarks += [remark] if remark else []
        dry_run.is_open = bool(remark)
        raise StagesEnd


def note_plan(facts: dict[str, Any]) -> None:
    """What a flow's plan found before its first stage."""
    dry_run = _current.get()
    if dry_run is not None:
        dry_run.facts = facts


def note_settings(config: Run) -> None:
    """The configuration of a flow."""
    dry_run = _current.get()
    if dry_run is not None and dry_run.is_cold:
        dry_run.settings = held_settings(config)


def is_placeholder(content: str) -> bool:
    """Whether this id is of a result that a dry run does not have."""
    dry_run = _current.get()
    return dry_run is not None and dry_run.is_placeholder(content)


def dry_run_remark(text: str) -> None:
    """Say something that cannot be known before the run."""
    dry_run = _current.get()
    if dry_run is not None:
        dry_run.remarks.append(text)
