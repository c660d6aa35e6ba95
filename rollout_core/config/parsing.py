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
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not readable as TOML: {error}") from error
    return parse_config(data, model, name=str(path), overrides=overrides)


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
    for item in error.errors():
        location = _plain_location(item["loc"], data)
        dotted = ".".join(str(part) for part in location) or "(top level)"
        if item["type"] == "extra_forbidden":
            hint = _nearest_key(model, item["loc"])
            line = f"{dotted}: unknown key" + (f"; did you mean {hint!r}?" if hint else "")
        elif item["type"] == "missing":
            line = f"{dotted}: required, but not given"
        elif item["type"] in ("literal_error", "model_type", "model_attributes_type"):
            line = f"{dotted}: {item['msg']}; got {_shown(item['input'])}"
        else:
            line = f"{dotted}: {item['msg'].removeprefix('Value error, ')}; got {_shown(item['input'])}"
        if line not in seen:
            seen.add(line)
            yield line


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
