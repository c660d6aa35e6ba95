"""Games of TextArena, played unchanged."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config.base import EnvironmentRows
from rollout_core.config.environments import TextArenaEnvironment
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.hosts import Hosts, look_at, rows_of

textarena = pytest.importorskip("textarena", reason="textarena is not installed")


def of(game: str = "GuessTheNumber-v0", **settings: Any) -> TextArenaEnvironment:
    return TextArenaEnvironment(kind="textarena", game=game, **settings)


def played(environment: TextArenaEnvironment, *episodes: tuple[dict[str, Any], list[str]]) -> list[list[Any]]:
    """What the game said in each episode, and the reward; all at the same time, a move of each in turn."""

    async def play() -> list[list[Any]]:
        hosts = Hosts(EnvironmentCode.of(environment, Path()), environment)

        async def one(number: int, row: dict[str, Any], moves: list[str]) -> list[Any]:
            async with hosts.place(f"{number}") as place:
                found: list[Any] = [(await place.call("reset", row, 5))[0]["content"]]
                for move in moves:
                    after = await place.call("step", {"role": "assistant", "content": move})
                    found.append(None if after is None else after[0]["content"])
                found.append(await place.call("reward"))
                await place.call("close")
                return found

        try:
            return list(await asyncio.gather(*(one(number, *each) for number, each in enumerate(episodes))))
        finally:
            await hosts.close()

    return asyncio.run(play())


def test_a_game_is_that_of_textarena():
    own = textarena.make("GuessTheNumber-v0-raw")
    own.reset(num_players=1, seed=3)
    number = own.state.game_state["game_number"]
    [found, lost] = played(of(), ({"seed": 3}, ["[1]", "7", f"[{number}]"]), ({"seed": 3}, ["[1]"]))
    assert "You are playing Guess The Number" in found[0]
    assert found[1] == "The target number is higher."
    assert found[3:] == [None, 1.0]
    assert lost[:2] == found[:2] and lost[-1] == 0.0


def test_a_game_that_draws_while_it_is_played_follows_its_seed_next_to_others():
    moves = ["[left]", "[up]", "[left]", "[up]", "[right]"]
    [alone] = played(of("2048-v0"), ({"seed": 4}, moves))
    several = played(of("2048-v0"), *[({"seed": seed}, moves) for seed in (4, 5, 4)])
    assert several[0] == several[2] == alone
    assert several[1] != alone


def test_rows_are_seeds_and_held_out_ones_are_others():
    code = EnvironmentCode.of(of(), Path())
    train, held_out = (
        rows_of(code, of(), EnvironmentRows(kind="environment", split=split, size=3, seed=4))  # type: ignore[arg-type]
        for split in ("train", "eval")
    )
    assert [row["seed"] for row in train] == [4, 5, 6]
    assert not {row["seed"] for row in train} & {row["seed"] for row in held_out}


@pytest.mark.parametrize(
    ("game", "problem"),
    [
        ("GuessTheNumbers-v0", "TextArena has no game 'GuessTheNumbers-v0'; did you mean 'GuessTheNumber-v0'"),
        ("Battleship-v0", "Battleship-v0 is not played by one player here: The number of players has to be 2"),
    ],
)
def test_a_game_that_cannot_be_played_is_named_before_a_run(game: str, problem: str):
    with pytest.raises(ConfigError, match=problem):
        look_at(EnvironmentCode.of(of(game), Path()), of(game))
