"""`rollout init`: a first configuration of every kind from what a folder holds; commands that need no file."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from flows.cli import app
from rollout_core.config import CONFIG_KINDS, BudgetConfig, FilesDataset, NightlyConfig, load_config, parse_config
from rollout_core.data import to_jsonl
from rollout_core.data.dataset_sources import read_dataset
from rollout_core.data.datasets import PromptRow, SftRow
from rollout_core.plans.first_config import KINDS, choose, config_text
from rollout_core.plans.surroundings import Surroundings, look_around

ROWS = {
    "data/demos.jsonl": {"prompt": "2 + 2 =", "completion": " 4"},
    "data/prompts.jsonl": {"prompt": "2 + 2 =", "answer": "4"},
    "data/held-out.jsonl": {"prompt": "3 + 3 =", "answer": "6"},
    "data/pairs.jsonl": {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
    "data/labelled.jsonl": {"prompt": "2 + 2 =", "completion": " 4", "label": True},
}
FILES = {
    "sft": "data/demos.jsonl",
    **dict.fromkeys(("rm", "dpo", "ipo"), "data/pairs.jsonl"),
    "kto": "data/labelled.jsonl",
    **dict.fromkeys(("ppo", "grpo", "batch", "agent"), "data/prompts.jsonl"),
    "nightly": "data/demos.jsonl",
}


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rows of each form and a model, beside things that are none of a run's."""
    for name, row in ROWS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    model = tmp_path / "models/mine"
    model.mkdir(parents=True)
    for file in tiny_model.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())  # of the same matrices, heads that vLLM has attention for
    (model / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2, "num_key_value_heads": 2}))
    for name in (".hidden/rows.jsonl", "node_modules/rows.jsonl", "env/rows.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(ROWS["data/demos.jsonl"]) + "\n")
    (tmp_path / "env/pyvenv.cfg").touch()
    (tmp_path / "broken.jsonl").write_text("no JSON\n")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return tmp_path


def rollout(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_models_and_rows_are_found_and_nothing_else(project: Path):
    found = look_around(project)
    assert [model.path for model in found.models] == ["models/mine"]
    assert {file.path for file in found.files} == set(ROWS)


@pytest.mark.parametrize("kind", ["sft", "grpo", "batch"])
def test_columns_under_other_names_are_named_in_the_configuration(tmp_path: Path, monkeypatch, kind: str):
    monkeypatch.chdir(tmp_path)
    Path("qa.csv").write_text('Question,answer,source\n"What is 1+1?",2,a book\n')
    Path("notes.jsonl").write_text('{"title": "a", "body": "b"}\n')
    written = rollout("init", kind)
    named = "Question as prompt, answer as completion" if kind == "sft" else "Question as prompt"
    assert "rows qa.csv\n" in written and f"note: qa.csv: {named}; its columns in the configuration" in written
    schema = KINDS[kind].schema
    config = parse_config(tomllib.loads(Path(f"{kind}.toml").read_text()), CONFIG_KINDS[schema])
    document = config.model_dump()
    if kind == "sft":
        (row,) = read_dataset(config.algorithm.dataset, SftRow, base=tmp_path)  # pyright: ignore[reportAttributeAccessIssue]
        assert (row.prompt, row.completion) == ("What is 1+1?", "2")
    elif kind == "grpo":
        (row,) = read_dataset(config.algorithm.prompts, PromptRow, base=tmp_path)  # pyright: ignore[reportAttributeAccessIssue]
        assert (row.prompt, json.loads(to_jsonl([row]))["answer"]) == ("What is 1+1?", "2")
        assert "answer" in Path("rewards/reward.py").read_text()
    else:
        assert document["input"]["columns"] == {"prompt": "Question"}
    Path("qa.csv").unlink()
    assert "note: notes.jsonl has body, title; rows need prompt" in rollout("init", kind, "--force")


@pytest.mark.parametrize("kind", ["rm", "dpo"])
def test_pairs_whose_prompt_has_another_name_are_not_trained_without_it(tmp_path: Path, monkeypatch, kind: str):
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text('{"question": "2 + 2 =", "chosen": " 4", "rejected": " 5"}\n')
    assert "note: pairs.jsonl: question as prompt" in rollout("init", kind)
    config = load_config(Path(f"{kind}.toml"), CONFIG_KINDS[f"train-{kind}"])
    assert config.model_dump()["algorithm"]["dataset"]["columns"] == {"prompt": "question"}


def test_what_cannot_be_looked_at_is_passed_by(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.jsonl")
    os.mkfifo("pipe.json")
    Path("deep.jsonl").write_text("[" * 200_000 + "\n")
    Path("deep.json").write_text('[{"a": ' + "[" * 200_000)
    Path("TRAIN.JSONL.GZ").write_bytes(gzip.compress(LINE))
    assert [file.path for file in look_around(tmp_path).files] == ["TRAIN.JSONL.GZ"]


def test_held_out_rows_are_found_by_other_names_of_their_columns_too(project: Path):
    for name in ("data/held-out.jsonl", "data/demos.jsonl", "data/labelled.jsonl"):
        Path(name).unlink()
    Path("data/eval.csv").write_text("Question,solution\n3 + 3 =,6\n")
    written = rollout("init", "grpo")
    assert "rows data/prompts.jsonl\n" in written
    rollout("init", "nightly")
    config = load_config(Path("nightly.toml"), NightlyConfig)
    assert config.evaluation.prompts.model_dump()["path"] == "data/eval.csv"
    assert config.evaluation.prompts.columns == {"prompt": "Question", "answer": "solution"}


ROW = {"prompt": "2 + 2 =", "completion": " 4"}
LINE = json.dumps(ROW).encode() + b"\n"


FORMS = {
    "rows.jsonl.gz": gzip.compress(LINE * 3),
    "rows.jsonl.xz": lzma.compress(LINE),
    "rows.json": b"[\n" + LINE.strip() + b"\n]",
    "rows.tsv": b"prompt\tcompletion\n2 + 2 =\t 4\n",
    "rows.csv.bz2": bz2.compress(b"prompt,completion\r\n2 + 2 =, 4\r\n"),
    "rows.arrow": None,
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_found_in_files_of_every_form(tmp_path: Path, monkeypatch, name: str):
    monkeypatch.chdir(tmp_path)
    data = FORMS[name]
    if data is None:
        table = pyarrow.Table.from_pylist([ROW])
        with pyarrow.OSFile(name, "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        Path(name).write_bytes(data)
    for other, text in (
        ("package.json", '{"prompt": 1, "completion": 2}'),
        ("cut.jsonl.gz", "no gzip"),
        ("n.json", "[1]"),
    ):
        Path(other).write_text(text)
    assert [file.path for file in look_around(tmp_path).files] == [name]
    assert f"rows {name}\n" in rollout("init", "sft")
    config = load_config(Path("sft.toml"), CONFIG_KINDS["train-sft"])
    (read, *_) = read_dataset(config.algorithm.dataset, SftRow, base=tmp_path)  # pyright: ignore[reportAttributeAccessIssue]
    assert (read.prompt, read.completion) == tuple(ROW.values())


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"instruction": "Add.", "input": "2 2", "output": "4"}, "alpaca"),
        ({"conversations": [{"from": "human", "value": "2 + 2"}, {"from": "gpt", "value": "4"}]}, "sharegpt"),
    ],
)
def test_rows_of_others_making_are_taken_as_they_are(project: Path, row: dict[str, object], form: str):
    for name in ROWS:
        Path(name).unlink()
    Path("theirs.jsonl").write_text(json.dumps(row) + "\n")
    assert "rows theirs.jsonl" in rollout("init", "sft")
    config = parse_config(tomllib.loads(Path("sft.toml").read_text()), CONFIG_KINDS["train-sft"])
    dataset = config.model_dump()["algorithm"]["dataset"]
    assert dataset["format"] == form and dataset["path"] == "theirs.jsonl"
    (read,) = read_dataset(config.algorithm.dataset, SftRow, base=project)  # pyright: ignore[reportAttributeAccessIssue]
    assert read.prompt == "Add.\n\n2 2" if form == "alpaca" else read.messages is not None


def test_an_input_beside_an_instruction_is_never_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    row = {"instruction": "Add.", "input": "2 2", "response": "4"}
    Path("theirs.jsonl").write_text(json.dumps(row) + "\n")
    (hint,) = (line for line in rollout("init", "sft").splitlines() if line.startswith("note: theirs.jsonl"))
    assert hint.endswith(
        'give it as a data set with format = "alpaca" and columns = { output = "response" }, which joins the input to '
        "the instruction"
    )
    told = FilesDataset(path="theirs.jsonl", format="alpaca", columns={"output": "response"})
    (read,) = read_dataset(told, SftRow, base=tmp_path)
    assert (read.prompt, read.completion) == ("Add.\n\n2 2", "4")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_conversations_are_demonstrations_where_they_end_with_an_answer_and_else_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
):
    monkeypatch.chdir(tmp_path)
    asked = [{"role": "user", "content": "2 + 2"}]
    answered = [*asked, {"role": "assistant", "content": "4"}]
    rows = {"a-held-out": asked, "b-prompts": asked, "c-train": answered}
    for name, messages in rows.items():
        row = {"messages": messages, "answer": "4"}
        if ending == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), f"{name}.parquet")
        else:
            Path(f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    rollout("init", "nightly")
    config = load_config(Path("nightly.toml"), NightlyConfig)
    assert config.grpo is not None
    chosen = (config.sft.dataset, config.grpo.prompts, config.evaluation.prompts)
    assert [source.model_dump()["path"] for source in chosen] == [
        f"{name}.{ending}" for name in ("c-train", "b-prompts", "a-held-out")
    ]
    Path(f"c-train.{ending}").unlink()
    assert "not found here: a file of rows" in rollout("init", "sft")


ASKED, ANSWER = {"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}


@pytest.mark.parametrize("kind", ["grpo", "batch"])
@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": [ASKED, ANSWER]}, "the conversations of rows.jsonl end with the assistant's message; a prompt"),
        ({"prompt": [ASKED, ANSWER]}, "the conversations of rows.jsonl end with the assistant's message; a prompt"),
        (
            {"conversations": [{"from": "human", "value": "2 + 2"}, {"from": "gpt", "value": "4"}]},
            "the conversations of rows.jsonl end with the assistant's message; a prompt ends before the answer",
        ),
        (
            {"instruction": "Add.", "input": "2 2", "output": "4"},
            "rows.jsonl has input, instruction, output; --data rows.jsonl takes instruction and input as the prompt",
        ),
    ],
)
def test_rows_with_answers_are_no_prompts_and_the_note_says_so(tmp_path: Path, monkeypatch, kind: str, row, why: str):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    written = rollout("init", kind)
    assert "rows data/train.jsonl\n" in written and f"note: {why}" in written
    if "--data" in why:
        assert "rows rows.jsonl\n" in rollout("init", kind, "--force", "--data", "rows.jsonl")


@pytest.mark.parametrize("kind", KINDS)
def test_every_first_configuration_is_one_of_its_kind(kind: str, project: Path):
    written = rollout("init", kind)
    config = parse_config(tomllib.loads(Path(f"{kind}.toml").read_text()), CONFIG_KINDS[KINDS[kind].schema])
    assert config.run.name == kind
    assert f"wrote {kind}.toml: model models/mine, rows {FILES[kind]}" in written and "not found" not in written
    named = json.dumps(config.model_dump(mode="json"))
    assert f'"{FILES[kind]}"' in named and '"models/mine"' in named
    if kind in ("agent", "nightly"):
        assert '"data/held-out.jsonl"' in named


def test_a_first_configuration_trains_as_many_steps_as_are_set(project: Path):
    """One epoch is what it does by itself, and no second limit that a larger one would have to be raised with."""
    rollout("init", "sft")
    model = CONFIG_KINDS[KINDS["sft"].schema]
    plain = load_config("sft.toml", model).model_dump()["algorithm"]["budget"]
    assert BudgetConfig(**plain).passes == 1
    steps = load_config("sft.toml", model, {"algorithm.budget.max_steps": 2000}).model_dump()["algorithm"]["budget"]
    assert BudgetConfig(**steps) == BudgetConfig(max_steps=2000) and BudgetConfig(**steps).passes is None


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_folder_gives_a_configuration_that_says_what_is_missing(kind: str):
    choice = choose(kind, Surroundings((), ()))
    assert "a model" in choice.missing[0] and len(choice.missing) == (4 if kind == "nightly" else 2)
    parse_config(tomllib.loads(config_text(kind, choice.ingredients)), CONFIG_KINDS[KINDS[kind].schema])


def test_the_first_reward_and_its_test_run(project: Path):
    rollout("init", "grpo")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "rewards"], capture_output=True, text=True)
    assert "2 passed" in done.stdout
    assert (
        "reward"
        not in rollout("train", "grpo", "--config", "grpo.toml", "--dry-run").lower().partition("dry-run ok")[0]
    )


def test_what_is_there_is_not_written_over(project: Path):
    rollout("init", "ppo")
    Path("rewards/reward.py").write_text("mine")
    assert "ppo.toml is there already; --force writes over it" in rollout("init", "ppo", code=2)
    assert "kept rewards/reward.py, which was there" in rollout("init", "grpo")
    assert Path("rewards/reward.py").read_text() == "mine"
    rollout("init", "ppo", "--force")
    assert Path("rewards/reward.py").read_text() != "mine"


def test_training_needs_no_file(project: Path):
    options = ("--model", "models/mine", "--data", "data/demos.jsonl", "--dry-run")
    assert "sft_rows=1" in rollout("train", "sft", *options)
    rollout("init", "sft", "--data", "data/pairs.jsonl")
    changed = rollout("train", "sft", "--config", "sft.toml", "--data", "data/demos.jsonl", "--dry-run")
    assert "dataset=data/demos.jsonl" in changed
    wrong = rollout("train", "sft", "--config", "sft.toml", "--data", "none.jsonl", "--dry-run", code=2)
    assert wrong.startswith("rollout: algorithm.dataset.path: dataset 'none.jsonl' cannot be read")


def test_a_command_without_a_file_says_what_it_needs(project: Path):
    assert rollout("train", "dpo", code=2) == (
        "rollout: --model and --data: required where there is no --config; `rollout init dpo` writes a file\n"
    )
    Path("plain.jsonl").write_text('{"prompt": "Hello"}\n')
    options = ("--model", "models/mine", "--data", "plain.jsonl", "--dry-run")
    assert rollout("train", "grpo", *options, code=2).startswith(
        "rollout: --reward: required, as the rows of plain.jsonl"
    )
    Path("mine.py").write_text("def score(sample): return float(len(sample.completion))\n")
    assert "training_prompts=1" in rollout("train", "grpo", *options, "--reward", "mine.py:score")
