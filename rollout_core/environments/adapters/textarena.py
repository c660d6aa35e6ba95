"""Games of TextArena that one player plays: what the game says is the user's, and an answer is a move."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

import orjson
from textarena.envs.registration import ENV_REGISTRY, make  # pyright: ignore[reportMissingImports]

from rollout_core.base.errors import near
from rollout_core.environments.adapters.seeds import HELD_OUT_SEEDS, seed_rows
from rollout_core.environments.protocol import Done

PLAYER = 0
RAW = "-raw"
"""Of a game's name: without the wrappers that repeat the whole conversation in each observation."""
_PLAYING = threading.Lock()


class TextArena:
    """One game."""

    def __init__(self, game: str, config: Mapping[str, Any]) -> None:
        if game not in ENV_REGISTRY:
            raise ValueError(f"TextArena has no game {game!r}; {near(game, ENV_REGISTRY)}")
        self._game, self._config = game if game.endswith(RAW) else game + RAW, dict(config)
        _check(self._game, orjson.dumps(self._config))
        self._reward = 0.0

    def make_rows(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        """Seeds; held-out ones are others."""
        return seed_rows(split, size, seed)

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """What the game says first. A row may have a ``seed``."""
        with _PLAYING:
            self._env = make(self._game, **self._config)
            self._env.reset(num_players=1, seed=int(row.get("seed", seed % HELD_OUT_SEEDS)))
            self._drawn = random.getstate()
            return self._said()

    def step(self, message: Mapping[str, Any]) -> str | Done:
        """What the game says to a move."""
        with _PLAYING:
            # Games draw from Python's own numbers; so each has those that follow from its seed.
            random.setstate(self._drawn)
            is_over, _ = self._env.step(message["content"])
            self._drawn = random.getstate()
            if not is_over:
                return self._said()
            rewards, _ = self._env.close()
            self._reward = float(rewards[PLAYER])
            return Done()

    def reward(self) -> float:
        """What the game gives at its end; 0 where it has not come to it."""
        return self._reward

    def _said(self) -> str:
        """All that the game said since the last move."""
        _, observed = self._env.get_observation()
        return "\n".join(text.strip() for sender, text, _ in observed if sender != PLAYER) or "Your move."


@cache
def _check(game: str, config: bytes) -> None:
    """Raise ValueError where one player cannot play it, or a word list that it needs is not there."""
    try:
        with _PLAYING:
            make(game, **orjson.loads(config)).reset(num_players=1, seed=0)
    except Exception as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{game.removesuffix(RAW)} is not played by one player here: {said:.300}") from error
