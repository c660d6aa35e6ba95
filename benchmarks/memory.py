"""What a plan says a run will take of memory beside what it took, and what it says of models of some billions.

Measured: each case is a process of its own that trains a Qwen2 of 49 million parameters for three steps, or starts two
ranks that do; its peak resident memory, less what the same imports take alone. Computed: the estimate of
`rollout train ... --dry-run`, whose model is known by its configuration alone, for published configurations on one GPU
of 80 GB and on eight.

Run: python benchmarks/memory.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from harness import Figures
from rich.console import Console
from rich.table import Table

from rollout_core.plans.memory_and_disk import Training, estimate_memory, readable, state_bytes, training_of

ROWS, TOKENS, STEPS = 4, 256, 3
MEASURED = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12}
CASES: dict[str, dict[str, Any]] = {
    "SFT, AdamW": {},
    "SFT, SGD": {"optimizer": {"kind": "sgd", "lr": 1e-3}},
    "SFT, layers computed twice": {"gradient_checkpointing": True},
    "SFT, LoRA of rank 16": {"lora": {"r": 16}},
    "SFT, LoRA of rank 16, four bits": {"lora": {"r": 16, "quantization": "nf4"}},
    "SFT, LoRA, weights of bfloat16": {"lora": {"r": 16}, "weights": "bfloat16", "precision": "bfloat16"},
    "SFT, weights of bfloat16": {"weights": "bfloat16", "precision": "bfloat16"},
    "SFT, offloaded": {"offload": True},
    "DPO, reference inline": {"kind": "dpo"},
    "SFT, two ranks, DDP": {"parallel": {"nproc": 2, "kind": "ddp"}},
    "SFT, two ranks, FSDP2": {"parallel": {"nproc": 2, "kind": "fsdp2"}},
    "SFT, two ranks, FSDP2, LoRA": {"parallel": {"nproc": 2, "kind": "fsdp2"}, "lora": {"r": 16}},
    "SFT, two ranks, tensor": {"parallel": {"nproc": 2, "kind": "tensor"}, "gradient_accumulation": 1},
}


@dataclass(frozen=True)
class Published:
    """A configuration as its authors publish it: the Qwen2.5 technical report (arXiv:2412.15115), The Llama 3 herd of
    models (arXiv:2407.21783)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    is_tied: bool
    has_qkv_bias: bool

    def size(self) -> Any:
        from rollout_core.models.facts import ModelSize

        of_keys = self.hidden_size // self.num_heads * self.num_kv_heads
        bias = self.hidden_size + 2 * of_keys if self.has_qkv_bias else 0
        attention = 2 * self.hidden_size * (self.hidden_size + of_keys) + bias
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)
        count = self.num_layers * layer + embeddings + self.hidden_size
        return ModelSize(count, self.num_layers, self.hidden_size, self.intermediate_size)

    def lora_parameters(self, rank: int) -> int:
        """Of adapters on every linear layer of the blocks."""
        of_keys = self.hidden_size // self.num_heads * self.num_kv_heads
        ends = [(self.hidden_size, self.hidden_size)] * 2 + [(self.hidden_size, of_keys)] * 2
        ends += [(self.hidden_size, self.intermediate_size)] * 3
        return self.num_layers * rank * sum(one + other for one, other in ends)


PUBLISHED = {
    "Qwen2.5 0.5B": Published(896, 4864, 24, 14, 2, 151_936, is_tied=True, has_qkv_bias=True),
    "Qwen2.5 1.5B": Published(1536, 8960, 28, 12, 2, 151_936, is_tied=True, has_qkv_bias=True),
    "Qwen2.5 7B": Published(3584, 18_944, 28, 28, 4, 152_064, is_tied=False, has_qkv_bias=True),
    "Llama 3.1 8B": Published(4096, 14_336, 32, 32, 8, 128_256, is_tied=False, has_qkv_bias=False),
}
GPU_FLOPS = 989e12
"""Of an H100 (SXM) a second, dense, in bfloat16, as its maker says."""
UTILIZATION = 0.4
TRAINED_TOKENS = 1e8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one case, and the computed table")
    parser.add_argument("--only", help="cases whose names have this in them")
    parser.add_argument("--case", help="this one alone, in this process; prints JSON")
    parser.add_argument("--folder", type=Path, help="of the case, with its model")
    asked = parser.parse_args()
    if asked.case:
        sys.stdout.write(json.dumps(run_case(asked.case, asked.folder)))
        return
    figures = Figures("Peak memory: measured (ours) against the plan's estimate (baseline)")
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as name:
        make_model(Path(name) / "model")
        for case in [name for name in CASES if (asked.only or "") in name][: 1 if asked.quick else None]:
            found = alone(case, Path(name))
            ratio = found["measured"] / found["estimate"]
            figures.add(case, readable(found["measured"]), readable(found["estimate"]), ratio)
    figures.show(f"{ROWS} rows of {TOKENS} tokens in a pass")
    table = Table(
        title="Computed by the plan's formula: 4,096 tokens in a pass, AdamW, bfloat16, layers computed twice"
    )
    for column in ("model", "10^9", "1 GPU", "8 GPUs, FSDP2", "1 GPU, LoRA", "snapshot", "with LoRA", "10^8 tokens"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in computed():
        table.add_row(*row)
    Console(width=110).print(table)


def make_model(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, Qwen2ForCausalLM

    from examples.make_tiny import make_model as make_tiny

    make_tiny(folder, hidden_size=64, num_layers=1)  # for its tokenizer
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    config.update({**MEASURED, "num_key_value_heads": 12, "vocab_size": 8192, "layer_types": None})
    config.tie_word_embeddings = True
    Qwen2ForCausalLM(type(config)(**config.to_dict())).save_pretrained(folder)


def alone(case: str, folder: Path) -> dict[str, int]:
    """Estimate and measured bytes of a case."""
    command = [sys.executable, __file__, "--case", case, "--folder", str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_case(case: str, folder: Path) -> dict[str, int]:
    from rollout_core.algorithms.context import UpdateContext
    from rollout_core.algorithms.training import train  # noqa: F401  # imports belong to no estimate
    from rollout_core.base.ids import hash_bytes
    from rollout_core.config import DPOSettings, SFTSettings
    from rollout_core.launch.launcher import run_update
    from rollout_core.models import load_tokenizer
    from rollout_core.models.facts import inspect_model
    from rollout_core.objects import ObjectStore

    changes = dict(CASES[case])
    is_dpo = changes.pop("kind", "sft") == "dpo"
    rows = rows_of(load_tokenizer(folder / "model"), is_pairs=is_dpo)
    settings = (DPOSettings if is_dpo else SFTSettings).model_validate(
        {
            "dataset": {"path": "x"},
            "optimizer": {"lr": 1e-4},
            "minibatch_size": ROWS // (2 if is_dpo else 1),
            "gradient_accumulation": 1 if "parallel" not in changes else 2,
            "budget": {"max_steps": STEPS},
            "sequence": {"max_length": TOKENS},
            "snapshots": {"every_steps": 1},  # written beside the next step, as the estimate has it
            **changes,
        }
    )
    place = folder / case.replace(" ", "-").replace(",", "")
    objects = ObjectStore.from_url(str(place / "objects"))
    context = UpdateContext(objects=objects, cache=place / "cache", key=hash_bytes(b"key"), run_id="run", seed=1)
    model = objects.put_tree(folder / "model")
    inputs: dict[str, Any] = {"model": model, "dataset": objects.put_bytes(rows), "settings": settings}
    if is_dpo:
        inputs["reference"] = model
    size = inspect_model(folder / "model").size
    lora = 16 * size.num_layers * (8 * size.hidden_size + 3 * (size.hidden_size + size.intermediate_size))
    own = size.num_layers * size.hidden_size * (4 * size.hidden_size + 3 * size.intermediate_size)
    training = training_of(
        settings, TOKENS, rows=2 if is_dpo else 1, trained_parameters=lora if settings.lora else None,
        quantized_parameters=own if settings.lora and settings.lora.quantization == "nf4" else 0,
        frozen_models=int(is_dpo), cut_parameters=own if settings.parallel.cuts_matrices else 0,
    )  # fmt: skip
    estimate = estimate_memory(size, training)
    with watched() as peak:
        run_update("preference" if is_dpo else "sft", context, **inputs)
    return {"measured": peak[0], "estimate": estimate.total}


def rows_of(tokenizer: Any, *, is_pairs: bool, tokens: int = TOKENS, count: int = ROWS * STEPS * 2) -> bytes:
    """Rows that are as long as may be."""
    answer = " 1" * tokens
    prompt = "sort 1 ="
    if len(tokenizer(answer)["input_ids"]) < tokens:
        raise RuntimeError("the rows are shorter than they should be")
    row: Mapping[str, str] = (
        {"prompt": prompt, "chosen": answer, "rejected": " 2" * tokens}
        if is_pairs
        else {"prompt": prompt, "completion": answer}
    )
    return (json.dumps(row) + "\n").encode() * count


@contextmanager
def watched() -> Iterator[list[int]]:
    """Peak of the resident memory of this process and its children, less what this one has when the block begins."""
    peak, before, is_over, own = [0], memory_of(os.getpid()), threading.Event(), psutil.Process()

    def watch() -> None:
        while not is_over.wait(0.005):
            children = sum(max(0, memory_of(child.pid) - before) for child in own.children())
            peak[0] = max(peak[0], memory_of(own.pid) - before + children)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


def memory_of(pid: int) -> int:
    """Resident bytes that no file stands behind: those of libraries and mapped weights are everybody's."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return sum(int(found.get(name, "0 kB").split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def computed() -> Iterator[tuple[str, ...]]:
    """A row for each published model: full training and adapters on one GPU, sharded over eight, a snapshot, time."""
    for name, published in PUBLISHED.items():
        size = published.size()
        whole = Training(tokens_per_pass=4096, optimizer="adamw", precision="bfloat16", gradient_checkpointing=True)
        lora = replace(whole, trained_parameters=published.lora_parameters(16))
        needs = (whole, replace(whole, processes=8, sharded=True), lora)
        memory = [f"{estimate_memory(size, each, 'cuda').total / 1e9:.1f} GB" for each in needs]
        # Forward, backward, and the forward pass that is computed twice (Kaplan et al., arXiv:2001.08361, section 2.1).
        hours = 8 * size.num_parameters * TRAINED_TOKENS / (UTILIZATION * GPU_FLOPS) / 3600
        snapshots = (f"{state_bytes(size, each) / 1e9:.1f} GB" for each in (whole, lora))
        yield (name, f"{size.num_parameters / 1e9:.2f}", *memory, *snapshots, f"{hours:.1f} h")


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
