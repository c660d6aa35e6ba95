"""Write the pages of the site into build/docs: those of docs/, those generated from code, and the files of the
repository that they link to.

``python -m docs.generate.pages``, from the top of the repository; `make docs` then builds the site of them.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path

from docs.generate import commands, configuration, python_api

PROJECT = Path(__file__).parents[2]
TARGET = PROJECT / "build" / "docs"
TOP_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files at the top of the repository that are pages of the site."""
_LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")
_LANGUAGES = {"py": "python", "toml": "toml", "yaml": "yaml", "ipynb": "json"}


def written_pages() -> dict[str, str]:
    """Pages that people write, by their place in the repository."""
    files = [*sorted((PROJECT / "docs").glob("*.md")), *(PROJECT / name for name in TOP_PAGES)]
    return {file.relative_to(PROJECT).as_posix(): file.read_text(encoding="utf-8") for file in files}


def site_pages() -> dict[str, str]:
    """Every page by its place in the site."""
    pages = {**configuration.pages(), **commands.pages(), **python_api.pages()}
    for origin, text in written_pages().items():
        uri = _place(origin)
        for _, target in _LINK.findall(text):
            path = _linked(origin, target)
            if (PROJECT / path).is_file() and _place(path).startswith("source/"):
                pages[_place(path)] = _source_page(path)
        pages[uri] = _LINK.sub(lambda match, origin=origin: _link(match, origin), text)
    return pages


def _linked(origin: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def _place(path: str) -> str:
    """In the site, of a file of the repository."""
    if path in TOP_PAGES:
        return TOP_PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def _link(match: re.Match[str], origin: str) -> str:
    """A link as it leads on the site. What leads nowhere stays: the builder refuses it."""
    opening, target = match.groups()
    path = _linked(origin, target)
    if not (PROJECT / path).is_file():
        return match[0]
    return opening + posixpath.relpath(_place(path), posixpath.dirname(_place(origin)) or ".")


def _source_page(path: str) -> str:
    language = _LANGUAGES.get(path.rpartition(".")[2], "text")
    return f"# {path}\n\n`````{language}\n{(PROJECT / path).read_text(encoding='utf-8')}\n`````\n"


def main() -> None:
    """Write all pages anew."""
    shutil.rmtree(TARGET, ignore_errors=True)
    shutil.copytree(PROJECT / "docs" / "images", TARGET / "images")
    shutil.copy(PROJECT / "docs" / "site.css", TARGET)
    for place, text in site_pages().items():
        file = TARGET / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
