"""`rollout eval`: models evaluated by suites of questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from flows.cli.common import (
    Debug,
    DryRun,
    HotReload,
    Locked,
    Overrides,
    PluginPaths,
    held_to,
    one_line_errors,
    parse_overrides,
    plugins_at,
    print_plan,
)
from flows.cli.promotion import ServedResource, served_id
from flows.cli.results import add_row, as_json_text, print_table, shortened, visible
from flows.cli.starting import load_tables, look_ahead, run_flow
from flows.cli.storage import StoragePath
from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.config import EvalConfig
from rollout_core.evaluation.metrics import Metric
from rollout_core.evaluation.reports import Flip, SuiteComparison, SuiteReport, compare_reports
from rollout_core.evaluation.suite_files import read_suite
from rollout_core.runs.evaluations import EvaluatedModel, evaluated_models, find_evaluated
from rollout_core.runs.run_records import RunRecords
from rollout_core.runs.run_samples import shown_prompt
from tasks.runtime.prefect_server import connections, object_store

Format = Annotated[Literal["text", "json"], typer.Option("--format", help="What to print it as.")]
ModelToEvaluate = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder, GGUF file, hub id, or content id, or its first digits, at least 8; latest: the served model; or "
        "the URL of an endpoint, up to and with its version, such as https://api.openai.com/v1.",
    ),
]
EvaluatedName = Annotated[
    str,
    typer.Argument(
        help="A model that was evaluated: its content id or first digits, the address it was evaluated by, the first "
        "digits of that run's id; or latest."
    ),
]


PROMPT_WIDTH = 200


def eval_run(
    model: ModelToEvaluate,
    suite: Annotated[
        list[str],
        typer.Option("--suite", help="TOML or Python file of a suite, or mmlu, gsm8k or ifeval. Repeatable."),
    ],
    backend: Annotated[
        Literal["vllm", "transformers", "openai", "scripted"] | None,
        typer.Option("--backend", help="What generates; its keys by --set, such as --set backend.max_model_len=512."),
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", metavar="SUITE=FILE", help="Rows of a suite in place of its own. Repeatable."),
    ] = None,
    served_model: Annotated[
        str | None, typer.Option("--served-model", help="Of an endpoint: name of the model there.")
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option("--revision", help="Of an endpoint's model: what you call its present state; another asks anew."),
    ] = None,
    api: Annotated[
        Literal["chat", "completions", "anthropic"] | None,
        typer.Option("--api", help="Of an endpoint: what it is asked by; chat is the default."),
    ] = None,
    output: Format = "text",
    dry_run: DryRun = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Score again and report again; answers that there are stay.")
    ] = False,
    resource: ServedResource = "policy",
    set_: Overrides = None,
    locked: Locked = None,
    plugin: PluginPaths = None,
    hot_reload: HotReload = False,
    debug: Debug = False,
) -> None:
    """Ask a model the questions of suites and print what its answers come to, with intervals."""
    with one_line_errors(debug), plugins_at(plugin, hot_reload=hot_reload):
        if dry_run:
            look_ahead()
        given = {"--served-model": served_model, "--revision": revision, "--api": api, "--backend": backend}
        tables = {"model": _model(model, given, resource), "suites": _suites(suite, rows or [])}
        given = {} if backend is None else {"backend.kind": backend}
        given |= {"run.refresh": True} if refresh else {}
        overrides = given | parse_overrides(set_) | held_to(locked, dry_run=dry_run)
        options = {"backend.kind": "--backend", "run.refresh": "--refresh", "run.locked": "--locked"}
        config = load_tables(tables, "eval run", EvalConfig, overrides, options)
        from rollout_core.plans.learner_plan import plan_suites  # while another process imports torch for a dry run

        facts = plan_suites(config, Path.cwd(), connections())
        if dry_run:
            print_plan(facts)
            return
        done = run_flow("flows.evaluate:evaluate_suites", debug, config)
        if output == "json":
            typer.echo(as_json_text(done))
            return
        _print_reports([SuiteReport.model_validate(report) for report in done["reports"]])
        typer.echo(f"model {done['model']}")


def eval_list(storage: StoragePath = None, output: Format = "text", debug: Debug = False) -> None:
    """Print the models that were evaluated, by suites. One figure of each is shown with its interval; JSON has all."""
    with one_line_errors(debug):
        with object_store(storage) as objects:
            models = evaluated_models(RunRecords(objects))
        if output == "json":
            typer.echo(as_json_text([model_document(model) for model in models]))
            return
        if not models:
            typer.echo("no model was evaluated yet; `rollout eval run MODEL --suite FILE` does so")
            return
        suites = list(dict.fromkeys(name for model in models for name in model.reports))
        table = Table(box=None, pad_edge=False)
        for column in ("model", "from", "evaluated", *suites):
            table.add_column(column)
        for model in models:
            cells = (_in_words(report.headline) if (report := model.reports.get(name)) else "-" for name in suites)
            add_row(table, (model.model[:12], model.address or "-", f"{model.run.began:%m-%d %H:%M}", *cells))
        print_table(table)


def eval_compare(
    first: EvaluatedName,
    second: EvaluatedName,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Questions that flipped to print, each way.")] = 3,
    storage: StoragePath = None,
    output: Format = "text",
    resource: ServedResource = "policy",
    debug: Debug = False,
) -> None:
    """Print how two evaluated models differ, suite by suite and question by question.

    Differences are the second model's figures less the first's, with intervals of a paired bootstrap over questions.
    """
    with one_line_errors(debug):
        names = [served_id(resource) if name == "latest" else name for name in (first, second)]
        with object_store(storage) as objects:
            known = evaluated_models(RunRecords(objects))
            before, after = (find_evaluated(known, name) for name in names)
            common = [name for name in before.reports if name in after.reports]
            if not common:
                raise ConfigError(
                    f"no suite evaluated both {before.model[:12]} ({_named(before)}) and {after.model[:12]} "
                    f"({_named(after)}); evaluate both by the same"
                )
            compared, problems = [], []
            for name in common:
                try:
                    compared.append(compare_reports(objects, before.reports[name], after.reports[name]))
                except (ConfigError, NotFound) as error:
                    problems.append(str(error))
        if not compared:
            raise ConfigError("\n".join(problems), tuple(problems))
        if output == "json":
            suites = [_comparison_document(comparison, limit) for comparison in compared]
            models = [before.model, after.model]
            typer.echo(as_json_text({"models": models, "suites": suites, "not_compared": problems}))
            return
        typer.echo(f"models: {_model_in_words(before)} and {_model_in_words(after)}")
        for comparison in compared:
            _print_comparison(comparison, limit)
        for problem in problems:
            typer.echo(problem)


def _model(model: str, options: Mapping[str, str | None], resource: str) -> dict[str, str]:
    """The table of the model that a command names. Raises ConfigError for options that are of another one."""
    is_endpoint = model.startswith(("http://", "https://"))
    given = {name for name, value in options.items() if value is not None}
    wrong = sorted(given & ({"--backend"} if is_endpoint else set(_OF_ENDPOINTS)))
    if wrong and is_endpoint:
        raise ConfigError("--backend: an endpoint's own model answers there; leave it out")
    if wrong:
        raise ConfigError(f"{', '.join(wrong)}: of a model at an endpoint; give its URL as MODEL, or leave it out")
    if not is_endpoint:
        return {"uri": served_id(resource) if model == "latest" else model}
    if options["--served-model"] is None:
        raise ConfigError(f"{model} is an endpoint; name its model by --served-model")
    named = {key: options[name] for name, key in _OF_ENDPOINTS.items() if name in given}
    return {"kind": "endpoint", "url": model, **{key: value for key, value in named.items() if value is not None}}


_OF_ENDPOINTS = {"--served-model": "model", "--revision": "revision", "--api": "api"}


def _suites(names: Sequence[str], rows: Sequence[str]) -> list[dict[str, Any]]:
    """The tables of suites, some with ``rows`` of other files (NAME=FILE). Raises ConfigError with a line for each
    thing that is wrong with them."""
    named = [_named_rows(each) for each in rows]
    given, tables = dict(named), []
    wrong = [
        f"--rows {name}=... is given {count} times" for name, count in Counter(n for n, _ in named).items() if count > 1
    ]
    for name in names:
        try:
            tables.append(read_suite(name, rows=given.pop(name, None)))
        except ConfigError as error:
            wrong += error.violations or (str(error),)
    wrong += [f"--rows {name}=...: no --suite {name} is asked for" for name in given]
    if wrong:
        raise ConfigError("\n".join(wrong), tuple(wrong))
    return tables


def _named_rows(given: str) -> tuple[str, str]:
    name, separator, path = given.partition("=")
    if not (name and separator and path):
        raise ConfigError(f"--rows {given!r}: expected SUITE=FILE, such as mmlu=data/mmlu.jsonl")
    return name, path


def _print_reports(reports: Sequence[SuiteReport]) -> None:
    table = Table(box=None, pad_edge=False)
    figures = ("value", "95 % interval", "questions", "answers", "cut", "without score", "failed")
    for column in ("suite", "metric", *figures):
        table.add_column(column, justify="right" if column in figures else "left")
    for report in reports:
        missing = report.num_abstained + report.num_score_failed
        numbers = (report.num_samples, report.num_truncated, missing, report.num_failed)
        counts = tuple(f"{count:,}" for count in numbers)
        for metric in report.metrics:
            row = (report.suite, metric.name, f"{metric.value:.4f}", _interval(metric), f"{metric.num_questions:,}")
            add_row(table, (*row, *counts))
    print_table(table)


def _interval(metric: Metric) -> str:
    return "-" if metric.lower is None else f"{metric.lower:.4f} to {metric.upper:.4f}"


def _in_words(metric: Metric) -> str:
    return f"{metric.name} {metric.value:.4f} ({_interval(metric)})"


def _named(model: EvaluatedModel) -> str:
    return ", ".join(model.reports)


def _model_in_words(model: EvaluatedModel) -> str:
    return f"{model.model[:12]} ({model.address})" if model.address else model.model[:12]


def model_document(model: EvaluatedModel) -> dict[str, Any]:
    reports = {name: report.model_dump(mode="json") for name, report in model.reports.items()}
    return {"model": model.model, "address": model.address, "run": model.run.id, "reports": reports}


def _comparison_document(comparison: SuiteComparison, limit: int) -> dict[str, Any]:
    return {
        "suite": comparison.suite,
        "remark": comparison.remark,
        "gains": {name: asdict(gain) for name, gain in comparison.gains.items()},
        **{
            side: {"count": len(flips), "questions": [asdict(flip) for flip in flips[:limit]]}
            for side, flips in _sides(comparison).items()
        },
    }


def _sides(comparison: SuiteComparison) -> Mapping[str, Sequence[Flip]]:
    return {"lost": comparison.lost, "gained": comparison.gained}


def _print_comparison(comparison: SuiteComparison, limit: int) -> None:
    table = Table(box=None, pad_edge=False)
    for column in (comparison.suite, "first", "second", "difference", "95 % interval", "questions"):
        table.add_column(column, justify="left" if column == comparison.suite else "right")
    for name, gain in comparison.gains.items():
        interval = f"{gain.lower:+.4f} to {gain.upper:+.4f}"
        figures = (f"{gain.mean_before:.4f}", f"{gain.mean_after:.4f}", f"{gain.gain:+.4f}", interval)
        add_row(table, (name, *figures, f"{gain.num_prompts:,}"))
    print_table(table)
    if comparison.remark is not None:
        typer.echo(comparison.remark)
    counts = ", ".join(f"{len(flips)} {side}" for side, flips in _sides(comparison).items())
    typer.echo(f"questions that flipped: {counts}")
    for side, flips in _sides(comparison).items():
        for flip in flips[:limit]:
            typer.echo(f"{side} {flip.question}: {_end_of(shown_prompt(flip.prompt))}")
            for completion in flip.completions:
                typer.echo(f"    {shortened(completion)}")


def _end_of(prompt: str) -> str:
    """Where the question stands, behind its examples."""
    shown = visible(prompt)
    return shown if len(shown) <= PROMPT_WIDTH else f"...{shown[3 - PROMPT_WIDTH :]}"
