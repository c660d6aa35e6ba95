"""A chat template that a configuration gives is part of the model: of its id and its folder, and of what is planned."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.config import ModelSource
from rollout_core.data.datasets import PromptRow
from rollout_core.data.text import tokenize_prompts
from rollout_core.models.bounded.tokenizing import look_into
from rollout_core.models.chat_templates import own_templates, prelude, written_in_words
from rollout_core.models.locating import describe, import_model
from rollout_core.models.pretrained import load_tokenizer
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import lineage_of
from tests.algorithms.test_templates import FAMILIES, TRL, template_of

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "2"}]
SWITCH = (
    "{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and enable_thinking is false %}"
    "<think></think>{% endif %}{% endif %}"
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def rendered(template: str, **variables: Any) -> str:
    """The text, or the error that the template raises."""
    variables = {"bos_token": "<s>", "eos_token": "</s>", **variables}
    try:
        texts, _ = render_jinja_template([TALK], chat_template=template, add_generation_prompt=True, **variables)
    except Exception as error:  # noqa: BLE001 - of a template with a value that it was not written for
        return repr(error)
    return texts[0]


@given(value=values, begin=st.text("\n \t{}a", max_size=4))
def test_a_value_is_read_back_whatever_the_template_begins_with(value: Any, begin: str):
    template = begin.replace("{", "{{ '{' }}") + "{{ v | tojson }}{% macro m() %}{{ v == w }}{% endmacro %}{{ m() }}"
    assert rendered(prelude({"v": value}) + template, w=value) == rendered(template, v=value, w=value)
    assert rendered(prelude({"v": value}) + template, v=7, w=7) == rendered(template, v=7, w=7)


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_write_with_a_value_what_they_write_where_it_is_passed(name: str):
    template = template_of(name)
    read = look_into(template, "the template") - {"bos_token", "eos_token"}
    for variable in read:
        for value in (True, False, "low"):
            given_values = {variable: value}
            assert rendered(prelude(given_values) + template) == rendered(template, **given_values)
    assert rendered(prelude({}) + template) == rendered(template)


def test_variables_of_known_templates_are_found():
    for name, variable in (("Qwen3", "enable_thinking"), ("gpt-oss", "reasoning_effort"), ("Llama 3.2", "date_string")):
        assert name in TRL and variable in look_into(template_of(name), "the template")


@pytest.fixture(scope="module")
def objects() -> ObjectStore:
    return ObjectStore.from_url("memory://templates")


def test_a_template_makes_another_model_of_the_same_weights(tiny_model: Path, objects: ObjectStore, tmp_path: Path):
    plain = import_model(ModelSource(uri=str(tiny_model)), objects, tmp_path)
    assert import_model(ModelSource(uri=str(tiny_model)), objects, tmp_path) == plain
    (tmp_path / "chat.jinja").write_text(SWITCH)
    (tmp_path / "copy.jinja").write_text(SWITCH)

    def imported(**template: Any) -> ContentId:
        return import_model(ModelSource(uri=str(tiny_model), **template), objects, tmp_path)

    of_file = imported(chat_template="chat.jinja")
    assert of_file != plain
    assert imported(chat_template="copy.jinja") == imported(chat_template=SWITCH) == of_file
    (tmp_path / "copy.jinja").write_text(SWITCH + " ")
    assert imported(chat_template="copy.jinja") not in (plain, of_file)
    quiet = imported(chat_template="chat.jinja", chat_template_kwargs={"enable_thinking": False})
    assert quiet not in (plain, of_file)
    # A stored model gets values, too, and weights are not stored again.
    stored = ModelSource(uri=of_file, chat_template_kwargs={"enable_thinking": False})
    assert import_model(stored, objects, tmp_path) == quiet
    assert import_model(ModelSource(uri=of_file, chat_template=SWITCH), objects, tmp_path) == of_file
    before, after = ({file.path: file.content_id for file in objects.manifest(model).files} for model in (plain, quiet))
    assert set(after) - set(before) == {"chat_template.jinja"} and before.items() <= after.items()
    made = lineage_of(objects, quiet)
    assert made is not None and made.stage == "write_chat_template"
    assert written_in_words(quiet, objects) == "of the run's configuration, with enable_thinking = false"
    assert (written_in_words(of_file, objects), written_in_words(plain, objects)) == (
        "of the run's configuration",
        None,
    )
    objects.get_tree(quiet, tmp_path / "quiet")
    tokenizer = load_tokenizer(tmp_path / "quiet")
    [ids] = tokenize_prompts(tokenizer, [PromptRow.model_validate({"messages": TALK[:1]})])
    assert tokenizer.decode(ids) == "<user>hi<assistant><think></think>"
    loud = import_model(ModelSource(uri=quiet, chat_template_kwargs={"enable_thinking": True}), objects, tmp_path)
    objects.get_tree(loud, tmp_path / "loud")
    [ids] = tokenize_prompts(load_tokenizer(tmp_path / "loud"), [PromptRow.model_validate({"messages": TALK[:1]})])
    assert tokenizer.decode(ids) == "<user>hi<assistant>"


def test_a_plan_reads_the_template_that_the_run_will_have(tiny_model: Path, objects: ObjectStore, tmp_path: Path):
    source = ModelSource(uri=str(tiny_model), chat_template=SWITCH, chat_template_kwargs={"enable_thinking": False})
    model = import_model(source, objects, tmp_path)
    [stored] = [file for file in objects.manifest(model).files if file.path == "chat_template.jinja"]
    for described in (source, ModelSource(uri=model)):
        with describe(described, tmp_path, objects) as found:
            [text] = own_templates(found.folder).values()
            facts = found.inspect()
        assert objects.get_bytes(stored.content_id) == text.encode()
        assert facts.has_chat_template and facts.tokenizer.chat_template == text


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
WITH_TOOLS = "{{ '[' }}{% for t in tools %}{{ t.function.name }}{% endfor %}{{ ']' }}" + SWITCH


def with_templates(model: Path, folder: Path, **templates: str) -> Path:
    """A copy of a model whose tokenizer has several templates by name, as Command R's and Hermes 2 Pro's have."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def prompt_texts(folder: Path) -> list[str]:
    """Of conversations without tools, with them, and without."""
    tokenizer = load_tokenizer(folder)
    rows = [{"messages": TALK[:1]}, {"messages": TALK[:1], "tools": [TOOL]}, {"messages": TALK[:1]}]
    return [tokenizer.decode(ids) for ids in tokenize_prompts(tokenizer, list(map(PromptRow.model_validate, rows)))]


def test_each_of_several_templates_gets_the_values_and_conversations_with_tools_have_theirs(
    tiny_model: Path, objects: ObjectStore, tmp_path: Path
):
    several = with_templates(tiny_model, tmp_path / "several", default=SWITCH, tool_use=WITH_TOOLS, rag="")
    assert own_templates(several) == {"default": SWITCH, "tool_use": WITH_TOOLS}
    plain, tools = "<user>hi<assistant>", "[add]<user>hi<assistant>"
    assert prompt_texts(several) == [plain, tools, plain]
    tokenizer = load_tokenizer(several)
    as_transformers_does = {"tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(TALK[:1], **as_transformers_does) == plain
    assert tokenizer.apply_chat_template(TALK[:1], tools=[TOOL], **as_transformers_does) == tools
    source = ModelSource(uri=str(several), chat_template_kwargs={"enable_thinking": False})
    quiet = import_model(source, objects, tmp_path)
    objects.get_tree(quiet, tmp_path / "quiet")
    thought = "<think></think>"
    assert prompt_texts(tmp_path / "quiet") == [plain + thought, tools + thought, plain + thought]
    with describe(
        ModelSource(uri=str(several), chat_template_kwargs={"enable_thinking": False}), tmp_path, None
    ) as found:
        assert prompt_texts(found.folder) == prompt_texts(tmp_path / "quiet")
    # A template of one's own is the only one.
    chosen = import_model(ModelSource(uri=quiet, chat_template=SWITCH), objects, tmp_path)
    objects.get_tree(chosen, tmp_path / "chosen")
    assert prompt_texts(tmp_path / "chosen") == [plain] * 3


def test_several_templates_without_a_default_one_are_named(tiny_model: Path, tmp_path: Path):
    folder = with_templates(tiny_model, tmp_path / "named", rag=SWITCH, tool_use=WITH_TOOLS)
    with pytest.raises(ConfigError, match=r"by name \(rag, tool_use\) and none is 'default'; give one"):
        prompt_texts(folder)


def test_templates_of_a_folder_by_name(tmp_path: Path):
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    by_name = {"tool_use": "tools", "default": "plain"}
    for entry, expected in ((several, by_name), ("one", {"default": "one"}), ("", {}), (None, {})):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
        assert own_templates(tmp_path) == expected


@pytest.mark.parametrize("name", ["messages", "bos_token", "a-b", "", "none", "größe"])
def test_names_that_no_setting_gives_are_refused(name: str):
    with pytest.raises(ValueError, match="chat_template_kwargs"):
        ModelSource(uri="model", chat_template_kwargs={name: 1})


def test_what_is_no_template_is_one_clear_error(tiny_model: Path, objects: ObjectStore, tmp_path: Path):
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe{{")
    (tmp_path / "empty.jinja").write_text(" \n")

    def problem(**template: Any) -> str:
        source = ModelSource(uri=str(tiny_model), **template)
        with pytest.raises(ConfigError) as caught:
            import_model(source, objects, tmp_path)
        with pytest.raises(ConfigError) as planned, describe(source, tmp_path, objects):
            pass
        assert str(planned.value) == str(caught.value)
        return str(caught.value)

    assert "chat_template broken.jinja, line 2: not a Jinja template: unexpected '}'" in problem(
        chat_template="broken.jinja"
    )
    assert "chat_template, line 1: not a Jinja template: No filter named 'nope'" in problem(
        chat_template="{{ messages | nope }}"
    )
    missing = problem(chat_template="nowhere.jinja")
    assert "nowhere.jinja cannot be read" in missing and "No such file" in missing and "or its text" in missing
    assert "it is no UTF-8 text" in problem(chat_template="binary.jinja")
    (tmp_path / "large.jinja").write_text("a" * 2_000_000)
    assert "large.jinja has more than 1,048,576 bytes" in problem(chat_template="large.jinja")
    os.mkfifo(tmp_path / "pipe.jinja")
    assert "pipe.jinja is no file" in problem(chat_template="pipe.jinja")
    assert "/dev/zero is no file" in problem(chat_template="/dev/zero")
    assert "empty.jinja is empty" in problem(chat_template="empty.jinja")
    assert "chat_template never reads 'enable_thinkin'; did you mean 'enable_thinking'?" in problem(
        chat_template=SWITCH, chat_template_kwargs={"enable_thinkin": False}
    )
    assert "the model has no chat template that could read them" in problem(chat_template_kwargs={"a": 1})
