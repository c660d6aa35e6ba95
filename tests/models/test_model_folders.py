"""Links, pipes and sockets in a model folder, and names that are nearly those of a folder."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config import ModelSource
from rollout_core.models.locating import check_own_file, import_model, near_folder
from rollout_core.models.pretrained import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rollout_core.objects import ObjectStore
from rollout_core.plans.plan import check_model


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "work" / "models" / "tiny"))


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{tmp_path / 'store'}")


def refusal(model: Path, objects: ObjectStore) -> str:
    """The one line that plan and import refuse with."""
    told = set()
    for look in (check_model, lambda source, base: import_model(source, objects, base)):
        with pytest.raises(ConfigError) as caught:
            look(ModelSource(uri=str(model)), Path())
        told.add(str(caught.value))
    assert dict(objects.blobs()) == {}, "nothing of it is stored"
    [message] = told
    assert "\n" not in message
    return message


@pytest.mark.parametrize("relative", [True, False])
def test_a_link_out_of_the_folder_is_not_followed(model, objects, tmp_path, relative):
    secret = tmp_path / "work" / "secret"
    secret.write_text("not for the store")
    (model / "notes.model").symlink_to("../../secret" if relative else secret)
    assert f"notes.model leads out of the model's folder, to {secret}" in refusal(model, objects)


def test_a_link_through_a_folder_that_leads_out_is_not_followed(model, objects, tmp_path):
    (model / "inner").symlink_to("/etc")
    (model / "vocab.txt").symlink_to("inner/hostname")
    assert "leads out of the model's folder" in refusal(model, objects)


@pytest.mark.parametrize("target", ["notes.model", "other.model", "nothing"])
def test_a_link_that_leads_nowhere_or_in_a_circle_is_one_line(model, objects, target):
    (model / "notes.model").symlink_to(target)
    (model / "other.model").symlink_to("notes.model")
    assert "is a link that leads nowhere" in refusal(model, objects)


def test_a_pipe_a_socket_and_a_device_are_no_files(model, objects):
    os.mkfifo(model / "added_tokens.json")
    assert "added_tokens.json is a pipe; expected a file" in refusal(model, objects)
    (model / "added_tokens.json").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        before = Path.cwd()
        os.chdir(model)  # the address of a socket is short
        try:
            listener.bind("added_tokens.json")
        finally:
            os.chdir(before)
        assert "added_tokens.json is a socket; expected a file" in refusal(model, objects)
    with pytest.raises(ConfigError, match="is a device; expected a file"):
        check_own_file(Path("/dev/null"))


def test_links_within_the_folder_and_into_the_hubs_blobs_are_files(model, objects, tmp_path):
    plain = import_model(ModelSource(uri=str(model)), objects, Path())
    (model / "tokenizer.json").rename(model / "kept")
    (model / "tokenizer.json").symlink_to("kept")
    assert import_model(ModelSource(uri=str(model)), objects, Path()) == plain
    repository = tmp_path / "hub" / "models--some--tiny"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        shutil.copy(file, repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert import_model(ModelSource(uri=str(snapshot)), objects, Path()) == plain
    (snapshot / "vocab.txt").symlink_to("../../../../secret")
    with pytest.raises(ConfigError, match=r"vocab\.txt"):
        check_model(ModelSource(uri=str(snapshot)), Path())


def test_an_adapters_files_are_its_own(model, objects, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / ADAPTER_CONFIG).symlink_to("/etc/hostname")
    (adapter / ADAPTER_WEIGHTS).write_bytes(b"")
    with pytest.raises(ConfigError, match="leads out of the model's folder"):
        check_model(ModelSource(uri=str(model), adapter=str(adapter)), Path())


@pytest.mark.parametrize("uri", ["models/tinny", "model/tiny", "./models/tiy", "modles/tyny"])
def test_a_name_that_is_nearly_a_folders_is_refused_with_what_may_be_meant(model, tmp_path, uri):
    work = tmp_path / "work"
    with pytest.raises(ConfigError, match=r"did you mean the folder 'models/tiny'\?"):
        check_model(ModelSource(uri=uri), work)


def test_it_is_refused_where_the_hub_is_out_of_reach_and_an_unlike_name_is_told_as_not_checked(
    model, tmp_path, monkeypatch
):
    from rollout_core.models import locating
    from rollout_core.models.locating import HubOutOfReach

    def out_of_reach(uri, *arguments, download):
        if not download:
            return None
        raise HubOutOfReach(f"{uri} is not here")

    monkeypatch.setattr(locating, "fetch_from_hub", out_of_reach)
    with pytest.raises(ConfigError, match=r"did you mean the folder 'models/tiny'\?"):
        check_model(ModelSource(uri="models/tinny"), tmp_path / "work")
    with pytest.raises(
        locating.Unchecked, match="model 'somebody/else', as the hub cannot be reached; there is no such"
    ):
        check_model(ModelSource(uri="somebody/else"), tmp_path / "work")


def test_a_folder_without_a_model_is_not_what_was_meant(tmp_path):
    (tmp_path / "modle").mkdir()
    assert near_folder("model", tmp_path) is None
    (tmp_path / "modle" / "config.json").write_text("{}")
    assert near_folder("model", tmp_path) == "modle"
    assert near_folder(str(tmp_path / "model"), Path("/elsewhere")) == str(tmp_path / "modle")


def test_a_place_with_very_many_folders_hides_none_that_is_named_exactly(tmp_path):
    for number in range(1100):
        (tmp_path / f"other{number}").mkdir()
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    assert near_folder("models/tinny", tmp_path) == "models/tiny"
