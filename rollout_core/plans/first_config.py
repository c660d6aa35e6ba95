"""A first configuration of each kind of run, with comments, made of what is there.

The same text is what `rollout init` writes and what a command without a configuration file runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rollout_core.plans.surroundings import ModelFolder, RowFile, Surroundings

HUB_MODEL = ModelFolder("Qwen/Qwen2.5-0.5B-Instruct", 32_768)
"""Where no model is found."""
REWARD_FILE, REWARD_TEST, AGENT_FILE = "rewards/reward.py", "rewards/test_reward.py", "agent.py"
_ROW_TOKENS, _NEW_TOKENS = 1024, 256
"""Longest row and longest completion, where the model takes that much."""


@dataclass(frozen=True)
class Kind:
    """What there is to say of a kind of run."""

    title: str
    command: str
    schema: str
    """Its name for `rollout schema`."""
    rows: str
    """The rows it learns from, for people."""
    fits: Callable[[RowFile], bool]
    """Whether a file's rows are such rows."""
    lr: float = 0.0


def _are_prompts(file: RowFile) -> bool:
    is_asked = not file.keys.isdisjoint({"prompt", "messages"}) and not file.is_answered
    return is_asked and file.keys.isdisjoint({"completion", "chosen", "label"})


def _are_demonstrations(file: RowFile) -> bool:
    forms = ({"prompt", "completion"}, {"messages"}, {"instruction", "output"}, {"conversations"})
    is_answered = file.is_answered is not False and any(form <= file.keys for form in forms)
    return is_answered and file.keys.isdisjoint({"label", "chosen"})


def _are_pairs(file: RowFile) -> bool:
    return {"chosen", "rejected"} <= file.keys


_DEMONSTRATIONS = '{"prompt": ..., "completion": ...} or {"messages": [...]}'
_PAIRS = '{"prompt": ..., "chosen": ..., "rejected": ...}'
_PROMPTS = '{"prompt": ...} or {"messages": [...]}; other keys reach the reward'

KINDS = {
    "sft": Kind("Supervised fine-tuning", "train sft", "train-sft", _DEMONSTRATIONS, _are_demonstrations, 2e-5),
    "rm": Kind("A reward model", "train rm", "train-rm", _PAIRS, _are_pairs, 1e-5),
    "dpo": Kind("Direct preference optimization", "train dpo", "train-dpo", _PAIRS, _are_pairs, 1e-6),
    "ipo": Kind("Identity preference optimization", "train ipo", "train-ipo", _PAIRS, _are_pairs, 1e-6),
    "kto": Kind(
        "Kahneman-Tversky optimization",
        "train kto",
        "train-kto",
        '{"prompt": ..., "completion": ..., "label": true}',
        lambda file: {"completion", "label"} <= file.keys,
        1e-6,
    ),
    "ppo": Kind("PPO on the model's own completions", "train ppo", "train-ppo", _PROMPTS, _are_prompts, 1e-6),
    "grpo": Kind(
        "GRPO on groups of the model's own completions", "train grpo", "train-grpo", _PROMPTS, _are_prompts, 1e-6
    ),
    "batch": Kind("Batch inference", "infer batch", "infer-batch", _PROMPTS, _are_prompts),
    "agent": Kind(
        "GRPO of the model behind an agent",
        "agent train",
        "train-agent",
        "of any keys, each given to the agent as it is",
        lambda file: file.keys.isdisjoint({"completion", "chosen", "label"}),
        1e-6,
    ),
    "nightly": Kind(
        "Fine-tuning, GRPO, evaluation and promotion", "nightly", "nightly", _DEMONSTRATIONS, _are_demonstrations, 2e-5
    ),
}
"""By the name that `rollout init` takes."""
_WITH_REWARD = ("ppo", "grpo", "nightly")


@dataclass(frozen=True)
class Ingredients:
    """What a configuration is made of."""

    model: ModelFolder
    rows: RowFile
    """What is learnt from, or completed; of a nightly run, by fine-tuning."""
    prompts: RowFile
    """Of a nightly run: those of GRPO."""
    held_out: RowFile | None
    reward: str | None = None
    """``path/to/file.py:function`` of the reward; None for whether completions equal the rows' ``answer``."""


@dataclass(frozen=True)
class Choice:
    """Ingredients for a kind of run, and what was not found for it."""

    ingredients: Ingredients
    missing: tuple[str, ...]
    """For people; a name that stands in for each is in the configuration."""
    hints: tuple[str, ...] = ()
    """For people: what else was found, and how it can be used."""


def choose(kind: str, found: Surroundings, model: ModelFolder | None = None, rows: RowFile | None = None) -> Choice:
    """What of ``found`` a run of ``kind`` is made of; ``model`` and ``rows`` come before it."""
    about, missing = KINDS[kind], []
    needed = _NEEDED.get(kind, ("prompt",))
    if model is None and not found.models:
        missing.append(
            f"a model (a folder with config.json and *.safetensors): the hub's {HUB_MODEL.path} stands for it"
        )
    fitting = _fitting(found, about.fits, needed)
    if rows is None and not fitting:
        missing.append(f"a file of rows {about.rows}: data/train.jsonl stands for it")
    if rows is not None:
        rows = _complete(rows, needed) if about.fits(rows) else _renamed(rows, needed) or rows
    chosen = rows or _first(fitting, held_out=False) or RowFile("data/train.jsonl", frozenset())
    prompts, of_prompts = chosen, fitting
    if kind == "nightly":
        of_prompts = _fitting(found, _are_prompts, ("prompt",))
        if not of_prompts:
            missing.append(f"a file of rows {_PROMPTS}: data/prompts.jsonl stands for it")
        prompts = _first(of_prompts, held_out=False) or RowFile("data/prompts.jsonl", frozenset())
    likes = of_prompts if kind == "nightly" else fitting
    held_out = next((file for file in likes if file.is_held_out and file.path != chosen.path), None)
    if kind == "nightly" and held_out is None:
        missing.append(f"held-out rows {_PROMPTS}: data/held-out.jsonl stands for them")
        held_out = RowFile("data/held-out.jsonl", frozenset())
    ingredients = Ingredients(
        model or next(iter(found.models), HUB_MODEL),
        chosen,
        prompts,
        held_out,
        f"{REWARD_FILE}:score" if kind in _WITH_REWARD else None,
    )
    hints = [] if rows or fitting else list(_near_misses(needed, found))
    used = (chosen, prompts, *([] if held_out is None else [held_out]))
    columns: dict[str, dict[str, str]] = {}
    for file in used:
        columns.setdefault(file.path, {}).update(file.columns)
    hints += [_renaming(path, renamed) for path, renamed in columns.items() if renamed]
    others = [each.path for each in found.models if each.path != ingredients.model.path]
    if model is None and others:
        hints.append(f"other models are here; --model takes one: {', '.join(others)}")
    return Choice(ingredients, tuple(missing), tuple(hints))


_NEEDED = {
    **dict.fromkeys(("sft", "nightly"), ("prompt", "completion")),
    **dict.fromkeys(("rm", "dpo", "ipo"), ("prompt", "chosen", "rejected")),
    "kto": ("prompt", "completion", "label"),
}
"""Keys of rows; of kinds that are not here, a prompt."""
_CALLED = {
    "prompt": ("question", "instruction", "query", "input", "problem", "prompts", "text"),
    "completion": ("answer", "output", "response", "target", "solution", "completions"),
    "chosen": ("preferred", "accepted", "winner", "better"),
    "rejected": ("dispreferred", "refused", "loser", "worse"),
    "label": ("desirable", "liked", "good"),
    "answer": ("solution", "target", "output", "response", "expected"),
}
"""What people call them."""
_MOST_HINTS = 3


def _near_misses(needed: Sequence[str], found: Surroundings) -> Iterator[str]:
    """Files that are here and do not do as they are, each with what is missing."""
    for file in found.files[:_MOST_HINTS]:
        named = _called(file, needed)
        columns = f"{file.path} has {', '.join(sorted(file.keys))}"
        if _has_input_apart(file) and {"prompt", "completion"} <= named.keys():
            output = named["completion"]
            table = "" if output == "output" else f" and columns = {{ output = {_quoted(output)} }}"
            joins = "which joins the input to the instruction"
            yield f'{columns}; give it as a data set with format = "alpaca"{table}, {joins}'
        elif needed == ("prompt",) and file.is_answered:
            yield (
                f"the conversations of {file.path} end with the assistant's message; a prompt ends before the answer, "
                'which may be the key "answer" of its row'
            )
        elif needed == ("prompt",) and file.format == "alpaca":
            yield f'{columns}; --data {file.path} takes instruction and input as the prompt (format = "alpaca")'
        else:
            yield f"{columns}; rows need {', '.join(needed)}"


def _renaming(path: str, columns: Mapping[str, str]) -> str:
    """How the columns of a file are read, for people to check."""
    named = ", ".join(f"{theirs} as {ours}" for ours, theirs in columns.items())
    return f"{path}: {named}; its columns in the configuration say so, change them where they mean something else"


def _called(file: RowFile, keys: Sequence[str]) -> dict[str, str]:
    """For each of our keys that the file has, under that name or another that people use, its name there."""
    here = {key.lower(): key for key in sorted(file.keys, reverse=True)} | {key: key for key in file.keys}
    found = {key: next((here[name] for name in (key, *_CALLED[key]) if name in here), None) for key in keys}
    return {key: name for key, name in found.items() if name is not None}


def _has_input_apart(file: RowFile) -> bool:
    """Whether a prompt is in two columns."""
    return {"instruction", "input"} <= {key.lower() for key in file.keys}


def _fitting(found: Surroundings, fits: Callable[[RowFile], bool], needed: Sequence[str]) -> list[RowFile]:
    """Files that fit, with all keys that their rows need; where none is for training, those that do with their columns
    renamed, too."""
    files = [_complete(file, needed) for file in found.files if fits(file)]
    if any(not file.is_held_out for file in files) and any(file.is_held_out for file in files):
        return files
    known = {file.path for file in files}
    others = (_renamed(each, needed) for each in found.files if each.path not in known)
    return [*files, *(file for file in others if file is not None and fits(file))]


def _complete(file: RowFile, needed: Sequence[str]) -> RowFile:
    """A file that fits, with a prompt under another name where it has none under ours: a reward model would be trained
    on answers alone."""
    if "prompt" not in needed or not file.keys.isdisjoint({"prompt", "messages"}) or file.format is not None:
        return file
    return _renamed(file, needed) or file


def _renamed(file: RowFile, needed: Sequence[str]) -> RowFile | None:
    """The file with our names of the columns ``needed``; None where it lacks one, or holds rows in two columns."""
    more = () if "completion" in needed else ("answer",)
    named = _called(file, (*needed, *more))
    if not set(needed) <= named.keys() or len({*named.values()}) < len(named) or _has_input_apart(file):
        return None
    columns = {ours: theirs for ours, theirs in named.items() if ours != theirs}
    return replace(file, keys=file.keys - {*columns.values()} | {*columns}, columns=columns)


def _first(files: list[RowFile], *, held_out: bool) -> RowFile | None:
    """The first whose name says that it is, or is not, kept from training; otherwise the first."""
    return next((file for file in files if file.is_held_out == held_out), next(iter(files), None))


def config_text(kind: str, of: Ingredients) -> str:
    """The configuration as TOML. What is in it is the run's; what stands behind ``#`` may be put to use."""
    return "\n".join([*_head(kind), *_BODIES[kind](kind, of)]) + "\n"


def companions(kind: str, of: Ingredients) -> dict[str, str]:
    """Python files that the configuration names, by their paths."""
    if kind in _WITH_REWARD:
        answers = "answer" in of.prompts.keys
        return {
            REWARD_FILE: _REWARD_BY_ANSWER if answers else _REWARD,
            REWARD_TEST: _TEST_BY_ANSWER if answers else _TEST,
        }
    return {AGENT_FILE: _AGENT} if kind == "agent" else {}


def _head(kind: str) -> Iterator[str]:
    about, name = KINDS[kind], f"{kind}.toml"
    yield f"# {about.title}. Check it without running anything, then run it:"
    yield f"#   rollout {about.command} --config {name} --dry-run"
    yield f"#   rollout {about.command} --config {name}"
    yield f"# `rollout schema {about.schema}` has every key with its meaning, default and bounds."
    yield "schema_version = 1"
    if kind != "batch":
        yield "seed = 0"
    yield from ("", "[run]", f"name = {_quoted(kind)}  # labels snapshots; resuming goes by it")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _model(table: str, of: Ingredients) -> Iterator[str]:
    yield from ("", f"[{table}]", f"uri = {_quoted(of.model.path)}  # a folder, a hub id, or a checkpoint's content id")


def _rows(table: str, file: RowFile, what: str) -> Iterator[str]:
    yield from ("", f"[{table}]  # rows {what}", f"path = {_quoted(file.path)}", *_columns(file))
    if file.format is not None:
        yield f"format = {_quoted(file.format)}  # what its rows are"


def _columns(file: RowFile) -> Iterator[str]:
    if file.columns:
        renamed = ", ".join(f"{ours} = {_quoted(theirs)}" for ours, theirs in file.columns.items())
        yield f"columns = {{ {renamed} }}  # ours = theirs"


def _row_tokens(of: Ingredients) -> int:
    return min(_ROW_TOKENS, of.model.max_positions or _ROW_TOKENS)


def _new_tokens(of: Ingredients) -> int:
    return min(_NEW_TOKENS, (of.model.max_positions or 2 * _NEW_TOKENS) // 2)


def _optimizer(table: str, lr: float) -> Iterator[str]:
    yield from ("", f"[{table}.optimizer]", f"lr = {lr:g}")


def _learner(table: str, of: Ingredients, lr: float) -> Iterator[str]:
    """What learners from rows have, but for their model and rows."""
    yield from (*_optimizer(table, lr), "warmup_steps = 10", 'schedule = "cosine"')
    yield from ("", f"[{table}.budget]", "# epochs = 1  # so many where neither max_steps nor max_tokens is given")
    yield from ("", f"[{table}.sequence]", f"max_length = {_row_tokens(of)}  # tokens of a row; longer ones are cut")
    yield from ("", f"# [{table}.lora]  # train adapters instead of all weights", "# r = 16")


def _from_rows(kind: str, of: Ingredients) -> Iterator[str]:
    yield from ("", "[algorithm]", f"kind = {_quoted(kind)}")
    yield from ("minibatch_size = 8  # rows of one forward and backward pass", "gradient_accumulation = 1")
    yield "# gradient_checkpointing = true  # less memory, more time"
    yield from _model("algorithm.base_model", of)
    yield from _rows("algorithm.dataset", of.rows, KINDS[kind].rows)
    if of.held_out is not None:
        yield from _rows("algorithm.evaluation.dataset", of.held_out, "that are not trained; their loss is reported")
    yield from _learner("algorithm", of, KINDS[kind].lr)


def _policy(kind: str, prompts_per_iteration: int) -> Iterator[str]:
    """The head of a table of PPO or GRPO: an iteration makes one optimizer step of all its completions, or a few."""
    yield from ("iterations = 10", f"prompts_per_iteration = {prompts_per_iteration}")
    if kind == "grpo":
        yield "samples_per_prompt = 8  # completions of a prompt, compared with each other"
    yield from ("minibatch_size = 8", f"gradient_accumulation = {prompts_per_iteration if kind == 'grpo' else 8}")


def _sampling(table: str, of: Ingredients, temperature: float) -> Iterator[str]:
    yield from ("", f"[{table}]", f"temperature = {temperature:.1f}", f"max_tokens = {_new_tokens(of)}")


def _backend(of: Ingredients) -> Iterator[str]:
    yield from (
        "",
        "[backend]",
        'kind = "vllm"',
        f"max_model_len = {_model_len(of)}  # prompt and completion, in tokens",
    )


def _model_len(of: Ingredients) -> int:
    return min(2 * _ROW_TOKENS, of.model.max_positions or 2 * _ROW_TOKENS)


def _reward(table: str, of: Ingredients) -> Iterator[str]:
    yield from ("", f"[{table}]")
    if of.reward is None:
        yield from ('kind = "exact_match"', 'answer_key = "answer"')
    else:
        yield from ('kind = "function"', f"callable = {_quoted(of.reward)}")


def _on_policy(kind: str, of: Ingredients) -> Iterator[str]:
    yield from ("", "[algorithm]", f"kind = {_quoted(kind)}", *_policy(kind, 64 if kind == "grpo" else 256))
    yield from _model("algorithm.base_model", of)
    yield from _rows("algorithm.prompts", of.rows, KINDS[kind].rows)
    yield from _sampling("algorithm.sampling", of, 1.0)
    yield from _optimizer("algorithm", KINDS[kind].lr)
    yield from _reward("algorithm.reward", of)
    yield from _backend(of)


def _batch(kind: str, of: Ingredients) -> Iterator[str]:
    yield from _model("model", of)
    yield from ("", f"[input]  # rows {_PROMPTS.partition(';')[0]}", f"glob = {_quoted(of.rows.path)}")
    yield from _columns(of.rows)
    yield from ("", "[output]", 'dir = "data/completions"')
    yield from _sampling("sampling", of, 0.7)
    yield from _backend(of)


def _agent(kind: str, of: Ingredients) -> Iterator[str]:
    yield from ("", "[agent]", f'function = "{AGENT_FILE}:solve"', "timeout_seconds = 600")
    yield from ("", "[algorithm]", 'kind = "grpo"', *_policy("grpo", 16))
    yield from _model("algorithm.base_model", of)
    yield from _rows("algorithm.prompts", of.rows, KINDS[kind].rows)
    yield from _sampling("algorithm.sampling", of, 1.0)
    yield from _optimizer("algorithm", KINDS[kind].lr)
    yield from _backend(of)
    if of.held_out is not None:
        yield from _rows("evaluation.tasks", of.held_out, "that are not trained")
        yield from _sampling("evaluation.sampling", of, 0.0)


def _nightly(kind: str, of: Ingredients) -> Iterator[str]:
    assert of.held_out is not None, "chosen"
    yield from _model("model", of)
    yield from _reward("reward", of)
    yield from _backend(of)
    yield from ("", "[sft]", "minibatch_size = 8")
    yield from _rows("sft.dataset", of.rows, _DEMONSTRATIONS)
    yield from _learner("sft", of, KINDS["sft"].lr)
    yield from ("", "[grpo]", *_policy("grpo", 64))
    yield from _rows("grpo.prompts", of.prompts, _PROMPTS)
    yield from _sampling("grpo.sampling", of, 1.0)
    yield from _optimizer("grpo", KINDS["grpo"].lr)
    yield from _rows("evaluation.prompts", of.held_out, "that are not trained; they decide whether a model is better")
    yield from _sampling("evaluation.sampling", of, 0.0)
    yield from (
        "",
        "[promotion]",
        'resource = "policy"',
        "min_gain = 0.0  # the mean held-out reward must rise by more",
    )


_BODIES: dict[str, Callable[[str, Ingredients], Iterator[str]]] = {
    **dict.fromkeys(("sft", "rm", "dpo", "ipo", "kto"), _from_rows),
    **dict.fromkeys(("ppo", "grpo"), _on_policy),
    "batch": _batch,
    "agent": _agent,
    "nightly": _nightly,
}

_REWARD_HEAD = '''"""What a completion is worth. Edit `score`, and its test in the same folder: pytest rewards"""

from rollout_core.rewards import RewardInput


def score(sample: RewardInput) -> float:
'''
_REWARD_BY_ANSWER = (
    _REWARD_HEAD
    + '''    """1 where the completion is the row's answer, spaces around it apart, otherwise 0."""
    return float(sample.completion.strip() == str(sample.extras["answer"]).strip())
'''
)
_REWARD = (
    _REWARD_HEAD
    + '''    """A first one, to be replaced: 1 for a completion that says something and ends by itself, otherwise 0."""
    return float(bool(sample.completion.strip()) and sample.finish_reason == "stop")
'''
)
_TEST_HEAD = """from reward import score

from rollout_core.rewards import RewardInput

"""
_TEST_BY_ANSWER = (
    _TEST_HEAD
    + """
def test_the_right_answer_is_worth_one():
    assert score(RewardInput("2 + 2 =", " 4", extras={"answer": "4"})) == 1.0


def test_another_answer_is_worth_nothing():
    assert score(RewardInput("2 + 2 =", " 5", extras={"answer": "4"})) == 0.0
"""
)
_TEST = (
    _TEST_HEAD
    + """
def test_a_whole_completion_is_worth_one():
    assert score(RewardInput("Say hello.", " Hello!", finish_reason="stop")) == 1.0


def test_one_that_was_cut_is_worth_nothing():
    assert score(RewardInput("Say hello.", " Hello! Hello!", finish_reason="length")) == 0.0
"""
)
_AGENT = '''"""An agent: it works on a task with any OpenAI client and returns a reward. The model behind it learns."""

from typing import Any

import openai

from rollout_core.agents import rollout
from rollout_core.store import LLM


@rollout
def solve(task: dict[str, Any], llm: LLM) -> float:
    """A first one, to be replaced: a single call, and 1 where its answer is the task's ``answer``, otherwise 0."""
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none")
    question = str(task.get("question", task.get("prompt", task)))
    reply = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": question}])
    answer = reply.choices[0].message.content or ""
    return float(answer.strip() == str(task.get("answer", "")).strip())
'''
