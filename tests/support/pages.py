"""Pages in a real browser, and pictures of them that are compared loosely."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.machine import CHROMIUM, require

TILE = (40, 28)
"""Blocks that a picture of a page is compared in, across and down: letters vanish in them, whatever their font."""
LIKENESS = 0.6
"""Pictures of one page differ by less. In other fonts up to 0.51 was seen, without its style 0.65 and more."""
RENAMED = """([from, to]) => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(from, to);
}"""


def tile_of(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png)).convert("L").resize(TILE, Image.Resampling.BOX)


def difference(one: Image.Image, other: Image.Image) -> float:
    """The share of blocks of another brightness among those where either has something on it."""
    a, b = (np.asarray(each, np.int16) for each in (one, other))
    differs = np.abs(a - b) > 8
    drawn = (np.abs(a - np.median(a)) > 6) | (np.abs(b - np.median(b)) > 6) | differs
    return float(differs.sum() / max(1, drawn.sum()))


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of Playwright's; skips the test where the machine has none."""
    require(CHROMIUM)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM.find(), args=["--no-sandbox"])


def serving(start_process: Callable[..., Any], log: Path) -> str:
    """The address of a `rollout ui` over what the environment names."""
    from tests.flows.conftest import wait_for

    with log.open("w") as output:
        process = start_process("-c", "from deployments.cli import app; app()", "ui", "--port", "0", stdout=output)
    found = wait_for(lambda: re.search(r"serving at (\S+)", log.read_text()), "the pages", process=None)
    assert process.poll() is None
    return found[1]
