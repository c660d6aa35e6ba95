"""Lineage down to single samples: the prompts, completions and rewards behind a checkpoint, and the checkpoints that
saw one row of a data set.

Blobs are read as streams, line by line, and lines are passed on as they are stored, so that a million samples take
seconds and no memory. What an agent did is named by its rollout and spans, which the database of rollouts holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import orjson

from rollout_core.base.errors import ConfigError, CorruptObject, DataError, NotFound
from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.data.datasets import PromptRow, parse_rows, split_lines
from rollout_core.data.examples import positions_between
from rollout_core.data.samples import prompt_of
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import ROUNDS, Lineage, in_order, trace_descendants, trace_lineage
from rollout_core.objects.trees import TREE_BEGINS

TRAINS = "_update"
"""Ends the names of stages that train."""


def samples_behind(objects: ObjectStore, content: ContentId) -> Iterator[bytes]:
    """A line of JSON for each sample that trained what led to ``content``, the first update's first.

    Each has ``checkpoint`` (the model that the update made), ``stage`` and ``label``, and then of an update on policy
    ``sample`` (its id, which is that of its rollout, prompt, row), ``completion`` (tokens, log-probabilities, text) and
    ``reward``; of one from rows ``number`` (from 1) and ``row``; of an agent's rollouts, before the update that learnt
    from them, ``rollout`` (id, attempt, spans, reward).

    Raises NotFound where no stage that trained is known, MissingObject where housekeeping gave up what it learnt from.
    """
    found = in_order(trace_lineage(objects, content))
    if not any(lineage.stage.endswith(TRAINS) for lineage in found):
        raise NotFound(f"no stage that trained is recorded behind {content}")
    for lineage in found:
        head = orjson.dumps({"checkpoint": _model_of(lineage), "stage": lineage.stage, "label": _label(lineage)})[:-1]
        if _rollouts_of(lineage) is not None:
            head = orjson.dumps({"stage": lineage.stage, "label": _label(lineage)})[:-1]
        for rest in _lines_of(objects, lineage):
            yield b"%s,%s}\n" % (head, rest)


def _lines_of(objects: ObjectStore, lineage: Lineage) -> Iterator[bytes]:
    """Of a stage: members of JSON objects, as text, one sample each."""
    experience, rollouts = _experience_of(lineage), _rollouts_of(lineage)
    if rollouts is not None:
        for line in _lines(objects, rollouts):
            yield b'"rollout":%s' % line
    elif experience is not None:
        parts = (_lines(objects, experience.samples), _lines(objects, experience.completions))
        for sample, completion, reward in zip(*parts, _numbers(objects, experience.scores), strict=True):
            yield b'"sample":%s,"completion":%s,"reward":%s' % (sample, completion, reward)
    elif (dataset := _dataset_of(lineage)) is not None:
        for number, line in enumerate(_lines(objects, dataset), start=1):
            yield b'"number":%d,"row":%s' % (number, line)


@dataclass(frozen=True)
class _Experience:
    """Blobs that an update on policy learnt from, a line or number a sample."""

    samples: ContentId
    completions: ContentId
    scores: ContentId


def _experience_of(lineage: Lineage) -> _Experience | None:
    scores, samples = lineage.inputs.get("scores"), lineage.inputs.get("samples")
    if not lineage.stage.endswith(TRAINS) or not isinstance(scores, dict) or samples is None:
        return None
    return _Experience(*map(ContentId, (samples, scores["completions"], scores["scores"])))


def _dataset_of(lineage: Lineage) -> ContentId | None:
    dataset = lineage.inputs.get("dataset") if lineage.stage.endswith(TRAINS) else None
    return ContentId(dataset) if dataset is not None and is_content_id(dataset) else None


def _rollouts_of(lineage: Lineage) -> ContentId | None:
    rollouts = lineage.inputs.get("rollouts") if lineage.stage == "collect_samples" else None
    return ContentId(rollouts["rollouts"]) if isinstance(rollouts, dict) else None


def _model_of(lineage: Lineage) -> ContentId | None:
    return lineage.outputs[0] if lineage.outputs else None


def _label(lineage: Lineage) -> str:
    return str(lineage.inputs.get("label") or "")


def _lines(objects: ObjectStore, blob: ContentId) -> Iterator[bytes]:
    return (line for line in split_lines(objects.stream(blob)) if line)


def _numbers(objects: ObjectStore, blob: ContentId) -> Iterator[bytes]:
    """Items of a JSON list of numbers and nulls, as text; the list may be larger than memory."""
    rest = b""
    for chunk in objects.stream(blob):
        *items, rest = (rest + chunk).split(b",")
        yield from (item.strip(b"[] \n") for item in items)
    if last := rest.strip(b"[] \n"):
        yield last


# One row


@dataclass(frozen=True)
class Sighting:
    """A checkpoint that saw a row, itself or by what it was trained from."""

    checkpoint: ContentId | None
    stage: str
    label: str
    times: int | None
    """Samples of the row that the update learnt from, or times that it took the row up; 0: only what it started from
    did; None: unknown, see ``note``."""
    rewards: tuple[float | None, ...] = ()
    """Of these samples; None where one has no score."""
    note: str = ""


def row_at(objects: ObjectStore, data: ContentId, number: int) -> bytes:
    """Row ``number`` (from 1) of canonical rows, as JSON. Raises ConfigError where there is none."""
    line = next(islice(_lines(objects, data), number - 1, None), b"") if number > 0 else b""
    if line[:1] != b"{" or line.startswith(TREE_BEGINS):
        raise ConfigError(f"{data.short} has no row {number}; expected the number, from 1, of a row of a data set")
    return line


def number_of(objects: ObjectStore, data: ContentId, prompt: str) -> int:
    """The number (from 1) of the first row with this prompt, or whose conversation's last message is this. Raises
    ConfigError where there is none."""
    needle = orjson.dumps(prompt)
    for number, line in enumerate(_lines(objects, data), start=1):
        if needle in line:
            row = orjson.loads(line)
            messages = row.get("messages") or [{}]
            if prompt in (row.get("prompt"), messages[-1].get("content")):
                return number
    raise ConfigError(f"no row of {data.short} has the prompt {prompt!r}")


def who_saw(objects: ObjectStore, data: ContentId, number: int) -> Iterator[Sighting]:
    """The checkpoints that saw row ``number`` (from 1) of a data set, the oldest first.

    Equal rows are one: whoever saw one saw the other. A row that an update was only evaluated on was not seen. Raises
    ConfigError where there is no such row, or the rows are tasks of an agent.
    """
    row = row_at(objects, data, number)
    try:
        as_prompt, *_ = parse_rows(row, "row", PromptRow)
    except DataError:  # of a data set that is not for prompts
        as_prompt = None
    found = in_order(trace_descendants(objects, data))
    if any(lineage.stage == "enqueue_tasks" for lineage in found):
        raise ConfigError(
            f"{data.short} holds tasks of an agent, whose samples are conversations; `rollout lineage CHECKPOINT "
            "--samples` names the rollouts behind a checkpoint"
        )
    having: set[ContentId] = set()
    for lineage in found:
        if not lineage.stage.endswith(TRAINS):
            if lineage.stage == ROUNDS and lineage.inputs.get("model") in having:
                having.update(lineage.outputs)
            continue
        seen = _seen(objects, lineage, data, number, as_prompt)
        if seen.times != 0 or having & {lineage.inputs.get("model"), lineage.inputs.get("start_from")}:
            having.update(lineage.outputs)
            yield seen


def _seen(objects: ObjectStore, lineage: Lineage, data: ContentId, number: int, row: PromptRow | None) -> Sighting:
    """How often an update itself saw the row."""
    about = {"checkpoint": _model_of(lineage), "stage": lineage.stage, "label": _label(lineage)}
    experience = _experience_of(lineage)
    try:
        if experience is not None and row is not None:
            rewards = tuple(_rewards_of(objects, experience, row))
            return Sighting(**about, times=len(rewards), rewards=rewards)
        if _dataset_of(lineage) == data:
            return _taken_up(objects, lineage, number, about)
    except (NotFound, CorruptObject) as error:
        return Sighting(**about, times=None, note=f"what it learnt from is not to be had: {error}")
    return Sighting(**about, times=0)


def _rewards_of(objects: ObjectStore, experience: _Experience, row: PromptRow) -> Iterator[float | None]:
    prompt = prompt_of(row)
    needle = orjson.dumps(prompt, option=orjson.OPT_SORT_KEYS)
    lines = zip(_lines(objects, experience.samples), _numbers(objects, experience.scores), strict=True)
    for line, reward in lines:
        if needle in line:  # most are rejected without being parsed
            sample = orjson.loads(line)
            if (sample["prompt"], sample["row_id"], sample["extras"]) == (prompt, row.id, row.extras):
                yield None if reward == b"null" else float(reward)


def _taken_up(objects: ObjectStore, lineage: Lineage, number: int, about: dict[str, Any]) -> Sighting:
    """How often an update from rows took up one of them: its order follows from seed and step."""
    settings, report = lineage.inputs["settings"], _report_of(objects, lineage.outputs)
    steps = [row["step"] for row in step_rows(objects, lineage.outputs)]
    if report is None or not steps:
        return Sighting(**about, times=None, note="its report or its figures are not to be had any more")
    if report["num_examples"] != report["num_rows"] or lineage.inputs.get("start_from"):
        why = "it left rows out" if report["num_examples"] != report["num_rows"] else "it went on from a snapshot"
        return Sighting(**about, times=None, note=f"{why}, so which rows its steps took is not recorded")
    taken = int(max(steps)) * settings["minibatch_size"] * settings["gradient_accumulation"]
    whole, left = divmod(taken, report["num_rows"])
    # Every pass takes each row once; of the last one the order tells.
    order = positions_between(
        whole * report["num_rows"], taken, num_items=report["num_rows"], seed=lineage.inputs["seed"]
    )
    return Sighting(**about, times=whole + (number - 1 in order if left else 0))


def _report_of(objects: ObjectStore, outputs: Iterable[ContentId]) -> dict[str, Any] | None:
    for found in _documents(objects, outputs):
        if isinstance(found, dict) and {"num_rows", "num_examples"} <= found.keys():
            return found
    return None


def _documents(objects: ObjectStore, outputs: Iterable[ContentId]) -> Iterator[Any]:
    for output in outputs:
        if objects.exists(output):
            try:
                yield json.loads(objects.get_bytes(output))
            except ValueError:
                continue


def step_rows(objects: ObjectStore, outputs: Iterable[ContentId]) -> list[dict[str, Any]]:
    """Figures of an update: the output that is JSON lines with a step each."""
    for output in outputs:
        if not objects.exists(output) or objects.get_bytes(output)[:1] != b"{":
            continue
        try:
            rows = [json.loads(line) for line in objects.get_bytes(output).splitlines()]
        except ValueError:
            continue
        if all(isinstance(row, dict) and "step" in row for row in rows):
            return rows
    return []
