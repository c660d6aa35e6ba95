"""`rollout doctor status`: how scheduled runs fare, and what needs a person.

Times are those of the Prefect server, by its clock. Nothing is started or changed, so a monitor may call it every
minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterEndTime,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterNextScheduledStartTime,
    FlowRunFilterParentTaskRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import DeploymentSchedule, FlowRun, StateType, Worker as PrefectWorker, WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.client.schemas.sorting import FlowRunSort
from pydantic import BaseModel

from deployments.pools import POOL_TYPE, POOLS
from deployments.probes import (
    LEAST_FREE_BYTES,
    MOST_CHARACTERS,
    REQUEST_SECONDS,
    Database,
    Look,
    Server,
    Storage,
    database_in_trouble,
    look_at_database,
    look_at_storage,
    look_for_silent,
    named,
    printable,
    section,
    span,
    storage_in_trouble,
    table,
    when,
)
from rollout_core.base.errors import RolloutError
from rollout_core.base.processes import gibibytes
from rollout_core.base.settings import locations, without_passwords
from rollout_core.serving.listed import servers_here
from tasks.runtime.scheduled_runs import SKIPPED

LATE_AFTER = timedelta(minutes=1)
"""A run that should have begun so long ago is late."""
STUCK_AFTER = timedelta(minutes=10)
"""A run that a worker took so long ago, and that has not begun, is late too. By then even a large image is there."""
RECENT = timedelta(hours=24)
"""Failures of this time are listed, and workers that were seen in it."""
NEW_AFTER = timedelta(minutes=3)
"""So long after a change the server's services have done with it: runs are scheduled, overdue ones marked."""
MISSED_HEARTBEATS = 3
"""After so many a worker counts as gone; also for the server, which takes its time to say so."""
PAGE = 200
"""Most items that the server gives at once."""
MOST_RUNS = 100
"""Of each kind in a report."""
JUDGED_RUNS = 20
"""How far back the last run is looked for that says something."""
ENDED = [StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED]
BAD = [StateType.FAILED, StateType.CRASHED]

Item = TypeVar("Item")


class Worker(BaseModel):
    """A worker as its pool knows it."""

    name: str
    online: bool
    last_heartbeat: datetime | None
    age_seconds: float | None


class Pool(BaseModel):
    """A work pool, with the workers that are online or were so of late."""

    name: str
    type: str
    paused: bool
    needs_worker: bool
    """Whether its runs wait for a worker that we start."""
    concurrency_limit: int | None
    active_slots: int | None
    workers: list[Worker]
    num_gone: int
    """Workers that were not seen of late."""


class Run(BaseModel):
    """A flow run."""

    id: UUID
    name: str
    of: str
    """Flow and deployment, or the flow alone for a run that a command started."""
    state: str
    type: StateType
    """Of the state, whose name may be another."""
    message: str
    auto_scheduled: bool
    due: datetime | None
    start: datetime | None
    end: datetime | None
    since: datetime | None
    """When it came to this state."""
    seconds: float
    """That it ran, so far, in all its tries."""
    silent_seconds: float | None = None
    """For how long nothing was heard of a run under way, where that is long."""


class Deployment(BaseModel):
    """A deployment with a schedule."""

    id: UUID
    name: str
    pool: str | None
    schedules: list[str]
    """The active ones; none where all are paused, or the deployment is."""
    num_paused: int
    concurrency_limit: int | None
    next_run: datetime | None
    should_have_next: bool
    """Whether the server should have made a next run by now."""
    last_run: Run | None
    telling_run: Run | None
    """The last one that says how it fares: not one that was cancelled, that left its work to another, or that a person
    tried in vain."""
    running: list[Run]


class Work(BaseModel):
    """What the Prefect server knows."""

    pools: list[Pool] = []
    deployments: list[Deployment] = []
    late: list[Run] = []
    failed: list[Run] = []
    """Failed or crashed of late, and not tried again."""
    waiting: list[Run] = []
    """Suspended until a person decides."""


class Serving(BaseModel):
    """A server of `rollout serve` on this machine."""

    name: str
    url: str
    trouble: str | None = None
    """Why nothing answers there, or something else than the latest model."""
    model: str | None = None
    since: datetime | None = None
    follows: str | None = None


class Status(Work):
    """All that `rollout doctor status` reports."""

    checked_at: datetime
    server: Server
    storage: Storage
    database: Database
    serving: list[Serving] = []
    problems: list[str] = []
    """What needs a person, a line each."""


def look(server: Server, *, debug: bool = False) -> Status:
    """All of it, within seconds, whatever is away."""
    now = datetime.now(UTC) + timedelta(seconds=server.clock_offset_seconds or 0)
    storage = Look(look_at_storage, debug=debug)
    database = Look(look_at_database, debug=debug)
    serving = Look(look_at_servers, debug=debug)
    work = Work()
    if server.trouble is None:
        changes, work = Look(lambda: read_work(now), debug=debug).result(
            lambda trouble: ({"trouble": f"the Prefect server at {server.address} {trouble}"}, Work())
        )
        server = server.model_copy(update=changes)
    status = Status(
        checked_at=now,
        server=server,
        storage=storage.result(storage_in_trouble),
        database=database.result(database_in_trouble),
        serving=serving.result(lambda trouble: []),
        **dict(work),
    )
    running = [str(run.id) for found in status.deployments for run in found.running]
    if running and status.storage.trouble is None:
        silent = Look(lambda: look_for_silent(running), debug=debug).result(lambda trouble: {})
        status = status.model_copy(update={"deployments": [_with_silence(each, silent) for each in status.deployments]})
    return status.model_copy(update={"problems": list(_problems(status))})


def look_at_servers() -> list[Serving]:
    """What the servers of this machine say of themselves."""
    found: list[Serving] = []
    for server in servers_here(locations().cache):
        serving = Serving(name=server.name, url=server.url)
        try:
            said = httpx.get(f"{server.url}/ready", timeout=REQUEST_SECONDS).json()
            found.append(
                serving.model_copy(
                    update={
                        "trouble": said.get("why") or said.get("problem"),
                        "model": said["model"],
                        "since": datetime.fromisoformat(said["since"]),
                        "follows": said.get("follows"),
                    }
                )
            )
        except (httpx.HTTPError, ValueError, KeyError) as error:
            found.append(serving.model_copy(update={"trouble": f"it does not say whether it is ready ({error})"}))
    return found


def _with_silence(deployment: Deployment, silent: Mapping[str, float]) -> Deployment:
    running = [run.model_copy(update={"silent_seconds": silent.get(str(run.id))}) for run in deployment.running]
    return deployment.model_copy(update={"running": running})


# What the server knows


def read_work(now: datetime) -> tuple[dict[str, str], Work]:
    """The server's version, as a change of `Server`, and what it knows.

    Raises RolloutError where the server of Prefect's settings does not answer as one does.
    """
    try:
        with get_client(sync_client=True) as client:
            return _Reader(client, now).read()
    except httpx.HTTPStatusError as error:
        code, path = error.response.status_code, error.request.url.path
        hint = "; set PREFECT_API_AUTH_STRING or PREFECT_API_KEY" if code in (401, 403) else ""
        raise RolloutError(f"answers {code} to {path}{hint}") from error
    except httpx.TimeoutException as error:
        raise RolloutError(f"did not answer within {REQUEST_SECONDS} s; see its log and its load") from error
    except ValueError as error:
        kind = type(error).__name__
        raise RolloutError(f"does not answer as a Prefect server of this version does ({kind})") from error


def all_pages(read: Callable[..., Sequence[Item]], **filters: Any) -> Iterator[Item]:
    """Everything that a method of the client reads page by page."""
    offset = 0
    while True:
        page = read(limit=PAGE, offset=offset, **filters)
        yield from page
        offset += len(page)
        if len(page) < PAGE:
            return


class _Reader:
    """One look at the server."""

    def __init__(self, client: SyncPrefectClient, now: datetime) -> None:
        self._client = client
        self._now = now
        self._names: dict[UUID, str] = {}
        """Of flows and deployments."""

    def read(self) -> tuple[dict[str, str], Work]:
        """The server's version, and the rest."""
        version = {"version": self._client.api_version()}
        self._names = {flow.id: flow.name for flow in all_pages(self._client.read_flows)}
        deployments = list(all_pages(self._client.read_deployments))
        self._names |= {found.id: f"{self._names.get(found.flow_id, '?')}/{found.name}" for found in deployments}
        return version, Work(
            pools=[self._pool(pool) for pool in all_pages(self._client.read_work_pools)],
            deployments=[self._deployment(found) for found in deployments if found.schedules],
            late=self._late(),
            failed=self._failed(),
            waiting=self._waiting(),
        )

    def _pool(self, pool: WorkPool) -> Pool:
        # The one that was seen last comes first.
        known = [self._worker(item) for item in self._client.read_workers_for_work_pool(pool.name, limit=PAGE)]
        shown = [item for item in known if item.online or _within(item.age_seconds, RECENT)]
        return Pool(
            name=pool.name,
            type=pool.type,
            paused=pool.is_paused,
            needs_worker=not (pool.is_push_pool or pool.is_managed_pool),
            concurrency_limit=pool.concurrency_limit,
            active_slots=pool.active_slots,
            workers=shown,
            num_gone=len(known) - len(shown),
        )

    def _worker(self, worker: PrefectWorker) -> Worker:
        seen = worker.last_heartbeat_time
        age = None if seen is None else (self._now - seen).total_seconds()
        patience = MISSED_HEARTBEATS * timedelta(seconds=worker.heartbeat_interval_seconds or 30)
        online = worker.status == "ONLINE" and _within(age, patience)
        return Worker(name=worker.name, online=online, last_heartbeat=seen, age_seconds=age)

    def _deployment(self, found: DeploymentResponse) -> Deployment:
        active = [] if found.paused else [item for item in found.schedules if item.active]
        of_it = FlowRunFilterDeploymentId(any_=[found.id])
        coming = FlowRunFilterNextScheduledStartTime(after_=self._now)  # pyright: ignore[reportArgumentType]
        scheduled = FlowRunFilter(
            deployment_id=of_it, state=_of([StateType.SCHEDULED]), next_scheduled_start_time=coming
        )
        upcoming = self._runs(scheduled, FlowRunSort.NEXT_SCHEDULED_START_TIME_ASC, JUDGED_RUNS)
        ended = self._runs(FlowRunFilter(deployment_id=of_it, state=_of(ENDED)), FlowRunSort.END_TIME_DESC, JUDGED_RUNS)
        at_work = FlowRunFilter(deployment_id=of_it, state=_of([StateType.RUNNING]))
        limit = found.global_concurrency_limit
        changes = [item.updated for item in (found, *active) if item.updated is not None]
        is_settled = all(self._now - changed > NEW_AFTER for changed in changes)
        return Deployment(
            id=found.id,
            name=self._names[found.id],
            pool=found.work_pool_name,
            schedules=[schedule_text(item) for item in active],
            num_paused=len(found.schedules) - len(active),
            concurrency_limit=limit.limit if limit is not None and limit.active else None,
            next_run=next((run.next_scheduled_start_time for run in upcoming if run.auto_scheduled), None),
            should_have_next=is_settled and any(_never_ends(item) for item in active),
            last_run=self._run(ended[0]) if ended else None,
            telling_run=next((self._run(run) for run in ended if _tells(run)), None),
            running=[self._run(run) for run in self._runs(at_work, FlowRunSort.START_TIME_ASC, MOST_RUNS)],
        )

    def _late(self) -> list[Run]:
        due = FlowRunFilterNextScheduledStartTime(before_=self._now - LATE_AFTER)  # pyright: ignore[reportArgumentType]
        waiting = self._runs(
            FlowRunFilter(state=_of([StateType.SCHEDULED]), next_scheduled_start_time=due),
            FlowRunSort.NEXT_SCHEDULED_START_TIME_ASC,
            MOST_RUNS,
        )
        long_due = FlowRunFilterExpectedStartTime(before_=self._now - STUCK_AFTER)  # pyright: ignore[reportArgumentType]
        taken = self._runs(
            FlowRunFilter(state=_of([StateType.PENDING]), expected_start_time=long_due),
            FlowRunSort.EXPECTED_START_TIME_ASC,
            MOST_RUNS,
        )
        stuck = [run for run in taken if run.state is None or self._now - run.state.timestamp > STUCK_AFTER]
        return [self._run(run) for run in [*waiting, *stuck]]

    def _failed(self) -> list[Run]:
        ended = FlowRunFilterEndTime(after_=self._now - RECENT)  # pyright: ignore[reportArgumentType]
        of_itself = FlowRunFilterParentTaskRunId(is_null_=True)  # a part of a run fails with it
        wanted = FlowRunFilter(state=_of(BAD), end_time=ended, parent_task_run_id=of_itself)
        return [self._run(run) for run in self._runs(wanted, FlowRunSort.END_TIME_DESC, MOST_RUNS)]

    def _waiting(self) -> list[Run]:
        wanted = FlowRunFilter(state=_of([StateType.PAUSED]))
        return [self._run(run) for run in self._runs(wanted, FlowRunSort.START_TIME_ASC, MOST_RUNS)]

    def _runs(self, wanted: FlowRunFilter, sort: FlowRunSort, limit: int) -> list[FlowRun]:
        return self._client.read_flow_runs(flow_run_filter=wanted, sort=sort, limit=limit)

    def _run(self, run: FlowRun) -> Run:
        of = self._names.get(run.deployment_id) if run.deployment_id is not None else None
        message = (run.state.message if run.state is not None else None) or ""
        return Run(
            id=run.id,
            name=run.name,
            of=of or self._names.get(run.flow_id, "?"),
            state=run.state_name or "?",
            type=run.state_type or StateType.PENDING,
            message=without_passwords(" ".join(message.split()))[:MOST_CHARACTERS],
            auto_scheduled=run.auto_scheduled,
            due=run.next_scheduled_start_time or run.expected_start_time,
            start=run.start_time,
            end=run.end_time,
            since=run.state.timestamp if run.state is not None else None,
            seconds=run.estimated_run_time.total_seconds(),
        )


def _of(types: list[StateType]) -> FlowRunFilterState:
    return FlowRunFilterState(type=FlowRunFilterStateType(any_=types))


def _within(seconds: float | None, limit: timedelta) -> bool:
    return seconds is not None and seconds <= limit.total_seconds()


def _tells(run: FlowRun) -> bool:
    """Whether a run that ended says how its deployment fares."""
    if run.state_type == StateType.COMPLETED:
        return run.state_name != SKIPPED
    return run.state_type in BAD and run.auto_scheduled


def _never_ends(item: DeploymentSchedule) -> bool:
    return isinstance(item.schedule, CronSchedule | IntervalSchedule)


def schedule_text(item: DeploymentSchedule) -> str:
    """A schedule as people read it."""
    schedule = item.schedule
    if isinstance(schedule, CronSchedule):
        return f"{schedule.cron} {schedule.timezone or 'UTC'}"
    if isinstance(schedule, IntervalSchedule):
        return f"every {span(schedule.interval.total_seconds())}"
    return " ".join(str(getattr(schedule, "rrule", "?")).split())


# What needs a person


def _problems(status: Status) -> Iterator[str]:
    if status.server.trouble:
        yield status.server.trouble
    for kind, place in (("storage", status.storage), ("database", status.database)):
        if place.trouble:
            yield f"{kind} {named(place.address, place.trouble)}"
    if status.storage.free_bytes is not None and status.storage.free_bytes < LEAST_FREE_BYTES:
        yield f"storage {status.storage.address}: only {gibibytes(status.storage.free_bytes)} are free on its disk"
    for each in status.serving:
        if each.trouble:
            yield f"serving {each.name} at {each.url}: {each.trouble}"
    yield from problems_of_workers(status)
    yield from problems_of_runs(status)


def problems_of_runs(status: Status) -> Iterator[str]:
    """Late, failed and silent runs, and schedules without a next one."""
    for of, runs in groupby(sorted(status.late, key=lambda run: run.of), key=lambda run: run.of):
        first, *others = runs
        more = f"; so are {len(others)} more" if others else ""
        yield f"late: run {first.name!r} of {of} was due {when(first.due, status.checked_at)}, is {first.state}{more}"
    for deployment in status.deployments:
        run = deployment.telling_run
        if deployment.schedules and run is not None and run.type in BAD:
            yield (
                f"{deployment.name}: its last scheduled run {run.name!r} {run.state} "
                f"{when(run.end, status.checked_at)}: {run.message or 'no message'}"
            )
        for run in deployment.running:
            if run.silent_seconds is not None:
                yield (
                    f"{deployment.name}: run {run.name!r} was last heard of {span(run.silent_seconds)} ago; is its "
                    "machine there? A lost run is tried again by itself"
                )
        if deployment.should_have_next and deployment.next_run is None:
            yield (
                f"{deployment.name}: its schedule is active, and no run is scheduled; is the server's schedule service "
                "at work (rollout doctor)?"
            )


def problems_of_workers(status: Status) -> Iterator[str]:
    """Pools that active schedules count on, and that do nothing."""
    pools = {pool.name: pool for pool in status.pools}
    users: dict[str, list[str]] = {}
    for deployment in status.deployments:
        if deployment.schedules and deployment.pool is not None:
            users.setdefault(deployment.pool, []).append(deployment.name)
    for name, names in users.items():
        pool, used_by = pools.get(name), f"which scheduled runs of {', '.join(names)} need"
        if pool is None:
            create = "run python -m deployments.pools"
            if name not in POOLS:
                create = f"create it: prefect work-pool create {name} --type {POOL_TYPE}, or another type"
            yield f"work pool {name}, {used_by}, does not exist; {create}"
        elif pool.paused:
            yield f"work pool {name}, {used_by}, is paused; resume it: prefect work-pool resume {name}"
        elif pool.needs_worker and not any(worker.online for worker in pool.workers):
            start = "rollout ops worker" if pool.type == POOL_TYPE else "prefect worker start"
            yield f"work pool {name}, {used_by}, has no worker online; start one: {start} --pool {name}"


# For people


def text(status: Status) -> str:
    """For people; what needs one comes last, each line behind a ``!``."""
    now = status.checked_at
    server, storage, database = status.server, status.storage, status.database
    rollouts = database.rollouts and {name: count for name, count in database.rollouts.items() if count}
    counts = ", ".join(f"{count:,} {name}" for name, count in (rollouts or {}).items())
    held = "no store there yet" if database.rollouts is None else f"rollouts: {counts or 'none'}"
    disk = "" if storage.free_bytes is None else f", {gibibytes(storage.free_bytes)} free"
    writable = ", writable" if storage.writable else ""
    parts = [
        ["server", server.address or "-", "" if server.trouble else f"Prefect {server.version}, healthy"],
        ["storage", storage.address, "" if storage.trouble else f"readable{writable}{disk}"],
        ["database", database.address, "" if database.trouble else f"reachable; {held}"],
    ]
    lines = [f"{now:%Y-%m-%d %H:%M:%S} UTC", *table([[*row[:2], row[2] or "TROUBLE"] for row in parts])]
    if status.serving:
        rows = (
            [each.name, each.url, (each.model or "-")[:12], when(each.since, now), each.follows or "-"]
            for each in status.serving
        )
        lines += section("serving here", ["name", "address", "model", "since", "follows"], rows)
    if server.trouble is None:
        lines += section("work pools", ["name", "type", "state", "slots", "workers"], map(_pool_row, status.pools))
        lines += section(
            "scheduled deployments",
            ["name", "schedule", "next", "last", "running"],
            (_deployment_row(deployment, now) for deployment in status.deployments),
        )
        lines += section(
            "late", ["run", "of", "state", "due"], ([r.name, r.of, r.state, when(r.due, now)] for r in status.late)
        )
        lines += section(
            "waits for a person", ["run", "of", "since"], ([r.name, r.of, when(r.since, now)] for r in status.waiting)
        )
        lines += section(
            f"failed in the last {span(RECENT.total_seconds())}",
            ["run", "of", "state", "ended", "message"],
            ([r.name, r.of, r.state, when(r.end, now), r.message] for r in status.failed),
        )
    lines += ["", *(f"! {problem}" for problem in status.problems)] if status.problems else ["", "all is well"]
    return "\n".join(printable(line) for line in lines)


def _pool_row(pool: Pool) -> list[str]:
    slots = "-" if pool.concurrency_limit is None else f"{pool.active_slots or 0} of {pool.concurrency_limit}"
    workers = [
        f"{worker.name} {'online' if worker.online else 'offline'}, seen {span(worker.age_seconds or 0)} ago"
        for worker in pool.workers
    ]
    workers += [f"{pool.num_gone} not seen for {span(RECENT.total_seconds())}"] if pool.num_gone else []
    is_worked = not pool.needs_worker or any(worker.online for worker in pool.workers)
    state = "paused" if pool.paused else "at work" if is_worked else "no worker online"
    return [pool.name, pool.type, state, slots, "; ".join(workers) or "none"]


def _running(run: Run, now: datetime) -> str:
    silent = "" if run.silent_seconds is None else f", last heard of {span(run.silent_seconds)} ago"
    return f"{run.name} since {when(run.start, now)}{silent}"


def _deployment_row(deployment: Deployment, now: datetime) -> list[str]:
    last = deployment.last_run
    paused = [f"{deployment.num_paused} paused"] if deployment.num_paused else []
    return [
        deployment.name,
        "; ".join([*deployment.schedules, *paused]),
        when(deployment.next_run, now),
        "none" if last is None else f"{last.state} {when(last.end, now)}, took {span(last.seconds)}",
        ", ".join(_running(run, now) for run in deployment.running) or "-",
    ]
