"""The one stage that the pipeline does not have: choosing."""

from __future__ import annotations

from rollout_core.data import SftRow, decode_completions_blob, decode_samples, to_jsonl
from rollout_core.objects import BlobId, Completions, Record
from tasks.runtime.stage import current_stage, stage


class Chosen(Record):
    """The best completion of each prompt. Records are small: what is large lies in the object store, by content id."""

    rows: BlobId
    """JSONL of `SftRow`."""
    num_rows: int
    mean_score: float
    """Of the chosen ones."""
    mean_score_of_all: float


def score(completion: str) -> float:
    """Share of characters that are digits or blanks."""
    return sum(character in "0123456789 " for character in completion) / max(1, len(completion))


@stage(version=1)  # raise it when `score` changes: the key holds the stage's inputs and version, not its source text
def choose_best(completions: Completions, num_samples: int, *, label: str = "") -> Chosen:
    """Keep the best of each ``num_samples`` completions, which stand side by side."""
    objects = current_stage().objects
    samples = decode_samples(objects.get_bytes(completions.samples))
    texts = [found.text for found in decode_completions_blob(objects.get_bytes(completions.completions))]
    scores = [score(text) for text in texts]
    rows, best_scores = [], []
    for first in range(0, len(samples), num_samples):
        best = max(range(first, first + num_samples), key=lambda number: scores[number])
        best_scores.append(scores[best])
        rows.append(SftRow(prompt=samples[best].prompt, completion=texts[best]))
    return Chosen(
        rows=objects.put_bytes(to_jsonl(rows)),
        num_rows=len(rows),
        mean_score=sum(best_scores) / len(best_scores),
        mean_score_of_all=sum(scores) / len(scores),
    )
