"""What the tests of environments share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rollout_core.inference.backend import ModelRef
from rollout_core.objects import ObjectStore
from tests.environments.acting import TEMPLATE, Scene


@pytest.fixture(scope="session")
def chatting(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    """The tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "chatting"
    shutil.copytree(tiny_model, folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 4096}))
    return ModelRef(ObjectStore.from_url("memory://models").put_tree(folder), folder)


@pytest.fixture
def scene(tmp_path: Path, chatting: ModelRef) -> Scene:
    """An empty folder in which `chatting` acts."""
    return Scene(tmp_path, chatting, ObjectStore.from_url(f"file://{tmp_path}/objects"))
