"""What became of the rows of a data set on their way to token ids."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

SHOWN_LONGEST = 5
SHOWN_PROBLEMS = 5
_NAMES = {"num_truncated": "truncated rows", "num_left_out": "skipped rows"}
_ROW_NUMBER = re.compile(r"^row (\d+)")


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What learners from data sets tell before they train."""

    num_rows: int
    num_examples: int
    num_tokens: int
    num_trained_tokens: int
    num_truncated: int
    """Rows cut at max_seq_len, those left out for it included."""
    num_left_out: int = 0
    """Rows of which nothing is trained: no assistant token, or nothing that the cut left."""
    longest: tuple[tuple[str, int], ...] = ()
    """Place and tokens, before the cut, of the longest rows, longest first."""
    num_template_problems: int = 0
    template_problems: tuple[str, ...] = ()
    """The first of them: where the chat template or the tokenizer does what was hardly meant."""

    @property
    def trained_share(self) -> float:
        """Trained tokens among all."""
        return self.num_trained_tokens / max(self.num_tokens, 1)

    def figures(self) -> dict[str, Any]:
        """Names and values for people to read."""
        plain = {name: value for name, value in asdict(self).items() if value is not None}
        del plain["longest"], plain["template_problems"]
        named = {_NAMES.get(name, name.removeprefix("num_").replace("_", " ")): value for name, value in plain.items()}
        named["trained share"] = f"{self.trained_share:.1%}"
        named["longest rows"] = ", ".join(f"{place} ({tokens} tokens)" for place, tokens in self.longest)
        if self.template_problems:
            named["first template problems"] = "; ".join(self.template_problems)
        return named

    def document(self) -> dict[str, Any]:
        """The report as JSON."""
        return asdict(self)

    def placed(self, place: Callable[[int], str]) -> Self:
        """The same of rows that were numbered, with each named by its position, from 0."""

        def named(text: str) -> str:
            return _ROW_NUMBER.sub(lambda match: place(int(match[1]) - 1), text)

        return replace(
            self,
            longest=tuple((named(row), tokens) for row, tokens in self.longest),
            template_problems=tuple(map(named, self.template_problems)),
        )

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of `document`."""
        known = {item.name: document[item.name] for item in fields(cls) if item.name in document}
        known["longest"] = tuple((place, tokens) for place, tokens in document["longest"])
        known["template_problems"] = tuple(document["template_problems"])
        return cls(**known)


@dataclass
class Tally:
    """A report in the making."""

    num_rows: int = 0
    num_examples: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    num_truncated: int = 0
    num_left_out: int = 0
    num_template_problems: int = 0
    template_problems: list[str] = field(default_factory=list)
    _longest: list[tuple[int, int, str]] = field(default_factory=list)

    def row(self, place: str, num_tokens: int, max_seq_len: int) -> None:
        """Count a row of ``num_tokens`` before the cut."""
        self.num_rows += 1
        self.num_truncated += num_tokens > max_seq_len
        entry = (num_tokens, -self.num_rows, place)  # of equal ones the first
        if len(self._longest) < SHOWN_LONGEST:
            heapq.heappush(self._longest, entry)
        elif entry > self._longest[0]:
            heapq.heapreplace(self._longest, entry)

    def example(self, num_tokens: int, num_trained_tokens: int) -> None:
        """Count what is trained on."""
        self.num_examples += 1
        self.num_tokens += num_tokens
        self.num_trained_tokens += num_trained_tokens

    def prompt(self, tokenizer: Any, prompt: Sequence[int], where: str) -> None:
        """Tell of a text that began with the token which the tokenizer puts before every text."""
        bos = tokenizer.bos_token_id
        if bos is not None and prompt[:2] == [bos, bos]:
            self.problem(f"{where}: the prompt begins with {tokenizer.bos_token}, which the tokenizer adds too")

    def problem(self, problem: str) -> None:
        """Count a problem of the template, and remember the first."""
        self.num_template_problems += 1
        if len(self.template_problems) < SHOWN_PROBLEMS:
            self.template_problems.append(problem)

    def fields(self) -> dict[str, Any]:
        """Those of `DataReport`."""
        return {
            "num_rows": self.num_rows,
            "num_examples": self.num_examples,
            "num_tokens": self.num_tokens,
            "num_trained_tokens": self.num_trained_tokens,
            "num_truncated": self.num_truncated,
            "num_left_out": self.num_left_out,
            "longest": tuple((place, tokens) for tokens, _, place in sorted(self._longest, reverse=True)),
            "num_template_problems": self.num_template_problems,
            "template_problems": tuple(self.template_problems),
        }
