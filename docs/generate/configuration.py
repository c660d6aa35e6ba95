"""Pages of every table of the TOML files, from the models that read them."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rollout_core.config import cloud
from rollout_core.config.described import field_docs
from rollout_core.config.kinds import CONFIG_KINDS

FOLDER = "reference/configuration"
MOST_PLACES = 6
TITLES = {
    "runs": "Runs",
    "base": "Models, data, costs",
    "learning": "Learning",
    "on_policy": "Learning on policy",
    "rewards": "Rewards",
    "inference": "Sampling, backends, workers",
    "evaluation": "Suites",
    "promotion": "Promotion",
    "agents": "Agents",
    "environments": "Environments and their tools",
    "cloud": "Clouds",
}
"""By the module of `rollout_core.config` that a page is about."""
COMMANDS = {
    "nightly": "rollout nightly",
    "infer-batch": "rollout infer batch",
    "evaluate-suites": "rollout eval run MODEL --suite FILE",
    "train-agent": "rollout agent train",
    "tune-prompt": "rollout agent tune",
    "learn-online": "rollout agent online",
}
_BESIDE = {
    "optimizers": "learning",
    "curriculum": "learning",
    "own_loss": "learning",
    "experience": "on_policy",
    "inspect_ai": "evaluation",
    "lm_eval": "evaluation",
    "training_suites": "evaluation",
    "tools": "environments",
    "verifiers": "rewards",
    "judges": "rewards",
}
"""Modules whose models are on the page of another."""
_CLOUDS = {"local": cloud.LocalCloud, "aws": cloud.AWSCloud, "gcp": cloud.GCPCloud}
_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "none", Any: "any value"}
_BOUNDS = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))


def pages() -> dict[str, str]:
    """Markdown by the page's place in the site."""
    places = _places()
    found = {f"{FOLDER}/index.md": _index()}
    for module, title in TITLES.items():
        models = [model for model in places if _page_of(model) == module]
        text = "\n".join(_section(model, places[model]) for model in models)
        found[f"{FOLDER}/{module}.md"] = f"# {title}\n\n{text}"
    return found


def _index() -> str:
    lines = [
        "# Configuration",
        "",
        "A run is a TOML file. Every table and key is here, with type, default and meaning, as the code reads them;",
        "unknown keys are refused. `rollout schema` prints the same as JSON Schema; `--set KEY=VALUE` changes a key",
        "for one run. A table [`[cloud]`](cloud.md) may stand in any file.",
        "",
        "| kind of run | command | its tables |",
        "|---|---|---|",
    ]
    for kind, model in CONFIG_KINDS.items():
        command = COMMANDS.get(kind, f"rollout {kind.replace('-', ' ')}")
        command = command if command.endswith(" FILE") else f"{command} --config FILE"
        lines.append(f"| {kind} | `{command}` | [{model.__name__}](runs.md#{model.__name__.lower()}) |")
    for kind in ("train-agent", "tune-prompt", "learn-online"):
        name = CONFIG_KINDS[kind].__name__
        lines = [line.replace(f"(runs.md#{name.lower()})", f"(agents.md#{name.lower()})") for line in lines]
    return "\n".join(lines) + "\n"


def _places() -> dict[type[BaseModel], list[str]]:
    """Every model that a file is read by, with the tables that it may stand as."""
    found: dict[type[BaseModel], list[str]] = {}
    waiting: list[tuple[type[BaseModel], str]] = [(model, "") for model in CONFIG_KINDS.values()]
    waiting += [(model, "cloud") for model in _CLOUDS.values()]
    seen = set()
    while waiting:
        model, path = waiting.pop(0)
        if (model, path) in seen or path.count(".") > 5:
            continue
        seen.add((model, path))
        places = found.setdefault(model, [])
        if path and path not in places:
            places.append(path)
        for key, field in model.model_fields.items():
            below = f"{path}.{key}" if path else key
            for inner, suffix in _models_in(field.annotation):
                waiting.append((inner, below + suffix))
    return found


def _models_in(annotation: Any, suffix: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, suffix
        return
    origin = typing.get_origin(annotation)
    if origin is dict:
        yield from _models_in(typing.get_args(annotation)[1], f"{suffix}.NAME")
        return
    for argument in typing.get_args(annotation):
        yield from _models_in(argument, f"{suffix}[]" if origin in (tuple, list) else suffix)


def _page_of(model: type[BaseModel]) -> str:
    module = model.__module__.rpartition(".")[2]
    page = _BESIDE.get(module, module)
    if page not in TITLES:
        raise ValueError(f"rollout_core.config.{module} has no page for {model.__name__}; give it one in TITLES")
    return page


def _section(model: type[BaseModel], places: list[str]) -> str:
    lines = [f"## {model.__name__}", "", _markdown(inspect.getdoc(model) or ""), ""]
    if places:
        shown = [f"`{place}`" if "[]" in place else f"`[{place}]`" for place in places[:MOST_PLACES]]
        more = f" and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else ""
        lines += [f"Where: {', '.join(shown)}{more}.", ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    page = _page_of(model)
    for key, field in model.model_fields.items():
        cells = (f"`{key}`", _type(field.annotation, field.metadata, page), _default(field), _meaning(model, key))
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _meaning(model: type[BaseModel], key: str) -> str:
    """By the field's docstring, or where the field came from; else what its table is."""
    field = model.model_fields[key]
    if meaning := field.description or field_docs(model).get(key):
        return _markdown(meaning)
    inner = [model for model, _ in _models_in(field.annotation)]
    if len(inner) == 1:
        return _markdown((inspect.getdoc(inner[0]) or "").partition("\n\n")[0])
    if typing.get_origin(field.annotation) is Literal and len(typing.get_args(field.annotation)) == 1:
        return "Says that the table is of this kind."
    raise ValueError(f"{model.__name__}.{key} has no meaning; write a docstring below the field")


def _markdown(text: str) -> str:
    """A docstring on a page: names in single backquotes are of the code, as everywhere."""
    return text.replace("``", "`")


def _type(annotation: Any, metadata: list[Any], page: str) -> str:
    bounds = [
        f"{sign} {getattr(item, name)}" for item in metadata for kind, name, sign in _BOUNDS if isinstance(item, kind)
    ]
    lengths = [item.min_length for item in metadata if isinstance(item, MinLen) and item.min_length]
    lengths += [item.max_length for item in metadata if isinstance(item, MaxLen)]
    more = ", ".join(bounds) or ("not empty" if lengths == [1] else "")
    return _named(annotation, page) + (f", {more}" if more else "")


def _named(annotation: Any, page: str) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _NAMES:
        return _NAMES[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        where = "" if _page_of(annotation) == page else f"{_page_of(annotation)}.md"
        return f"[{annotation.__name__}]({where}#{annotation.__name__.lower()})"
    if origin is typing.Annotated:
        return _type(arguments[0], list(arguments[1:]), page)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_named(argument, page) for argument in arguments if argument is not type(None))
    if origin in (tuple, list):
        return f"list of {_named(arguments[0], page)}"
    if origin is dict:
        return f"table of {_named(arguments[1], page)}"
    return str(getattr(annotation, "__name__", annotation)).lower()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value is PydanticUndefined:
        return ""
    if isinstance(value, BaseModel):
        given = value.model_dump(mode="json", exclude_unset=True)
        kind = {"kind": value.kind} if hasattr(value, "kind") and len(list(_models_in(field.annotation))) > 1 else {}  # pyright: ignore[reportAttributeAccessIssue]
        shown = {**kind, **given}
        return f"`{_toml(shown)}`" if shown else "its defaults"
    return f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)
