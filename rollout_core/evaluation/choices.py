"""Questions with choices: the model's answer is the choice of the highest log-likelihood, and nothing is generated.

As `multiple_choice` of lm-evaluation-harness has it (lm_eval/api/task.py): ``acc`` by the sum of log-probabilities of a
choice's tokens, ``acc_norm`` by that sum divided by the choice's length in characters, ``acc_bytes`` divided by its
length in UTF-8. The delimiter before a choice is scored, and does not count as its length; of equal values the first
choice has it. Texts that are ASCII are as long in bytes as in characters, so there the two norms are one.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_core.base.errors import ConfigError, near
from rollout_core.base.ids import ContentId
from rollout_core.config.evaluation import ChoiceScorer, Suite
from rollout_core.data.continuations import Continued, Loglikelihood
from rollout_core.data.datasets import PromptRow, parse_rows
from rollout_core.data.samples import decode_completions_blob, decode_samples
from rollout_core.evaluation.metrics import estimate
from rollout_core.evaluation.prompts import renderer
from rollout_core.evaluation.reports import RIGHT_SHARE, Answered, SuiteReport, file_report
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Completions

MIN_CHOICES = 2


@dataclass(frozen=True)
class Choices:
    """Of a question."""

    texts: tuple[str, ...]
    """As they follow the delimiter."""
    right: int
    """Place of the right one."""


def read_choices(scorer: ChoiceScorer, rows: Sequence[PromptRow]) -> list[Choices]:
    """The choices of each row. Raises ConfigError naming the first row whose choices or answer cannot be read."""
    write = renderer("continuation", scorer.continuation)
    found, wrong = [], []
    for number, row in enumerate(rows, start=1):
        try:
            found.append(_choices(scorer, row.extras, write))
        except ConfigError as error:
            wrong.append(f"row {number}: {error}")
    if wrong:
        raise ConfigError(wrong[0] + (f" (and {len(wrong) - 1} more rows)" if len(wrong) > 1 else ""))
    return found


def _choices(scorer: ChoiceScorer, row: Mapping[str, Any], write: Callable[[Mapping[str, Any]], str]) -> Choices:
    given, labels = _given(scorer.choices, row)
    if len(given) < MIN_CHOICES:
        raise ConfigError(f"it has {len(given)} choices; expected {MIN_CHOICES} or more")
    right = _right(scorer, row, given, labels)
    texts = tuple(
        write({**row, "choice": choice, "label": label, "index": place})
        for place, (choice, label) in enumerate(zip(given, labels, strict=True))
    )
    if not all(texts):
        raise ConfigError(f"choice {texts.index('') + 1} is empty; expected a text")
    if len(set(texts)) < len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        raise ConfigError(f"the choice {twice!r} is there twice; expected choices that differ")
    return Choices(texts, right)


def _given(choices: str | tuple[str, ...], row: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Texts of the choices, and their labels."""
    keys = [choices] if isinstance(choices, str) else list(choices)
    for key in keys:
        if key not in row:
            raise ConfigError(f"it has no {key!r}, which scorer.choices names; {near(key, row)}")
    value = row[choices] if isinstance(choices, str) else [row[key] for key in keys]
    labels: Any = None
    if isinstance(value, Mapping):
        value, labels = value.get("text"), value.get("label")
    if not isinstance(value, list | tuple) or not all(_is_plain(choice) for choice in value):
        raise ConfigError(
            f"its {' and '.join(keys)} holds no choices; expected a list of texts, or an object of two lists, text and "
            "label"
        )
    if labels is None:
        if len(value) > len(string.ascii_uppercase):
            raise ConfigError(f"it has {len(value)} choices without labels; expected at most 26")
        labels = list(string.ascii_uppercase[: len(value)])
    if not isinstance(labels, list | tuple) or len(labels) != len(value):
        raise ConfigError(f"it has {len(value)} choices and other labels than these; expected one for each")
    return [str(choice) for choice in value], [str(label) for label in labels]


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _right(scorer: ChoiceScorer, row: Mapping[str, Any], given: Sequence[str], labels: Sequence[str]) -> int:
    """The place of the right choice. Several readings of an answer are an error: nobody would notice the wrong one."""
    key = scorer.answer_key
    if key not in row:
        raise ConfigError(f"it has no {key!r}, which scorer.answer_key names; {near(key, row)}")
    answer = row[key]
    if not _is_plain(answer):
        raise ConfigError(f"its {key!r} is {answer!r}; expected the index, label or text of the right choice")
    text = str(answer).strip()
    readings = {
        "index": [int(text)] if text.isdecimal() and int(text) < len(given) else [],
        "label": [place for place, label in enumerate(labels) if label == text],
        "text": [place for place, choice in enumerate(given) if choice.strip() == text],
    }
    asked = [scorer.answer_as] if scorer.answer_as != "auto" else list(readings)
    for name in asked:
        if len(readings[name]) > 1:
            twice = " and ".join(str(place + 1) for place in readings[name])
            raise ConfigError(
                f"its {key!r} is {answer!r}, which is the {name} of choices {twice}; expected one of them"
            )
    found = {name: readings[name][0] for name in asked if readings[name]}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    if not found:
        kind = "index, label or text" if scorer.answer_as == "auto" else scorer.answer_as
        raise ConfigError(f"its {key!r} is {answer!r}, which is the {kind} of none of its {len(given)} choices")
    meant = " and ".join(f"as {name} choice {place + 1}" for name, place in found.items())
    raise ConfigError(f"its {key!r} is {answer!r}, which reads {meant}; say which by scorer.answer_as")


def continued(scorer: ChoiceScorer, rows: Sequence[PromptRow]) -> list[Continued]:
    """Each row's prompt with each of its choices, in order. Raises as `read_choices`."""
    return [
        Continued(row, scorer.target_delimiter + text)
        for row, choices in zip(rows, read_choices(scorer, rows), strict=True)
        for text in choices.texts
    ]


def is_right(metric: str, choices: Choices, found: Sequence[Loglikelihood]) -> float:
    """Whether the likeliest choice by a metric is the right one; of equal ones the first counts."""
    lengths = {
        "acc": [1] * len(choices.texts),
        "acc_norm": [len(text) for text in choices.texts],
        "acc_bytes": [len(text.encode()) for text in choices.texts],
    }[metric]
    values = [one.total / length for one, length in zip(found, lengths, strict=True)]
    return float(values.index(max(values)) == choices.right)


def report_choices(
    objects: ObjectStore, suite: Suite, prompts: ContentId, completions: Completions, asked: ContentId
) -> SuiteReport:
    """The report of scored choices; ``asked`` are the samples of all, of which some may have failed.

    Raises ConfigError where no question has all its choices scored.
    """
    scorer = suite.scorer
    assert isinstance(scorer, ChoiceScorer), "others score what was generated"
    rows = parse_rows(objects.get_bytes(prompts), f"prompts {prompts.short}", PromptRow)
    samples = decode_samples(objects.get_bytes(asked))
    scored = decode_completions_blob(objects.get_bytes(completions.completions))
    place_of = {row.id: place for place, row in enumerate(scored)}
    values: dict[str, list[float | None]] = {name: [] for name in (*suite.chosen_metrics, "acc")}
    scores: list[float | None] = [None] * len(scored)
    questions, places, lacking, start = [], [], [], 0
    for number, choices in enumerate(read_choices(scorer, rows)):
        group = samples[start : start + len(choices.texts)]
        start += len(choices.texts)
        questions.append(group[0])
        known = [place_of.get(sample.id) for sample in group]
        lacking += [number] * known.count(None)
        found = [Loglikelihood.of(scored[place]) for place in known if place is not None]
        if len(found) < len(group):
            places.append(None)
            missing = 0.0 if suite.failed == "wrong" else None
            for each in values.values():
                each.append(missing)
            continue
        totals = [one.total for one in found]
        places.append(known[totals.index(max(totals))])
        for name, each in values.items():
            each.append(is_right(name, choices, found))
        for place in known:
            if place is not None:
                scores[place] = values["acc"][-1]
    metrics = {name: estimate(name, values[name], suite.samples) for name in suite.chosen_metrics}
    answered = Answered(questions, {**values, RIGHT_SHARE: values["acc"]}, metrics, places, lacking)
    return file_report(
        objects,
        suite,
        prompts,
        None,
        completions,
        answered,
        scores=objects.put_json(scores),
        num_abstained=0,
        num_score_failed=0,
    )
