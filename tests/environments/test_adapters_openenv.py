"""An environment on an OpenEnv server, played over its web socket.

The server needs packages of other versions than ours, so it has a Python of its own:
``python -m venv build/openenv && build/openenv/bin/pip install openenv-core==0.3.0``.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config.base import EnvironmentRows
from rollout_core.config.environments import OpenEnvEnvironment
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.hosts import Hosts, Place, look_at, rows_of
from rollout_core.environments.protocol import EnvironmentFailed
from tests.conftest import PROJECT

PYTHON = PROJECT / "build" / "openenv" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="openenv-core is not installed in build/openenv")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a server under uvicorn."""
    server = Path(__file__).with_name("openenv_server.py")
    process = subprocess.Popen([PYTHON, server], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait()


def talking(url: str, **settings: Any) -> OpenEnvEnvironment:
    fields = {"text_field": "message", "observation_field": "response"}
    return OpenEnvEnvironment(kind="openenv", url=url, **{**fields, **settings})


def played(environment: OpenEnvEnvironment, *episodes: Any) -> list[Any]:
    """What each function of a place gave."""

    async def play() -> list[Any]:
        hosts = Hosts(EnvironmentCode.of(environment, Path()), environment)

        async def one(number: int, episode: Any) -> Any:
            async with hosts.place(f"{number}") as place:
                return await episode(place)

        try:
            return list(await asyncio.gather(*(one(*each) for each in enumerate(episodes))))
        finally:
            await hosts.close()

    return asyncio.run(play())


async def guesses(place: Place, row: dict[str, Any], *said: str) -> list[Any]:
    """What followed each answer, and the reward."""
    found = [(await place.call("reset", row, 5))[0]["content"]]
    for text in said:
        after = await place.call("step", {"role": "assistant", "content": text})
        found.append(None if after is None else after[0]["content"])
    found.append(await place.call("reward"))
    await place.call("close")
    return found


def test_it_is_played_unchanged_in_sessions_of_their_own(url: str):
    number = random.Random(7).randint(1, 10)
    other = random.Random(8).randint(1, 100)
    first, second = played(
        talking(url, instructions="Play."),
        lambda place: guesses(place, {"seed": 7}, "0", f"{number}"),
        lambda place: guesses(place, {"seed": 8, "most": 100}, "101", "0", f"{other}"),
    )
    assert first == ["Play.\n\nGuess a number from 1 to 10.", "more", None, pytest.approx(0.9)]
    assert second == ["Play.\n\nGuess a number from 1 to 100.", "less", "more", None, pytest.approx(0.8)]


def test_only_the_last_reward_counts_if_asked(url: str):
    [found] = played(talking(url, reward="last"), lambda place: guesses(place, {"seed": 7}, "0"))
    assert found[-1] == pytest.approx(-0.1)


def test_actions_are_calls_of_a_tool_by_the_servers_schema(url: str):
    environment = talking(url, text_field=None, observation_field=None)
    [tool] = look_at(EnvironmentCode.of(environment, Path()), environment).tools
    assert tool["function"]["name"] == "act"
    assert set(tool["function"]["parameters"]["properties"]) == {"message"}

    async def play(place: Place) -> list[Any]:
        [shown] = await place.call("reset", {"seed": 7}, 5)
        wrong = await place.call("tool:act", {"text": "0"})
        unknown = await place.call("tool:act", {"message": 1})
        found = await place.call("tool:act", {"message": "0"})
        done = await place.call("tool:act", {"message": f"{random.Random(7).randint(1, 10)}"})
        await place.call("close")
        return [shown["content"], wrong, unknown, found, done]

    [[shown, wrong, unknown, found, done]] = played(environment, play)
    assert shown == '{"response": "Guess a number from 1 to 10."}'
    assert wrong["is_error"] and "'message' is a required property" in wrong["text"]
    assert unknown["is_error"] and "1 is not of type 'string'" in unknown["text"]
    assert found == {"text": '{"response": "more"}', "is_error": False, "done": False}
    assert done == {"text": '{"response": "Right."}', "is_error": False, "done": True}


def test_what_the_server_fails_at_costs_an_attempt_and_is_named(url: str):
    with pytest.raises(EnvironmentFailed, match="answered step with EXECUTION_ERROR: it broke"):
        played(talking(url), lambda place: guesses(place, {"seed": 7}, "crash"))


def test_more_sessions_than_the_server_allows_are_named(url: str):
    refused = asyncio.Event()

    async def wait(place: Place) -> None:
        try:
            await place.call("reset", {"seed": 1}, 5)
        except EnvironmentFailed:
            refused.set()
            raise
        await refused.wait()

    with pytest.raises(EnvironmentFailed, match=r"has 8 sessions at most .* lower environment.episodes_at_once"):
        played(talking(url), *[wait] * 9)


def test_rows_are_seeds_and_held_out_ones_are_others(url: str):
    environment = talking(url)
    code = EnvironmentCode.of(environment, Path())
    train, held_out = (
        rows_of(code, environment, EnvironmentRows(kind="environment", split=split, size=3, seed=4))  # type: ignore[arg-type]
        for split in ("train", "eval")
    )
    assert [row["seed"] for row in train] == [4, 5, 6]
    assert not {row["seed"] for row in train} & {row["seed"] for row in held_out}


def test_what_the_server_says_of_itself_is_its_identity_and_not_where_it_listens(url: str):
    code = EnvironmentCode.of(talking(url), Path())
    assert code.adapted is not None
    assert code.adapted["server"]["metadata"]["name"] == "GuessANumber"
    assert "url" not in code.adapted["settings"]
    elsewhere = EnvironmentCode.of(talking(url.replace("127.0.0.1", "localhost")), Path())
    assert elsewhere.id(talking(url), Path()) == code.id(talking(url), Path())
    other = talking(url, revision="2")
    assert EnvironmentCode.of(other, Path()).id(other, Path()) != code.id(talking(url), Path())


def test_a_server_that_is_not_there_or_has_no_such_field_is_named(url: str):
    with pytest.raises(ConfigError, match=r"no OpenEnv server answers at http://127\.0\.0\.1:1/schema"):
        EnvironmentCode.of(talking("http://127.0.0.1:1"), Path())
    environment = talking(url, text_field="massage")
    with pytest.raises(ConfigError, match=r"has no 'massage' \(text_field\); did you mean 'message'"):
        look_at(EnvironmentCode.of(environment, Path()), environment)
