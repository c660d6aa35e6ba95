"""Tiny updates as content ids, for processes of other machines: ``python portable_child.py FOLDER [NAME...]``.

NAME is one of `algorithms`, or by default each of them; those that learn on policy do so from made-up completions.
``engine`` is one PPO iteration on what vLLM generates. The model is made here as well, so nothing comes from another
process. Prints a JSON object of content ids by name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_core.base.determinism import prepare_environment
from rollout_core.base.ids import ContentId, canonical_json, hash_bytes

if TYPE_CHECKING:
    from rollout_core.algorithms.context import UpdateContext
    from rollout_core.objects.records import Checkpoint


def model(folder: Path, *, seed: int = 1) -> Path:
    """Heads of 32: vLLM has no CPU kernels for smaller ones."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    from make_tiny import make_model

    made = folder / f"model-{seed}"
    if not made.exists():
        make_model(made, hidden_size=128, num_layers=2, seed=seed)
    return made


def algorithms(folder: Path) -> dict[str, Callable[[UpdateContext, Path], Checkpoint]]:
    """An update of each algorithm and each of its losses. ``folder`` is for a teacher."""
    from updates import UPDATES, grpo, preference_update

    from rollout_core.config import Distillation, ModelSource

    def of_pairs(place: UpdateContext, model: Path, **changes: Any) -> Checkpoint:
        return preference_update("dpo", model, place, **changes)

    def gkd(place: UpdateContext, policy: Path) -> Checkpoint:
        distillation = Distillation(teacher=ModelSource(uri="x"), beta=0.5)
        return grpo(place, policy, teacher=model(folder, seed=2), loss="gkd", distillation=distillation, kl_coef=0.0)

    return {
        **{name: UPDATES[name] for name in ("sft", "rm", "dpo", "ipo", "kto", "orpo", "ppo", "grpo")},
        "simpo": partial(of_pairs, loss="simpo", beta=2.0, gamma=1.0),
        "dapo": partial(grpo, loss_type="dapo", clip_high=0.28, kl_coef=0.0),
        "gspo": partial(grpo, loss="gspo", clip_low=3e-4, clip_high=4e-4, kl_coef=0.0),
        "cispo": partial(grpo, loss="cispo", clip_low=1.0, clip_high=4.0, kl_coef=0.0),
        "reinforce": partial(grpo, loss="reinforce", baseline="leave_one_out", epochs=1, kl_coef=0.0),
        "online_dpo": partial(grpo, loss="online_dpo", minibatch_size=2, kl_coef=0.0),
        "gkd": gkd,
    }


def engine(folder: Path) -> dict[str, ContentId]:
    """What an engine generates, and the model that one PPO iteration on it ends in."""
    from updates import PPO_SETTINGS, update_context

    from rollout_core.algorithms.on_policy_updates import ppo_update
    from rollout_core.config import SamplingParams, VLLMBackend
    from rollout_core.data.samples import Sample, encode_completion, encode_samples
    from rollout_core.inference.backend import ModelRef, Request
    from rollout_core.inference.vllm_backend import VLLMEngine, trainer_logprobs
    from rollout_core.models.pretrained import load_tokenizer
    from rollout_core.objects.records import Scores

    place, files = update_context(folder / "engine", num_threads=2), model(folder)
    start = place.objects.put_tree(files)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    size = len(load_tokenizer(files))

    def prompt(number: int) -> list[int]:
        return [(31 * number + 7 * place) % size for place in range(5 + 25 * number)]

    samples = [Sample(hash_bytes(b"%d" % number), "prompt", prompt(number), 0, None, {}) for number in range(8)]
    backend_model = ModelRef(start, files)
    backend = VLLMEngine(VLLMBackend(max_model_len=256), backend_model)
    try:
        made = backend.generate([Request(f"{s.id}", s.prompt_token_ids, params, seed=i) for i, s in enumerate(samples)])
    finally:
        backend.close()
    by_key = {completion.key: completion for completion in made}
    completions = b"".join(encode_completion(by_key[sample.id]) for sample in samples)
    scores = Scores(
        scores=place.objects.put_bytes(canonical_json([float(number % 2) for number in range(8)])),
        completions=place.objects.put_bytes(completions),
        num_samples=8,
        mean=0.5,
        std=0.5,
    )
    trained = ppo_update(
        start, None, start, scores, place.objects.put_bytes(encode_samples(samples)), PPO_SETTINGS, place
    )
    worst = max(
        abs(told - own)
        for sample in samples
        for told, own in zip(
            by_key[sample.id].logprobs,
            trainer_logprobs(backend_model, sample.prompt_token_ids, by_key[sample.id].token_ids),
            strict=True,
        )
    )
    assert worst < 1e-4, worst
    return {"completions": scores.completions, "engine": trained.train_state}


def main() -> None:
    prepare_environment()
    from updates import update_context

    folder, names = Path(sys.argv[1]), sys.argv[2:]
    updates = algorithms(folder)
    found: dict[str, ContentId] = {}
    for name in names or updates:
        if name == "engine":
            found |= engine(folder)
        else:
            found[name] = updates[name](update_context(folder / name, num_threads=2), model(folder)).train_state
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
