"""Completions with prompts' beginnings cached and without, up to the longest context in which that may not matter.

Prints JSON: requests, those with a hit, those whose tokens or log-probabilities differ. Run by
`tests/inference/test_vllm_prefixes.py`: python prefix_child.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from rollout_core.base.determinism import hold_numerics, is_portable

    hold_numerics()
    from rollout_core.config import SamplingParams, VLLMBackend
    from rollout_core.data.samples import encode_completion
    from rollout_core.inference.backend import ModelRef, Request
    from rollout_core.inference.vllm_backend import VLLMEngine
    from rollout_core.models.pretrained import load_tokenizer
    from rollout_core.objects.trees import files_of, identify

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples"))
    from make_tiny import make_model  # pyright: ignore[reportMissingImports]

    folder = Path(sys.argv[1]) / "model"
    make_model(folder, hidden_size=128, num_layers=2, seed=1)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 4096}))
    model = ModelRef(identify(files_of(folder)).id, folder)
    tokenizer = load_tokenizer(folder)
    import torch

    from rollout_core.inference.vllm_attention import longest_context, one_tile

    longest = longest_context(32) if is_portable() else one_tile(32, torch.cpu.get_capabilities()["l2_cache_size"])
    longest = min(longest, 1024)
    text = "sort 3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3 2 3 8 4 6 2 6 4 3 3 8 3 2 7 9 5 = " * 40
    whole = tokenizer(text)["input_ids"]
    params = SamplingParams(temperature=1.0, max_tokens=16)
    lengths = [*range(40, longest - 64, 24), *range(longest - 63, longest - 15, 4)]
    prompts = [[*whole[:length], *whole[number : number + 16]][:length] for number, length in enumerate(lengths)]
    asked = [
        Request(f"r{number}-{sample}", prompt, params, 100 * number + sample)
        for number, prompt in enumerate(prompts)
        for sample in range(3)
    ]
    answers = []
    for caches in (False, None):
        engine = VLLMEngine(VLLMBackend(max_model_len=longest, num_threads=1, enable_prefix_caching=caches), model)
        hits: list[int] = []
        step = engine._llm.llm_engine.step

        def counted(step=step, hits=hits):
            outputs = step()
            hits += [output.num_cached_tokens or 0 for output in outputs if output.finished]
            return outputs

        engine._llm.llm_engine.step = counted
        answers.append([encode_completion(completion) for completion in engine.generate(asked)])
        engine.close()
    differing = sum(one != other for one, other in zip(*answers, strict=True))
    found = {"requests": len(asked), "hits": sum(map(bool, hits)), "differing": differing, "longest": longest}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
