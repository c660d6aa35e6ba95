"""Tasks of inspect_ai as a suite: they run in a process of their own, and their model answers through the ledger.

What they ask depends on what they were answered before, so nothing is known of it in advance. A task that is killed
begins again and is given the answers that are kept, up to where it was (`rollout_core.inference.kept_chat`). Tools run
again then; one that gives something else than before leads to other questions.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.isolation.child import Child, Ended
from rollout_core.base.locks import scratch_folder
from rollout_core.base.processes import Limits
from rollout_core.base.socket_paths import short_address
from rollout_core.base.stopping import in_thread
from rollout_core.config import AnyBackend, EndpointModel, OpenAIBackend
from rollout_core.config.inspect_ai import InspectSuite
from rollout_core.data.samples import encode_samples
from rollout_core.evaluation.harnesses import python_of
from rollout_core.evaluation.metrics import Metric, Z
from rollout_core.evaluation.reports import RIGHT_SHARE, SuiteReport
from rollout_core.inference.backend import generator_id
from rollout_core.inference.batch import BatchOptions, Progress, Work
from rollout_core.inference.chat_api import ApiError
from rollout_core.inference.endpoint_model import OwnEndpoint
from rollout_core.inference.engines import EngineOf
from rollout_core.inference.kept_chat import Asker, KeptAnswer, KeptChat
from rollout_core.inference.on_demand import OnDemand
from rollout_core.inference.spending import Account
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Record
from rollout_core.store import LightningStore

log = logging.getLogger(__name__)

HANDLER = "rollout_core.evaluation.inspect_process:handle"
LIMITS = Limits(seconds=3600.0, processes=4096)
"""Of a run; the seconds are those without an answer of the model, in which tools and scorers may be at work."""
SOCKET = "model"
READ_BYTES, MOST_BYTES = 2**20, 2**28
"""Of a request, at once and in all."""
_ENDED = "the evaluation ends, for a question could not be answered: {}"


class InspectTasks(Record):
    """Which tasks a suite has."""

    tasks: tuple[str, ...]
    num_questions: int
    version: str
    """Of inspect_ai."""
    source: str
    """Hash of what defines the tasks: their rows, arguments and settings, and the code that they are made of."""


def find_tasks(suite: InspectSuite, base: Path) -> InspectTasks:
    """The suite's tasks, whose paths are relative to ``base``. Raises ConfigError for tasks that cannot be loaded."""
    with scratch_folder("inspect") as scratch, _child(suite, base) as child:
        try:
            return _read(suite, child.call(_given(suite, base, scratch)))
        except Ended as error:
            raise ConfigError(f"inspect_ai: its process {error}") from error
        except Fatal as error:
            raise error if isinstance(error, ConfigError) else ConfigError(f"inspect_ai: {error}") from error


def _read(suite: InspectSuite, found: Mapping[str, Any]) -> InspectTasks:
    sizes = [min(task["num_samples"], suite.limit or task["num_samples"]) for task in found["tasks"]]
    return InspectTasks(
        tasks=tuple(task["name"] for task in found["tasks"]),
        num_questions=sum(sizes),
        version=found["version"],
        source=found["source"],
    )


def _child(suite: InspectSuite, base: Path) -> Child:
    install = "install it into an environment of its own, as its pins are not those of this project"
    python = python_of(suite.python, base, kind=suite.kind, package="inspect_ai", install=install)
    return Child(HANDLER, LIMITS, on_line=log.debug, python=python)


def _given(
    suite: InspectSuite, base: Path, scratch: Path, socket: Path | None = None, source: str | None = None
) -> dict[str, Any]:
    return {
        **suite.model_dump(mode="json", exclude={"kind", "name", "python", "model_roles"}),
        "roles": sorted(suite.model_roles),
        "folder": str(base.resolve()),
        "scratch": str(scratch),
        "socket": None if socket is None else str(socket),
        "source": source,
        "digests": False,
    }


async def evaluate(
    store: LightningStore,
    objects: ObjectStore,
    engine: EngineOf,
    suite: InspectSuite,
    tasks: InspectTasks,
    base: Path,
    *,
    limit: int | None,
    account_of: Callable[[EndpointModel], Account],
    worker_id: str,
    options: BatchOptions,
    on_progress: Callable[[Progress], None],
) -> tuple[SuiteReport, Work]:
    """What the model of ``engine`` comes to by the tasks. Every answer is kept in the store before the tasks get it.

    Raises ConfigError where the tasks have changed since they were found, Fatal where one of them fails, and what
    ended the engine.
    """
    asked = _Asked()
    async with AsyncExitStack() as stack:

        async def add(
            role: str | None, engine: EngineOf | OwnEndpoint, options: BatchOptions, note: Callable[[Progress], None]
        ) -> Work:
            demand = OnDemand(store, objects, engine, worker_id=worker_id, options=options, on_progress=note)
            await stack.enter_async_context(demand.running())
            asked.models[role] = chat = KeptChat(demand, engine.model, engine.config, limit=limit)
            stack.callback(chat.close)
            return demand.work

        work = await add(None, engine, options, on_progress)
        for role, endpoint in suite.model_roles.items():
            await add(role, OwnEndpoint(endpoint), _options_of(endpoint, options, account_of), lambda progress: None)
        scratch = stack.enter_context(scratch_folder("inspect"))
        socket = scratch / SOCKET
        await stack.enter_async_context(asked.listening(socket))
        child = stack.enter_context(_child(suite, base))
        call = in_thread(lambda: child.call(_given(suite, base, scratch, socket, tasks.source)))
        try:
            found = await asyncio.shield(asyncio.wrap_future(call))
        except Exception as error:
            raise asked.error or _refusal(error) from error
        finally:
            with suppress(BaseException):  # a stop ends the call, and is raised here already
                await asyncio.shield(asyncio.wrap_future(call))
    if asked.error is not None:
        raise asked.error
    if "digests" in found:
        raise await asyncio.to_thread(_difference, suite, base, found["digests"])
    chat = asked.models[None]
    if chat.num_without_room:
        log.warning("%d questions left no room for an answer in the model's context", chat.num_without_room)
    graders = ((endpoint, asked.models[role]) for role, endpoint in suite.model_roles.items())
    usage = _usage([(engine.config, chat), *graders])
    about = objects, suite, tasks, engine.model.content_id
    return _report(*about, found["logs"], chat.answers, chat.num_without_room, usage), work


def _difference(suite: InspectSuite, base: Path, loaded: Mapping[str, Mapping[str, str]]) -> ConfigError:
    """Why tasks are not those that were found: what of their samples differs each time that they are loaded, or a
    change. ``loaded`` are digests of samples' keys."""
    with scratch_folder("inspect") as scratch, _child(suite, base) as child:
        again = child.call({**_given(suite, base, scratch), "digests": True})["digests"]
    for name, keys in loaded.items():
        if name not in again:
            return ConfigError(f"sample {name} has another id each time that its task is loaded; give it an id")
        differing = [key for key, digest in keys.items() if again[name].get(key) != digest]
        if differing:
            return ConfigError(
                f"sample {name} has another {differing[0]} each time that its task is loaded; draw that by a seed, or "
                "leave it out"
            )
    return ConfigError("the tasks' rows, settings or code differ from when this run began; start again")


def _usage(asked: Iterable[tuple[AnyBackend, KeptChat]]) -> dict[str, dict[str, Sequence[int]]]:
    """Tokens of prompt and answer as endpoints count them, by the endpoint's name and the sample's id."""
    found: dict[str, dict[str, Sequence[int]]] = {}
    for backend, chat in asked:
        if isinstance(backend, OpenAIBackend | EndpointModel):
            counted = ((str(answer.sample.id), answer.completion.usage) for answer in chat.answers)
            found.setdefault(backend.name, {}).update((sample, usage) for sample, usage in counted if usage is not None)
    return found


def _options_of(
    endpoint: EndpointModel, options: BatchOptions, account_of: Callable[[EndpointModel], Account]
) -> BatchOptions:
    return BatchOptions(
        mode=options.mode,
        deterministic=False,
        exclusive=options.exclusive,
        generator=generator_id(endpoint),
        stale_after_seconds=options.stale_after_seconds,
        account=account_of(endpoint),
    )


def _refusal(error: Exception) -> Exception:
    return Fatal(f"inspect_ai: its process {error}") if isinstance(error, Ended) else error


class _Asked:
    """Answers what tasks ask, by the role of the model that they ask; None is the one that is evaluated."""

    def __init__(self) -> None:
        self.models: dict[str | None, KeptChat] = {}
        self.error: Exception | None = None
        """What ends the evaluation."""

    @asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[None]:
        """Inside the block questions are answered that come over a socket."""
        with short_address(path) as address:
            server = await asyncio.start_unix_server(self._serve, address)
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            writer.write(json.dumps(await self._answer(await _read_all(reader))).encode("ascii"))
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    async def _answer(self, data: bytes) -> dict[str, Any]:
        try:
            return await self._answered(json.loads(data))
        except ApiError as error:
            return _as_error(error.message, error.code)
        except Exception as error:  # noqa: BLE001 - raised where the evaluation ends, once the tasks have
            self.error = self.error or error
            return self._end()

    def _end(self) -> dict[str, Any]:
        return _as_error(_ENDED.format(self.error)) | {"ends": True}

    async def _answered(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "text" in request:
            return {"num_tokens": self.models[request["role"]].num_tokens(request["text"])}
        if self.error is not None:
            return self._end()
        asker = Asker(*request["asker"], role=request["role"])
        return await self.models[request["role"]].answer(asker, request["body"], number=request["number"])


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """To the end: one call of `read` gives what is there."""
    read = bytearray()
    while part := await reader.read(READ_BYTES):
        read += part
        if len(read) > MOST_BYTES:
            raise ApiError(413, f"a request of more than {MOST_BYTES} bytes")
    return bytes(read)


def _as_error(message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "code": code}}


def _report(
    objects: ObjectStore,
    suite: InspectSuite,
    tasks: InspectTasks,
    model: ContentId,
    logs: Sequence[Mapping[str, Any]],
    answers: Iterable[KeptAnswer],
    num_without_room: int,
    usage: Mapping[str, Mapping[str, Sequence[int]]],
) -> SuiteReport:
    ids = [f"{task_log['task']}/{name}" for task_log in logs for name in task_log["questions"]]
    place_of = {name: place for place, name in enumerate(ids)}
    order = sorted(
        (answer for answer in answers if answer.asker.row_id in place_of),
        key=lambda answer: (
            place_of[answer.asker.row_id],
            answer.asker.epoch,
            len(answer.sample.prompt),
            answer.sample.id,
        ),
    )
    shown = {answer.asker.row_id: place for place, answer in enumerate(order)}
    metrics: list[Metric] = []
    groups: list[Metric] = []
    """Of parts of the samples: they stand for no suite."""
    values: dict[str, list[float | None]] = {}
    right: dict[str, float] = {}
    for task_log in logs:
        for number, score in enumerate(task_log["scores"]):
            of_question = {f"{task_log['task']}/{name}": value for name, value in score["values"].items()}
            if number == 0 and all(0 <= value <= 1 for value in of_question.values()):
                right |= of_question
            for name, value in score["metrics"].items():
                label = _label(logs, task_log, score, name)
                is_mean = name in score["means"]
                metrics.append(_metric(label, value, score["stderr"] if is_mean else None, score["scored"]))
                if is_mean:
                    values[label] = [of_question.get(question) for question in ids]
            for figure in score["groups"]:
                label = _label(logs, task_log, score, figure["name"])
                groups.append(_metric(label, figure["value"], figure["stderr"], figure["count"]))
    metrics += groups
    if not metrics:
        raise ConfigError(f"suite {suite.name}: no metric of its tasks came to a number; give their scorers metrics")
    failed, lacking, unreadable = (
        [f"{task_log['task']}/{name}" for task_log in logs for name in task_log[what]]
        for what in ("failed", "lacking", "unreadable")
    )
    filed = {
        "ids": ids,
        "values": {**values, RIGHT_SHARE: [right.get(name) for name in ids]},
        "places": [shown.get(name) for name in ids],
        "inspect": list(logs),
    }
    if usage:
        filed["usage"] = usage
    return SuiteReport(
        suite=suite.name,
        suite_id=content_id("inspect-suite/1", [_settings(suite), tasks.version, tasks.source]),
        model=model,
        samples=objects.put_bytes(encode_samples(answer.sample for answer in order)),
        completions=objects.put_bytes(b"".join(answer.line for answer in order)),
        scores=objects.put_json([right.get(answer.asker.row_id) for answer in order]),
        questions=objects.put_json(filed),
        num_questions=len(ids),
        num_samples=len(order),
        num_tokens=sum(answer.num_tokens for answer in order),
        num_truncated=sum(answer.completion.finish_reason == "length" for answer in order) + num_without_room,
        num_abstained=len(lacking),
        num_score_failed=len(unreadable),
        unscored=tuple(dict.fromkeys([*lacking, *unreadable])),
        num_failed=len(failed),
        failed=tuple(failed),
        metrics=tuple(metrics),
    )


def _settings(suite: InspectSuite) -> dict[str, Any]:
    """Without its name: of other rows it would be another suite."""
    return {name: value for name, value in suite.cache_identity().items() if name != "name"}


def _label(logs: Sequence[Any], task_log: Mapping[str, Any], score: Mapping[str, Any], metric: str) -> str:
    """A metric's name, behind the task's and the score's where there are several."""
    names = [each["name"] for each in task_log["scores"]]
    task = [task_log["task"]] if len(logs) > 1 else []
    scorer = [score["scorer"]] if names.count(score["name"]) > 1 else []
    return "/".join([*task, *scorer, *([score["name"]] if len(names) > 1 else []), metric])


def _metric(label: str, value: float, error: float | None, num_questions: int) -> Metric:
    reach = Z * error if error else None
    return Metric(
        name=label,
        value=value,
        lower=None if reach is None else value - reach,
        upper=None if reach is None else value + reach,
        num_questions=num_questions,
    )
