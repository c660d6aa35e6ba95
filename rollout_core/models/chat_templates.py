"""A chat template of the user's choice for a model, and values for the variables that it reads.

Both become part of the model: its folder gets a ``chat_template.jinja`` that begins with the values, each for where
nobody gives another. (A model of several named templates gets the values in each, in its tokenizer_config.json.) So the
model has an id of its own, whatever reads the folder writes conversations alike (training, every engine, a server, vLLM
with an exported folder), and none of them needs a setting.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, near
from rollout_core.base.ids import ContentId
from rollout_core.base.locks import scratch_folder
from rollout_core.config import ModelSource
from rollout_core.config.base import is_template_text
from rollout_core.models.bounded.tokenizing import look_into
from rollout_core.models.pretrained import read_object
from rollout_core.objects import ObjectStore, TreeManifest
from rollout_core.objects.lineage import lineage_of, record_derivation
from rollout_core.objects.trees import TreeFile

TEMPLATE_FILE = "chat_template.jinja"
REPLACED_FILES = (TEMPLATE_FILE, "chat_template.json")
"""Files of a model folder in whose place the chosen template stands. The one in tokenizer_config.json counts only where
there is none of these."""
TEMPLATE_SOURCES = (TEMPLATE_FILE, "tokenizer_config.json")
WRITE_STAGE = "write_chat_template"
TEMPLATED_REFS = "templated-models/"
_MOST_BYTES = 2**20
_DEFAULT = "default"


def template_files(source: ModelSource, base: Path, folder: Path) -> dict[str, bytes]:
    """The files that give a model ``source``'s template and values, in place of its `REPLACED_FILES`. ``folder`` has
    its `TEMPLATE_SOURCES`. A relative path starts at ``base``.

    A model may have several templates by name, such as ``tool_use`` for conversations with tools. Values go to each of
    them; a template of the user's choice takes the place of all.

    Raises ConfigError where what is chosen is no template, or reads none of the values.
    """
    where, named = _chosen(source, base, folder)
    read = {name for text in named.values() for name in look_into(text, where)}
    given = source.chat_template_kwargs
    for name in given:
        if name not in read:
            raise ConfigError(f"chat_template_kwargs: {where} never reads {name!r}; {near(name, read)}")
    written = {name: prelude(given) + text for name, text in named.items()}
    if written.keys() == {_DEFAULT}:
        return {TEMPLATE_FILE: written[_DEFAULT].encode()}
    settings = dict(read_object(folder / "tokenizer_config.json"))
    settings["chat_template"] = [{"name": name, "template": text} for name, text in written.items()]
    return {"tokenizer_config.json": (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()}


def own_templates(folder: Path) -> dict[str, str]:
    """The chat templates of a model folder by their names; most have one, ``default``."""
    file, settings = folder / TEMPLATE_FILE, folder / "tokenizer_config.json"
    if file.is_file():
        return {_DEFAULT: _read(file, str(file))}
    found = read_object(settings).get("chat_template") if settings.is_file() else None
    if not isinstance(found, list):
        found = [{"name": _DEFAULT, "template": found}]
    entries = [(entry.get("name"), entry.get("template")) for entry in found if isinstance(entry, Mapping)]
    return {name: text for name, text in entries if isinstance(name, str) and isinstance(text, str) and text}


def _chosen(source: ModelSource, base: Path, folder: Path) -> tuple[str, Mapping[str, str]]:
    """What the template is called in messages, and its text; the texts by name, where the model has several."""
    given = source.chat_template
    if given is None:
        found = own_templates(folder)
        if not found:
            raise ConfigError(
                "chat_template_kwargs: the model has no chat template that could read them; give one as chat_template"
            )
        return "the model's chat template", found
    if is_template_text(given):
        return "chat_template", {_DEFAULT: given}
    return f"chat_template {given}", {_DEFAULT: _read(base / given, f"chat_template {given}")}


def _read(file: Path, where: str) -> str:
    try:
        if file.exists() and not file.is_file():  # a pipe would be waited for
            raise ConfigError(f"{where} is no file (looked at {file}); give one with a Jinja template, or its text")
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{where} has more than {_MOST_BYTES:,} bytes; expected a Jinja template")
        with file.open(encoding="utf-8", newline="") as opened:
            text = opened.read()
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # no UTF-8, or a path that cannot be one
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(
            f"{where} cannot be read (looked at {file}): {reason}; give the path of a file with a Jinja template, or "
            "its text"
        ) from error
    if not text.strip():
        raise ConfigError(f"{where} is empty; expected a Jinja template")
    return text


def prelude(values: Mapping[str, Any]) -> str:
    """What is put before a template so that it reads these values where nobody gives others.

    The line break at its end is not rendered, and what follows is still the beginning of a line, so that the template
    writes what it would write without (transformers renders with ``trim_blocks`` and ``lstrip_blocks``).
    """
    sets = [
        f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}"
        for name, value in sorted(values.items())
    ]
    return "".join([*sets, "\n"]) if sets else ""


_ESCAPED = {ord(character): f"\\x{ord(character):02x}" for character in "\\\"'\n\r{}%#"}


def _literal(value: Any) -> str:
    """A JSON value as Jinja writes it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f'"{value.translate(_ESCAPED)}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"chat_template_kwargs: {value} is no number of JSON")
    return repr(value)


def with_template(model: ContentId, source: ModelSource, objects: ObjectStore, base: Path) -> ContentId:
    """File the stored model ``model`` with the template and values that ``source`` gives it; its content id.
    Weights are not read, nor stored again."""
    files = {file.path: file for file in objects.manifest(model).files}
    with scratch_folder("template") as scratch:
        sources = tuple(files[name] for name in TEMPLATE_SOURCES if name in files)
        objects.get_files(TreeManifest(files=sources), scratch)
        written = template_files(source, base, scratch)
    kept = {name: file for name, file in files.items() if name not in REPLACED_FILES}
    for name, data in written.items():
        kept[name] = TreeFile(path=name, size=len(data), content_id=objects.put_bytes(data))
    filed = objects.put_json(TreeManifest(files=tuple(file for _, file in sorted(kept.items()))))
    if filed != model:
        objects.set_ref(f"{TEMPLATED_REFS}{filed}", filed)  # for garbage collection, until the run names it
        [blob] = [kept[name].content_id for name in written]
        made_of = {"model": model, "chat_template": blob, "values": dict(source.chat_template_kwargs)}
        record_derivation(objects, WRITE_STAGE, made_of, (filed,))
    return filed


def template_in_words(source: ModelSource) -> str | None:
    """Which chat template and which values ``source`` gives its model, for people; None where it gives none."""
    if not source.changes_template:
        return None
    given = source.chat_template
    what = "the model's own" if given is None else "given as text" if is_template_text(given) else given
    return _with_values(what, source.chat_template_kwargs)


def written_in_words(model: ContentId, objects: ObjectStore) -> str | None:
    """The same of a stored model, as far as it is on record that `with_template` made it."""
    made = lineage_of(objects, model)
    if made is None or made.stage != WRITE_STAGE:
        return None
    return _with_values("of the run's configuration", made.inputs.get("values") or {})


def _with_values(what: str, values: Mapping[str, Any]) -> str:
    named = ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in sorted(values.items()))
    return f"{what}, with {named}" if named else what
