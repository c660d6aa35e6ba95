"""Questions with choices: how rows name them and the right one, and which one is the likeliest by each metric."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config import ChoiceScorer
from rollout_core.data.continuations import Loglikelihood
from rollout_core.data.datasets import PromptRow
from rollout_core.evaluation.choices import Choices, continued, is_right, read_choices

COLOURS = ["red", "green", "blue"]


def scorer(**keys: Any) -> ChoiceScorer:
    return ChoiceScorer.model_validate({"kind": "choice", **keys})


def read(row: dict[str, Any], **keys: Any) -> Choices:
    [found] = read_choices(scorer(**keys), [PromptRow(prompt="Q", extras=row)])
    return found


@pytest.mark.parametrize(
    ("row", "keys", "right"),
    [
        ({"choices": COLOURS, "answer": 2}, {}, 2),
        ({"choices": COLOURS, "answer": "1"}, {}, 1),
        ({"choices": COLOURS, "answer": "B"}, {}, 1),
        ({"choices": COLOURS, "answer": " green "}, {}, 1),
        ({"choices": [3, 5, 7], "answer": 5}, {}, 1),
        ({"choices": [0, 1, 2], "answer": 1}, {}, 1),  # by index and by text the same
        ({"choices": [2, 1, 0], "answer": 2}, {"answer_as": "text"}, 0),
        ({"choices": {"text": COLOURS, "label": ["1", "2", "3"]}, "answer": "1"}, {"answer_as": "label"}, 0),
        ({"choices": {"text": COLOURS, "label": ["A", "B", "A"]}, "answer": "B"}, {}, 1),
        ({"a": "x", "b": "y", "label": 1}, {"choices": ["a", "b"], "answer_key": "label"}, 1),
    ],
)
def test_a_row_names_its_right_choice_by_index_label_or_text(row: dict[str, Any], keys: dict[str, Any], right: int):
    assert read(row, **keys).right == right


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        (
            {"choice": COLOURS, "answer": 1},
            {},
            "it has no 'choices', which scorer.choices names; did you mean 'choice'",
        ),
        (
            {"choices": COLOURS, "answr": 1},
            {},
            "it has no 'answer', which scorer.answer_key names; did you mean 'answr'",
        ),
        ({"choices": COLOURS, "answer": 3}, {}, "'answer' is 3, which is the index, label or text of none of its 3 ch"),
        ({"choices": COLOURS, "answer": "D"}, {"answer_as": "label"}, "which is the label of none of its 3 choices"),
        ({"choices": COLOURS, "answer": None}, {}, "'answer' is None; expected the index, label or text"),
        (
            {"choices": [2, 1, 0], "answer": 2},
            {},
            "reads as index choice 3 and as text choice 1; say which by scorer.a",
        ),
        (
            {"choices": {"text": COLOURS, "label": ["A", "B", "A"]}, "answer": "A"},
            {},
            "'answer' is 'A', which is the label of choices 1 and 3; expected one of them",
        ),
        (
            {"choices": ["red", "red", "blue"], "answer": "red"},
            {"continuation": "{{ label }}"},
            "'answer' is 'red', which is the text of choices 1 and 2; expected one of them",
        ),
        ({"choices": "red", "answer": 0}, {}, "its choices holds no choices; expected a list of texts, or an object"),
        ({"choices": ["red"], "answer": 0}, {}, "it has 1 choices; expected 2 or more"),
        ({"choices": ["red", "red"], "answer": 0}, {}, "the choice 'red' is there twice"),
        ({"choices": ["red", ""], "answer": 0}, {}, "choice 2 is empty"),
        ({"choices": {"text": COLOURS, "label": ["A"]}, "answer": 0}, {}, "3 choices and other labels than these"),
        ({"choices": COLOURS, "answer": 0}, {"continuation": "{{ colour }}"}, "it has no 'colour', which continuation"),
        ({"choices": COLOURS, "answer": 0}, {"continuation": "x"}, "the choice 'x' is there twice"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_row(row: dict[str, Any], keys: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        read(row, **keys)
    assert str(caught.value).startswith("row 1: ") and message in str(caught.value)


def test_a_prompt_is_continued_by_each_choice_behind_the_delimiter():
    rows = [PromptRow(prompt=f"Q{n}", extras={"choices": COLOURS[: n + 1], "answer": 0}) for n in (1, 2)]
    assert [(row.prompt, text) for row, text in continued(scorer(continuation="{{ label }}"), rows)] == [
        *[("Q1", f" {label}") for label in "AB"],
        *[("Q2", f" {label}") for label in "ABC"],
    ]
    [first, *_] = continued(scorer(target_delimiter="\n", continuation="{{ index }}) {{ choice }}"), rows)
    assert first.continuation == "\n0) red"


@pytest.mark.parametrize(
    ("metric", "totals", "likeliest"),
    [
        ("acc", (-6.0, -7.0, -8.0), 0),
        ("acc", (-6.0, -6.0, -8.0), 0),  # of equal ones the first
        ("acc_norm", (-6.0, -7.0, -8.0), 2),  # by 2, 3 and 4 characters: -3, -2.33, -2
        ("acc_bytes", (-6.0, -7.0, -8.0), 1),  # by 2, 6 and 4 bytes: -3, -1.17, -2
    ],
)
def test_the_likeliest_choice_by_hand(metric: str, totals: tuple[float, ...], likeliest: int):
    found = [Loglikelihood(total, 2, False) for total in totals]
    values = [is_right(metric, Choices(("ab", "äöü", "abcd"), right), found) for right in range(3)]
    assert values == [float(right == likeliest) for right in range(3)]
