"""The part of a completion that is its answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import dedent
from typing import Any

import regex

from rollout_core.config.verifiers import Extraction

PATTERN_SECONDS = 10.0
"""For one completion; what takes longer has no answer."""
_FENCE = regex.compile(r"[ \t]*(?<marks>`{3,}+|~{3,}+)[ \t]*+(?<language>[^\s`]*+)[^`]*+")
ALIASES = {
    "py": "python", "python3": "python", "py3": "python",
    "js": "javascript", "node": "javascript",
    "cpp": "c++", "cc": "c++", "cxx": "c++",
    "shell": "sh", "zsh": "bash",
    "sqlite": "sql", "sqlite3": "sql", "mysql": "sql", "postgresql": "sql",
    "jsonc": "json", "json5": "json",
    "rscript": "r", "jl": "julia", "rb": "ruby", "pl": "perl",
}  # fmt: skip
"""Other names of languages on fenced blocks."""


def extract(completion: str, wanted: Extraction) -> str | None:
    """The answer, without white space around it (of code: without empty lines); None where the completion has none."""
    try:
        found = list(_parts(completion, wanted))
    except TimeoutError:
        return None
    if not found:
        return None
    answer = found[-1 if wanted.which == "last" else 0]
    return answer.strip("\n") if wanted.take == "code" else answer.strip()


def _parts(text: str, wanted: Extraction) -> Iterator[str]:
    match wanted.take:
        case "all":
            yield text
        case "boxed":
            yield from boxed(text)
        case "after":
            assert wanted.marker is not None, "validated"
            for rest in text.split(wanted.marker)[1:]:
                yield rest.partition("\n")[0]
        case "between":
            assert wanted.start is not None and wanted.end is not None, "validated"
            yield from _between(text, wanted.start, wanted.end)
        case "code":
            yield from code_blocks(text, wanted.language)
        case "pattern":
            assert wanted.pattern is not None, "validated"
            for found in regex.finditer(wanted.pattern, text, regex.DOTALL, timeout=PATTERN_SECONDS):
                yield (found[1] if found.re.groups else found[0]) or ""


def _between(text: str, start: str, end: str) -> Iterator[str]:
    """Innermost ones: a start that is followed by another one before an end begins nothing."""
    for before in text.split(end)[:-1]:
        _, found, inner = before.rpartition(start)
        if found:
            yield inner


def boxed(text: str) -> list[str]:
    """What stands in each ``\\boxed{...}`` (and ``\\fbox``), up to the brace that closes it, in the order in which they
    begin; one that is never closed is none. Takes one pass, whatever the text."""
    found: list[tuple[int, str]] = []
    opened: list[int | None] = []  # where the contents begin; None: a brace of something else
    for mark in regex.finditer(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", text, regex.DOTALL):
        if mark[0] == "}":
            start = opened.pop() if opened else None
            if start is not None:
                found.append((start, text[start : mark.start()]))
        elif mark[0].endswith("{") and mark[0] != "\\{":
            opened.append(mark.end() if len(mark[0]) > 1 else None)
    return [contents for _, contents in sorted(found)]


def code_blocks(text: str, language: str | None = None) -> Iterator[str]:
    """The contents of fenced blocks, without what indents all of a block; with ``language``, of those that name it, in
    any of its names, or none."""
    wanted = None if language is None else _language(language)
    marks, named, lines = "", "", list[str]()
    for line in text.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.fullmatch(line) or (None if marks else _FENCE.fullmatch(line[max(0, line.find("```")) :]))
        if not marks and fence is not None:
            marks, named, lines = fence["marks"], fence["language"], []
        elif marks and fence is not None and fence["marks"].startswith(marks) and not fence["language"]:
            if wanted is None or _language(named) in ("", wanted):
                yield dedent("".join(lines))
            marks = ""
        elif marks:
            lines.append(line + "\n")


def _language(name: str) -> str:
    name = name.lower().strip("{}.")
    return ALIASES.get(name, name)


def code_or_all(completion: str, wanted: Extraction | None, language: str | None = None) -> str | None:
    """As `extract`; without a wish the last fenced block in ``language`` or none, or the last one at all, or the whole
    completion where it has no block."""
    if wanted is not None:
        return extract(completion, wanted)
    blocks = list(code_blocks(completion, language)) or list(code_blocks(completion))
    return blocks[-1].strip("\n") if blocks else completion.strip("\n")


def listed(answer: Any) -> Sequence[Any]:
    """The answers of a row that has one, or a list of them."""
    return answer if isinstance(answer, list) and answer else [answer]
