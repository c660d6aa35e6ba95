"""From TOML and overrides to a configuration, with one line for each thing wrong."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from rollout_core.config.base import Settings
from rollout_core.errors import ConfigError

SettingsT = TypeVar("SettingsT", bound=Settings)


def load_config(path: str | Path, model: type[SettingsT], overrides: Mapping[str, Any] | None = None) -> SettingsT:
    """Read a TOML file as ``model``. ``overrides`` maps dotted keys to values, such as ``{"ppo.iterations": 3}``.

    Raises ConfigError with one line for each thing wrong: the file, the key, what was got and what was expected.
    """
    return parse_config(read_toml(path), model, name=str(path), overrides=overrides)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError where it cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not readable as TOML: {error}") from error


def parse_config(
    data: Mapping[str, Any], model: type[SettingsT], *, name: str = "config", overrides: Mapping[str, Any] | None = None
) -> SettingsT:
    """Validate ``data`` as ``model``; raises ConfigError as `load_config` does."""
    merged = apply_overrides(data, overrides or {})
    try:
        return model.model_validate(merged)
    except ValidationError as error:
        violations = tuple(f"{name}: {line}" for line in _explain(error, model, merged))
        raise ConfigError("\n".join(violations), violations) from None


def apply_overrides(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``data`` with dotted keys replaced. Raises ConfigError where a key leads through a plain value."""
    result = _copy(data)
    for dotted, value in overrides.items():
        *parents, leaf = dotted.split(".")
        table = result
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ConfigError(f"override {dotted!r}: {parent!r} is a plain value, not a table")
        table[leaf] = value
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return list(value) if isinstance(value, list | tuple) else value


def _explain(error: ValidationError, model: type[BaseModel], data: Any) -> Iterator[str]:
    seen: set[str] = set()
    for item in _of_the_kind_meant(error.errors(), data):
        location = _plain_location(item["loc"], data)
        dotted = ".".join(str(part) for part in location) or "(top level)"
        if item["type"] == "extra_forbidden":
            hint = _nearest_key(model, item["loc"])
            line = f"{dotted}: unknown key" + (f"; did you mean {hint!r}?" if hint else "")
        elif item["type"] == "missing":
            line = f"{dotted}: required, but not given"
        elif item["type"] == "model_type":
            dotted = ".".join(str(part) for part in _key_of(item["loc"], data)) or "(top level)"
            line = f"{dotted}: Input should be a valid dictionary; got {_shown(item['input'])}"
        elif item["type"] in ("literal_error", "model_attributes_type"):
            line = f"{dotted}: {item['msg']}; got {_shown(item['input'])}"
        else:
            line = f"{dotted}: {item['msg'].removeprefix('Value error, ')}; got {_shown(item['input'])}"
        if line not in seen:
            seen.add(line)
            yield line


def _of_the_kind_meant(errors: list[Any], data: Any) -> list[Any]:
    """Without what a union's members say of a table whose ``kind`` is another's; where it is nobody's, one line."""
    refusing = {
        tuple(item["loc"][:-1]): item
        for item in errors
        if item["loc"][-1:] == ("kind",)
        and item["type"] in ("literal_error", "missing")
        and _key_of(item["loc"][:-1], data) == _key_of(item["loc"][:-2], data)
    }
    kept = [item for item in errors if not any(item["loc"][: len(member)] == member for member in refusing)]
    for union in dict.fromkeys(member[:-1] for member in refusing):
        if any(item["loc"][: len(union)] == union and len(item["loc"]) > len(union) for item in kept):
            continue
        kinds = [item for member, item in refusing.items() if member[:-1] == union and item["type"] == "literal_error"]
        if kinds:
            expected = " or ".join(item["ctx"]["expected"] for item in kinds)
            kept.append({**kinds[0], "msg": f"Input should be {expected}"})
    return kept


def _key_of(location: tuple[int | str, ...], data: Any) -> list[int | str]:
    """The parts of ``location`` that are keys of the file."""
    return _plain_location((*location, ""), data)[:-1]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain_location(location: tuple[int | str, ...], data: Any) -> list[int | str]:
    """Drops the names of union members that pydantic puts into a location, which are no keys of the file."""
    plain: list[int | str] = []
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if (isinstance(data, Mapping) and part in data) or (
            isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)
        ):
            data = data[part]  # pyright: ignore[reportCallIssue, reportArgumentType]
            plain.append(part)
        elif last:
            plain.append(part)
    return plain


def _nearest_key(model: type[BaseModel], location: tuple[int | str, ...]) -> str | None:
    candidates: set[str] = set(model.model_fields)
    models: list[type[BaseModel]] = [model]
    for part in location[:-1]:
        members = [member for member in models if part in member.model_fields]
        if members:
            models = [m for member in members for m in _models_in(member.model_fields[str(part)].annotation)]
        else:
            models = [member for member in models if member.__name__ == part] or models
        candidates = {name for member in models for name in member.model_fields}
    close = difflib.get_close_matches(str(location[-1]), candidates, n=1, cutoff=0.6)
    return close[0] if close else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
