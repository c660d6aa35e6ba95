"""One training case by TRL's trainer, on exact token ids: the other side of ``training.py --case``.

Runs under an interpreter that has TRL (`against_trl.py` starts it there); rollout is not imported. Rows go to the
trainer as they are, in their order: its own preparation of data, which would tokenise, is replaced by nothing. All
trainers are given what makes them quicker on a CPU where it changes no result: no logging, no checkpoints, no
gradient checkpointing, fused AdamW.

Run: python benchmarks/trl_side.py --case dpo --work rows.jsonl --model FOLDER --batch 8 --steps 20 --json out.json
"""

# pyright: reportPrivateImportUsage=false, reportArgumentType=false
from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import resource
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

MODES = {"sft": {"packing": False}, "sft-packed": {"packing": True, "packing_strategy": "bfd"}}


class Stopwatch:
    """Seconds and processor time of each optimizer step, from the end of the one before."""

    def __init__(self, warm: int) -> None:
        """``warm``: first steps that do not count."""
        self.moments: list[tuple[float, float]] = []
        self._warm = warm

    def callback(self) -> Any:
        from transformers import TrainerCallback

        moments = self.moments

        class Watch(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                moments.append((time.perf_counter(), time.process_time()))

            def on_step_end(self, *_: Any, **__: Any) -> None:
                moments.append((time.perf_counter(), time.process_time()))

        return Watch()

    def of_steps(self, clock: int) -> list[float]:
        """Of the steps that count; clock 0 is the wall's, 1 the processor's."""
        times = [moment[clock] for moment in self.moments]
        return [after - before for before, after in pairwise(times)][self._warm :]


def word_tokenizer(vocabulary: int) -> Any:
    """Id 17 is the word "17", so that prompts given as text are exact ids."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(vocabulary)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Whole words alone: otherwise "30" would be a 3 and the token of padding.
    pad, end = (AddedToken(word, single_word=True, special=True) for word in ("0", str(vocabulary - 1)))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, eos_token=end)
    tokenizer.padding_side = "left"
    return tokenizer


def common(folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What all trainers are told alike."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": arguments.batch,
        "max_steps": arguments.steps + arguments.warm,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "logging_strategy": "no",
        **(
            {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
            if arguments.save
            else {"save_strategy": "no"}
        ),
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": arguments.precision == "bfloat16",
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
    }


def build(case: str, model: Any, rows: list[dict[str, Any]], folder: str, arguments: argparse.Namespace) -> Any:
    """The trainer, its data in place."""
    import trl  # pyright: ignore[reportMissingImports] - of another interpreter
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification

    options = common(folder, arguments)
    tokenizer = word_tokenizer(model.config.vocab_size)
    dataset = Dataset.from_list(rows)

    def kept(kind: type[Any]) -> type[Any]:
        return type(kind.__name__, (kind,), {"_prepare_dataset": lambda _, given, *__, **___: given})

    if case in MODES:
        config = trl.SFTConfig(max_length=256 if case == "sft-packed" else None, **MODES[case], **options)
        trainer = trl.SFTTrainer if case == "sft-packed" else kept(trl.SFTTrainer)
        adapters = None if arguments.lora is None else adapters_of(arguments.lora)
        return trainer(model, config, train_dataset=dataset, processing_class=tokenizer, peft_config=adapters)
    if case == "reward":
        changed = {**model.config.to_dict(), "num_labels": 1, "pad_token_id": 0}
        scorer = AutoModelForSequenceClassification.from_config(type(model.config).from_dict(changed))
        scorer.base_model.load_state_dict(model.base_model.state_dict())
        config = trl.RewardConfig(max_length=None, **options)
        return kept(trl.RewardTrainer)(scorer, config, train_dataset=dataset, processing_class=tokenizer)
    algorithm, cached = case.removesuffix("-cached"), case.endswith("-cached")
    if algorithm in ("dpo", "ipo"):
        options["precompute_ref_log_probs"] = cached
        config = trl.DPOConfig(beta=0.1, loss_type=["ipo" if case == "ipo" else "sigmoid"], max_length=None, **options)
        trainer = kept(trl.DPOTrainer)
    elif algorithm == "kto":
        config = trl.KTOConfig(beta=0.1, max_length=None, precompute_ref_log_probs=cached, **options)
        trainer = kept(trl.KTOTrainer)
    else:
        texts = Dataset.from_list([{"prompt": " ".join(map(str, row["prompt_ids"]))} for row in rows])
        if tokenizer(list(texts["prompt"]))["input_ids"] != [row["prompt_ids"] for row in rows]:
            raise RuntimeError("the prompts' text is not their token ids")
        options |= {"per_device_train_batch_size": arguments.batch * arguments.completions, "learning_rate": 1e-5}
        shortest = {"generation_kwargs": {"min_new_tokens": arguments.tokens}}
        options |= vllm_options(rows, arguments) if arguments.vllm else shortest
        config = trl.GRPOConfig(
            num_generations=arguments.completions,
            max_completion_length=arguments.tokens,
            temperature=1.0,
            top_k=0,
            beta=0.0,
            shuffle_dataset=False,
            **options,
        )

        def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
            return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

        return trl.GRPOTrainer(model, even_share, config, train_dataset=texts, processing_class=tokenizer)
    reference = copy.deepcopy(model)
    return trainer(model, reference, config, train_dataset=dataset, processing_class=tokenizer)


def adapters_of(rank: int) -> Any:
    """Of every linear layer but the output, scaled as rollout scales them by default."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def vllm_options(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Generation by vLLM within this process, on all of its threads.

    On a CPU vLLM packs weights for oneDNN when it loads them and drops its own, so TRL cannot replace them after a
    step: without oneDNN the engine reads the weights themselves, as rollout's does. No pass corrects for the engine's
    arithmetic on either side.
    """
    import vllm._custom_ops
    from trl.generation import vllm_generation  # pyright: ignore[reportMissingImports] - of another interpreter

    vllm._custom_ops._supports_onednn = False
    if arguments.vllm == "eager":
        vllm_generation.LLM = functools.partial(vllm_generation.LLM, enforce_eager=True)
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": max(len(row["prompt_ids"]) for row in rows) + arguments.tokens,
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_importance_sampling_correction": False,
    }


class HandOver:
    """Seconds of each time that a trainer gives its weights to vLLM; the first one, before any step, does not count."""

    def __init__(self, trainer: Any) -> None:
        self.seconds: list[float] = []
        self._send = trainer.vllm_generation.sync_weights
        trainer.vllm_generation.sync_weights = self

    def __call__(self) -> None:
        started = time.perf_counter()
        self._send()
        self.seconds.append(time.perf_counter() - started)

    def median(self) -> float:
        return statistics.median(self.seconds[1:])


def num_tokens(row: dict[str, Any], completions: int, tokens: int) -> int:
    """Real tokens of a row, counted as ``cases.num_tokens`` does; of a prompt alone, with its completions."""
    if "input_ids" in row:
        return len(row["input_ids"])
    answers = [row[key] for key in ("chosen_ids", "rejected_ids", "completion_ids") if key in row]
    prompt = len(row.get("prompt_ids", ()))
    return sum(prompt + len(answer) for answer in answers) if answers else completions * (prompt + tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm", type=int, default=2, help="steps before them that do not count")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--lora", type=int, help="sft: rank of adapters, which are then what is trained")
    parser.add_argument(
        "--vllm", choices=("compiled", "eager"), help="grpo: it generates, within this process; TRL's is compiled"
    )
    parser.add_argument(
        "--save", action="store_true", help="the trainer's state after each step, as it does by default"
    )
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from transformers import AutoModelForCausalLM

    rows = [json.loads(line) for line in arguments.work.read_text(encoding="utf-8").splitlines()]
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32")
    watch = Stopwatch(arguments.warm)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = folder
        trainer = build(arguments.case, model, rows, folder, arguments)
        trainer.add_callback(watch.callback())
        handed = HandOver(trainer) if arguments.vllm else None
        trainer.train()
    each = sum(num_tokens(row, arguments.completions, arguments.tokens) for row in rows) / len(rows)
    seconds, processor = watch.of_steps(0), watch.of_steps(1)
    done = each * arguments.batch * len(seconds)
    found = {
        "step_ms": 1e3 * statistics.median(seconds),
        "tokens_per_second": done / sum(seconds),
        "tokens_per_processor_second": done / sum(processor),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if handed is not None:
        found["hand_over_seconds"] = handed.median()
    arguments.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
