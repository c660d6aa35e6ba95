"""What the iterations of a run hand on to each other: samples of later ones, which a thread of its own draws while this
one trains; and training states, of which not each is stored.

Which weights draw the samples of which iteration follows from the settings alone, never from what was faster, so a run
that is killed and tried again asks for the same samples and comes to the same bytes.

A state is held in temporary files of this machine until the iteration that continues from it has read it, which so is
spared fetching it; one that is not stored until that iteration has ended. A model that is not stored is in its cache.
Where one is needed and gone, as after a kill, the iterations since the last state that is there are computed again,
from the same samples, and must come to what they came to before.
"""

from __future__ import annotations

import inspect
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from rollout_core.algorithms.context import HeldStates
from rollout_core.base.determinism import is_portable_here
from rollout_core.base.errors import Fatal, OtherOutcome, RolloutError
from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.base.locks import scratch_folder
from rollout_core.base.stopping import Interruption, in_thread, run_interruptibly
from rollout_core.config import OnPolicySettings
from rollout_core.objects import ObjectStore, SnapshotStore
from rollout_core.objects.local_trees import hold_local_tree
from rollout_core.objects.records import Checkpoint
from rollout_core.objects.retention.unstored import unstored_model
from tasks.runtime.connections import cache_folder
from tasks.runtime.dry_run import DryRunCall, current_dry_run, dry_run_remark, is_placeholder
from tasks.runtime.journal import current_journal, stage_logger
from tasks.runtime.kept_states import current_keeping
from tasks.runtime.placement import place_of
from tasks.runtime.stage import computing_again, stop_signal

T = TypeVar("T")


class SamplesAhead(Generic[T]):
    """What ``draw`` makes of each of ``iterations`` and a model: of iteration i the one that iteration
    i - 1 - ``depth`` ended with, of the first ones ``start``. With a ``depth`` of 0 it draws when it is asked.
    """

    def __init__(self, draw: Callable[[int, ContentId], T], iterations: range, *, depth: int, start: ContentId) -> None:
        self._draw = draw
        self._iterations = iterations
        self._depth = depth
        self._draws_ahead = bool(depth) and current_dry_run() is None
        """A dry run has no two calls at the same time, so that it notes them in one order."""
        self._start = start
        self._models: dict[int, ContentId] = {}
        """Of iterations whose samples are drawn when they are asked for."""
        self._drawn: dict[int, Future[T]] = {}
        self._asked: queue.SimpleQueue[_Asked[T] | None] = queue.SimpleQueue()
        self._drawing = Interruption()
        self._has_ended: Future[None] | None = None
        """Of the thread that draws ahead."""

    def __enter__(self) -> SamplesAhead[T]:
        if self._draws_ahead:
            self._has_ended = in_thread(partial(run_interruptibly, self._work, stop_signal, self._drawing))
        for number in self._iterations[: self._depth + 1]:
            self._ask(number, self._start)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._has_ended is None:
            return
        for drawn in self._drawn.values():
            drawn.cancel()
        if kind is not None:
            self._drawing.request(RolloutError("the run that these samples were for has ended"))
        self._asked.put(None)
        wait([self._has_ended])

    def learned(self, number: int, model: ContentId) -> None:
        """Iteration ``number`` has ended with ``model``, which draws the samples of a later one from now on."""
        later = number + 1 + self._depth
        if later in self._iterations:
            self._ask(later, model)

    def take(self, number: int) -> T:
        """The samples of iteration ``number``; waits for them. Raises what drawing them raised."""
        if not self._draws_ahead:
            return self._draw(number, self._models.pop(number))
        return run_interruptibly(self._drawn.pop(number).result, stop_signal)

    def _ask(self, number: int, model: ContentId) -> None:
        if not self._draws_ahead:
            self._models[number] = model
            return
        asked = _Asked[T](number, model)
        self._drawn[number] = asked.drawn
        self._asked.put(asked)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            if not asked.drawn.set_running_or_notify_cancel():
                continue
            try:
                asked.drawn.set_result(self._draw(asked.number, asked.model))
            except BaseException as error:  # noqa: BLE001 - raised where the samples are taken
                asked.drawn.set_exception(error)


@dataclass(frozen=True)
class _Asked(Generic[T]):
    number: int
    model: ContentId
    drawn: Future[T] = field(default_factory=Future)


class UpdateStage(Protocol):
    """What is asked of an update, see `tasks.runtime.stage.Stage`."""

    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Checkpoint: ...

    def find(self, inputs: dict[str, Any]) -> Checkpoint | None: ...


@dataclass(frozen=True)
class StatesHere:
    """What becomes of the training state of an update that this process computes, or has a process of its machine
    compute. Elsewhere nothing is known of it, and each state is stored."""

    held: HeldStates | None
    """Where it goes if it is not stored, and stays in any case until the next update has read it."""
    stores: bool
    expected: Checkpoint | None = None
    """What an earlier run named as the outcome, and has no state of any more."""


_states_here: ContextVar[StatesHere | None] = ContextVar("rollout_states_here", default=None)


@contextmanager
def states_here(states: StatesHere) -> Iterator[None]:
    """Updates that are called inside the block do so with their states."""
    token = _states_here.set(states)
    try:
        yield
    finally:
        _states_here.reset(token)


def current_states() -> StatesHere | None:
    """What becomes of the state of an update called here; None: nothing is known."""
    return _states_here.get()


def check_outcome(title: str, checkpoint: Checkpoint) -> None:
    """Raises Fatal where the outcome was named before, is another now, and arithmetic should not tell."""
    here = current_states()
    if here is None or here.expected is None or here.expected.cache_identity() == checkpoint.cache_identity():
        return
    found = f"{title}: computed again, the training state is {checkpoint.train_state.short}, and was named as "
    found += here.expected.train_state.short
    if is_portable_here():
        raise Fatal(
            f"{found}. With portable numerics both should be the same: look for a machine that computes wrongly, or "
            "start over by run.refresh = true"
        )
    stage_logger().warning("%s: other arithmetic, such as another CPU or GPU. What follows is computed from it", found)


@dataclass(frozen=True)
class _Done:
    """An update of this run with its outcome."""

    number: int
    stage: str
    label: str
    train_state: ContentId | None
    """That it started from."""
    compute: Callable[[], Checkpoint]
    checkpoint: Checkpoint


class TrainingStates:
    """Those of the iterations of one run. As a context manager it stores the last one on the way out by an error or a
    signal."""

    def __init__(self, settings: OnPolicySettings, objects: ObjectStore) -> None:
        self._settings = settings
        self._objects = objects
        self._snapshots = SnapshotStore(objects)
        self._done: dict[ContentId, _Done] = {}
        """By the states that they left."""
        self._last: ContentId | None = None
        self._held: HeldStates | None = None
        """None in a dry run."""
        self.best: set[ContentId | None] = set()
        """Models that stay, as they were evaluated as the best ones so far."""
        self._spared: set[ContentId] = set()
        """Models that iterations started from, which are not theirs to give up."""
        self._models: dict[int, Checkpoint] = {}
        """What iterations ended with whose models are stored."""
        self._missed_until = -1
        """The last iteration whose model is computed again where it is gone."""
        self._scratch = ExitStack()

    def __enter__(self) -> TrainingStates:
        if current_dry_run() is None:
            self._held = HeldStates(self._scratch.enter_context(scratch_folder("states")))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._scratch:
            if self._held is not None:
                self._held.drop_learner()
            if kind is not None:  # also where the run's body is run again at once: what is held here ends with this
                self._store_last("the run ends here")

    def update(self, number: int, stage: UpdateStage, *inputs: Any, **options: Any) -> Checkpoint:
        """The update of iteration ``number`` (from 0), whose second argument is the state that it starts from."""
        train_state: ContentId | None = inputs[1]
        if not self._done:
            self._spared = {ContentId(value) for value in inputs if is_content_id(value)}

        def compute() -> Checkpoint:
            return stage(*inputs, **options)

        missing = self._missing(train_state)
        if missing:
            bound = inspect.signature(stage).bind(*inputs, **options)
            bound.apply_defaults()
            if stage.find(dict(bound.arguments)) is None:
                self._compute_again(missing)
        checkpoint = self._run(number, compute)
        done = _Done(number, stage.name, options["label"], train_state, compute, checkpoint)
        self._done[checkpoint.train_state] = done
        self._last = checkpoint.train_state
        if number + 1 == self._settings.iterations and self._is_of_a_longer_run(checkpoint):
            self._compute_again(self._missing(self._last))
        elif self._is_missed(number, checkpoint.model):
            self._compute_again([*self._missing(train_state), done])
        self._prune_models(number, checkpoint)
        return checkpoint

    def _prune_models(self, number: int, checkpoint: Checkpoint) -> None:
        """Of iterations before ``number``, from whose models all samples are drawn."""
        kept = current_keeping()
        if kept is None:
            return
        self._models[number] = checkpoint
        is_last = number + 1 == self._settings.iterations
        first_needed = number if is_last else number - self._settings.async_depth
        needed = {done.model for iteration, done in self._models.items() if iteration >= first_needed}
        needed |= self.best | self._spared
        for iteration in [iteration for iteration in self._models if iteration < first_needed]:
            done = self._models[iteration]
            if done.model not in needed and kept.prune_model(done):
                del self._models[iteration]

    def _is_of_a_longer_run(self, checkpoint: Checkpoint) -> bool:
        """Whether the outcome of the last iteration was one on the way of another run, which has not kept it: the state
        was not stored, or given up with its model."""
        noted = self._snapshots.find_pruned(checkpoint.train_state)
        if noted is None or self._snapshots.is_present(checkpoint.train_state):
            return False
        return not noted.was_stored or not self._objects.tree_is_present(checkpoint.model)

    def _run(self, number: int, compute: Callable[[], Checkpoint], expected: Checkpoint | None = None) -> Checkpoint:
        with states_here(StatesHere(self._held, self._settings.stores_state(number), expected)):
            checkpoint = compute()
        if self._held is not None:
            if self._held.has(checkpoint.train_state):  # one of a cached update is of no use to those that follow
                self._held.keep_only({checkpoint.train_state})
            if (cache_folder() / checkpoint.model).is_dir():
                hold_local_tree(checkpoint.model, cache_folder())  # until samples are drawn from it
        if (kept := current_keeping()) is not None:
            kept.later(checkpoint)
        return checkpoint

    def require(self, checkpoint: Checkpoint) -> None:
        """The outcome of this run, one of its iterations, is kept: it is computed again where another run, in which it
        was none, has given up the model."""
        if is_placeholder(checkpoint.model) or self._objects.tree_is_present(checkpoint.model):
            return
        done = self._done[checkpoint.train_state]
        self._compute_again([*self._missing(done.train_state), done])

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether the state is held on this machine, as this run has just computed it."""
        return self._held is not None and self._held.has(checkpoint.train_state)

    def _is_missed(self, number: int, model: ContentId) -> bool:
        """Whether this run has found the weights that iteration ``number`` left gone, or is about to: where they are
        drawn from ahead, those of the next iterations are asked for as well."""
        journal = current_journal()
        if journal is not None and model in journal.missing:
            self._missed_until = number + self._settings.async_depth
        is_needed = number <= self._missed_until and not (cache_folder() / model).is_dir()
        return is_needed and unstored_model(self._objects, model) is not None

    def _is_there(self, state: ContentId) -> bool:
        return (self._held is not None and self._held.has(state)) or self._snapshots.is_present(state)

    def _missing(self, state: ContentId | None) -> list[_Done]:
        """Updates of this run, in order, since the last state that is there, up to the one that left ``state``."""
        found: list[_Done] = []
        while state is not None and not is_placeholder(state) and not self._is_there(state):
            done = self._done.get(state)
            if done is None:  # of an earlier run: its stage is found to have lost it
                break
            found.insert(0, done)
            state = done.train_state
        return found

    def _compute_again(self, missing: list[_Done]) -> None:
        labels = ", ".join(done.label for done in missing)
        dry_run = current_dry_run()
        if dry_run is not None:
            dry_run.calls += [DryRunCall(done.stage, done.label, "computed") for done in missing]
            dry_run_remark(f"training states or models that are not stored are computed again first: {labels}")
            return
        stage_logger().info("training states or models that are not stored are computed again: %s", labels)
        for done in missing:
            named = done.checkpoint.train_state
            if place_of("learning") is not None:  # a worker computes only what does not count any more
                self._snapshots.forget(named)
            with computing_again():
                again = self._run(done.number, done.compute, expected=done.checkpoint)
            self._last = again.train_state
            if again.cache_identity() == done.checkpoint.cache_identity():
                continue
            # Computed once more it may be a third one, so the run's body, which is run again, needs this very one.
            self._store_last("what follows starts from it")
            self._snapshots.forget(named)
            raise OtherOutcome(
                named,
                f"{done.label} comes to training state {self._last.short} here, and came to {named.short} before",
                done.label,
            )

    def _store_last(self, why: str) -> None:
        held, last = self._held, self._last
        if held is None or last is None or not held.has(last) or self._snapshots.is_present(last):
            return
        try:
            stored = held.store(last, self._objects)
        except Exception as error:  # noqa: BLE001 - on the way out by another error, which says more
            stage_logger().warning("the last training state is not stored, so it will be computed again: %s", error)
            return
        if stored is not None:
            stage_logger().info("%s: training state %s of step %d is stored", why, last.short, stored.step)
