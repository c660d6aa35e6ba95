"""The `rollout` command. Exit codes: 0 done, 1 a check or a run failed, 2 bad configuration or input.

A command's file is imported when the command is called, so that ``--help`` answers at once.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from flows.cli.completion import answer_shells
from flows.cli.lazy import add_commands
from rollout_core import __version__
from rollout_core.base.errors import ConfigError
from rollout_core.base.logs import require_form

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # else "[workers].count" in a help text is taken for a colour and left out
    help="LLM post-training that cannot lose work.",
)
add_commands(
    app,
    {
        "init": (
            "flows.cli.init:init",
            "Write a first configuration, with comments, of the models and rows that are in this folder.",
        ),
        "plan": (
            "flows.cli.plan:plan",
            "Print what a run would do: its checks, its stages and which are cached, time, memory, disk and cost.",
        ),
        "import": (
            "flows.cli.imports:import_model",
            "Bring a model into the object store and print its content id.",
        ),
        "nightly": ("flows.cli.nightly:nightly", "Fine-tune, PPO, evaluate, promote, report."),
        "runs": (
            "flows.cli.runs:runs",
            "Print runs, the newest first: state, held-out reward, promotion, time and cost.",
        ),
        "show": ("flows.cli.show:show", "Print one run: what came of it, its curves, its stages."),
        "compare": (
            "flows.cli.compare:compare",
            "Print how two runs differ: configuration, figures, held-out samples that changed.",
        ),
        "samples": (
            "flows.cli.samples:samples",
            "Print samples of a run, also of a batch of millions: prompt, completion, reward.",
        ),
        "tail": (
            "flows.cli.tail:tail",
            "Follow a run: a line for each stage that ends and for the step under way, until the run has ended.",
        ),
        "lineage": (
            "flows.cli.lineage:lineage",
            "Print what made a checkpoint or any other result, back to where its inputs came from; or what came of it.",
        ),
        "export": (
            "flows.cli.export:export",
            "Write a model as a Hugging Face folder, with a model card and the records of its lineage; or upload it.",
        ),
        "reproduce": (
            "flows.cli.reproduce:reproduce",
            "Make a result again elsewhere, from the records of its lineage, and say at which stage its ids first "
            "differ.",
        ),
        "promotions": (
            "flows.cli.promotion:promotions",
            "Print the history of the latest model: when, who and why, newest first.",
        ),
        "promote": ("flows.cli.promotion:promote", "Make a model the latest, without asking for evidence."),
        "rollback": ("flows.cli.promotion:rollback", "Serve again the model that was the latest before."),
        "serve": (
            "flows.cli.serve:serve",
            "Serve a model to clients of OpenAI's and Anthropic's APIs, until SIGTERM or Ctrl-C.",
        ),
        "completion": (
            "flows.cli.completion:completion",
            "Print what completes this command in a shell: ``source <(rollout completion bash)``.",
        ),
        "schema": (
            "flows.cli.schema:schema",
            "Print the JSON Schema of run configurations: every key with its meaning, default and bounds.",
        ),
    },
)

train_app = typer.Typer(no_args_is_help=True, help="Train a model.")
add_commands(
    train_app,
    {
        "sft": ("flows.cli.train:sft", "Supervised fine-tuning."),
        "ppo": ("flows.cli.train:ppo", "PPO on the model's own completions."),
        "grpo": ("flows.cli.train:grpo", "GRPO on groups of the model's own completions."),
        "rm": ("flows.cli.train:rm", "A reward model from preference pairs."),
        "dpo": ("flows.cli.train:dpo", "Direct preference optimization on pairs."),
        "ipo": ("flows.cli.train:ipo", "Identity preference optimization on pairs."),
        "kto": ("flows.cli.train:kto", "Kahneman-Tversky optimization on single labelled answers."),
    },
)
app.add_typer(train_app, name="train")

infer_app = typer.Typer(no_args_is_help=True, help="Generate completions.")
add_commands(
    infer_app,
    {"batch": ("flows.cli.infer_batch:infer_batch", "Complete every prompt of the input, exactly once.")},
)
app.add_typer(infer_app, name="infer")

eval_app = typer.Typer(no_args_is_help=True, help="Evaluate models by suites of questions.")
add_commands(
    eval_app,
    {
        "run": (
            "flows.cli.evaluate:eval_run",
            "Ask a model the questions of suites and print what its answers come to, with intervals.",
        ),
        "compare": (
            "flows.cli.evaluate:eval_compare",
            "Print how two evaluated models differ, suite by suite and question by question.",
        ),
        "list": ("flows.cli.evaluate:eval_list", "Print the models that were evaluated, by suites."),
        "export": (
            "flows.cli.eval_export:eval_export",
            "Print the figures of evaluated models for others: as CSV, as JSON, or for a model card.",
        ),
    },
)
app.add_typer(eval_app, name="eval")

env_app = typer.Typer(no_args_is_help=True, help="Try environments by hand, before a model acts in them.")
add_commands(
    env_app,
    {
        "check": (
            "flows.cli.environments:env_check",
            "Play three rows with a scripted model; print what differs, leaks, fails or is slow, and the tools.",
        ),
        "play": ("flows.cli.environments:env_play", "Play an episode in the terminal, with yourself as the model."),
    },
)
app.add_typer(env_app, name="env")

agent_app = typer.Typer(no_args_is_help=True, help="Train agents.")
add_commands(
    agent_app,
    {
        "train": (
            "flows.cli.agents:train",
            "Train the model behind an agent by GRPO or PPO on what the agent does.",
        ),
        "tune": ("flows.cli.agents:tune", "Search for a prompt template with which an agent earns more."),
        "online": (
            "flows.cli.agents:online",
            "Serve a policy to live agents and train it on what they do, until Ctrl-C, SIGTERM or the run's own end.",
        ),
        "work": (
            "flows.cli.agent_work:work",
            "Work on the tasks of an agent that is trained elsewhere, until Ctrl-C or SIGTERM, whenever its run has "
            "some.",
        ),
        "trace": (
            "flows.cli.agent_trace:trace",
            "Print what an agent did and said in a rollout, as a tree, and the checkpoints that were made of it.",
        ),
    },
)
app.add_typer(agent_app, name="agent")

_STORAGE_GC = (
    "flows.cli.cleaning:storage_gc",
    "Give up old training states, results and promoted models, and delete what nothing needs any more.",
)
_STORAGE_DU = (
    "flows.cli.cleaning:storage_du",
    "Print what uses how much: of all that each purpose needs, and of what it alone needs.",
)

plugins_app = typer.Typer(no_args_is_help=True, help="Find, check, test and begin plugins.")
add_commands(
    plugins_app,
    {
        "list": ("flows.cli.plugins:plugins_list", "Print the plugins that are found here, and where each is."),
        "show": ("flows.cli.plugins:plugins_show", "Print what a plugin's manifest says."),
        "check": (
            "flows.cli.plugins:plugins_check",
            "Check a plugin's manifest and files, start it, and end it.",
        ),
        "test": ("flows.cli.plugins:plugins_test", "Put a plugin's own test cases to it."),
        "new": ("flows.cli.plugins:plugins_new", "Write a first plugin, with test cases that pass."),
    },
)
app.add_typer(plugins_app, name="plugins")

snapshot_app = typer.Typer(
    no_args_is_help=True, help="List, save, restore and prune snapshots, such as training states."
)
add_commands(
    snapshot_app,
    {
        "gc": _STORAGE_GC,
        "du": _STORAGE_DU,
        "list": ("flows.cli.snapshots:snapshot_list", "Print snapshots, newest first, as JSON."),
        "show": ("flows.cli.snapshots:snapshot_show", "Print one snapshot as JSON."),
        "save": ("flows.cli.snapshots:snapshot_save", "Save a folder as a snapshot and print its record as JSON."),
        "restore": ("flows.cli.snapshots:snapshot_restore", "Write a snapshot's files to a folder."),
        "export": (
            "flows.cli.snapshots:snapshot_export",
            "Write a snapshot as a tar file, which appears verified and whole.",
        ),
        "label": (
            "flows.cli.snapshots:snapshot_label",
            "Label a snapshot, which keeps it from housekeeping and from prune.",
        ),
        "compare": (
            "flows.cli.snapshots:snapshot_compare",
            "Print in what two snapshots differ, as JSON: their records, and their files by name.",
        ),
        "prune": ("flows.cli.snapshots:snapshot_prune", "Drop the old snapshots of one run."),
    },
)
app.add_typer(snapshot_app, name="snapshot")

storage_app = typer.Typer(no_args_is_help=True, help="Check, measure and clean up the object store.")
add_commands(
    storage_app,
    {
        "verify": (
            "flows.cli.verify:storage_verify",
            "Read everything that is stored; print what is damaged or missing, and which records need it.",
        ),
        "gc": _STORAGE_GC,
        "du": _STORAGE_DU,
    },
)
app.add_typer(storage_app, name="storage")

store_app = typer.Typer(no_args_is_help=True, help="Run the store of rollouts, attempts and spans.")
add_commands(
    store_app,
    {
        "bridge": (
            "flows.cli.bridge:store_bridge",
            "Make each message of a cloud's queue a rollout of the store, until SIGTERM or Ctrl-C.",
        ),
        "copy": (
            "flows.cli.store:store_copy",
            "Copy a whole store into another database, such as from SQLite to PostgreSQL.",
        ),
        "migrate": ("flows.cli.store:store_migrate", "Bring a store's database to the schema of this version."),
    },
)
app.add_typer(store_app, name="store")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rollout {__version__}")
        raise typer.Exit


@app.callback()
def rollout(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """LLM post-training that cannot lose work."""


def main() -> None:
    """Entry point of the `rollout` command."""
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal cannot show is no reason for a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    answer_shells()
    try:
        require_form()
    except ConfigError as error:
        sys.stderr.write(f"rollout: {error}\n")
        sys.exit(2)
    app()
