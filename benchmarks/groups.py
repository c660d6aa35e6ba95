"""Drawing groups of completions with prompts' beginnings shared and without: processor time, and whether bits differ.

Two vLLM engines of a thread with the same weights take turns on the same requests, as GRPO makes them: 16 prompts of
the real example (`examples/real/`), 8 completions each, with seeds. The model is that of `make real`, or with
``--quick`` a tiny one. Measured is the processor time of the engine's worker, which other programs change less than
seconds on the wall.

Run: python examples/real/make.py && python benchmarks/groups.py [--quick]
"""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path
from typing import Any

import psutil
from harness import PROJECT, Figures, own_place, quick_asked

PROMPTS, GROUP, TOKENS, LONGEST, ROUNDS = 16, 8, 24, 256, 3
GGUF = PROJECT / "data" / "real" / "model.gguf"


def make_model(folder: Path, *, is_quick: bool) -> None:
    """The model that is asked for, as a folder."""
    if is_quick:
        from examples.make_tiny import make_model as make_tiny_model

        make_tiny_model(folder, hidden_size=128, num_layers=2)
        return
    from rollout_core.models.gguf_reading import read_gguf

    if not GGUF.is_file():
        sys.exit(f"{GGUF} is missing: run python examples/real/make.py")
    folder.mkdir()
    read_gguf(GGUF, folder, "float32")[1]()


def asked_of(tokenizer: Any) -> list[Any]:
    """Groups of requests for sums."""
    from examples.real.make import make_sums
    from rollout_core.base.ids import content_id, seed_of
    from rollout_core.config import SamplingParams
    from rollout_core.inference.backend import Request

    params = SamplingParams(temperature=1.0, max_tokens=TOKENS)
    texts = [f"You are a helpful assistant. What is {text}?" for text, _ in make_sums(PROMPTS, random.Random(0))]
    if tokenizer.chat_template:
        talks = [[{"role": "user", "content": text}] for text in texts]
        texts = [tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) for talk in talks]
    asked = []
    for text in texts:
        for sample in range(GROUP):
            named = content_id("groups/1", [text, sample])
            asked.append(Request(str(named), tokenizer(text)["input_ids"], params, seed_of(named)))
    return asked


def engine_seconds() -> dict[int, float]:
    """Processor time so far of each process of an engine."""
    found = (child for child in psutil.Process().children(recursive=True) if child.name().startswith("VLLM"))
    return {child.pid: sum(child.cpu_times()[:2]) for child in found}


def main() -> None:
    is_quick = quick_asked(__doc__)
    with own_place() as folder:
        make_model(folder / "model", is_quick=is_quick)
        from rollout_core.base.ids import content_id
        from rollout_core.config import VLLMBackend
        from rollout_core.data.samples import encode_completion
        from rollout_core.inference.backend import ModelRef
        from rollout_core.inference.vllm_backend import VLLMEngine
        from rollout_core.models.pretrained import load_tokenizer

        model = ModelRef(content_id("groups/1", "model"), folder / "model")
        asked = asked_of(load_tokenizer(model.folder))
        lengths = [len(request.prompt_token_ids) for request in asked]
        common: dict[str, Any] = {"max_model_len": LONGEST, "max_num_seqs": PROMPTS * GROUP, "num_threads": 1}
        engines = [VLLMEngine(VLLMBackend(enable_prefix_caching=shares, **common), model) for shares in (None, False)]
        for engine in engines:
            engine.generate(asked[:GROUP])  # what an engine only does once
        seconds: list[list[float]] = [[], []]
        differing = 0
        for _ in range(1 if is_quick else ROUNDS):
            drawn = []
            for engine, side in zip(engines, seconds, strict=True):
                if engine is engines[0]:
                    engine._llm.reset_prefix_cache()
                before = engine_seconds()
                drawn.append([encode_completion(completion) for completion in engine.generate(asked)])
                side.append(max(spent - before[process] for process, spent in engine_seconds().items()))
            differing += sum(one != other for one, other in zip(*drawn, strict=True))
        for engine in engines:
            engine.close()
    figures = Figures(f"{PROMPTS} prompts of {min(lengths)} to {max(lengths)} tokens, {GROUP} completions each")
    figures.compare("seconds of the engine's worker; baseline: nothing shared", *seconds, form="{:.1f}")
    figures.add("completions that differ in a bit", str(differing), rounds=len(seconds[0]))
    figures.show(f"The rest are {TOKENS} steps of the completions, {statistics.median(seconds[0]):.1f} s in all.")


if __name__ == "__main__":
    main()
