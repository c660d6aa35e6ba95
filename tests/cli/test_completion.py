"""A shell that sources what `rollout completion` prints completes commands, options and values."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from rollout_core.objects import ObjectStore
from rollout_core.runs.run_records import RunDetail, RunHead, RunRecords
from tests.support.machine import FISH, ZSH, Tool, require

ROLLOUT = Path(sys.executable).with_name("rollout")
COMPLETE = """
source <(rollout completion bash)
complete -p rollout >/dev/null || exit 3
while read -r line; do
    COMP_WORDS=($line)
    if [[ $line == *. ]]; then COMP_WORDS[-1]=""; fi
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    _rollout_completion rollout
    echo "${COMPREPLY[*]}"
done
"""


def completed(folder: Path, *lines: str) -> list[set[str]]:
    """What bash offers after each line; one that ends with a dot has an empty last word."""
    done = subprocess.run(
        ["bash", "-c", COMPLETE],
        input="\n".join(lines) + "\n",
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_bash_completes_commands_options_and_runs(tmp_path: Path):
    now = datetime(2026, 11, 25, tzinfo=UTC)
    head = RunHead(id="4f00ba12-0000", name="own", flow="train-sft", state="completed", began=now, written=now)
    RunRecords(ObjectStore.from_url(f"file://{tmp_path}/data/objects")).write(head, RunDetail(config={}))
    commands, options, kinds, runs = completed(
        tmp_path, "rollout tr", "rollout train sft --d", "rollout init .", "rollout show ."
    )
    assert commands == {"train"}
    assert options == {"--data", "--dry-run", "--debug"}
    assert {"sft", "nightly", "agent"} <= kinds
    assert runs == {"latest", "4f00ba12", "own"}


def test_asking_for_completions_leaves_no_traces(tmp_path: Path):
    assert completed(tmp_path, "rollout show .") == [{"latest"}]
    assert list(tmp_path.iterdir()) == []


def environment(**more: str) -> dict[str, str]:
    found = {**os.environ, "PATH": f"{ROLLOUT.parent}:{os.environ['PATH']}", **more}
    found.pop("ROLLOUT_STORAGE", None)
    return found


def required(shell: Tool) -> str:
    require(shell)
    return shell.name


def test_fish_completes_commands_options_values_and_files(tmp_path: Path):
    (tmp_path / "own.toml").touch()
    lines = ("rollout tr", "rollout train sft --d", "rollout init ", "rollout plan --config o")
    asked = "; ".join(f"complete -C '{line}'; echo ." for line in lines)
    script = f"source (rollout completion fish | psub); {asked}"
    command = [required(FISH), "--no-config", "-c", script]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found = [{line.split("\t")[0] for line in part.splitlines() if line} for part in done.stdout.split("\n.\n")]
    assert found[0] == {"train"} and found[1] == {"--data", "--dry-run", "--debug"}
    assert {"sft", "nightly", "agent"} <= found[2] and "own.toml" in found[3]


def test_zsh_of_a_new_user_completes_commands_options_values_and_files(tmp_path: Path):
    """It has no start files, so nothing has called compinit. Keys are typed into a terminal, as by a person."""
    (tmp_path / "own.toml").touch()
    ours, theirs = pty.openpty()
    command = [required(ZSH), "-f", "-i"]
    settings = environment(TERM="dumb", HOME=str(tmp_path), PS1="> ")
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=settings, cwd=tmp_path) as shell:
        os.close(theirs)
        try:
            typed(ours, "source <(rollout completion zsh); echo begun $?\n", "begun 0")
            typed(ours, "rollout tr\t", "rollout train")
            typed(ours, "\x15rollout train sft --d\t", "--data", "--debug", "--dry-run")
            typed(ours, "\x15rollout init \t", "nightly", "agent", "sft")
            typed(ours, "\x15rollout plan --config o\t", "own.toml")
        finally:
            shell.kill()
            os.close(ours)


def typed(terminal: int, keys: str, *wanted: str) -> None:
    """Type keys, and wait until the terminal shows what is wanted."""
    os.write(terminal, keys.encode())
    shown, deadline = "", time.monotonic() + 60
    while not all(text in shown for text in wanted):
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"after {keys!r} the terminal shows {shown!r}; expected {wanted}"
        shown += os.read(terminal, 65536).decode(errors="replace")
