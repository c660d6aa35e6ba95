"""The one decorator of all stages: a Prefect task that is retried by the kind of its error and cached by content.

The cache key of a call is the content id of the stage's name, its version and its inputs. The key leads to the result
record, a small JSON document in object storage, and the record to everything the stage made. A stage ends *Completed*
only after its record was written and read back; a cached record counts only while all it names is still there.
"""

from __future__ import annotations

import functools
import inspect
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Generic, ParamSpec, TypeVar, cast, get_type_hints
from uuid import UUID

from prefect import Task
from prefect.cache_policies import CacheKeyFnPolicy
from prefect.client.schemas.objects import State
from prefect.context import TagsContext, TaskRunContext
from prefect.exceptions import TerminationSignal
from prefect.results import get_result_store
from prefect.task_engine import run_task_sync

from blocks import ContentAddressedStorage
from rollout_core.base import traces
from rollout_core.base.determinism import arithmetic
from rollout_core.base.errors import (
    ConfigError,
    CorruptObject,
    CorruptRef,
    MissingObject,
    NotFound,
    Recoverable,
    RolloutError,
)
from rollout_core.base.ids import ContentId, content_id, is_content_id
from rollout_core.base.settings import locations
from rollout_core.base.stopping import is_stopping, run_interruptibly
from rollout_core.config import identity, non_identity_inputs
from rollout_core.config.inference import StagePlace
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import Lineage, named_in, record_lineage, software_versions
from rollout_core.objects.records import Record
from rollout_core.objects.retention.run_leases import renew_snapshot
from rollout_core.objects.retention.unstored import is_whole
from rollout_core.objects.snapshots import SnapshotStore, progress_ref
from tasks.runtime import connections
from tasks.runtime.arguments import read_arguments, spread_arguments
from tasks.runtime.artifact_sender import SENDER
from tasks.runtime.dry_run import InDryRun, current_dry_run
from tasks.runtime.events import WorkEnd, WorkStart, emit
from tasks.runtime.held_run import HELD
from tasks.runtime.journal import CACHED, CHECKED, StageEntry, at_work, current_journal, stage_logger, title_of
from tasks.runtime.placement import RunsTasks, Submitted, place_of
from tasks.runtime.stage_leases import alone
from tasks.runtime.time_limits import StageTime, in_time, seconds_for

P = ParamSpec("P")
R = TypeVar("R", bound=Record)
T = TypeVar("T")

RETRIES = 3
RETRY_DELAYS_SECONDS = [1.0, 4.0, 16.0]
LABEL, SHARED_AS = "label", "shared_as"
REFRESH, TIMEOUT, MAKERS = "refresh_name", "timeout_seconds", "made_by"
"""Arguments of every task besides those of its stage, which other processes have to know too; in no key. The last one:
of ids among the inputs the keys of the calls of this run that gave them."""
_BY_NAME = inspect.Parameter.KEYWORD_ONLY

_refresh: ContextVar[str | None] = ContextVar("rollout_refresh", default=None)
_computes_again: ContextVar[bool] = ContextVar("rollout_computes_again", default=False)


@dataclass(frozen=True)
class StageRun:
    """What a stage's function may know of its own run."""

    name: str
    key: ContentId
    storage: ContentAddressedStorage
    run_id: str
    """Flow run that the stage belongs to."""
    check: Callable[[], None] = lambda: None
    """Called directly before something is written under the key. Raises Stopped where that is another's to do now."""

    @property
    def objects(self) -> ObjectStore:
        """The object store of this run."""
        return self.storage.objects()


_current_run: ContextVar[StageRun] = ContextVar("rollout_stage_run")


def current_stage() -> StageRun:
    """The running stage; only inside a stage's function."""
    return _current_run.get()


@contextmanager
def refreshing(name: str | None) -> Iterator[None]:
    """Stages called inside the block count as cached only if they were computed under ``name``; None: from anywhere."""
    token = _refresh.set(name)
    try:
        yield
    finally:
        _refresh.reset(token)


def refresh_name() -> str | None:
    """The name under which stages called here are computed again, see `refreshing`."""
    return _refresh.get()


@contextmanager
def computing_again() -> Iterator[None]:
    """Stages that this process runs inside the block are computed, under the keys that they have anyway.

    A stored result stays until the new one replaces it, so what ends on the way leaves it as it was.
    """
    token = _computes_again.set(True)
    try:
        yield
    finally:
        _computes_again.reset(token)


def stage(
    *,
    version: int,
    cached: bool = True,
    retries: int = RETRIES,
    concurrency: str | None = None,
    optional: tuple[str, ...] = (),
    imports: bool = False,
    time: StageTime = "filing",
    place: StagePlace | None = None,
    in_dry_run: InDryRun | None = None,
) -> Callable[[Callable[P, R]], Stage[P, R]]:
    """Make a function from ids and small settings to a `Record` a stage.

    ``version`` is raised by hand when the meaning of the stage changes; old results then no longer count. Stages with
    an effect outside the object store are not ``cached``. ``concurrency`` names a limit: where ``ROLLOUT_LIMITS`` lists
    it, the Prefect server holds runs to ``prefect concurrency-limit create rollout:NAME N``. A parameter named
    ``label`` is for people only and stays out of the cache key, and so do the ``optional`` ones while they are None.
    The fields of a dataclass count as arguments of their own. One that ``imports`` changes nothing but the object
    store, and is quick: a dry run does it on a copy. ``in_dry_run`` takes the place of the function there, with its
    arguments by name; where it returns None the result is not known before the run. ``time``: which field of
    `StageTimeouts` bounds a try. ``place``: which table of a run's ``[placement]`` says where it runs.
    """

    def decorate(function: Callable[P, R]) -> Stage[P, R]:
        return Stage(
            function,
            version=version,
            cached=cached,
            retries=retries,
            concurrency=concurrency,
            optional=optional,
            imports=imports,
            time=time,
            place=place,
            in_dry_run=in_dry_run,
        )

    return decorate


class Stage(Generic[P, R]):
    """A function that runs as a cached, retried Prefect task. Call it like the function."""

    def __init__(
        self,
        function: Callable[P, R],
        *,
        version: int,
        cached: bool,
        retries: int,
        concurrency: str | None,
        optional: tuple[str, ...],
        imports: bool,
        time: StageTime,
        place: StagePlace | None,
        in_dry_run: InDryRun | None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.name = function.__name__
        self.version = version
        self.cached = cached
        self.imports = imports
        self.time: StageTime = time
        self.place: StagePlace | None = place
        self.in_dry_run = in_dry_run
        self._help: Stage[..., Any] | None = None
        self._function = function
        self._signature = inspect.signature(function)
        self.record: type[R] = get_type_hints(function)["return"]
        self._concurrency = concurrency
        self._optional = optional
        self._task: Task[..., dict[str, Any]] = Task(
            self._as_task_function(),
            name=self.name,
            description=inspect.getdoc(function),
            task_run_name=self._task_run_name,  # pyright: ignore[reportArgumentType]
            retries=retries,
            retry_delay_seconds=RETRY_DELAYS_SECONDS,
            retry_condition_fn=should_retry,
            persist_result=cached,
            result_serializer="json",
            cache_result_in_memory=False,
            cache_policy=CacheKeyFnPolicy(cache_key_fn=self._prefect_key) if cached else None,  # pyright: ignore[reportArgumentType]
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_stopping():
            raise stop_signal()
        inputs = self._bind(args, kwargs)
        if (dry_run := current_dry_run()) is not None:
            return cast(R, dry_run.call(self, inputs))
        self._hold(inputs)
        place = place_of(self.place)
        if place is not None and not self._is_stored(inputs):
            with at_work(self.name, self._label(inputs)):
                return place(self, inputs)
        span = self._span(inputs)
        with span.as_current(), at_work(self.name, self._label(inputs)):
            prepared = self._prepare(inputs)
            started = time.monotonic()
            with TagsContext(current_tags=set()):
                state = cast(State[dict[str, Any]], prepared(**inputs, **self._options(inputs), return_state=True))
            return self._result(inputs, state, time.monotonic() - started, span)

    def submit(self, runner: RunsTasks, *args: P.args, **kwargs: P.kwargs) -> Submitted[R]:
        """Run the stage on a started task runner, which may be on another machine, and return at once."""
        assert current_dry_run() is None, "a dry run calls stages one after another"
        inputs = self._bind(args, kwargs)
        self._hold(inputs)
        span, journal = self._span(inputs), current_journal()
        call = None if journal is None else journal.begin(title_of(self.name, self._label(inputs)))
        with span.as_current(), TagsContext(current_tags=set()):
            future = runner.submit(self._prepare(inputs), {**inputs, **self._options(inputs)})

        def result(state: State[Any], seconds: float) -> R:
            if journal is not None:
                journal.end(call)
            return self._result(inputs, state, seconds, span)

        return Submitted(future, result)

    def helped_by(self, stage: Stage[..., Any]) -> None:
        """Workers that have nothing to do run ``stage`` while another one computes a call of this stage. It gets those
        arguments of the call that it has names for, and the call's key as ``shared_as``."""
        self._help = stage

    def help(self, runner: RunsTasks, inputs: dict[str, Any]) -> Submitted[Any]:
        """Start on a worker what helps another with a call of this stage."""
        assert self._help is not None, f"{self.name} shares no samples"
        given = {**inputs, SHARED_AS: self.key(inputs)}
        wanted = [name for name in self._help._signature.parameters if given.get(name) is not None]
        return self._help.submit(runner, **{name: given[name] for name in wanted})

    def run_submitted(self, inputs: dict[str, Any], task_run_id: UUID, context: dict[str, Any]) -> State[Any]:
        """Run what a `submit` of another process handed over, with the storage of this process's settings.

        ``context`` is Prefect's, of the flow run. The same call may have run elsewhere until its process died.
        """
        call, options = _parted(inputs)
        with refreshing(options[REFRESH]):
            prepared = self._prepare(call)
        state = run_task_sync(
            prepared, task_run_id=task_run_id, parameters=inputs, return_type="state", context=context
        )
        assert isinstance(state, State), "asked for the state"
        SENDER.flush(5.0)  # a worker may end once its last task is done
        if state.is_completed():
            # The record itself, so that nobody needs this process's storage to read it.
            state.data = state.result()
        return state

    def _prepare(self, inputs: dict[str, Any]) -> Task[..., dict[str, Any]]:
        storage = connections.result_storage()
        if self.cached:
            retry(lambda: self._forget_if_broken(storage, self.key(inputs)))
        # A tag costs a call to the server for each task run (and, where that keeps its data in SQLite, now and then a
        # refusal and a pause of 2 s), so there is one only where a limit is wanted; those of the flow run stay with it.
        limited = self._concurrency in locations().limits
        tags = [f"rollout:{self._concurrency}"] if limited else []
        prepared = self._task.with_options(tags=tags, refresh_cache=_computes_again.get())
        # Set here, not by with_options, which takes saved blocks only; this one is built from this process's settings.
        prepared.result_storage = storage
        return prepared

    def _hold(self, inputs: dict[str, Any]) -> None:
        if (held := HELD.get()) is not None and not self.imports:
            label, counted = self._label(inputs), self.identities(inputs)
            held.call(self.name, self.version, label, counted, is_cached=self.cached)

    def _label(self, inputs: dict[str, Any]) -> str:
        return str(spread_arguments(inputs).get(LABEL, ""))

    def _span(self, inputs: dict[str, Any]) -> traces.Span:
        if not traces.is_on():
            return traces.Span()
        label = self._label(inputs) or None
        return traces.start_span(self.name, stage=self.name, label=label, key=self.key(inputs) if self.cached else None)

    def _result(self, inputs: dict[str, Any], state: State[dict[str, Any]], seconds: float, span: traces.Span) -> R:
        if state.is_completed():
            record = self.record.model_validate(state.result())
            if (held := HELD.get()) is not None and self.imports:
                held.imported(self.name, self._label(inputs), record)
            name = (state.name or "") if self.cached else CHECKED
            self._note(inputs, name, seconds, record)
            counts = {count: getattr(record, f"num_{count}", None) for count in ("samples", "tokens")}
            span.set(state=name, cached=name == CACHED, **counts)
            span.end()
            return record
        self._note(inputs, state.name or "Failed", seconds, None)
        span.set(state=state.name, cached=False)
        span.fail(state.message or state.name or "")
        span.end()
        state.result(raise_on_failure=True)
        raise RolloutError(f"stage {self.name} ended {state.name}")

    def key(self, inputs: dict[str, Any]) -> ContentId:
        """Identity of a call: same key, same result. A refresh has keys of its own, so what it did so far counts."""
        plain, refresh = self._plain_key(inputs), _refresh.get()
        return plain if refresh is None else content_id("stage-refresh/1", [plain, refresh])

    def _plain_key(self, inputs: dict[str, Any]) -> ContentId:
        return content_id(f"stage/{self.name}/{self.version}", self.identities(inputs))

    def identities(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """By name of argument, what enters the key of a call."""
        counted = {
            name: value
            for name, value in spread_arguments(inputs).items()
            if name != LABEL and not (value is None and name in self._optional)
        }
        return identity(counted)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def _prefect_key(self, context: TaskRunContext, inputs: dict[str, Any]) -> str:
        call, options = _parted(inputs)
        with refreshing(options[REFRESH]):
            return self.key(call)

    def _task_run_name(self, parameters: dict[str, Any]) -> str:
        """What people read; Prefect finds the parameter by its name. The label, and so this, is in no key."""
        return title_of(self.name, str(spread_arguments(parameters).get(LABEL, "")))

    def _as_task_function(self) -> Callable[..., dict[str, Any]]:
        """The function with more arguments: what holds for a call has to reach other processes too."""

        @functools.wraps(self._function)
        def run(**inputs: Any) -> dict[str, Any]:
            call, options = _parted(inputs)
            with refreshing(options[REFRESH]):
                return self._run(call, options).model_dump(mode="json")

        options = {REFRESH: str | None, TIMEOUT: float | None, MAKERS: dict[str, str]}
        parameters = list(self._signature.parameters.values())
        parameters += [inspect.Parameter(name, _BY_NAME, annotation=kind) for name, kind in options.items()]
        signature = inspect.Signature([parameter.replace(kind=_BY_NAME) for parameter in parameters])
        run.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {**self._function.__annotations__, **options, "return": dict}
        return run

    def _options(self, inputs: dict[str, Any]) -> dict[str, Any]:
        journal = current_journal()
        makers = {} if journal is None else journal.makers_for(named_in(identity(spread_arguments(inputs))))
        return {REFRESH: _refresh.get(), TIMEOUT: seconds_for(self.time), MAKERS: makers}

    def _run(self, inputs: dict[str, Any], options: Mapping[str, Any]) -> R:
        context = TaskRunContext.get()
        assert context is not None, "a stage's function runs inside its Prefect task"
        storage = connections.result_storage()
        run = StageRun(self.name, self.key(inputs), storage, str(context.task_run.flow_run_id or context.task_run.id))
        token = _current_run.set(run)
        compute = self._compute_once if self.cached else self._compute_in_time
        try:
            return run_interruptibly(lambda: compute(run, inputs, options), stop_signal)
        finally:
            _current_run.reset(token)

    def _compute(self, run: StageRun, inputs: dict[str, Any]) -> R:
        emit(WorkStart(stage=self.name))
        return self._function(**inputs)  # pyright: ignore[reportCallIssue]

    def _compute_in_time(self, run: StageRun, inputs: dict[str, Any], options: Mapping[str, Any]) -> R:
        with in_time(self.name, self.time, options[TIMEOUT]):
            return self._compute(run, inputs)

    def _compute_once(self, run: StageRun, inputs: dict[str, Any], options: Mapping[str, Any]) -> R:
        with alone(run.key, self.name) as check, in_time(self.name, self.time, options[TIMEOUT]):
            run = replace(run, check=check)
            _current_run.set(run)
            record = None if _computes_again.get() else self._stored(run.storage, run.key)
            if record is None:
                record = self._compute(run, inputs)
                self._store(run, inputs, record, options[MAKERS])
            run.objects.delete_ref(progress_ref(run.key))
            return record

    def _store(self, run: StageRun, inputs: dict[str, Any], record: R, makers: Mapping[str, str]) -> None:
        """Make the record durable before Prefect learns of it: Prefect only logs a failed write of its own."""
        lineage = Lineage(
            stage=self.name,
            version=self.version,
            key=self._plain_key(inputs),
            inputs=identity(spread_arguments(inputs)),
            arguments=non_identity_inputs(spread_arguments(inputs)),
            outputs=record.outputs(),
            created_at=datetime.now(UTC),
            software=software_versions(),
            arithmetic=arithmetic(),
            makers={ContentId(named): ContentId(key) for named, key in makers.items()},
        )
        run.check()
        record_lineage(run.objects, lineage)
        # A refresh's result is from then on also that of runs without one. Its own key is written last: once that is
        # there, nothing is done again.
        for key in dict.fromkeys([self._plain_key(inputs), run.key]):
            run.check()
            document = get_result_store().create_result_record(record.model_dump(mode="json"), key=key).serialize()
            run.storage.write_path(key, document)
        if self._stored(run.storage, run.key) != record:
            raise Recoverable(f"the result of stage {self.name} could not be read back from {run.storage.url}")

    def _stored(self, storage: ContentAddressedStorage, key: ContentId) -> R | None:
        """The result under ``key``. One that cannot be read, or is another's, is forgotten, with a warning."""
        try:
            return self._parsed(storage.read_path(key), key)
        except MissingObject as error:
            if error.content_id == key:  # nobody has computed it
                return None
            problem: Exception = error
        except (CorruptObject, CorruptRef, UnreadableResult) as error:
            problem = error
        stage_logger().warning("the cached result of %s cannot be read (%s); it is computed again", self.name, problem)
        storage.forget(key)
        return None

    def _parsed(self, data: bytes, key: ContentId) -> R:
        try:
            document = json.loads(data)
            if document["metadata"]["storage_key"] != key:
                raise UnreadableResult(f"it is the result of key {document['metadata']['storage_key']}, not of {key}")
            return self.record.model_validate(json.loads(document["result"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableResult(f"it is no {self.record.__name__}: {' '.join(str(error).split())}") from error

    def _is_stored(self, inputs: dict[str, Any]) -> bool:
        """Whether the call needs no worker, because its result is there."""
        storage, key = connections.result_storage(), self.key(inputs)
        if self.cached:
            retry(lambda: self._forget_if_broken(storage, key))
        return self.cached and retry(lambda: self._stored(storage, key)) is not None

    def find(self, inputs: dict[str, Any]) -> R | None:
        """The stored result of a call, if it counts; nothing is changed."""
        storage, key = connections.result_storage(), self.key(inputs)
        try:
            record = self._parsed(storage.read_path(key), key)
        except (MissingObject, CorruptObject, CorruptRef, UnreadableResult):
            return None
        return record if record.is_final and is_whole(record, storage.objects()) else None

    def recorded_call(self, lineage: Lineage) -> dict[str, Any]:
        """The arguments of a call, as they were recorded. Raises ConfigError where this version would make another."""
        if self.version != lineage.version:
            raise ConfigError(
                f"it was made by version {lineage.version} of this stage, and here is version {self.version}"
            )
        inputs = self._bind((), read_arguments(self._function, {**lineage.inputs, **lineage.arguments}))
        if self.key(inputs) != lineage.key and not lineage.arguments:
            raise ConfigError("what is recorded of its settings gives another key; earlier versions kept less")
        return inputs

    def step_done(self, inputs: dict[str, Any]) -> int | None:
        """The step of the last snapshot of a call that was interrupted."""
        objects = connections.objects()
        snapshot = objects.cached_ref(progress_ref(self.key(inputs)))
        try:
            return None if snapshot is None else SnapshotStore(objects).get(snapshot).step
        except (NotFound, CorruptObject):  # the run starts over, too
            return None

    def carry_out(self, inputs: dict[str, Any]) -> R:
        """Call the function outside of a run: only for stages that import."""
        token = _current_run.set(StageRun(self.name, self.key(inputs), connections.result_storage(), "rehearsal"))
        try:
            return self._function(**inputs)  # pyright: ignore[reportCallIssue]
        finally:
            _current_run.reset(token)

    def _forget_if_broken(self, storage: ContentAddressedStorage, key: ContentId) -> None:
        record = self._stored(storage, key)
        if record is None:
            return
        if record.is_final and is_whole(record, storage.objects()):
            storage.use(key)
            for named in (named for kind, named in record.references() if kind == "snapshot"):
                renew_snapshot(storage.objects(), named)
            return
        if record.is_final:
            stage_logger().warning(
                "the cached result of %s names objects that are no longer in storage; it is computed again", self.name
            )
        storage.forget(key)

    def _note(self, inputs: dict[str, Any], state: str, seconds: float, result: R | None) -> None:
        inputs = spread_arguments(inputs)
        label = str(inputs.get(LABEL, ""))
        emit(WorkEnd(stage=self.name, label=label, state=state, seconds=seconds))
        if (journal := current_journal()) is not None:
            ids = tuple(ContentId(value) for value in inputs.values() if is_content_id(value))
            records = (item for value in inputs.values() if isinstance(value, Record) for item in value.outputs())
            outputs = () if result is None else result.outputs()
            key = self._plain_key(inputs) if self.cached else None
            named = frozenset(named_in(identity(inputs)))
            entry = StageEntry(
                self.name, label, state, seconds, (*ids, *records), outputs, result, key=key, named=named
            )
            journal.add(entry)


def _parted(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a stage, and the options of every task."""
    call = dict(inputs)
    # A flow's process of an earlier version, which is still at work, gives no makers.
    return call, {MAKERS: {}} | {name: call.pop(name) for name in (REFRESH, TIMEOUT, MAKERS) if name in call}


class UnreadableResult(RolloutError):
    """What is stored under a stage's key is not its result."""


def stop_signal() -> TerminationSignal:
    """What Prefect's handler of SIGTERM raises: the run then ends Crashed, or Cancelled where that was requested."""
    return TerminationSignal(signal=signal.SIGTERM)


def retry(call: Callable[[], T]) -> T:
    """The result of ``call``, which is retried as a stage is, with growing pauses, while it raises Recoverable."""
    for delay in RETRY_DELAYS_SECONDS:
        try:
            return call()
        except Recoverable as error:
            if is_stopping():
                raise
            stage_logger().warning("%s; retrying in %g s", error, delay)
            time.sleep(delay)
    return call()


def should_retry(task: Task[..., Any], task_run: Any, state: Any) -> bool:
    """Retry passing faults only, after the delay their hint asks for; nothing once the process is to stop."""
    if is_stopping():
        return False
    error = state.result(raise_on_failure=False)
    if isinstance(error, Recoverable):
        # The task object belongs to this call alone (with_options), so its delay may follow the error's hint.
        task.retry_delay_seconds = error.hint.delay_for_try(max(0, task_run.run_count - 1))
        return True
    return isinstance(error, OSError) and not isinstance(error, RolloutError)
