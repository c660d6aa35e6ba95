"""Episodes of an environment over the same prompts put to `vllm.LLM` all at once, and what tools that take time cost.

An episode has three turns. After each of the first two the environment answers, at once or after 0.1 to 2 seconds
(drawn by its seed). The baseline is given the prompts of all turns of all episodes together, which no loop can be, as a
turn's prompt is known when the one before has ended: its tokens a second are those of an engine that is never idle. All
sides run on the engine of this process, which has started and is warm.

- ``tools of no time / LLM.generate``: what the loop, the ledger and the processes of the environment cost;
- ``tools of 0.1 to 2 s / of no time``: how busy the engine stays while tools are at work.

Run: python benchmarks/environments.py [--quick | --size large]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Figures, no_collection, own_place

TURNS = 3
MAX_TOKENS = 256
STOP_TOKENS = 6
"""Of 262, at one of which a model of random weights ends its turn: after 44 tokens in the mean."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ENVIRONMENT = f"""
import asyncio, random

class Env:
    def __init__(self, most_seconds):
        self.most_seconds = most_seconds

    def reset(self, row, seed):
        self.chance, self.turns = random.Random(seed), 0
        return f"sort {{row['number']}} ="

    async def step(self, message):
        self.turns += 1
        if self.turns == {TURNS}:
            return None
        if self.most_seconds:
            await asyncio.sleep(self.chance.uniform(0.1, self.most_seconds))
        return "again"

    def reward(self):
        return 1.0
"""


@dataclass(frozen=True)
class Size:
    """How much is measured; ``model``: of `make_model`, instead of its 3.3 million parameters."""

    episodes: int
    rounds: int
    model: Mapping[str, int] = field(default_factory=dict)


SIZES = {
    "quick": Size(episodes=16, rounds=1),
    "full": Size(episodes=512, rounds=3),
    "large": Size(episodes=128, rounds=1, model={"hidden_size": 768, "num_layers": 14}),
}
"""``large``: a model of 101 million parameters."""


class Benchmark:
    """Sides over one engine."""

    def __init__(self, folder: Path, size: Size) -> None:
        from rollout_core.config import SamplingParams, VLLMBackend
        from rollout_core.inference.backend import ModelRef
        from rollout_core.objects import ObjectStore

        self._folder, self._size = folder, size
        self._objects = ObjectStore.from_url(f"file://{folder / 'objects'}")
        self._model = ModelRef(self._objects.put_tree(folder / "model"), folder / "model")
        self._backend = VLLMBackend(max_model_len=1024, max_num_seqs=256)
        stops = tuple(range(100, 100 + STOP_TOKENS))
        self._sampling = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, stop_token_ids=stops)
        self._prompts: list[list[int]] = []
        """Of all turns of the last episodes."""

    def play(self, most_seconds: float, round_number: int) -> tuple[float, int]:
        """Seconds and tokens of episodes that nobody played before."""
        with no_collection():
            return asyncio.run(self._play(most_seconds, round_number))

    async def _play(self, most_seconds: float, round_number: int) -> tuple[float, int]:
        from rollout_core.base.ids import content_id
        from rollout_core.config.environments import PythonEnvironment
        from rollout_core.environments.code import EnvironmentCode
        from rollout_core.environments.episodes import Episode, play_episodes
        from rollout_core.environments.hosts import look_at
        from rollout_core.environments.transcripts import turns_of
        from rollout_core.inference.batch import BatchOptions
        from rollout_core.inference.engines import EngineOf
        from rollout_core.store import SqlLightningStore

        config = {"most_seconds": most_seconds}
        environment = PythonEnvironment(path="env.py:Env", config=config, episodes_at_once=self._size.episodes)
        code = EnvironmentCode.read(environment.path, self._folder)
        offer = look_at(code, environment)
        rows = [{"number": number, "round": round_number} for number in range(self._size.episodes)]
        episodes = [Episode(content_id("benchmark/1", [row, most_seconds]), row) for row in rows]
        place = self._folder / f"{round_number}-{most_seconds:g}"
        place.mkdir()
        async with SqlLightningStore.from_url(f"sqlite:///{place}/store.db") as store:
            began = time.perf_counter()
            _, work = await play_episodes(
                store,
                self._objects,
                EngineOf(self._backend, self._model),
                code,
                environment,
                offer,
                self._sampling,
                episodes,
                metadata={},
                retry_failed=False,
                limit=None,
                base=self._folder,
                index_folder=place,
                worker_id="benchmark",
                options=BatchOptions(deterministic=False, generator="benchmark"),
                on_progress=lambda progress: None,
            )
            seconds = time.perf_counter() - began
            spans = await store.query_many_spans([episode.rollout_id for episode in episodes])
        self._prompts = [turn.prompt_ids for turn in turns_of(spans)]
        return seconds, work.tokens

    def generate(self) -> tuple[float, int]:
        """Seconds and tokens of the turns of the last episodes, asked for all at once."""
        import vllm

        from rollout_core.inference.engines import engine

        params = [
            vllm.SamplingParams(
                temperature=1.0,
                max_tokens=MAX_TOKENS,
                stop_token_ids=list(self._sampling.stop_token_ids),
                seed=number,
                logprobs=0,
            )
            for number in range(len(self._prompts))
        ]
        inputs = [vllm.TokensPrompt(prompt_token_ids=ids) for ids in self._prompts]
        with engine(self._backend, self._model) as backend, no_collection():
            began = time.perf_counter()
            outputs = backend._llm.generate(inputs, params, use_tqdm=False)  # pyright: ignore[reportAttributeAccessIssue]
            return time.perf_counter() - began, sum(len(output.outputs[0].token_ids) for output in outputs)


def make(folder: Path, size: Size) -> None:
    """The model, with a chat template, and the environment."""
    from examples.make_tiny import make_model

    make_model(folder / "model", **size.model)
    for name, changes in (
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
        ("config.json", {"max_position_embeddings": 1024}),
    ):
        file = folder / "model" / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    (folder / "env.py").write_text(ENVIRONMENT)


def measure(folder: Path, size: Size, figures: Figures) -> None:
    """All rounds."""
    benchmark = Benchmark(folder, size)
    rates: dict[str, list[float]] = {"at once": [], "tools": [], "no time": []}
    benchmark.play(0.0, -1)  # starts and warms the engine
    benchmark.generate()
    for number in range(size.rounds):
        found: dict[str, Any] = {"tools": benchmark.play(2.0, number), "no time": benchmark.play(0.0, number)}
        found["at once"] = benchmark.generate()
        for name, (seconds, tokens) in found.items():
            rates[name].append(tokens / seconds)
    figures.compare("tools of no time / LLM.generate of all turns, tokens/s", rates["no time"], rates["at once"])
    figures.compare("tools of 0.1 to 2 s / tools of no time, tokens/s", rates["tools"], rates["no time"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full", help="large: 128 episodes, 101 million parameters")
    parser.add_argument("--quick", action="store_const", const="quick", dest="size", help="to see that it runs")
    size = SIZES[parser.parse_args().size]
    figures = Figures(f"{size.episodes} episodes of {TURNS} turns")
    with own_place() as folder:
        from rollout_core.inference.engines import close_engine

        make(folder, size)
        try:
            measure(folder, size, figures)
        finally:
            close_engine()
    figures.show()


if __name__ == "__main__":
    main()
