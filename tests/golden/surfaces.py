"""What people and databases have of this project beside cache keys, as lines: names, types and defaults, no texts."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from tests.golden.keys import PROJECT
from tests.structure import PACKAGES
from tests.support.faces import offered, stubs

Lines = dict[str, list[str]]


def stages() -> Lines:
    """What enters keys and ids by name: the stages with their arguments and results, tags of ids, folders of refs."""
    from tasks.runtime.stage import Stage

    found: dict[str, Any] = {}
    for module in _modules("tasks"):
        found |= {value.name: value for value in vars(module).values() if isinstance(value, Stage)}
    return {
        "stages": [line for name in sorted(found) for line in _stage(found[name])],
        "tags of content ids": sorted(set(_tags())),
        "folders of refs": sorted(set(_ref_folders())),
    }


def _stage(stage: Any) -> Iterator[str]:
    signature, optional = inspect.signature(stage), stage._optional
    arguments = [
        name + ("" if parameter.default is parameter.empty else f"={parameter.default!r}")
        for name, parameter in signature.parameters.items()
    ]
    marks = [*(["cached"] if stage.cached else []), *([f"optional {', '.join(optional)}"] if optional else [])]
    marks += [f"time {stage.time}", *([f"place {stage.place}"] if stage.place else [])]
    yield f"{stage.name}/{stage.version} ({', '.join(arguments)}) {'; '.join(marks)}".rstrip()
    yield f"{stage.name} gives {', '.join(sorted(stage.record.model_fields))}"


def _tags() -> Iterator[str]:
    for tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _name(node.func) == "content_id" and node.args:
                tag = node.args[0]
                if isinstance(tag, ast.Constant | ast.JoinedStr):
                    yield re.sub(r"^f?'|'$", "", ast.unparse(tag))


def _ref_folders() -> Iterator[str]:
    for tree in _sources():
        for node in tree.body:
            if isinstance(node, ast.Assign) and _name(node.targets[0]).endswith("REFS"):
                yield from _text(node.value)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def defaults() -> Lines:
    """Keys of configurations that enter cache keys only where they are not at their defaults: so they came later."""
    from rollout_core.config import CONFIG_KINDS

    seen: set[type[BaseModel]] = set()
    found = [line for kind, model in CONFIG_KINDS.items() for line in _left_out(model, kind, seen)]
    return {"in cache keys where they are not at their defaults": found}


def _left_out(model: type[BaseModel], path: str, seen: set[type[BaseModel]]) -> Iterator[str]:
    if model in seen:
        return
    seen.add(model)
    for name in sorted(getattr(model, "identity_without_default", ())):
        default = model.model_fields[name].get_default(call_default_factory=True)
        yield f"{path}.{name} = {'a table of defaults' if isinstance(default, BaseModel) else repr(default)}"
    for name, field in model.model_fields.items():
        for inner in _models_in(field.annotation):
            kind = inner.model_fields.get("kind")
            mark = f"[{'|'.join(get_args(kind.annotation))}]" if kind is not None else ""
            yield from _left_out(inner, f"{path}.{name}{mark}", seen)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def storage() -> Lines:
    """Tables, blocks, deployments and what starts this project."""
    from sqlalchemy.dialects import postgresql, sqlite

    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    return {
        "tables of SQLite": _tables(sqlite.dialect()),
        "tables of PostgreSQL": _tables(postgresql.dialect()),
        "blocks": list(_blocks()),
        "deployments": list(_deployments()),
        "packages of the wheel": _packages(project["tool"]["setuptools"]["packages"]["find"]["include"]),
        "console scripts": [f"{name} = {target}" for name, target in sorted(project["project"]["scripts"].items())],
        "python -m": _run_modules(),
    }


def _tables(dialect: Any) -> list[str]:
    from sqlalchemy.schema import CreateIndex, CreateSequence, CreateTable

    from rollout_core.store.sql.tables import metadata

    parts: list[Any] = [CreateTable(table) for table in metadata.tables.values()]
    parts += [CreateIndex(index) for table in metadata.tables.values() for index in table.indexes]
    if dialect.supports_sequences:
        parts += [CreateSequence(sequence) for sequence in metadata._sequences.values()]
    return sorted(" ".join(str(part.compile(dialect=dialect)).split()) for part in parts)


def _blocks() -> Iterator[str]:
    import blocks

    for name in sorted(blocks.__all__):
        block = getattr(blocks, name)
        yield f"{block._block_type_slug}: {block._block_type_name}, {name}"
        yield from sorted(f"{block._block_type_slug}: {line}" for line in _properties(block.model_json_schema()))


def _deployments() -> Iterator[str]:
    """Each with its entry point, its flow's name and parameters, and its schedules."""
    document = yaml.safe_load((PROJECT / "prefect.yaml").read_text(encoding="utf-8"))
    for deployment in document["deployments"]:
        file, _, function = deployment["entrypoint"].partition(":")
        flow = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), function)
        parameters = ", ".join(flow.parameters.properties)
        schedules = "".join(f", {schedule['cron']}" for schedule in deployment.get("schedules", ()))
        yield f"{flow.name}/{deployment['name']}: {deployment['entrypoint']} ({parameters}){schedules}"


def _packages(patterns: list[str]) -> list[str]:
    from setuptools import find_packages

    return sorted({name.partition(".")[0] for name in find_packages(str(PROJECT), include=patterns)})


def _run_modules() -> list[str]:
    """Modules of this project that documents, images, pools and units start; each is there."""
    named = re.compile(rf"python3? -m ((?:{'|'.join(PACKAGES)})\.[\w.]*\w)")
    files = [PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "Dockerfile", "compose.yaml")]
    files += [PROJECT / "prefect.yaml", *sorted((PROJECT / "docs").rglob("*.md"))]
    files += sorted(
        file for file in (PROJECT / "deployments").rglob("*") if file.suffix in (".json", ".service", ".py")
    )
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    # The Makefile has the interpreter's folder in a variable, which the pattern does not mind.
    found = sorted(set(named.findall(text)))
    return [name if importlib.util.find_spec(name) else f"{name} is not there" for name in found]


def interfaces() -> Lines:
    """What people type: configurations, commands, requests, variables and imports."""
    return {
        "configurations": _configurations(),
        "commands": list(_commands()),
        "store server": list(_openapi()),
        "paths of other servers": sorted(set(_paths())),
        "environment variables": sorted(set(_variables())),
        "names of packages": _names(),
    }


def _configurations() -> list[str]:
    """Every key of every kind of run. A table that has been described says only where."""
    from rollout_core.config.kinds import json_schema

    described: dict[str, str] = {}
    return [line for kind, schema in json_schema().items() for line in _properties(schema, kind, described)]


def _properties(schema: Mapping[str, Any], path: str = "", described: dict[str, str] | None = None) -> list[str]:
    known: dict[str, str] = {} if described is None else described
    return list(_keys(schema, schema.get("$defs", {}), path, known, ()))


def _keys(
    schema: Mapping[str, Any],
    definitions: Mapping[str, Any],
    path: str,
    described: dict[str, str],
    within: tuple[str, ...],
) -> Iterator[str]:
    for name, own in schema.get("properties", {}).items():
        place = f"{path}.{name}" if path else name
        required = ", required" if name in schema.get("required", ()) else ""
        yield f"{place}: {_type(own, definitions)}{required}{_default(own)}"
        yield from (f"{place} may be {value}" for value in sorted(_literals(own, definitions)))
        for table, marked in _tables_of(own, definitions, place):
            text = json.dumps(_resolved(table, definitions, ()), sort_keys=True)
            if text in within:
                continue
            if text in described:
                yield f"{marked}: the table of {described[text]}"
                continue
            described[text] = marked
            yield from _keys(table, definitions, marked, described, (*within, text))


def _type(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Of a value; a table's class has no name here, as people type none."""
    schema = _looked_up(schema, definitions)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " | ".join(dict.fromkeys(_type(one, definitions) for one in schema[several]))
    if "const" in schema or "enum" in schema:
        return "one of"
    if "properties" in schema:
        return "table"
    kind = str(schema.get("type", "any"))
    inner = schema.get("items") if kind == "array" else schema.get("additionalProperties") if kind == "object" else None
    return f"{kind} of {_type(inner, definitions)}" if isinstance(inner, Mapping) else kind


def _default(schema: Mapping[str, Any]) -> str:
    """Those of tables follow from their own keys."""
    default = schema.get("default")
    if "default" not in schema or isinstance(default, dict):
        return ""
    return f" = {json.dumps(default)}"


def _literals(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[str]:
    """Values that are typed as they are; another one may come."""
    schema = _looked_up(schema, definitions)
    yield from map(json.dumps, schema.get("enum", [schema["const"]] if "const" in schema else []))
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _literals(inner, definitions)
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), Mapping):
            yield from _literals(schema[name], definitions)


def _tables_of(schema: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> Iterator[tuple[Any, str]]:
    """Tables that a value may be, with what tells them apart."""
    schema = _looked_up(schema, definitions)
    if "properties" in schema:
        kind = schema["properties"].get("kind", {})
        marks = kind.get("enum") or [kind["const"]] if "const" in kind or "enum" in kind else []
        yield schema, path + (f"[{'|'.join(marks)}]" if marks else "")
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _tables_of(inner, definitions, path)
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), Mapping):
            yield from _tables_of(schema[name], definitions, f"{path}[]")


def _looked_up(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    ref = schema.get("$ref")
    return definitions[ref.rpartition("/")[2]] if ref else schema


def _resolved(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...]) -> Any:
    """A schema without the names of definitions and without texts, to compare tables by what they hold."""
    if isinstance(schema, list):
        return [_resolved(item, definitions, within) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    ref = schema.get("$ref")
    if ref:
        name = ref.rpartition("/")[2]
        return "itself" if name in within else _resolved(definitions[name], definitions, (*within, name))
    left_out = ("title", "description", "$defs", "discriminator")
    return {
        name: {key: _resolved(one, definitions, within) for key, one in value.items()}
        if name == "properties"
        else _resolved(value, definitions, within)
        for name, value in schema.items()
        if name not in left_out
    }


def _commands() -> Iterator[str]:
    import typer

    from deployments.cli import app

    yield from _command(typer.main.get_command(app), "rollout")


def _command(command: Any, name: str) -> Iterator[str]:
    yield name
    command = getattr(command, "loaded", command)  # of one whose file is imported when it is called
    context = command.make_context(name, [], resilient_parsing=True)
    for parameter in command.get_params(context):
        if parameter.name == "help":
            continue
        shown = parameter.get_help_record(context)
        default = parameter.default
        stated = f" = {json.dumps(default)}" if isinstance(default, str | int | float) and default is not False else ""
        marks = ", required" if parameter.required else ""
        yield f"{name} {parameter.name if shown is None else shown[0]}{marks}{stated}"
    for part, inner in sorted((getattr(command, "commands", None) or {}).items()):
        yield from _command(inner, f"{name} {part}")


def _openapi() -> Iterator[str]:
    from rollout_core.store.http.app import describe

    document = describe()
    definitions = document["components"]["schemas"]
    for path, methods in sorted(document["paths"].items()):
        for method, described in sorted(methods.items()):
            parameters = ", ".join(f"{one['in']} {one['name']}" for one in described.get("parameters", ()))
            yield f"{method.upper()} {path} ({parameters}) {described['operationId']}"
            for content in described.get("requestBody", {}).get("content", {}).values():
                yield f"{method.upper()} {path} takes {_type(content['schema'], definitions)}"
    for name, schema in sorted(definitions.items()):
        for key, own in schema.get("properties", {}).items():
            yield f"{name}.{key}: {_type(own, definitions)}"
            yield from (f"{name}.{key} may be {value}" for value in sorted(_literals(own, definitions)))
        yield from (f"{name} may be {value}" for value in sorted(_literals(schema, definitions)))


_NOT_SERVED = ("/proc", "/sys", "/dev", "/usr", "/etc", "/tmp", "/run", "/var", "/bin", "/lib", "/sbin")
_NOT_SERVED += ("/boot", "/box", "/empty", "/home", "/media", "/mnt", "/opt", "/srv")


def _paths() -> Iterator[str]:
    """Of the proxy, the serving endpoint, the workers' pages and `rollout ui`, which route by plain strings."""
    found = (text for text in _texts() if re.fullmatch(r"/[a-z][\w/.{}:-]*", text))
    return (text for text in found if not text.startswith(_NOT_SERVED))


def _variables() -> Iterator[str]:
    return (text for text in _texts() if re.fullmatch(r"(ROLLOUT|AGL)_[A-Z][A-Z_]*", text))


def _texts() -> Iterator[str]:
    """All strings of the sources."""
    return (text for tree in _sources() for node in ast.walk(tree) for text in _text(node))


def _text(node: ast.AST) -> list[str]:
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def _names() -> list[str]:
    """Names that packages hand on, with the package: imports of them stay."""
    found = [f"{_package(stub)}.{name}" for stub in stubs() for name in offered(stub)]
    for module in (importlib.import_module(name) for name in PACKAGES):
        found += [f"{module.__name__}.{name}" for name in getattr(module, "__all__", ())]
    return sorted(set(found))


def _package(stub: Path) -> str:
    return ".".join(stub.relative_to(PROJECT).parent.parts)


def _modules(package: str) -> Iterator[Any]:
    found = importlib.import_module(package)
    for info in pkgutil.walk_packages(found.__path__, f"{package}."):
        yield importlib.import_module(info.name)


def _sources() -> Iterator[ast.Module]:
    for package in PACKAGES:
        for file in sorted((PROJECT / package).rglob("*.py")):
            yield ast.parse(file.read_text(encoding="utf-8"))
