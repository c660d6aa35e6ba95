"""Sides of ``real.py`` that are processes of their own: rollout's GRPO flow, batches, and the bare scripts beside them.

    grpo       iterations of `train-grpo` as its command runs them: server, object store, engine, update
    batch      rollout's vLLM backend on all prompts
    plain      `LLM.generate` on the same ones, an engine as vLLM starts it by default
    step       load the model, take one optimizer step by plain PyTorch and transformers, say so
    sample     start `vllm.LLM`, complete one prompt, say so

Run by ``real.py``; each by itself: python benchmarks/real_sides.py SIDE --work rows.jsonl --model FOLDER ...
"""

# Imports wait for their side: what a bare script loads is a part of what is measured.
from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

MAX_NUM_SEQS = 64
MAX_MODEL_LEN = 256
REWARD = """import hashlib


def score(sample):
    return hashlib.sha256(sample.completion.encode()).digest()[0] / 255
"""
"""Rewards that differ within a group, at no cost."""


def read_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [json.loads(line) for line in arguments.work.read_text(encoding="utf-8").splitlines()]


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Timed:
    """Seconds of each call of a function that is put in its place."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.seconds: list[float] = []
        self._inner = inner

    def bound(self) -> Callable[..., Any]:
        """To be set as a method of the class that has the function."""

        def call(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return self._inner(*args, **options)
            finally:
                self.seconds.append(time.perf_counter() - started)

        return call


@contextmanager
def timed_methods(*methods: tuple[Any, str]) -> Iterator[list[Timed]]:
    """Inside the block calls of these methods are timed."""
    from unittest.mock import patch

    with ExitStack() as stack:
        found = []
        for owner, name in methods:
            found.append(Timed(getattr(owner, name)))
            stack.enter_context(patch.object(owner, name, found[-1].bound()))
        yield found


def processor_seconds(pid: int | None = None) -> float:
    """Of a process (default: this one) and all that it has started, such as Prefect's server and the engine."""
    import psutil

    total = 0.0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def grpo(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of an iteration, of its stages, and of the weights' way: filed by the trainer, loaded by the engine."""
    from harness import own_place, own_server

    with own_place() as folder, own_server(folder):
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        return run_grpo(arguments)


def run_grpo(arguments: argparse.Namespace) -> dict[str, Any]:
    from unittest.mock import patch

    from flows import learning, train
    from rollout_core.algorithms.resumption import Resumption
    from rollout_core.config import TrainGRPOConfig
    from rollout_core.data.samples import decode_completions_blob
    from rollout_core.inference.vllm_backend import VLLMEngine
    from rollout_core.objects.records import Scores
    from tasks.runtime import flow_run
    from tasks.runtime.connections import objects

    rows, iterations = read_rows(arguments), arguments.steps + arguments.warm
    num_completions, longest = arguments.batch * arguments.completions, max(len(row["prompt_ids"]) for row in rows)
    config = TrainGRPOConfig.model_validate(
        {
            "run": {"name": "grpo"},
            "num_threads": arguments.threads,
            "algorithm": {
                "kind": "grpo",
                "base_model": {"uri": str(arguments.model)},
                "prompts": {"kind": "jsonl_path", "path": str(arguments.work)},
                "reward": {"kind": "function", "callable": "reward.py:score"},
                "iterations": iterations,
                "prompts_per_iteration": arguments.batch,
                "samples_per_prompt": arguments.completions,
                "minibatch_size": num_completions,
                "gradient_accumulation": 1,
                "sampling": {"temperature": 1.0, "max_tokens": arguments.tokens},
                "optimizer": {"lr": 1e-5},
                "precision": arguments.precision,
            },
            "backend": {
                "kind": "vllm",
                "dtype": arguments.precision,
                "max_model_len": longest + arguments.tokens,
                "max_num_seqs": num_completions,
                "num_threads": arguments.threads,
            },
        }
    )
    moments: list[tuple[float, float]] = []
    journals: list[Any] = []
    recompute_missing, log_iteration = flow_run.recompute_missing, learning.log_iteration

    def note(*args: Any) -> None:
        moments.append((time.perf_counter(), processor_seconds()))
        log_iteration(*args)

    def keep_journal(body: Callable[[Any], Any], run: Any) -> Any:
        return recompute_missing(lambda journal: (journals.append(journal), body(journal))[1], run)

    with (
        patch.object(learning, "log_iteration", note),
        patch.object(flow_run, "recompute_missing", keep_journal),
        timed_methods((Resumption, "finish"), (VLLMEngine, "update_weights")) as (filed, loaded),
    ):
        train.train_grpo(config)
    first = arguments.warm - 1
    seconds, processor = (
        [after[clock] - before[clock] for before, after in pairwise(moments[first:])] for clock in (0, 1)
    )
    stages: dict[str, list[float]] = {}
    lengths: list[int] = []
    for entry in journals[-1].entries:
        if entry.label.startswith("iteration") and entry.label != "iteration 1":
            stages.setdefault(entry.stage, []).append(entry.seconds)
        if isinstance(entry.result, Scores):
            rows_drawn = decode_completions_blob(objects().get_bytes(entry.result.completions))
            lengths += [len(row.token_ids) for row in rows_drawn]
    length = statistics.mean(lengths)
    each = (statistics.mean(len(row["prompt_ids"]) for row in rows) + length) * num_completions
    found = {
        "step_ms": 1e3 * statistics.median(seconds),
        "tokens_per_second": each * len(seconds) / sum(seconds),
        "tokens_per_processor_second": each * len(seconds) / sum(processor),
        "peak_rss_mib": peak_mib(),
        "completion_tokens": length,
        # The first iteration's weights are those that the engine starts with.
        "filed_seconds": statistics.median(filed.seconds),
        "loaded_seconds": statistics.median(value for value in loaded.seconds if value > 0.01),
        "stages": {name: statistics.median(values) for name, values in stages.items()},
    }
    return {**found, "hand_over_seconds": found["filed_seconds"] + found["loaded_seconds"]}


def rate(arguments: argparse.Namespace, generate: Callable[[list[list[int]]], int]) -> dict[str, Any]:
    """Completion tokens per second over all prompts, after a first round over a few."""
    prompts = [row["prompt_ids"] for row in read_rows(arguments)]
    generate(prompts[:8])
    started, begun = time.perf_counter(), processor_seconds()
    tokens = generate(prompts)
    seconds, processor = time.perf_counter() - started, processor_seconds() - begun
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_processor_second": tokens / processor,
        "peak_rss_mib": peak_mib(),
        "step_ms": 1e3 * seconds,
    }


def batch(arguments: argparse.Namespace) -> dict[str, Any]:
    from rollout_core.base.ids import hash_bytes
    from rollout_core.config import SamplingParams, VLLMBackend
    from rollout_core.inference.backend import ModelRef, Request
    from rollout_core.inference.engines import build_backend

    config = VLLMBackend(
        dtype=arguments.precision,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        num_threads=arguments.threads,
    )
    backend = build_backend(config, ModelRef(hash_bytes(b"model"), arguments.model))
    params = SamplingParams(temperature=1.0, max_tokens=arguments.tokens, min_tokens=arguments.tokens)

    def generate(prompts: list[list[int]]) -> int:
        requests = [Request(str(number), prompt, params, number) for number, prompt in enumerate(prompts)]
        return sum(len(completion.token_ids) for completion in backend.generate(requests))

    try:
        return rate(arguments, generate)
    finally:
        backend.close()


def plain(arguments: argparse.Namespace) -> dict[str, Any]:
    import vllm

    llm = vllm.LLM(
        str(arguments.model), dtype=arguments.precision, max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS
    )

    def generate(prompts: list[list[int]]) -> int:
        params = [
            vllm.SamplingParams(
                temperature=1.0, max_tokens=arguments.tokens, min_tokens=arguments.tokens, seed=number, logprobs=0
            )
            for number in range(len(prompts))
        ]
        asked = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return rate(arguments, generate)


def step(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).train()
    rows = [
        torch.tensor(tokenizer.apply_chat_template(row["messages"], return_dict=False)) for row in read_rows(arguments)
    ]
    ids = pad_sequence(rows[: arguments.batch], batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows[: arguments.batch]], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print("step 1 of 1", flush=True)
    return {"peak_rss_mib": peak_mib()}


def sample(arguments: argparse.Namespace) -> dict[str, Any]:
    import vllm

    [row, *_] = read_rows(arguments)
    # Without what it compiles first, as rollout's engine on a CPU.
    llm = vllm.LLM(str(arguments.model), dtype="float32", max_model_len=MAX_MODEL_LEN, enforce_eager=True)
    params = vllm.SamplingParams(temperature=1.0, max_tokens=arguments.tokens, seed=0, logprobs=0)
    [output] = llm.chat(row["messages"], params, use_tqdm=False)
    print("first sample:", len(output.outputs[0].token_ids), flush=True)
    return {"peak_rss_mib": peak_mib()}


SIDES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "grpo": grpo,
    "batch": batch,
    "plain": plain,
    "step": step,
    "sample": sample,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=SIDES)
    parser.add_argument("--work", type=Path, required=True, help="JSON lines")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=4, help="rows of a step; grpo: prompts of an iteration")
    parser.add_argument("--completions", type=int, default=8, help="of each prompt of grpo")
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warm", type=int, default=1, help="iterations before them that do not count")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.work, arguments.json = arguments.work.resolve(), arguments.json.resolve()
    arguments.model = arguments.model.resolve()
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    arguments.json.write_text(json.dumps(SIDES[arguments.case](arguments)), encoding="utf-8")


if __name__ == "__main__":
    main()
