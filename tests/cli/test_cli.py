"""The `rollout` command: what it prints, its exit codes, and that a dry run or bad input builds and starts nothing."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from deployments.cli import app
from flows.cli.lazy import LazyCommand
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.config import CONFIG_KINDS
from rollout_core.config.base import read_toml
from rollout_core.config.kinds import SUITE_KINDS
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import Lineage, record_lineage
from rollout_core.objects.snapshots import Snapshot, SnapshotStore
from rollout_core.store import SqlLightningStore
from tests.flows.conftest import write_toml
from tests.objects.object_files import BUCKET

COMMANDS = {
    "train-sft": ["train", "sft"],
    "train-ppo": ["train", "ppo"],
    "train-grpo": ["train", "grpo"],
    "infer-batch": ["infer", "batch"],
    "nightly": ["nightly"],
}
ROLLOUT = ("-c", "from flows.cli import main; main()")


@pytest.fixture
def work(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a configuration of each kind of run beside its data."""
    rows = [f"sort {number} 1 =" for number in range(2, 6)]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps({"prompt": r, "completion": " 1"}) + "\n" for r in rows))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": r, "answer": "1"}) + "\n" for r in rows))
    (tmp_path / "held-out.jsonl").write_text('{"prompt": "sort 9 8 =", "answer": "8 9"}\n')
    (tmp_path / "mine.py").write_text("def reward(sample): return float(len(sample.completion))\n")
    model, backend = {"uri": str(tiny_model)}, {"kind": "transformers"}
    learner = {"minibatch_size": 2, "optimizer": {"lr": 1e-3}}
    sft = {**learner, "dataset": {"path": "sft.jsonl"}, "sequence": {"max_length": 64}, "budget": {"max_steps": 3}}
    ppo = {
        **learner,
        "prompts": {"path": "prompts.jsonl"},
        "iterations": 1,
        "prompts_per_iteration": 4,
        "epochs": 1,
        "sampling": {"max_tokens": 4},
    }
    reward = {"kind": "function", "callable": "mine.py:reward"}
    sampling = {"max_tokens": 4}
    documents: dict[str, dict[str, Any]] = {
        "train-sft": {"num_threads": 1, "algorithm": {**sft, "base_model": model}},
        "train-ppo": {
            "num_threads": 1,
            "backend": backend,
            "algorithm": {**ppo, "base_model": model, "reward": reward},
        },
        "train-grpo": {"backend": backend, "algorithm": {**ppo, "base_model": model, "samples_per_prompt": 2}},
        "infer-batch": {
            "model": model,
            "backend": backend,
            "sampling": sampling,
            "input": {"glob": "prompts.jsonl"},
            "output": {"dir": "out"},
        },
        "nightly": {
            "model": model,
            "backend": backend,
            "reward": reward,
            "sft": sft,
            "ppo": ppo,
            "evaluation": {"prompts": {"path": "held-out.jsonl"}, "sampling": sampling},
        },
    }
    for kind, document in documents.items():
        write_toml(tmp_path / f"{kind}.toml", document)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return tmp_path


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch, weights_stay_unread: None) -> None:
    """Server, engine and model weights: whoever tries to start or load one fails the test. A reward may be loaded, in a
    process of its own."""
    popen = subprocess.Popen

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("this must start nothing")

    def refuse_others(command: Any, *arguments: Any, **options: Any) -> Any:
        return (popen if "rollout_core.base.isolation.warden" in command else refuse)(command, *arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", refuse_others)
    for place in (
        # This one first: a file that is imported meanwhile would keep what stands in its place.
        "flows.cli.starting.prefect_server",
        "tasks.runtime.prefect_server.prefect_server",
        "rollout_core.inference.engines.build_backend",
        "rollout_core.inference.hf.TransformersEngine.__init__",
        "rollout_core.inference.vllm_backend.VLLMEngine.__init__",
    ):
        monkeypatch.setattr(place, refuse)


def rollout(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env=environment)


def run(kind: str, *arguments: str, **environment: str) -> Result:
    return rollout(*COMMANDS[kind], "--config", f"{kind}.toml", *arguments, **environment)


def refused(result: Result, code: int = 2) -> str:
    """The one line on stderr of a run that ended with ``code``."""
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    [line] = result.stderr.splitlines()
    assert line.startswith("rollout: ") and result.stdout == ""
    return line.removeprefix("rollout: ")


# Dry runs


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("train-sft", "algorithm=sft model={model} sft_rows=4 trained_tokens=12 truncated_rows=0 minibatch=2"),
        ("train-ppo", "algorithm=ppo model={model} training_prompts=4 minibatch=2 dataset=prompts.jsonl"),
        ("train-grpo", "algorithm=grpo model={model} training_prompts=4 minibatch=2 dataset=prompts.jsonl"),
        ("infer-batch", "model={model} inputs=4 workers=1"),
        ("nightly", "model={model} sft_rows=4 trained_tokens=12 truncated_rows=0 training_prompts=4"),
    ],
)
def test_a_dry_run_says_what_it_found_and_starts_nothing(
    work: Path, tiny_model: Path, nothing_starts: None, kind: str, expected: str
):
    before = set(work.rglob("*"))
    result = run(kind, "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("dry-run OK: " + expected.format(model=tiny_model)) and result.stderr == ""
    assert {path for path in set(work.rglob("*")) - before if "__pycache__" not in str(path)} == set()


@pytest.mark.parametrize("kind", COMMANDS)
def test_without_dry_run_the_same_command_would_start_a_server(work: Path, nothing_starts: None, kind: str):
    """So the test above does prove something."""
    result = run(kind)
    assert isinstance(result.exception, AssertionError) and "must start nothing" in str(result.exception)


def test_overrides_change_the_plan(work: Path, nothing_starts: None):
    result = run("train-sft", "--dry-run", "--set", "algorithm.minibatch_size=3", "--set", "run.name=other")
    assert result.exit_code == 0 and "minibatch=3" in result.stdout
    (work / "two.jsonl").write_text('{"prompt": "sort 1 ="}\n{"prompt": "sort 2 ="}\n')
    result = run("infer-batch", "--dry-run", "--set", "input.glob=two.jsonl", "--workers", "2")
    assert result.exit_code == 0 and result.stdout.endswith("inputs=2 workers=2\n")


def test_nproc_changes_the_processes_of_every_learner(work: Path, nothing_starts: None):
    for kind in ("train-sft", "train-ppo", "nightly"):
        result = run(kind, "--dry-run", "--nproc", "2")
        assert result.exit_code == 0 and "processes=2" in result.stdout, result.stderr
    assert "processes" not in run("train-sft", "--dry-run", "--nproc", "1").stdout
    expected = "--nproc: algorithm: parallel.nproc is 3, but a step has 2 rows"
    assert refused(run("train-sft", "--nproc", "3")).startswith(expected)


def test_a_config_is_read_once(work: Path, nothing_starts: None, monkeypatch: pytest.MonkeyPatch):
    """What it says after that does not count, such as for what follows from ``--nproc``."""

    def read_and_edit(path: Path) -> dict[str, Any]:
        tables = read_toml(path)
        path.write_text("edited = meanwhile")
        return tables

    monkeypatch.setattr("flows.cli.starting.read_toml", read_and_edit)
    result = run("nightly", "--dry-run", "--nproc", "2")
    assert result.exit_code == 0 and "processes=2" in result.stdout, result.stderr


# Bad input


@pytest.mark.parametrize(
    ("kind", "setting", "expected"),
    [
        ("train-sft", "algorithm.dataset.path=none.jsonl", "algorithm.dataset.path: dataset 'none.jsonl' cannot be"),
        ("train-sft", "algorithm.minibatch_size=many", "--set: algorithm.minibatch_size: Input should be a valid"),
        ("train-sft", "algorithm.optimzer.lr=1", "--set: algorithm.optimzer: unknown key; did you mean 'optimizer'"),
        ("train-sft", "algorithm.base_model.uri=./none", "algorithm.base_model: model folder './none' does not exist"),
        ("train-sft", "seed", "--set 'seed': expected KEY=VALUE, such as ppo.iterations=3"),
        ("train-sft", "=3", "--set '=3': expected KEY=VALUE, such as ppo.iterations=3"),
        ("train-sft", "run..name=x", "--set 'run..name=x': expected KEY=VALUE, such as ppo.iterations=3"),
        ("train-sft", "num_threads.x=1", "--set num_threads.x: 'num_threads' is a plain value, not a table"),
        ("train-ppo", "algorithm.reward.callable=mine.py:none", "algorithm.reward: reward mine.py:none: there is no"),
        ("train-ppo", "algorithm.sampling.max_tokens=999", "algorithm.prompts.path: prompt 1 (and 3 more): "),
        ("infer-batch", "input.glob=*.none", "input.glob: no input rows matched '*.none': no such file"),
        ("infer-batch", "output.dir=mine.py", "output.dir: "),
        ("nightly", "evaluation.prompts.path=sft.toml", "evaluation.prompts.path: dataset 'sft.toml' cannot be read"),
    ],
)
@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
def test_bad_input_is_one_line_and_exit_code_2_before_anything_starts(
    work: Path, nothing_starts: None, kind: str, setting: str, expected: str, dry_run: list[str]
):
    assert refused(run(kind, "--set", setting, *dry_run)).startswith(expected)


def test_an_error_is_blamed_on_the_file_or_the_option_it_came_from(work: Path, nothing_starts: None):
    text = (work / "train-sft.toml").read_text()
    (work / "train-sft.toml").write_text("color = 1\n" + text)
    result = run("train-sft", "--set", "algorithm.epochz=1", "--set", "seed=-1", "--resume", "")
    assert result.exit_code == 2
    lines = {line.split(": ")[2]: line.split(": ")[1] for line in result.stderr.splitlines()}
    assert lines == {"color": "train-sft.toml", "algorithm.epochz": "--set", "seed": "--set"}
    message = refused(run("infer-batch", "--workers", "0"))
    assert message.startswith("--workers: workers.count: Input should be greater than or equal to 1; got 0")


@pytest.mark.parametrize(
    ("kind", "key", "meant"),
    [
        ("train-sft", "algorithm.learning_rate", "optimizer.lr"),
        ("train-sft", "algorithm.lr", "optimizer.lr"),
        ("train-sft", "algorithm.weight_decay", "optimizer.weight_decay"),
        ("train-sft", "algorithm.max_steps", "budget.max_steps"),
        ("train-sft", "algorithm.num_train_epochs", "budget.epochs"),
        ("train-ppo", "algorithm.num_train_epochs", "epochs"),
        ("train-sft", "algorithm.batch_size", "minibatch_size"),
        ("train-sft", "algorithm.max_length", "sequence.max_length"),
        ("train-sft", "algorithm.packing", "sequence.max_length"),
        ("train-sft", "algorithm.max_seq_len", "sequence.max_length"),
        ("train-sft", "algorithm.sequence.max_seq_len", "max_length"),
        ("train-grpo", "algorithm.num_generations", "samples_per_prompt"),
        ("infer-batch", "sampling.max_new_tokens", "max_tokens"),
        ("infer-batch", "model.model_name_or_path", "uri"),
        ("train-sft", "algorithm.optimizer.learning_rates", None),
    ],
)
def test_a_key_of_another_library_or_table_is_led_to_ours(
    work: Path, nothing_starts: None, kind: str, key: str, meant: str | None
):
    message = refused(run(kind, "--set", f"{key}=1"))
    hint = "" if meant is None else f"; did you mean {meant!r}?"
    assert message == f"--set: {key}: unknown key{hint}"


def test_the_old_key_in_parameters_that_prefect_has_stored_leads_to_ours():
    document = {"algorithm": {"packing": {"max_seq_len": 64}}}
    with pytest.raises(ValueError, match=r"algorithm\n.*packing: unknown key; did you mean 'sequence.max_length'\?"):
        CONFIG_KINDS["train-sft"].model_validate(document)


def test_every_key_of_other_libraries_leads_to_one_that_there_is():
    from rollout_core.config.base import ELSEWHERE

    schemas = json.dumps([model.model_json_schema() for model in CONFIG_KINDS.values()])
    for meant in ELSEWHERE.values():
        assert all(f'"{part}":' in schemas for key in meant for part in key.split("."))


@pytest.mark.parametrize(
    "command", [[], ["infer"], ["infer", "batch"], ["train", "sft"], ["store", "serve"], ["nightly"]]
)
def test_help_shows_every_word_of_its_texts(command: list[str]):
    import click

    found: Any = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]
    found = getattr(found, "loaded", found)
    shown = " ".join(rollout(*command, "--help").stdout.split())
    texts = [option.help for option in found.params if isinstance(option, click.Option) or hasattr(option, "help")]
    texts += [found.help.partition("\n\n")[0]]
    for text in filter(None, texts):
        assert " ".join(text.split()) in shown
    assert command != ["infer", "batch"] or "Instead of [workers].count." in shown


def lazy_commands(group: Any, *words: str) -> Iterator[tuple[str, LazyCommand]]:
    for name, command in group.commands.items():
        if isinstance(command, LazyCommand):
            yield " ".join([*words, name]), command
        else:
            yield from lazy_commands(command, *words, name)


def test_lists_of_commands_say_of_each_the_first_sentence_of_its_own_help():
    """The lists are written out, so that none of the files is imported for them."""
    commands = dict(lazy_commands(typer.main.get_command(app)))
    assert {"init", "train sft", "storage verify", "doctor", "ops doctor", "ui"} <= set(commands)
    for words, command in commands.items():
        assert command.help == command.loaded.get_short_help_str(limit=1000), words


def test_lists_of_commands_import_none_of_their_files():
    """Nor what these need: of the project itself little more than the tables."""
    program = """
import sys
from typer.testing import CliRunner
from deployments.cli import app
for words in ([], ["train"], ["infer"], ["agent"], ["snapshot"], ["storage"], ["store"], ["ops"], ["cloud"]):
    assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0
print(*sorted(name for name in sys.modules if name.startswith(("flows.", "deployments.", "tasks", "rollout_core.c"))))
print(*sorted({"prefect", "torch", "rich", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ours, others = done.stdout.splitlines()
    ours_alone = ["deployments.cli", "flows.cli", "flows.cli.completion", "flows.cli.lazy", "tasks", "tasks.runtime"]
    assert ours.split() == ours_alone
    assert others == ""


def test_the_help_of_the_doctor_imports_nothing_of_what_it_checks():
    """It answers within a quarter of a second on a quiet machine (`benchmarks/cached.py`)."""
    program = (
        "import sys, deployments.cli.doctor; print(*{'prefect', 'torch', 'pydantic', 'fsspec'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_the_version_is_the_packages():
    from rollout_core import __version__

    result = rollout("--version")
    assert (result.exit_code, result.stdout) == (0, f"rollout {__version__}\n")


def test_the_schema_of_one_kind_of_run_is_printed_by_its_name():
    everything = json.loads(rollout("schema").stdout)
    assert list(everything) == [*CONFIG_KINDS, *SUITE_KINDS]
    for kind in everything:
        assert json.loads(rollout("schema", kind).stdout) == everything[kind]
    expected = "no kind of configuration is named 'sft'; expected one of nightly, train-sft, "
    assert refused(rollout("schema", "sft")).startswith(expected)


def test_the_first_digits_of_a_models_id_are_taken_and_unknown_ones_refused_by_the_plan(
    work: Path, tiny_model: Path, nothing_starts: None
):
    model = ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"]).put_tree(tiny_model)
    for kind, key in (("infer-batch", "model"), ("train-sft", "algorithm.base_model"), ("nightly", "model")):
        result = run(kind, "--dry-run", "--set", f'{key}.uri="{model.short}"')
        assert result.exit_code == 0 and f" model={model} " in result.stdout, result.stderr
        message = refused(run(kind, "--set", f'{key}.uri="deadbeef"'))
        assert message.startswith(f"{key}.uri: no folder has an id that begins with deadbeef in the object store")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"ROLLOUT_STORAGE": "s3://user:PLANTED-SECRET@bucket/x"}, "object store: 's3://user:***@bucket/x' holds a"),
        ({"ROLLOUT_STORAGE": "https://user:PLANTED-SECRET@host"}, "object store: 'https://user:***@host' holds a"),
        ({"ROLLOUT_STORAGE": "s3:/user:PLANTED-SECRET@bucket"}, "object store: storage URL 's3:***@bucket' has"),
        ({"ROLLOUT_DATABASE": "mysql://root:PLANTED-SECRET@h/db"}, "database: database URL is 'mysql://root:***@h/db'"),
        ({"ROLLOUT_DATABASE": "root:PLANTED-SECRET@h/db"}, "database: database URL is 'root:***@h/db'"),
        (
            {"ROLLOUT_DATABASE": "postgresql://u:PLANTED-SECRET#x@h/db"},
            "database: database URL has port '***'; expected a number",
        ),
        ({"backend.url": "http://user:PLANTED-SECRET@host/v1"}, "--set: backend.url: an address is kept and shown"),
        ({"backend.url": "http://host/v1?PLANTED-SECRET"}, "--set: backend.url: an address is kept and shown"),
        ({"backend.url": "http://host/v1#PLANTED-SECRET"}, "--set: backend.url: an address is kept and shown"),
        ({"backend.api_key": "PLANTED-SECRET"}, "--set: backend.api_key: "),
        ({"input.glob": "s3://user:PLANTED-SECRET@bucket/*"}, "--set: input.glob: 's3://user:***@bucket/*' holds a"),
        ({"output.dir": "gs://user:PLANTED-SECRET@bucket/x"}, "--set: output.dir: 'gs://user:***@bucket/x' holds a"),
        ({"model.uri": "https://PLANTED-SECRET@host/x"}, "--set: model.uri: 'https://***@host/x' holds a"),
        ({"workers": "s3://user:PLANTED-SECRET@bucket"}, "--set: workers: Input should be a valid dictionary"),
    ],
)
def test_no_password_of_an_address_is_printed(work: Path, nothing_starts: None, change: dict[str, str], expected: str):
    settings = {name: value for name, value in change.items() if name.isupper()}
    sets = [f"--set={key}={value}" for key, value in change.items() if key not in settings]
    endpoint = ["--set=backend.kind=openai", "--set=backend.url=http://127.0.0.1:1/v1"] if sets else []
    result = run("infer-batch", *endpoint, *sets, **settings)
    assert result.exit_code == 2 and expected in result.stderr, result.stderr
    assert "PLANTED" not in result.stderr + result.stdout


def test_a_prefect_server_is_not_asked_at_an_address_with_a_password(work: Path):
    message = refused(run("train-sft", PREFECT_API_URL="http://user:PLANTED-SECRET@127.0.0.1:1/api"))
    assert message.startswith("PREFECT_API_URL=http://user:***@127.0.0.1:1/api holds a password")


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("ROLLOUT_STORAGE", "s4://x", "object store: storage URL 's4://x' is unknown"),
        ("ROLLOUT_DATABASE", "oracle://x", "database: database URL is 'oracle://x'; expected sqlite:///"),
    ],
)
@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
def test_settings_that_cannot_be_are_one_line_before_anything_starts(
    work: Path, nothing_starts: None, setting: str, value: str, expected: str, dry_run: list[str]
):
    for kind in COMMANDS:
        assert refused(run(kind, *dry_run, **{setting: value})).startswith(expected)


def test_a_dry_run_says_what_it_could_not_check(work: Path, nothing_starts: None):
    result = run("infer-batch", "--dry-run", ROLLOUT_STORAGE="block:content-addressed-storage/mine")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.endswith(" not_checked=object store and database\n")


def test_a_config_that_is_missing_or_no_toml_is_one_line(work: Path, nothing_starts: None):
    assert refused(rollout("train", "sft", "--config", "none.toml")) == "none.toml: no such config file"
    (work / "broken.toml").write_text("a = = 1")
    assert refused(rollout("nightly", "--config", "broken.toml")).startswith("broken.toml: not readable as TOML")
    assert refused(rollout("nightly", "--config", ".")).startswith(".: not readable as TOML")


def test_each_thing_that_is_wrong_has_its_line(work: Path, nothing_starts: None):
    (work / "sft.jsonl").write_text("{}}\n[]\n")
    result = run("nightly", "--set", "evaluation.prompts.path=none.jsonl")
    assert result.exit_code == 2
    assert [line.split(": ")[:3] for line in result.stderr.splitlines()] == [
        ["rollout", "sft.dataset.path", "sft.jsonl:1"],
        ["rollout", "sft.dataset.path", "sft.jsonl:2"],
        ["rollout", "evaluation.prompts.path", "dataset 'none.jsonl' cannot be read"],
    ]


def test_debug_shows_the_traceback(work: Path, nothing_starts: None):
    result = run("train-sft", "--debug", "--set", "seed=-1")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr and result.stderr.splitlines()[-1].startswith("rollout: --set: seed")


@pytest.mark.parametrize(
    "arguments",
    [["infer", "batch"], ["train", "dpx", "--config", "x"], ["nightly", "--confg", "x"], ["snapshot", "show"]],
)
def test_a_wrong_command_line_is_exit_code_2_with_the_usage(arguments: list[str]):
    result = rollout(*arguments)
    assert result.exit_code == 2 and "Usage: " in result.stderr and "Traceback" not in result.stderr


def test_a_run_id_that_is_none_is_refused_before_anything_starts(work: Path, nothing_starts: None):
    expected = "output.dir: run id: 'yesterday' is no run id; expected a ULID (26 characters)"
    assert refused(run("infer-batch", "--resume", "yesterday")) == expected


def test_the_command_is_a_program(work: Path, start_process: Callable[..., subprocess.Popen[str]]):
    """A real process: exit code, one line, no traceback, nothing started or written, and quick help."""

    def finish(*arguments: str) -> tuple[int, str]:
        process = start_process(*ROLLOUT, *arguments, cwd=work, env={"PYTHONPATH": str(Path(__file__).parents[2])})
        output, _ = process.communicate(timeout=180)
        return process.returncode, output

    code, output = finish("train", "sft", "--config", "train-sft.toml", "--set", "algorithm.dataset.path=none.jsonl")
    assert (code, len(output.splitlines())) == (2, 1), output
    assert output.startswith("rollout: algorithm.dataset.path: dataset 'none.jsonl' cannot be read")
    code, output = finish("train", "ppo", "--config", "train-ppo.toml", "--dry-run")
    assert code == 0 and output.startswith("dry-run OK: algorithm=ppo"), output
    assert not (work / "data").exists() and not (work / "objects").exists() and not (work / "rollout.db").exists()
    code, output = finish("--help")
    assert code == 0 and all(name in output for name in ("train", "infer", "nightly", "snapshot", "schema"))


# Snapshots, lineage, schema


@pytest.fixture
def saved(tmp_path: Path) -> list[Snapshot]:
    """Three snapshots of two runs in the object store of the settings."""
    store = SnapshotStore(ObjectStore.from_url(str(tmp_path / "objects")))
    made = []
    for step, run_id in ((1, "one"), (2, "one"), (3, "two")):
        folder = tmp_path / f"state-{step}"
        folder.mkdir()
        (folder / "state.json").write_text(str(step))
        made.append(store.save(folder, run_id=run_id, step=step, algorithm="sft", label=f"step {step}"))
    return made


def test_snapshots_are_listed_newest_first_as_json(saved: list[Snapshot]):
    def steps(*arguments: str) -> list[int]:
        result = rollout("snapshot", "list", *arguments)
        assert result.exit_code == 0, result.stderr
        return [row["step"] for row in json.loads(result.stdout)]

    assert steps() == [3, 2, 1]
    assert steps("--run-id", "one") == [2, 1] and steps("--limit", "1") == [3]
    assert steps("--kind", "train_state") == [3, 2, 1] and steps("--kind", "buffer") == []
    assert "unknown kind of snapshot: 'trainstate'" in refused(rollout("snapshot", "list", "--kind", "trainstate"))


def test_a_snapshot_is_shown_as_json(saved: list[Snapshot], tmp_path: Path):
    for arguments in ([], ["--storage", str(tmp_path / "objects")], ["--storage", f"file://{tmp_path}/objects"]):
        result = rollout("snapshot", "show", saved[0].id, *arguments)
        assert result.exit_code == 0 and Snapshot.model_validate_json(result.stdout) == saved[0]


def test_the_first_digits_of_an_id_stand_for_it_as_long_as_they_are_one_ids(saved: list[Snapshot], tmp_path: Path):
    objects = ObjectStore.from_url(str(tmp_path / "objects"))
    made = Lineage(
        stage="sft_update",
        version=1,
        key=hash_bytes(b"key"),
        inputs={},
        outputs=(saved[0].files, ContentId("a" * 64), ContentId("a" * 63 + "b")),
        created_at=datetime.now(UTC),
        software={},
    )
    record_lineage(objects, made)
    for digits in (8, 12, 63):
        shown = rollout("snapshot", "show", saved[0].id[:digits])
        assert shown.exit_code == 0 and Snapshot.model_validate_json(shown.stdout) == saved[0]
        traced = rollout("lineage", saved[0].files[:digits], "--format", "json")
        assert traced.exit_code == 0 and json.loads(traced.stdout)[0]["stage"] == "sft_update"
    message = refused(rollout("lineage", "a" * 20))
    assert message.startswith(f"2 ids begin with {'a' * 20}, {'a' * 64} and ") and message.endswith("give more digits")
    for arguments in (["snapshot", "show"], ["lineage"]):
        assert "or the first of them, at least 8" in refused(rollout(*arguments, saved[0].id[:7]))
        assert "has an id that begins with 0123456789" in refused(rollout(*arguments, "0123456789"))


@pytest.mark.parametrize("storage", ["s3:/bucket/x", "s3:bucket", "file:/tmp/x"])
def test_an_address_short_of_a_slash_is_not_taken_for_a_folder(storage: str):
    for result in (
        rollout("snapshot", "list", "--storage", storage),
        rollout("snapshot", "list", ROLLOUT_STORAGE=storage),
    ):
        assert refused(result).startswith(f"storage URL {storage!r} has one slash or none after the colon")


@pytest.mark.server
def test_snapshots_are_found_in_a_storage_block_of_the_server(
    saved: list[Snapshot], tmp_path: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
):
    from blocks import ContentAddressedStorage

    ContentAddressedStorage(url=f"file://{tmp_path / 'objects'}").save("cli-storage", overwrite=True)
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'elsewhere'}")
    block = "block:content-addressed-storage/cli-storage"
    for result in (rollout("snapshot", "list", "--storage", block), rollout("snapshot", "list", ROLLOUT_STORAGE=block)):
        assert result.exit_code == 0, result.stderr
        assert [row["step"] for row in json.loads(result.stdout)] == [3, 2, 1]
    message = refused(rollout("snapshot", "list", "--storage", "block:content-addressed-storage/none"))
    assert message.startswith("setting 'block:content-addressed-storage/none' names no block of the Prefect server")


def test_what_is_not_there_is_exit_code_2_and_makes_no_folder(tmp_path: Path):
    unknown = hash_bytes(b"unknown")
    assert refused(rollout("snapshot", "show", unknown)) == f"snapshot not found: {unknown}"
    assert refused(rollout("snapshot", "show", "abc")).startswith("not a content id: 'abc'; expected 64")
    assert refused(rollout("snapshot", "show", unknown, "--storage", "ftp://x")).startswith("storage URL 'ftp://x'")
    assert refused(rollout("lineage", unknown)) == f"no stage recorded that it made {unknown}"
    result = rollout("snapshot", "list")
    assert result.exit_code == 0 and json.loads(result.stdout) == []
    assert not (tmp_path / "objects").exists()


def test_the_schema_of_every_kind_of_run_is_printed_as_json():
    result = rollout("schema")
    assert result.exit_code == 0 and set(json.loads(result.stdout)) == {*CONFIG_KINDS, *SUITE_KINDS}


# Real runs


@pytest.mark.server
def test_runs_print_what_they_made_and_a_reward_that_fails_loses_nothing(
    work: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
):
    server = {"PREFECT_API_URL": prefect_server}
    result = run("train-sft", **server)
    assert result.exit_code == 0, result.stderr
    assert [line.split(": ")[0] for line in result.stdout.splitlines()] == ["model", "train state"]
    assert result.stdout.endswith("(step 3)\n")

    (work / "mine.py").write_text(
        "def reward(sample):\n    return float('nan') if sample.prompt == 'sort 4 1 =' else 1.0\n"
    )
    result = run("train-ppo", **server)
    assert result.exit_code == 1 and result.stdout == ""
    last = result.stderr.splitlines()[-1]
    # The order of this seed, in which the prompt that the reward breaks at is the third.
    assert last.startswith("rollout: reward mine.py:reward returned nan for sample 3 (")

    # The completions are kept: nothing is generated again once the reward is mended.
    monkeypatch.setattr("rollout_core.inference.hf.TransformersEngine.__init__", lambda *arguments: 1 / 0)
    (work / "mine.py").write_text("def reward(sample):\n    return 1.0\n")
    result = run("train-ppo", **server)
    assert result.exit_code == 0, result.stderr
    assert [line.split(": ")[0] for line in result.stdout.splitlines()] == ["reward", "model", "train state"]
    assert result.stdout.startswith("reward: 1.000\n")


@pytest.mark.server
def test_batch_inference_prints_its_run_and_goes_on_with_it(work: Path, prefect_server: str):
    first, again = (run("infer-batch", PREFECT_API_URL=prefect_server) for _ in range(2))
    assert first.exit_code == 0, first.stderr
    run_id = (work / "out" / "run-id").read_text().strip()
    path = work / "out" / "completions.jsonl"
    *figures, last = first.stdout.splitlines()
    assert last == again.stdout.splitlines()[-1] == f"run {run_id}: 4 completions in {path}"
    assert ["samples", "4"] in [line.split() for line in figures]
    assert ["generated", "now", "4"] in [line.split() for line in figures]
    assert ["generated", "now", "0"] in [line.split() for line in again.stdout.splitlines()]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [f"sort {number} 1 =" for number in range(2, 6)]
    assert "sample_completed" not in first.stderr

    # Other parameters are refused, by a dry run too, with exit code 2 and in one line that names them.
    for more in (["--dry-run"], [], ["--resume", run_id]):
        message = refused(
            run("infer-batch", "--set", "sampling.temperature=0.5", *more, PREFECT_API_URL=prefect_server)
        )
        expected = (
            f"output.dir: run {run_id} was started with other parameters: sampling.temperature: got 0.5, expected 1.0."
        )
        assert message.startswith(expected)
    unknown = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
    assert f"run {unknown} is unknown to the object store" in refused(run("infer-batch", "--resume", unknown))

    # What decides over no completion may change; --resume goes on in another folder.
    (work / "prompts.jsonl").write_text(
        (work / "prompts.jsonl").read_text() + '{"prompt": "sort 9 1 =", "id": "new"}\n'
    )
    result = run(
        *("infer-batch", "--resume", run_id, "--workers", "2", "--events"),
        *("--set", "output.dir=elsewhere", "--set", "output.format=parquet"),
        PREFECT_API_URL=prefect_server,
    )
    assert result.exit_code == 0, result.stderr
    table = pyarrow.parquet.read_table(work / "elsewhere" / "completions.parquet").to_pylist()
    assert [row["prompt"] for row in table] == [*(row["prompt"] for row in rows), "sort 9 1 ="]
    assert [row["completion"] for row in table[:4]] == [row["completion"] for row in rows]
    [event] = [json.loads(line) for line in result.stderr.splitlines() if line.startswith("{")]
    assert (event["topic"], event["id"], event["run_id"]) == ("sample_completed", "new", run_id)
    assert not (work / "elsewhere" / "run-id").exists()


@pytest.mark.server
def test_batch_inference_from_a_bucket_into_a_bucket(
    work: Path, prefect_server: str, s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    import s3fs

    files = s3fs.S3FileSystem(**s3, use_listings_cache=False)
    for name, value in (("ENDPOINT_URL", "endpoint_url"), ("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret")):
        monkeypatch.setenv(f"AWS_{name}", s3[value])
    place = f"{BUCKET}/{work.name}"
    files.pipe_file(f"{place}/in/a.jsonl", (work / "prompts.jsonl").read_bytes())
    places = ("--set", f"input.glob=s3://{place}/in/*.jsonl", "--set", f"output.dir=s3://{place}/out")
    environment = {"PREFECT_API_URL": prefect_server, "ROLLOUT_STORAGE": f"s3://{place}/objects"}

    result = run("infer-batch", *places, "--dry-run", **environment)
    assert result.exit_code == 0 and " inputs=4 " in result.stdout, result.stderr
    assert files.find(f"{place}/out") == files.find(f"{place}/objects") == []
    result = run("infer-batch", *places, **environment)
    assert result.exit_code == 0, result.stderr
    run_id = files.cat(f"{place}/out/run-id").decode().strip()
    written = files.cat(f"{place}/out/completions.jsonl")
    assert result.stdout.endswith(f"run {run_id}: 4 completions in s3://{place}/out/completions.jsonl\n")
    assert [json.loads(line)["prompt"] for line in written.splitlines()] == [f"sort {n} 1 =" for n in range(2, 6)]

    before = files.info(f"{place}/out/completions.jsonl")["LastModified"]
    result = run("infer-batch", *places, **environment)
    assert result.exit_code == 0 and ["generated", "now", "0"] in [line.split() for line in result.stdout.splitlines()]
    assert files.info(f"{place}/out/completions.jsonl")["LastModified"] == before, "it was there already"
    message = refused(run("infer-batch", *places, "--set", "sampling.n=2", **environment))
    assert "sampling.n: got 2, expected 1." in message and message.endswith(f"or remove s3://{place}/out/run-id")
    message = refused(run("infer-batch", *places, "--set", "output.dir=s3://none-such/out", **environment))
    assert message.startswith("output.dir: there is no bucket at s3://none-such/")


@pytest.mark.server
def test_another_model_is_refused_before_the_first_sample(work: Path, prefect_server: str, other_tiny_model: Path):
    """Its content counts, which is known once it is filed."""
    server = {"PREFECT_API_URL": prefect_server}
    assert run("infer-batch", **server).exit_code == 0
    before = (work / "out" / "completions.jsonl").read_bytes()
    result = run("infer-batch", "--set", f"model.uri={other_tiny_model}", **server)
    assert result.exit_code == 2 and result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert "was started with other parameters: model: got " in last
    assert last.endswith(f"or remove {work / 'out' / 'run-id'}")
    assert (work / "out" / "completions.jsonl").read_bytes() == before


@pytest.mark.server
def test_a_run_ends_as_soon_as_too_many_samples_failed(work: Path, prefect_server: str):
    rows = [{"prompt": "9 " * 300 if number < 40 else f"sort {number} ="} for number in range(240)]
    (work / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    slow = ("workers.claim_size=16", "backend.kind=scripted", "backend.delay_seconds=0.5")
    settings = [part for setting in slow for part in ("--set", setting)]
    result = subprocess.run(
        [sys.executable, *ROLLOUT, "infer", "batch", "--config", "infer-batch.toml", *settings],
        env={**os.environ, "PREFECT_API_URL": prefect_server},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert " of 240 samples failed, more than failures.max_share = 0.1 allows; such as: 600 tokens" in result.stderr

    async def count() -> int:
        async with SqlLightningStore.from_url(f"sqlite:///{work / 'rollout.db'}") as store:
            return (await store.query_rollouts(status_in=["succeeded"], limit=0)).total

    assert asyncio.run(count()) < 100


@pytest.mark.server
def test_failed_samples_keep_their_row_and_too_many_fail_the_run(work: Path, prefect_server: str):
    server = {"PREFECT_API_URL": prefect_server}
    with (work / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "9 " * 300, "id": "long"}) + "\n")
    result = run("infer-batch", **server)
    assert result.exit_code == 1 and result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith(
        "rollout: 1 of 5 samples failed, more than failures.max_share = 0.1 allows; such as: 600 tokens"
    )
    assert not (work / "out" / "completions.jsonl").exists()
    result = run("infer-batch", "--set", "failures.max_share=0.5", **server)
    assert result.exit_code == 0, result.stderr
    assert ["failed", "1"] in [line.split() for line in result.stdout.splitlines()]
    row = json.loads((work / "out" / "completions.jsonl").read_text().splitlines()[-1])
    assert (row["id"], row["completion"], row["finish_reason"]) == ("long", None, "error")
    assert "exceed the model's context of 256 tokens" in row["error"]
