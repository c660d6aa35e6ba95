"""Around every flow: its plan, tags, the place of its stages, its journal and summary, and the recomputation of what
storage lost.

A blob whose bytes do not match its id is set aside when it is read; the stage that made it then no longer counts as
cached. So running the flow's body again computes exactly that, and what follows from it.

A worker's run that is asked to stop gives itself back to the server, for the next worker that has time.
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, TerminationSignal
from prefect.states import AwaitingRetry, Crashed

import tasks.runtime.scheduled_runs  # noqa: F401 - a run that loses its place continues
from rollout_core.base import logs, traces
from rollout_core.base.determinism import require_numerics
from rollout_core.base.errors import CorruptObject, Fatal, MissingObject, OtherOutcome
from rollout_core.base.locks import sweep_scratch
from rollout_core.base.stopping import is_stopping, watching
from rollout_core.config import Run
from rollout_core.launch.own_loss import with_code
from rollout_core.objects.addresses import with_whole_ids
from rollout_core.objects.retention.run_leases import lease
from rollout_core.plans.lock import read_lock
from rollout_core.store.reachable import Connections
from tasks.runtime.artifact_sender import SENDER
from tasks.runtime.connections import current_connections, objects, working_folder
from tasks.runtime.dask.placed_stages import placed
from tasks.runtime.dry_run import current_dry_run, note_plan, note_settings
from tasks.runtime.held_run import HELD, HeldRun, holding
from tasks.runtime.journal import Journal, keep_journal, stage_logger
from tasks.runtime.run_record import WORKERS_RUN, Recorder
from tasks.runtime.stage import refreshing, retry
from tasks.runtime.summary import RunSummary
from tasks.runtime.time_limits import limiting
from tasks.runtime.walking import walk

R = TypeVar("R")
RunT = TypeVar("RunT", bound=Run)
P = ParamSpec("P")
Plan = Callable[[Any, Path, Connections], dict[str, Any]]
"""Checks a configuration, with the folder where its relative paths start, and returns what it found, for a dry run."""

TRIES_FOR_AN_OBJECT = 3
SEND_SECONDS = 10.0
"""For the last artifacts of a run, to a server that answers."""
PATIENCE_SECONDS = 600.0
"""For a server that does not answer at the end of a worker's run: it is being restarted. That of a command is not."""
HANDED_BACK = "handed back: "
"""Begins the message of the state of such runs."""
MOST_HAND_BACKS = 100
"""Of one run. Something that stops it again and again, such as a guard of the machine's memory, must come to an end."""


def pipeline(
    plan: Plan | None, *, closes: Sequence[Callable[[], object]] = ()
) -> Callable[[Callable[Concatenate[RunT, Journal, P], R]], Callable[Concatenate[RunT, P], R]]:
    """Make the body of a flow, of a configuration and a journal, a function of the configuration that runs it.

    The configuration's short ids are made whole and ``plan`` checks it before anything starts; the body, whose
    configuration also has the code of a loss of the user's own, runs as of `recompute_missing`. Whatever comes of it,
    each of ``closes`` ends what the process kept for the run.
    """

    def decorate(body: Callable[Concatenate[RunT, Journal, P], R]) -> Callable[Concatenate[RunT, P], R]:
        @functools.wraps(body)
        def run(config: RunT, *args: P.args, **kwargs: P.kwargs) -> R:
            whole = retry(lambda: with_whole_ids(config, working_folder(), objects))
            if plan is not None:
                note_plan(retry(functools.partial(plan, whole, working_folder(), current_connections())))
            note_settings(whole)
            coded = with_code(whole, working_folder())

            def run_body(journal: Journal) -> R:
                return body(coded, journal, *args, **kwargs)

            with ExitStack() as stack:
                for close in reversed(closes):
                    stack.callback(close)
                if (held := _held_to_its_plan(whole, run_body)) is not None:
                    stack.enter_context(holding(held))
                return recompute_missing(run_body, whole)

        return run

    return decorate


def _held_to_its_plan(config: Run, body: Callable[[Journal], object]) -> HeldRun | None:
    """The plan that ``run.locked`` names. Raises ConfigError where the run would differ from it as things are now."""
    if config.run.locked is None or current_dry_run() is not None:
        return None
    path = working_folder() / config.run.locked
    held = HeldRun(read_lock(path), path)

    def rehearse() -> None:
        note_settings(config)
        recompute_missing(body, config)

    held.check(retry(lambda: walk(rehearse, is_cold=True, fetches=True).lock()))
    stage_logger().info("the run is held to plan %s of %s", held.plan.id, path)
    return held


def recompute_missing(body: Callable[[Journal], R], config: Run) -> R:
    """Run a flow's ``body``; again for every object that it finds damaged or missing, until one is found a third time.

    The flow run gets the tags of ``config``. What a refresh computed stays cached for its next try, and for `prefect
    flow-run retry`. Raises ConfigError where this process does not compute as ``config`` asks.
    """
    logs.require_form()
    require_numerics(config.numerics)
    run = config.run
    if current_dry_run() is not None:
        with refreshing("rehearsal" if run.refresh is True else run.refresh or None):
            return body(Journal())
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("recompute_missing is called inside a flow")
    flow_run = context.flow_run
    if set(run.tags) - set(flow_run.tags):
        with get_client(sync_client=True) as client:
            client.update_flow_run(flow_run.id, tags=sorted({*flow_run.tags, *run.tags}))
    sweep_scratch()
    if WORKERS_RUN in os.environ:
        end_task_runs(flow_run.id)
    # The id of a flow run stays the same when it is retried.
    name = f"flow run {flow_run.id}" if run.refresh is True else run.refresh or None
    # A worker starts a process for each run, which is then that run's alone.
    with watching(ends_process=WORKERS_RUN in os.environ), ExitStack() as held:
        summary = RunSummary(config)
        named = context.flow.name if context.flow else run.name
        recorder = Recorder(config, named, flow_run, summary)
        try:
            # Housekeeping leaves alone what a run under way has used or made.
            retry(lambda: held.enter_context(lease(objects(), f"{flow_run.name} (flow run {flow_run.id})")))
            recorder.start()
            facts = {"run": run.name, "flow_run": str(flow_run.id), "try": flow_run.run_count}
            with (
                limiting(config.timeouts),
                traces.trace_of_run(named, str(flow_run.id), **facts),
                placed(config, str(flow_run.id)),
            ):
                result = _repeat(body, name, summary)
            summary.end()
            return result
        except BaseException as error:
            interruption = _interruption_behind(error)
            summary.fail(interruption)
            recorder.end()  # before another worker may have the run
            if is_stopping() and WORKERS_RUN in os.environ and _gives_itself_back(flow_run.id):
                # Prefect reports nothing of a run that ends so.
                raise Abort("the run was handed back") from None
            if interruption is error:
                raise
            raise interruption from None
        finally:
            _say_what_was_not_planned()
            recorder.end()
            _end_showing(PATIENCE_SECONDS if WORKERS_RUN in os.environ else SEND_SECONDS)


def _say_what_was_not_planned() -> None:
    held = HELD.get()
    if held is not None and (more := held.unplanned()):
        shown = ", ".join(more[:10]) + (", ..." if len(more) > 10 else "")
        stage_logger().warning("calls that plan %s does not have: %d: %s", held.plan.id.short, len(more), shown)


def forget_stages(journal: Journal, most: int) -> None:
    """For a run without end: keep the last ``most`` stages alone, and no state of their task runs, which Prefect keeps
    for others that may depend on them."""
    del journal.entries[:-most]
    context = FlowRunContext.get()
    if context is not None:
        context.run_results.clear()


def end_task_runs(run_id: UUID) -> None:
    """Have the task runs of a run be Crashed whose process was killed. Nobody else says so, and the server and its UI
    would have them Running for ever. What the server refuses is a warning: the run is worth more."""
    unfinished = TaskRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING])
    try:
        with get_client(sync_client=True) as client:
            for task_run in client.read_task_runs(
                flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])),
                task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=unfinished, name=None)),
            ):
                ended = Crashed(message="the process that ran it was killed")
                client.set_task_run_state(task_run.id, ended, force=True)
    except Exception as error:  # noqa: BLE001 - any of the client's
        stage_logger().warning("task runs of earlier tries may be shown as Running for ever: %s", error)


def _interruption_behind(error: BaseException) -> BaseException:
    """The interruption that ``error`` came of, otherwise ``error``.

    What a signal's handler raises in the midst of an import or a clean-up may arrive as an error of that, and the run
    would count as failed.
    """
    behind: BaseException | None = error
    seen: set[int] = set()
    # An error that is raised in several places may be a cause of its own cause.
    while behind is not None and id(behind) not in seen:
        if isinstance(behind, (TerminationSignal, KeyboardInterrupt)):
            return behind
        seen.add(id(behind))
        behind = behind.__cause__ or behind.__context__
    return error


def _gives_itself_back(run_id: UUID) -> bool:
    """Have this run, which was asked to stop, started again; False where it is not, as when it is cancelled."""
    try:
        with get_client(sync_client=True) as client:
            run = client.read_flow_run(run_id)
            return run.state is not None and run.state.is_running() and hand_back(client, run, "its worker stops")
    except Exception as error:  # noqa: BLE001 - any of the client's; Prefect then ends the run Crashed, if it can
        stage_logger().warning("the run could not be handed back: %s", error)
        return False


def hand_back(client: SyncPrefectClient, run: FlowRun, reason: str) -> bool:
    """Have a run of a deployment started again by any worker of its pool, without counting that as a further try.

    A machine that is taken away is no fault of the run, whose tries are for crashes. False where that was done so often
    already that something is wrong with the run after all, or where it has no deployment, whose worker could take it.
    """
    handed = [state for state in client.read_flow_run_states(run.id) if (state.message or "").startswith(HANDED_BACK)]
    if run.deployment_id is None or len(handed) >= MOST_HAND_BACKS:
        return False
    # To the server it is a run that resumes after a pause, whose start is not counted.
    client.update_flow_run(run.id, empirical_policy=run.empirical_policy.model_copy(update={"resuming": True}))
    client.set_flow_run_state(run.id, AwaitingRetry(message=HANDED_BACK + reason), force=True)
    return True


def _end_showing(patience: float) -> None:
    """Wait until the Prefect server has what the run shows; up to ``patience`` seconds where it does not answer.

    Prefect itself tries for a minute to tell the server how the run ended. A process that gives up would leave a run
    that is Running for ever, though all it made is stored.
    """
    traces.flush()
    started = time.monotonic()
    left = SENDER.flush(SEND_SECONDS)
    if left and SENDER.is_server_away and patience > SEND_SECONDS:
        stage_logger().warning("the run waits at its end for the Prefect server, at most %.0f s", patience)
    while left and SENDER.is_server_away and time.monotonic() < started + patience and not is_stopping():
        left = SENDER.flush(1.0)
    if left:
        stage_logger().warning("%d artifacts and events have not reached the Prefect server", left)


def _repeat(body: Callable[[Journal], R], name: str | None, summary: RunSummary) -> R:
    found: Counter[str] = Counter()
    while True:
        with keep_journal(missing=found) as journal, refreshing(name):
            summary.note(journal)
            try:
                return body(journal)
            except (CorruptObject, MissingObject) as error:
                # Each object that is set aside is one less, so this ends, however many are damaged. What comes out
                # otherwise has a new id each time, so it counts by what it is.
                what = error.what if isinstance(error, OtherOutcome) else error.content_id
                found[what] += 1
                if is_stopping():
                    raise
                if found[what] == TRIES_FOR_AN_OBJECT:
                    if isinstance(error, OtherOutcome):
                        raise _never_the_same(error) from error
                    raise
                stage_logger().warning("%s; recomputing what is missing", error)


def _never_the_same(error: OtherOutcome) -> Fatal:
    return Fatal(
        f"{error}; {TRIES_FOR_AN_OBJECT} times in this run it was another one, and none of them could be kept to go on "
        "from. See why they were not stored (the warnings above), or set state_every = 1, which stores each at once"
    )
