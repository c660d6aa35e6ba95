"""Files of rows of every form: JSON lines, JSON arrays, CSV, Parquet, Arrow, compressed or not.

What a file is, its first bytes and its name say. Text is read in chunks and tables a batch at a time, so that a file
may be larger than memory, also one that is small while it is compressed. In tables a null stands for an absent key, as
every column is there in every row; in CSV an empty field does.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from rollout_core.base.errors import ConfigError, RolloutError
from rollout_core.base.watching import current_amount
from rollout_core.data.datasets import (
    MAX_LINE_BYTES,
    LineTooLong,
    PlacedDocument,
    Reading,
    numbered_lines,
    split_lines,
    without_nulls,
)

if TYPE_CHECKING:
    import pyarrow

TABLE_BATCH_ROWS = 500
"""Rows of a table that are in memory together."""
HEAD_BYTES = 1 << 16
"""Of text, by which its form and its line ends are found."""
_CHUNK_BYTES = 1 << 16
_TABLES = {"parquet": "Parquet", "arrow": "Arrow", "stream": "Arrow"}
_TABLE_HEADS = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "stream"}
_TABLE_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow"}
_COMPRESSED = re.compile(
    rb"(?P<gzip>\x1f\x8b)|(?P<zstd>\x28\xb5\x2f\xfd)|(?P<xz>\xfd7zXZ\x00)|(?P<bzip2>BZh[1-9](?:1AY&SY|\x17rE8P\x90))"
)
COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
FILES_OF_ROWS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".pq", ".arrow", ".feather")
"""Endings of their names, but for those of compression."""
SEPARATORS = {".csv": ",", ".tsv": "\t"}
_LARGEST_WHOLE = 2.0**53
"""Beyond this not every integer is a float."""
_JSON_SPACE = b" \t\r\n"
csv.field_size_limit(MAX_LINE_BYTES)


@dataclass(frozen=True)
class DataFile:
    """A file of rows, wherever it is."""

    name: str
    """Problems are reported under it."""
    head: Callable[[], bytes]
    """Its first bytes, at least 8 where it has them."""
    chunks: Callable[[], Iterator[bytes]]
    """Its bytes, in order."""
    opened: Callable[[], AbstractContextManager[Any]]
    """A path, or a file that seeks, for pyarrow."""
    form: str | None = None
    """What it is said to be: ``jsonl`` or ``parquet``."""

    def table(self) -> str | None:
        """Which kind of table it is; None for text."""
        head = self.head()
        found = next((form for magic, form in _TABLE_HEADS.items() if head.startswith(magic)), None)
        if found is not None or self.form == "jsonl":
            return found
        return self.form or _TABLE_SUFFIXES.get(PurePosixPath(self.name).suffix)


def local_file(name: str, path: Path, form: str | None = None) -> DataFile:
    """A file of this machine. Reading it raises ConfigError where that fails."""

    def chunks(size: int = _CHUNK_BYTES) -> Iterator[bytes]:
        try:
            with path.open("rb") as file:
                yield from iter(partial(file.read, size), b"")
        except OSError as error:
            raise ConfigError(f"{name}: not readable: {error.strerror or error}") from error

    return DataFile(name, lambda: next(chunks(8), b""), chunks, lambda: nullcontext(path), form)


def file_documents(files: Iterable[DataFile], reading: Reading) -> Iterator[PlacedDocument]:
    """Rows of files, one after the other. Raises ConfigError for a file that cannot be read."""
    forms = [(file, file.table()) for file in files]
    whole = whole_columns(open_table(file, form) for file, form in forms if form is not None)
    reading.see_whole(whole)
    for file, form in forms:
        if form is None:
            yield from _text_documents(file, reading)
            continue
        with open_table(file, form) as table:
            yield from table_documents(table, whole, reading)


def is_array(file: DataFile) -> bool:
    """Whether a file of text holds a JSON array. Raises ConfigError where it cannot be read."""
    head, _ = _head_of(file.name, _decompressed(file.name, file.chunks()))
    return head.lstrip(_JSON_SPACE).startswith(b"[")


def first_document(file: DataFile) -> dict[str, Any] | None:
    """The first row of a file as it stands there, with the keys of all columns of a table; None where there is none.
    Reads the file's beginning. Raises ConfigError for a file that cannot be read, or whose rows are no objects."""
    form = file.table()
    if form is None:
        _, _, document = next(_text_documents(file, Reading()), ("", 0, {}))
        try:
            found = json.loads(document) if isinstance(document, bytes) else document
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file.name}:1: no JSON: {one_line(error)}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{file.name}:1: a row is a JSON object, got {type(found).__name__}")
        return found or None
    with open_table(file, form) as table:
        batch, _ = next(table.batches(None), (None, 0.0))
        rows = [] if batch is None else batch.slice(0, 1).to_pylist()
        return dict.fromkeys(table.schema.names) | without_nulls(rows[0] if rows else {})


# -- tables ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Rows in columns."""

    name: str
    schema: pyarrow.Schema
    num_bytes: int
    batches: Callable[[list[str] | None], Iterator[tuple[Any, float]]]
    """Of these columns, or all, each with the share of the table that is read after it."""


@contextmanager
def open_table(file: DataFile, form: str) -> Iterator[Table]:
    """A Parquet or Arrow file. Raises ConfigError where it cannot be read, inside the block too."""
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    try:
        with file.opened() as place:
            is_local = isinstance(place, Path)
            if form == "parquet":
                options = {"memory_map": is_local, "pre_buffer": False}
                with pyarrow.parquet.ParquetFile(place, **options) as found:
                    _refuse_twice(file.name, found.schema_arrow.names)
                    batches = partial(_parquet_batches, found)
                    yield Table(file.name, found.schema_arrow, _size_of(place), batches)
                return
            with pyarrow.memory_map(str(place)) if is_local else pyarrow.PythonFile(place, "r") as source:
                opened = pyarrow.ipc.open_file(source) if form == "arrow" else pyarrow.ipc.open_stream(source)
                _refuse_twice(file.name, opened.schema.names)
                batches = partial(_arrow_batches, source, opened, _size_of(place))
                yield Table(file.name, opened.schema, _size_of(place), batches)
    except RolloutError:
        raise
    # Times of other millennia are out of range, or overflow.
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{file.name}: not readable as {_TABLES[form]}: {one_line(error)}") from error


def _size_of(file: Any) -> int:
    """Bytes of a path or an open file of a bucket."""
    return file.stat().st_size if isinstance(file, Path) else int(file.size)


def _parquet_batches(file: Any, columns: list[str] | None) -> Iterator[tuple[Any, float]]:
    done, num_rows = 0, max(1, file.metadata.num_rows)
    for batch in file.iter_batches(batch_size=TABLE_BATCH_ROWS, columns=columns):
        done += batch.num_rows
        yield batch, done / num_rows


def _arrow_batches(source: Any, opened: Any, size: int, columns: list[str] | None) -> Iterator[tuple[Any, float]]:
    import pyarrow

    if isinstance(opened, pyarrow.RecordBatchFileReader):
        count = opened.num_record_batches
        read = ((opened.get_batch(number), (number + 1) / count) for number in range(count))
    else:
        source.seek(0)
        read = ((batch, source.tell() / max(1, size)) for batch in pyarrow.ipc.open_stream(source))
    for batch, share in read:
        chosen = batch if columns is None else batch.select(columns)
        for start in range(0, batch.num_rows, TABLE_BATCH_ROWS):
            is_last = start + TABLE_BATCH_ROWS >= batch.num_rows
            yield chosen.slice(start, TABLE_BATCH_ROWS), share if is_last else 0.0


def dataset_table(name: str, found: Any) -> Table:
    """A ``datasets.Dataset``."""

    def batches(columns: list[str] | None) -> Iterator[tuple[Any, float]]:
        done = 0
        chosen = found if columns is None else found.select_columns(columns)
        for batch in chosen.with_format("arrow").iter(TABLE_BATCH_ROWS):
            done += batch.num_rows
            yield batch, done / len(found)

    return Table(name, found.features.arrow_schema, int(found.data.nbytes), batches)


def whole_columns(tables: Iterable[AbstractContextManager[Table]]) -> frozenset[str]:
    """Columns of floats that have nulls and whose numbers are whole, in all tables: integers that nulls made floats."""
    import pyarrow

    kinds = (pyarrow.float32(), pyarrow.float64())
    have_nulls: set[str] = set()
    refused: set[str] = set()
    for opened in tables:
        with opened as table:
            floats = {field.name for field in table.schema if field.type in kinds} - refused
            for batch, _ in table.batches(sorted(floats)) if floats else ():
                for name in floats - refused:
                    column = batch.column(name)
                    if column.null_count:
                        have_nulls.add(name)
                    numbers = np.asarray(column.drop_null(), np.float64)
                    if not np.all((np.floor(numbers) == numbers) & (np.abs(numbers) <= _LARGEST_WHOLE)):
                        refused.add(name)
                if floats <= refused:
                    break
    return frozenset(have_nulls - refused)


def table_documents(table: Table, whole: frozenset[str], reading: Reading) -> Iterator[PlacedDocument]:
    """Rows of a table, with ``whole`` columns as integers; whoever watches gets its bytes reported."""
    import pyarrow

    names = table.schema.names
    reading.see(names)
    number, amount, done = 0, current_amount(), 0
    for batch, share in table.batches(None):
        if (now := round(share * table.num_bytes)) > done:
            amount.add(now - done)
            done = now
        for name in whole.intersection(names):
            batch = batch.set_column(names.index(name), name, batch.column(name).cast(pyarrow.int64()))
        for document in batch.to_pylist():
            number += 1
            yield f"{table.name}:row ", number, without_nulls(document)


def _refuse_twice(name: str, columns: list[str]) -> None:
    """Raises ConfigError for columns of one name, of which a row could keep only one."""
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise ConfigError(f"{name}: column {', '.join(map(repr, twice))} stands twice; rename or remove one")


# -- text --------------------------------------------------------------------------------------------------------------


class _Chunks(io.RawIOBase):
    """Chunks of bytes as a file, for what decompresses files."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left = chunk
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size


def _text_documents(file: DataFile, reading: Reading) -> Iterator[PlacedDocument]:
    head, chunks = _head_of(file.name, _decompressed(file.name, _counted(file.chunks())))
    _refuse_other_forms(file.name, head)
    suffix = ending(file.name)
    end = b"\r" if b"\r" in head and b"\n" not in head else b"\n"
    if suffix in SEPARATORS and file.form is None:
        yield from _csv_documents(file.name, _lines(file.name, chunks, end), SEPARATORS[suffix], reading)
    elif head.lstrip(_JSON_SPACE).startswith(b"["):
        yield from _array_documents(file.name, chunks, end)
    else:
        if head.partition(b"\n")[0].strip() == b"{":
            raise ConfigError(f"{file.name}:1: a JSON object over several lines; expected one a line, or an array")
        yield from numbered_lines(file.name, _lines(file.name, chunks, end))


def ending(name: str) -> str:
    """Of a file's name, without that of its compression: it decides between forms that have no first bytes."""
    name = name.lower()
    packed = next((suffix for suffix in COMPRESSED_SUFFIXES if name.endswith(suffix)), "")
    return PurePosixPath(name.removesuffix(packed)).suffix


def _counted(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same, reported to whoever watches."""
    amount = current_amount()
    for chunk in chunks:
        amount.add(len(chunk))
        yield chunk


def _peek(chunks: Iterator[bytes], size: int) -> tuple[bytes, Iterator[bytes]]:
    """The first bytes, at least ``size`` where there are so many, and all of them."""
    read: list[bytes] = []
    for chunk in chunks:
        read.append(chunk)
        if sum(map(len, read)) >= size:
            break
    head = b"".join(read)
    return head, chain([head], chunks)


def _head_of(name: str, chunks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The first bytes of a text without its byte order mark, and all of them. Raises ConfigError where it is not
    UTF-8."""
    head, chunks = _peek(chunks, HEAD_BYTES)
    encoding = json.detect_encoding(head).removesuffix("-sig")
    if encoding != "utf-8":
        raise ConfigError(f"{name}:1: {encoding[:6].upper()} text; save it as UTF-8")
    next(chunks)
    head = head.removeprefix(codecs.BOM_UTF8)
    return head, chain([head], chunks)


def _decompressed(name: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The text of a file, compressed or not; raises ConfigError for one that is damaged."""
    head, chunks = _peek(chunks, 16)
    found = _COMPRESSED.match(head)
    if found is None:
        yield from chunks
        return
    kind = cast(str, found.lastgroup)
    try:
        with _DECOMPRESSORS[kind](io.BufferedReader(_Chunks(chunks), _CHUNK_BYTES)) as text:
            yield from iter(partial(text.read, _CHUNK_BYTES), b"")
    except RolloutError:
        raise
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise ConfigError(f"{name}: not readable as {kind}: {one_line(error)}") from error


def _zstd(file: IO[bytes]) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")


_DECOMPRESSORS: dict[str, Callable[[Any], Any]] = {
    "gzip": lambda file: gzip.GzipFile(fileobj=file),
    "bzip2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
    "zstd": _zstd,
}


def _refuse_other_forms(name: str, head: bytes) -> None:
    """Raises ConfigError for what is no text: only a compressed table comes so far."""
    for magic, form in _TABLE_HEADS.items():
        if head.startswith(magic):
            raise ConfigError(f"{name}: a {_TABLES[form]} file that is compressed as a whole; decompress it")
    if head.startswith(b"PK\x03\x04"):
        raise ConfigError(f"{name}: a zip archive; unpack it, or compress its files by gzip, zstd, bzip2 or xz")
    if _COMPRESSED.match(head):
        raise ConfigError(f"{name}: compressed twice; decompress it once")


def _lines(name: str, chunks: Iterator[bytes], end: bytes) -> Iterator[bytes]:
    number = 1
    try:
        for line in split_lines(chunks, end):
            yield line
            number += 1
    except LineTooLong as error:
        raise ConfigError(f"{name}:{number}: {error}") from None


def _csv_documents(name: str, lines: Iterator[bytes], separator: str, reading: Reading) -> Iterator[PlacedDocument]:
    """Rows of a table whose first line names the columns; all values are text."""
    rows = csv.reader(_decoded(name, lines), delimiter=separator, strict=True)
    header: list[str] | None = None
    while True:
        number = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise ConfigError(f"{name}:{number}: not valid CSV: {error}") from None
        if row is None:
            return
        if not row:
            continue
        if header is None:
            header = row
            _refuse_twice(name, header)
            reading.see(header)
        elif len(row) != len(header):
            raise ConfigError(f"{name}:{number}: {len(row)} fields; expected {len(header)}, as in the first line")
        else:
            yield f"{name}:", number, {key: value for key, value in zip(header, row, strict=True) if value}


def _decoded(name: str, lines: Iterator[bytes]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        try:
            yield line.decode() + "\n"
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name}:{number}: not valid UTF-8 at byte {error.start + 1}") from None


_OUTSIDE_TEXT = re.compile(rb'["\[\]{},]')
_INSIDE_TEXT = re.compile(rb'["\\]')


def _array_documents(name: str, chunks: Iterator[bytes], end: bytes) -> Iterator[PlacedDocument]:
    """Elements of a JSON array, each as its bytes and numbered by the line that it begins in: they are parsed, and
    their problems reported, as lines are."""
    element: list[bytes] = []
    line, count, depth = 1, 0, 0
    in_text = is_escaped = False
    for chunk in chunks:
        place, begun, is_escaped = int(is_escaped), 0, False
        while found := (_INSIDE_TEXT if in_text else _OUTSIDE_TEXT).search(chunk, place):
            byte, place = found[0], found.end()
            if in_text and byte == b"\\":
                is_escaped = place == len(chunk)
                place += 1
                continue
            if byte == b'"':
                in_text = not in_text
                continue
            depth += (byte in b"[{") - (byte in b"]}")
            if depth == 1 and byte == b"[" and not count and not element:
                line, begun, element = line + chunk[:place].count(end), place, [b""]
            elif depth == 0 or (depth == 1 and byte == b","):
                row = b"".join([*element, chunk[begun : found.start()]])
                start = line + row[: len(row) - len(row.lstrip(_JSON_SPACE))].count(end)
                line, begun, element = line + row.count(end), place, [b""]
                if row.strip(_JSON_SPACE):
                    count += 1
                    yield f"{name}:", start, row
                elif depth == 1 or count:
                    raise ConfigError(f"{name}:{line}: not a JSON array: nothing stands before {byte.decode()!r}")
            if depth == 0:
                _refuse_more(name, line, chain([chunk[place:]], chunks))
                return
        element.append(chunk[begun:])
        if sum(map(len, element)) > MAX_LINE_BYTES:
            line += sum(part.count(end) for part in element)
            raise ConfigError(f"{name}:{line}: an element of more than {MAX_LINE_BYTES} bytes")
    line += sum(part.count(end) for part in element)
    raise ConfigError(f"{name}:{line}: not a JSON array: it has no end; the file may be cut")


def _refuse_more(name: str, line: int, chunks: Iterable[bytes]) -> None:
    """Raises ConfigError where anything follows an array."""
    for chunk in chunks:
        if chunk.strip(_JSON_SPACE):
            raise ConfigError(f"{name}:{line}: more text after the end of the JSON array; expected one array")


def one_line(error: Exception) -> str:
    """What an error says, without its line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
