"""Models taken out: the folder that transformers loads, the card that says what was recorded, and the hub."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from huggingface_hub import close_session
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rollout_core.base.errors import ConfigError, Conflict, NotFound, Recoverable
from rollout_core.base.ids import ContentId, content_id
from rollout_core.exports.hugging_face import export_model, model_to_export, push_to_hub
from rollout_core.exports.model_card import history_of_model, model_card
from rollout_core.models.gguf_writing import write_gguf
from rollout_core.models.precision import cast_model, in_precision_of
from rollout_core.objects import ObjectStore, SnapshotStore
from rollout_core.objects.lineage import Lineage, record_lineage
from rollout_core.objects.origins import Source, record_import
from rollout_core.promotion.history import Entry, _write, history_of  # pyright: ignore[reportPrivateUsage]
from tests.cli.test_cli import refused, rollout


def made(stage: str, inputs: dict[str, Any], *outputs: ContentId) -> Lineage:
    key = content_id("test/1", [stage, inputs])
    now = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    return Lineage(
        stage=stage, version=1, key=key, inputs=inputs, outputs=outputs, created_at=now, software={"torch": "2"}
    )


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{tmp_path / 'objects'}")


@pytest.fixture
def model(tiny_model: Path, objects: ObjectStore, tmp_path: Path) -> ContentId:
    """A model with a history: a base model of the hub, rows of a file, an update, an evaluation, a promotion."""
    state = tmp_path / "state"
    (state / "model").mkdir(parents=True)
    for file in tiny_model.iterdir():
        (state / "model" / file.name).write_bytes(file.read_bytes())
    found = objects.put_tree(state / "model")
    SnapshotStore(objects).save(state, run_id="one", step=2, algorithm="sft")
    base, rows = (objects.put_bytes(text) for text in (b"base", b"rows"))
    hub = {"address": "somebody/tiny", "hub_id": "somebody/tiny", "commit": "c0ffee", "size_bytes": 4, "num_files": 1}
    record_import(objects, base, Source(kind="model", **hub))
    file = {"address": "rows.jsonl", "place": "/home/me/rows.jsonl", "size_bytes": 4, "num_files": 1}
    record_import(objects, rows, Source(kind="data", **file))
    steps = b"".join(json.dumps({"step": step, "loss": 2.0 / step}).encode() + b"\n" for step in (1, 2))
    inputs = {"model": base, "dataset": rows, "settings": {"kind": "sft", "minibatch_size": 64}}
    record_lineage(objects, made("sft_update", inputs, found, objects.put_bytes(steps)))
    scores = objects.put_bytes(b"[1.0,0.0,0.5]")
    judged = {"prompts": {"model": found}, "reward": {"kind": "exact_match"}, "label": "after"}
    record_lineage(objects, made("evaluate", judged, scores))
    entry = {"action": "promote", "resource": "policy", "previous": None, "by": "me", "reason": "0.1 -> 0.5"}
    _write(objects, Entry(model=found, at=datetime(2026, 1, 2, tzinfo=UTC), **entry))
    return found


def test_a_model_is_exported_with_all_that_was_recorded_of_it(objects: ObjectStore, model: ContentId, tmp_path: Path):
    export_model(objects, model, tmp_path / "out" / "tiny")
    folder = tmp_path / "out" / "tiny"
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    card = (folder / "README.md").read_text()
    for words in (
        "base_model:\n- somebody/tiny",
        "https://huggingface.co/somebody/tiny) at `c0ffee`",
        "| data | `rows.jsonl` | 4 |",
        '"minibatch_size": 64',
        "| loss | █▁ | 2 | 1 | 1 | 2 |",
        "| after | 3 | 0.5000 | `exact_match` |",
        "Promoted as `policy` on 2026-01-02 00:00 UTC: 0.1 -> 0.5",
        f"rollout reproduce {model.short} --check",
    ):
        assert words in card, words
    records = (folder / "lineage.json").read_text()
    # Where the file lay on somebody's machine is nobody's business.
    assert "/home/me" not in records + card
    assert [item["stage"] for item in json.loads(records)] == ["sft_update", "import", "import"]
    assert len((folder / "training-metrics.jsonl").read_text().splitlines()) == 2
    with pytest.raises(Conflict, match="exists and is not empty"):
        export_model(objects, model, folder)


def test_a_trained_model_is_exported_in_the_precision_of_its_base(
    objects: ObjectStore, tiny_model: Path, half_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ROLLOUT_STORAGE", objects.url)
    base, trained = objects.put_tree(half_model), objects.put_tree(tiny_model)
    record_lineage(objects, made("sft_update", {"model": base, "dataset": objects.put_bytes(b"rows")}, trained))
    asked = (("base", "bfloat16"), ("stored", "float32"), ("float32", "float32"), ("float16", "float16"))
    for dtype, expected in asked:
        done = rollout("export", trained, str(tmp_path / dtype), "--dtype", dtype)
        assert done.stdout.endswith(f", weights in {expected}\n") == (expected != "float32"), done.stdout
        found = AutoModelForCausalLM.from_pretrained(tmp_path / dtype, dtype="auto")
        assert found.dtype == getattr(torch, expected)
    assert rollout("export", trained, str(tmp_path / "own")).exit_code == 0
    cast_model(tiny_model, tmp_path / "by chance", "bfloat16", stochastic=True)
    assert weights_of(tmp_path / "own") == weights_of(tmp_path / "by chance") != weights_of(tmp_path / "stored")
    assert "| weights | bfloat16 in this folder, another dtype" in (tmp_path / "own" / "README.md").read_text()

    rounded = in_precision_of(trained, base, objects, tmp_path / "cache")
    assert rounded == objects.put_tree(tmp_path / "by chance")
    later = objects.put_bytes(b"rounded")
    record_lineage(objects, made("round_weights", {"model": trained, "base": base}, later))
    assert [update.stage for update in history_of_model(objects, later).updates] == ["sft_update"]


def test_an_exported_model_names_the_token_by_which_its_template_ends_a_turn(
    objects: ObjectStore, chat_base: Path, tiny_model: Path, tmp_path: Path
):
    tokenizer = AutoTokenizer.from_pretrained(chat_base)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end != tokenizer.eos_token_id
    export_model(objects, objects.put_tree(chat_base), tmp_path / "chat")
    assert GenerationConfig.from_pretrained(tmp_path / "chat").eos_token_id == sorted([tokenizer.eos_token_id, end])
    changed = tmp_path / "gpt2"
    shutil.copytree(chat_base, changed)
    config = json.loads((changed / "config.json").read_text())
    for architecture, ends in (("GPT2LMHeadModel", 2), ("Qwen2ForSequenceClassification", 1)):
        (changed / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
        export_model(objects, objects.put_tree(changed), tmp_path / architecture)
        said = json.loads((tmp_path / architecture / "generation_config.json").read_text())["eos_token_id"]
        assert (len(said) if isinstance(said, list) else 1) == ends
    export_model(objects, objects.put_tree(tiny_model), tmp_path / "plain")
    for name in ("generation_config.json", "model.safetensors"):
        assert (tmp_path / "plain" / name).read_bytes() == (tiny_model / name).read_bytes()


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_gguf_file_is_the_same_model(kind: str, tiny_model: Path, tmp_path: Path):
    names = {"vocab_size": 600, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    # Of Qwen 3 transformers reads no other width of a head from the file.
    more = {"sliding_window": None} if kind == "mistral" else {"head_dim": 128} if kind == "qwen3" else {}
    config = AutoConfig.for_model(kind, **names, **heads, **more, tie_word_embeddings=kind == "qwen2")
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if kind == "qwen3" else torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # biases too
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "model" / "model.gguf", name="tiny")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", gguf_file="model.gguf", dtype=torch.float32)
    tokens = torch.arange(0, 600, 25)[None]
    torch.testing.assert_close(again(tokens).logits, model.float()(tokens).logits, rtol=0, atol=0)
    fields = gguf.GGUFReader(tmp_path / "model" / "model.gguf").fields
    document = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    assert fields["tokenizer.ggml.merges"].contents() == [" ".join(pair) for pair in document["model"]["merges"]]
    listed = fields["tokenizer.ggml.tokens"].contents()
    assert len(listed) == 600 and {listed[number] for number in document["model"]["vocab"].values()} == set(
        document["model"]["vocab"]
    )


def test_what_gguf_would_hold_as_another_model_is_refused(
    objects: ObjectStore, model: ContentId, tiny_model: Path, tmp_path: Path
):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    settings = json.loads((folder / "config.json").read_text())
    for changed, problem in (
        ({"model_type": "gpt2"}, "takes models of type llama, mistral, qwen2, qwen3; this is one of gpt2"),
        ({"hidden_act": "gelu"}, "does not write models with hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type 'linear'"),
    ):
        (folder / "config.json").write_text(json.dumps({**settings, **changed}))
        with pytest.raises(ConfigError, match=problem):
            write_gguf(folder, tmp_path / "refused.gguf", name="refused")
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": 3}))
    with pytest.raises(ConfigError, match=r"the tokenizer has token \d+, and the model rows for 3 tokens only"):
        write_gguf(folder, tmp_path / "refused.gguf", name="refused")
    (folder / "config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "pre_tokenizer": {"type": "Whitespace"}}))
    with pytest.raises(ConfigError, match="has a BPE model after Whitespace"):
        write_gguf(folder, tmp_path / "refused.gguf", name="refused")
    assert not (tmp_path / "refused.gguf").exists()


def test_models_and_training_states_are_found_by_their_first_digits(objects: ObjectStore, model: ContentId):
    state = SnapshotStore(objects).list()[0]
    for digits in (model, model[:8], state.id, state.id[:12]):
        assert model_to_export(objects, digits) == model
    with pytest.raises(ConfigError, match="is no model"):
        model_to_export(objects, objects.put_bytes(b"rows"))
    with pytest.raises(NotFound, match="no folder has an id that begins with"):
        model_to_export(objects, "0123456789")
    with pytest.raises(ConfigError, match="not a content id: 'policy'"):
        model_to_export(objects, "policy")


def test_of_a_model_without_history_the_card_says_nothing_that_is_not_known(objects: ObjectStore, tiny_model: Path):
    card = model_card(history_of_model(objects, objects.put_tree(tiny_model)), "plain")
    assert "## Use" in card
    assert not any(title in card for title in ("Made from", "Configuration", "Figures", "Evaluation", "Reproduce"))


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as an upload needs."""

    received: dict[str, Any]
    """Files by name, and what was asked for."""
    token = "hf_" + "t" * 34

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            self._answer(401, {"error": f"Invalid token {self.headers.get('Authorization')}"})
        elif self.path == "/api/repos/create":
            self.received["repository"] = json.loads(body)
            self._answer(200, {"url": f"{self.address}/me/tiny", "name": "me/tiny"})
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            found = [
                {**item, "authenticated": True, "actions": {"upload": {"href": f"{self.address}/lfs/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": found})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.received[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.received[value["path"]] = self.received.pop(value["oid"])
            answer = {"success": True, "commitOid": "c" * 40, "commitUrl": f"{self.address}/me/tiny/commit/{'c' * 40}"}
            self._answer(200, answer)
        else:
            self._answer(500, {"error": self.path})

    def do_PUT(self) -> None:
        self.received[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, {})

    def do_GET(self) -> None:
        self._answer(200, {"id": "me/tiny", "sha": "b" * 40, "siblings": []})

    @property
    def address(self) -> str:
        return f"http://{self.headers['Host']}"

    def _answer(self, status: int, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    answering = type("Answering", (Hub,), {"received": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        # Large files go by LFS then; the other way, Xet, is a protocol of compiled code and a service of its own.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("ROLLOUT_SECRET_HF_TOKEN", Hub.token)
        close_session()  # it was made for offline use
        yield answering
        server.shutdown()
        thread.join()
    close_session()


def test_a_model_is_uploaded_to_the_hub(hub: type[Hub], objects: ObjectStore, model: ContentId, tmp_path: Path):
    export_model(objects, model, tmp_path / "tiny")
    assert push_to_hub(tmp_path / "tiny", "me/tiny").endswith(f"/me/tiny/commit/{'c' * 40}")
    asked = hub.received.pop("repository")
    assert asked["name"] == "tiny" and asked["organization"] == "me"
    assert asked.get("private") is True or asked.get("visibility") == "private"
    assert hub.received == {file.name: file.read_bytes() for file in (tmp_path / "tiny").iterdir()}


def test_what_the_hub_refuses_is_told_without_the_token(hub, objects, model, tmp_path, monkeypatch):
    export_model(objects, model, tmp_path / "tiny")
    hub.token = "another"
    with pytest.raises(ConfigError, match="set ROLLOUT_SECRET_HF_TOKEN to a token that may write there") as refused:
        push_to_hub(tmp_path / "tiny", "me/tiny")
    assert Hub.token not in str(refused.value)
    with pytest.raises(ConfigError, match="is no name of a repository"):
        push_to_hub(tmp_path / "tiny", "not/a/name")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Recoverable, match="the hub cannot be reached"):
        push_to_hub(tmp_path / "tiny", "me/tiny")


def test_export_by_command(hub, objects, model, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_STORAGE", objects.url)
    done = rollout("export", model[:8], str(tmp_path / "out"), "--push-to-hub", "me/tiny")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"{tmp_path / 'out'}: model {model}"
    assert b"# me/tiny" in hub.received["README.md"]
    assert "nowhere to export to" in refused(rollout("export", model[:8]))
    alone = ("export", model[:8], str(tmp_path / "adapter"), "--adapter")
    assert "has no adapter: sft_update trained its own weights" in refused(rollout(*alone))
    assert "leave out --gguf and --dtype" in refused(rollout(*alone, "--gguf"))
    nobodys = rollout("export", "latest", str(tmp_path / "other"), "--resource", "nobodys")
    assert "'nobodys' serves no model of ours" in refused(nobodys)
    # The database knows nothing of "policy", and its history does.
    latest = rollout("export", "latest", str(tmp_path / "latest"))
    assert latest.stdout.startswith(f"{tmp_path / 'latest'}: model {history_of(objects, 'policy')[-1].model}")
