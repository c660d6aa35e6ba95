"""What the documents show is so: commands are understood, configuration keys exist, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel

from deployments.cli import app
from rollout_core.config import CONFIG_KINDS, InspectSuite, LmEvalSuite, Suite, load_config
from rollout_core.config.cloud import parse_cloud
from rollout_core.plugins.manifest import Manifest
from tests.conftest import PROJECT

RESULTS = sorted((PROJECT / "benchmarks" / "results").glob("*.md"))
PAGES = [
    *(PROJECT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")),
    *sorted((PROJECT / "docs").glob("*.md")),
    *RESULTS,
]
FILE_ENDINGS = {"gguf", "md", "py", "json", "jsonl", "toml", "parquet"}
OWN_FILES = {"my.toml", "batch.toml", "nightly.toml", "sft.toml", "grpo.toml"}
"""Files that stand for the reader's own; an example of the repository takes their place here."""


def ids(path: Path) -> str:
    return path.name


def fenced(page: Path, language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for found, text in blocks if found == language]


def inline(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    # One that a line ends in goes on in the next; none goes over an empty line.
    return [" ".join(found.split()) for found in re.findall(r"`((?:[^`\n]|\n(?!\s*\n))+)`", text)]


def commands(page: Path) -> list[str]:
    lines = [line for block in fenced(page, "") for line in block.replace("\\\n", " ").splitlines()]
    shown = [line.partition(" #")[0].strip() for line in [*lines, *inline(page)]]
    known = ("rollout ", "make ", "python ", "prefect deployment run ")
    return [line for line in shown if line.startswith(known) and "=<" not in line and "..." not in line]


SHOWN = [(page, line) for page in PAGES for line in dict.fromkeys(commands(page))]


@pytest.mark.parametrize(("page", "line"), SHOWN, ids=lambda value: getattr(value, "name", value))
def test_a_command_is_understood(page: Path, line: str):
    program, *arguments = shlex.split(line)
    {"rollout": check_rollout, "make": check_make, "python": check_python, "prefect": check_prefect}[program](arguments)


def check_rollout(arguments: list[str]) -> None:
    arguments = [argument.strip("[]") for argument in arguments]
    command: Any = typer.main.get_command(app)
    context, rest = None, arguments
    while hasattr(command, "commands") and rest:
        names = rest[0].split("|")
        assert set(names) <= set(command.commands), f"{command.name} has no command {rest[0]}"
        command, rest = command.commands[names[0]], rest[1:]
        if rest[:1] == ["|"]:  # `rollout snapshot list | show ID`
            rest = rest[1:]
            return check_rollout([*arguments[: arguments.index("|") - 1], *rest])
    if not rest:
        return
    context = command.make_context(command.name, list(rest), resilient_parsing=False)
    if config := context.params.get("config"):
        check_config(arguments[: len(arguments) - len(rest)], Path(config), context.params)


def check_config(words: list[str], config: Path, parameters: dict[str, Any]) -> None:
    from flows.cli.common import parse_overrides

    name = "nightly" if words == ["ops", "deploy"] else words[-1]
    if words in (["doctor"], ["store", "bridge"]):  # a table that the page shows
        return
    path = Path("examples", f"{name}-tiny.toml") if config.name in OWN_FILES else config
    path = Path("examples", "agents", "train-lookup.toml") if config.name == "agent.toml" else path
    kinds = {"infer batch": "infer-batch", "nightly": "nightly", "agent train": "train-agent", "ops deploy": "nightly"}
    kinds["agent online"] = "learn-online"
    if name == "plan":  # of any kind, which the file says
        name = "nightly" if config.stem == "my" else config.stem
        path, kinds["plan"] = Path("examples", f"{name}-tiny.toml"), "nightly" if name == "nightly" else f"train-{name}"
    kind = kinds.get(" ".join(words), f"train-{name}")
    load_config(PROJECT / path, CONFIG_KINDS[kind], parse_overrides(parameters.get("set_")))


def check_make(arguments: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    given = {argument.partition("=")[0] for argument in arguments if "=" in argument}
    assert given <= set(re.findall(r"^(\w+) \?=", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    assert {argument for argument in arguments if "=" not in argument} <= set(targets)


def check_python(arguments: list[str]) -> None:
    name, options = arguments[0], arguments[1:]
    if name == "-m":
        name, options = arguments[1], arguments[2:]
        specification = find_spec(name)
        assert specification is not None and specification.origin is not None, f"there is no module {name}"
        source = Path(specification.origin).read_text(encoding="utf-8")
    else:
        source = (PROJECT / name).read_text(encoding="utf-8")
    for option in options:
        if "--" in option:
            assert f'"{option.strip("[]")}"' in source, f"{name} has no option {option}"


def check_prefect(arguments: list[str]) -> None:
    deployments = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    flow, name = arguments[2].split("/")
    found = [entry for entry in deployments if entry["name"] == name]
    assert any(entry["entrypoint"].partition(":")[2].replace("_", "-") == flow for entry in found)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a value of this type may be or hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) is not None or isinstance(annotation, types.UnionType):
        for argument in typing.get_args(annotation):
            yield from models_in(argument)


def all_models() -> dict[str, set[type[BaseModel]]]:
    """Every model of a configuration, by the keys that it stands under."""
    by_key: dict[str, set[type[BaseModel]]] = {"": set(CONFIG_KINDS.values())}
    waiting = list(CONFIG_KINDS.values())
    seen = set(waiting)
    while waiting:
        for key, field in waiting.pop().model_fields.items():
            for model in models_in(field.annotation):
                by_key.setdefault(key, set()).add(model)
                if model not in seen:
                    seen.add(model)
                    waiting.append(model)
    return by_key


MODELS = all_models()


def unknown_keys(document: Any, models: set[type[BaseModel]], path: str = "") -> list[str]:
    """Keys of ``document`` that none of ``models`` has, as dotted paths."""
    if isinstance(document, list):
        return [wrong for item in document for wrong in unknown_keys(item, models, path)]
    if not isinstance(document, dict):
        return []
    wrong = []
    for key, value in document.items():
        annotations = [model.model_fields[key].annotation for model in models if key in model.model_fields]
        if not annotations:
            wrong.append(f"{path}{key}")
            continue
        inner = {model for annotation in annotations for model in models_in(annotation)}
        free = any(keyed in str(annotation) for annotation in annotations for keyed in ("dict[", "Mapping["))
        if inner and not free:
            wrong += unknown_keys(value, inner, f"{path}{key}.")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_key_of_a_shown_configuration_exists(page: Path):
    for block in fenced(page, "toml"):
        document = tomllib.loads(block)
        if "trait_id" in document:
            entry = {name.replace("-", "_"): table for name, table in document.get("entry", {}).items()}
            wrong = unknown_keys({**document, "entry": entry}, {Manifest})
            assert not wrong, f"{block}\nno manifest has {', '.join(wrong)}"
            continue
        if parse_cloud(document, page.name) is not None:  # it stands beside a run's own tables
            continue
        wrong = min(
            (unknown_keys(document, {kind}) for kind in (*CONFIG_KINDS.values(), Suite, InspectSuite, LmEvalSuite)),
            key=len,
        )
        if wrong and all(not isinstance(value, dict) for value in document.values()):
            # Keys of a table whose name the text beside it gives.
            wrong = min((unknown_keys(document, {model}) for models in MODELS.values() for model in models), key=len)
        assert not wrong, f"{block}\nno configuration has {', '.join(wrong)}"


def is_own_module(room: str, name: str) -> bool:
    """Whether this is a module in one of the folders of the product: one is called ``tasks``, as a key is."""
    return (PROJECT / room / f"{name}.py").is_file() or (PROJECT / room / name / "__init__.py").is_file()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_dotted_key_that_the_text_names_exists(page: Path):
    wrong = []
    for text in inline(page):
        found = re.fullmatch(r"\[?([a-z_]+(?:\.[a-z_]+)+)\]?(?: = .*)?", text)
        first, *rest = found[1].split(".") if found else ("",)
        if not rest or first not in MODELS or rest[-1] in FILE_ENDINGS or is_own_module(first, rest[0]):
            continue
        models = MODELS[first]
        for key in rest:
            annotations = [model.model_fields[key].annotation for model in models if key in model.model_fields]
            if not annotations:
                wrong.append(text)
                break
            models = {model for annotation in annotations for model in models_in(annotation)}
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_link_between_pages_leads_somewhere(page: Path):
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name} links to {target}#{anchor}"


def test_every_environment_variable_that_the_product_reads_is_among_the_settings():
    read = set()
    for room in ("rollout_core", "blocks", "tasks", "flows", "deployments"):
        for file in (PROJECT / room).rglob("*.py"):
            read |= set(re.findall(r'"(ROLLOUT_[A-Z_]+)"', file.read_text(encoding="utf-8")))
    internal = {name for name in read if name.startswith(("ROLLOUT_RANK_", "ROLLOUT_STORE_SERVE"))} | INTERNAL
    settings = (PROJECT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert {name for name in read - internal if name.rstrip("_") not in settings} == set()


INTERNAL = {
    "ROLLOUT_ENGINE_EAGER",
    "ROLLOUT_ENGINE_FILES",
    "ROLLOUT_POOL",
    "ROLLOUT_PROJECT",
    "ROLLOUT_SORT",
    "ROLLOUT_SUPERVISOR",
}
"""What one process of ours sets for another, and names that are no variables."""


VAGUE = re.compile(r"\b(told|beside|goes on|let go|whom|what became of)\b", re.IGNORECASE)
"""Words for which there is a plainer one: reported or sent, next to or besides, continues or resumes, released or
pruned, the name of who is meant, the outcome of."""
MOST_VAGUE_IN_DOCS = 2
"""A name that programs read, in the page of `rollout plan`, and an option of a benchmark."""
MOST_VAGUE_IN_CODE = 2
"""The name that `rollout plan --json` prints, and the earlier one of `deployments.ui.mounted`."""
LONGEST_PARAGRAPH = 120
"""Words; what is longer has more than one idea."""


def helps(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Every text of a command's help and of those below it, with where it stands."""
    command = getattr(command, "loaded", command)  # of one whose file is imported when it is called
    yield name, command.help or ""
    for parameter in command.params:
        yield f"{name} {parameter.name}", getattr(parameter, "help", None) or ""
    for below, inner in getattr(command, "commands", {}).items():
        yield from helps(inner, f"{name} {below}")


def vague(lines: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{where}: {line.strip()}" for where, line in lines if VAGUE.search(line)]


def numbered(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{file.relative_to(PROJECT)}:{number}", line


def test_docs_and_help_use_plain_words():
    shown = helps(typer.main.get_command(app), "rollout")
    helped = ((where, line) for where, text in shown for line in text.splitlines())
    found = vague([*numbered(PAGES), *helped])
    assert len(found) <= MOST_VAGUE_IN_DOCS, "\n".join(found)


def test_code_uses_plain_words():
    rooms = ("rollout_core", "blocks", "tasks", "flows", "deployments")
    found = vague(numbered(file for room in rooms for file in sorted((PROJECT / room).rglob("*.py"))))
    assert len(found) <= MOST_VAGUE_IN_CODE, "\n".join(found)


def paragraphs(page: Path) -> Iterator[tuple[int, str]]:
    """Those of a page's text, with the number of the line where each begins; an item of a list is one."""
    parts: list[tuple[int, str]] = []
    is_fenced = False
    for number, line in enumerate([*page.read_text(encoding="utf-8").splitlines(), ""], 1):
        is_fence = line.startswith("```")
        is_fenced ^= is_fence
        is_text = line.strip() and not (is_fence or is_fenced or line.startswith(("#", "|", "!")))
        if parts and (not is_text or re.match(r"\s*([-*]|\d+\.) ", line)):
            yield parts[0][0], " ".join(text for _, text in parts)
            parts = []
        if is_text:
            parts.append((number, line))


@pytest.mark.parametrize("page", [page for page in PAGES if page not in RESULTS], ids=ids)
def test_no_paragraph_is_longer_than_one_idea(page: Path):
    long = [(number, len(text.split())) for number, text in paragraphs(page) if len(text.split()) > LONGEST_PARAGRAPH]
    assert not long, f"{page.name}: {', '.join(f'line {number} has {words} words' for number, words in long)}"
