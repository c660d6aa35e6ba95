"""The report of a nightly run: curves as PNG and one page with everything a person asks in the morning."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollout_core.base.ids import ContentId
from rollout_core.data.samples import decode_completions_blob, decode_samples
from rollout_core.inference.folders import LocalFolder
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import EvalReport
from rollout_core.runs.samples import shown_prompt
from tasks.runtime import connections
from tasks.runtime.journal import Outcome, StageEntry
from tasks.runtime.report import PAGE, Curve, capitalized, evidence_list, page, picture, shown_curve, stages_section
from tasks.runtime.stage import retry

PROGRESS_PNG = "progress.png"
SHOWN_SAMPLES = 8


@dataclass(frozen=True)
class SampleComparison:
    """A held-out prompt and what each model made of it."""

    prompt: str
    completions: tuple[str, ...]
    rewards: tuple[float | None, ...]
    """None where a completion has no score."""


@dataclass(frozen=True)
class Progress:
    """How training after SFT went: a curve, and others that explain it."""

    curve: Curve
    temperature: float | None = None
    """At which the completions behind the curve were drawn, where it is a reward on the scale of the held-out one; that
    is then marked in its picture."""
    others: Sequence[Curve] = ()


@dataclass(frozen=True)
class Report:
    """What a nightly run has to say."""

    name: str
    held_out: Mapping[str, float]
    """Mean held-out reward by moment, in order."""
    held_out_temperature: float
    """At which held-out completions were drawn."""
    progress: Progress
    sft_losses: Sequence[float]
    promotion: str
    promoted: bool
    model: ContentId
    stages: Sequence[StageEntry]
    samples: Sequence[SampleComparison]
    evidence: Sequence[str] = ()
    """Lines on what the promotion was decided by."""
    precision: Mapping[str, str | None] = field(default_factory=dict)
    """Of the weights behind a figure of ``held_out`` and of their engine, by moment; None where nothing is known."""


def compare_samples(objects: ObjectStore, *reports: EvalReport) -> list[SampleComparison]:
    """A few held-out prompts with what each model made of them, those first whose reward changed."""

    def read(content: ContentId) -> bytes:
        return retry(lambda: objects.get_bytes(content))

    samples = decode_samples(read(reports[0].samples))
    texts = [[row.text for row in decode_completions_blob(read(report.completions))] for report in reports]
    scores: list[list[float | None]] = [json.loads(read(report.scores)) for report in reports]

    def fall(row: int) -> float:
        before, after = scores[0][row], scores[-1][row]
        return 0.0 if before is None or after is None else before - after

    order = sorted(range(len(samples)), key=fall)
    half = SHOWN_SAMPLES // 2
    chosen = dict.fromkeys([*order[:half], *range(min(half, len(samples)))])
    return [
        SampleComparison(
            prompt=shown_prompt(samples[row].prompt),
            completions=tuple(text[row] for text in texts),
            rewards=tuple(score[row] for score in scores),
        )
        for row in chosen
    ]


def outcome_of(report: Report, folder: Path) -> Outcome:
    """What the run's summary says of a report, which is in ``folder``."""
    return Outcome(
        facts={"checkpoint": report.model, "report": str(folder)},
        held_out=report.held_out,
        promoted=report.promoted,
        reason=report.promotion,
        pictures=shown_curve(connections.objects(), report.name, report.progress.curve),
    )


def write_report(report: Report, folder: Path, objects: ObjectStore | None = None) -> Path:
    """Write page and curves into ``folder`` and return it. ``objects`` as of `picture`."""
    folder.mkdir(parents=True, exist_ok=True)
    curve, temperature = report.progress.curve, report.progress.temperature
    marks = report.held_out if temperature is not None else {}
    drawn = "" if temperature is None else f", completions drawn at temperature {temperature:g}"
    named = {
        f"held out {moment} (temperature {report.held_out_temperature:g}): {value:.3f}": value
        for moment, value in marks.items()
    }
    title = f"{capitalized(curve.what)} per {curve.x_label}{drawn}"
    files = {PROGRESS_PNG: picture(objects, curve, title, named)}
    for other in _others(report):
        files[other.file_name] = picture(objects, other, f"{capitalized(other.what)} per {other.x_label}")
    files[PAGE] = _page(report).encode()
    for name, data in files.items():
        LocalFolder(folder).replace(name, [data])
    return folder


def _others(report: Report) -> list[Curve]:
    return [*report.progress.others, Curve("SFT loss", report.sft_losses, "optimizer step")]


def _page(report: Report) -> str:
    moments = "".join(
        f'<div class="figure"><b>{value:.3f}</b><span>held-out reward {html.escape(moment)}'
        + (f"<br>{html.escape(precision)}" if (precision := report.precision.get(moment)) else "")
        + "</span></div>"
        for moment, value in report.held_out.items()
    )
    curves = "\n".join(
        f'<img src="{file}" alt="{html.escape(what)}">'
        for file, what in [
            (PROGRESS_PNG, report.progress.curve.what),
            *((other.file_name, other.what) for other in _others(report)),
        ]
    )
    verdict = "promoted" if report.promoted else "not promoted"
    body = f"""<p>Checkpoint <code>{report.model}</code>: <b>{verdict}</b> ({html.escape(report.promotion)}).</p>
{evidence_list(report.evidence)}
<div class="figures">{moments}</div>
{_temperatures(report)}
<div class="curves">{curves}</div>
<h2>Held-out prompts, before and after</h2>
{_samples_table(report)}
{stages_section(report.stages)}"""
    return page(report.name, body)


def _temperatures(report: Report) -> str:
    """Why the curve of the training reward and its marks are not one series."""
    temperature = report.progress.temperature
    if temperature is None or temperature == report.held_out_temperature:
        return ""
    return (
        f"<p>Training reward is that of completions drawn at temperature {temperature:g}, held-out reward that of "
        f"completions of other prompts drawn at temperature {report.held_out_temperature:g}. Compare each with itself "
        "over time, not the one with the other.</p>"
    )


def _samples_table(report: Report) -> str:
    head = "".join(f"<th>{html.escape(moment)}</th>" for moment in report.held_out)
    rows = ""
    for sample in report.samples:
        cells = "".join(
            f'<td class="{"right" if (reward or 0) > 0 else "wrong"}"><code>{html.escape(text) or "&nbsp;"}</code> '
            f"({'no score' if reward is None else f'{reward:g}'})</td>"
            for text, reward in zip(sample.completions, sample.rewards, strict=True)
        )
        rows += f"<tr><td><code>{html.escape(sample.prompt)}</code></td>{cells}</tr>\n"
    return f"<table><tr><th>prompt</th>{head}</tr>\n{rows}</table>"
