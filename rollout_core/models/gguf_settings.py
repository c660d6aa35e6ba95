"""The settings of a GGUF file, read with their types; which of them nobody has read is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from rollout_core.base.errors import ConfigError

DefaultT = TypeVar("DefaultT")
REQUIRED: Any = object()


@dataclass
class GGUFSettings:
    """By their whole names. What has another type than was asked for raises ConfigError, and so does what is missing
    and has no default."""

    file: Path
    values: Mapping[str, Any]
    _read: set[str] = field(default_factory=set)

    def refuse(self, why: str) -> NoReturn:
        """Raises ConfigError that names the file."""
        raise ConfigError(f"{self.file}: {why}")

    def whole(self, name: str, default: DefaultT = REQUIRED) -> int | DefaultT:
        """A whole number that is not negative."""
        value = self._value(name, default)
        if value is not default and (type(value) is not int or value < 0):
            self.refuse(f"{name} is {value!r:.100}; expected a whole number")
        return value

    def number(self, name: str, default: DefaultT = REQUIRED) -> float | DefaultT:
        """With as few digits as tell it from other float32 numbers: what was written was 1e-05, not 9.99999974e-06."""
        value = self._value(name, default)
        if value is default:
            return value
        if type(value) not in (int, float) or not np.isfinite(value):
            self.refuse(f"{name} is {value!r:.100}; expected a number")
        return shortest(value)

    def text(self, name: str, default: DefaultT = REQUIRED) -> str | DefaultT:
        """A string."""
        value = self._value(name, default)
        if value is not default and not isinstance(value, str):
            self.refuse(f"{name} is {value!r:.100}; expected a text")
        return value

    def truth(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.refuse(f"{name} is {value!r:.100}; expected true or false")
        return value

    def words(self, name: str, default: list[str] = REQUIRED) -> list[str]:
        """A list of texts."""
        value = self._value(name, default)
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            self.refuse(f"{name} is no list of texts")
        return value

    def numbers(self, name: str, default: list[Any] = REQUIRED) -> list[Any]:
        """A list of numbers."""
        value = self._value(name, default)
        if not isinstance(value, list) or any(isinstance(item, str) for item in value):
            self.refuse(f"{name} is no list of numbers")
        return value

    def everywhere(self, name: str, default: DefaultT = REQUIRED) -> int | DefaultT:
        """A whole number above 0, or a list of equal ones for all layers."""
        value = self._value(name, default)
        if value is default:
            return value
        layers = value if isinstance(value, list) else [value]
        if not layers or len(set(layers)) > 1 or type(layers[0]) is not int or layers[0] <= 0:
            self.refuse(f"{name} is {value!r:.100}; expected one whole number above 0 for all layers")
        return layers[0]

    def skip(self, name: str) -> None:
        """Note that a setting changes nothing."""
        self._read.add(name)

    def unread(self, prefix: str) -> list[str]:
        """Names under a prefix that nobody has read, with their values."""
        return [
            f"{name} = {value!r:.60}"
            for name, value in sorted(self.values.items())
            if name.startswith(prefix) and name not in self._read
        ]

    def _value(self, name: str, default: Any) -> Any:
        self._read.add(name)
        value = self.values.get(name, default)
        if value is REQUIRED:
            self.refuse(f"it has no {name}")
        return value


def shortest(value: float) -> float:
    """The number with the fewest digits that is this one in float32."""
    return float(str(np.float32(value)))
