"""Overhead of batch inference over plain `vllm.LLM.generate`: same engine, prompts, seeds and run.

Ours is the whole `batch-inference` flow: run and task runs on a Prefect server, the model and the prompts filed in
object storage, samples enqueued in SQLite, generated, committed in groups, and written as ``completions.jsonl``. The
baselines reach into the engine that the flow keeps resident, so that no side counts its start:

- plain: `LLM.generate` on the prompts' text, as one would write it, with a seed per request and ``logprobs=0``;
- lean: the same with what the flow spares itself too: token ids given, no text made, flat logprobs.

All sides draw the same tokens (checked in every round), in alternating order; each round has a new sampling seed, so
nothing of it is cached. A first round over a few prompts starts the engine and warms every side; it does not count.
Plain and lean do no tokenising of their own accord in the timed part beyond what they need.

Run: python benchmarks/inference.py [--quick | --size large]
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness import Figures, no_collection, own_place, own_server

MAX_TOKENS = 64
MAX_MODEL_LEN = 128
PROMPTS = "prompts.jsonl"
FIRST_PROMPTS = "first.jsonl"
"""Of the round that warms up."""
NUM_FIRST_PROMPTS = 32


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    num_prompts: int
    rounds: int
    model: Mapping[str, int] = field(default_factory=dict)
    """Of `make_model`, instead of its 3.3 million parameters; nothing where a folder is given."""


SIZES = {
    "quick": Size(num_prompts=200, rounds=3),
    "full": Size(num_prompts=5_000, rounds=2),
    "large": Size(num_prompts=300, rounds=1, model={"hidden_size": 768, "num_layers": 14}),
}
"""``large``: a model of 101 million parameters."""


@dataclass
class Side:
    """What one side of the comparison showed, a value a round."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def tokens_per_second(self) -> list[float]:
        """Completion tokens per second of each round."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]


def make_inputs(folder: Path, num_prompts: int, given: Path | None = None, **model: int) -> None:
    """``num_prompts`` different prompts, and a model that seldom ends its completions, or the one ``given``."""
    import random

    from examples.make_tiny import SEED, make_model, make_problems

    if given is None:
        make_model(folder / "model", **model)
    else:
        shutil.copytree(given, folder / "model")
    problems = make_problems(num_prompts, random.Random(SEED))
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt, _ in problems]
    (folder / PROMPTS).write_text("".join(lines), encoding="utf-8")
    (folder / FIRST_PROMPTS).write_text("".join(lines[:NUM_FIRST_PROMPTS]), encoding="utf-8")


class Benchmark:
    """The flow and the baselines over one resident engine."""

    def __init__(self) -> None:
        from rollout_core.config import InputGlob, ModelSource, VLLMBackend
        from rollout_core.data.dataset_sources import open_prompts
        from rollout_core.inference.backend import ModelRef
        from rollout_core.models.locating import import_model
        from rollout_core.models.pretrained import load_tokenizer
        from tasks.runtime import connections

        self._backend = VLLMBackend(max_model_len=MAX_MODEL_LEN)
        self._source = ModelSource(uri="model")
        objects = connections.objects()
        model = import_model(self._source, objects, Path.cwd())
        self._model = ModelRef(model, objects.local_tree(model, connections.cache_folder()))
        self._tokenizer = load_tokenizer(self._model.folder)
        inputs = {name: open_prompts(InputGlob(glob=str(name)), Path.cwd()) for name in (PROMPTS, FIRST_PROMPTS)}
        self._rows = {name: list(prompts.rows()) for name, prompts in inputs.items()}

    def flow(self, seed: int, prompts: str) -> tuple[float, list[list[int]], dict[str, float]]:
        """Seconds of the whole flow, the tokens it drew and the seconds of its stages."""
        from flows.batch import batch_inference
        from rollout_core.config import InferBatchConfig, InputGlob, OutputDir

        config = InferBatchConfig(
            model=self._source,
            sampling=self._sampling(seed),
            input=InputGlob(glob=prompts),
            output=OutputDir(dir=f"completions-{seed}"),
            backend=self._backend,
        )
        with kept_engine() as journals, no_collection():
            started = time.perf_counter()
            written = batch_inference(config)
            seconds = time.perf_counter() - started
        stages: dict[str, float] = {}
        for entry in journals[-1].entries:
            # Shards run beside each other, so theirs is the longest.
            stages[entry.stage] = max(entry.seconds, stages.get(entry.stage, 0.0))
        return seconds, self._tokens_in(Path(written["path"])), stages

    def _tokens_in(self, path: Path) -> list[list[int]]:
        from rollout_core.data.samples import decode_completions_blob
        from tasks.runtime import connections

        with path.open(encoding="utf-8") as file:
            blobs = dict.fromkeys(json.loads(line)["completion_blob_id"] for line in file)
        rows = (row for blob in blobs for row in decode_completions_blob(connections.objects().get_bytes(blob)))
        return [list(row.token_ids) for row in rows]

    def generate(self, seed: int, prompts: str, *, lean: bool) -> tuple[float, list[list[int]]]:
        """Seconds of `LLM.generate` and the tokens it drew."""
        import vllm

        from rollout_core.base.ids import seed_of
        from rollout_core.data.samples import make_samples
        from rollout_core.inference.engines import engine

        sampling = self._sampling(seed)
        rows = self._rows[prompts]
        samples = make_samples(self._tokenizer, rows, model=self._model.content_id, params=sampling.params)
        options: dict[str, Any] = {"detokenize": False, "flat_logprobs": True} if lean else {}
        params = [
            vllm.SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=seed_of(sample.id), logprobs=0, **options)
            for sample in samples
        ]
        inputs: list[Any] = (
            [vllm.TokensPrompt(prompt_token_ids=sample.prompt_token_ids) for sample in samples]
            if lean
            else [sample.prompt for sample in samples]
        )
        with engine(self._backend, self._model) as backend, no_collection():
            started = time.perf_counter()
            outputs = backend._llm.generate(inputs, params, use_tqdm=False)  # pyright: ignore[reportAttributeAccessIssue]
            seconds = time.perf_counter() - started
        return seconds, [list(output.outputs[0].token_ids) for output in outputs]

    @staticmethod
    def _sampling(seed: int) -> Any:
        from rollout_core.config import BatchSampling

        return BatchSampling(temperature=1.0, max_tokens=MAX_TOKENS, seed=seed)


@contextmanager
def kept_engine() -> Iterator[list[Any]]:
    """Inside the block flows leave their engine running; gives the journals of their runs."""
    from rollout_core.inference import engines
    from tasks.runtime import flow_run

    journals: list[Any] = []
    recompute_missing = flow_run.recompute_missing

    def run_and_keep_journal(body: Callable[[Any], Any], run: Any) -> Any:
        def keep(journal: Any) -> Any:
            journals.append(journal)
            return body(journal)

        return recompute_missing(keep, run)

    with (
        patch.object(engines._pool, "close", lambda: None),
        patch.object(flow_run, "recompute_missing", run_and_keep_journal),
    ):
        yield journals


def measure(size: Size) -> Figures:
    """All rounds. Raises RuntimeError when two sides drew different tokens."""
    benchmark = Benchmark()
    ours, plain, lean = Side(), Side(), Side()
    stages: dict[str, list[float]] = {}

    def run_flow(seed: int, prompts: str) -> list[list[int]]:
        seconds, tokens, of_stages = benchmark.flow(seed, prompts)
        note(ours, seconds, tokens)
        for name, stage_seconds in of_stages.items():
            stages.setdefault(name, []).append(stage_seconds)
        return tokens

    def run_generate(side: Side, seed: int, prompts: str) -> list[list[int]]:
        seconds, tokens = benchmark.generate(seed, prompts, lean=side is lean)
        note(side, seconds, tokens)
        return tokens

    def note(side: Side, seconds: float, tokens: Sequence[Sequence[int]]) -> None:
        side.seconds.append(seconds)
        side.tokens.append(sum(map(len, tokens)))

    sides = [run_flow, partial(run_generate, plain), partial(run_generate, lean)]
    for seed in range(size.rounds + 1):
        turn = seed % len(sides)
        drawn = [run(seed, PROMPTS if seed else FIRST_PROMPTS) for run in sides[turn:] + sides[:turn]]
        if any(tokens != drawn[0] for tokens in drawn):
            raise RuntimeError(f"round {seed}: the sides drew different tokens, so their times do not compare")
    for values in (*(part for side in (ours, plain, lean) for part in (side.seconds, side.tokens)), *stages.values()):
        del values[0]

    figures = Figures(f"Batch inference over LLM.generate: {size.num_prompts} prompts, at most {MAX_TOKENS} tokens")
    tokens = (f"{sum(side.tokens) / len(side.tokens) / size.num_prompts:.1f}" for side in (ours, plain))
    figures.add("tokens a completion", *tokens, rounds=size.rounds)  # pyright: ignore[reportArgumentType]
    rates = [[size.num_prompts / seconds for seconds in side.seconds] for side in (ours, plain)]
    figures.compare("whole flow / plain, samples/s", *rates)
    figures.compare("whole flow / plain, tokens/s", ours.tokens_per_second(), plain.tokens_per_second())
    figures.compare("whole flow / lean, tokens/s", ours.tokens_per_second(), lean.tokens_per_second())
    for name, seconds in stages.items():
        figures.compare(f"  stage {name}, share of flow's seconds", seconds, ours.seconds, form="{:.2f} s")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full", help="large: 300 prompts, 101 million parameters")
    parser.add_argument("--quick", action="store_const", const="quick", dest="size", help="to see that it runs")
    parser.add_argument("--model", type=Path, help="folder of a model, instead of one that is made")
    parser.add_argument("--prompts", type=int, help="how many, instead of the size's")
    parser.add_argument("--rounds", type=int, help="how many, instead of the size's")
    parser.add_argument("--json", type=Path, help="file for the rows of the table")
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    size = replace(size, num_prompts=arguments.prompts or size.num_prompts, rounds=arguments.rounds or size.rounds)
    model, rows = (path and path.resolve() for path in (arguments.model, arguments.json))
    with own_place() as folder, own_server(folder):
        make_inputs(folder, size.num_prompts, model, **size.model)
        from rollout_core.inference.engines import close_engine

        try:
            figures = measure(size)
        finally:
            close_engine()
    if rows is not None:
        rows.write_text(json.dumps(figures.rows), encoding="utf-8")
    figures.show()


if __name__ == "__main__":
    main()
