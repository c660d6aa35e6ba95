"""Advantages of an update's samples as they are kept, for people to look at: a line of JSON a sample, in the order of
its completions. Nothing is learned from them again.

A line is a number where every token that the model wrote has the same advantage, else a list with one for each token of
the completion, 0 where a token was given to the model; ``null`` where the sample counts in no loss. Numbers are the
shortest decimals that read back to the same float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import orjson

from rollout_core.base.errors import NotFound

_DUMP = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
_NONE = b"null\n"


def encode_advantages(rows: Iterable[tuple[np.ndarray, np.ndarray] | None]) -> bytes:
    """Of each sample the advantages of its tokens, [T] float32, and which of them the model wrote, [T] bool; None for
    those that count in no loss."""
    return b"".join(_NONE if row is None else _line(*row) for row in rows)


def _line(advantages: np.ndarray, written: np.ndarray) -> bytes:
    own = advantages[written]
    if len(own) and (own == own[0]).all():
        return orjson.dumps(own[0], option=_DUMP)
    return orjson.dumps(np.ascontiguousarray(np.where(written, advantages, np.float32(0.0))), option=_DUMP)


def decode_advantages(line: bytes, num_tokens: int) -> Sequence[float] | None:
    """Of one sample, for each of its tokens; None where it counts in no loss. Raises NotFound for another form."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        found = ""
    if found is None:
        return None
    values = [found] * num_tokens if isinstance(found, int | float) else found
    if not isinstance(values, list) or len(values) != num_tokens or not all(isinstance(v, int | float) for v in values):
        raise NotFound(f"the advantages of a sample of {num_tokens} tokens have a form that this version does not read")
    return [float(value) for value in values]
