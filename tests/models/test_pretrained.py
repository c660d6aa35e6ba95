"""Code in a model folder is never run, and nobody is asked: not in a plan, not in a run, not with "y" on standard
input."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config import ModelSource
from rollout_core.models.locating import import_model
from rollout_core.models.pretrained import load_causal_lm
from rollout_core.objects import ObjectStore
from rollout_core.plans.plan import check_model
from tests.conftest import PROJECT

DOOR = PROJECT / "rollout_core" / "models" / "pretrained.py"
LOADING = {"from_pretrained", "from_config"}
CODE = """
from pathlib import Path
from transformers import Qwen2Config, Qwen2ForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).write_text("code of the folder ran")
class OwnConfig(Qwen2Config): model_type = "own"
class OwnModel(Qwen2ForCausalLM): config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast): pass
"""
AUTO_MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
DRY_RUN = """
import sys
from pathlib import Path
from rollout_core.config import ModelSource
from rollout_core.plans.plan import check_model
check_model(ModelSource(uri=sys.argv[1]), Path())
"""


def loading_calls(file: Path) -> list[ast.Call]:
    """Calls by which transformers, peft or vLLM load something."""
    return [
        call
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and (
            (isinstance(call.func, ast.Attribute) and call.func.attr in LOADING)
            or (isinstance(call.func, ast.Name) and call.func.id == "LLM" and call.args)
        )
    ]


def test_one_module_alone_loads_models_and_says_each_time_that_no_code_is_trusted():
    own = [
        file
        for room in ("rollout_core", "blocks", "tasks", "flows", "deployments")
        for file in (PROJECT / room).rglob("*.py")
    ]
    assert {file for file in own if loading_calls(file)} == {DOOR}
    calls = loading_calls(DOOR)
    assert len(calls) >= 5
    for call in calls:
        told = {word.arg: ast.unparse(word.value) for word in call.keywords}
        is_peft = "Peft" in ast.unparse(call.func)
        assert is_peft or told.get("trust_remote_code") == "False", ast.unparse(call)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "ran"


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path, marker: Path) -> Path:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    return folder


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def of_its_own(folder: Path) -> None:
    edit(folder / "config.json", auto_map=AUTO_MAP, model_type="own")


def own_tokenizer(folder: Path) -> None:
    edit(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]},
        tokenizer_class="OwnTokenizer",
    )


def a_kernel(folder: Path) -> None:
    edit(folder / "config.json", attn_implementation="somebody/attention")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (of_its_own, "this model comes with code of its own (auto_map), which is never run"),
        (own_tokenizer, "this tokenizer comes with code of its own (auto_map), which is never run"),
        (a_kernel, "names code on the hub ('somebody/attention'), which is never run"),
    ],
)
def test_a_model_that_needs_code_of_its_own_is_refused_in_one_line(model, marker, tmp_path, change, reason):
    change(model)
    objects = ObjectStore.from_url(f"file://{tmp_path / 'store'}")
    source = ModelSource(uri=str(model))
    for look in (lambda: check_model(source, Path()), lambda: import_model(source, objects, Path())):
        with pytest.raises(ConfigError) as caught:
            look()
        assert reason in str(caught.value) and "\n" not in str(caught.value)
    assert not marker.exists()


def test_nobody_is_asked_and_a_yes_on_standard_input_runs_nothing(model, marker):
    of_its_own(model)
    done = subprocess.run(
        [sys.executable, "-c", DRY_RUN, str(model)], input="y\n" * 9, text=True, capture_output=True, cwd=PROJECT
    )
    assert done.returncode != 0 and "Do you wish to run" not in done.stdout + done.stderr
    assert "which is never run" in done.stderr
    assert not marker.exists()


def test_code_beside_a_model_that_transformers_knows_is_left_behind(model, tiny_model, marker, tmp_path):
    """Many models on the hub have it from the time before transformers knew them."""
    edit(model / "config.json", auto_map=AUTO_MAP)
    objects = ObjectStore.from_url(f"file://{tmp_path / 'store'}")
    folder = objects.local_tree(import_model(ModelSource(uri=str(model)), objects, Path()), tmp_path / "cache")
    assert not (folder / "own.py").exists()
    assert type(load_causal_lm(folder)).__module__ == "transformers.models.qwen2.modeling_qwen2"
    assert not marker.exists()


def test_pickled_weights_are_not_read(model, marker, tmp_path):
    import torch

    class Evil:
        def __reduce__(self):
            return Path.write_text, (marker, "code of the weights ran")

    (model / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Evil()}, model / "pytorch_model.bin")
    for look in (lambda: check_model(ModelSource(uri=str(model)), Path()), lambda: load_causal_lm(model)):
        with pytest.raises(ConfigError):
            look()
    assert not marker.exists()
