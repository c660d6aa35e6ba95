"""How long a run takes that has nothing to do.

The example's nightly run, made shorter, is run once and then again in the same storage, where every stage is cached:
beside a Prefect server that runs, and with the server of its folder, which starts and ends with it. Each run is a
process of its own, so its time includes Python's imports; ``--help`` is measured, too. With ``--beside`` the same is
done in turn with another checkout of this project, by the command in its own ``.venv`` and in a storage of its own.

Run: python benchmarks/cached.py [--quick] [--beside FOLDER]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
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
        environment = os.environ | {
            "PYTHONPATH": str(self.project),
            "ROLLOUT_STORAGE": f"file://{self.folder / 'objects'}",
            "ROLLOUT_DATABASE": f"sqlite:///{self.folder / 'rollout.db'}",
            "ROLLOUT_CACHE": str(self.folder / "cache"),
        }
        for name in ("PREFECT_API_URL", "PREFECT_HOME"):
            environment.pop(name, None)
        if server is not None:
            environment["PREFECT_API_URL"] = server
        own = self.project / ".venv" / "bin" / "rollout"
        command = own if own.exists() else Path(sys.executable).with_name("rollout")
        started = time.perf_counter()
        done = subprocess.run(
            [str(command), *arguments], cwd=self.folder, env=environment, capture_output=True, text=True
        )
        seconds = time.perf_counter() - started
        if done.returncode:
            raise RuntimeError(f"rollout {arguments[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return seconds, done.stdout


def measure(figures: Figures, sides: list[Side], server: str, *, iterations: int, rounds: int) -> None:
    """All rows; the last side is the baseline, where there are two."""
    config = PROJECT / "examples" / "nightly-tiny.toml"
    nightly = ("nightly", "--config", str(config), "--set", f"ppo.iterations={iterations}", *SHORTER)
    counts = ""
    for side in sides:
        (side.folder / "data").mkdir(parents=True)
        (side.folder / "data" / "example").symlink_to(PROJECT / "data" / "example")
        side.run(*nightly, server=server)
        _, printed = side.run(*nightly, server=server)  # what the first left for later is done
        counts = next(line for line in printed.splitlines() if line.startswith("stages: "))
    shapes = {
        f"nightly again, beside a running server ({counts})": lambda side: side.run(*nightly, server=server),
        "nightly again, with a server of its own": lambda side: side.run(*nightly),
        "rollout --help": lambda side: side.run("--help"),
    }
    for what, run in shapes.items():
        for _ in range(rounds):
            for side in sides:
                side.seconds.setdefault(what, []).append(run(side)[0])
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
    figures = Figures("Runs with nothing to do")
    with own_place() as folder, own_server(folder) as server:
        sides = [Side(PROJECT, folder / "ours")]
        if asked.beside is not None:
            sides.append(Side(asked.beside.resolve(), folder / "baseline"))
        measure(figures, sides, server, iterations=2 if asked.quick else 16, rounds=1 if asked.quick else 3)
    figures.show("Stages that are never cached (import, promote) are computed in every run.")


if __name__ == "__main__":
    main()
