"""Prompts of suites: templates over rows, examples before them, and what is wrong with either in one line."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config import SuitePrompt
from rollout_core.data.datasets import PromptRow, TaskRow, parse_rows, to_jsonl
from rollout_core.evaluation.prompts import render_prompts

ROWS = [TaskRow(extras={"question": f"{n} + 1", "answer": n + 1, "id": n}) for n in range(6)]
FEW_SHOT = {"rows": {"path": "x.jsonl"}, "count": 2, "answer": " {{ answer }}", "separator": "\n"}


def prompt_of(**keys: Any) -> SuitePrompt:
    return SuitePrompt.model_validate(keys)


def rendered(*rows: dict[str, Any], examples: list[TaskRow] | None = None, **keys: Any) -> list[PromptRow]:
    return render_prompts(prompt_of(**keys), [TaskRow(extras=row) for row in rows], examples or [])


def test_a_text_is_filled_in_and_the_rows_other_keys_reach_the_scorer():
    [row] = render_prompts(prompt_of(text="Q: {{ question }}\nA:"), ROWS[2:3])
    assert (row.prompt, row.id) == ("Q: 2 + 1\nA:", "2")
    assert row.extras == {"question": "2 + 1", "answer": 3}


def test_a_conversation_has_the_systems_turn_and_the_users():
    [row] = rendered({"q": "Hi", "tone": "kind"}, system="Be {{ tone }}.", user="{{ q }}")
    assert [message.plain() for message in row.messages or ()] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]


def test_tools_of_a_row_go_with_its_conversation():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    [row] = rendered({"q": "Hi", "tools": [tool]}, user="{{ q }}")
    assert row.tools == (tool,) and row.extras == {"q": "Hi"}


def test_examples_stand_before_a_question_and_are_never_the_question_itself():
    made = render_prompts(prompt_of(text="{{ question }} =", few_shot=FEW_SHOT), ROWS, ROWS)
    for row, own in zip(made, ROWS, strict=True):
        *before, last = (row.prompt or "").split("\n")
        assert last == f"{own.task['question']} =" and len(before) == 2
        assert all(f"{other.task['question']} = {other.task['answer']}" != last for other in ROWS)
        assert not any(line.startswith(f"{own.task['question']} =") for line in before)


def test_examples_of_a_conversation_are_turns():
    [row] = render_prompts(prompt_of(user="{{ question }}", few_shot={**FEW_SHOT, "count": 1}), ROWS[:1], ROWS[1:2])
    assert [(message.role, message.content) for message in row.messages or ()] == [
        ("user", "1 + 1"),
        ("assistant", " 2"),
        ("user", "0 + 1"),
    ]


def test_the_seed_chooses_the_examples_and_nothing_else_does():
    def of(seed: int) -> list[str | None]:
        prompt = prompt_of(text="{{ question }} =", few_shot={**FEW_SHOT, "seed": seed})
        return [row.prompt for row in render_prompts(prompt, ROWS, ROWS)]

    assert of(0) == of(0)
    assert len({tuple(of(seed)) for seed in range(8)}) > 1
    prompt = prompt_of(text="{{ question }} =", few_shot=FEW_SHOT)
    assert [render_prompts(prompt, [row], ROWS)[0].prompt for row in ROWS] == of(0)


def test_examples_may_be_the_first_ones_of_the_questions_own_kind_behind_one_description():
    rows = [
        TaskRow(extras={"question": f"{n}", "answer": n, "kind": "even" if n % 2 == 0 else "odd"}) for n in range(7)
    ]
    few_shot = {**FEW_SHOT, "in_order": True, "same": "kind"}
    made = render_prompts(
        prompt_of(description="About {{ kind }} numbers.\n", text="{{ question }} =", few_shot=few_shot), rows, rows
    )
    assert [row.prompt for row in made[2:4]] == [
        "About even numbers.\n0 = 0\n4 = 4\n2 =",
        "About odd numbers.\n1 = 1\n5 = 5\n3 =",
    ]
    with pytest.raises(ConfigError, match=r"row 2: few_shot.count is 3, and few_shot.rows has 2 of kind 'odd' besides"):
        render_prompts(prompt_of(text="{{ question }} =", few_shot={**few_shot, "count": 3}), rows, rows)


def test_rendered_rows_are_read_again_as_they_are():
    made = render_prompts(prompt_of(system="s", user="{{ question }}\n"), ROWS)
    assert parse_rows(to_jsonl(made), "rows", PromptRow) == made


def test_a_key_that_only_some_rows_have_may_be_asked_for():
    template = "{% if hint is defined %}{{ hint }} {% endif %}{{ q }}"
    assert [row.prompt for row in rendered({"q": "a", "hint": "b"}, {"q": "c"}, text=template)] == ["b a", "c"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"text": "{{ qestion }}"}, r"row 1: it has no 'qestion', which text reads; did you mean 'question'\?"),
        ({"user": "{{ q }}"}, r"row 1: it has no 'q', which user reads; .* \(and 1 more rows\)"),
        ({"user": "{{ question }}", "system": "{{ tone }}"}, "it has no 'tone', which system reads"),
        (
            {"text": "{{ question.first.second }}"},
            "row 1: text: the template cannot be rendered: 'str object' has no attribute 'first'",
        ),
        ({"text": "{{ question + answer }}"}, r"row 1: text: the template's \+ has an operand that is no number"),
        (
            {"text": "{{ question.__class__.__mro__ }}"},
            "text: the template cannot be rendered: access to attribute '__class__' of 'str'",
        ),
        ({"text": "{{ '' }}"}, "row 1: its prompt is empty"),
        ({"text": "{{ 'a' * 1000000000 }}"}, r"row 1: text: the template's \* has an operand that is no number up to"),
        (
            {"text": "{% for a in range(99999) %}{% for b in range(9) %}x{% endfor %}{% endfor %}"},
            "more than 100,000 st",
        ),
        ({"text": "{{ range(1000000000) | list }}"}, "text: the template cannot be rendered: Range too big"),
        ({"text": "{{ question }}", "few_shot": {**FEW_SHOT, "count": 3}}, "few_shot.rows has 2 besides the question"),
        ({"text": "{{ question }}", "few_shot": {**FEW_SHOT, "answer": "{{ a }}"}}, "which few_shot.answer reads"),
    ],
)
def test_what_cannot_be_rendered_is_named_with_its_row(keys: dict[str, Any], message: str):
    rows = [{"question": "1", "answer": 1}, {"question": "2", "answer": 2}]
    examples = [TaskRow(extras={"question": f"{n}", "answer": n}) for n in (7, 8)]
    with pytest.raises(ConfigError, match=message):
        rendered(*rows, examples=examples, **keys)
