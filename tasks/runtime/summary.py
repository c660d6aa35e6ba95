"""The summary of a flow run: its first artifact in the Prefect UI, which says what came of it, what was computed, what
was cached, and what that cost.

The UI shows a run's own artifacts before those of its stages, and has no order among them; so flows leave the others to
stages, or put them on this page.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

from prefect.runtime import flow_run

from rollout_core.base.determinism import num_gpus
from rollout_core.base.machine import look_at_machine, written_folders
from rollout_core.base.settings import ui_address, without_passwords
from rollout_core.base.stopping import is_stopping
from rollout_core.config import Run
from tasks.runtime.artifacts import Page
from tasks.runtime.connections import result_storage
from tasks.runtime.endpoint_costs import endpoint_facts
from tasks.runtime.events import Inventory, RunDone, RunStart, emit
from tasks.runtime.journal import CACHED, CHECKED, Journal, Outcome, StageEntry

KEY = "summary"
MOST_STAGES = 500
"""Calls that are listed: the last ones."""
MOST_OF_AN_ERROR = 300
_LEARNERS = ("sft", "rm", "ppo", "grpo", "dpo")
_MARKS = re.compile(r"([\\`*_\[\]<>|#~])")


class RunSummary:
    """The page of a flow run under way."""

    def __init__(self, config: Run) -> None:
        self._config = config
        self._address = ui_address()
        self.journals: list[Journal] = []
        self.state: Literal["running", "completed", "failed", "stopped"] = "running"
        self.error: str | None = None
        self._begun, self._started = datetime.now(UTC), time.monotonic()
        name = config.run.name
        emit(RunStart(flow=flow_run.flow_name or "", run=name))
        emit(Inventory(machine=look_at_machine(written_folders(result_storage().url))))
        self._page = Page(KEY, self._markdown("running"), f"Summary of {name}: outcome, stages, cost")

    def note(self, journal: Journal) -> None:
        """Count what ``journal`` tells, or will tell, of this run."""
        self.journals.append(journal)

    def end(self) -> None:
        """The run is over, and did what it was to do."""
        self.state = "completed"
        self._page.show(self._markdown(self.state))
        self._tell(self.state)

    def fail(self, error: BaseException) -> None:
        """The run ends with an error, or because it was asked to."""
        journal = self.journals[-1] if self.journals else Journal()
        last = journal.entries[-1] if journal.entries else None
        where = (
            "before its first stage" if last is None else f"{'at' if last.failed else 'after'} **{plain(last.title)}**"
        )
        if is_stopping():
            self.state = "stopped"
            self._page.show(self._markdown(f"stopped {where}; what is complete is kept"))
            self._tell(self.state)
            return
        lines = without_passwords(str(error)).strip().splitlines() or [""]
        text = f"{type(error).__name__}: {lines[0]}"
        text = text if len(text) <= MOST_OF_AN_ERROR else text[: MOST_OF_AN_ERROR - 3] + "..."
        self.state, self.error = "failed", text
        self._page.show(self._markdown(f"failed {where}: {plain(text)}"))
        self._tell(self.state, text)

    def _tell(self, state: Literal["completed", "stopped", "failed"], error: str | None = None) -> None:
        costs, outcome = Costs(self.journals, self._config), self.outcome
        done = RunDone(
            flow=flow_run.flow_name or "",
            run=self._config.run.name,
            state=state,
            seconds=time.monotonic() - self._started,
            computed_seconds=costs.total,
            gpu_seconds=costs.num_gpus * costs.total,
            price=costs.price,
            currency=self._config.cost.currency,
            held_out=outcome.held_out,
            promoted=outcome.promoted,
            error=error,
        )
        emit(done)

    @property
    def outcome(self) -> Outcome:
        """What came of the run so far."""
        return (self.journals[-1].outcome if self.journals else None) or Outcome()

    @property
    def endpoints(self) -> dict[str, str]:
        """What endpoints took so far, for people."""
        asked = [journal for journal in list(self.journals) if journal.has_judges or journal.generating is not None]
        return endpoint_facts(asked) if asked else {}

    def _markdown(self, state: str) -> str:
        seconds = time.monotonic() - self._started
        outcome = self.outcome
        facts = {
            "state": state,
            **{name: plain(value) for name, value in about(self._config).items()},
            **_rewards(outcome.held_out),
            **({} if outcome.promoted is None else {"promoted": _verdict(outcome)}),
            **{name: plain(value) for name, value in outcome.facts.items()},
            "began": f"{self._begun:%Y-%m-%d %H:%M:%S} UTC",
            **({} if self._address is None else {"curves and samples": f"{self._address}/runs/{flow_run.id}"}),
        }
        if state == "running":
            return "\n".join(_points(facts))
        costs = Costs(self.journals, self._config)
        facts |= {name: plain(value) for name, value in self.endpoints.items()}
        facts |= {
            "wall time": f"{timedelta(seconds=round(seconds))} ({seconds:.1f} s)",
            "stages": costs.counts,
            "cost": costs.money,
        }
        lines = [*_points(facts), "", *costs.lines()]
        for title, png in outcome.pictures.items():
            url = "data:image/png;base64," + base64.b64encode(png).decode()
            lines += ["", f"![{plain(title)}]({url})"]
        return "\n".join([*lines, *_calls([entry for journal in self.journals for entry in journal.entries])])


class Costs:
    """What the stages of a run came to, and its price by the run's configuration."""

    def __init__(self, journals: Sequence[Journal], config: Run, *, has_ended: bool = True) -> None:
        """Of a run under way no GPUs are counted: torch, which knows them, is not imported in its midst."""
        self._prices = config.cost
        self.calls: dict[str, dict[str, int]] = {}
        """Calls of each stage, by outcome."""
        self.seconds: dict[str, float] = {}
        """Of each stage, in which at least one call was computed."""
        # Copied at once: stages of other threads add to it.
        for stage, totals in [pair for journal in journals for pair in list(journal.totals.items())]:
            counts = self.calls.setdefault(stage, dict.fromkeys(("computed", "cached", "checked", "failed"), 0))
            for state, count in list(totals.calls.items()):
                counts[_KINDS.get(state, "failed")] += count
            self.seconds[stage] = self.seconds.get(stage, 0.0) + totals.seconds
        # Where nothing was computed nobody needs torch, which knows the GPUs.
        self.num_gpus = num_gpus() if has_ended and self.total else 0

    @property
    def total(self) -> float:
        """Seconds of all stages that were computed."""
        return sum(self.seconds.values())

    @property
    def price(self) -> float:
        """Of these, by the configuration."""
        hours = self.total / 3600
        return hours * (self._prices.per_hour + self.num_gpus * self._prices.per_gpu_hour)

    @property
    def sums(self) -> dict[str, int]:
        """How many calls were computed, how many cached and so on; without those that are none."""
        kinds = sorted({*_KINDS.values(), "failed"})
        sums = {kind: sum(counts[kind] for counts in self.calls.values()) for kind in kinds}
        return {kind: count for kind, count in sums.items() if count}

    @property
    def counts(self) -> str:
        """`sums` in words."""
        return ", ".join(f"{count} {kind}" for kind, count in self.sums.items()) or "none"

    @property
    def money(self) -> str:
        """The price, or how to have one."""
        used = f"{self.total:.1f} s computed, {self.num_gpus * self.total:.1f} GPU-seconds"
        prices = self._prices
        if not (prices.per_hour or prices.per_gpu_hour):
            return f"{used}; for a sum of money set `per_hour` or `per_gpu_hour` in the table `[cost]`"
        each = f"{prices.per_hour:g} an hour and {prices.per_gpu_hour:g} a GPU-hour"
        return f"**{self.price:.4f} {prices.currency}**: {used}, at {each}"

    def lines(self) -> Iterator[str]:
        """A table of the stages, and what its figures are."""
        rows = [
            (f"`{stage}`", *counts.values(), f"{self.seconds[stage]:.1f}", f"{self.num_gpus * self.seconds[stage]:.1f}")
            for stage, counts in self.calls.items()
        ]
        yield from ("### Stages", "")
        yield from _table(("stage", "computed", "cached", "checked", "failed", "seconds", "GPU-seconds"), rows)
        yield ""
        yield (
            "Seconds are wall-clock time in which a stage was computed, in this try of the run; what was cached or "
            f"only checked counts nothing. GPU-seconds are these seconds times the {self.num_gpus} GPUs that the run's "
            "process sees, busy or not. Workers on other machines and endpoints are not in them."
        )


_KINDS = {"Completed": "computed", CACHED: "cached", CHECKED: "checked"}


def plain(text: str) -> str:
    """``text`` as it is, in one line of Markdown, also within a table."""
    return _MARKS.sub(r"\\\1", " ".join(text.split()))


def about(config: Run) -> dict[str, str]:
    """Model and algorithm of a run of any kind."""
    algorithm = getattr(config, "algorithm", None)
    model = getattr(config, "model", None) or getattr(algorithm, "base_model", None)
    learners = [name.upper() for name in _LEARNERS if getattr(config, name, None) is not None]
    kinds = (
        learners if algorithm is None else [getattr(algorithm, "variant", algorithm.family).upper().replace("_", " ")]
    )
    return {
        "run": config.run.name,
        **({} if model is None else {"model": model.uri}),
        **({"algorithm": ", ".join(kinds)} if kinds else {}),
    }


def _rewards(held_out: Mapping[str, float]) -> dict[str, str]:
    """Each with its gain over the first."""
    values = list(held_out.values())
    return {
        f"held-out reward {moment}": f"**{value:.4f}**" + (f" ({value - values[0]:+.4f})" if place else "")
        for place, (moment, value) in enumerate(held_out.items())
    }


def _verdict(outcome: Outcome) -> str:
    return f"**{'yes' if outcome.promoted else 'no'}**: {plain(outcome.reason)}"


def _calls(entries: Sequence[StageEntry]) -> Iterator[str]:
    """All calls of stages, in order of finishing."""
    rows = [
        (f"`{entry.stage}`", plain(entry.label), row["state"], f"{entry.seconds:.2f}", row["in"], row["out"])
        for entry, row in ((entry, entry.row()) for entry in entries[-MOST_STAGES:])
    ]
    if rows:
        of = f", the last {len(rows)} of {len(entries)}" if len(rows) < len(entries) else ""
        yield from ("", f"### Calls of stages{of}", "")
        yield from _table(("stage", "label", "state", "seconds", "in", "out"), rows)


def _points(facts: Mapping[str, str]) -> Iterator[str]:
    """Not a table, in which the UI cuts long lines off."""
    return (f"- **{plain(name)}**: {value}" for name, value in facts.items())


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"
