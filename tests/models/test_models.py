"""Model folders: what is refused and in which words, what is filed, and that the user's own files stay as they are."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import close_session
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import rollout_core.models.pretrained
from rollout_core.algorithms.supervised import load_reward_model
from rollout_core.base import watching
from rollout_core.base.errors import ConfigError, Conflict
from rollout_core.base.ids import hash_bytes, is_content_id
from rollout_core.config import ModelSource
from rollout_core.models import locating as model_import
from rollout_core.models.facts import ModelFacts, inspect_model
from rollout_core.models.locating import Unchecked, import_model, locate_model
from rollout_core.models.pretrained import (
    _KEPT_TOKENIZERS,
    borrowed_tokenizer,
    copy_tokenizer,
    load_causal_lm,
    load_tokenizer,
    renewed_tokenizer,
)
from rollout_core.objects import ObjectStore
from rollout_core.plans.plan import check_model


@pytest.fixture
def objects(tmp_path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{tmp_path / 'objects'}")


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(tiny_model, tmp_path / "work" / "model"))


@pytest.fixture
def word_tokenizer(tmp_path) -> Path:
    """Folder with nothing but another tokenizer: one token a word."""
    return make_word_tokenizer(tmp_path / "words", ["<unk>", "</s>", "sort", "=", *"0123456789"])


def make_word_tokenizer(folder: Path, words: list[str], **special: str) -> Path:
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **(special or {"eos_token": "</s>"}))
    tokenizer.save_pretrained(folder)
    return folder


def source(folder: Path | str, tokenizer: Path | str | None = None) -> ModelSource:
    return ModelSource(uri=str(folder), tokenizer=None if tokenizer is None else str(tokenizer))


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def state_of(folder: Path) -> dict[str, tuple[bytes, int, int, int]]:
    """Everything about the files of a folder that importing it must not change."""
    found = {}
    for path in sorted(folder.iterdir()):
        stat = path.stat()
        found[path.name] = (path.read_bytes(), stat.st_mtime_ns, stat.st_ino, stat.st_nlink)
    return found


# What is refused


def without(*patterns: str) -> Callable[[Path], object]:
    return lambda model: [path.unlink() for pattern in patterns for path in model.glob(pattern)]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("config.json"), r"has no config\.json; expected a model saved with save_pretrained"),
        (without("*.safetensors"), r"has no \*\.safetensors weights \(pickled weights are not read\)"),
        (lambda model: (model / "config.json").write_text("{"), r"config\.json: not JSON"),
        (lambda model: (model / "config.json").write_bytes(b"\xff\xfe"), r"config\.json: not JSON"),
        (lambda model: (model / "config.json").write_text("[1]"), r"config\.json: not JSON: expected an object"),
        (lambda model: edit(model / "config.json", model_type="no-such"), r"not a model that transformers knows"),
        (lambda model: (model / "config.json").write_text("{}"), r"not a model that transformers knows"),
        (lambda model: edit(model / "config.json", model_type="t5"), r"a 't5' is not a causal language model"),
        (
            lambda model: edit(model / "config.json", vocab_size=100),
            r"do not fit: .* ids up to 261, the model embeds 100",
        ),
        (without("token*", "vocab*", "merges*"), r"no tokenizer in .*; expected one of tokenizer\.json"),
        (without("tokenizer.json", "vocab*", "merges*"), r"no tokenizer in .*; expected one of tokenizer\.json"),
        (lambda model: (model / "tokenizer.json").write_text("{}"), r"no usable tokenizer in "),
        (
            lambda model: (model / "tokenizer.json").write_text('{"model": 3, "added_tokens": []}'),
            r"no usable tokenizer",
        ),
        (lambda model: edit(model / "tokenizer_config.json", eos_token=None), r"no end-of-sequence token"),
        (lambda model: os.truncate(model / "model.safetensors", 4000), r"is no whole safetensors file"),
        (
            lambda model: (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
            r"is no whole safetensors file .*; was it downloaded to the end, not as a pointer of Git LFS\?",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_refused_in_one_line(model, objects, damage, message):
    damage(model)
    with pytest.raises(ConfigError, match=message) as caught:
        inspect_model(model)
    assert "\n" not in str(caught.value)
    for look in (lambda: check_model(source(model), Path()), lambda: import_model(source(model), objects, Path())):
        with pytest.raises(ConfigError):
            look()
    assert dict(objects.blobs()) == {}


@pytest.mark.parametrize("uri", ["./none", "/no/such/folder", "a/b/c", "data/example/model", "-x"])
def test_a_folder_that_does_not_exist_is_refused_with_where_it_was_looked_for(tmp_path, uri):
    for download in (False, True):
        with pytest.raises(ConfigError, match=rf"model folder '{uri}' does not exist \(looked at .*{Path(uri).name}\)"):
            locate_model(source(uri), tmp_path, download=download)


def test_a_revision_of_what_is_here_is_refused(tiny_model, tmp_path):
    """It named a state of a repository, and what is in the folder may be another."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for uri, found in (
        (str(tiny_model), f"the folder {tiny_model}"),
        ("model.gguf", f"the file {tmp_path / 'model.gguf'}"),
        (hash_bytes(b"a model"), "a content id"),
    ):
        expected = f"is {found}, which has no revisions; leave out revision 'v2', or give a hub id"
        with pytest.raises(ConfigError, match=re.escape(expected)):
            locate_model(ModelSource(uri=uri, revision="v2"), tmp_path)


@pytest.mark.parametrize("uri", ["nobody/no-such-model", "no-such-model"])
def test_a_hub_id_that_is_not_cached_is_refused_when_offline(tmp_path, objects, uri):
    for look in (lambda: check_model(source(uri), tmp_path), lambda: import_model(source(uri), objects, tmp_path)):
        with pytest.raises(ConfigError, match=rf"model '{uri}' is not a folder here, and the hub could not be reached"):
            look()


def test_a_hub_id_that_cannot_be_one_is_refused(tmp_path, objects):
    with pytest.raises(ConfigError, match="neither a folder here nor a hub repository"):
        import_model(source("a--b/c..d"), objects, tmp_path)


def test_a_cached_hub_id_is_checked_and_imported_without_the_hub(tiny_model, tmp_path, objects, monkeypatch):
    """A hub cache holds links into a folder of blobs."""
    cache = tmp_path / "hub" / "models--somebody--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc123")
    snapshot = cache / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    for file in tiny_model.iterdir():
        blob = cache / "blobs" / hash_bytes(file.name.encode())
        blob.parent.mkdir(exist_ok=True)
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    facts = check_model(source("somebody/tiny"), tmp_path)
    assert facts is not None and facts.vocab_size == 262
    assert import_model(source("somebody/tiny"), objects, tmp_path) == import_model(
        source(tiny_model), objects, tmp_path
    )


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as a download needs: one repository, and none of any other name."""

    folder: Path
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path.rpartition("/")[2])
        if "somebody/tiny" not in self.path:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in self.path:
            listed = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": hash_bytes(file.name.encode())}
                for file in self.folder.iterdir()
            ]
            self._answer(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})
        elif "/revision/" in self.path:
            found = {"id": "somebody/tiny", "sha": COMMIT, "siblings": []}
            self._answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})
        else:
            name = self.path.rpartition("/")[2]
            headers = {"ETag": f'"{hash_bytes(name.encode())}"', "X-Repo-Commit": COMMIT}
            self._answer(200, (self.folder / name).read_bytes(), headers)

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


COMMIT = "0123456789" * 4


@pytest.fixture
def hub(tiny_model, tmp_path, monkeypatch) -> Iterator[type[Hub]]:
    """A hub on this machine, and an empty cache of it."""

    answering = type("Answering", (Hub,), {"folder": tiny_model, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        close_session()  # it was made for offline use
        yield answering
        server.shutdown()
        thread.join()
    close_session()


def test_of_a_model_on_the_hub_the_small_files_are_checked_first_and_the_rest_comes_later(
    hub, tiny_model, tmp_path, objects, monkeypatch
):
    for _ in range(2):
        assert check_model(source("somebody/tiny"), tmp_path) == inspect_model(tiny_model)
    assert "tokenizer.json" in hub.asked and "model.safetensors" not in hub.asked
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(watching, "STEP_BYTES", 1)
    with watching.watched(lambda *amount: seen.append(amount)):
        stored = import_model(source("somebody/tiny"), objects, tmp_path)
    size = (tiny_model / "model.safetensors").stat().st_size
    assert (size, size) in seen, "what is downloaded"
    assert 2 * size < seen[-1][0] <= seen[-1][1], "then hashed and stored"
    assert stored == import_model(source(tiny_model), objects, tmp_path)


def test_a_name_that_the_hub_does_not_know_is_refused(hub, tmp_path):
    with pytest.raises(ConfigError, match="model 'nosuch/model' is neither a folder here nor a hub repository"):
        check_model(source("nosuch/model"), tmp_path)


def test_a_hub_that_does_not_answer_leaves_the_model_unchecked(hub, tmp_path, objects, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unchecked, match="model 'nosuch/model', as the hub cannot be reached"):
        check_model(source("nosuch/model"), tmp_path)
    with pytest.raises(ConfigError, match="the hub could not be reached to look for it there"):
        import_model(source("nosuch/model"), objects, tmp_path)


def test_weights_that_are_not_all_there_are_refused_instead_of_drawn_at_random(model, objects):
    tensors = load_file(model / "model.safetensors")
    gone = [name for name in tensors if "layers.1.mlp" in name]
    save_file({name: tensor for name, tensor in tensors.items() if name not in gone}, model / "model.safetensors")
    for look in (
        lambda: inspect_model(model),
        lambda: import_model(source(model), objects, Path()),
        lambda: load_causal_lm(model),
    ):
        with pytest.raises(
            ConfigError, match=r"do not fit .*layers\.1\.mlp\.down_proj\.weight is missing \(and 2 more\)"
        ):
            look()


def test_a_tensor_of_another_shape_is_named_with_both_shapes(model):
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.zeros(3)}, model / "model.safetensors")
    for look in (inspect_model, load_causal_lm):
        with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape \[3\], not \[64\]$"):
            look(model)


def test_tied_and_needless_tensors_are_no_fault(model):
    """The output layer is the embedding in this model; buffers of old versions are not read."""
    tensors = load_file(model / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file({**tensors, "model.layers.0.rotary_emb.inv_freq": torch.zeros(3)}, model / "model.safetensors")
    inspect_model(model)
    edit(model / "config.json", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"lm_head\.weight is missing$"):
        inspect_model(model)


def test_a_shard_that_the_index_names_must_be_there(model):
    index = {"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"names model-2\.safetensors, which is not there"):
        inspect_model(model)


# What is known of one


@pytest.mark.parametrize("load", [load_causal_lm, partial(load_reward_model, new_head=True)])
def test_whoever_reads_weights_that_are_to_stay_unread_is_caught(tiny_model, weights_stay_unread, load):
    with pytest.raises(AssertionError, match="no weights may be loaded here"):
        load(tiny_model)


def test_a_good_folder_is_described_without_its_weights(tiny_model, monkeypatch, weights_stay_unread):
    monkeypatch.setattr(torch, "load", lambda *a, **k: 1 / 0)
    facts = inspect_model(tiny_model)
    assert (facts.vocab_size, facts.max_positions, facts.tokenizer_size) == (262, 256, 262)
    assert facts.has_chat_template is False


def test_a_chat_template_is_noticed(model):
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert inspect_model(model).has_chat_template is True


def test_a_tokenizer_smaller_than_the_model_is_fine(model):
    """Many models pad their embeddings."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    policy.resize_token_embeddings(512)
    policy.save_pretrained(model)
    assert inspect_model(model).vocab_size == 512


# Import


def test_a_folder_is_filed_under_the_id_of_its_content(tiny_model, model, objects, tmp_path):
    first = import_model(source(tiny_model), objects, Path())
    assert is_content_id(first) and objects.tree_is_present(first)
    assert import_model(source(model), objects, Path()) == first, "wherever it lies"
    assert import_model(source("work/model"), objects, tmp_path) == first, "relative to the given folder"
    assert objects.put_tree(tiny_model) == first, "the id of the folder itself, as trained checkpoints have it"


def test_the_filed_model_is_usable_as_it_is(tiny_model, objects, tmp_path):
    folder = objects.local_tree(import_model(source(tiny_model), objects, Path()), tmp_path / "cache")
    loaded, original = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, tiny_model))
    assert all(torch.equal(loaded[name], original[name]) for name in original)
    assert load_tokenizer(folder)("sort 1 =") == load_tokenizer(tiny_model)("sort 1 =")


def test_other_files_stay_behind_pickled_weights_above_all(model, objects):
    plain = import_model(source(model), objects, Path())
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "README.md", "optimizer.pt", ".gitattributes"):
        (model / name).write_bytes(b"anything")
    (model / "runs").mkdir()
    assert import_model(source(model), objects, Path()) == plain
    assert {file.path for file in objects.manifest(plain).files} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_a_content_id_is_an_address_like_any_other(tiny_model, objects, tmp_path):
    content_id = import_model(source(tiny_model), objects, Path())
    assert import_model(source(content_id), objects, tmp_path) == content_id
    assert check_model(source(content_id), tmp_path, objects) == inspect_model(tiny_model)
    with pytest.raises(Unchecked, match=f"model {content_id}, as the object store cannot be reached"):
        check_model(source(content_id), tmp_path)
    assert locate_model(source(content_id), tmp_path) is None
    unknown = hash_bytes(b"unknown")
    with pytest.raises(ConfigError, match=f"model {unknown} is not in the object store"):
        import_model(source(unknown), objects, tmp_path)


def test_a_model_part_of_which_is_gone_from_the_store_is_refused_by_its_id(tiny_model, objects, tmp_path):
    content_id = import_model(source(tiny_model), objects, Path())
    objects.delete(objects.manifest(content_id).files[-1].content_id)
    with pytest.raises(ConfigError, match=f"model {content_id} is not in the object store"):
        import_model(source(content_id), objects, tmp_path)


def test_another_tokenizer_takes_the_place_of_the_models_own(tiny_model, word_tokenizer, objects, tmp_path):
    content_id = import_model(source(tiny_model, word_tokenizer), objects, Path())
    assert content_id != import_model(source(tiny_model), objects, Path())
    folder = objects.local_tree(content_id, tmp_path / "cache")
    assert load_tokenizer(folder)("sort 3 =")["input_ids"] == [2, 7, 3]
    assert (folder / "model.safetensors").read_bytes() == (tiny_model / "model.safetensors").read_bytes()
    facts = check_model(source(tiny_model, word_tokenizer), Path())
    assert facts is not None and facts.tokenizer_size == 14


def test_a_tokenizer_is_what_its_file_says_whatever_the_models_type(tiny_model, word_tokenizer, tmp_path):
    """transformers knows better for some types of models, Qwen2 among them, and would split words in its own way."""
    shutil.copytree(tiny_model, tmp_path / "model")
    for path in word_tokenizer.iterdir():
        shutil.copy(path, tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    alone = load_tokenizer(word_tokenizer)
    text = "sort 3 1 2 = unheard of"
    assert tokenizer(text)["input_ids"] == alone(text)["input_ids"] == [2, 7, 5, 6, 3, 0, 0]
    assert tokenizer.eos_token_id == 1 and len(tokenizer) == 14


def test_nothing_of_the_models_own_tokenizer_is_left_beside_another(model, word_tokenizer, objects):
    for name in ("chat_template.jinja", "merges.txt", "vocab.json", "added_tokens.json"):
        (model / name).write_text("{}")
    manifest = objects.manifest(import_model(source(model, word_tokenizer), objects, Path()))
    assert {file.path for file in manifest.files} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        *(path.name for path in word_tokenizer.iterdir()),
    }


@pytest.mark.parametrize(
    ("words", "special", "message"),
    [
        (["<unk>", "</s>", *(f"w{number}" for number in range(300))], {}, "ids up to 301, the model embeds 262"),
        (["<unk>", "a"], {"bos_token": "a"}, "no end-of-sequence token"),
    ],
)
def test_another_tokenizer_that_does_not_fit_is_refused(tiny_model, objects, tmp_path, words, special, message):
    folder = make_word_tokenizer(tmp_path / "words", words, **special)
    for look in (
        lambda: check_model(source(tiny_model, folder), Path()),
        lambda: import_model(source(tiny_model, folder), objects, Path()),
    ):
        with pytest.raises(ConfigError, match=message):
            look()


def test_another_tokenizer_that_is_not_there_is_refused(tiny_model, objects, tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer folder '\./none' does not exist"):
        import_model(source(tiny_model, "./none"), objects, tmp_path)
    with pytest.raises(ConfigError, match="tokenizer 'no/such' is not a folder here"):
        check_model(source(tiny_model, "no/such"), tmp_path)


@pytest.mark.parametrize("foreign", [False, True])
def test_the_users_files_stay_as_they_are(model, word_tokenizer, objects, foreign):
    before = state_of(model), state_of(word_tokenizer)
    import_model(source(model, word_tokenizer if foreign else None), objects, Path())
    check_model(source(model, word_tokenizer if foreign else None), Path())
    assert (state_of(model), state_of(word_tokenizer)) == before


def test_weights_are_not_copied_on_the_way(model, objects, monkeypatch):
    """They may be larger than the disk of temporary files."""
    monkeypatch.setattr(shutil, "copyfile", lambda *arguments: 1 / 0)
    monkeypatch.setattr(os, "link", lambda *arguments, **options: 1 / 0)
    import_model(source(model), objects, Path())


def test_a_second_import_writes_no_blob(tiny_model, objects, monkeypatch):
    content_id = import_model(source(tiny_model), objects, Path())
    written: list[str] = []
    write = objects.files.write
    monkeypatch.setattr(objects.files, "write", lambda key, data: (written.append(key), write(key, data)))
    monkeypatch.setattr(objects.files, "upload", lambda: 1 / 0)
    assert import_model(source(tiny_model), objects, Path()) == content_id
    assert written == []


def test_a_folder_edited_while_it_is_imported_is_refused_and_not_known_as_good(model, objects, monkeypatch):
    inspect = model_import.inspect_bounded

    def inspect_and_edit(folder: Path, **options: bool) -> ModelFacts:
        facts = inspect(folder, **options)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 17}))
        return facts

    monkeypatch.setattr(model_import, "inspect_bounded", inspect_and_edit)
    with pytest.raises(Conflict, match="changed while it was read"):
        import_model(source(model), objects, Path())
    assert model_import.recall_model(source(model), Path(), objects) is None
    monkeypatch.undo()
    import_model(source(model), objects, Path())
    facts = model_import.recall_model(source(model), Path(), objects)
    assert facts is not None and facts.max_positions == 17


def test_an_edit_that_leaves_size_and_time_of_a_file_is_noticed(model, objects):
    import_model(source(model), objects, Path())
    file = model / "config.json"
    before = file.stat()
    file.write_text(file.read_text().replace("256", "255"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert model_import.recall_model(source(model), Path(), objects) is None


def test_a_tokenizer_edited_while_it_is_loaded_is_not_taken_for_the_other(model, monkeypatch):
    load = rollout_core.models.pretrained.load_tokenizer

    def load_and_edit(folder: Path) -> Any:
        tokenizer = load(folder)
        (model / "chat_template.jinja").write_text("{{ messages }}")
        return tokenizer

    monkeypatch.setattr(rollout_core.models.pretrained, "load_tokenizer", load_and_edit)
    with pytest.raises(Conflict, match=r"the tokenizer in .* changed while it was read"):
        inspect_model(model)


def test_a_tokenizer_is_loaded_once_for_all_folders_with_the_same_files(model, tmp_path):
    """As those of each iteration of a run are."""
    other = Path(shutil.copytree(model, tmp_path / "other"))
    with borrowed_tokenizer(model) as first, borrowed_tokenizer(model) as second:
        assert first is not second, "one at a time, for tokenizers are not thread-safe"
    with borrowed_tokenizer(other) as again:
        assert again is second or again is first
    held = renewed_tokenizer(model, None)
    assert renewed_tokenizer(other, held) is held and held[0] not in (first, second)
    for name, text in (
        ("chat_template.jinja", "{{ messages }}"),
        ("additional_chat_templates/tool_use.jinja", "{{ messages }}"),
        ("config.json", (other / "config.json").read_text() + "\n"),
    ):
        (other / name).parent.mkdir(exist_ok=True)
        (other / name).write_text(text)
        with borrowed_tokenizer(other) as changed, borrowed_tokenizer(model) as same:
            assert changed not in (first, second) and same in (first, second), name
        assert renewed_tokenizer(other, held)[0] not in (held[0], changed)
    (model / "weights.safetensors").write_text("are none of it")
    with borrowed_tokenizer(model) as same:
        assert same in (first, second)


def test_tokenizers_that_were_not_asked_for_lately_are_let_go(model, tmp_path):
    with borrowed_tokenizer(model) as first:
        pass
    for number in range(_KEPT_TOKENIZERS):
        other = Path(shutil.copytree(model, tmp_path / str(number)))
        (other / "chat_template.jinja").write_text(f"{{{{ messages }}}}{number}")
        with borrowed_tokenizer(other):
            pass
    with borrowed_tokenizer(model) as again:
        assert again is not first


def test_a_tokenizer_that_failed_or_changed_while_it_was_read_is_not_lent_again(model, monkeypatch):
    with pytest.raises(ZeroDivisionError), borrowed_tokenizer(model) as broken:
        raise ZeroDivisionError
    load = rollout_core.models.pretrained.load_tokenizer
    with borrowed_tokenizer(model) as good:
        assert good is not broken

    def load_and_edit(folder: Path) -> Any:
        tokenizer = load(folder)
        (model / "chat_template.jinja").write_text("{{ messages }}")
        return tokenizer

    (model / "chat_template.jinja").write_text("{{ messages }} ")
    monkeypatch.setattr(rollout_core.models.pretrained, "load_tokenizer", load_and_edit)
    with borrowed_tokenizer(model) as torn:
        pass
    monkeypatch.undo()
    (model / "chat_template.jinja").write_text("{{ messages }} ")
    with borrowed_tokenizer(model) as whole:
        assert whole is not torn and whole.chat_template == "{{ messages }} "


def test_a_tokenizer_is_copied_byte_for_byte_and_alone(tiny_model, tmp_path):
    (tmp_path / "target").mkdir()
    copy_tokenizer(tiny_model, tmp_path / "target")
    names = {path.name for path in (tmp_path / "target").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json"}
    assert all((tmp_path / "target" / name).read_bytes() == (tiny_model / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    ("kind", "options", "size"),
    [
        ("llama", {"num_attention_heads": 4}, 16),
        ("qwen3", {"num_attention_heads": 4, "head_dim": 32}, 32),
        ("mamba", {}, None),
        ("rwkv", {}, None),
    ],
)
def test_the_size_of_attention_heads_is_told_where_there_are_any(kind: str, options: dict[str, int], size: int | None):
    from transformers import AutoConfig

    from rollout_core.models.facts import _size  # pyright: ignore[reportPrivateUsage]

    config = AutoConfig.for_model(kind, hidden_size=64, num_hidden_layers=1, vocab_size=32, **options)
    assert _size(config).head_size == size
