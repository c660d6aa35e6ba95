"""An OpenEnv environment as its users write one, served by uvicorn on a port of the system's choice."""

import random
import socket
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Answer(Observation):
    response: str


class GuessANumber(Environment[Guess, Answer, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, most: int = 10, **kwargs):
        self._state = State(episode_id=episode_id)
        self._number = random.Random(seed).randint(1, most)
        return Answer(response=f"Guess a number from 1 to {most}.")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.message == "crash":
            raise RuntimeError("it broke")
        guess = int(action.message)
        if guess == self._number:
            return Answer(response="Right.", done=True, reward=1.0)
        return Answer(response="more" if guess < self._number else "less", reward=-0.1)

    @property
    def state(self):
        return self._state


app = create_fastapi_app(GuessANumber, Guess, Answer, max_concurrent_envs=8)

if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sys.stdout.write(f"{listening.getsockname()[1]}\n")
        sys.stdout.flush()
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
