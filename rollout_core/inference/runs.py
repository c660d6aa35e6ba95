"""Which run an output folder belongs to, and by which parameters that run was begun.

A run's id is that of ``--resume``, else what the folder's file ``run-id`` says, else a new one that is written there.
What decides over a run's completions is noted in the object store under the id, before the first sample: going on with
other parameters is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, new_run_id
from rollout_core.config import InferBatchConfig, identity
from rollout_core.inference.folders import OutputFolder
from rollout_core.objects import ObjectStore

RUN_ID_FILE = "run-id"
RUN_REFS = "runs"
MODEL = "model"
"""Parameter that holds the content id of the model with its tokenizer."""
_ULID = re.compile("[0-7][0-9A-HJKMNP-TV-Z]{25}")


def resolve_run_id(folder: OutputFolder, asked: str | None) -> str:
    """Run id of an output folder: the one asked for, else the folder's own, else a new one that is written there.

    Raises ConfigError as `earlier_run_id`.
    """
    run_id = earlier_run_id(folder, asked)
    while run_id is None:
        made = new_run_id()
        # Where another process was quicker, its run is this one too.
        run_id = made if folder.create(RUN_ID_FILE, made.encode() + b"\n") else earlier_run_id(folder, None)
    return run_id


def earlier_run_id(folder: OutputFolder, asked: str | None) -> str | None:
    """The run to go on with: the one asked for, else the output folder's own; None where a new one will begin.

    Raises ConfigError for an id that is no ULID, or a ``run-id`` file that holds none.
    """
    if asked is not None:
        return _checked(asked, "run id")
    data = folder.read(RUN_ID_FILE)
    return None if data is None else _checked(data.decode("utf-8", "replace").strip(), folder.where(RUN_ID_FILE))


def _checked(run_id: str, where: str) -> str:
    if not _ULID.fullmatch(run_id):
        raise ConfigError(f"{where}: {run_id!r} is no run id; expected a ULID (26 characters)")
    return run_id


def parameters_of(config: InferBatchConfig, model: ContentId | None = None) -> dict[str, Any]:
    """What decides over a run's completions, by dotted names; without ``model``, as far as the configuration says.

    The input is no part of it: rows may be added or changed, and output always follows the input. Nor are workers,
    places and forms of output, which change no completion.
    """
    sampling = identity(config.sampling.params)
    counted = {"sampling": {**sampling, "n": config.sampling.n}, "backend": identity(config.backend)}
    return dict(_flat(counted)) | ({} if model is None else {MODEL: model})


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in table.items():
        found += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]
    return found


def begin_run(
    objects: ObjectStore, run_id: str, parameters: Mapping[str, Any], folder: OutputFolder, asked: str | None
) -> bool:
    """Note by which parameters a run is made, before its first sample; True where it was begun before.

    Raises ConfigError as `check_run`.
    """
    begun = check_run(objects, run_id, parameters, folder, asked)
    document = begun or {"run_id": run_id, "begun": datetime.now(UTC).isoformat(), "parameters": parameters}
    # Also where it is there: garbage collection goes by when it was last set.
    objects.set_ref(_ref(run_id), objects.put_json(document))
    return begun is not None


def check_run(
    objects: ObjectStore, run_id: str, parameters: Mapping[str, Any], folder: OutputFolder, asked: str | None
) -> dict[str, Any] | None:
    """What was noted when the run was begun; None where it was not, as far as the object store knows.

    Raises ConfigError where it was begun by other parameters, naming each, and where a run that was asked for is
    unknown. The model is compared where it is among ``parameters``.
    """
    document = _noted(objects, run_id)
    if document is None:
        if asked is not None:
            raise ConfigError(
                f"run {run_id} is unknown to the object store {objects.url}; expected the id of a run that was begun "
                "there: leave out --resume to begin a new one"
            )
        return None
    begun = document["parameters"]
    differing = [
        f"{name}: got {_shown(parameters, name)}, expected {_shown(begun, name)}"
        for name in sorted({*parameters, *begun})
        if parameters.get(name) != begun.get(name) and (name != MODEL or MODEL in parameters)
    ]
    if differing:
        other = "leave out --resume" if asked is not None else f"remove {folder.where(RUN_ID_FILE)}"
        raise ConfigError(
            f"run {run_id} was begun with other parameters: {'; '.join(differing)}. Go on with those, or begin a new "
            f"run: give another output.dir, or {other}"
        )
    return document


def _noted(objects: ObjectStore, run_id: str) -> dict[str, Any] | None:
    known = objects.cached_bytes(_ref(run_id))
    return None if known is None else orjson.loads(known)


def _shown(parameters: Mapping[str, Any], name: str) -> str:
    return orjson.dumps(parameters[name]).decode() if name in parameters else "its default"


def _ref(run_id: str) -> str:
    return f"{RUN_REFS}/{run_id}"
