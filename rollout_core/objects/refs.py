"""What a ref's file says: the content id that its name stands for, and a check of both.

The second line binds the id to the name, so that a ref that was damaged, cut, edited or put in another's place is
noticed when it is read. Earlier versions wrote the id alone. Such a ref counts while what it names is there; so does
one that was cut to its first line, which still says what it said.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, content_id, is_content_id

# Hidden files, such as those that a file manager leaves behind, are nobody's ref.
_SEGMENT = "[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}"
_NAME = re.compile(f"{_SEGMENT}(/{_SEGMENT})*")


@dataclass(frozen=True)
class RefContent:
    """What the file of a ref says."""

    named: ContentId
    is_checked: bool
    """Whether it has the line that binds the id to the name; refs of earlier versions have none."""


def is_ref_name(name: str) -> bool:
    """Whether a ref can have this name."""
    return _NAME.fullmatch(name) is not None


def ref_key(name: str) -> str:
    """Where a ref lies below the store's root. Raises ConfigError for what is no name of a ref."""
    if not is_ref_name(name):
        raise ConfigError(
            f"not a ref name: {name!r}; expected segments of letters, digits, '.', '_' and '-', joined by '/', none of "
            "which begins with a dot"
        )
    return f"refs/{name}"


def encode_ref(name: str, named: ContentId) -> bytes:
    """The content of the file of ref ``name``."""
    return f"{named}\n{_check(name, named)}\n".encode()


def decode_ref(name: str, data: bytes) -> RefContent | None:
    """What the file of ref ``name`` says; None where neither `encode_ref` nor an earlier version wrote it so."""
    digits = data[:64].decode(errors="replace")
    if not is_content_id(digits):
        return None
    named = ContentId(digits)
    is_checked = data == encode_ref(name, named)
    return RefContent(named, is_checked) if is_checked or data[64:] in (b"", b"\n") else None


def _check(name: str, named: ContentId) -> ContentId:
    return content_id("ref/1", [name, named])


RESULT_REFS = "results"
SNAPSHOT_REFS = "snapshots"
LINEAGE_REFS = "lineage"
SELF_NAMED_REFS = (RESULT_REFS, SNAPSHOT_REFS, LINEAGE_REFS)
RECORD_BYTES = 2**20
"""Records are rarely larger."""


def own_refs(document: Any) -> set[str]:
    """Names of the refs under which a stored document says it belongs; none where it is no such record."""
    match document:
        case {"metadata": {"storage_key": str(key)}, "result": _}:
            return {f"{RESULT_REFS}/{key}"}
        case {"id": str(snapshot), "run_id": str(run), "files": files, "algorithm": _} if is_content_id(files):
            return {f"{SNAPSHOT_REFS}/{snapshot}/{run}"}
        case {"stage": str(), "key": str(), "outputs": [*outputs]}:
            return {f"{LINEAGE_REFS}/{output}" for output in outputs if is_content_id(output)}
    return set()


def parsed(data: bytes) -> Any:
    """The JSON of a blob; None where it is none."""
    try:
        return json.loads(data)
    except ValueError:
        return None
