"""The output side of batch inference: the run id of an output folder, and the rows of ``completions.jsonl``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from rollout_core.config import SamplingParams
from rollout_core.errors import ConfigError
from rollout_core.ids import ContentId, new_run_id
from rollout_core.inference.samples import Sample, SampledCompletion

COMPLETIONS_FILE = "completions.jsonl"
RUN_ID_FILE = "run-id"
_ULID = re.compile("[0-7][0-9A-HJKMNP-TV-Z]{25}")


def resolve_run_id(folder: Path, asked: str | None) -> str:
    """Run id of an output folder: the one asked for, else the folder's own, else a new one that is written there.

    Raises ConfigError as `earlier_run_id`.
    """
    run_id = earlier_run_id(folder, asked)
    if run_id is None:
        run_id = new_run_id()
        write_atomically(folder / RUN_ID_FILE, [run_id.encode() + b"\n"])
    return run_id


def earlier_run_id(folder: Path, asked: str | None) -> str | None:
    """The run to go on with: the one asked for, else the output folder's own; None where a new one will begin.

    Raises ConfigError for an id that is no ULID, or a ``run-id`` file that holds none.
    """
    if asked is not None:
        return _checked(asked, "run id")
    file = folder / RUN_ID_FILE
    return _checked(file.read_text(encoding="utf-8").strip(), str(file)) if file.exists() else None


def _checked(run_id: str, where: str) -> str:
    if not _ULID.fullmatch(run_id):
        raise ConfigError(f"{where}: {run_id!r} is no run id; expected a ULID (26 characters)")
    return run_id


def output_rows(
    samples: Sequence[Sample],
    completions: Sequence[SampledCompletion],
    *,
    params: SamplingParams,
    model_uri: str,
    model_id: ContentId,
    blob_id: ContentId,
    finished_at: Mapping[str, float],
) -> Iterable[bytes]:
    """Lines of the output file, in input order; ``finished_at`` maps sample ids to seconds since the epoch."""
    sampling = params.model_dump(mode="json")
    for sample, completion in zip(samples, completions, strict=True):
        row: dict[str, Any] = {
            "id": sample.row_id or sample.id,
            "prompt": sample.prompt,
            "completion": completion.text,
            "sampling_params": sampling,
            "model_uri": model_uri,
            "finish_reason": completion.finish_reason,
            "model_content_id": model_id,
            "completion_blob_id": blob_id,
            "generated_at": _timestamp(finished_at.get(sample.id)),
        }
        for key, value in sample.extras.items():
            row.setdefault(key, value)
        yield orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


def _timestamp(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Replace ``path`` by ``chunks``: on disk, and never half visible."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
