"""The input of batch inference: where prompts are read, and what stands for their content without parsing them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import ContentId, content_id
from rollout_core.config import InputGlob, StoredDataset
from rollout_core.data.dataset_sources import parquet_documents, split_lines, stored_documents
from rollout_core.data.datasets import (
    PlacedDocument,
    PromptRow,
    jsonl_documents,
    matching_files,
    numbered_lines,
    parse_documents,
)
from rollout_core.objects import ObjectStore
from rollout_core.objects.files import storage_faults
from rollout_core.objects.folders import hash_file
from rollout_core.objects.remote import READ_BYTES, RemoteFiles
from rollout_core.objects.short_ids import complete_object_id
from rollout_core.objects.urls import UrlFile, files_at, is_url, local_path, matching_urls

PARQUET_SUFFIXES = (".parquet", ".pq")
_STORED = re.compile("[0-9a-f]{8,64}")


@dataclass(frozen=True)
class _Part:
    """A file of the input."""

    documents: Callable[[], Iterator[PlacedDocument]]
    identity: Callable[[], Any]
    """JSON that differs where the content does; None where nothing tells."""


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
        """Stands for the content of the files, without parsing them; None where that cannot be told.

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
