"""Tasks of lm-evaluation-harness as a suite: their requests become prompts, and answers go back to their metrics.

What lm_eval does is done in a process of its own (`lm_eval_process`), twice: before the model is asked, and after. What
lies between is a suite like any other: prompts, samples of the store, completions.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.isolation.child import Child, Ended, KeptChild
from rollout_core.base.processes import Limits
from rollout_core.config import SamplingParams
from rollout_core.config.base import identity
from rollout_core.config.lm_eval import LmEvalSuite
from rollout_core.data.continuations import SCORING, Continued, Loglikelihood
from rollout_core.data.datasets import PromptRow, to_jsonl
from rollout_core.data.samples import decode_completions_blob
from rollout_core.evaluation.harnesses import python_of
from rollout_core.evaluation.metrics import Metric, Z
from rollout_core.evaluation.reports import RIGHT_SHARE, SuiteReport
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import BlobId, Completions, Record

log = logging.getLogger(__name__)

GENERATED, WHOLE, CONTINUATION = "generate_until", "loglikelihood_rolling", "continuation"
"""Kinds of requests, and the key of what is scored."""
HANDLER = "rollout_core.evaluation.lm_eval_process:handle"
LIMITS = Limits(seconds=3600.0, processes=1024)
"""Of a call. lm_eval estimates errors in as many processes as the machine has processors."""
_child = KeptChild(HANDLER, LIMITS)
TEXT_KEYS: Mapping[str, str] = {
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "min_new_tokens": "min_tokens",
    "min_tokens": "min_tokens",
    "seed": "seed",
}
"""Keys of ``generation_kwargs``, and ours of the same meaning."""
WITHOUT_EFFECT: Mapping[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "top_k": 0}
"""Keys that change nothing at this value."""


class Drawing(NamedTuple):
    """Requests whose answers are drawn alike."""

    prompts: ContentId
    """As of `Dataset`: a row for each request, in order."""
    sampling: SamplingParams
    samples: int
    """Answers to each."""
    scored: bool
    """Continuations of the prompts are scored, and nothing is generated."""


class GroupMetric(NamedTuple):
    """A figure of a group of tasks, which is the mean of theirs."""

    group: str
    metric: str
    """With its filter, as lm_eval has it."""
    tasks: tuple[str, ...]
    by_size: bool
    """Tasks weigh by their numbers of questions, so that each question counts the same."""


class LmEvalRequests(Record):
    """What tasks ask."""

    requests: BlobId
    """JSON: each request as lm_eval has it, with the place of its `Drawing`."""
    asked: tuple[Drawing, ...]
    version: str
    """Of lm_eval."""
    source: ContentId
    """Of what defines the tasks: their settings, and the code that they name."""
    groups: tuple[GroupMetric, ...] = ()

    def cache_identity(self) -> Any:
        """Groups count where there are some; reports of tasks alone have the keys that they had without this field."""
        named = [name for name in type(self).model_fields if name != "groups" or self.groups]
        return {name: identity(getattr(self, name)) for name in named}

    def references(self) -> Iterator[tuple[Literal["blob", "tree", "snapshot"], ContentId]]:
        yield from super().references()
        for drawing in self.asked:
            yield "blob", drawing.prompts


@dataclass(frozen=True)
class Drawn:
    """A `Drawing` with its prompts."""

    rows: list[PromptRow]
    sampling: SamplingParams
    samples: int
    scored: bool


@dataclass(frozen=True)
class Asked:
    """Requests as `LmEvalRequests` files them."""

    requests: Sequence[Mapping[str, Any]]
    drawings: Sequence[Drawn]
    version: str
    source: ContentId
    groups: tuple[GroupMetric, ...]
    metrics: Sequence[str]
    """Names of the metrics that groups and tasks have, as reports name them."""

    @property
    def num_questions(self) -> int:
        """Each of which has one or several requests."""
        return len({(request["task"], request["doc"]) for request in self.requests})

    def filed(self, objects: ObjectStore) -> LmEvalRequests:
        """File them."""
        asked = [
            Drawing(objects.put_bytes(to_jsonl(drawn.rows)), drawn.sampling, drawn.samples, drawn.scored)
            for drawn in self.drawings
        ]
        requests = objects.put_json(self.requests)
        about = {"version": self.version, "source": self.source, "groups": self.groups}
        return LmEvalRequests(requests=requests, asked=tuple(asked), **about)


def ask_tasks(suite: LmEvalSuite, base: Path) -> Asked:
    """What the suite's tasks ask. ``base``: what paths are relative to.

    Raises ConfigError for tasks that are not there, or ask what cannot be answered here.
    """
    found = _call(suite, base, requests=None, answers=None)
    drawings: list[Drawn] = []
    for request in found["requests"]:
        scored = request["kind"] != GENERATED
        how = (SCORING, 1, scored) if scored else (sampling_of(request), request["samples"], scored)
        alike = (place for place, one in enumerate(drawings) if (one.sampling, one.samples, one.scored) == how)
        request["drawing"] = next(alike, len(drawings))
        if request["drawing"] == len(drawings):
            drawings.append(Drawn([], *how))
        drawings[request["drawing"]].rows.append(_prompt_row(request, is_chat=suite.apply_chat_template))
    groups = tuple(GroupMetric(name, **each) for name, own in found["groups"].items() for each in own)
    entries = {**found["groups"], **found["metrics"]}
    named = [*((group.group, group.metric) for group in groups)]
    named += [(task, metric) for task, own in found["metrics"].items() for metric in own]
    metrics = [_label(entry, metric, entries) for entry, metric in named]
    return Asked(found["requests"], drawings, found["version"], _source_of(found), groups, metrics)


def _call(suite: LmEvalSuite, base: Path, **more: Any) -> dict[str, Any]:
    install = f"install {DISTRIBUTION}[lm-eval]"
    python = python_of(suite.python, base, kind=suite.kind, package="lm_eval", install=install)
    given: dict[str, Any] = suite.model_dump(mode="json") | {"folder": str(base.resolve())} | more
    given["requests"] = None if given["requests"] is None else [_as_asked(request) for request in given["requests"]]
    try:
        if python is None:
            return _child.call(given)
        with Child(HANDLER, LIMITS, on_line=log.debug, python=python) as child:
            return child.call(given)
    except Ended as error:
        raise ConfigError(f"lm_eval: its process {error}") from error
    except Fatal as error:
        raise ConfigError(f"lm_eval: {error}") from error


def _as_asked(request: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name != "drawing"}


def _prompt_row(request: Mapping[str, Any], *, is_chat: bool) -> PromptRow:
    about, context = {"task": request["task"], "doc_id": request["doc"]}, request["context"]
    if request["kind"] == WHOLE:  # a text that nothing stands before
        about, context, is_chat = {**about, CONTINUATION: context}, "", False
    elif request["kind"] != GENERATED:
        about[CONTINUATION] = request["continuation"]
    prompt = {"messages": json.loads(context)} if is_chat and context else {"prompt": context}
    return PromptRow.model_validate({**prompt, "id": f"{request['task']}/{request['doc']}", "extras": about})


def continuations(rows: Sequence[PromptRow]) -> list[Continued]:
    """What is scored of rows that ask for log-likelihoods."""
    return [Continued(row, row.extras[CONTINUATION]) for row in rows]


def sampling_of(request: Mapping[str, Any]) -> SamplingParams:
    """How the text is drawn that a request asks for. Raises ConfigError for what has no meaning here."""
    task, given = request["task"], dict(request["generation"])
    fields: dict[str, Any] = {"max_tokens": given.pop("max_gen_toks"), "stop": tuple(filter(None, given.pop("until")))}
    temperature = given.pop("temperature", None)
    # As transformers has it: sampling without a temperature is at 1.
    fields["temperature"] = (1.0 if temperature is None else temperature) if given.pop("do_sample") else 0.0
    for name, value in given.items():
        if value is None or WITHOUT_EFFECT.get(name) == value:
            continue
        if name not in TEXT_KEYS:
            raise ConfigError(
                f"task {task}: generation_kwargs has {name} = {value!r}, which has no meaning here; expected until, "
                f"max_gen_toks, do_sample, temperature, {', '.join(TEXT_KEYS)}"
            )
        fields[TEXT_KEYS[name]] = value
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        raise ConfigError(f"task {task}: generation_kwargs: {error}") from None


def _source_of(found: Mapping[str, Any]) -> ContentId:
    return content_id("lm-eval-source/1", found["source"])


def report(
    objects: ObjectStore,
    suite: LmEvalSuite,
    asked: LmEvalRequests,
    completions: Sequence[Completions],
    base: Path,
) -> SuiteReport:
    """What answers to the requests come to, by the tasks' own metrics. ``completions`` are those of each drawing.

    Raises ConfigError where the tasks have changed since.
    """
    requests = objects.get_json(asked.requests)
    order = _places(requests, len(asked.asked))
    answered = [_rows(objects, one.completions) for one in completions]
    drawn = [_rows(objects, one.samples) for one in completions]
    answers = [
        [_answer(request, answered[drawing][place]) for drawing, place in places] * (request["samples"] // len(places))
        for request, places in zip(requests, order, strict=True)
    ]
    came_to = _call(suite, base, requests=requests, answers=answers)
    if _source_of(came_to) != asked.source:
        raise ConfigError("lm_eval: the tasks' settings or code differ from when their prompts were made; start again")

    questions, found = came_to["questions"], came_to["found"]["results"]
    higher = came_to["found"].get("higher_is_better", {})
    right = [_right_share(question["values"], higher.get(question["task"], {})) for question in questions]
    by_question = {(question["task"], question["doc"]): share for question, share in zip(questions, right, strict=True)}
    grouped = dict(_grouped(asked.groups, questions, found))
    flat = [place for places in order for place in places]
    asking = [
        (request["task"], request["doc"]) for request, places in zip(requests, order, strict=True) for _ in places
    ]
    shown = _shown(asking, [_likelihood(answered[drawing][place]) for drawing, place in flat])
    filed = {
        "ids": [f"{question['task']}/{question['doc']}" for question in questions],
        "values": {**_values(questions, found), **{name: of for name, (of, _) in grouped.items()}, RIGHT_SHARE: right},
        "places": [shown[question["task"], question["doc"]] for question in questions],
        "lm_eval": came_to["found"],
    }
    if weights := {name: each for name, (_, each) in grouped.items() if each is not None}:
        filed["weights"] = weights
    metrics = tuple(_metrics(_groups_first(found, asked.groups), filed["values"]))
    if not metrics:
        raise ConfigError(
            f"suite {suite.name}: no metric of its tasks came to a number; look at their metric_list, and at limit"
        )
    return SuiteReport(
        suite=suite.name,
        suite_id=content_id("lm-eval-suite/1", [asked.requests, asked.version, asked.source]),
        model=completions[0].model,
        samples=objects.put_bytes(b"".join(drawn[drawing][place] for drawing, place in flat)),
        completions=objects.put_bytes(b"".join(answered[drawing][place] for drawing, place in flat)),
        scores=objects.put_json([by_question[question] for question in asking]),
        questions=objects.put_json(filed),
        num_questions=len(questions),
        num_samples=len(flat),
        num_tokens=sum(one.num_tokens for one in completions),
        num_truncated=sum(one.finish_reasons.get("length", 0) for one in completions),
        num_abstained=0,
        num_score_failed=0,
        metrics=metrics,
    )


def _answer(request: Mapping[str, Any], line: bytes) -> Any:
    """As lm_eval takes it."""
    if request["kind"] == GENERATED:
        return json.loads(line)["text"]
    [scored] = decode_completions_blob(line)
    found = Loglikelihood.of(scored)
    return found.total if request["kind"] == WHOLE else [found.total, found.is_greedy]


def _likelihood(line: bytes) -> float:
    row = json.loads(line)
    return sum(row["logprobs"]) if row.get("greedy") is not None else 0.0


def _shown(asking: Sequence[tuple[str, int]], likelihoods: Sequence[float]) -> dict[tuple[str, int], int]:
    """Of each question, which of its answers is shown: the first text, or the likeliest continuation."""
    found: dict[tuple[str, int], int] = {}
    for place, question in enumerate(asking):
        if question not in found or likelihoods[place] > likelihoods[found[question]]:
            found[question] = place
    return found


def _rows(objects: ObjectStore, blob: ContentId) -> list[bytes]:
    return objects.get_bytes(blob).splitlines(keepends=True)


def _places(requests: Sequence[Mapping[str, Any]], num_drawings: int) -> list[list[tuple[int, int]]]:
    """Of each request, where its answers stand: the drawing, and the place in it."""
    begin, places = [0] * num_drawings, []
    for request in requests:
        drawing, first = request["drawing"], begin[request["drawing"]]
        begin[drawing] += request["samples"] if request["kind"] == GENERATED else 1
        places.append([(drawing, place) for place in range(first, begin[drawing])])
    return places


def _right_share(values: Mapping[str, float], higher: Mapping[str, bool | None]) -> float | None:
    """Of a question: its first metric of which more is better, where that says right or wrong or what lies between."""
    first = next((value for name, value in values.items() if higher.get(name.partition(",")[0]) is not False), None)
    return first if first is not None and 0 <= first <= 1 else None


def lower_is_better(objects: ObjectStore, report: SuiteReport) -> frozenset[str]:
    """The metrics of a report of which less is better, as tasks of lm_eval say; of other suites there are none."""
    found = objects.get_json(report.questions).get("lm_eval", {})
    results, higher = found.get("results", {}), found.get("higher_is_better", {})
    return frozenset(
        _label(entry, name, results)
        for entry, figures in results.items()
        for name in figures
        if higher.get(entry, {}).get(name.partition(",")[0]) is False
    )


def _label(entry: str, metric: str, entries: Collection[str]) -> str:
    """Of a metric of a task or a group, one of ``entries``; lm_eval names it with its filter."""
    name = metric.removesuffix(",none")
    return name if len(entries) == 1 else f"{entry}/{name}"


def _values(questions: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """By metric, of each question; those of other tasks have none."""
    found: dict[str, list[float | None]] = {}
    for number, question in enumerate(questions):
        for metric, value in question["values"].items():
            found.setdefault(_label(question["task"], metric, results), [None] * len(questions))[number] = value
    return found


def _grouped(
    groups: Sequence[GroupMetric], questions: Sequence[Mapping[str, Any]], results: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[list[float | None], list[float] | None]]]:
    """By metric of a group, the values of its tasks' questions, and their weights where tasks count alike."""
    for group, metric, tasks, by_size in groups:
        of = [question["values"].get(metric) if question["task"] in tasks else None for question in questions]
        sizes = Counter(question["task"] for question, value in zip(questions, of, strict=True) if value is not None)
        weights = None if by_size else [1 / max(1, sizes[question["task"]]) for question in questions]
        yield _label(group, metric, results), (of, weights)


def _groups_first(results: Mapping[str, Any], groups: Sequence[GroupMetric]) -> dict[str, Any]:
    """A group stands for its tasks, and the outer one, which lm_eval has last, for those within it."""
    outer = [entry for entry in reversed(list(results)) if entry in {group.group for group in groups}]
    return {entry: results[entry] for entry in (*outer, *results)}


def _metrics(results: Mapping[str, Any], values: Mapping[str, Sequence[float | None]]) -> Iterator[Metric]:
    """As lm_eval has them, tasks and groups, each with 1.96 standard errors to both sides."""
    for entry, figures in results.items():
        for name, value in figures.items():
            metric, comma, chosen = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error, label = figures.get(f"{metric}_stderr,{chosen}"), _label(entry, name, results)
            reach = Z * error if isinstance(error, int | float) and error > 0 else None
            known = [one for one in values.get(label, ()) if one is not None]
            yield Metric(
                name=label,
                value=value,
                lower=None if reach is None else value - reach,
                upper=None if reach is None else value + reach,
                num_questions=len(known) or figures.get("sample_len", 0),
            )
