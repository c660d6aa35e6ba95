"""The part of a completion that is its answer."""

from __future__ import annotations

from collections.abc import Iterator

import regex

from rollout_core.config.verifiers import Extraction

FENCED = r"^[ \t]*(`{3,}|~{3,})[ \t]*(?<language>[\w+#.-]*)[^\n]*\n(?<code>.*?)^[ \t]*\1[ \t]*$"
"""A fenced block of Markdown, from line to line."""


def extract(completion: str, wanted: Extraction) -> str | None:
    """The answer, without white space around it; None where the completion has none."""
    found = list(_parts(completion, wanted))
    if not found:
        return None
    return found[-1 if wanted.which == "last" else 0].strip()


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
            for found in regex.finditer(wanted.pattern, text, regex.DOTALL):
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
    """The contents of fenced blocks; with ``language``, of those that name it or none."""
    for block in regex.finditer(FENCED, text, regex.DOTALL | regex.MULTILINE):
        if language is None or block["language"].lower() in ("", language.lower()):
            yield block["code"]


def code_or_all(completion: str, wanted: Extraction | None, language: str | None = None) -> str | None:
    """As `extract`; without a wish the last fenced block, or the whole completion where it has no block."""
    if wanted is not None:
        return extract(completion, wanted)
    blocks = list(code_blocks(completion, language))
    return (blocks[-1] if blocks else completion).strip()
