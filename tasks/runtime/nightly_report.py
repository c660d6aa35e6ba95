"""The report of a nightly run: curves as PNG and one page with everything a person asks in the morning."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollout_core.base.ids import ContentId
from rollout_core.config import BackendConfig
from rollout_core.data.samples import decode_completions_blob, decode_samples
from rollout_core.inference.folders import LocalFolder
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Checkpoint, EvalReport
from rollout_core.promotion.decision import precision_of
from rollout_core.promotion.evidence import Promotion
from rollout_core.runs.run_samples import shown_prompt
from tasks.runtime import connections
from tasks.runtime.journal import Outcome, StageEntry
from tasks.runtime.report import (
    PAGE,
    Curve,
    capitalized,
    curves_of_iterations,
    figure_of_steps,
    page,
    picture,
    shown_curve,
    stages_section,
    verdict,
)
from tasks.runtime.stage import retry
from tasks.runtime.suite_report import Reports, suite_curves, suite_facts, suites_section

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
class Learned:
    """What came of the part after SFT."""

    algorithm: str
    """As people write it."""
    checkpoints: Sequence[Checkpoint]
    """Of each iteration; of DPO one."""
    rewards: Sequence[float] = ()
    """Mean reward, or score of the reward model, of each iteration."""
    temperature: float | None = None
    """At which the completions of the iterations were drawn."""
    reward_model: Checkpoint | None = None
    selected: Checkpoint | None = None
    """Of these the outcome, where that is not the last one."""

    @property
    def outcome(self) -> Checkpoint:
        """What learning came to."""
        return self.selected or self.checkpoints[-1]


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
    evaluations: Mapping[str, EvalReport]
    """Of held-out prompts by moment, in order, the trained model last."""
    temperature: float
    """At which held-out completions were drawn."""
    backend: BackendConfig
    """That drew them."""
    progress: Progress
    promotion: Promotion
    stages: Sequence[StageEntry]
    suites: Reports = field(default_factory=dict)
    """What the suites came to, also the latest model."""
    fell: Sequence[str] = ()
    """Suites that the trained model is worse on, for people."""
    decided: Mapping[str, str] = field(default_factory=dict)
    """What suites decided about training, for people."""

    @property
    def held_out(self) -> dict[str, float]:
        """Mean held-out reward by moment."""
        return {moment: evaluation.mean_reward for moment, evaluation in self.evaluations.items()}


def progress_of(objects: ObjectStore, tuned: Checkpoint, learned: Learned) -> Progress:
    """The curves of the part after SFT, and the loss of that, which came to ``tuned``."""
    tuning = Curve("SFT loss", figure_of_steps(objects, tuned, "loss"), "optimizer step")
    if learned.algorithm == "DPO":
        margins, accuracies, losses = (
            Curve(what, figure_of_steps(objects, learned.checkpoints[-1], name), "DPO step")
            for what, name in (
                ("margin of chosen over rejected", "rewards/margins"),
                ("accuracy of the implicit reward", "rewards/accuracies"),
                ("DPO loss", "loss"),
            )
        )
        return Progress(margins, others=(accuracies, losses, tuning))
    x_label, rater = f"{learned.algorithm} iteration", learned.reward_model
    others = [*curves_of_iterations(objects, learned.checkpoints, x_label), tuning]
    if rater is None:
        return Progress(Curve("mean training reward", learned.rewards, x_label), learned.temperature, others)
    accuracies = figure_of_steps(objects, rater, "rewards/accuracies")
    curve = Curve("mean score of the reward model", learned.rewards, x_label)
    return Progress(curve, others=[Curve("accuracy of the reward model", accuracies, "RM step"), *others])


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
        facts={
            "checkpoint": report.promotion.model,
            "report": str(folder),
            **suite_facts(report.suites),
            **report.decided,
            **({"fell": "; ".join(report.fell)} if report.fell else {}),
        },
        held_out=report.held_out,
        promoted=report.promotion.promoted,
        reason=report.promotion.reason,
        pictures={
            title: png
            for curve in (report.progress.curve, *suite_curves(report.suites))
            for title, png in shown_curve(connections.objects(), report.name, curve).items()
        },
    )


def write_report(report: Report, folder: Path, objects: ObjectStore) -> Path:
    """Write page and curves into ``folder`` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    curve, temperature = report.progress.curve, report.progress.temperature
    marks = report.held_out if temperature is not None else {}
    drawn = "" if temperature is None else f", completions drawn at temperature {temperature:g}"
    named = {
        f"held out {moment} (temperature {report.temperature:g}): {value:.3f}": value for moment, value in marks.items()
    }
    title = f"{capitalized(curve.what)} per {curve.x_label}{drawn}"
    files = {PROGRESS_PNG: picture(objects, curve, title, named)}
    for other in report.progress.others:
        files[other.file_name] = picture(objects, other, f"{capitalized(other.what)} per {other.x_label}")
    for curve in suite_curves(report.suites):
        files[curve.file_name] = picture(objects, curve, f"{capitalized(curve.what)} with its interval")
    files[PAGE] = _page(report, objects).encode()
    for name, data in files.items():
        LocalFolder(folder).replace(name, [data])
    return folder


def _page(report: Report, objects: ObjectStore) -> str:
    moments = "".join(
        f'<div class="figure"><b>{evaluation.mean_reward:.3f}</b><span>held-out reward {html.escape(moment)}'
        + (f"<br>{html.escape(precision)}" if (precision := _precision(report, objects, evaluation.model)) else "")
        + "</span></div>"
        for moment, evaluation in report.evaluations.items()
    )
    curves = "\n".join(
        f'<img src="{file}" alt="{html.escape(what)}">'
        for file, what in [
            (PROGRESS_PNG, report.progress.curve.what),
            *((other.file_name, other.what) for other in (*report.progress.others, *suite_curves(report.suites))),
        ]
    )
    body = f"""{verdict(report.promotion, f"Checkpoint <code>{report.promotion.model}</code>: ")}
<div class="figures">{moments}</div>
{_temperatures(report)}
<div class="curves">{curves}</div>
{suites_section(report.suites, report.fell, report.decided)}
<h2>Held-out prompts, before and after</h2>
{_samples_table(report, objects)}
{stages_section(report.stages)}"""
    return page(report.name, body)


def _temperatures(report: Report) -> str:
    """Why the curve of the training reward and its marks are not one series."""
    temperature = report.progress.temperature
    if temperature is None or temperature == report.temperature:
        return ""
    return (
        f"<p>Training reward is that of completions drawn at temperature {temperature:g}, held-out reward that of "
        f"completions of other prompts drawn at temperature {report.temperature:g}. Compare each with itself "
        "over time, not the one with the other.</p>"
    )


def _precision(report: Report, objects: ObjectStore, model: ContentId) -> str | None:
    return retry(lambda: precision_of(objects, model, report.backend))


def _samples_table(report: Report, objects: ObjectStore) -> str:
    head = "".join(f"<th>{html.escape(moment)}</th>" for moment in report.held_out)
    rows = ""
    for sample in compare_samples(objects, *report.evaluations.values()):
        cells = "".join(
            f'<td class="{"right" if (reward or 0) > 0 else "wrong"}"><code>{html.escape(text) or "&nbsp;"}</code> '
            f"({'no score' if reward is None else f'{reward:g}'})</td>"
            for text, reward in zip(sample.completions, sample.rewards, strict=True)
        )
        rows += f"<tr><td><code>{html.escape(sample.prompt)}</code></td>{cells}</tr>\n"
    return f"<table><tr><th>prompt</th>{head}</tr>\n{rows}</table>"
