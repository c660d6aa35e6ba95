"""What `rollout serve` refuses before it starts anything."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from deployments.cli import app


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("backend.max_modl_len=1", "backend.max_modl_len: unknown key; did you mean 'max_model_len'?"),
        ("backend.max_model_len=0", "backend.max_model_len: Input should be greater than or equal to 2; got 0"),
        ("max_model_len=64", "max_model_len: only keys of backend are set here, such as backend.max_model_len"),
    ],
)
def test_a_setting_that_cannot_be_is_named_as_it_was_given(given: str, said: str):
    result = CliRunner().invoke(app, ["serve", "no-model", "--set", given])
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.endswith(said)
