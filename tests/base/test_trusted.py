"""A model made without checks is one that was made with them."""

from __future__ import annotations

import copy

import pytest
from pydantic import BaseModel, ValidationError

from rollout_core.base.trusted import trusted
from rollout_core.data.datasets import PromptRow
from rollout_core.store.types import Attempt, AttemptedRollout, Rollout

ATTEMPT = Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=2.0, metadata={"b": [1, None]})
MODELS = [
    ATTEMPT,
    Rollout(rollout_id="r", input={"prompt": "x"}, start_time=1.5),
    AttemptedRollout(rollout_id="r", input="x", start_time=1.5, attempt=ATTEMPT),
    PromptRow(prompt="x", id="i", extras={"k": 1}),
]


@pytest.mark.parametrize("checked", MODELS, ids=lambda model: type(model).__name__)
def test_it_is_equal_and_is_shown_copied_and_written_alike(checked: BaseModel):
    made = trusted(type(checked), dict(checked.__dict__))
    assert made == checked and repr(made) == repr(checked)
    assert made.model_dump() == checked.model_dump() and made.model_dump_json() == checked.model_dump_json()
    assert made.model_copy(deep=True) == copy.deepcopy(made) == checked
    assert type(checked).model_validate(made) is made
    assert made.model_fields_set == set(type(checked).model_fields)


def test_it_obeys_the_rules_of_its_model_from_then_on():
    made = trusted(PromptRow, dict(MODELS[3].__dict__))
    with pytest.raises(ValidationError, match="frozen"):
        made.prompt = "y"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError):
        made.none_such  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
