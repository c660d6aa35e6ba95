"""Training and generation on one device in 8 minutes: tokens per second, model FLOPs utilization, peak memory beside
the plan's estimate, whether an update that was cut off ends in the same bytes, and how far the log-probabilities of
the engine are from the trainer's.

On a GPU a randomly drawn model of the shape of Qwen2.5 0.5B, in bfloat16 autocast; with --cpu a tiny one, which tries
the script itself. Each case is a process of its own. MFU counts 6 FLOPs a trained parameter and token, 4 where only
adapters are trained (Chowdhery et al., arXiv:2204.02311, appendix B, without attention), layers that are computed twice
once; of the peak that --peak-flops names.

Run: python benchmarks/gpu.py [--cpu] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import Figures
from memory import rows_of, watched

from rollout_core.plans.memory_and_disk import estimate_memory, readable, training_of

SECONDS = 480
"""For all cases; one that would begin later is left out."""
CASES: dict[str, dict[str, Any]] = {
    "SFT, AdamW": {},
    "SFT, layers computed twice": {"gradient_checkpointing": True},
    "SFT, AdamW of 8 bits": {"optimizer": {"kind": "adamw8bit", "lr": 1e-4}},
    "SFT, LoRA of rank 16": {"lora": {"r": 16}},
    "SFT, cut by tokens": {"max_tokens_per_microbatch": 0},
    "DPO, reference first": {"kind": "dpo"},
}
SHAPES: dict[str, dict[str, int]] = {
    "cuda": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "cpu": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
ROWS = {"cuda": 16, "cpu": 4}
TOKENS = {"cuda": 1024, "cpu": 256}
STEPS = 8
PROMPTS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--quick", action="store_true", help="one case, parity and the resume check")
    parser.add_argument("--peak-flops", type=float, default=989e12, help="of the GPU a second (default: H100)")
    parser.add_argument("--case", help="this one alone, in this process; prints JSON")
    parser.add_argument("--folder", type=Path, help="of the case, with its model")
    asked = parser.parse_args()
    device = "cpu" if asked.cpu else "cuda"
    if asked.case:
        run = {"resume": resume_check, "parity": parity}.get(asked.case)
        found = run(asked.folder, device) if run else train(asked.case, asked.folder, device)
        sys.stdout.write("\n" + json.dumps(found))
        return
    began = time.monotonic()
    figures = Figures("One device: tokens/s (ours), peak memory against the plan's estimate (ratio)")
    names = [name for name in CASES if "8 bits" not in name or find_spec("bitsandbytes")]
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as place:
        folder = Path(place)
        make_model(folder / "model", device)
        for case in ["parity", "resume", *(names[:1] if asked.quick else names)]:
            if time.monotonic() - began > SECONDS - 60:
                figures.add(case, "no time left")
                continue
            found = alone(case, folder, asked)
            if "says" in found:
                figures.add(case, found["says"])
                continue
            mfu = found["flops_per_second"] / asked.peak_flops
            said = f"{found['tokens_per_second']:,.0f}" + ("" if asked.cpu else f", MFU {mfu:.2f}")
            memory = f"{readable(found['peak'])} / {readable(found['estimate'])}"
            figures.add(case, said, memory, found["peak"] / found["estimate"])
    figures.show(f"{ROWS[device]} rows of {TOKENS[device]} tokens a step, on {device}; baseline: peak / estimate")
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)


def make_model(folder: Path, device: str) -> None:
    import torch
    from transformers import AutoConfig, Qwen2ForCausalLM

    from examples.make_tiny import make_model as make_tiny

    make_tiny(folder, hidden_size=64, num_layers=1)  # for its tokenizer
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    config.update({**SHAPES[device], "max_position_embeddings": 4096, "layer_types": None, "tie_word_embeddings": True})
    Qwen2ForCausalLM(type(config)(**config.to_dict())).save_pretrained(folder)


def alone(case: str, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """What a case found, as a process of its own."""
    command = [sys.executable, __file__, "--case", case, "--folder", str(folder), *(["--cpu"] if asked.cpu else [])]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    if asked.cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"says": f"failed: {(done.stderr.strip().splitlines() or ['no word'])[-1][:200]}"}
    return json.loads(done.stdout.splitlines()[-1])


def update(case: str, folder: Path, place: Path, device: str, *, stop_after: int | None = None) -> Any:
    """The checkpoint of a case, its settings and its seconds a step; it ends by Stopped after ``stop_after`` steps."""
    from rollout_core.algorithms.context import UpdateContext
    from rollout_core.base.ids import hash_bytes
    from rollout_core.config import DPOSettings, SFTSettings
    from rollout_core.launch.launcher import run_update
    from rollout_core.models import load_tokenizer
    from rollout_core.objects import ObjectStore

    changes = dict(CASES[case])
    is_dpo = changes.pop("kind", "sft") == "dpo"
    if "max_tokens_per_microbatch" in changes:
        changes["max_tokens_per_microbatch"] = 4 * TOKENS[device]
    settings = (DPOSettings if is_dpo else SFTSettings).model_validate(
        {
            "dataset": {"path": "x"},
            "optimizer": {"lr": 1e-4},
            "minibatch_size": ROWS[device] // (2 if is_dpo else 1),
            "budget": {"max_steps": STEPS},
            "sequence": {"max_length": TOKENS[device]},
            "snapshots": {"every_steps": 1000},
            **changes,
        }
    )
    objects, rows = (
        ObjectStore.from_url(str(place / "objects")),
        rows_of(load_tokenizer(folder / "model"), is_pairs=is_dpo, tokens=TOKENS[device], count=ROWS[device] * STEPS),
    )
    times, steps = [], []

    def on_step(row: dict[str, float]) -> None:
        times.append(time.monotonic())
        steps.append(row["num_tokens"])

    context = UpdateContext(
        objects=objects, cache=place / "cache", key=hash_bytes(b"key"), run_id="run", seed=1, on_step=on_step,
        is_stopping=lambda: stop_after is not None and len(steps) >= stop_after,
    )  # fmt: skip
    model = objects.put_tree(folder / "model")
    inputs: dict[str, Any] = {"model": model, "dataset": objects.put_bytes(rows), "settings": settings}
    if is_dpo:
        inputs["reference"] = model
    checkpoint = run_update("preference" if is_dpo else "sft", context, **inputs)[0]
    # The first step makes the optimizer's state and chooses kernels.
    return checkpoint, settings, sum(steps[1:]) / (times[-1] - times[0])


def train(case: str, folder: Path, device: str) -> dict[str, Any]:
    """Tokens and FLOPs a second, peak memory and the plan's estimate of it."""
    import torch

    import rollout_core.algorithms.dataset_updates  # noqa: F401  # imports belong to no estimate
    from rollout_core.models.architecture import with_lora
    from rollout_core.models.facts import blank_model, inspect_model

    place = folder / case.replace(" ", "-").replace(",", "")
    with watched() as peak:
        _, settings, tokens_per_second = update(case, folder, place, device)
    measured = torch.cuda.max_memory_allocated() if device == "cuda" else peak[0]
    size, trained = inspect_model(folder / "model").size, None
    if settings.lora is not None:
        adapted = with_lora(blank_model(folder / "model"), settings.lora, seed=0)
        trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    rows = 2 if "DPO" in case else 1
    training = training_of(settings, TOKENS[device], rows=rows, trained_parameters=trained)
    estimate = estimate_memory(size, training, device)
    flops = (6 if trained is None else 4) * size.num_parameters * tokens_per_second
    return {
        "tokens_per_second": tokens_per_second,
        "flops_per_second": flops,
        "peak": measured,
        "estimate": estimate.total,
    }


def resume_check(folder: Path, device: str) -> dict[str, str]:
    """Whether an update that is stopped after three steps and taken up again ends in the bytes of one that was not."""
    from rollout_core.base.errors import Stopped

    case = next(iter(CASES))
    whole, _, _ = update(case, folder, folder / "whole", device)
    try:
        update(case, folder, folder / "stopped", device, stop_after=3)
    except Stopped:
        resumed, _, _ = update(case, folder, folder / "stopped", device)
        equal = (resumed.model, resumed.train_state) == (whole.model, whole.train_state)
        return {"says": f"{'the same bytes' if equal else 'OTHER BYTES'} after a stop at step 3 of {STEPS}"}
    return {"says": "it was not stopped"}


def parity(folder: Path, device: str) -> dict[str, str]:
    """Tokens per second of the engine, and how far its log-probabilities are from the trainer's of the same weights."""
    import torch

    from rollout_core.algorithms.policy import Policy
    from rollout_core.base.ids import hash_bytes
    from rollout_core.config import SamplingParams, TransformersBackend, VLLMBackend
    from rollout_core.data.packing import pack_completions
    from rollout_core.inference.backend import ModelRef, Request
    from rollout_core.inference.engines import build_backend
    from rollout_core.models.pretrained import load_causal_lm

    config = (
        VLLMBackend(dtype="bfloat16", gpu_memory_utilization=0.5, sleep=True)
        if device == "cuda" and find_spec("vllm")
        else TransformersBackend(num_threads=os.cpu_count() or 1)
    )
    length = 256 if device == "cuda" else 32
    model = ModelRef(hash_bytes(b"model"), folder / "model")
    engine = build_backend(config, model)
    params = SamplingParams(temperature=1.0, max_tokens=length)
    prompts = [[2 + (31 * row + place) % 200 for place in range(32)] for row in range(PROMPTS)]
    began = time.monotonic()
    asked = [Request(str(row), prompt, params, row) for row, prompt in enumerate(prompts)]
    found = engine.generate(asked)
    seconds = time.monotonic() - began
    slept = ""
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
        engine.sleep()
        freed = torch.cuda.mem_get_info()[0] - free
        began = time.monotonic()
        engine.update_weights(model)
        slept = f"; asleep it leaves {freed / 2**30:.1f} GiB, awake with weights after {time.monotonic() - began:.1f} s"
        engine.generate(asked[:1])
    engine.close()
    drawn = [list(completion.token_ids) for completion in found]
    policy = Policy(load_causal_lm(folder / "model").to(device).eval())
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        own = policy(pack_completions(prompts, drawn).to(torch.device(device))).logprobs.cpu()
    theirs = torch.tensor([value for completion in found for value in completion.logprobs])
    apart = (own - theirs).abs()
    rate = sum(map(len, drawn)) / seconds
    gap = f"apart by {apart.mean():.1e}, at most {apart.max():.1e} nats"
    return {"says": f"{config.kind} {rate:,.0f} tokens/s; {gap}{slept}"}


if __name__ == "__main__":
    main()
