"""Training states that are stored every so many iterations: which are, and that a run which lost the others, killed
wherever it was, ends in the bytes of one that stores all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from rollout_core.algorithms.context import HeldStates, UpdateContext, seen
from rollout_core.base.errors import ConfigError, Fatal, MissingObject, NotFound, OtherOutcome
from rollout_core.base.ids import ContentId, content_id, hash_bytes, is_content_id
from rollout_core.config import GRPOSettings, TrainGRPOConfig, identity, parse_config
from rollout_core.objects import ObjectStore, SnapshotStore
from rollout_core.objects.local_trees import forget_local_tree
from rollout_core.objects.records import Checkpoint, Model, Scores
from rollout_core.objects.retention.unstored import (
    check_stored,
    find_model,
    hold_model,
    is_whole,
    local_model,
    put_model,
    unstored_model,
)
from rollout_core.objects.trees import TreeManifest
from rollout_core.objects.verification import verify_store
from tasks.runtime import iterations
from tasks.runtime.flow_run import TRIES_FOR_AN_OBJECT, _repeat
from tasks.runtime.iterations import SamplesAhead, TrainingStates
from tasks.runtime.journal import Journal, keep_journal
from tasks.runtime.stage import _computes_again
from tasks.runtime.summary import RunSummary
from tests.flows.conftest import finished_samples, objects, small_grpo, wait_for, write_toml
from tests.flows.test_resume import ROLLOUT, kill, output_of

SAMPLES = 80


def grpo(iterations: int, every: int, models: str = "each", depth: int = 0) -> GRPOSettings:
    fields = {"prompts": {"path": "x"}, "optimizer": {"lr": 1e-4}, "iterations": iterations}
    return GRPOSettings.model_validate({**fields, "state_every": every, "store_models": models, "async_depth": depth})


def test_every_so_many_and_the_last_are_stored_and_no_identity_tells():
    def stored(every: int) -> list[int]:
        return [number + 1 for number in range(8) if grpo(8, every).stores_state(number)]

    assert (stored(1), stored(3), stored(4), stored(9)) == (list(range(1, 9)), [3, 6, 8], [4, 8], [8])
    assert identity(grpo(8, 1)) == identity(grpo(8, 4)) == identity(grpo(8, 4, "with_states"))
    assert (grpo(8, 3).stored_models, grpo(8, 3, "with_states").stored_models) == (8, 3)


def write_state(folder: Path, text: str) -> Path:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_text(f"weights {text}")
    (folder / "model" / "config.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps(text))
    return folder


ABOUT = {"run_id": "run", "step": 7, "algorithm": "GRPO", "label": "finished", "meta": {"run": "night"}}


def test_a_held_state_has_the_id_that_it_would_be_stored_under_and_counts_without_being_there(tmp_path: Path):
    store, held = new_store(), HeldStates(tmp_path / "held")
    snapshots = SnapshotStore(store)
    state_id, manifest, _ = held.hold(write_state(tmp_path / "one", "a"), store, **ABOUT)
    assert held.has(state_id) and snapshots.counts(state_id) and not snapshots.is_present(state_id)
    with pytest.raises(NotFound, match=r"was not stored \(state_every\)"):
        snapshots.get(state_id)
    context = UpdateContext(store, tmp_path / "cache", hash_bytes(b"key"), "run", 1, held=held)
    with context.state(state_id) as folder:
        assert json.loads((folder / "state.json").read_text()) == "a"

    again = HeldStates(tmp_path / "again")
    assert again.hold(write_state(tmp_path / "two", "a"), store, **ABOUT)[:2] == (state_id, manifest)
    model = hold(store, again.place(state_id) / "model", tmp_path / "cache")
    assert unstored_model(store, model) is not None
    stored = again.store(state_id, store)
    assert unstored_model(store, model) is None and store.tree_is_present(model), "the model of a stored state is, too"
    assert stored is not None and (stored.id, stored.step, stored.label) == (state_id, 7, "finished")
    assert stored.meta == {"run": "night"} and snapshots.is_present(state_id)

    other, *_ = held.hold(write_state(tmp_path / "three", "b"), store, **ABOUT)
    held.keep_only({other})
    assert not held.has(state_id) and held.has(other)
    (held.folder / other / "state" / "state.json").write_text("damaged")
    assert held.find(other) is None and held.store(other, store) is None
    with pytest.raises(MissingObject), UpdateContext(store, tmp_path, other, "run", 1, held=held).state(other):
        pass
    assert not snapshots.counts(other), "the stage that made it runs again"


def test_a_stored_state_is_lent_to_the_next_update_and_read_no_second_time(tmp_path: Path, monkeypatch):
    store, held = new_store(), HeldStates(tmp_path / "held")
    written = write_state(tmp_path / "one", "a")
    before = seen(written)
    state_id = SnapshotStore(store).save(written, **ABOUT).id
    os.link(written / "model" / "model.safetensors", tmp_path / "link")  # as a cache has it, read-only
    (tmp_path / "link").chmod(0o444)
    held.lend(written, state_id, before, **ABOUT)
    context = UpdateContext(store, tmp_path / "cache", hash_bytes(b"key"), "run", 1, held=held)
    with monkeypatch.context() as patch:
        patch.setattr("rollout_core.algorithms.context.identify", None)  # nothing is hashed
        patch.setattr(SnapshotStore, "restore", None)  # nor fetched
        with context.state(state_id) as folder:
            assert folder == held.place(state_id) and json.loads((folder / "state.json").read_text()) == "a"
    (held.place(state_id) / "state.json").write_text('"b"')
    assert held.find(state_id) is None, "somebody wrote to it"
    with context.state(state_id) as folder:
        assert json.loads((folder / "state.json").read_text()) == "a", "fetched"

    other, *_ = held.hold(write_state(tmp_path / "two", "c"), store, **ABOUT)
    held.drop_stored()
    assert not held.has(state_id) and held.find(other) is not None
    elsewhere = HeldStates(tmp_path / "held")  # as in a process of its own, that has not read it yet
    monkeypatch.setattr("rollout_core.algorithms.context._known_whole", set())
    assert elsewhere.find(other) == held.place(other)


def test_a_held_model_counts_until_somebody_finds_its_weights_gone(tmp_path: Path):
    store, cache = new_store(), tmp_path / "cache"
    written = write_state(tmp_path / "state", "a") / "model"
    model = hold(store, written, cache)
    assert model == new_store().put_tree(written), "the id that it would be stored under"
    found = local_model(store, model, cache)
    assert sorted(file.name for file in found.iterdir()) == ["config.json", "model.safetensors"]
    weights, _ = (file.content_id for file in reversed(store.manifest(model).files))
    assert not store.exists(weights) and store.exists(hash_bytes(b"{}"))
    counted = Model(model=model)
    assert is_whole(counted, store)
    with pytest.raises(ConfigError, match=r"\(step 7 of GRPO, run run\) was not stored \(store_models\)"):
        check_stored(model, store)
    with pytest.raises(NotFound, match="was not stored"):
        find_model(store, model)
    assert verify_store(store).damage == [], "nobody misses it"

    with pytest.raises(NotFound, match="snapshot not found"):
        SnapshotStore(store).get(model)
    forget_local_tree(model, cache)
    with pytest.raises(MissingObject, match=r"not stored .* the update that left it has to run again") as caught:
        local_model(store, model, cache)
    assert caught.value.content_id == model and is_whole(counted, store), "what is named stays to be compared with"
    put_model(store, store.manifest(model), written)
    assert local_model(store, model, cache).is_dir() and unstored_model(store, model) is None
    assert hold(store, written, cache) == model and unstored_model(store, model) is None, "it stays stored"


def test_a_model_that_the_cache_does_not_take_is_stored(tmp_path: Path):
    store = new_store()
    (tmp_path / "cache").write_text("a file")
    model = hold(store, write_state(tmp_path / "state", "a") / "model", tmp_path / "cache")
    assert store.tree_is_present(model) and unstored_model(store, model) is None


def hold(store: ObjectStore, written: Path, cache: Path, step: int = 7) -> ContentId:
    return hold_model(store, manifest_of(written), written, cache, run_id="run", step=step, algorithm="GRPO")


def manifest_of(folder: Path) -> TreeManifest:
    scratch = new_store()
    return scratch.manifest(scratch.put_tree(folder))


START = hash_bytes(b"start")


class Killed(BaseException):
    """What nobody gets to handle."""


class Updates:
    """Updates whose states are hashes of what they come of, and a table of results that outlives a process."""

    name = "grpo_update"

    def __init__(self, store: ObjectStore, models: str = "each", depth: int = 0) -> None:
        self.store, self.models, self.depth = store, models, depth
        self._folder = tempfile.TemporaryDirectory()
        self.cache = Path(self._folder.name) / "cache"
        """Of the machine, which outlives a process."""
        self.drawn: set[tuple[ContentId, int]] = set()
        """Iterations whose samples are stored, with the model that drew them."""
        self.evicts: set[int] = set()
        """Iterations (from 0) before which the cache is emptied, once each."""
        self.missing = Counter[str]()
        """What the last run found missing, and how often."""
        self.results: dict[ContentId, Checkpoint] = {}
        self.computed: list[int] = []
        self.advantages: ContentId | None = None
        self.noise: Callable[[], object] = str
        """What each state takes up, beside what it comes of."""
        self.ends: dict[int, type[BaseException]] = {}
        """How the process ends at computing an update, by its number (from 1)."""

    def find(self, inputs: dict[str, Any]) -> Checkpoint | None:
        found = self.results.get(content_id("key/1", [inputs["model"], inputs["train_state"], inputs["number"]]))
        return found if found is not None and is_whole(found, self.store) else None

    def __call__(self, model: ContentId, train_state: ContentId | None, number: int, *, label: str = "") -> Checkpoint:
        found = self.find({"model": model, "train_state": train_state, "number": number})
        if found is not None and not _computes_again.get():
            return found
        if number + 1 in self.ends:
            raise self.ends[number + 1]("here")
        here = iterations.current_states()
        assert here is not None
        context = UpdateContext(self.store, Path("cache"), hash_bytes(b"key"), "run", 1, held=here.held)
        before = ""
        if number:
            local_model(self.store, model, self.cache)
        if train_state is not None:
            with context.state(train_state) as folder:
                before = json.loads((folder / "state.json").read_text())
        self.computed.append(number + 1)
        with tempfile.TemporaryDirectory() as scratch:
            written = write_state(Path(scratch) / "state", hash_bytes(f"{before} {number}{self.noise()}".encode()))
            metrics, about = self.store.put_bytes(b"{}\n"), {**ABOUT, "step": number + 1}
            manifest = manifest_of(written / "model")
            if here.stores or self.models == "each":
                tree = put_model(self.store, manifest, written / "model")
            else:
                tree = hold(self.store, written / "model", self.cache, number + 1)
            if here.stores:
                state_id = SnapshotStore(self.store).save(written, **about).id
            else:
                assert here.held is not None
                state_id, *_ = here.held.hold(written, self.store, **about)
        checkpoint = Checkpoint(
            model=tree,
            train_state=state_id,
            metrics=metrics,
            algorithm="GRPO",
            step=number + 1,
            summary={},
            advantages=self.advantages,
        )
        iterations.check_outcome(label, checkpoint)
        self.results[content_id("key/1", [model, train_state, number])] = checkpoint
        return checkpoint

    def draw(self, number: int, model: ContentId) -> None:
        if number in self.evicts:
            self.evicts.remove(number)
            self.empty_cache()
        if model != START and (model, number) not in self.drawn:
            local_model(self.store, model, self.cache)
            self.drawn.add((model, number))

    def empty_cache(self) -> None:
        shutil.rmtree(self.cache, ignore_errors=True)

    def run(self, iterations: int, every: int, end: int | None = None, how: type[BaseException] = Killed) -> Checkpoint:
        """A run that ends before it gets to iteration ``end`` (from 0). As `tasks.runtime.flow_run` does, it runs
        again for each object that it finds missing."""
        missing = self.missing = Counter[str]()
        while True:
            try:
                with keep_journal(missing=missing):
                    return self._body(iterations, every, end, how)
            except OtherOutcome:
                raise
            except MissingObject as error:
                missing[error.content_id] += 1
                assert missing[error.content_id] < TRIES_FOR_AN_OBJECT

    def _body(self, iterations: int, every: int, end: int | None, how: type[BaseException]) -> Checkpoint:
        settings = grpo(iterations, every, self.models, self.depth)
        states = TrainingStates(settings, self.store)
        with (
            tempfile.TemporaryDirectory() as folder,
            pytest.MonkeyPatch.context() as patch,
            SamplesAhead(self.draw, range(iterations), depth=self.depth, start=START) as ahead,
        ):
            patch.setattr("tasks.runtime.iterations.cache_folder", lambda: self.cache)
            states.__enter__()
            try:
                model, train_state, last = START, None, None
                for number in range(iterations):
                    if number == end:
                        raise how("here")
                    ahead.take(number)
                    last = states.update(number, self, model, train_state, number, label=f"iteration {number + 1}")
                    model, train_state = last.model, last.train_state
                    ahead.learned(number, model)
            except Killed:
                shutil.rmtree(Path(folder), ignore_errors=True)
                states._scratch.close()
                raise
            except BaseException as error:
                states.__exit__(type(error), error, None)
                raise
        states.__exit__(None, None, None)
        assert last is not None
        return last

    def stored(self) -> set[int]:
        return {snapshot.step for snapshot in SnapshotStore(self.store).list()}


def new_store() -> ObjectStore:
    return ObjectStore.from_url(f"memory://{uuid4()}")


@cache
def expected(iterations: int) -> Checkpoint:
    """Of a run that stores all and that nothing happens to."""
    return Updates(new_store()).run(iterations, 1)


ends = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9), st.sampled_from([Killed, ConfigError])), max_size=4)


@hypothesis_settings(max_examples=30, deadline=None)
@given(ends=ends, iterations=st.integers(1, 9), every=st.integers(1, 5))
def test_however_often_a_run_ends_it_comes_to_the_same_state_and_computes_from_the_last_that_is_stored(
    ends, iterations, every
):
    updates = Updates(new_store())
    for other_every, end, how in ends:
        before, updates.computed = updates.stored(), []
        if end < iterations:
            with pytest.raises(how):
                updates.run(iterations, other_every, end, how)
            first = max((step for step in before if step <= end), default=0) + 1
            assert updates.computed == sorted(updates.computed), "each after the one before"
            assert all(number >= first for number in updates.computed), "never behind what is stored"
            if how is not Killed and end:
                assert end in updates.stored() or end not in updates.computed, (
                    "a run that can still store its last state"
                )
    assert updates.run(iterations, every) == expected(iterations)
    assert iterations in updates.stored()
    assert updates.run(iterations, every) == expected(iterations)


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    ends=ends,
    iterations=st.integers(1, 9),
    every=st.integers(1, 5),
    evicts=st.sets(st.integers(1, 8)),
    other_machine=st.booleans(),
)
def test_models_that_are_not_stored_are_computed_again_where_samples_are_to_be_drawn_from_them(
    ends, iterations, every, evicts, other_machine
):
    updates = Updates(new_store(), "with_states")
    updates.evicts = evicts
    for other_every, end, how in ends:
        if end < iterations:
            with pytest.raises(how):
                updates.run(iterations, other_every, end, how)
        if other_machine:
            updates.empty_cache()
    assert updates.run(iterations, every) == expected(iterations)
    stored = updates.stored()
    for checkpoint in updates.results.values():
        assert updates.store.tree_is_present(checkpoint.model) == (checkpoint.step in stored)
    updates.computed = []
    updates.empty_cache()
    assert updates.run(iterations, every) == expected(iterations)
    assert updates.computed == [], "what is only named is not missed"


def test_a_model_is_computed_again_only_where_its_samples_are_not_stored():
    updates = Updates(new_store(), "with_states")
    with pytest.raises(Killed):
        updates.run(8, 3, 5)
    assert (updates.computed, updates.stored()) == ([1, 2, 3, 4, 5], {3})
    updates.computed = []
    updates.empty_cache()
    assert updates.run(8, 3) == expected(8)
    assert updates.computed == [4, 5, 6, 7, 8]
    named = {checkpoint.step: checkpoint.model for checkpoint in updates.results.values()}
    updates.drawn.remove((named[4], 4))
    updates.computed = []
    updates.empty_cache()
    assert updates.run(8, 3) == expected(8)
    assert updates.computed == [4], "from the state before, which is stored"


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_on_another_machine_each_update_is_computed_once_more_however_far_samples_are_drawn_ahead(depth):
    updates = Updates(new_store(), "with_states", depth)
    with pytest.raises(Killed):
        updates.run(12, 12, 8)
    updates.empty_cache()
    updates.drawn = {(model, number) for model, number in updates.drawn if number < 8}
    updates.computed = []
    assert updates.run(12, 12) == expected(12)
    assert updates.computed == list(range(1, 13))
    assert list(updates.missing.values()) == [1] and updates.stored() == {12}, "it began again once, and stored no more"


def test_what_is_stored_and_computed_by_hand():
    updates = Updates(new_store())
    with pytest.raises(Killed):
        updates.run(8, 3, 5)
    assert (updates.computed, updates.stored()) == ([1, 2, 3, 4, 5], {3})
    with pytest.raises(Fatal):
        updates.run(8, 3, 5, Fatal)
    assert updates.computed == [1, 2, 3, 4, 5], "what is not asked for is not computed again"
    updates.computed = []
    assert updates.run(8, 3) == expected(8)
    assert (updates.computed, updates.stored()) == ([4, 5, 6, 7, 8], {3, 6, 8})
    updates.computed = []
    assert updates.run(7, 3) == expected(7)
    assert (updates.computed, updates.stored()) == ([7], {3, 6, 7, 8}), "the last state of a shorter run is stored, too"


def killed_after(computed: int, *, every: int) -> Updates:
    """What a run of more updates leaves that was killed when so many were done."""
    updates = Updates(new_store())
    with pytest.raises(Killed):
        updates.run(computed + 1, every, computed)
    updates.computed = []
    return updates


def test_what_stops_while_states_are_computed_again_stores_the_last_of_them():
    updates = killed_after(7, every=8)
    updates.ends = {5: ConfigError}
    with pytest.raises(ConfigError):
        updates.run(8, 8)
    assert (updates.computed, updates.stored()) == ([1, 2, 3, 4], {4})
    updates.computed, updates.ends = [], {}
    assert updates.run(8, 8) == expected(8)
    assert (updates.computed, updates.stored()) == ([5, 6, 7, 8], {4, 8})


@pytest.fixture
def portable(monkeypatch):
    monkeypatch.setattr(iterations, "is_portable_here", lambda: True)


def test_an_outcome_of_an_earlier_version_is_the_same_without_what_later_ones_show(portable):
    updates = killed_after(2, every=4)
    updates.advantages = hash_bytes(b"what later versions let people look at")
    assert updates.run(4, 4).train_state == expected(4).train_state
    assert updates.computed == [1, 2, 3, 4]


def test_a_portable_state_that_comes_out_otherwise_ends_each_run_until_it_is_as_it_was(portable):
    updates = killed_after(3, every=4)
    named = dict(updates.results)
    updates.noise = lambda: "a machine that computes wrongly"
    for dies in (False, True, False):
        updates.ends = {1: Killed} if dies else {}
        with pytest.raises(Killed if dies else Fatal, match="here" if dies else "iteration 1: computed again"):
            updates.run(4, 4)
        assert updates.results == named, "what the next run compares with"
    updates.noise, updates.ends = str, {2: Killed}
    with pytest.raises(Killed):
        updates.run(4, 4)
    updates.ends, updates.noise = {}, lambda: "" if len(updates.computed) < 3 else "wrong"
    updates.computed = []
    with pytest.raises(Fatal, match="iteration 3: computed again"):
        updates.run(4, 4)
    assert (updates.computed, updates.stored()) == ([1, 2, 3], {2}), "and what was right is stored"
    updates.noise = str
    assert updates.run(4, 4) == expected(4)


class Journals:
    """Of a run; its summary, as far as running its body again needs it."""

    def __init__(self) -> None:
        self.noted: list[Journal] = []
        self.note = self.noted.append


def test_with_native_numerics_a_run_goes_on_from_what_comes_out_otherwise():
    """Also where an update never comes to the same state twice."""
    updates = killed_after(3, every=4)
    updates.noise = partial(next, count())
    journals = Journals()
    last = _repeat(lambda _: updates.run(4, 4), None, cast(RunSummary, journals))
    assert (updates.computed, len(journals.noted)) == ([1, 2, 3, 4], 2)
    assert updates.stored() == {1, 4} and last != expected(4)


def test_what_comes_out_otherwise_each_time_and_cannot_be_kept_ends_in_one_clear_error(monkeypatch):
    updates = killed_after(3, every=4)
    updates.noise = partial(next, count())

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(HeldStates, "store", full)
    with pytest.raises(Fatal, match=r"iteration 1 comes to training state .* 3 times in this run .* state_every = 1"):
        _repeat(lambda _: updates.run(4, 4), None, cast(RunSummary, Journals()))
    assert updates.computed == [1, 1, 1]


@pytest.mark.server
def test_a_stage_that_is_computed_again_keeps_its_result_until_there_is_another(prefect_server):
    from prefect import flow

    from tasks.runtime.stage import computing_again, current_stage, refreshing, stage

    texts = iter(["first", "second", "third", "fourth"])

    @stage(version=1)
    def make(number: int) -> Scores:
        text = next(texts)
        if text == "second":
            raise Fatal("it is another")
        blob = current_stage().objects.put_bytes(text.encode())
        return Scores(scores=blob, completions=blob, num_samples=1, mean=0.0, std=0.0)

    def text_of(made: Scores) -> str:
        return objects().get_bytes(made.scores).decode()

    @flow(persist_result=False)
    def body() -> list[str]:
        found = [text_of(make(1))]
        with computing_again(), pytest.raises(Fatal):
            make(1)
        found.append(text_of(make(1)))
        with computing_again():
            found.append(text_of(make(1)))
        found.append(text_of(make(1)))
        with refreshing("night"), computing_again():
            make(1)
            assert text_of(make.find({"number": 1}) or make(1)) == "fourth"
        return [*found, text_of(make(1))]

    assert body() == ["first", "first", "third", "third", "fourth"]


def config(tiny_model: Path, sorting_task: Any, every: int, models: str = "each") -> dict[str, Any]:
    document = small_grpo(
        tiny_model,
        sorting_task,
        "states",
        state_every=every,
        store_models=models,
        iterations=4,
        prompts_per_iteration=20,
        samples_per_prompt=4,
        minibatch_size=40,
        sampling={"max_tokens": 14},
        optimizer={"lr": 1e-3},
        snapshots={"every_steps": 1},
    )
    # What is compared is the state of each iteration, which a run would give up at the next one.
    return {**document, "run": {"name": "states", "keep_states": "all"}}


def ends_of_iterations(steps: int) -> dict[int, ContentId]:
    """States by the iteration that they are the end of."""
    found = SnapshotStore(objects()).list(kind="train_state")
    return {snapshot.step // steps: snapshot.id for snapshot in found if snapshot.step % steps == 0}


@pytest.mark.campaign
@pytest.mark.server
def test_killed_and_stopped_between_stored_states_a_run_comes_to_the_bytes_of_one_that_stores_all(
    tiny_model, sorting_task, tmp_path, start_process, prefect_server, monkeypatch
):
    from flows.train import train_grpo

    def use(name: str) -> None:
        monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / name}")
        monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{tmp_path / name}.db")
        monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / f"{name}-cache"))

    def started(iterations: int) -> Any:
        """The command, once so many iterations are done and samples of the next one are being drawn."""
        process = start_process(*command, env={"PREFECT_API_URL": prefect_server})
        first = SAMPLES * iterations
        wait_for(lambda: first < finished_samples() < first + SAMPLES, "samples", process=process)
        return process

    use("all")
    whole = train_grpo(parse_config(config(tiny_model, sorting_task, 1), TrainGRPOConfig))
    steps = whole["step"] // 4
    every = ends_of_iterations(steps)
    assert sorted(every) == [1, 2, 3, 4]

    use("some")
    document = write_toml(tmp_path / "states.toml", config(tiny_model, sorting_task, 3, "with_states"))
    command = (*ROLLOUT, "train", "grpo", "--config", str(document))
    kill(started(1))
    assert SnapshotStore(objects()).list() == [], "neither at ends nor on the way"
    shutil.rmtree(tmp_path / "some-cache")  # as on another machine, so that the model to draw from is gone, too
    stopped = started(2)
    stopped.send_signal(signal.SIGTERM)
    output, _ = stopped.communicate(timeout=120)
    assert stopped.returncode != 0
    assert "computed again: iteration 1\n" in output
    assert "the run ends here: training state" in output
    assert ends_of_iterations(steps) == {number: every[number] for number in (2,)}
    planned = output_of(start_process(*command, "--dry-run", env={"PREFECT_API_URL": prefect_server}))
    assert "4 training states of" in planned and "and the model; free" in planned
    output = output_of(start_process(*command, env={"PREFECT_API_URL": prefect_server}))
    assert "computed again" not in output
    assert ends_of_iterations(steps) == {number: every[number] for number in (2, 3, 4)}
    assert all(whole[name] in output for name in ("model", "train_state"))
    names = {ContentId(path.name) for path in (tmp_path / "some-cache").iterdir() if is_content_id(path.name)}
    held = [model for model in names if unstored_model(objects(), model) is not None]
    assert [objects().tree_is_present(model) for model in held] == [False], "of the first iteration"


def states_there() -> dict[int, ContentId]:
    """Training states by their steps, all with their bytes."""
    snapshots = SnapshotStore(objects())
    found = snapshots.list(kind="train_state")
    assert all(snapshots.is_present(snapshot.id) for snapshot in found)
    return {snapshot.step: snapshot.id for snapshot in found}


def tensors_there() -> int:
    """Files of weights and of moments: the tiny ones' smallest is larger than any record of these runs."""
    return sum(stat.size > 300_000 for _, stat in objects().blobs())


@pytest.mark.campaign
@pytest.mark.server
def test_killed_anywhere_a_run_keeps_its_last_state_alone_and_comes_to_the_bytes_of_one_that_keeps_all(
    tiny_model, sorting_task, tmp_path, start_process, prefect_server, monkeypatch
):
    from flows.train import train_grpo

    def use(name: str) -> None:
        monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / name}")
        monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{tmp_path / name}.db")
        monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / f"{name}-cache"))

    def run(document: dict[str, Any], name: str, iterations: int) -> dict[str, Any]:
        algorithm = {**document["algorithm"], "iterations": iterations}
        changed = {**document, "run": {"name": name}, "algorithm": algorithm}
        return train_grpo(parse_config(changed, TrainGRPOConfig))

    use("all")
    keeping_all = config(tiny_model, sorting_task, 1)
    whole = train_grpo(parse_config(keeping_all, TrainGRPOConfig))
    steps = whole["step"] // 4
    every = ends_of_iterations(steps)
    assert sorted(every) == [1, 2, 3, 4]

    use("last")
    document = {**keeping_all, "run": {"name": "states"}}
    path = write_toml(tmp_path / "states.toml", document)
    command = (*ROLLOUT, "train", "grpo", "--config", str(path))
    for killed_in in (1, 2, 3):  # in samples of the iteration after, and then once more on another machine
        process = start_process(*command, env={"PREFECT_API_URL": prefect_server})
        first = SAMPLES * killed_in
        wait_for(lambda first=first: first < finished_samples() < first + SAMPLES, "samples", process=process)
        kill(process)
        assert every[killed_in] in states_there().values() and len(states_there()) <= 2
        if killed_in == 2:
            shutil.rmtree(tmp_path / "last-cache")
    output = output_of(start_process(*command, env={"PREFECT_API_URL": prefect_server}))
    assert "computed again" not in output, "the last state was always there"
    assert all(whole[name] in output for name in ("model", "train_state"))
    assert states_there() == {4 * steps: every[4]}
    # The base, and of the last state weights and moments.
    assert tensors_there() == 3
    assert verify_store(objects()).damage == []

    assert run(document, "states", 4) == {**whole}, "all of it cached, though only the last state is there"
    longer = run(document, "longer", 5)
    assert states_there() == {4 * steps: every[4], 5 * steps: longer["train_state"]}, "the first run has its own yet"
    shorter = run(document, "shorter", 2)
    assert (shorter["train_state"], shorter["step"]) == (every[2], 2 * steps), "computed again, and stored"
    assert set(states_there()) == {2 * steps, 4 * steps, 5 * steps}
    assert objects().tree_is_present(ContentId(shorter["model"]))
    assert verify_store(objects()).damage == []
