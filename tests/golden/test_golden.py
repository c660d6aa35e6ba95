"""Nothing that is stored or typed changes unseen: the golden files say what it is, see CONTRIBUTING.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.fence import DEFAULTS, INTERFACES, KEYS, STAGES, STORAGE, Golden
from tests.golden.keys import examples

RULE = "raise a version"


@pytest.mark.parametrize(
    "golden",
    [pytest.param(KEYS, marks=pytest.mark.slow), STAGES, DEFAULTS, STORAGE, INTERFACES],
    ids=lambda golden: golden.name,
)
def test_what_is_stored_or_typed_is_what_it_was(golden: Golden):
    """`numerics.json` is compared in tests/base/test_numerics.py."""
    complaint = golden.complaint(golden.make())
    assert not complaint, complaint


def test_every_example_runs_dry():
    cases = KEYS.read()
    assert set(examples()) <= set(cases)
    assert not [(name, line) for name, lines in cases.items() for line in lines if line.startswith("refused")]


def test_every_cached_stage_has_a_key_here():
    with_keys = {line.split()[0] for lines in KEYS.read().values() for line in lines}
    cached = {line.split()[0] for line in STAGES.read()["stages"] if ") cached" in line}
    assert cached and cached <= with_keys


@pytest.mark.parametrize(
    ("found", "may_grow", "expected"),
    [
        (["a/1 key", "b/1 key"], False, ""),
        (["b/1 key", "a/1 key"], False, RULE),
        (["a/1 key", "b/1 other"], False, "  - b/1 key"),
        (["b/1 key", "a/1 key"], True, ""),
        (
            ["a/1 key", "b/1 key", "c"],
            True,
            "lines are new, and none has changed. Enter them with `python -m tests.golden",
        ),
        (["a/1 key"], True, RULE),
    ],
)
def test_a_complaint_says_what_to_do(found: list[str], may_grow: bool, expected: str, tmp_path: Path):
    golden = Golden("own", lambda: {}, may_grow, RULE, tmp_path)
    golden.write({"calls": ["a/1 key", "b/1 key"]})
    complaint = golden.complaint({"calls": found})
    assert expected in complaint if expected else not complaint
