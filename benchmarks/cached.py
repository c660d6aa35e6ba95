"""How long a run takes that has nothing to do, and how long the first one takes to begin.

The example's nightly run, made shorter, is run once and then again in the same storage, where every stage is cached:
beside a Prefect server that runs, and with the server of its folder, which starts and ends with it. Its fine-tuning is
run in new folders, with and without the tables of a Prefect server that an earlier one kept for the user, until its
flow begins; and once more as a dry run of all rows. Each run is a process of its own, so its time includes Python's
imports; ``--help`` is measured, too. With ``--beside`` the same is done in turn with another checkout of this project,
by the command in its own ``.venv`` and in a storage of its own.

Run: python benchmarks/cached.py [--quick] [--beside FOLDER]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import PROJECT, Figures, own_place, own_server

SHORTER = ("--set", "ppo.prompts_per_iteration=64", "--set", "sft.budget.max_steps=4")


@dataclass
class Side:
    """A checkout, and where its runs work."""

    project: Path
    folder: Path
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def run(self, *arguments: str, server: str | None = None) -> tuple[float, str]:
        """Seconds of one command, and what it printed."""
        started = time.perf_counter()
        done = subprocess.run(
            self._command(arguments), cwd=self.folder, env=self._environment(self.folder, server),
            capture_output=True, text=True,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        if done.returncode:
            raise RuntimeError(f"rollout {arguments[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return seconds, done.stdout

    def begin(self, *arguments: str, has_tables: bool) -> float:
        """Seconds until the flow of a command begins in a new folder."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="new-") as name:
            folder = Path(name)
            place_example(folder)
            own = {"PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO", "PREFECT_LOGGING_LEVEL": "INFO"}
            own |= {} if has_tables else {"XDG_CACHE_HOME": str(folder / "caches")}
            began, lines = None, []
            started = time.perf_counter()
            with subprocess.Popen(
                self._command(arguments), cwd=folder, env=self._environment(folder, None) | own,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            ) as process:  # fmt: skip
                assert process.stdout is not None
                for line in process.stdout:
                    lines.append(line)
                    if began is None and "Beginning flow run" in line:
                        began = time.perf_counter() - started
            if process.returncode or began is None:
                raise RuntimeError(f"rollout {arguments[0]} ended with {process.returncode}:\n{''.join(lines)[-2000:]}")
            return began

    def _command(self, arguments: Sequence[str]) -> list[str]:
        own = self.project / ".venv" / "bin" / "rollout"
        return [str(own if own.exists() else Path(sys.executable).with_name("rollout")), *arguments]

    def _environment(self, folder: Path, server: str | None) -> dict[str, str]:
        environment = os.environ | {
            "PYTHONPATH": str(self.project),
            "ROLLOUT_STORAGE": f"file://{folder / 'objects'}",
            "ROLLOUT_DATABASE": f"sqlite:///{folder / 'rollout.db'}",
            "ROLLOUT_CACHE": str(folder / "cache"),
        }
        for name in ("PREFECT_API_URL", "PREFECT_HOME"):
            environment.pop(name, None)
        return environment if server is None else environment | {"PREFECT_API_URL": server}


def place_example(folder: Path) -> None:
    """Model and rows of the example, under the names of its configurations."""
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "example").symlink_to(PROJECT / "data" / "example")


def measure(figures: Figures, sides: list[Side], server: str, *, iterations: int, rounds: int) -> None:
    """All rows; the last side is the baseline, where there are two."""
    config = PROJECT / "examples" / "nightly-tiny.toml"
    nightly = ("nightly", "--config", str(config), "--set", f"ppo.iterations={iterations}", *SHORTER)
    counts = ""
    for side in sides:
        place_example(side.folder)
        side.run(*nightly, server=server)
        _, printed = side.run(*nightly, server=server)  # what the first left for later is done
        counts = next(line for line in printed.splitlines() if line.startswith("stages: "))
    tuning = ("train", "sft", "--config", str(PROJECT / "examples" / "sft-tiny.toml"))
    short = (*tuning, "--set", "algorithm.budget.max_steps=1")
    sides[-1].begin(*short, has_tables=True)  # there are tables now, if the baseline keeps any
    sides[0].begin(*short, has_tables=True)
    shapes: dict[str, Callable[[Side], float]] = {
        "first fine-tuning of a user, until its flow begins": lambda side: side.begin(*short, has_tables=False),
        "first fine-tuning in a folder, until its flow begins": lambda side: side.begin(*short, has_tables=True),
        "dry run of the fine-tuning": lambda side: side.run(*short, "--dry-run")[0],
        f"nightly again, beside a running server ({counts})": lambda side: side.run(*nightly, server=server)[0],
        "nightly again, with a server of its own": lambda side: side.run(*nightly)[0],
        "rollout --help": lambda side: side.run("--help")[0],
        "rollout doctor --help": lambda side: side.run("doctor", "--help")[0],
    }
    for what, run in shapes.items():
        for _ in range(rounds):
            for side in sides:
                side.seconds.setdefault(what, []).append(run(side))
        ours = sides[0].seconds[what]
        if len(sides) > 1:
            figures.compare(what, ours, sides[1].seconds[what], form="{:.2f} s")
        else:
            figures.add(what, f"{statistics.median(ours):.2f} s", rounds=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small form, to see that it runs")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another checkout, as the baseline")
    asked = parser.parse_args()
    maker = [sys.executable, str(PROJECT / "examples" / "make_tiny.py")]
    subprocess.run(maker, cwd=PROJECT, check=True, stdout=subprocess.DEVNULL)
    figures = Figures("Runs that begin, and runs with nothing to do")
    with own_place() as folder, own_server(folder) as server:
        sides = [Side(PROJECT, folder / "ours")]
        if asked.beside is not None:
            sides.append(Side(asked.beside.resolve(), folder / "baseline"))
        measure(figures, sides, server, iterations=2 if asked.quick else 16, rounds=1 if asked.quick else 3)
    figures.show("Stages that are never cached (import, promote) are computed in every run.")


if __name__ == "__main__":
    main()
