"""The flow: stages of the pipeline and of this project, in a plain loop."""

from __future__ import annotations

from prefect import flow

from best_of_n.stages import choose_best
from rollout_core.config import (
    BudgetConfig,
    JsonlDataset,
    ModelSource,
    OptimizerConfig,
    SamplingParams,
    SFTSettings,
    TransformersBackend,
)
from tasks import batch_inference, enqueue_prompts, import_model, import_prompts, sft_update

NUM_SAMPLES = 4
SAMPLING = SamplingParams(max_tokens=14)


@flow(name="best-of-n", persist_result=False)
def best_of_n(model: str, prompts: str, rounds: int = 2, prompts_per_round: int = 16) -> list[float]:
    """Mean score of each round's completions, drawn before the round's training."""
    policy = import_model(ModelSource(uri=model)).model
    rows = import_prompts(JsonlDataset(path=prompts)).data
    settings = SFTSettings(
        dataset=JsonlDataset(path=prompts),  # for the record; what is trained on is given by content id below
        optimizer=OptimizerConfig(lr=1e-3),
        minibatch_size=8,
        budget=BudgetConfig(epochs=2),
    )
    scores = []
    for number in range(rounds):
        label = f"round {number + 1}"
        prompt_set = enqueue_prompts(
            rows,
            policy,
            SAMPLING,
            first=number * prompts_per_round,
            count=prompts_per_round,
            samples_per_prompt=NUM_SAMPLES,
            label=label,
        )
        completions = batch_inference(prompt_set, SAMPLING, TransformersBackend(), label=label)
        chosen = choose_best(completions, NUM_SAMPLES, label=label)
        policy = sft_update(policy, chosen.rows, settings, seed=number, label=label).model
        scores.append(chosen.mean_score_of_all)
        print(f"{label}: mean score {chosen.mean_score_of_all:.3f}, of the best {chosen.mean_score:.3f}")
    print(f"model {policy}")
    return scores
