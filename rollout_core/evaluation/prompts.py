"""Prompts of a suite's rows: templates over their keys, with examples before each question."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from jinja2 import UndefinedError
from pydantic import ValidationError

from rollout_core.base.errors import ConfigError, near
from rollout_core.base.ids import content_id
from rollout_core.base.templates import BoundedTemplate, compiled, variables_of
from rollout_core.config.evaluation import FewShot, SuitePrompt
from rollout_core.data.datasets import PromptRow, TaskRow

Render = Callable[[Mapping[str, Any]], str]


def render_prompts(prompt: SuitePrompt, rows: Sequence[TaskRow], examples: Sequence[TaskRow] = ()) -> list[PromptRow]:
    """A prompt of each row, whose other keys stay with it for the scorer; ``examples`` are those of ``few_shot``.

    Raises ConfigError naming the first row that cannot be rendered, and the key that it lacks.
    """
    make = _text(prompt) if prompt.text is not None else _conversation(prompt)
    shown = _examples(prompt.few_shot, examples)
    made, wrong = [], []
    for number, row in enumerate(rows, start=1):
        try:
            made.append(_prompt_row(row, make(row.task, list(shown(row.task)))))
        except ConfigError as error:
            wrong.append(f"row {number}: {error}")
    if wrong:
        raise ConfigError(wrong[0] + (f" (and {len(wrong) - 1} more rows)" if len(wrong) > 1 else ""))
    return made


Make = Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], dict[str, Any]]
"""From a row and its examples to the prompt, as keys of a `PromptRow`."""


def _text(prompt: SuitePrompt) -> Make:
    question, answer = renderer("text", prompt.text or ""), _answers(prompt.few_shot)
    description = renderer("description", prompt.description or "")
    separator = "" if prompt.few_shot is None else prompt.few_shot.separator

    def make(row: Mapping[str, Any], examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        before = [question(example) + answer(example) for example in examples]
        return {"prompt": description(row) + separator.join([*before, question(row)])}

    return make


def _conversation(prompt: SuitePrompt) -> Make:
    user, answer = renderer("user", prompt.user or ""), _answers(prompt.few_shot)
    system = None if prompt.system is None else renderer("system", prompt.system)

    def make(row: Mapping[str, Any], examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        turns = [] if system is None else [("system", system(row))]
        for example in examples:
            turns += [("user", user(example)), ("assistant", answer(example))]
        turns.append(("user", user(row)))
        tools = {"tools": row["tools"]} if row.get("tools") else {}
        return {"messages": [{"role": role, "content": content} for role, content in turns], **tools}

    return make


def _answers(few_shot: FewShot | None) -> Render:
    return (lambda row: "") if few_shot is None else renderer("few_shot.answer", few_shot.answer)


def renderer(key: str, source: str) -> Render:
    """A function that fills in the template that stands under ``key``."""
    template = compiled(source)
    return lambda row: _rendered(key, source, template, row)


def _rendered(key: str, source: str, template: BoundedTemplate, row: Mapping[str, Any]) -> str:
    try:
        return template.render(row)
    except ConfigError as error:
        is_missing = isinstance(error.__cause__, UndefinedError)
        missing = sorted(variables_of(source) - row.keys()) if is_missing else []
        if missing:
            raise ConfigError(f"it has no {missing[0]!r}, which {key} reads; {near(missing[0], row)}") from None
        raise ConfigError(f"{key}: {error}") from None


def _examples(
    few_shot: FewShot | None, rows: Sequence[TaskRow]
) -> Callable[[Mapping[str, Any]], Iterator[Mapping[str, Any]]]:
    """The examples of a question: the first of an order that follows from the seed, without the question itself."""
    if few_shot is None:
        return lambda row: iter(())
    places = range(len(rows))
    if not few_shot.in_order:
        places = sorted(places, key=lambda place: content_id("few-shot-order/1", [few_shot.seed, place]))
    ordered, same = [rows[place].task for place in places], few_shot.same

    def of(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if same is not None and same not in row:
            raise ConfigError(f"it has no {same!r}, which few_shot.same names; {near(same, row)}")
        others = (one for one in ordered if one != row and (same is None or one.get(same) == row[same]))
        found = list(islice(others, few_shot.count))
        if len(found) < few_shot.count:
            alike = "" if same is None else f" of {same} {row[same]!r}"
            raise ConfigError(
                f"few_shot.count is {few_shot.count}, and few_shot.rows has {len(found)}{alike} besides the question "
                "itself"
            )
        return iter(found)

    return of


def _prompt_row(row: TaskRow, made: dict[str, Any]) -> PromptRow:
    """With the row's own name. What it has under the keys of a prompt is for the template alone."""
    extras = {key: value for key, value in row.task.items() if key not in PromptRow.own_keys}
    named = row.task.get("id")
    row_id = str(named) if isinstance(named, str | int) and not isinstance(named, bool) else None
    if "prompt" in made and not made["prompt"].strip():
        raise ConfigError("its prompt is empty")
    try:
        return PromptRow.model_validate({**made, "id": row_id, "extras": extras})
    except ValidationError as error:
        raise ConfigError(f"its prompt is none: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
