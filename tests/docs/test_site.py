"""`make docs`: the site builds without a warning, and what it shows is all there and loads nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate import configuration
from rollout_core.config import CONFIG_KINDS
from tests.conftest import PROJECT

ZENSICAL = Path(sys.executable).with_name("zensical")
_LOADS = re.compile(r"<(?:script|img|iframe|source|video|link)\b[^>]*\b(?:src|href|srcset)=[\"']?(?:https?:)?//[^>]*>")
_STYLES = re.compile(r"(?:url\(\s*[\"']?|@import\s+[\"']?)(?:https?:)?//[^)\"']*")
LOADED_LATER = ("mermaid", "glightbox", "pyodide", 'data-md-component="source"')
"""What the theme's script would load from elsewhere for a page that has it."""


@pytest.fixture(scope="module")
def site() -> Path:
    """Built as `make docs` builds it: with what was built before."""
    subprocess.run([sys.executable, "-m", "docs.generate.pages"], cwd=PROJECT, check=True)
    done = subprocess.run([ZENSICAL, "build", "--strict"], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return PROJECT / "build" / "site"


def test_the_site_has_every_page_and_its_pictures(site: Path):
    landing = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="images/pipeline.svg"' in landing
    assert 'src="images/run.png"' in landing
    assert {page.stem for page in (PROJECT / "docs").glob("*.md")} <= {page.stem for page in site.glob("*.html")}
    assert (site / "search.json").exists()
    losses = (site / "reference/python/rollout_core.algorithms.html").read_text(encoding="utf-8")
    assert 'id="rollout_core.algorithms.losses.dpo_loss"' in losses
    for name, kind in CONFIG_KINDS.items():
        module = kind.__module__.rpartition(".")[2]
        text = (site / f"reference/configuration/{module}.html").read_text(encoding="utf-8")
        assert f'id="{kind.__name__.lower()}"' in text, name
        assert all(f"<code>{key}</code>" in text for key in kind.model_fields), name


def test_the_site_loads_nothing_from_elsewhere(site: Path):
    found = [match for page in site.rglob("*.html") for match in _LOADS.findall(page.read_text(encoding="utf-8"))]
    found += [match for style in site.rglob("*.css") for match in _STYLES.findall(style.read_text(encoding="utf-8"))]
    assert found == []
    bodies = (re.sub(r"<code>.*?</code>", "", page.read_text(encoding="utf-8")) for page in site.rglob("*.html"))
    assert not any(f'class="{name}' in body for body in bodies for name in LOADED_LATER)


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path):
    (tmp_path / "mkdocs.yml").write_text("site_name: a\ndocs_dir: pages\nstrict: true\n")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text("# A\n\n[nowhere](missing.md) and [no heading](#missing)\n")
    done = subprocess.run([ZENSICAL, "build", "--strict"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "page does not exist" in done.stdout + done.stderr
    assert "anchor does not exist" in done.stdout + done.stderr


def test_every_key_of_a_configuration_has_a_meaning():
    pages = configuration.pages()
    rows = [line for text in pages.values() for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 400
    assert [row for row in rows if row.rstrip(" |").count(" | ") < 2 or row.endswith("|  |")] == []
