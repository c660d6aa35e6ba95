"""What the reports of flows share: curves over steps and iterations, the page they stand on, the table of stages."""

from __future__ import annotations

import html
import io
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from rollout_core.base.ids import content_id
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Checkpoint
from rollout_core.promotion.evidence import Promotion
from tasks.runtime.artifacts import draw_curve
from tasks.runtime.journal import StageEntry
from tasks.runtime.stage import retry

PAGE = "index.html"
_PICTURE_REFS = "pictures"
_OF_ITERATIONS = {
    "objective/kl": "KL to the reference, nats a completion",
    "kl": "KL to the reference, nats a token",
    "entropy": "entropy, nats a token",
    "completions/mean_length": "mean completion length, tokens",
    "value_loss": "value loss",
}


@dataclass(frozen=True)
class Curve:
    """Values over 1, 2, 3, ... of ``x_label``."""

    what: str
    """Name and unit, for the y axis."""
    values: Sequence[float]
    x_label: str
    bounds: Sequence[tuple[float, float]] = ()
    """The ends of each value's interval, where they have any."""
    places: Sequence[str] = ()
    """What stands at the x axis instead of 1, 2, 3, ..."""

    @property
    def file_name(self) -> str:
        """Of the picture."""
        return "-".join(self.what.partition(",")[0].lower().split()) + ".png"


def picture(objects: ObjectStore, curve: Curve, title: str, marks: Mapping[str, float] | None = None) -> bytes:
    """PNG of a curve, with ``marks`` as of `draw_curve`; kept in ``objects``, where the same is not drawn twice."""
    # Not as canonical JSON, which has no NaN: losses may be.
    more = [list(curve.bounds), list(curve.places)] if curve.bounds or curve.places else []
    shown = json.dumps([curve.what, list(curve.values), curve.x_label, title, list((marks or {}).items()), *more])
    ref = f"{_PICTURE_REFS}/{content_id('picture/2', [version('matplotlib'), shown])}"
    kept = retry(lambda: objects.cached_bytes(ref))
    if kept is not None:
        return kept
    drawn = io.BytesIO()
    around = {"marks": marks, "bounds": curve.bounds, "places": curve.places}
    draw_curve(drawn, {curve.what: curve.values}, title=title, x_label=curve.x_label, y_label=curve.what, **around)
    retry(lambda: objects.set_ref(ref, objects.put_bytes(drawn.getvalue())))
    return drawn.getvalue()


def shown_curve(objects: ObjectStore, name: str, curve: Curve) -> dict[str, bytes]:
    """The picture of a curve of the run ``name``, by its title, for the run's summary; none of a single value."""
    title = f"{name}: {curve.what}"
    return {title: picture(objects, curve, title)} if len(curve.values) > 1 else {}


def figure_of_steps(objects: ObjectStore, checkpoint: Checkpoint, name: str) -> list[float]:
    """A figure of each optimizer step of an update; of steps that have none, nothing."""
    rows = map(json.loads, retry(lambda: objects.get_bytes(checkpoint.metrics)).splitlines())
    return [row[name] for row in rows if name in row]


def curves_of_iterations(objects: ObjectStore, checkpoints: Sequence[Checkpoint], x_label: str) -> list[Curve]:
    """KL, entropy, length and value loss of PPO or GRPO iterations, each the mean over an iteration's steps."""
    curves = []
    for name, what in _OF_ITERATIONS.items():
        steps = [figure_of_steps(objects, checkpoint, name) for checkpoint in checkpoints]
        if all(steps):
            curves.append(Curve(what, [statistics.fmean(values) for values in steps], x_label))
    return curves


def page(title: str, body: str, *, style: str = "") -> str:
    """An HTML page of its own. ``title`` is a text; ``body`` and ``style`` are taken as they are."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; color: #1c2430; }}
h1 {{ margin-bottom: 0; }} h2 {{ margin-top: 2.2rem; }} code {{ font-size: 13px; }}
.figures {{ display: flex; gap: 1rem; flex-wrap: wrap; margin: 1rem 0; }}
.figure {{ border: 1px solid #d5dbe3; border-radius: 8px; padding: .7rem 1.2rem; }}
.figure b {{ display: block; font-size: 1.7rem; }} .figure span {{ color: #5a6675; }}
.curves {{ display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }} img {{ width: 100%; }}
table {{ border-collapse: collapse; width: 100%; font-size: 14px; }}
th, td {{ text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #e4e8ee; vertical-align: top; }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
.right {{ color: #11713b; }} .wrong {{ color: #a3262c; }} .Cached {{ color: #5a6675; }} .Completed {{ color: #11713b; }}
{style}</style></head><body>
<h1>{html.escape(title)}</h1>
{body}
</body></html>
"""


def verdict(promotion: Promotion, of: str = "") -> str:
    """Whether a model, which ``of`` names as HTML, became the latest, why, and what that was decided by."""
    became = "promoted" if promotion.promoted else "not promoted"
    items = "".join(f"<li>{html.escape(line)}</li>" for line in promotion.lines)
    evidence = f"<p>Evidence:</p><ul>{items}</ul>" if items else ""
    return f"<p>{of}<b>{became}</b> ({html.escape(promotion.reason)}).</p>\n{evidence}"


def stages_section(stages: Sequence[StageEntry]) -> str:
    """The stages of a run, folded."""
    counts = Counter(entry.row()["state"] for entry in stages)
    summary = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    return f"""<h2>Stages</h2>
<details><summary>{len(stages)} stages: {summary}</summary>
{_stages_table(stages)}
</details>"""


def _stages_table(stages: Sequence[StageEntry]) -> str:
    rows = ""
    for entry in stages:
        row = entry.row()
        rows += (
            f"<tr><td>{entry.stage}</td><td>{html.escape(entry.label)}</td>"
            f'<td class="{entry.state}">{row["state"]}</td><td class="number">{entry.seconds:.2f}</td>'
            f"<td><code>{row['in']}</code></td><td><code>{row['out']}</code></td></tr>\n"
        )
    head = "<tr><th>stage</th><th></th><th>state</th><th>seconds</th><th>in</th><th>out</th></tr>"
    return f"<table>{head}\n{rows}</table>"


def capitalized(text: str) -> str:
    """With a large first letter."""
    return text[:1].upper() + text[1:]
