"""Evaluations by suites over the same questions put to `vllm.LLM` by hand.

Ours is the whole flow `evaluate-suites`: run and task runs on a Prefect server, the model and the questions filed in
object storage, prompts rendered, samples enqueued in SQLite, answered, scored, and reported with intervals. The
baselines reach into the engine that the flow keeps resident, so that no side counts its start:

- answers: `LLM.generate` on the text of prompts, a seed per request; without log-probabilities, as one would write it,
  and with those of the drawn tokens, which the flow keeps. Nothing is scored;
- choices: `LLM.generate` on the token ids of each prompt with each of its four choices, with log-probabilities of
  prompts, as lm-evaluation-harness's backend of vLLM asks for them (``prompt_logprobs=1, max_tokens=1``).

All sides draw the same tokens and name the same likeliest choices (checked in every round), in alternating order; each
round has questions or a sampling seed of its own, so nothing of it is cached. A first round over a few questions starts
the engine and warms every side; it does not count. With ``--start`` each side is a process instead: `rollout eval run`,
and a script that loads the model, generates and counts what is right.

Run: python benchmarks/evaluation.py [--quick | --size large] [--start]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from harness import Figures, no_collection, own_place, own_server
from inference import Side, kept_engine

MAX_TOKENS = 64
MAX_MODEL_LEN = 128
MODEL = "model"
FIRST_QUESTIONS = 32
"""Of the round that warms up."""
NUM_CHOICES = 4


@dataclass(frozen=True)
class Size:
    """How much is measured; ``model``: of `make_model`, instead of its 3.3 million parameters."""

    questions: int
    rounds: int
    model: Mapping[str, int] = field(default_factory=dict)


SIZES = {
    "quick": Size(questions=100, rounds=1),
    "full": Size(questions=1_000, rounds=3),
    "large": Size(questions=200, rounds=1, model={"hidden_size": 768, "num_layers": 14}),
}
"""``large``: a model of 101 million parameters."""


def write_suite(kind: str, count: int, seed: int) -> dict[str, Any]:
    """A suite of questions that no other round has, a fifth of which right answers may hit by chance."""
    from examples.make_tiny import make_problems

    chance = random.Random(seed)
    rows = []
    for number, (question, answer) in enumerate(make_problems(count, chance)):
        choices = [f"{answer} {other}".strip() for other in chance.sample(range(10), NUM_CHOICES)]
        rows.append(
            {"question": question, "answer": str(number % 10), "choices": choices, "right": number % NUM_CHOICES}
        )
    path = Path(f"{kind}-{seed}.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    suite = {"name": kind, "rows": {"path": str(path)}, "prompt": {"text": "{{ question }}"}}
    if kind == "choices":
        return {**suite, "scorer": {"kind": "choice", "answer_key": "right", "answer_as": "index"}}
    sampling = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "seed": seed}
    return {**suite, "sampling": sampling, "scorer": {"kind": "text", "compare": "numeric"}}


@dataclass(frozen=True)
class Taken:
    """Of a side of a round."""

    seconds: float
    processor_seconds: float
    """Of this process and all that it started: the engine, the Prefect server, the processes of scorers."""


class Timer:
    """From when it is made."""

    def __init__(self) -> None:
        self._began, self._processor_began = time.perf_counter(), self._processor_seconds()

    def taken(self) -> Taken:
        return Taken(time.perf_counter() - self._began, self._processor_seconds() - self._processor_began)

    @staticmethod
    def _processor_seconds() -> float:
        this = psutil.Process()
        return sum(this.cpu_times()[:4]) + sum(sum(one.cpu_times()[:2]) for one in this.children(recursive=True))


class Benchmark:
    """The flow and the baselines over one resident engine."""

    def __init__(self) -> None:
        from rollout_core.config import ModelSource, VLLMBackend
        from rollout_core.inference.backend import ModelRef
        from rollout_core.models.locating import import_model
        from rollout_core.models.pretrained import load_tokenizer
        from tasks.runtime import connections

        self._backend = VLLMBackend(max_model_len=MAX_MODEL_LEN)
        objects = connections.objects()
        model = import_model(ModelSource(uri=MODEL), objects, Path.cwd())
        self._model = ModelRef(model, objects.local_tree(model, connections.cache_folder()))
        self._tokenizer = load_tokenizer(self._model.folder)
        self.stages: dict[str, list[float]] = {}

    def flow(self, suite: Mapping[str, Any]) -> tuple[Taken, list[list[Any]]]:
        """What the whole flow takes, and of each answer its tokens, or its choice's log-likelihood."""
        from flows.evaluate import evaluate_suites
        from rollout_core.config import EvalConfig
        from rollout_core.data.samples import decode_completions_blob
        from tasks.runtime import connections

        tables = {"model": {"uri": MODEL}, "backend": self._backend, "suites": [suite]}
        config = EvalConfig.model_validate(tables)
        with kept_engine() as journals, no_collection():
            timer = Timer()
            [report] = evaluate_suites(config)["reports"]
            taken = timer.taken()
        for entry in journals[-1].entries:
            self.stages.setdefault(f"{suite['name']}, stage {entry.stage}", []).append(entry.seconds)
        rows = decode_completions_blob(connections.objects().get_bytes(report["completions"]))
        if suite["name"] == "choices":
            return taken, [[sum(row.logprobs)] for row in rows]
        return taken, [list(row.token_ids) for row in rows]

    def answers(self, suite: Mapping[str, Any], *, logprobs: int | None) -> tuple[Taken, list[list[Any]]]:
        """What `LLM.generate` takes on prompts' text, and the tokens it drew."""
        import vllm

        from rollout_core.config import SamplingParams
        from rollout_core.data.samples import make_samples

        about: dict[str, Any] = {"model": self._model.content_id, "params": SamplingParams(**suite["sampling"])}
        samples = make_samples(self._tokenizer, prompts_of(suite), **about)
        params = [
            vllm.SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=sample.seed, logprobs=logprobs)
            for sample in samples
        ]
        taken, outputs = self._generate([sample.prompt for sample in samples], params)
        return taken, [list(output.outputs[0].token_ids) for output in outputs]

    def choices(self, suite: Mapping[str, Any]) -> tuple[Taken, list[list[Any]]]:
        """What `LLM.generate` takes on each prompt with each choice, and the choices' log-likelihoods."""
        import vllm

        from rollout_core.config.evaluation import ChoiceScorer
        from rollout_core.data.continuations import scored_samples
        from rollout_core.evaluation.choices import continued

        pairs = continued(ChoiceScorer.model_validate(suite["scorer"]), prompts_of(suite))
        samples = scored_samples(self._model.folder, pairs, model=self._model.content_id, max_model_len=MAX_MODEL_LEN)
        asked = vllm.SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=1, detokenize=False)
        inputs = [vllm.TokensPrompt(prompt_token_ids=list(sample.prompt_token_ids)) for sample in samples]
        taken, outputs = self._generate(inputs, [asked] * len(inputs))
        found = []
        for sample, output in zip(samples, outputs, strict=True):
            of_choice = zip(sample.prompt_token_ids, output.prompt_logprobs, strict=True)
            found.append([sum(at[token].logprob for token, at in list(of_choice)[-sample.scored :])])
        return taken, found

    def _generate(self, inputs: list[Any], params: list[Any]) -> tuple[Taken, list[Any]]:
        from rollout_core.inference.engines import engine

        with engine(self._backend, self._model) as backend, no_collection():
            timer = Timer()
            outputs = backend._llm.generate(inputs, params, use_tqdm=False)  # pyright: ignore[reportAttributeAccessIssue]
            return timer.taken(), outputs


def prompts_of(suite: Mapping[str, Any]) -> list[Any]:
    """The suite's rows as prompts."""
    from rollout_core.config.evaluation import SuitePrompt
    from rollout_core.data.datasets import TaskRow, parse_rows
    from rollout_core.evaluation.prompts import render_prompts

    rows = parse_rows(Path(suite["rows"]["path"]).read_bytes(), "questions", TaskRow)
    return render_prompts(SuitePrompt.model_validate(suite["prompt"]), rows)


def measure(size: Size, figures: Figures) -> None:
    """All rounds of both kinds. Raises RuntimeError when two sides differ in what they answer."""
    benchmark = Benchmark()
    kinds: dict[str, dict[str, Callable[[Mapping[str, Any]], tuple[Taken, list[list[Any]]]]]] = {
        "answers": {
            "flow": benchmark.flow,
            "LLM.generate": partial(benchmark.answers, logprobs=None),
            "LLM.generate, logprobs": partial(benchmark.answers, logprobs=0),
        },
        "choices": {"flow": benchmark.flow, "LLM.generate, prompt_logprobs": benchmark.choices},
    }
    for kind, sides in kinds.items():
        found, processor = ({name: Side() for name in sides} for _ in range(2))
        for seed in range(size.rounds + 1):
            suite = write_suite(kind, size.questions if seed else FIRST_QUESTIONS, seed)
            names = list(sides)
            turn = seed % len(names)
            said = {}
            for name in names[turn:] + names[:turn]:
                taken, said[name] = sides[name](suite)
                if seed:
                    for side, seconds in ((found, taken.seconds), (processor, taken.processor_seconds)):
                        side[name].seconds.append(seconds)
                        side[name].tokens.append(sum(map(len, said[name])))
            if any(differ(said["flow"], other) for other in said.values()):
                raise RuntimeError(f"round {seed}: the sides answered otherwise, so their times do not compare")
        unit = "choices" if kind == "choices" else "tokens"
        for table, per in ((found, f"{unit}/s"), (processor, f"{unit} a processor second")):
            for name, side in table.items():
                if name != "flow":
                    rates = table["flow"].tokens_per_second(), side.tokens_per_second()
                    figures.compare(f"flow / {name}, {per}", *rates)
        for name, seconds in benchmark.stages.items():
            if name.startswith(kind):
                figures.compare(
                    f"  {name}, share of the flow's seconds", seconds[1:], found["flow"].seconds, form="{:.2f} s"
                )


def differ(ours: list[list[Any]], theirs: list[list[Any]]) -> bool:
    """Whether tokens do, or log-likelihoods by more than their last bits."""
    return len(ours) != len(theirs) or any(
        one != other and not (isinstance(one[0], float) and math.isclose(one[0], other[0], rel_tol=1e-4))
        for one, other in zip(ours, theirs, strict=True)
    )


BY_HAND = f"""
import json, sys, vllm

if __name__ == "__main__":
    rows = [json.loads(line) for line in open(sys.argv[1])]
    llm = vllm.LLM({MODEL!r}, dtype="float32", max_model_len={MAX_MODEL_LEN}, enforce_eager=True)
    params = [vllm.SamplingParams(temperature=1.0, max_tokens={MAX_TOKENS}, seed=seed) for seed in range(len(rows))]
    outputs = llm.generate([row["question"] for row in rows], params, use_tqdm=False)
    right = [row["answer"] in output.outputs[0].text for row, output in zip(rows, outputs)]
    print(sum(right) / len(right))
"""
"""A script as one would write it."""


def measure_processes(size: Size, figures: Figures) -> None:
    """Whole processes, from their start to their end."""
    sides = Side(), Side()
    Path("by_hand.py").write_text(BY_HAND, encoding="utf-8")
    # By itself vLLM takes half of the machine's memory.
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    for seed in range(1, size.rounds + 1):
        suite = write_suite("answers", size.questions, 1000 + seed)
        write_toml(suite)
        rollout = Path(sys.executable).with_name("rollout")
        options = ["--suite", "answers.toml", "--backend", "vllm", "--set", f"backend.max_model_len={MAX_MODEL_LEN}"]
        commands = [
            [rollout, "eval", "run", MODEL, *options],
            [sys.executable, "by_hand.py", suite["rows"]["path"]],
        ]
        for place in ((0, 1), (1, 0))[seed % 2]:
            started = time.perf_counter()
            subprocess.run(commands[place], check=True, stdout=subprocess.DEVNULL, env=environment)
            sides[place].seconds.append(time.perf_counter() - started)
            sides[place].tokens.append(size.questions)
    rates = [side.tokens_per_second() for side in sides]
    figures.compare("`rollout eval run` / a script, start and end included, questions/s", *rates, form="{:,.1f}")


def write_toml(suite: Mapping[str, Any]) -> None:
    lines = [f"name = {json.dumps(suite['name'])}"]
    for key, table in suite.items():
        if isinstance(table, Mapping):
            lines += [f"[{key}]", *(f"{name} = {json.dumps(value)}" for name, value in table.items())]
    Path("answers.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full", help="large: 200 questions, 101 million parameters")
    parser.add_argument("--quick", action="store_const", const="quick", dest="size", help="to see that it runs")
    parser.add_argument("--start", action="store_true", help="whole processes, with their start")
    parser.add_argument("--questions", type=int, help="how many, instead of the size's")
    parser.add_argument("--rounds", type=int, help="how many, instead of the size's")
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    size = replace(size, questions=arguments.questions or size.questions, rounds=arguments.rounds or size.rounds)
    figures = Figures(f"Evaluation by suites: {size.questions} questions, at most {MAX_TOKENS} tokens, 4 choices")
    with own_place() as folder, own_server(folder):
        from examples.make_tiny import make_model

        make_model(folder / MODEL, **size.model)
        if arguments.start:
            measure_processes(size, figures)
        else:
            from rollout_core.inference.engines import close_engine

            try:
                measure(size, figures)
            finally:
                close_engine()
    figures.show()


if __name__ == "__main__":
    main()
