"""Search in real files, and queries on real databases."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollout_core.base.errors import ConfigError, DataError
from rollout_core.config.tools import SearchTool, SqlTool
from rollout_core.environments.tools.search import SearchIndex
from rollout_core.environments.tools.toolbox import Toolbox, check_tools
from tests.environments.boxes import failed, said, shared
from tests.store.patience import LONG

PASSAGES = [
    {"title": "Whales", "text": "Whales are mammals that live in the sea and sing."},
    {"title": "Sharks", "text": "Sharks are fish. They do not sing."},
    {"title": "Trees", "text": "Trees grow on land."},
    {"text": "The café of the harbour sells coffee."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "animals.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in PASSAGES))
    (tmp_path / "notes.txt").write_text("The first paragraph\nof a harbour.\n\n  \nThe second one is of a desert.\n")
    return tmp_path


SEARCH = SearchTool(corpus=("animals.jsonl", "notes.txt"), hit_characters=60)


async def test_the_passage_that_fits_best_comes_first(corpus: Path):
    with shared(SEARCH, base=corpus) as resources:
        async with Toolbox([SEARCH], corpus, resources=resources) as box:
            found = await said(box, "search", query="which mammals sing?")
            assert found.startswith("[1] Whales\nWhales are mammals that live in the sea and sing.\n\n[2] Sharks\n")
            assert await said(box, "search", query="CAFE") == "[1] The café of the harbour sells coffee."
            assert await said(box, "search", query="paragraphs", top_k=1) == (
                "[1] notes.txt\nThe first paragraph\nof a harbour."
            )
            assert await said(box, "search", query="nowhere") == "nothing was found"


@pytest.mark.parametrize(
    "query",
    [
        'whales" OR "x',
        "title:whales AND NOT sharks",
        "NEAR(whales sharks)",
        "whales*",
        "^whales",
        "'; drop table passages; --",
        "{title} : whales",
        "whales \0 \ud800 (",
        "-whales + AND OR NOT",
        "whales " * 10_000,
    ],
)
async def test_any_text_is_a_query(corpus: Path, query: str):
    with shared(SEARCH, base=corpus) as resources:
        async with Toolbox([SEARCH], corpus, resources=resources) as box:
            result = await box.call("search", {"query": query})
            assert not result.is_error, result.text


async def test_a_query_without_words_is_the_models_fault(corpus: Path):
    with shared(SEARCH, base=corpus) as resources:
        async with Toolbox([SEARCH], corpus, resources=resources) as box:
            assert "holds no word" in (await failed(box, "search", query=" ?! ")).text
            assert "top_k is 0; give at least 1" in (await failed(box, "search", query="a", top_k=0)).text


async def test_a_long_passage_is_shown_around_the_word(corpus: Path):
    (corpus / "long.txt").write_text(f"{'word ' * 500}needle {'other ' * 500}")
    spec = SearchTool(corpus=("long.txt",), hit_characters=40)
    with shared(spec, base=corpus) as resources:
        async with Toolbox([spec], corpus, resources=resources) as box:
            found = await said(box, "search", query="needle")
            assert found == "[1] long.txt\n...word word needle other other other other..."


def test_an_index_is_made_once_for_a_content(corpus: Path):
    folder = corpus / "indexes"
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: SearchIndex(SEARCH, corpus, folder).path(), range(8)))
    assert len(set(paths)) == 1
    made = paths[0].stat()
    again = SearchIndex(SEARCH, corpus, folder).path()
    assert (again.stat().st_ino, again.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".sqlite"]
    (corpus / "notes.txt").write_text("Something else.\n")
    assert SearchIndex(SEARCH, corpus, folder).path() != again
    assert SearchIndex(SEARCH.model_copy(update={"top_k": 1}), corpus, folder).path() != again
    other = SearchTool(corpus=("animals.jsonl",), text_key="title", title_key="text")
    with pytest.raises(DataError, match=r"animals\.jsonl:4"):
        SearchIndex(other, corpus, folder).path()


def _index(corpus: Path, results: multiprocessing.SimpleQueue) -> None:
    results.put(str(SearchIndex(SEARCH, corpus, corpus / "indexes").path()))


def test_processes_share_an_index(corpus: Path):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [context.Process(target=_index, args=(corpus, results)) for _ in range(4)]
    for process in processes:
        process.start()
    paths = {results.get() for _ in processes}
    for process in processes:
        process.join()
    assert len(paths) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": 3}\n', r"a\.jsonl:2"),
        ("a.jsonl", '{"text": "x"\n', r"a\.jsonl:1"),
        ("a.jsonl", '{"body": "x"}\n', r"a\.jsonl:1"),
        ("a.jsonl", "", "has no passage"),
        ("a.txt", " \n\n", "has no passage"),
        ("a.txt", b"\xff\xfe\xfa", "no text in UTF-8"),
    ],
)
def test_a_corpus_that_cannot_be_read_says_where(tmp_path: Path, name: str, text: str | bytes, message: str):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        SearchIndex(SearchTool(corpus=(name,)), tmp_path, tmp_path / "indexes").path()
    (tmp_path / name).write_text('{"text": "fine"}\n')
    assert SearchIndex(SearchTool(corpus=(name,)), tmp_path, tmp_path / "indexes").path().exists()


# SQL


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table items (name text, price real, photo blob)")
        connection.executemany("insert into items values (?, ?, ?)", [("tea", 2.5, b"\x01\xff"), ("mug", 7.0, None)])
    connection.close()
    return path


READ = SqlTool(database="shop.db", seconds=60.0)
INSERT = "insert into items values ('{number}', {number}, null)"
COPY = SqlTool(database="shop.db", access="copy", seconds=60.0)


async def test_rows_come_as_json(database: Path):
    with shared(READ, base=database.parent) as resources:
        async with Toolbox([READ], database.parent, resources=resources) as box:
            assert await said(box, "sql", query="select * from items order by name") == (
                '["name", "price", "photo"]\n["mug", 7.0, null]\n["tea", 2.5, "x\'01ff\'"]\n(2 rows)'
            )
            assert "items" in await said(box, "sql", query="select name, sql from sqlite_schema")
            assert "no such column: cost" in (await failed(box, "sql", query="select cost from items")).text
            assert "syntax error" in (await failed(box, "sql", query="selct")).text
            assert "one statement" in (await failed(box, "sql", query="select 1; select 2")).text


@pytest.mark.parametrize(
    "query",
    [
        "delete from items",
        "insert into items values ('x', 1, null)",
        "create table x (a)",
        "create temp table x (a)",
        "attach '{other}' as other",
        "pragma writable_schema = 1",
        "vacuum into '{other}'",
        "select load_extension('{other}')",
    ],
)
async def test_reading_changes_nothing(database: Path, query: str):
    before, other = database.read_bytes(), database.parent / "other.db"
    with shared(READ, base=database.parent) as resources:
        async with Toolbox([READ], database.parent, resources=resources) as box:
            await failed(box, "sql", query=query.format(other=other))
    assert database.read_bytes() == before
    assert not other.exists()


async def test_each_episode_changes_a_copy_of_its_own(database: Path):
    before = database.read_bytes()
    with shared(COPY, base=database.parent) as resources:

        async def episode(number: int) -> str:
            async with Toolbox([COPY], database.parent, resources=resources) as box:
                assert await said(box, "sql", query=INSERT.format(number=number)) == "done: 1 rows changed"
                await said(box, "sql", query="create table t (a)")
                await said(box, "sql", query="drop table t")
                return await said(box, "sql", query="select count(*), max(price) from items")

        found = await asyncio.gather(*map(episode, range(10, 30)))
    assert found == [f'["count(*)", "max(price)"]\n[3, {float(number)}]\n(1 rows)' for number in range(10, 30)]
    assert database.read_bytes() == before


@pytest.mark.parametrize(
    "query",
    ["attach '{other}' as other", "vacuum into '{other}'", "pragma journal_mode = wal", "select load_extension('x')"],
)
async def test_a_copy_leads_to_no_other_file(database: Path, query: str):
    other = database.parent / "other.db"
    with shared(COPY, base=database.parent) as resources:
        async with Toolbox([COPY], database.parent, resources=resources) as box:
            await failed(box, "sql", query=query.format(other=other))
    assert not other.exists()


ENDLESS = "with recursive n(x) as (select 1 union all select x + 1 from n) "


def endless(query: str) -> str:
    """A query on ``n``, whose rows have no end."""
    return ENDLESS + query


@pytest.mark.parametrize(
    "query",
    [
        endless("select count(*) from n"),
        endless("select x from n order by x desc"),
        endless("select group_concat(x) from n"),
        "select hex(zeroblob(900000000))",
        "select " + "(" * 5000 + "1" + ")" * 5000,
    ],
)
async def test_an_expensive_query_is_bounded_and_the_next_one_is_right(database: Path, query: str):
    spec = SqlTool(database="shop.db", seconds=1.0, memory_mb=256)
    with shared(spec, base=database.parent) as resources:
        async with Toolbox([spec], database.parent, resources=resources) as box:
            began = time.monotonic()
            await failed(box, "sql", query=query)
            assert time.monotonic() - began < LONG
            assert (await said(box, "sql", query="select 6 * 7")).startswith('["6 * 7"]\n[42]')


async def test_many_rows_are_cut_and_counted(database: Path):
    spec = SqlTool(database="shop.db", seconds=60.0, max_rows=3)
    with shared(spec, base=database.parent) as resources:
        async with Toolbox([spec], database.parent, resources=resources) as box:
            found = await said(box, "sql", query=endless("select x from n limit 10"))
            assert found == '["x"]\n[1]\n[2]\n[3]\n(more than 3 rows; these are the first)'
            assert (await said(box, "sql", query=endless("select x from n limit 3"))).endswith("[3]\n(3 rows)")
            result = await box.call("sql", {"query": endless("select hex(zeroblob(50000)) from n limit 3")})
            assert result.truncated and len(result.text) < 8_200


async def test_a_copy_does_not_grow_past_its_limit(database: Path):
    spec = SqlTool(database="shop.db", access="copy", seconds=60.0, disk_mb=1)
    with shared(spec, base=database.parent) as resources:
        async with Toolbox([spec], database.parent, resources=resources) as box:
            text = (
                await failed(box, "sql", query=endless("insert into items select 'x', x, zeroblob(999) from n"))
            ).text
            assert "full" in text
            assert (await said(box, "sql", query="select count(*) from items")).startswith('["count(*)"]\n[2]')


def test_a_plan_says_what_is_not_there(tmp_path: Path):
    (tmp_path / "text.db").write_text("this is no database, whatever its name says" * 100)
    specs = [
        SearchTool(corpus=("a.jsonl", "b.txt")),
        SqlTool(database="none.db"),
        SqlTool(name="text", database="text.db"),
    ]
    with pytest.raises(ConfigError) as raised:
        check_tools(specs, tmp_path)
    assert [line.partition(";")[0].replace(str(tmp_path), "") for line in raised.value.violations] == [
        "tool search: file /a.jsonl of its corpus does not exist",
        "tool search: file /b.txt of its corpus does not exist",
        "tool sql: database /none.db does not exist",
        "tool text: /text.db is no SQLite database: file is not a database",
    ]
    assert os.listdir(tmp_path) == ["text.db"]
