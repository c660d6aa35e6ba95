"""The reports of the flows of agents: curves as PNG, and one page of what came of a run."""

from __future__ import annotations

import html
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_core.agents.adapters import drawing
from rollout_core.agents.adapters.ended import ended_rollouts, most_changed, read_rollouts
from rollout_core.agents.apo import Candidate, keep_best
from rollout_core.agents.live import OnlineState, PastUpdate
from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import run_async
from rollout_core.config import LearnOnlineConfig, TrainAgentConfig, TunePromptConfig
from rollout_core.inference.folders import LocalFolder
from rollout_core.objects.records import AgentRollouts, Checkpoint
from rollout_core.promotion.decision import Promotion
from tasks.runtime.artifacts import draw_curve
from tasks.runtime.connections import objects, open_store, working_folder
from tasks.runtime.journal import Journal, Outcome
from tasks.runtime.report import (
    PAGE,
    Curve,
    capitalized,
    curves_of_iterations,
    page,
    shown_curve,
    stages_section,
    verdict,
)

TEMPLATE_FILE = "best-template.txt"
NUM_GAINED, NUM_LOST = 3, 1
"""Tasks that are shown: of those whose reward rose most, and of those whose reward fell most."""

_STYLE = f"""{drawing.STYLE}
.side-by-side {{ display: grid; grid-template-columns: 1fr 1fr; gap: 1.5rem; margin: 1rem 0; }}
.side-by-side > div {{ border: 1px solid #d5dbe3; border-radius: 8px; padding: .5rem 1rem; min-width: 0; }}
.side-by-side code {{ overflow-wrap: anywhere; }}
"""


def report_training(
    config: TrainAgentConfig,
    model: ContentId,
    iterations: Sequence[tuple[AgentRollouts, Checkpoint]],
    held_out: Mapping[str, AgentRollouts],
    precision: Mapping[str, str | None],
    promotion: Promotion | None,
    journal: Journal,
) -> Path:
    """Report on a run that trained an agent: its rollouts and checkpoint by iteration, those of the held-out tasks and
    the precision of what answered by moment, and whether the model was promoted."""
    x_label = f"{config.algorithm.kind.upper()} iteration"
    rollouts = [each for each, _ in iterations]
    curves = [
        Curve("mean reward", [each.mean_reward for each in rollouts], x_label),
        Curve("rollouts with a reward", [each.num_rewards for each in rollouts], x_label),
        # Without a reference, say, there is no distance from it.
        *(
            found
            for found in curves_of_iterations(objects(), [checkpoint for _, checkpoint in iterations], x_label)
            if any(found.values)
        ),
    ]
    rewards = {moment: each.mean_reward for moment, each in held_out.items()}
    named = {
        ", ".join(filter(None, (f"held-out reward {at}", precision.get(at)))): each for at, each in rewards.items()
    }
    folder = _write(
        config,
        journal,
        [
            f"<p>Agent <code>{html.escape(config.agent.function)}</code>, model\n<code>{model}</code>.</p>",
            "" if promotion is None else verdict(promotion),
            _figures({**named, "mean training reward": statistics.fmean(curves[0].values)}, "{:.3f}"),
        ],
        curves,
        lambda curve: f"{capitalized(curve.what)} per {x_label}",
        _marks(rewards),
        _traces(held_out["before"], held_out["after"]) if len(held_out) == 2 else "",
        style=_STYLE,
    )
    journal.outcome = Outcome(
        facts={"checkpoint": model, "report": str(folder)},
        held_out=rewards,
        promoted=None if promotion is None else promotion.promoted,
        reason="" if promotion is None else promotion.reason,
        pictures=shown_curve(objects(), config.run.name, curves[0]),
    )
    return folder


def report_tuning(
    config: TunePromptConfig,
    model: ContentId,
    first: str,
    rounds: Sequence[Sequence[Candidate]],
    held_out: Mapping[str, float],
    promoted: bool,
    reason: str,
    journal: Journal,
) -> Path:
    """Report on a search for a template: the ``first``, those that each round judged, and the best, which is left as a
    file too."""
    ranked = [keep_best(judged, len(judged)) for judged in rounds]
    best, curve = ranked[-1][0], Curve("mean reward", [judged[0].score for judged in ranked], "round")
    rows = "".join(
        f'<tr><td class="number">{number}</td><td>{item.name}</td>'
        f"<td>{'' if item.parent is None else f'v{item.parent}'}</td>"
        f'<td class="number">{item.score:.4f}</td></tr>\n'
        for number, judged in enumerate(ranked, start=1)
        for item in judged
    )
    text = best.template.template
    folder = _write(
        config,
        journal,
        [
            f"<p>Agent <code>{html.escape(config.agent.function)}</code>, model <code>{model}</code>,\n"
            f"critic <code>{html.escape(config.critic.model)}</code>. {html.escape(reason)}.</p>",
            _figures({f"held-out reward {moment}": value for moment, value in held_out.items()}, "{:.3f}"),
        ],
        [curve],
        lambda curve: f"{capitalized(curve.what)} of each {curve.x_label}'s best template, on its own tasks",
        _marks(held_out),
        f"""<h2>Best template ({best.name})</h2><pre>{html.escape(text)}</pre>
<h2>First template</h2><pre>{html.escape(first)}</pre>
<h2>Templates by round</h2>
<table><tr><th>round</th><th>template</th><th>rewritten from</th><th>mean reward</th></tr>
{rows}</table>""",
        style="pre { white-space: pre-wrap; }\n",
        files={TEMPLATE_FILE: text.encode()},
    )
    journal.outcome = Outcome(
        facts={"best template": best.name, "report": str(folder)},
        held_out=held_out,
        promoted=promoted,
        reason=reason,
        pictures=shown_curve(objects(), config.run.name, curve),
    )
    return folder


def report_online(
    config: LearnOnlineConfig, state: OnlineState[Any], journal: Journal, *, is_last: bool = False
) -> Path:
    """Report on online learning so far, after every batch; the last one is also for the run's summary."""
    serving = state.versions[-1]
    learnt = [past.mean_reward for past in state.history if past.outcome != "skipped"]
    counts = {"updates": state.num_updates, "refused": state.num_refused, "skipped": state.num_skipped}
    folder = _write(
        config,
        journal,
        [
            f"<p>Model <code>{serving}</code> answers live agents, which find it as the resource\n"
            "<code>llm</code>.</p>",
            _figures(counts, "{}"),
        ],
        [Curve("mean reward", learnt, "update")] if learnt else [],
        lambda curve: "Mean reward of the live rollouts of each update",
        {},
        f"""<h2>Batches of live rollouts, the latest first</h2>
<table><tr><th>batch</th><th>rollouts</th><th>mean reward</th><th>model</th><th>outcome</th><th>why</th></tr>
{"".join(map(_batch_row, reversed(state.history)))}</table>""",
    )
    if not is_last:
        return folder
    facts = {"serving": serving, **{name: str(count) for name, count in counts.items()}, "report": str(folder)}
    shown = Curve("mean reward of live rollouts", learnt, "update")
    journal.outcome = Outcome(facts=facts, pictures=shown_curve(objects(), config.run.name, shown))
    return folder


def _batch_row(past: PastUpdate) -> str:
    reward = "" if past.outcome == "skipped" else f"{past.mean_reward:.4f}"
    kind = "right" if past.outcome == "promoted" else "wrong"
    return (
        f'<tr><td class="number">{past.number + 1}</td><td class="number">{past.num_rollouts}</td>'
        f'<td class="number">{reward}</td><td><code>{past.model or ""}</code></td>'
        f'<td class="{kind}">{past.outcome}</td><td>{html.escape(past.reason)}</td></tr>\n'
    )


def _write(
    config: TrainAgentConfig | TunePromptConfig | LearnOnlineConfig,
    journal: Journal,
    head: Sequence[str],
    curves: Sequence[Curve],
    title: Callable[[Curve], str],
    marks: Mapping[str, float],
    sections: str,
    *,
    style: str = "",
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write page and curves, the first with ``marks``; their folder."""
    folder = working_folder() / config.report_dir
    folder.mkdir(parents=True, exist_ok=True)
    for curve in curves:
        marked = marks if curve is curves[0] else {}
        place, what = folder / curve.file_name, curve.what
        draw_curve(place, {what: curve.values}, title=title(curve), x_label=curve.x_label, y_label=what, marks=marked)
    images = "\n".join(f'<img src="{curve.file_name}" alt="{html.escape(curve.what)}">' for curve in curves)
    shown = f'<div class="curves">{images}</div>' if curves else ""
    body = "\n".join([*head, shown, sections, stages_section(journal.entries)])
    for name, content in {**(files or {}), PAGE: page(config.run.name, body, style=style).encode()}.items():
        LocalFolder(folder).replace(name, [content])
    return folder


def _figures(values: Mapping[str, float], shape: str) -> str:
    boxes = (
        f'<div class="figure"><b>{shape.format(value)}</b><span>{html.escape(what)}</span></div>'
        for what, value in values.items()
    )
    return f'<div class="figures">{"".join(boxes)}</div>'


def _marks(held_out: Mapping[str, float]) -> dict[str, float]:
    return {f"held out {moment}: {value:.3f}": value for moment, value in held_out.items()}


def _traces(before: AgentRollouts, after: AgentRollouts) -> str:
    """A few tasks that rollouts of both worked on, in the same order; what was done before and after, side by side."""
    known = objects()
    pairs = most_changed(
        ended_rollouts(known, before), ended_rollouts(known, after), num_gained=NUM_GAINED, num_lost=NUM_LOST
    )
    drawn = run_async(_draw([one.rollout_id for pair in pairs for one in pair]))
    rows = ""
    for pair in pairs:
        cells = "".join(
            f"<div><b>{moment}</b> {one.status} <code>{html.escape(one.rollout_id)}</code>{drawn[one.rollout_id]}</div>"
            for moment, one in zip(("before", "after"), pair, strict=True)
        )
        rows += f'<div class="side-by-side">{cells}</div>\n'
    return f"<h2>Traces of held-out tasks</h2>\n{rows}" if rows else ""


async def _draw(rollout_ids: Sequence[str]) -> dict[str, str]:
    async with open_store() as store:
        return {
            rollout_id: drawing.draw_trace(spans) async for rollout_id, _, spans in read_rollouts(store, rollout_ids)
        }
