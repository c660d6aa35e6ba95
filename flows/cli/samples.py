"""`rollout samples`: prompts, completions and rewards of a run."""

from __future__ import annotations

import itertools
import json
import math
from typing import Annotated

import typer

from flows.cli.common import Debug, one_line_errors
from flows.cli.results import RunName, shortened, visible
from flows.cli.storage import StoragePath
from rollout_core.runs.browsing import SampleBrowser, SampleView, Search, find_list, sample_lists
from rollout_core.runs.run_records import RunRecords
from rollout_core.runs.tokens import TokenTexts
from tasks.runtime.prefect_server import object_store

_SAMPLES = 20


def samples(
    run: RunName = "latest",
    label: Annotated[
        str | None,
        typer.Option("--label", help="Which, such as 'before' or 'iteration 3'; default: the last held out."),
    ] = None,
    worse_than: Annotated[float | None, typer.Option("--worse-than", help="Only rewards below this.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="Only where prompt or completion contains this.")] = None,
    start: Annotated[int, typer.Option("--from", min=0, help="Begin with the sample of this number.")] = 0,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help=f"At most this many; default: {_SAMPLES}, with --json all.")
    ] = None,
    storage: StoragePath = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each.")] = False,
    debug: Debug = False,
) -> None:
    """Print samples of a run, also of a batch of millions: prompt, completion, reward."""
    with one_line_errors(debug):
        limit = limit or (None if as_json else _SAMPLES)
        with object_store(storage) as objects:
            records = RunRecords(objects)
            _, detail = records.detail(records.find(run))
            chosen = find_list(sample_lists(objects, detail), detail, label)
            if not as_json:
                scored = "without rewards" if chosen.mean is None else f"mean reward {chosen.mean:.4f}"
                typer.echo(f"{visible(chosen.label)}: {chosen.num_samples:,} samples, {scored}")
            texts, found = TokenTexts(objects), SampleBrowser(objects, kept_bytes=0)
            rows = found.matching(chosen, Search(text or "", worse_than), start=start)
            for row in itertools.islice(rows, limit):
                _print_sample(texts.readable(chosen.model, row), as_json)
            following = None if as_json else next(rows, None)
        if following is not None:
            typer.echo(f"more fit: --from {following.number} continues, --limit prints more, --json all")


def _print_sample(row: SampleView, as_json: bool) -> None:
    reward, num_tokens = None if math.isnan(row.reward) else row.reward, len(row.token_ids)
    if as_json:
        shown = {name: getattr(row, name) for name in ("number", "prompt", "completion")}
        shown |= {"reward": reward, "finish_reason": row.finish_reason, "num_tokens": num_tokens}
        typer.echo(json.dumps(shown | ({} if row.error is None else {"error": row.error}), ensure_ascii=False))
        return
    typer.echo(
        f"{row.number:>6}  {'-' if reward is None else f'{reward:.4g}'}  {row.finish_reason}, {num_tokens} tokens"
    )
    typer.echo(f"        {shortened(row.prompt)}")
    typer.echo(f"        {shortened(row.completion if row.error is None else row.error)}")
