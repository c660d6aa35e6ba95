"""What the tests of generation share: a place for samples, a scripted engine that can be watched, one vLLM engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from batches import Batch, WatchedEngine, make_batch, ref
from endpoint_server import FaultyServer, config_of

from rollout_core.config import VLLMBackend
from rollout_core.inference.backend import ModelRef
from rollout_core.inference.openai_http import OpenAIEngine
from rollout_core.models.pretrained import load_tokenizer
from tests.store.patience import LONG
from tests.support.padding import pad_vocabulary


@pytest.fixture(scope="session")
def tiny(tiny_model: Path) -> ModelRef:
    return ref(tiny_model)


@pytest.fixture(scope="session")
def other_tiny(other_tiny_model: Path) -> ModelRef:
    return ref(other_tiny_model)


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(tiny_model)


@pytest.fixture
def batch(tmp_path: Path, tiny: ModelRef) -> Batch:
    """Ten samples."""
    return make_batch(tmp_path, tiny, [f"sort {number} =" for number in range(10)])


@pytest.fixture
def watched(tiny: ModelRef) -> WatchedEngine:
    return WatchedEngine(tiny)


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    """An endpoint that misbehaves when told to."""
    running = FaultyServer()
    running.start()
    yield running
    running.stop()


@pytest.fixture
def engine_of(server: FaultyServer, tiny: ModelRef) -> Iterator[Callable[..., OpenAIEngine]]:
    """Builds engines over the server, with waits a thousandth of the usual."""
    built: list[OpenAIEngine] = []

    def build(**config: Any) -> OpenAIEngine:
        built.append(OpenAIEngine(config_of(server, **config), tiny))
        return built[-1]

    yield build
    for engine in built:
        engine.close()


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    """The tiny model with heads of 32: vLLM has no CPU kernels for smaller ones."""
    return _made(tmp_path_factory, seed=1)


@pytest.fixture(scope="session")
def other_small(tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    """The same architecture with other weights."""
    return _made(tmp_path_factory, seed=2)


@pytest.fixture(scope="session")
def padded(small: ModelRef, tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    """The small model with outputs for 512 ids, of which its tokenizer knows 262; the others have the highest
    logits."""
    folder = tmp_path_factory.mktemp("models") / "padded"
    pad_vocabulary(small.folder, folder, seed=1)
    return ref(folder)


def _made(tmp_path_factory: pytest.TempPathFactory, seed: int) -> ModelRef:
    from make_tiny import make_model

    folder = tmp_path_factory.mktemp("models") / "small"
    make_model(folder, hidden_size=128, num_layers=2, seed=seed)
    return ref(folder)


@pytest.fixture(scope="session")
def vllm_engine(small: ModelRef) -> Iterator[Any]:
    """One vLLM engine for the whole session; nothing of it is left at the end."""
    from rollout_core.inference.vllm_backend import VLLMEngine

    def engine_processes() -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if child.name().startswith("VLLM")]

    others = engine_processes()
    engine = VLLMEngine(VLLMBackend(max_model_len=96, max_num_seqs=16, num_threads=1), small)
    processes = [process for process in engine_processes() if process not in others]
    yield engine
    engine.close()
    assert len(processes) == 2 and psutil.wait_procs(processes, timeout=LONG)[1] == []
