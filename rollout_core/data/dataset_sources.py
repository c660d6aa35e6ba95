"""Data sets of every kind as streams of checked rows: JSONL, Parquet, Hugging Face data sets, object-store ids.

Rows are read one at a time, or a small batch of a table, so that a data set may be larger than memory. Equal rows give
equal canonical JSONL, whatever they were read from. In tables a null stands for an absent key, as every column is there
in every row. The input of batch inference is read here too, with an identity that takes no parsing.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic

from blake3 import blake3

from rollout_core.base.errors import ConfigError, NotFound, Recoverable
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.locks import scratch_folder
from rollout_core.config import (
    DatasetSource,
    HuggingFaceDataset,
    InputGlob,
    JsonlDataset,
    ParquetDataset,
    StoredDataset,
)
from rollout_core.data.datasets import (
    PlacedDocument,
    PromptRow,
    Row,
    RowT,
    jsonl_documents,
    matching_files,
    numbered_lines,
    parse_documents,
    to_line,
)
from rollout_core.models.locating import HubOutOfReach, Unchecked, looks_like_hub_id, without_token
from rollout_core.objects import ObjectStore
from rollout_core.objects.addresses import (
    UrlFile,
    complete_object_id,
    files_at,
    is_folder,
    is_url,
    local_path,
    matching_urls,
)
from rollout_core.objects.backends import READ_BYTES, RemoteFiles
from rollout_core.objects.files import storage_faults
from rollout_core.objects.records import Dataset
from rollout_core.objects.trees import hash_file

TABLE_BATCH_ROWS = 500
"""Rows of a table that are in memory together."""
_PARQUET_MAGIC = b"PAR1"
_SAVED_BY_DATASETS = ("state.json", "dataset_dict.json")
PARQUET_SUFFIXES = (".parquet", ".pq")
_STORED = re.compile("[0-9a-f]{8,64}")


class RowStream(Generic[RowT]):
    """Rows of a data set, read again by every iteration and never all in memory.

    Iterating raises ConfigError where the data set cannot be read or has no rows, DataError after the last good row
    where rows are malformed.
    """

    def __init__(self, documents: Callable[[], Iterable[PlacedDocument]], model: type[RowT], address: str) -> None:
        self._documents = documents
        self._model = model
        self.address = address
        self._names: list[str] = []
        self._first_rows: list[int] = []
        self._numbers = array("q")

    def __iter__(self) -> Iterator[RowT]:
        self._names, self._first_rows, self._numbers = [], [], array("q")
        for name, number, row in parse_documents(self._documents(), self._model):
            if not self._names or self._names[-1] != name:
                self._names.append(name)
                self._first_rows.append(len(self._numbers))
            self._numbers.append(number)
            yield row
        if not self._numbers:
            raise ConfigError(f"dataset {self.address!r} has no rows")

    def place(self, row: int) -> str:
        """Where the row at position ``row`` (from 0) of the last iteration stands, such as ``sft.jsonl:7``."""
        name = self._names[bisect_right(self._first_rows, row) - 1]
        return f"{name}{self._numbers[row]}"

    def check(self) -> int:
        """Read all rows and return their number."""
        return sum(1 for _ in self)


def read_dataset(
    source: DatasetSource,
    model: type[RowT],
    *,
    base: Path,
    objects: ObjectStore | None = None,
    download: bool = True,
) -> RowStream[RowT]:
    """Rows of ``source``; relative paths start at ``base``.

    Iterating raises as `RowStream` says; and Unchecked for what is in an object store that is not given, or, without
    ``download``, on the hub.
    """

    def documents() -> Iterable[PlacedDocument]:
        if isinstance(source, JsonlDataset):
            return jsonl_documents(_files(source.path, base))
        if isinstance(source, ParquetDataset):
            return parquet_documents(_files(source.path, base))
        if isinstance(source, HuggingFaceDataset):
            return _hugging_face_documents(source, base, download)
        return stored_documents(source, objects)

    return RowStream(documents, model, source.address)


def stored_rows(objects: ObjectStore, dataset: ContentId, model: type[RowT]) -> RowStream[RowT]:
    """Rows of canonical JSONL in the object store."""

    def documents() -> Iterator[PlacedDocument]:
        for number, line in enumerate(split_lines(objects.stream(dataset)), start=1):
            yield "row ", number, line

    return RowStream(documents, model, f"dataset {dataset.short}")


def import_dataset(objects: ObjectStore, rows: Iterable[Row]) -> Dataset:
    """File rows in the object store as canonical JSONL, and nothing where they are malformed."""
    num_rows = 0

    def lines() -> Iterator[bytes]:
        nonlocal num_rows
        for row in rows:
            num_rows += 1
            yield to_line(row)

    data = objects.put_stream(lines())
    return Dataset(data=data, num_rows=num_rows)


def hash_rows(rows: Iterable[Row]) -> ContentId:
    """The content id that `import_dataset` would give to these rows."""
    hashed = HashedRows(rows)
    for _ in hashed:
        pass
    return hashed.id


class HashedRows(Generic[RowT]):
    """Rows, and the content id that `import_dataset` would give to those of the last iteration."""

    def __init__(self, rows: Iterable[RowT]) -> None:
        self._rows = rows
        self._hasher = blake3()

    def __iter__(self) -> Iterator[RowT]:
        self._hasher = blake3()
        for row in self._rows:
            self._hasher.update(to_line(row))
            yield row

    @property
    def id(self) -> ContentId:
        """Of what was iterated over so far."""
        return ContentId(self._hasher.hexdigest())


def _files(path: str, base: Path) -> list[tuple[str, Path]]:
    """Files by the names that problems are reported under."""
    found = matching_files(path, base)
    if not found:
        raise ConfigError(f"dataset {path!r} cannot be read: {os.strerror(2)}, looked for in {base.resolve()}")
    return [(str(file if Path(path).is_absolute() else file.relative_to(base)), file) for file in found]


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines of a file that comes in chunks, without their ends; the last one is what follows the last end."""
    begun: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        begun.append(first)
        if others:
            yield b"".join(begun)
            yield from others[:-1]
            begun = [others[-1]]
    yield b"".join(begun)


def parquet_documents(files: Iterable[tuple[str, Any]]) -> Iterator[PlacedDocument]:
    """Rows of Parquet files, each given as name and path, or as name and open file. Raises ConfigError for a file that
    cannot be read."""
    import pyarrow
    import pyarrow.parquet

    for name, path in files:
        try:
            with pyarrow.parquet.ParquetFile(path, memory_map=isinstance(path, Path), pre_buffer=False) as file:
                yield from _table_documents(name, file.iter_batches(batch_size=TABLE_BATCH_ROWS))
        # Times of other millennia are out of range, or overflow.
        except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
            raise ConfigError(f"{name}: not readable as Parquet: {_one_line(error)}") from error


def _table_documents(name: str, batches: Iterable[Any]) -> Iterator[PlacedDocument]:
    """Rows of Arrow tables or record batches."""
    number = 0
    for batch in batches:
        for document in batch.to_pylist():
            number += 1
            yield f"{name}:row ", number, _without_nulls(document)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _hugging_face_documents(source: HuggingFaceDataset, base: Path, download: bool) -> Iterator[PlacedDocument]:
    table = _load_hugging_face(source, base / source.uri, download)
    yield from _table_documents(source.uri, table.with_format("arrow").iter(TABLE_BATCH_ROWS))


def _load_hugging_face(source: HuggingFaceDataset, folder: Path, download: bool) -> Any:
    """A ``datasets.Dataset``, memory-mapped."""
    if not folder.is_dir() and (not looks_like_hub_id(source.uri) or source.uri.startswith((".", "/"))):
        raise ConfigError(f"dataset folder {source.uri!r} does not exist (looked at {folder}); give a folder or hub id")
    if not folder.is_dir() and not download:
        raise Unchecked(f"dataset {source.uri!r} of the hub, which is read when the run starts")
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    datasets.disable_progress_bars()
    try:
        if any((folder / name).is_file() for name in _SAVED_BY_DATASETS):
            found = datasets.load_from_disk(folder)
            if not isinstance(found, datasets.DatasetDict):
                return found
            if source.split in found:
                return found[source.split]
            raise ConfigError(
                f"dataset {source.uri!r} has no split {source.split!r}; it has {', '.join(map(str, found))}"
            )
        place = str(folder) if folder.is_dir() else source.uri
        return datasets.load_dataset(place, source.subset, split=source.split, revision=source.revision)
    except HfHubHTTPError as error:
        raise Recoverable(f"dataset {source.uri!r}: the hub answered with an error: {without_token(error)}") from None
    except ConnectionError as error:
        raise HubOutOfReach(
            f"dataset {source.uri!r} is not a folder here, and the hub could not be reached to look for it there"
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # what datasets raises of its builders has no common base
        raise ConfigError(f"dataset {source.uri!r} cannot be read: {_one_line(error)}") from error


def stored_documents(source: StoredDataset, objects: ObjectStore | None) -> Iterator[PlacedDocument]:
    """Rows of a file or folder in the object store. Raises ConfigError where it is not there."""
    if objects is None:
        raise Unchecked(f"dataset {source.id}, as the object store cannot be reached")
    try:
        content_id = complete_object_id(objects, source.id)
        objects.size(content_id)
    except NotFound as error:
        raise ConfigError(f"dataset {source.id} is not in the object store {objects.url}") from error
    name = content_id.short
    head = next(iter(objects.stream(content_id)), b"")
    with scratch_folder("dataset") as scratch:
        copy = scratch / "rows"
        if head.startswith(_PARQUET_MAGIC):
            objects.get_file(content_id, copy)
            yield from parquet_documents([(name, copy)])
        elif is_folder(objects, content_id):
            objects.get_tree(content_id, copy)
            yield from _folder_documents(name, copy)
        else:
            yield from numbered_lines(name, split_lines(objects.stream(content_id)))


def _folder_documents(name: str, folder: Path) -> Iterator[PlacedDocument]:
    """Rows of a folder that ``datasets`` saved, or of its JSONL and Parquet files in order of their paths."""
    if any((folder / saved).is_file() for saved in _SAVED_BY_DATASETS):
        table = _load_hugging_face(HuggingFaceDataset(kind="hugging_face", uri=name), folder, download=False)
        yield from _table_documents(name, table.with_format("arrow").iter(TABLE_BATCH_ROWS))
        return
    files = sorted(file for file in folder.rglob("*") if file.suffix in (".jsonl", ".parquet"))
    if not files:
        raise ConfigError(f"object {name} is a folder without a .jsonl or .parquet file")
    for file in files:
        read = jsonl_documents if file.suffix == ".jsonl" else parquet_documents
        yield from read([(f"{name}/{file.relative_to(folder).as_posix()}", file)])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True)
class _Part:
    """A file of the input."""

    documents: Callable[[], Iterator[PlacedDocument]]
    identity: Callable[[], Any]
    """JSON that differs where the content does; None where that is unknown."""


class PromptFiles:
    """The files that an input names, in order of their paths."""

    def __init__(self, source: InputGlob, base: Path, objects: ObjectStore | None = None) -> None:
        self._source = source
        self._base = base
        self._objects = objects

    def rows(self) -> Iterator[PromptRow]:
        """All rows, one at a time.

        Raises ConfigError where there is none, DataError where some are malformed, Unchecked for what is in an object
        store that is not given.
        """
        row = None
        documents = (document for part in self._parts for document in part.documents())
        for _, _, row in parse_documents(documents, PromptRow):
            yield row
        if row is None:
            reason = f"{len(self._parts)} files without a row" if self._parts else "no such file"
            raise ConfigError(f"no input rows matched {self._source.glob!r}: {reason}")

    def covers(self, address: str) -> bool:
        """Whether a file at this local path or URL would be among them."""
        pattern = self._source.glob
        if is_url(pattern) != is_url(address):
            return False
        if not is_url(pattern):
            pattern = os.path.join(self._base, local_path(pattern))
            fixed = re.match(r"(?:[^*?]*/)?", pattern)
            assert fixed is not None, "it matches nothing, too"
            pattern = os.path.realpath(fixed[0]).rstrip("/") + "/" + pattern[fixed.end() :]
            address = os.path.realpath(address)
        return re.fullmatch(_pattern_regex(pattern), address) is not None

    def identity(self) -> ContentId | None:
        """Stands for the content of the files, without parsing them; None where that is unknown.

        The same rows in other files or another form may have another. Local files are hashed; of files at a URL the
        entity tag and size are taken.
        """
        identities = [part.identity() for part in self._parts]
        return None if None in identities else content_id("prompt-files/2", [self._source.format, identities])

    @cached_property
    def _parts(self) -> list[_Part]:
        pattern = self._source.glob
        if is_url(pattern):
            files, key = files_at(pattern, self._objects)
            return [self._at_url(files, file) for file in matching_urls(files, key)]
        paths = matching_files(local_path(pattern), self._base)
        if not paths and _STORED.fullmatch(pattern):
            return [self._stored(pattern)]
        return [self._local(path) for path in paths]

    def _is_parquet(self, name: str) -> bool:
        if self._source.format is not None:
            return self._source.format == "parquet"
        return name.endswith(PARQUET_SUFFIXES)

    def _local(self, path: Path) -> _Part:
        parquet = self._is_parquet(path.name)
        return _Part(
            partial(parquet_documents if parquet else jsonl_documents, [(str(path), path)]),
            lambda: [parquet, hash_file(path)[1]],
        )

    def _at_url(self, files: RemoteFiles, file: UrlFile) -> _Part:
        parquet = self._is_parquet(file.key)
        return _Part(
            partial(_parquet_at_url if parquet else _jsonl_at_url, files, file),
            # An entity tag tells versions of one object apart, not objects.
            lambda: None if file.mark is None else [parquet, file.url, file.mark],
        )

    def _stored(self, digits: str) -> _Part:
        objects = self._objects

        def identity() -> Any:
            try:
                return None if objects is None else ["object", complete_object_id(objects, digits)]
            except NotFound:
                return None  # reading it says so

        return _Part(partial(stored_documents, StoredDataset(kind="object", id=digits), objects), identity)


def _pattern_regex(pattern: str) -> str:
    """What a pattern of ``*``, ``?`` and ``**`` matches, as `glob.glob` sees it: nothing hidden unless it says so."""
    *folders, last = pattern.split("/")
    regex = "".join(r"(?:(?!\.)[^/]+/)*" if part == "**" else _part_regex(part) + "/" for part in folders)
    return regex + (r"(?:(?!\.)[^/]+/)*(?!\.)[^/]*" if last == "**" else _part_regex(last))


def _part_regex(part: str) -> str:
    parts = re.split(r"(\*+|\?)", part)
    regex = "".join({"*": "[^/]*", "?": "[^/]"}.get(text[:1], re.escape(text)) for text in parts if text)
    return rf"(?!\.){regex}" if part[:1] in ("*", "?") else regex


def _jsonl_at_url(files: RemoteFiles, file: UrlFile) -> Iterator[PlacedDocument]:
    try:
        yield from numbered_lines(file.url, split_lines(files.read_chunks(file.key)))
    except FileNotFoundError as error:
        raise ConfigError(f"{file.url} is gone since the files were listed; run again") from error


def _parquet_at_url(files: RemoteFiles, file: UrlFile) -> Iterator[PlacedDocument]:
    with storage_faults("read", file.url):
        opened = files.fs.open(files.path(file.key), "rb", block_size=READ_BYTES)
    with opened:
        yield from parquet_documents([(file.url, opened)])


def open_prompts(source: InputGlob, base: Path, objects: ObjectStore | None = None) -> PromptFiles:
    """The prompts of an input; a relative path starts at ``base``."""
    return PromptFiles(source, base, objects)
