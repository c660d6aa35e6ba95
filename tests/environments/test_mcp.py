"""Tools of MCP servers: of programs that are started for an episode, and of servers over HTTP."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from deployments.cli import app
from rollout_core.base.errors import ConfigError
from rollout_core.config.environments import PythonEnvironment
from rollout_core.config.tools import FilesTool, McpTool
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.protocol import EnvironmentFailed
from rollout_core.environments.tools.mcp import ask_servers
from rollout_core.environments.tools.toolbox import Toolbox, ToolResources
from rollout_core.objects import ObjectStore
from tests.environments.acting import Scene, called
from tests.environments.boxes import failed, said
from tests.environments.test_http import reply, serving
from tests.store.patience import LONG, until, wait_until

HERE = Path(__file__).parent
COUNTER, RAW = HERE / "mcp_server.py", HERE / "mcp_raw_server.py"
ASKING = """
class Env:
    def reset(self, row, seed):
        return "count"

    def reward(self):
        return 1.0
"""


def counter(**settings: Any) -> McpTool:
    return McpTool(
        **{
            "kind": "mcp",
            "name": "c",
            "command": (sys.executable, str(COUNTER)),
            "seconds": LONG,
            "start_seconds": LONG,
            **settings,
        }
    )


def raw(*arguments: str, **settings: Any) -> McpTool:
    return counter(command=(sys.executable, str(RAW), *arguments), **settings)


@pytest.fixture(scope="module")
def counters_tools() -> dict[str, Any]:
    return dict(ask_servers([counter()], Path()))


@asynccontextmanager
async def box_of(spec: McpTool, folder: Path, served: dict[str, Any] | None = None) -> AsyncIterator[Toolbox]:
    """Of an episode whose files are in ``folder``."""
    served = dict(await asyncio.to_thread(ask_servers, [spec], Path())) if served is None else served
    tools = [spec, FilesTool()]
    resources = ToolResources(tools, index_folder=folder, served=served)
    folder.mkdir(exist_ok=True)
    try:
        async with Toolbox(tools, folder, resources=resources) as box:
            yield box
    finally:
        resources.close()


async def test_each_episode_has_a_server_of_its_own_in_its_folder(tmp_path: Path, counters_tools: dict[str, Any]):
    async with (
        box_of(counter(), tmp_path / "a", counters_tools) as one,
        box_of(counter(), tmp_path / "b", counters_tools) as other,
    ):
        assert [await said(one, "c_add", number=2), await said(one, "c_add", number=3)] == ["2", "5"]
        assert await said(other, "c_add", number=3) == "3"
        assert await said(one, "c_write", path="x.txt", text="hello") == str(tmp_path / "a")
        assert await said(one, "files", action="read", path="x.txt") == "hello"
        assert (await failed(other, "files", action="read", path="x.txt")).is_error


async def test_what_the_model_does_wrong_is_an_answer(tmp_path: Path, counters_tools: dict[str, Any]):
    async with box_of(counter(output_characters=200), tmp_path, counters_tools) as box:
        wrong = (await failed(box, "c_add", nummer="2")).text
        assert wrong.startswith("error: wrong arguments: 'number' is a required property"), wrong
        assert (await failed(box, "c_add", number="two")).text.startswith(
            "error: wrong arguments: 'two' is not of type"
        )
        assert "Error executing tool refuse" in (await failed(box, "c_refuse")).text
        assert "there is no tool 'add'" in (await failed(box, "add", number=1)).text
        many = await box.call("c_many", {"characters": 5000})
        assert many.truncated and "4,800 characters left out" in many.text


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("wrong", "answered what the protocol does not have: CallToolResult content: Input should be a valid list"),
        ("line", "wrote a message of more than 16 MiB"),
        ("lines", "wrote more than 10,000 messages for one call"),
        ("log", "wrote more than 16 MiB to its log for one call"),
        ("closed", "closed its output"),
        ("killed", "ended with signal SIGKILL"),
    ],
)
async def test_a_server_that_breaks_costs_the_call_and_is_named(tmp_path: Path, what: str, reason: str):
    async with box_of(raw(), tmp_path) as box:
        broken = (await failed(box, "c_act", what=what)).text
        assert broken == f"error: MCP server c {reason}; what it kept is gone"
        assert await said(box, "c_act", what="hello") == "? hello"  # of a lone surrogate


async def test_what_a_server_prints_between_messages_is_left_out(tmp_path: Path):
    async with box_of(raw(), tmp_path) as box:
        assert await said(box, "c_act", what="garbage") == "still here"


async def test_a_call_past_its_time_ends_the_server(tmp_path: Path):
    async with box_of(raw(seconds=0.5), tmp_path) as box:
        late = (await failed(box, "c_act", what="hang")).text
        assert late == "error: act took longer than 0.5 s; the server was ended, and what it kept is gone"
        assert not [process for process in psutil.Process().children(recursive=True) if str(RAW) in process.cmdline()]


async def test_with_an_episode_ends_all_that_its_server_started(tmp_path: Path, counters_tools: dict[str, Any]):
    async with box_of(counter(), tmp_path, counters_tools) as box:
        started = list(map(int, (await said(box, "c_start")).split()))
        assert all(map(psutil.pid_exists, started))
    await until(lambda: not any(map(psutil.pid_exists, started)))


KILLED = """
import asyncio, sys
from pathlib import Path
from tests.environments.test_mcp import box_of, counter, said

async def main():
    async with box_of(counter(), Path(sys.argv[1])) as box:
        print(await said(box, "c_start"), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_nothing_is_left_where_the_process_of_episodes_is_killed(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        started = list(map(int, process.stdout.readline().split()))
        assert len(started) == 2 and all(map(psutil.pid_exists, started))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: not any(map(psutil.pid_exists, started)))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (raw("mute", start_seconds=1), r"did not answer within 1 s \(start_seconds\)"),
        (raw("ends"), "ended with exit status 1; its last output: I need a database"),
        (
            counter(command=("no-such-program",)),
            "exit status 127; its last output: no-such-program: No such",
        ),
        (counter(command=(), url="http://127.0.0.1:1/mcp"), r"127\.0\.0\.1:1/mcp\) cannot be talked to: ConnectError"),
        (counter(only=("ad",)), r"has no tool 'ad' \(only\); did you mean 'add'"),
        (counter(name="c" * 62), "which has more than 64 characters; give the server a shorter name"),
        (
            counter(command=(), url="http://127.0.0.1:1/", api_key="MCP_KEY"),
            "secret 'MCP_KEY' is not among those",
        ),
    ],
)
def test_a_server_without_tools_to_call_is_named_before_a_model_is_loaded(spec: McpTool, problem: str):
    with pytest.raises(ConfigError, match=problem):
        ask_servers([spec], Path())


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ([], "has no tools; expected at least one"),
        ([("a.b", {}), ("a/b", {})], "has two tools that a model would call 'c_a_b'; leave one out"),
        ([("a", {"properties": {"b": {"type": "text"}}})], "the schema of 'a' is none: 'text' is not valid"),
        ([("a", {"$ref": "http://127.0.0.1:1/s"})], "refers to 'http://127.0.0.1:1/s', which it does not have"),
        ([("a", {"properties": {"b": {"$ref": "#/$defs/c"}}})], r"refers to '#/\$defs/c', which it does not have"),
    ],
)
def test_tools_that_cannot_be_called_are_refused(tmp_path: Path, tools: list[tuple[str, Any]], problem: str):
    listed = [{"name": name, "inputSchema": {"type": "object", **schema}} for name, schema in tools]
    (tmp_path / "tools.json").write_text(json.dumps(listed))
    with pytest.raises(ConfigError, match=problem):
        ask_servers([raw(str(tmp_path / "tools.json"))], Path())


def test_settings_of_a_server_are_checked():
    for settings, problem in [
        ({"command": ()}, "expected either command"),
        ({"url": "http://127.0.0.1/mcp"}, "expected either command"),
        ({"api_key": "KEY"}, "api_key is sent to url"),
        ({"command": (), "url": "http://127.0.0.1/mcp", "secrets": ("KEY",)}, "for a server that command starts"),
        ({"command": (), "url": "http://a:b@127.0.0.1/mcp"}, "holds a user, password or key"),
        ({"env": ("GITHUB_TOKEN",)}, "name it in secrets"),
    ]:
        with pytest.raises((ValidationError, ConfigError), match=problem):
            counter(**settings)


def test_tools_and_files_of_a_server_are_part_of_the_id(tmp_path: Path):
    (tmp_path / "env.py").write_text(ASKING)
    future = "from __future__ import annotations\n"
    (tmp_path / "server.py").write_text(RAW.read_text().replace(future, f"{future}import helping\n"))
    (tmp_path / "helping.py").write_text("")
    described = tmp_path / "tools.json"
    described.write_text('[{"name": "a", "description": "A.", "inputSchema": {"type": "object"}}]')

    def filed(**settings: Any) -> Any:
        spec = counter(command=(sys.executable, "server.py", "tools.json"), **settings)
        environment = PythonEnvironment(path="env.py:Env", tools=(spec,))
        code = EnvironmentCode.of(environment, tmp_path)
        return code, environment, code.file(ObjectStore.from_url("memory://mcp"), environment, tmp_path)

    code, environment, source = filed()
    assert EnvironmentCode.filed(ObjectStore.from_url("memory://mcp"), source).served == code.served
    code.check(source, environment, tmp_path)
    assert filed(start_seconds=50)[2].id == source.id
    described.write_text(described.read_text().replace("A.", "B."))
    assert filed()[2].id != source.id
    with pytest.raises(ConfigError, match="tools of MCP server c, or the files of its command, have changed"):
        code.check(source, environment, tmp_path)
    described.write_text(described.read_text().replace("B.", "A."))
    assert filed()[2].id == source.id
    (tmp_path / "helping.py").write_text("CHANGED = 1")
    assert filed()[2].id != source.id


def test_where_a_server_is_and_by_which_key_it_is_asked_is_no_part_of_ids():
    assert counter(secrets=("KEY",), start_seconds=5).cache_identity() == counter().cache_identity()
    assert counter(revision="2").cache_identity() != counter().cache_identity()
    here, there = (counter(command=(), url=f"http://{host}/mcp") for host in ("localhost", "127.0.0.1"))
    assert here.cache_identity() == there.cache_identity()


async def test_secrets_are_variables_of_the_server_alone_and_hidden_in_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counters_tools: dict[str, Any]
):
    monkeypatch.setenv("ROLLOUT_SECRETS", "MCP_KEY,OTHER_KEY")
    monkeypatch.setenv("ROLLOUT_SECRET_MCP_KEY", "a-secret-of-mine")
    monkeypatch.setenv("ROLLOUT_SECRET_OTHER_KEY", "another-secret")
    monkeypatch.setenv("PLAIN", "plain")
    monkeypatch.setenv("UNNAMED", "unnamed")
    spec = counter(secrets=("MCP_KEY",), env=("PLAIN",))
    assert "a-secret-of-mine" not in json.dumps(await asyncio.to_thread(ask_servers, [spec], Path()))
    async with box_of(spec, tmp_path, counters_tools) as box:
        found = [
            await said(box, "c_variable", which=name)
            for name in ("MCP_KEY", "PLAIN", "UNNAMED", "ROLLOUT_SECRET_OTHER_KEY", "ROLLOUT_SECRETS")
        ]
    assert found == ["***", "plain", "nothing", "nothing", "nothing"]


def test_a_server_that_does_not_say_what_it_has_is_named_without_its_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLOUT_SECRETS", "MCP_KEY")
    monkeypatch.setenv("ROLLOUT_SECRET_MCP_KEY", "a-secret-of-mine")
    spec = raw("listless", secrets=("MCP_KEY",), start_seconds=2)
    with pytest.raises(ConfigError, match=r"did not say within 2 s \(start_seconds\) which tools it has") as caught:
        ask_servers([spec], Path())
    assert "my key is ***" in str(caught.value) and "a-secret-of-mine" not in str(caught.value)


async def test_long_schemas_and_answers_of_a_server_with_a_secret_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counters_tools: dict[str, Any]
):
    monkeypatch.setenv("ROLLOUT_SECRETS", "MCP_KEY")
    monkeypatch.setenv("ROLLOUT_SECRET_MCP_KEY", "a-secret-of-mine")
    tools = [
        {"name": f"tool{number}", "description": f"{'d' * 1000} a-secret-of-mine", "inputSchema": {"type": "object"}}
        for number in range(100)
    ]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    spec = raw(str(tmp_path / "tools.json"), secrets=("MCP_KEY",))
    [found] = (await asyncio.to_thread(ask_servers, [spec], tmp_path)).values()
    assert [tool["description"] for tool in found["tools"]] == [f"{'d' * 1000} ***"] * 100
    async with box_of(counter(secrets=("MCP_KEY",)), tmp_path, counters_tools) as box:
        assert "characters left out" in (long := await said(box, "c_many", characters=200_000))
        assert "192,000" in long or "192000" in long, long[3900:4200]


@pytest.fixture
def url() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Of a server that is there, and its process."""
    process = subprocess.Popen([sys.executable, COUNTER, "http"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp", process
    finally:
        process.kill()
        process.wait()


async def test_a_server_over_http(tmp_path: Path, url: tuple[str, subprocess.Popen[str]]):
    address, process = url
    spec = counter(command=(), url=address)
    async with box_of(spec, tmp_path) as box:
        assert await said(box, "c_add", number=2) == "2"
        too_much = (await failed(box, "c_many", characters=2**24 + 1)).text
        assert too_much == "error: MCP server c gave an answer of more than 16 MiB; what it kept is gone"
        assert await said(box, "c_add", number=2) == "4"
        process.kill()
        process.wait()
        # No fault of the model's: the attempt fails.
        with pytest.raises(EnvironmentFailed, match=r"MCP server c ended the session: .*, in a call of add"):
            await box.call("c_add", {"number": 2})
        with pytest.raises(EnvironmentFailed, match="MCP server c cannot be talked to: ConnectError"):
            await box.call("c_add", {"number": 2})


async def test_a_key_is_a_bearer_token_and_redirects_elsewhere_are_not_followed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLOUT_SECRETS", "MCP_KEY")
    monkeypatch.setenv("ROLLOUT_SECRET_MCP_KEY", "a-secret-of-mine")
    async with serving(lambda *_: reply(status="401 Unauthorized")) as elsewhere:
        to = f"http://localhost:{elsewhere.port}/"
        async with serving(lambda method, path: reply(status="307 Temporary Redirect", Location=to)) as server:
            spec = counter(command=(), url=f"http://127.0.0.1:{server.port}/mcp", api_key="MCP_KEY")
            with pytest.raises(ConfigError, match=r"Redirect to .* not followed"):
                await asyncio.to_thread(ask_servers, [spec], Path())
        assert "authorization: bearer a-secret-of-mine" in server.heads[0].lower()
        assert elsewhere.heads == []
        spec = counter(command=(), url=to, api_key="MCP_KEY")
        with pytest.raises(ConfigError, match="cannot be talked to: HTTP 401 Unauthorized"):
            await asyncio.to_thread(ask_servers, [spec], Path())


async def test_a_model_calls_them_in_an_episode_and_its_calls_are_kept(scene: Scene):
    scene.write(ASKING)
    answers = [called("c_add", number=2), called("c_add", number=3), called("c_add"), "done"]
    backend = scene.engine(lambda text, seed: answers[text.count("assistant: ") - 1])
    rows = [{"tools": ["c"]}, {"tools": []}]
    tally = await scene.play(backend, rows, tools=(counter(only=("add",)),))
    assert (tally.done, tally.failed) == (2, 0)
    outputs = "agentlightning.operation.output"
    with_them, without = [
        [span.attributes[outputs] for span in await scene.spans(row) if outputs in span.attributes] for row in rows
    ]
    assert with_them[:2] == ["2", "5"] and with_them[2].startswith("error: wrong arguments")
    assert without == []


async def test_a_server_that_does_not_start_costs_attempts_of_its_episode_alone(scene: Scene, counters_tools):
    scene.write(ASKING)
    allowed = scene.folder / "allowed"
    allowed.write_text("")
    starting = scene.folder / "server.py"
    starting.write_text(f"import sys\nopen({str(allowed)!r})\nexec(open({str(COUNTER)!r}).read())")
    backend = scene.engine(lambda text, seed: (allowed.unlink(missing_ok=True), called("c_add", number=2))[1])
    tally = await scene.play(backend, [{"n": 1}], tools=(counter(command=(sys.executable, "server.py")),))
    assert (tally.done, tally.failed, tally.attempts_failed) == (1, 1, 3)
    assert tally.first_failure is not None
    assert "MCP server c ended with exit status 1; its last output: " in tally.first_failure
    assert "FileNotFoundError" in tally.first_failure


def test_they_are_checked_and_played_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(ASKING)
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n')
    command = json.dumps([sys.executable, str(COUNTER)])
    tools = f'[[environment.tools]]\nkind = "mcp"\ncommand = {command}\nonly = ["add", "many"]\n'
    (tmp_path / "run.toml").write_text(f'[environment]\npath = "env.py:Env"\n{tools}')

    def run(command: str, typed: str = "") -> str:
        result = CliRunner().invoke(app, ["env", command, "run.toml", "--rows", "rows.jsonl"], input=typed)
        assert result.exit_code == 0, result.output
        return result.output

    found = run("check")
    assert 'tool: {"name": "mcp_add", "description": "Add to the total."' in found and "[mcp_add] 1" in found
    played = run("play", '!mcp_add {"number": 2}\n!mcp_add {"number": 3}\nbye\n')
    assert "tools: mcp_add, mcp_many" in played and "[mcp_add] 5" in played


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("rollout_core.environments.tools.mcp.version", missing)
    with pytest.raises(ConfigError, match=r"pip install 'rollout-post-training\[mcp\]'"):
        ask_servers([counter()], Path())
