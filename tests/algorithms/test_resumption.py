"""Snapshots beside training: a step waits for a copy in memory and for nothing else, and no fault is swallowed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_state import build, contents, train_one
from updates import save_state, sft_settings, update_context

from rollout_core.algorithms import resumption as module
from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.resumption import Resumption
from rollout_core.algorithms.state import TrainState
from rollout_core.config import SnapshotPolicy
from rollout_core.objects.retention.pruning import free
from rollout_core.objects.snapshots import Snapshot, SnapshotStore


class SlowWriter:
    """Writes states only when it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write = threading.Event()
        self.begun = threading.Semaphore(0)
        self.fault: Exception | None = None
        self._write = module.write_state
        monkeypatch.setattr(module, "write_state", self)

    def __call__(self, *arguments, **options) -> None:
        self.begun.release()
        assert self.may_write.wait(60)
        if self.fault is not None:
            raise self.fault
        self._write(*arguments, **options)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowWriter]:
    slow = SlowWriter(monkeypatch)
    yield slow
    slow.may_write.set()


@contextmanager
def resumption(place: UpdateContext, model: Path, **policy: int) -> Iterator[Resumption]:
    settings = sft_settings(snapshots=SnapshotPolicy(**{"every_steps": 1, "keep_last": 9, **policy}))
    with Resumption(place, "sft", settings, model) as found:
        yield found


def saved(place: UpdateContext) -> list[Snapshot]:
    """Oldest first."""
    return SnapshotStore(place.objects).list()[::-1]


def settle(found: Resumption) -> None:
    """Wait for what is being written, as the end of an update does."""
    found._wait()


def test_training_goes_on_while_the_state_of_the_moment_is_written(
    tiny_model: Path, tmp_path: Path, writer: SlowWriter
):
    place, state = update_context(tmp_path), build(tiny_model, steps=1)
    save_state(state, tmp_path / "expected", tokenizer_from=tiny_model)
    with resumption(place, tiny_model) as found:
        found.save(state)
        assert writer.begun.acquire(timeout=60)
        train_one(state)
        state.extras["kl_coef"] = 7.0
        assert saved(place) == []
        writer.may_write.set()
    [snapshot] = saved(place)
    SnapshotStore(place.objects).restore(snapshot.id, tmp_path / "state")
    assert contents(tmp_path / "state") == contents(tmp_path / "expected")


def test_one_is_written_at_a_time_and_the_next_is_taken_when_it_is_done(
    tiny_model: Path, tmp_path: Path, writer: SlowWriter
):
    place, state = update_context(tmp_path), build(tiny_model, steps=1)
    with resumption(place, tiny_model) as found:
        found.save(state)
        for _ in range(3):
            train_one(state)
            found.save(state)
        assert state.step == 4 and saved(place) == [], "no step waited"
        writer.may_write.set()
        settle(found)
        train_one(state)
        found.after_step(state)
        settle(found)
        train_one(state)
        found.after_step(state)
    assert [snapshot.step for snapshot in saved(place)] == [1, 5], "what fell due meanwhile is taken once"
    again = build(tiny_model)
    with resumption(place, tiny_model) as found:
        found.restore(again)
    assert again.step == 5


@pytest.mark.parametrize("where", ["next step", "end"])
def test_a_write_that_failed_is_told(where: str, tiny_model: Path, tmp_path: Path, writer: SlowWriter):
    place, state = update_context(tmp_path), build(tiny_model, steps=1)
    writer.fault = OSError("no space left on device")
    with resumption(place, tiny_model) as found:
        found.save(state)
        writer.may_write.set()
        assert found._writing is not None
        found._writing.exception(timeout=60)
        with pytest.raises(OSError, match="no space left"):
            found.after_step(state) if where == "next step" else found.finish(state)
    assert saved(place) == []


def test_tied_weights_stay_tied_in_the_files(tmp_path: Path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rollout_core.objects.snapshots import MODEL_FOLDER

    config = Qwen2Config(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path / "plain")
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    save_state(state, tmp_path / "state", tokenizer_from=tmp_path / "plain")
    assert contents(tmp_path / "state" / MODEL_FOLDER) == contents(tmp_path / "plain")


def test_retention_spares_what_is_labelled_what_is_asked_for_and_what_an_update_stands_on(
    tiny_model: Path, tmp_path: Path
):
    place, state = update_context(tmp_path), build(tiny_model)
    snapshots = SnapshotStore(place.objects)
    with resumption(place, tiny_model, keep_last=1, keep_every=4) as found:
        for _ in range(10):
            train_one(state)
            found.save_now(state)
            if state.step == 3:
                snapshots.set_label(saved(place)[-1].id, "good")
            if state.step == 6:  # another update of the same run would go on from here
                place.objects.set_ref("progress/other", saved(place)[-1].id)
    assert [snapshot.step for snapshot in saved(place)] == [3, 4, 6, 8, 10]
    free(place.objects)  # as the run does with what was given up while others were deleted
    needed = {file.content_id for each in saved(place) for file in place.objects.manifest(each.files).files}
    stored = {blob for blob, stat in place.objects.blobs() if stat.size > 100_000}
    assert stored <= needed, "the bytes of the others are gone"
    assert len(stored) >= 10
