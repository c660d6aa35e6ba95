"""Data sets of every kind as streams of checked rows: files, Hugging Face data sets, object-store ids.

Rows are read one at a time, or a small batch of a table, so that a data set may be larger than memory. Equal rows give
equal canonical JSONL, whatever they were read from. The input of batch inference is read here too, with an identity
that takes no parsing.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic

from blake3 import blake3

from rollout_core.base.errors import ConfigError, NotFound, Recoverable
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.locks import scratch_folder
from rollout_core.base.settings import without_password
from rollout_core.base.watching import current_amount
from rollout_core.config import (
    DatasetSource,
    DemonstrationSource,
    EnvironmentRows,
    EpisodesDataset,
    FilesDataset,
    HuggingFaceDataset,
    InputGlob,
    JsonlDataset,
    ParquetDataset,
    PluginDataset,
    StoredDataset,
    identity,
)
from rollout_core.data.datasets import (
    PlacedDocument,
    PromptRow,
    Reading,
    Row,
    RowT,
    matching_files,
    parse_documents,
    split_lines,
    to_line,
)
from rollout_core.data.plugin_rows import plugin_rows
from rollout_core.data.row_files import (
    COMPRESSED_SUFFIXES,
    FILES_OF_ROWS,
    DataFile,
    dataset_table,
    ending,
    file_documents,
    local_file,
    one_line,
    table_documents,
    whole_columns,
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
from rollout_core.objects.buckets import READ_BYTES, RemoteFiles
from rollout_core.objects.files import storage_faults
from rollout_core.objects.lineage import record_derivation
from rollout_core.objects.origins import SHOWN_FILES, Source, record_import, source_of_files
from rollout_core.objects.plugin_files import file_plugin
from rollout_core.objects.records import Dataset
from rollout_core.objects.trees import expected, hash_file
from rollout_core.plugins.discovery import find_plugin
from rollout_core.plugins.identity import PluginCode

_SAVED_BY_DATASETS = ("state.json", "dataset_dict.json")
_STORED = re.compile("[0-9a-f]{8,64}")


class RowStream(Generic[RowT]):
    """Rows of a data set, read again by every iteration and never all in memory.

    Iterating raises ConfigError where the data set cannot be read or has no rows, DataError after the last good row
    where rows are malformed.
    """

    def __init__(
        self,
        documents: Callable[[], Iterable[PlacedDocument]],
        model: type[RowT],
        address: str,
        reading: Reading | None = None,
    ) -> None:
        self._documents = documents
        self._model = model
        self._reading = reading or Reading()
        self.address = address
        self._names: list[str] = []
        self._first_rows: list[int] = []
        self._numbers = array("q")
        self.commit: str | None = None
        """Of the repository on the hub, where the last iteration read one and it is known."""
        self.plugin: PluginCode | None = None
        """That gave the rows of the last iteration, where one did."""

    def __iter__(self) -> Iterator[RowT]:
        self._names, self._first_rows, self._numbers = [], [], array("q")
        self._reading.begin()
        for name, number, row in parse_documents(self._documents(), self._model, self._reading):
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

    def remarks(self) -> tuple[str, ...]:
        """What the last iteration changed, or found out, to make rows of what the files hold."""
        return self._reading.remarks()

    def check(self) -> int:
        """Read all rows and return their number."""
        return sum(1 for _ in self)


EpisodesReader = Callable[[EpisodesDataset], tuple[Iterable[dict[str, Any]], str]]
"""Conversations of a run's episodes, and what is to be said of them."""


def read_dataset(
    source: DemonstrationSource,
    model: type[RowT],
    *,
    base: Path,
    objects: ObjectStore | None = None,
    download: bool = True,
    episodes: EpisodesReader | None = None,
) -> RowStream[RowT]:
    """Rows of ``source``; relative paths start at ``base``.

    Iterating raises as `RowStream` says; ConfigError for rows that an environment makes; and Unchecked for what is in
    an object store that is not given, for episodes that nobody reads, or, without ``download``, for what is on the hub.
    """

    reading = Reading() if isinstance(source, EnvironmentRows) else Reading(source.columns, source.format)

    def documents() -> Iterable[PlacedDocument]:
        if isinstance(source, EpisodesDataset):
            return _episode_documents(source, episodes, reading)
        if isinstance(source, EnvironmentRows):
            raise ConfigError(
                'rows of kind "environment" are made by the environment that a run of ppo or grpo, a night or a suite '
                "names in its table environment, and here there is none; give rows of another kind"
            )
        if isinstance(source, StoredDataset):
            return stored_documents(source, objects, reading)
        if isinstance(source, PluginDataset):
            found.plugin = find_plugin(source.name, base, source.path, kind="data-source")
            rows = enumerate(plugin_rows(source, found.plugin), start=1)
            return ((f"plugin {source.name}, row ", number, row) for number, row in rows)
        if isinstance(source, HuggingFaceDataset):
            table = _load_hugging_face(source, base / source.uri, download)
            found.commit = _commit_of(table)
            return _arrow_documents(source.uri, table, reading)
        files = _files(source.path, base)
        expected(path for _, path in files)
        return file_documents([local_file(name, path) for name, path in files], reading)

    found = RowStream(documents, model, source.address, reading)
    return found


def _episode_documents(
    source: EpisodesDataset, episodes: EpisodesReader | None, reading: Reading
) -> Iterator[PlacedDocument]:
    if episodes is None:
        raise Unchecked(f"episodes of run {source.run!r}, as object store and database cannot be reached")
    found, remark = episodes(source)
    reading.note(remark)
    for number, document in enumerate(found, start=1):
        yield "episode ", number, document


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


def record_origin(
    objects: ObjectStore, dataset: Dataset, source: DatasetSource, base: Path, rows: RowStream[Any] | None
) -> None:
    """Note where the rows of a data set came from; a plugin's files are filed. ``rows``: as they were read; None for
    those that an environment made."""
    if isinstance(source, PluginDataset):
        assert rows is not None and rows.plugin is not None, "its rows were read"
        file_plugin(objects, dataset.data, source.address, rows.plugin, "data")
    elif isinstance(source, EnvironmentRows):
        size = objects.size(dataset.data)
        record_import(objects, dataset.data, Source(kind="data", address=source.address, size_bytes=size, num_files=0))
    elif not isinstance(source, StoredDataset):
        commit = None if rows is None else rows.commit
        found = source_of_rows(source, base, commit, objects.size(dataset.data))
        record_import(objects, dataset.data, found)
    elif (stored := complete_object_id(objects, source.id)) != dataset.data:
        record_derivation(objects, "read_rows", {"rows": stored}, (dataset.data,))


def source_of_rows(
    source: FilesDataset | JsonlDataset | ParquetDataset | HuggingFaceDataset,
    base: Path,
    commit: str | None,
    filed_bytes: int,
) -> Source:
    """Where a data set was read from. One of the hub counts as large as it is as it was filed."""
    if not isinstance(source, HuggingFaceDataset):
        paths = matching_files(source.path, base)
        place = paths[0].resolve() if len(paths) == 1 else base.resolve() / source.path
        return source_of_files("data", source.path, paths, place=str(place))
    folder = base / source.uri
    if folder.is_dir():
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        return source_of_files("data", source.uri, files, place=str(folder.resolve()))
    return Source(
        kind="data",
        address=source.uri,
        hub_id=source.uri,
        revision=source.revision,
        commit=commit,
        size_bytes=filed_bytes,
        num_files=1,
    )


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


def _arrow_documents(name: str, found: Any, reading: Reading) -> Iterator[PlacedDocument]:
    """Rows of a ``datasets.Dataset``."""
    table = dataset_table(name, found)
    current_amount().expect(table.num_bytes)
    whole = whole_columns([nullcontext(table)])
    reading.see_whole(whole)
    yield from table_documents(table, whole, reading)


def _commit_of(table: Any) -> str | None:
    """The commit of a data set of the hub, by which ``datasets`` names the folder that it keeps it in."""
    names = (Path(file["filename"]).parent.name for file in table.cache_files)
    return next((name for name in names if re.fullmatch("[0-9a-f]{40}", name)), None)


def _load_hugging_face(source: HuggingFaceDataset, folder: Path, download: bool) -> Any:
    """A ``datasets.Dataset``, memory-mapped."""
    if not folder.is_dir() and (not looks_like_hub_id(source.uri) or source.uri.startswith((".", "/"))):
        raise ConfigError(f"dataset folder {source.uri!r} does not exist (looked at {folder}); give a folder or hub id")
    if not folder.is_dir() and not download:
        raise Unchecked(f"dataset {source.uri!r} of the hub, which is read when the run starts")
    if folder.is_dir() and source.revision is not None:
        raise ConfigError(
            f"dataset {source.uri!r} is the folder {folder}, which has no revisions; leave out revision "
            f"{source.revision!r}, or give a hub id"
        )
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
        raise ConfigError(f"dataset {source.uri!r} cannot be read: {one_line(error)}") from error


def stored_documents(source: StoredDataset, objects: ObjectStore | None, reading: Reading) -> Iterator[PlacedDocument]:
    """Rows of a file or folder in the object store. Raises ConfigError where it is not there."""
    if objects is None:
        raise Unchecked(f"dataset {source.id}, as the object store cannot be reached")
    try:
        content_id = complete_object_id(objects, source.id)
        objects.size(content_id)
    except NotFound as error:
        raise ConfigError(f"dataset {source.id} is not in the object store {objects.url}") from error
    name = content_id.short
    if is_folder(objects, content_id):
        with scratch_folder("dataset") as scratch:
            objects.get_tree(content_id, scratch / "rows")
            yield from _folder_documents(name, scratch / "rows", reading)
        return
    current_amount().expect(objects.size(content_id))
    with scratch_folder("dataset") as scratch:
        copy, stream = scratch / "rows", partial(objects.stream, content_id)
        file = DataFile(name, lambda: next(stream(), b""), stream, lambda: nullcontext(copy))
        if file.table() is not None:
            objects.get_file(content_id, copy)
        yield from file_documents([file], reading)


def _folder_documents(name: str, folder: Path, reading: Reading) -> Iterator[PlacedDocument]:
    """Rows of a folder that ``datasets`` saved, or of its files of rows in order of their paths."""
    if any((folder / saved).is_file() for saved in _SAVED_BY_DATASETS):
        table = _load_hugging_face(HuggingFaceDataset(kind="hugging_face", uri=name), folder, download=False)
        yield from _arrow_documents(name, table, reading)
        return
    endings = tuple(form + packed for form in FILES_OF_ROWS for packed in ("", *COMPRESSED_SUFFIXES))
    files = sorted(file for file in folder.rglob("*") if file.name.endswith(endings))
    # Next to files of another form these say something about them.
    files = [file for file in files if ".json" not in file.suffixes] or files
    if not files:
        raise ConfigError(f"object {name} is a folder without a file of rows; expected {', '.join(FILES_OF_ROWS)}")
    named = [(f"{name}/{file.relative_to(folder).as_posix()}", file) for file in expected(files)]
    yield from file_documents([local_file(name, path) for name, path in named], reading)


@dataclass(frozen=True)
class _Part:
    """A file of the input, or what is stored under an id."""

    file: DataFile | StoredDataset
    identity: Callable[[], Any]
    """JSON that differs where the content does; None where that is unknown."""
    num_bytes: int = 0
    """To be read; 0 where that shows later."""


class PromptFiles:
    """The files that an input names, in order of their paths."""

    def __init__(self, source: InputGlob, base: Path, objects: ObjectStore | None = None) -> None:
        self._source = source
        self._base = base
        self._objects = objects
        self._reading = Reading(source.columns)

    def remarks(self) -> tuple[str, ...]:
        """What `rows` changed, or found out, the last time that all were read."""
        return self._reading.remarks()

    def rows(self) -> Iterator[PromptRow]:
        """All rows, one at a time.

        Raises ConfigError where there is none, DataError where some are malformed, Unchecked for what is in an object
        store that is not given.
        """
        row = None
        self._reading.begin()
        current_amount().expect(sum(part.num_bytes for part in self._parts))
        for _, _, row in parse_documents(self._documents(), PromptRow, self._reading):
            yield row
        if row is None:
            reason = f"{len(self._parts)} files without a row" if self._parts else "no such file"
            raise ConfigError(f"no input rows matched {self._source.glob!r}: {reason}")

    def _documents(self) -> Iterable[PlacedDocument]:
        stored = next((part.file for part in self._parts if isinstance(part.file, StoredDataset)), None)
        if stored is not None:
            return stored_documents(stored, self._objects, self._reading)
        return file_documents([part.file for part in self._parts if isinstance(part.file, DataFile)], self._reading)

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
        if None in identities:
            return None
        return content_id("prompt-files/3", [self._source.format, identity(self._source.columns), identities])

    def source(self) -> Source | None:
        """Where the files are, with their sizes; None where they are in the object store."""
        pattern = self._source.glob
        if is_url(pattern):
            files, key = files_at(pattern, self._objects)
            found = matching_urls(files, key)
            return Source(
                kind="data",
                address=without_password(pattern),
                place=without_password(pattern),
                size_bytes=sum(file.size for file in found),
                num_files=len(found),
                files=tuple(without_password(file.url) for file in found[:SHOWN_FILES]),
            )
        paths = matching_files(local_path(pattern), self._base)
        if not paths:
            return None
        place = paths[0].resolve() if len(paths) == 1 else self._base.resolve() / local_path(pattern)
        return source_of_files("data", pattern, paths, place=str(place))

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

    def _local(self, path: Path) -> _Part:
        return _Part(
            local_file(str(path), path, self._source.format),
            lambda: [ending(path.name), hash_file(*expected([path]))[1]],
            path.stat().st_size if path.is_file() else 0,  # reading it says what is wrong
        )

    def _at_url(self, files: RemoteFiles, file: UrlFile) -> _Part:
        return _Part(
            _file_at_url(files, file, self._source.format),
            # An entity tag tells versions of one object apart, not objects.
            lambda: None if file.mark is None else [file.url, file.mark],
            file.size,
        )

    def _stored(self, digits: str) -> _Part:
        objects = self._objects

        def identity_of() -> Any:
            try:
                return None if objects is None else ["object", complete_object_id(objects, digits)]
            except NotFound:
                return None  # reading it says so

        return _Part(StoredDataset(kind="object", id=digits), identity_of)


def _pattern_regex(pattern: str) -> str:
    """What a pattern of ``*``, ``?`` and ``**`` matches, as `glob.glob` sees it: nothing hidden unless it says so."""
    *folders, last = pattern.split("/")
    regex = "".join(r"(?:(?!\.)[^/]+/)*" if part == "**" else _part_regex(part) + "/" for part in folders)
    return regex + (r"(?:(?!\.)[^/]+/)*(?!\.)[^/]*" if last == "**" else _part_regex(last))


def _part_regex(part: str) -> str:
    parts = re.split(r"(\*+|\?)", part)
    regex = "".join({"*": "[^/]*", "?": "[^/]"}.get(text[:1], re.escape(text)) for text in parts if text)
    return rf"(?!\.){regex}" if part[:1] in ("*", "?") else regex


def _file_at_url(files: RemoteFiles, file: UrlFile, form: str | None) -> DataFile:
    @contextmanager
    def still_there() -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise ConfigError(f"{file.url} is gone since the files were listed; run again") from error

    def head() -> bytes:
        with still_there():
            return files.read_part(file.key, 0, min(8, file.size)) if file.size else b""

    def chunks() -> Iterator[bytes]:
        with still_there():
            yield from files.read_chunks(file.key)

    @contextmanager
    def opened() -> Iterator[Any]:
        with storage_faults("read", file.url):
            found = files.fs.open(files.path(file.key), "rb", block_size=READ_BYTES)
        with found:
            yield found

    return DataFile(file.url, head, chunks, opened, form)


def open_prompts(source: InputGlob, base: Path, objects: ObjectStore | None = None) -> PromptFiles:
    """The prompts of an input; a relative path starts at ``base``."""
    return PromptFiles(source, base, objects)
