"""Lineage of a checkpoint behind which are a million samples: its stages, every sample, and who saw one row.

The samples are those of ten iterations, with completions of 32 tokens; each question is the command as a user types
it, a process of its own. ``start`` is a command that asks for nothing, which is a part of each.

Run: python benchmarks/lineage.py [--quick]
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from harness import own_place, quick_asked
from rich.console import Console
from rich.table import Table

from rollout_core.base.ids import ContentId, content_id, hash_bytes
from rollout_core.config import SamplingParams
from rollout_core.data.datasets import PromptRow, to_jsonl
from rollout_core.data.samples import Completion, encode_completion, encode_samples, identify, identities_of
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import Lineage, record_lineage

ITERATIONS = 10
TOKENS = 32


def main() -> None:
    num_samples = 10_000 if quick_asked(__doc__) else 1_000_000
    with own_place() as place:
        url = f"file://{place / 'objects'}"
        with ProcessPoolExecutor(1) as other:  # a command's peak begins with that of the process that starts it
            data, model, num_bytes = other.submit(
                history, ObjectStore.from_url(url), num_samples // ITERATIONS
            ).result()
        questions = {
            "start": ("--version",),
            "what made it, as text": ("lineage", model),
            "what came of the prompts": ("lineage", data, "--down"),
            "which checkpoints saw row 17": ("lineage", data, "--row", "17"),
            "every sample behind it": ("lineage", model, "--samples"),
        }
        table = Table(title=f"{num_samples:,} samples in {num_bytes / 1e6:,.0f} MB of {ITERATIONS} iterations")
        for column in ("question", "seconds", "peak MiB", "answer, MB", "lines"):
            table.add_column(column, justify="left" if column == "question" else "right")
        for question, arguments in questions.items():
            table.add_row(question, *asked(arguments, url, place))
        Console().print(table)


def history(objects: ObjectStore, per_iteration: int) -> tuple[ContentId, ContentId, int]:
    """Prompts, the last of the models that learnt from them, and how many bytes all their samples have."""
    draw, num_bytes, model = random.Random(3), 0, hash_bytes(b"base")
    rows = [PromptRow(prompt=f"prompt {number}", extras={"answer": str(number)}) for number in range(per_iteration)]
    data, params = objects.put_bytes(to_jsonl(rows)), SamplingParams(max_tokens=TOKENS)
    now = datetime(2026, 1, 1, tzinfo=UTC)

    def made(stage: str, inputs: dict[str, Any], *outputs: ContentId) -> None:
        nonlocal now
        now += timedelta(seconds=1)
        key = content_id("benchmark/1", [stage, inputs])
        record_lineage(
            objects,
            Lineage(stage=stage, version=1, key=key, inputs=inputs, outputs=outputs, created_at=now, software={}),
        )

    for number in range(ITERATIONS):
        prompts = [list(range(8))] * per_iteration
        identities = identities_of(model, params, None)
        samples = identify(rows, prompts, [0] * per_iteration, identities, samples_per_prompt=1)
        texts = [encode_samples(samples), b"".join(encode_completion(drawn(one.id, draw)) for one in samples)]
        num_bytes += sum(map(len, texts))
        sampled, completed = map(objects.put_bytes, texts)
        scores = objects.put_bytes(("[" + ",".join(str(draw.randrange(2)) for _ in samples) + "]").encode())
        about = {"label": f"iteration {number + 1}"}
        made("enqueue_prompts", {"prompts": data, "model": model, **about}, sampled)
        made("batch_inference", {"prompts": {"samples": sampled}, **about}, completed, sampled)
        made("score_rewards", {"completions": completed, **about}, scores, completed)
        learnt = {"model": model, "samples": sampled, "scores": {"scores": scores, "completions": completed}, **about}
        model = hash_bytes(f"model {number}".encode())
        made("grpo_update", learnt, model)
    return data, model, num_bytes


def drawn(sample: str, draw: random.Random) -> Completion:
    tokens = [draw.randrange(32_000) for _ in range(TOKENS)]
    return Completion(sample, tokens, [-draw.random() for _ in tokens], "some text of that length " * 4, "length")


def asked(arguments: tuple[str, ...], url: str, place: Path) -> tuple[str, ...]:
    """Seconds, peak memory, size and lines of an answer."""
    command = [sys.executable, "-c", "from deployments.cli import main; main()", *arguments]
    answer, began = place / "answer", time.perf_counter()
    with answer.open("wb") as out:
        running = subprocess.Popen(command, stdout=out, env={**os.environ, "ROLLOUT_STORAGE": url})
        _, status, usage = os.wait4(running.pid, 0)
    if status:
        raise SystemExit(f"{arguments} ended with {status}")
    seconds = time.perf_counter() - began
    with answer.open("rb") as text:
        lines = sum(1 for _ in text)
    return f"{seconds:.1f}", f"{usage.ru_maxrss / 1024:,.0f}", f"{answer.stat().st_size / 1e6:,.1f}", f"{lines:,}"


if __name__ == "__main__":
    main()
