"""The tool that searches a corpus by words.

An index (SQLite's FTS5) is made once for a corpus's content, in a folder that processes share, and read by all
episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import content_id
from rollout_core.base.locks import exclusive
from rollout_core.config.tools import SearchTool
from rollout_core.data.datasets import Reading, Row, parse_documents
from rollout_core.data.row_files import file_documents, local_file
from rollout_core.environments.schemas import function_schema
from rollout_core.environments.tools.results import ToolError
from rollout_core.objects.trees import hash_file

INDEX_TAG = "search-index/1"
"""Raised where equal files give another index."""
MOST_WORDS = 32
"""Of a query; further ones are not looked for."""
TEXT_ENDINGS = (".txt", ".md")
PROGRESS_STEPS = 10_000
_WORD = re.compile(r"\w+")
_PARAGRAPH = re.compile(r"\n[ \t]*\n")


class Passage(Row):
    """What a row of a corpus holds."""

    text: str = Field(min_length=1)
    title: str = ""


class SearchIndex:
    """The index of one tool's corpus; threads may share it."""

    def __init__(self, spec: SearchTool, base: Path, folder: Path) -> None:
        """``base``: the working folder of the corpus's paths. ``folder``: where indexes are kept."""
        self._spec = spec
        self._base = base
        self._folder = folder
        self._lock = threading.Lock()
        self._path: Path | None = None

    def path(self) -> Path:
        """The index's file, which is made where it is not there. Raises DataError for rows that are malformed, and
        ConfigError for files that cannot be read."""
        with self._lock:
            if self._path is None:
                self._path = self._made()
            return self._path

    def _made(self) -> Path:
        if lines := check_corpus(self._spec, self._base):
            raise ConfigError("\n".join(lines), lines)
        files = [str(hash_file(self._base / name).content_id) for name in self._spec.corpus]
        forms = [_is_text(name) for name in self._spec.corpus]
        titles = [Path(name).name if is_text else "" for name, is_text in zip(self._spec.corpus, forms, strict=True)]
        described = {"files": files, "titles": titles, "keys": [self._spec.text_key, self._spec.title_key]}
        path = self._folder / f"search-{content_id(INDEX_TAG, described)}.sqlite"
        self._folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return path
        with exclusive(path.with_suffix(".lock")):
            if not path.exists():
                made = path.with_suffix(".new")
                made.unlink(missing_ok=True)  # of a process that was killed
                with contextlib.closing(sqlite3.connect(made)) as connection:
                    self._fill(connection)
                with made.open("rb") as file:
                    os.fsync(file.fileno())
                made.rename(path)
        return path

    def _fill(self, connection: sqlite3.Connection) -> None:
        connection.execute("pragma journal_mode = off")
        connection.execute("pragma synchronous = off")
        connection.execute(
            "create virtual table passages using fts5(title, text, tokenize = 'porter unicode61 remove_diacritics 2')"
        )
        rows = self._passages()
        connection.executemany("insert into passages (title, text) values (?, ?)", rows)
        connection.execute("insert into passages (passages) values ('optimize')")
        connection.commit()

    def _passages(self) -> Iterator[tuple[str, str]]:
        spec = self._spec
        found = False
        for name in spec.corpus:
            for passage in _paragraphs(name, self._base / name) if _is_text(name) else self._rows(name):
                found = True
                yield passage
        if not found:
            raise ConfigError(f"the corpus of tool {spec.name} ({', '.join(spec.corpus)}) has no passage")

    def _rows(self, name: str) -> Iterator[tuple[str, str]]:
        keys = {"text": self._spec.text_key, "title": self._spec.title_key}
        reading = Reading({ours: theirs for ours, theirs in keys.items() if ours != theirs})
        documents = file_documents([local_file(name, self._base / name)], reading)
        for _, _, row in parse_documents(documents, Passage, reading):
            yield row.title, row.text

    def find(self, query: str, most: int) -> list[tuple[str, str]]:
        """Title and passage of the best hits. Raises ToolError where the time is up."""
        words = _words(query)
        # Each word as a string of FTS5's, in which nothing but a quote means anything, and no word holds one.
        wanted = " OR ".join(f'"{word}"' for word in words)
        path = self.path()  # whose making takes no time of a call's
        deadline = time.monotonic() + self._spec.seconds
        with contextlib.closing(_opened(path)) as connection:
            connection.set_progress_handler(lambda: time.monotonic() > deadline, PROGRESS_STEPS)
            try:
                rows = connection.execute(
                    "select title, text from passages where passages match ? order by rank, rowid limit ?",
                    (wanted, most),
                ).fetchall()
            except sqlite3.OperationalError as error:
                if time.monotonic() > deadline:
                    raise ToolError(
                        f"the search took longer than {self._spec.seconds:g} s, and was ended; use fewer, rarer words"
                    ) from None
                raise ConfigError(
                    f"the index {self.path()} cannot be read: {error}; remove it, and it is made anew"
                ) from None
        return [(title, _around(text, words, self._spec.hit_characters)) for title, text in rows]


def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)


def _words(query: str) -> list[str]:
    words = list(dict.fromkeys(word.lower() for word in _WORD.findall(query.encode(errors="ignore").decode())))
    if not words:
        raise ToolError(f"the query {query[:50]!r} holds no word; give words to look for")
    return words[:MOST_WORDS]


def _around(text: str, words: list[str], most: int) -> str:
    """The part of a passage around the first word that it holds."""
    if len(text) <= most:
        return text
    lowered = text.lower()
    places = [place for word in words if (place := lowered.find(word)) >= 0]
    start = max(0, min(min(places, default=0) - most // 4, len(text) - most))
    before, after = "..." if start else "", "..." if start + most < len(text) else ""
    return f"{before}{text[start : start + most].strip()}{after}"


def _is_text(name: str) -> bool:
    return name.lower().endswith(TEXT_ENDINGS)


def _paragraphs(name: str, path: Path) -> Iterator[tuple[str, str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: no text in UTF-8: {error.reason} at byte {error.start}") from None
    for paragraph in _PARAGRAPH.split(text):
        if stripped := paragraph.strip():
            yield path.name, stripped


class Search:
    """Search in a corpus."""

    def __init__(self, spec: SearchTool, index: SearchIndex) -> None:
        self.name = spec.name
        self.output_characters = spec.output_characters
        self._spec = spec
        self._index = index
        base = function_schema(Search.run)
        self.schema: Mapping[str, Any] = base.schema(
            spec.name, f"{base.description} At most {spec.top_k} passages are returned."
        )

    async def run(self, query: str, top_k: int | None = None) -> str:
        """Search passages by words, and return those that fit best, the best first.

        Args:
            query: Words to look for.
            top_k: Passages to return at most.
        """
        if top_k is not None and top_k < 1:
            raise ToolError(f"top_k is {top_k}; give at least 1")
        most = min(top_k or self._spec.top_k, self._spec.top_k)
        found = await asyncio.to_thread(self._index.find, query, most)
        parts = [
            f"[{number}] {title}\n{text}" if title else f"[{number}] {text}"
            for number, (title, text) in enumerate(found, 1)
        ]
        return "\n\n".join(parts) or "nothing was found"

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return await self.run(**function_schema(Search.run).checked(arguments))

    async def close(self) -> None:
        """Nothing is held."""


def check_corpus(spec: SearchTool, base: Path) -> list[str]:
    """What is wrong with the files of a corpus, a line each."""
    return [
        f"tool {spec.name}: file {base / name} of its corpus does not exist; give paths from the working folder"
        for name in spec.corpus
        if not (base / name).is_file()
    ]
