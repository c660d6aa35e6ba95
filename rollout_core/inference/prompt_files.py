"""The input of batch inference: where prompts are read, and what stands for their content without parsing them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from rollout_core.config import InputGlob
from rollout_core.datasets import PromptRow, iter_prompts, matching_files
from rollout_core.ids import ContentId, content_id


class PromptFiles:
    """The files that an input pattern matches, in order."""

    def __init__(self, source: InputGlob, base: Path) -> None:
        self._source = source
        self._base = base

    def rows(self) -> Iterator[PromptRow]:
        """All rows, one at a time. Raises ConfigError where there is none, DataError where some are malformed."""
        return iter_prompts(self._source.glob, base=self._base)

    def identity(self) -> ContentId | None:
        """Content of the files; the same rows in other files or another form may have another."""
        files = matching_files(self._source.glob, self._base)
        digests = [blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest() for path in files]
        return content_id("prompt-files/1", digests)


def open_prompts(source: InputGlob, base: Path) -> PromptFiles:
    """The prompts of an input; a relative path starts at ``base``."""
    return PromptFiles(source, base)
