"""Token sequences end to end in one row: no padding is computed, and what several share is computed once.

A document is a prefix and any number of branches that continue it: the completions of a group after their prompt, the
two answers of a preference pair. A document without branches is one plain sequence. In memory the prefix comes first,
then branch after branch; positions count from 0 in each document, and every branch continues where the prefix ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollout_core.base.errors import ConfigError

SHARED_PREFIX_TOKENS = 8
"""From here on a prefix is quicker shared than encoded twice (2 % at 8 tokens of 128, 4 % at 16, a third at 64)."""


@dataclass(frozen=True)
class Document:
    """Token ids to pack. A row is a branch, or the prefix itself where there are none."""

    prefix: Sequence[int]
    branches: Sequence[Sequence[int]] = ()
    trained: Sequence[bool] | None = None
    """Without branches: which tokens are targets; the first never is one, for nothing predicts it. With branches, all
    tokens of the branches are targets and this is None."""


@dataclass(frozen=True)
class Layout:
    """Lengths of packed documents; what attention needs to know."""

    documents: tuple[tuple[int, tuple[int, ...]], ...]
    """Length of the prefix and lengths of the branches of each document, in order."""
    _cache: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What follows from the layout and is the same for every layer of a model."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]


@dataclass(frozen=True)
class PackedTokens:
    """N tokens of packed documents and M targets among them."""

    input_ids: Tensor
    """[N] int64."""
    position_ids: Tensor
    """[N] int64, from 0 in each document."""
    layout: Layout
    predictors: Tensor
    """[M] int64: the packed token whose hidden state predicts each target."""
    targets: Tensor
    """[M] int64: token ids."""
    rows: Tensor
    """[M] int64: row of each target, rising."""
    columns: Tensor
    """[M] int64: how many targets of its row come before each target."""
    ends: Tensor
    """[R] int64: last packed token of each row."""
    num_tokens: int
    """Tokens of all rows, those of a shared prefix counted once."""
    width: int
    """Most targets in a row."""

    @property
    def num_rows(self) -> int:
        """R: branches, and prefixes without branches."""
        return len(self.ends)

    @property
    def num_targets(self) -> int:
        """M."""
        return len(self.targets)

    @property
    def mask(self) -> Tensor:
        """[R, width] bool, True = a target stands there."""
        return self.padded(torch.ones_like(self.targets, dtype=torch.bool))

    def padded(self, values: Tensor) -> Tensor:
        """[M] to [R, width], zero where a row has no target."""
        return values.new_zeros(self.num_rows, self.width).index_put((self.rows, self.columns), values)

    def row_sums(self, values: Tensor) -> Tensor:
        """[M] to [R]: sum over the targets of each row."""
        return values.new_zeros(self.num_rows).index_add(0, self.rows, values)

    def row_counts(self) -> Tensor:
        """[R] int64: targets of each row."""
        return torch.bincount(self.rows, minlength=self.num_rows)

    def sequences(self) -> list[list[int]]:
        """Token ids of every row, its prefix included."""
        return [self.input_ids[row].tolist() for row in unpacked_rows(self.layout)]

    def to(self, device: torch.device) -> PackedTokens:
        """The same on another device."""
        if self.input_ids.device == device:
            return self
        tensors = ("input_ids", "position_ids", "predictors", "targets", "rows", "columns", "ends")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in tensors}
        return PackedTokens(**moved, layout=self.layout, num_tokens=self.num_tokens, width=self.width)


def pack(documents: Sequence[Document]) -> PackedTokens:
    """Lay documents end to end. Raises ConfigError for an empty prefix or branch."""
    tokens: list[int] = []
    positions: list[int] = []
    predictors: list[int] = []
    rows: list[int] = []
    columns: list[int] = []
    ends: list[int] = []
    lengths: list[tuple[int, tuple[int, ...]]] = []

    def add_targets(indices: Sequence[int], predicted_by: Sequence[int]) -> None:
        targets.extend(tokens[index] for index in indices)
        predictors.extend(predicted_by)
        rows.extend([len(ends)] * len(indices))
        columns.extend(range(len(indices)))

    targets: list[int] = []
    for number, document in enumerate(documents):
        if not document.prefix or not all(document.branches):
            raise ConfigError(f"document {number} of a batch has an empty prompt or completion; leave it out")
        document = _without_lone_branch(document)
        start, prefix = len(tokens), len(document.prefix)
        tokens.extend(document.prefix)
        positions.extend(range(prefix))
        if not document.branches:
            trained = document.trained if document.trained is not None else [True] * prefix
            indices = [start + offset for offset in range(1, prefix) if trained[offset]]
            add_targets(indices, [index - 1 for index in indices])
            ends.append(len(tokens) - 1)
        for branch in document.branches:
            first = len(tokens)
            tokens.extend(branch)
            positions.extend(range(prefix, prefix + len(branch)))
            indices = range(first, len(tokens))
            add_targets(indices, [start + prefix - 1, *indices[:-1]])
            ends.append(len(tokens) - 1)
        lengths.append((prefix, tuple(len(branch) for branch in document.branches)))
    return PackedTokens(
        input_ids=torch.tensor(tokens, dtype=torch.int64),
        position_ids=torch.tensor(positions, dtype=torch.int64),
        layout=Layout(tuple(lengths)),
        predictors=torch.tensor(predictors, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        rows=torch.tensor(rows, dtype=torch.int64),
        columns=torch.tensor(columns, dtype=torch.int64),
        ends=torch.tensor(ends, dtype=torch.int64),
        num_tokens=len(tokens),
        width=max(columns, default=-1) + 1,
    )


def _without_lone_branch(document: Document) -> Document:
    """A prefix with one branch is one plain sequence, which attention handles in one piece."""
    if len(document.branches) != 1:
        return document
    prefix, branch = document.prefix, document.branches[0]
    return Document([*prefix, *branch], trained=[False] * len(prefix) + [True] * len(branch))


def pack_completions(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> PackedTokens:
    """One row a completion, in order; neighbours with equal prompts share them."""
    documents: list[Document] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        if documents and documents[-1].prefix == prompt:
            documents[-1] = Document(prompt, [*documents[-1].branches, completion])
        else:
            documents.append(Document(prompt, [completion]))
    return pack(documents)


def pack_branches(documents: Sequence[Document]) -> PackedTokens:
    """One row a branch, in order; a prefix is encoded once where that is quicker, and with each branch elsewhere.

    An empty prefix makes whole sequences of the branches.
    """
    separate: list[Document] = []
    for document in documents:
        prefix = document.prefix
        if len(prefix) >= SHARED_PREFIX_TOKENS:
            separate.append(document)
        else:
            separate += [Document(prefix, [branch]) if prefix else Document(branch) for branch in document.branches]
    return pack(separate)


def num_branch_tokens(document: Document) -> int:
    """Tokens that `pack_branches` makes of a document."""
    answers = sum(map(len, document.branches))
    shared = len(document.prefix) >= SHARED_PREFIX_TOKENS
    return len(document.prefix) * (1 if shared else len(document.branches)) + answers


def unshared(layout: Layout) -> tuple[list[int], list[int]]:
    """Packed indices of all rows as whole sequences, one after the other, and their lengths."""
    rows = unpacked_rows(layout)
    return [index for row in rows for index in row], [len(row) for row in rows]


def unpacked_rows(layout: Layout) -> list[list[int]]:
    """Packed indices of every row as a whole sequence, its prefix included."""
    rows, start = [], 0
    for prefix, branches in layout.documents:
        whole = list(range(start, start + prefix))
        start += prefix
        if not branches:
            rows.append(whole)
        for branch in branches:
            rows.append([*whole, *range(start, start + branch)])
            start += branch
    return rows
