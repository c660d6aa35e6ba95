"""The history of the latest model, in a real object store and SQLite: who, when, why; going back; kills and promotions
at the same time.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.objects import ObjectStore
from rollout_core.objects.retention.garbage import collect_garbage
from rollout_core.objects.retention.unstored import find_model
from rollout_core.promotion import history
from rollout_core.promotion.history import Change, Entry, change_latest, history_of, roll_back, served_model
from rollout_core.store import LLM, SqlLightningStore

CHILD = """
import asyncio, os, signal, sys
from rollout_core.objects import ObjectStore
from rollout_core.promotion.history import Change, change_latest
from rollout_core.store import SqlLightningStore

storage, database, resource, model, by, dies = sys.argv[1:]

class Dying(SqlLightningStore):
    async def add_resources(self, resources):
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    kind = Dying if dies == "dies" else SqlLightningStore
    async with kind.from_url(database) as store:
        change = Change("promote", resource, model, by, "better")
        await change_latest(store, ObjectStore.from_url(storage), change)

asyncio.run(main())
"""


class Place:
    """An object store and a database in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage, self.database = f"file://{folder}/objects", f"sqlite:///{folder}/rollout.db"
        self.objects = ObjectStore.from_url(self.storage)

    def model(self, name: str) -> ContentId:
        folder = self.folder / name
        folder.mkdir()
        (folder / "config.json").write_text(name)
        (folder / "model.safetensors").write_text(f"weights of {name}")
        return self.objects.put_tree(folder)

    def do(self, work: Callable[[SqlLightningStore], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with SqlLightningStore.from_url(self.database) as store:
                return await work(store)

        return asyncio.run(run())

    def promote(self, model: ContentId, resource: str = "policy", by: str = "flow run 1") -> Entry | None:
        change = Change("promote", resource, model, by, "better")
        return self.do(lambda store: change_latest(store, self.objects, change))

    def back(self, to: str | None = None, resource: str = "policy") -> Entry:
        return self.do(lambda store: roll_back(store, self.objects, resource, to=to, by="ann@rollout rollback"))

    def served(self, resource: str = "policy") -> ContentId | None:
        return self.do(lambda store: served_model(store, self.objects, resource))

    def history(self, resource: str = "policy") -> list[Entry]:
        return history_of(self.objects, resource)

    def child(self, resource: str, model: ContentId, by: str, dies: str = "") -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", CHILD, self.storage, self.database, resource, model, by, dies])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_promotion_says_who_what_instead_of_what_and_why(place: Place):
    first, second = place.model("first"), place.model("second")
    assert place.promote(first) is not None
    assert place.promote(second, by="flow run 2") is not None
    assert place.promote(second, by="flow run 3") is None, "it is the latest already"
    entries = place.history()
    assert [(entry.model, entry.previous, entry.by) for entry in entries] == [
        (first, None, "flow run 1"),
        (second, first, "flow run 2"),
    ]
    assert entries[0].at < entries[1].at and place.served() == second
    assert history.resources_with_history(place.objects) == ["policy"]


def test_a_new_database_beside_old_objects_serves_what_the_history_made_the_latest(place: Place):
    """The page on several machines has people copy the objects and name a new database."""
    first, second = place.model("first"), place.model("second")
    place.promote(first)
    place.promote(second)
    place.database = f"sqlite:///{place.folder}/new.db"
    assert place.served() == second and place.served("other") is None

    def stand() -> ContentId | None:
        latest = place.do(lambda store: store.get_latest_resources())
        return latest.resources["policy"].model if latest else None

    assert stand() is None
    # Nothing is promoted instead of nothing: what was looked at still counts.
    change = Change("promote", "policy", first, "flow run 3", "worse")
    with pytest.raises(history.LatestChanged):
        place.do(lambda store: change_latest(store, place.objects, change, instead_of=None))
    assert stand() == second
    place.database = f"sqlite:///{place.folder}/another.db"
    adopted = place.do(lambda store: history.adopt_history(store, place.objects, "policy"))
    assert adopted.model == second and stand() == second and len(place.history()) == 2
    # Promoting by hand what the history promoted makes it no other model to go back from.
    place.database = f"sqlite:///{place.folder}/by-hand.db"
    assert place.promote(second) is None and stand() == second and place.back().model == first
    place.promote(second)
    assert place.do(lambda store: history.adopt_history(store, place.objects, "policy")) is None
    # And without it the next change knows what it is made instead of, and one can go back.
    place.database = f"sqlite:///{place.folder}/newer.db"
    assert place.back().model == first and place.history()[-1].previous == second
    assert stand() == first
    # Of a resource that is somebody else's, the history says nothing.
    other = LLM(endpoint="http://host/v1", model="theirs", sampling_parameters={})
    place.do(lambda store: store.add_resources({"policy": other}))
    assert place.served() is None
    assert place.do(lambda store: history.adopt_history(store, place.objects, "policy")) is None


def test_going_back_twice_goes_back_by_two_and_writes_the_history(place: Place):
    models = [place.model(name) for name in ("a", "b", "c")]
    for model in models:
        place.promote(model)
    assert [place.back().model, place.back().model] == [models[1], models[0]]
    assert place.served() == models[0]
    with pytest.raises(NotFound, match=rf"nothing to go back to: 'policy' serves {models[0].short}, and no"):
        place.back()
    last = place.history()[-1]
    assert (last.action, last.model, last.previous, last.by) == (
        "rollback",
        models[0],
        models[1],
        "ann@rollout rollback",
    )
    assert last.reason == f"back from {models[1].short} to {models[0].short}"
    # Forward again by name; from there back to where it was.
    assert place.back(to=models[2][:8]).model == models[2]
    assert place.back().model == models[0]


def test_what_was_served_before_there_was_a_history_can_be_gone_back_to(place: Place):
    old, new = place.model("old"), place.model("new")
    place.do(lambda store: store.add_resources({"policy": LLM(endpoint="", model=old, sampling_parameters={})}))
    place.promote(new)
    assert place.back().model == old


def test_going_back_is_refused_where_there_is_nothing_of_that_kind(place: Place):
    with pytest.raises(NotFound, match="nothing to go back to: 'policy' serves no model of ours"):
        place.back()
    first, second = place.model("first"), place.model("second")
    place.promote(first)
    with pytest.raises(NotFound, match="no model before it"):
        place.back()
    place.promote(second)
    with pytest.raises(NotFound, match=r"is no model in the history of 'policy'; `rollout promote"):
        place.back(to=place.model("elsewhere"))
    with pytest.raises(NotFound, match="no model in the history of 'policy' has an id that begins with 00000000"):
        place.back(to="00000000")
    with pytest.raises(ConfigError, match=r"serves .* already"):
        place.back(to=second)
    place.objects.delete(place.objects.manifest(first).files[0].content_id)
    with pytest.raises(NotFound, match=f"the weights of {first} are not in the object store"):
        place.back()
    assert place.served() == second and len(place.history()) == 2


def test_a_model_gone_back_from_is_known_until_somebody_promotes_it_again(place: Place):
    first, second = place.model("first"), place.model("second")
    place.promote(first)
    place.promote(second)
    assert history.withdrawn(place.history(), second) is None
    place.back()
    found = history.withdrawn(place.history(), second)
    assert found is not None and found.by == "ann@rollout rollback"
    assert history.withdrawn(place.history(), first) is None
    place.promote(second, by="ann@rollout promote")
    assert history.withdrawn(place.history(), second) is None


def test_killed_between_the_two_writes_nothing_is_lost(place: Place):
    first, second = place.model("first"), place.model("second")
    place.promote(first)
    assert place.child("policy", second, "flow run 2", "dies").wait() == -signal.SIGKILL
    assert place.served() == first and [entry.model for entry in place.history()] == [first, second]
    # The retry goes on with what it wrote; another run writes its own.
    place.promote(second, by="flow run 2")
    assert place.served() == second and len(place.history()) == 2
    assert place.back().model == first


def test_what_was_noted_and_never_came_into_force_is_not_gone_back_to(place: Place):
    first, second, third = (place.model(name) for name in ("first", "second", "third"))
    place.promote(first)
    assert place.child("policy", second, "flow run 2", "dies").wait() == -signal.SIGKILL
    place.promote(third, by="flow run 3")
    assert place.back().model == first


def test_promotions_at_once_all_stand_in_the_history_and_none_undoes_another_resource(place: Place):
    models = [place.model(f"model {number}") for number in range(6)]
    place.do(lambda store: store.add_resources({"other": LLM(endpoint="", model="x", sampling_parameters={})}))
    children = [
        place.child(("policy", "judge")[number % 2], model, f"flow run {number}") for number, model in enumerate(models)
    ]
    assert [child.wait() for child in children] == [0] * 6
    for resource, own in (("policy", models[::2]), ("judge", models[1::2])):
        entries = place.history(resource)
        assert {entry.model for entry in entries} == set(own)
        assert place.served(resource) == entries[-1].model
        assert [entry.previous for entry in entries] == [None, *(entry.model for entry in entries[:-1])]
    latest = place.do(lambda store: store.get_latest_resources())
    assert set(latest.resources) == {"other", "policy", "judge"}


def test_garbage_collection_spares_the_weights_of_the_history(place: Place):
    kept, lost = place.model("kept"), place.model("lost")
    place.promote(kept)
    place.promote(place.model("new"))
    collect_garbage(place.objects, min_age=timedelta(0))
    assert place.objects.tree_is_present(kept) and not place.objects.tree_is_present(lost)
    assert place.back().model == kept


def test_the_history_stays_in_order_when_the_clock_goes_back(place: Place, monkeypatch: pytest.MonkeyPatch):
    first, second = place.model("first"), place.model("second")
    place.promote(first)
    ahead = place.history()[0].model_copy(update={"at": place.history()[0].at + timedelta(days=2), "model": second})
    history._write(place.objects, ahead)
    place.promote(place.model("third"))
    assert [entry.at for entry in place.history()] == sorted(entry.at for entry in place.history())
    assert place.history()[-1].at - ahead.at == timedelta(milliseconds=1)


def test_an_entry_that_cannot_be_read_is_left_out_with_a_warning(place: Place, caplog: pytest.LogCaptureFixture):
    place.promote(place.model("first"))
    place.objects.set_ref("promotions/of-policy/01ARZ3NDEKTSV4RRFFQ69G5FAV", place.objects.put_bytes(b"{}"))
    assert len(place.history()) == 1 and "is no entry of the history" in caplog.text


def test_only_whole_models_are_promoted_by_id(place: Place):
    model = place.model("model")
    assert find_model(place.objects, model[:8]) == model
    (place.folder / "data").mkdir()
    (place.folder / "data" / "rows.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"no model: its folder needs config.json and \*.safetensors"):
        find_model(place.objects, place.objects.put_tree(place.folder / "data"))
    with pytest.raises(ConfigError, match="is no model but a file"):
        find_model(place.objects, place.objects.put_bytes(b"text"))
    with pytest.raises(NotFound, match="no model"):
        find_model(place.objects, hash_bytes(b"nowhere"))
    place.objects.delete(place.objects.manifest(model).files[1].content_id)
    with pytest.raises(NotFound, match="files of the model"):
        find_model(place.objects, model)
