"""What a GGUF file says of itself: settings and the places of its tensors, read without the tensors.

`gguf.GGUFReader` makes an object of each word of a vocabulary (3.5 s and 200 MB for SmolLM2's 49,152, which is far more
for a file that was made to be large); this reads the same in a tenth of a second, and says where a file ends early.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError

MAGIC, VERSIONS, ENDING = b"GGUF", (2, 3), ".gguf"
ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as torch has it."""
    kind: str
    """Such as ``Q4_1``."""
    file: Path
    offset: int
    num_bytes: int

    def rows(self) -> np.ndarray[Any, Any]:
        """Its bytes, a row of the tensor each; read when they are used."""
        num_rows = int(np.prod(self.shape[:-1], dtype=np.int64))
        shape = (num_rows, self.num_bytes // num_rows)
        return np.memmap(self.file, dtype=np.uint8, mode="r", offset=self.offset, shape=shape)


@dataclass(frozen=True)
class GGUFHeader:
    """Settings and tensors of a file, or of all parts of one."""

    files: tuple[Path, ...]
    settings: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def need_gguf(what: str) -> Any:
    """The package of that name. Raises ConfigError where it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(f"{what} needs a package: pip install '{DISTRIBUTION}[gguf]'") from error
    return gguf


def parts_of(file: Path) -> tuple[Path, ...]:
    """The files that make a model, of which ``file`` is one. Raises ConfigError where one is missing."""
    part = _PART.fullmatch(file.name)
    if part is None:
        return (file,)
    names = [f"{part['stem']}-{number + 1:05}-of-{part['count']}{file.suffix}" for number in range(int(part["count"]))]
    absent = [name for name in names if not (file.parent / name).is_file()]
    if absent:
        raise ConfigError(f"{file} is one of {len(names)} parts, and {absent[0]} is not there; put all into one folder")
    return tuple(file.parent / name for name in names)


def read_header(file: Path) -> GGUFHeader:
    """Settings and tensors of a GGUF file and of the parts next to it.

    Raises ConfigError for a file that is none, or not whole, and where the package ``gguf`` is missing.
    """
    need_gguf(f"reading {file.name}")
    files = parts_of(file)
    settings: dict[str, Any] = {}
    tensors: dict[str, StoredTensor] = {}
    for number, part in enumerate(files):
        own, found = _read(part)
        if (count := own.get("split.count", 1)) != len(files) or own.get("split.no", number) != number:
            raise ConfigError(
                f"{part} says that it is part {own.get('split.no', 0) + 1} of {count}, and its name that it is part "
                f"{number + 1} of {len(files)}; give it the name that it was made with, next to the other parts"
            )
        settings = own if number == 0 else settings
        if twice := tensors.keys() & found.keys():
            raise ConfigError(f"{part} holds {min(twice)} for a second time; expected each tensor once")
        tensors |= found
    if (expected := settings.get("split.tensors.count", len(tensors))) != len(tensors):
        raise ConfigError(f"{file} and its parts hold {len(tensors)} tensors; expected {expected}")
    return GGUFHeader(files, settings, tensors)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    with _mapped(file) as data:
        reader = _Reader(data)
        if data[:4] != MAGIC:
            raise ConfigError(
                f"{file} is no GGUF file: it begins with {data[:4]!r}, not {MAGIC!r}; was it downloaded to the end, "
                "not as a page or as a pointer of Git LFS?"
            )
        reader.place = 4
        version = reader.number("I")
        if version not in VERSIONS:
            raise ConfigError(
                f"{file} is of GGUF's version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are read, of "
                "machines that store low bytes first"
            )
        num_tensors, num_settings = reader.number("Q"), reader.number("Q")
        settings: dict[str, Any] = {}
        for _ in range(num_settings):
            name = reader.text()
            if name in settings:
                raise ConfigError(f"{file} has {name} twice; expected it once")
            settings[name] = reader.value(reader.number("I"))
        entries = [reader.tensor() for _ in range(num_tensors)]
        alignment = settings.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ConfigError(f"{file}: general.alignment is {alignment!r}; expected a whole number above 0")
        start = -(-reader.place // alignment) * alignment
        placed = {entry.name: _placed(entry, start, len(data), file) for entry in entries}
        if len(placed) < len(entries):
            [(twice, _)] = Counter(entry.name for entry in entries).most_common(1)
            raise ConfigError(f"{file} holds {twice} for a second time; expected each tensor once")
        if sum(tensor.num_bytes for tensor in placed.values()) > len(data):
            raise ConfigError(f"{file}: its tensors lie over each other, as they are larger than it is")
        return settings, placed


@contextmanager
def _mapped(file: Path) -> Iterator[mmap.mmap]:
    """Raises ConfigError for whatever of its bytes cannot be what they should be."""
    try:
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    except (struct.error, ValueError, OverflowError, MemoryError) as error:  # of an empty file ValueError
        raise ConfigError(
            f"{file} is no whole GGUF file: {' '.join(str(error).split())}; was it downloaded to the end?"
        ) from error


@dataclass(frozen=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass
class _Reader:
    """Walks through the bytes. Raises struct.error or ValueError where they end or make no sense."""

    data: mmap.mmap
    place: int = 0

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > len(self.data) - self.place:
            raise ValueError(
                f"at byte {self.place} it should go on for {num_bytes}, and it has {len(self.data)} in all"
            )
        found = self.data[self.place : self.place + num_bytes]
        self.place += num_bytes
        return found

    def number(self, kind: str) -> Any:
        (found,) = struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))
        return found

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"at byte {self.place} is a value of type {kind}, which no version has")
        of, count = self.number("I"), self.number("Q")
        if of in _SCALARS:
            scalar = _SCALARS[of]
            return list(struct.unpack(f"<{count}{scalar}", self.take(count * struct.calcsize(f"<{scalar}"))))
        if of != _STRING:
            raise ValueError(f"at byte {self.place} is a list of values of type {of}, which no model needs")
        return [self.text() for _ in range(count)]

    def tensor(self) -> _Entry:
        name, dimensions = self.text(), self.number("I")
        if not 0 < dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))
        return _Entry(name, shape[::-1], self.number("I"), self.number("Q"))


def _placed(entry: _Entry, start: int, size: int, file: Path) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(entry.kind)
    except ValueError as error:
        raise ConfigError(
            f"{file}: tensor {entry.name} is of type {entry.kind}, which the installed gguf does not know"
        ) from error
    block, block_bytes = GGML_QUANT_SIZES[kind]
    count = int(np.prod(entry.shape, dtype=object))
    if count == 0 or entry.shape[-1] % block:
        raise ConfigError(f"{file}: tensor {entry.name} has shape {list(entry.shape)}, which {kind.name} cannot have")
    num_bytes = count // block * block_bytes
    if start + entry.offset + num_bytes > size:
        raise ConfigError(
            f"{file} ends within tensor {entry.name}: it has {size} bytes, and the tensor ends at "
            f"{start + entry.offset + num_bytes}; was it downloaded to the end?"
        )
    return StoredTensor(entry.name, entry.shape, kind.name, file, start + entry.offset, num_bytes)


def can_read(kind: str) -> bool:
    """Whether the installed gguf makes numbers of tensors of this type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    found = GGMLQuantizationType[kind]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[found][1]), np.uint8), found)
    except (NotImplementedError, KeyError):
        return False
    return True


def kinds_of(tensors: Iterable[StoredTensor]) -> dict[str, int]:
    """How many tensors there are of each type, the most frequent first."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[tensor.kind] = counts.get(tensor.kind, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
