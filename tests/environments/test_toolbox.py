"""What holds for all tools of an episode."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config.tools import FilesTool, HttpTool, PythonTool, SearchTool, ShellTool, SqlTool
from rollout_core.environments.tools.results import Output, shortened
from rollout_core.environments.tools.toolbox import Toolbox, check_tools
from tests.conftest import PROJECT
from tests.environments.boxes import failed, said, shared

ALL = (
    PythonTool(),
    ShellTool(commands="any"),
    FilesTool(),
    HttpTool(hosts=("example.org",)),
    SearchTool(corpus=("a.txt",)),
    SqlTool(database="a.db"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "episode"
    made.mkdir()
    return made


async def test_each_tool_says_what_it_is(folder: Path):
    with shared(*ALL, base=folder.parent) as resources:
        async with Toolbox(ALL, folder, resources=resources) as box:
            functions = [schema["function"] for schema in box.schemas]
    assert [function["name"] for function in functions] == ["python", "shell", "files", "http", "search", "sql"]
    assert [list(function["parameters"]["properties"]) for function in functions] == [
        ["code"],
        ["command"],
        ["action", "path", "content"],
        ["url"],
        ["query", "top_k"],
        ["query"],
    ]
    for function in functions:
        assert function["description"].endswith(".")
        for parameter in function["parameters"]["properties"].values():
            assert parameter["description"]


async def test_what_the_model_does_wrong_goes_back_to_it(folder: Path):
    async with Toolbox([FilesTool()], folder) as box:
        assert (await box.call("flies", {})).text == "error: there is no tool 'flies'; did you mean 'files'?"
        for name, arguments in (
            ("files", None),
            ("files", "x"),
            ("files", {}),
            (None, {}),
            ("files", {"action": "eat"}),
        ):
            result = await box.call(name, arguments)  # type: ignore[arg-type]
            assert result.is_error and not result.truncated and result.seconds >= 0


async def test_a_toolbox_that_is_used_alone_has_what_it_needs(folder: Path):
    (folder.parent / "a.txt").write_text("A text about harbours.")
    tools = [SearchTool(corpus=("a.txt",)), PythonTool(sandbox="none")]
    async with Toolbox(tools, folder, index_folder=folder.parent / "index", base=folder.parent) as box:
        assert "harbours" in await said(box, "search", query="harbour")
        assert await said(box, "python", code="1 + 1") == "2\n"
    with pytest.raises(ConfigError, match="index_folder"):
        Toolbox(tools, folder)


def test_what_is_shared_can_be_made_before_the_first_call(folder: Path):
    (folder / "a.txt").write_text("A text.")
    tools = [SearchTool(corpus=("a.txt",)), PythonTool()]
    with shared(*tools, base=folder) as resources:
        resources.prepare()
        assert len(list((folder / "indexes").glob("*.sqlite"))) == 1
    (folder / "a.txt").unlink()
    with (
        shared(*tools, base=folder) as resources,
        pytest.raises(ConfigError, match=r"a\.txt of its corpus does not exist"),
    ):
        resources.prepare()


def test_two_tools_of_one_name_are_refused(folder: Path):
    for call in (lambda tools: Toolbox(tools, folder), check_tools):
        with pytest.raises(ConfigError, match="2 tools are called 'files'"):
            call([FilesTool(), FilesTool()])


def test_resources_of_other_tools_are_refused(folder: Path):
    with shared(FilesTool(), base=folder) as resources, pytest.raises(ConfigError, match="those of other tools"):
        Toolbox([FilesTool(writable=False)], folder, resources=resources)


@pytest.mark.parametrize("number", [0, 1])
def test_the_page_shows_what_runs(number: int, capsys: pytest.CaptureFixture[str]):
    page = (PROJECT / "docs" / "tools.md").read_text(encoding="utf-8")
    block = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[number]
    exec(compile(block, "docs/tools.md", "exec"), module := {"__name__": "page"})
    assert module
    shown = [["42\n", "False False\n", "6\n", "\n"], ["['city']\n", "Oslo: sun for 3 days\n"]]
    assert "".join(capsys.readouterr().out.split()) == "".join("".join(shown[number]).split())


# Files

FILES = FilesTool(file_bytes=100, folder_bytes=150, max_files=4)


async def test_files_are_written_listed_and_read(folder: Path):
    async with Toolbox([FilesTool()], folder) as box:
        assert await said(box, "files", action="list") == "the folder is empty"
        assert await said(box, "files", action="write", path="a/b/c.txt", content="hé") == "a/b/c.txt written (3 bytes)"
        assert await said(box, "files", action="write", path="./a//x", content="") == "a/x written (0 bytes)"
        assert await said(box, "files", action="read", path="a/b/c.txt") == "hé"
        assert await said(box, "files", action="list") == "a/\na/b/\na/b/c.txt (3 bytes)\na/x (0 bytes)"
        assert await said(box, "files", action="list", path="a/b") == "a/b/c.txt (3 bytes)"
        assert await said(box, "files", action="list", path="a/x") == "a/x (0 bytes)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "read", "path": "none"}, "none does not exist"),
        ({"action": "read", "path": "folder"}, "folder is no file"),
        ({"action": "read", "path": "file/below"}, "file/below does not exist"),
        ({"action": "read"}, "'.' is the working folder itself"),
        ({"action": "read", "path": "binary"}, "binary is no text in UTF-8"),
        ({"action": "read", "path": "../secret"}, "leads out of the working folder"),
        ({"action": "read", "path": "folder/../../secret"}, "leads out of the working folder"),
        ({"action": "read", "path": "/etc/passwd"}, "is an absolute path"),
        ({"action": "read", "path": "link"}, "link is no plain file or folder"),
        ({"action": "read", "path": "up/secret"}, "up/secret"),
        ({"action": "write", "path": "up/secret", "content": "x"}, "up/secret"),
        ({"action": "write", "path": "folder", "content": "x"}, "folder is a folder"),
        ({"action": "write", "path": "file/below", "content": "x"}, "file/below does not exist"),
        ({"action": "write", "path": "a\0b"}, "is no name of a file"),
        ({"action": "write", "path": "x" * 300}, "is no name of a file"),
        ({"action": "write", "path": "\ud800"}, "is no name of a file"),
        ({"action": "list", "path": "none"}, "none does not exist"),
        ({"action": "list", "content": "x"}, "content is for the action 'write'"),
    ],
)
async def test_a_path_leads_nowhere_else(folder: Path, arguments: dict[str, Any], message: str):
    (folder.parent / "secret").write_text("secret")
    (folder / "folder").mkdir()
    (folder / "file").write_text("x")
    (folder / "binary").write_bytes(b"\xff")
    (folder / "link").symlink_to("../secret")
    (folder / "up").symlink_to("..")
    async with Toolbox([FilesTool()], folder) as box:
        assert message in (await failed(box, "files", **arguments)).text
    assert (folder.parent / "secret").read_text() == "secret"


async def test_files_have_their_limits(folder: Path):
    async with Toolbox([FILES], folder) as box:
        assert "a file may have 100" in (await failed(box, "files", action="write", path="a", content="x" * 101)).text
        await said(box, "files", action="write", path="a", content="x" * 100)
        assert "it may hold 150" in (await failed(box, "files", action="write", path="b", content="x" * 51)).text
        await said(box, "files", action="write", path="b", content="x" * 50)
        await said(box, "files", action="write", path="a", content="y" * 100)
        assert "may hold 4 files and folders" in (await failed(box, "files", action="write", path="c/d/e")).text
        await said(box, "files", action="write", path="c/d")
        (folder / "large").write_text("x" * 101)
        assert "at most 100 can be read" in (await failed(box, "files", action="read", path="large")).text


async def test_a_folder_that_may_only_be_read_is_not_written(folder: Path):
    (folder / "a").write_text("given")
    async with Toolbox([FilesTool(writable=False)], folder) as box:
        assert await said(box, "files", action="read", path="a") == "given"
        assert "action" in (await failed(box, "files", action="write", path="a")).text
        assert "content is not known" in (await failed(box, "files", action="read", path="a", content="x")).text
    assert (folder / "a").read_text() == "given"


async def test_a_long_result_keeps_its_beginning_and_its_end_and_counts_the_rest(folder: Path):
    (folder / "a").write_text("a" * 600 + "z" * 600)
    async with Toolbox([FilesTool(output_characters=200)], folder) as box:
        result = await box.call("files", {"action": "read", "path": "a"})
    assert result.truncated and not result.is_error
    assert result.text == f"{'a' * 100}\n[... 1,000 characters left out ...]\n{'z' * 100}"


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 30])
@pytest.mark.parametrize("num_cut", [0, 5])
def test_no_character_is_lost_without_being_counted(size: int, num_cut: int):
    head, tail = "h" * size, "t" * (size if num_cut else 0)
    text, is_cut = shortened(Output(head, num_cut, tail), 10)
    kept = text.count("h") + text.count("t") - (2 * text.count("characters left out") if is_cut else 0)
    said_missing = int(text.split("[... ")[1].split(" ")[0]) if is_cut else 0
    kept = sum(text.replace(f"\n[... {said_missing} characters left out ...]\n", "").count(one) for one in "ht")
    assert kept + said_missing == len(head) + len(tail) + num_cut
    assert kept <= 10
    assert is_cut == (said_missing > 0)


async def test_a_toolbox_without_programs_opens_in_a_moment(folder: Path):
    """A figure for the eye is in the benchmark; here only that nothing is started."""
    tools = ALL[2:]
    with shared(*tools, base=folder.parent) as resources:
        async with Toolbox(tools, folder, resources=resources):
            pass
        began = time.perf_counter()
        for _ in range(200):
            async with Toolbox(tools, folder, resources=resources) as box:
                assert box.schemas
        assert (time.perf_counter() - began) / 200 < 0.05
