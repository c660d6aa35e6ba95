"""What inspect_ai does for a suite: it runs its tasks, whose model is asked over a socket of the process that called.

It runs in a process of its own (`rollout_core.base.isolation`), by any Python that has inspect_ai: so nothing is
imported here that such a Python may lack.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import yaml
from inspect_ai import Task, eval as evaluate
from inspect_ai._eval.loader import load_tasks, resolve_task_sandbox
from inspect_ai._eval.task.util import task_run_dir
from inspect_ai._util.registry import registry_info, registry_params
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, EvalScore
from inspect_ai.log._log import EvalSampleScore
from inspect_ai.log._samples import sample_active
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageBase,
    ChatMessageTool,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Logprobs,
    Model,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    get_model,
    modelapi,
)
from inspect_ai.model._model import init_active_model, init_model_roles
from inspect_ai.model._reasoning import parse_content_with_reasoning
from inspect_ai.scorer import INCORRECT, NOANSWER, value_to_float
from inspect_ai.tool import ToolCall, ToolChoice, ToolFunction, ToolInfo

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.socket_paths import short_address

RANDOM_SEED = 0
"""So that a task which shuffles its rows without a seed asks the same each time."""
MOST_CHARACTERS = 500
"""Of what an error says."""
RECEIVED_BYTES = 2**16
LIBRARY = Path(os.__file__).parent
STOP_REASONS = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls"}
END_SECONDS = 60.0
"""For sandboxes to be cleaned up where the evaluation ends early."""
NO_ROOM = "context_length_exceeded"
MEANS = ("accuracy", "mean")
"""Metrics that are means of a score's values, so that these are compared by question."""
SPREADS = frozenset({"stderr", "std", "var", "bootstrap_stderr"})
"""Metrics that say how far others scatter."""
BODY: Mapping[str, str] = {
    "max_tokens": "max_completion_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_seqs": "stop",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
    "num_choices": "n",
    "logprobs": "logprobs",
    "top_logprobs": "top_logprobs",
    "parallel_tool_calls": "parallel_tool_calls",
    "logit_bias": "logit_bias",
    "best_of": "best_of",
}
"""Keys of ``GenerateConfig``, and those of a request's body. Others are for providers that have them, as everywhere."""
ELSEWHERE = ("system_message", "response_schema", "max_tool_output", "extra_body", "reasoning_history")
"""Further keys that count."""
HARMLESS = frozenset(
    {
        *("max_retries", "timeout", "attempt_timeout", "stream_idle_timeout", "max_connections"),
        *("adaptive_connections", "cache", "cache_prompt", "batch", "internal_tools", "fail_on_refusal"),
    }
)
"""Keys by which nothing else is answered: how requests are sent, and what inspect_ai does with them."""


def handle(given: dict[str, Any], report: Callable[[int], None]) -> dict[str, Any]:
    """Which tasks there are; where ``given`` has a ``socket`` at which their model answers, what they come to.

    Raises ConfigError for tasks that cannot be loaded, Fatal where one of them fails.
    """
    os.chdir(given["folder"])
    # Where inspect_ai keeps traces, and the answers that its own cache would give to whichever model has the same name.
    os.environ["XDG_DATA_HOME"] = os.environ["INSPECT_CACHE_DIR"] = given["scratch"]
    random.seed(RANDOM_SEED)
    _check(given)
    answers = count(1)
    models = _models(given, lambda: report(next(answers)))
    before = set(sys.modules)
    try:
        tasks = load_tasks(given["tasks"], given["task_args"])
        source = _source(tasks, sys.modules.keys() - before, given["sandbox"])
    except Exception as error:  # whatever a task's file, its code or its data set raise
        raise ConfigError(f"tasks cannot be loaded: {_line(error)}") from error
    named = [{"name": task.name, "num_samples": len(task.dataset)} for task in tasks]
    found = {"version": version("inspect_ai"), "source": source, "tasks": named}
    if not tasks:
        named_tasks = ", ".join(given["tasks"])
        raise ConfigError(f"no task was found in {named_tasks}; expected files with functions under @task, or names")
    if given["digests"]:
        return {"digests": _digests(tasks)}
    _check_arguments(tasks, given["task_args"])
    for task in tasks:
        if name := _without_effect(task.config):
            raise ConfigError(
                f"task {task.name} has {name!r} in its config, which has no effect on this model and would change its "
                "answers; leave it out of the task, or give it to a model at an endpoint by body"
            )
    _check_models(tasks, given["roles"])
    for task in tasks:
        if task.epochs_reducer == []:
            raise ConfigError(
                f"task {task.name} reduces its epochs by nothing, and figures are of questions; give Epochs a reducer, "
                "such as 'mean'"
            )
    if len({_name(task) for task in tasks}) < len(tasks):
        raise ConfigError(f"two tasks have one name, {', '.join(task.name for task in tasks)}; give them in two suites")
    if given["socket"] is None:
        return found
    if source != given["source"]:
        return {"digests": _digests(tasks)}
    logs = _evaluated(tasks, models, given)
    return found | {"logs": [_result(log, task) for log, task in zip(logs, tasks, strict=True)]}


def _check_arguments(tasks: list[Task], given: dict[str, Any]) -> None:
    """inspect_ai leaves out those that no task has."""
    known = {name for task in tasks for name in registry_info(task).metadata.get("params", ())}
    for name in given:
        if name not in known:
            raise ConfigError(f"task_args has {name!r}; expected arguments of the tasks: {', '.join(sorted(known))}")


def _check(given: dict[str, Any]) -> None:
    known = GenerateConfig.model_fields
    for name in given["generate_config"]:
        if name not in (*BODY, *ELSEWHERE):
            hint = "which has no effect on this model" if name in known else "which inspect_ai's GenerateConfig has not"
            raise ConfigError(f"generate_config has {name!r}, {hint}; expected {', '.join((*BODY, *ELSEWHERE))}")
    try:
        GenerateConfig(**given["generate_config"])
    except ValueError as error:
        raise ConfigError(f"generate_config: {_line(error)}") from error


def _without_effect(config: GenerateConfig) -> str | None:
    """A key that would change answers where it counted."""
    given = config.model_dump(exclude_none=True)
    return next((name for name in given if name not in BODY and name not in ELSEWHERE and name not in HARMLESS), None)


def _name(task: Task) -> str:
    return task.name.rpartition("/")[2]


def _check_models(tasks: list[Task], roles: Sequence[str]) -> None:
    """Another model's answers would count as those of the one that is evaluated."""
    for task in tasks:
        if task.model is not None:
            raise ConfigError(f"task {task.name} names its model, {task.model}; leave that out of it")
        for role in task.model_roles or ():
            if role not in roles:
                raise ConfigError(f"task {task.name} names a model for role {role!r}; give it by model_roles.{role}")


def _models(given: dict[str, Any], note: Callable[[], None]) -> dict[str | None, Model]:
    """Those that tasks ask, by role, which tasks find when they are loaded."""

    def model(role: str | None) -> Model:
        # ``role`` is get_model's own: it looks one up by that.
        about = {"asked_as": role, "socket": given["socket"] or "", "note": note}
        return get_model(f"rollout/{role or 'model'}", memoize=False, **about)

    models = {role: model(role) for role in (None, *given["roles"])}
    init_active_model(models[None], GenerateConfig())
    init_model_roles({role: [found] for role, found in models.items() if role is not None})
    return models


def _evaluated(tasks: list[Task], models: Mapping[str | None, Model], given: dict[str, Any]) -> list[EvalLog]:
    options = {name: given[name] for name in ("limit", "epochs", "message_limit", "token_limit", "fail_on_error")}
    generate = {"max_connections": given["max_connections"], **given["generate_config"]}
    # Which an event loop takes for a wish to end it (`_end_evaluation`).
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        logs = evaluate(
            tasks,
            model=models[None],
            model_roles={role: model for role, model in models.items() if role is not None},
            sandbox=given["sandbox"],
            display="none",
            log_level="warning",
            log_dir=given["scratch"],
            log_format="json",
            log_realtime=False,
            ctl_server=False,
            max_tasks=len(tasks),
            max_samples=given["max_connections"],
            **options,
            **generate,
        )
    except (Exception, KeyboardInterrupt) as error:  # whatever inspect_ai raises
        raise Fatal(f"inspect_ai: {_line(error)}") from error
    by_name = {log.eval.task.rpartition("/")[2]: log for log in logs}
    found = [by_name[_name(task)] for task in tasks]
    for log in found:
        if log.status != "success" or log.results is None:
            reason = log.error.message if log.error is not None else f"it ended as {log.status}"
            raise Fatal(f"task {log.eval.task}: {_short(reason)}")
    return found


def _source(tasks: list[Task], modules: Iterable[str], sandbox: str | None) -> str:
    """A hash of what defines tasks: their arguments, rows and settings, the code that was loaded for them, and the
    files of their sandboxes."""
    defined = []
    for task in tasks:
        settings = {name: getattr(task, name, None) for name in ("name", "version", "message_limit", "token_limit")}
        settings["config"] = task.config.model_dump(mode="json", exclude_none=True)
        defined.append([settings, registry_params(task), [_row(sample) for sample in task.dataset]])
    code = {str(getattr(task, "__task_file__", "")) for task in tasks}
    packages = {registry_info(task).name.partition("/")[0] for task in tasks if "/" in registry_info(task).name}
    for name in modules:
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        is_installed = "site-packages" in Path(file).parts or Path(file).is_relative_to(LIBRARY)
        if not is_installed or name.partition(".")[0] in packages:
            code.add(file)
    files = {Path(file) for file in code if file.endswith(".py")}
    files |= {file.resolve() for task in tasks for file in _sandbox_files(task, sandbox)}
    hashes = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    return hashlib.sha256(json.dumps([defined, hashes], sort_keys=True, default=str).encode()).hexdigest()


def _sandbox_files(task: Task, sandbox: str | None) -> Iterator[Path]:
    """What says how the task's sandboxes are made: files for compose, and the Dockerfiles that they name."""
    resolved = resolve_task_sandbox(task, sandbox)
    configs = {sample.sandbox.config for sample in task.dataset if sample.sandbox and _is_text(sample.sandbox.config)}
    configs |= {resolved.config} if resolved is not None and _is_text(resolved.config) else set()
    for config in sorted(configs):
        file = Path(task_run_dir(task), config)
        if file.is_file():
            yield file
            if file.suffix in (".yaml", ".yml"):
                yield from filter(Path.is_file, _dockerfiles(file))


def _is_text(config: Any) -> bool:
    return isinstance(config, str)


def _dockerfiles(compose: Path) -> Iterator[Path]:
    services = (yaml.safe_load(compose.read_bytes()) or {}).get("services") or {}
    for service in services.values():
        build = (service or {}).get("build")
        if build is not None:
            about = {"context": build} if isinstance(build, str) else build
            yield compose.parent / about.get("context", ".") / about.get("dockerfile", "Dockerfile")


def _row(sample: Sample) -> Any:
    """Without ids of messages, which are new each time, and with sets in order."""
    given = sample.input
    settled = sample.model_copy(update={"metadata": _settled(sample.metadata)})
    rest = settled.model_dump(mode="json", exclude={"input"}, exclude_none=True)
    return [given if isinstance(given, str) else [_message(message) for message in given], rest]


def _settled(value: Any) -> Any:
    if isinstance(value, ChatMessageBase):
        return value.model_dump(mode="json", exclude={"id"}, exclude_none=True)
    if isinstance(value, Mapping):
        return {key: _settled(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_settled(each) for each in value), key=_canonical)
    return [_settled(each) for each in value] if isinstance(value, list | tuple) else value


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digests(tasks: list[Task]) -> dict[str, dict[str, str]]:
    """Of each key of each sample, so that two loads can be compared."""
    found = {}
    for task in tasks:
        for number, sample in enumerate(task.dataset, start=1):
            asked, rest = _row(sample)
            metadata = {f"metadata.{key}": value for key, value in rest.pop("metadata", {}).items()}
            keys = {"input": asked, **rest, **metadata}
            name = f"{task.name}/{number if sample.id is None else sample.id}"
            found[name] = {key: hashlib.sha256(_canonical(value).encode()).hexdigest() for key, value in keys.items()}
    return found


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {_short(str(error))}"


def _short(text: str) -> str:
    return " ".join(text.split())[:MOST_CHARACTERS]


# The model


@modelapi(name="rollout")
class _Asked(ModelAPI):
    """A model whose answers come over a socket, in OpenAI's form."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - as inspect_ai has it
        *,
        socket: str,
        note: Callable[[], None],
        asked_as: str | None = None,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        self._socket, self._note, self._role = socket, note, asked_as

    def should_retry(self, ex: BaseException) -> bool:
        """What can be had at another try is waited for where the socket ends."""
        return False

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Raises RuntimeError with the reason where there is no answer."""
        active = sample_active()
        if name := _without_effect(config):
            raise RuntimeError(f"{name} has no effect on this model and would change its answers; leave it out")
        asker = ["", "", 0] if active is None else [active.task, str(active.sample.id), active.epoch]
        body = _body(input, tools, tool_choice, config)
        with _numbered({"role": self._role, "asker": asker, "body": body}) as request:
            answer = await self._ask(request)
        if answer.get("ends"):
            _end_evaluation()
        if "error" not in answer:
            self._note()
            return _output(self.model_name, answer)
        if answer["error"]["code"] == NO_ROOM:
            return ModelOutput.from_content(self.model_name, "", stop_reason="model_length")
        raise RuntimeError(answer["error"]["message"])

    async def count_text_tokens(self, text: str) -> int:
        """By the model's own tokenizer; inspect_ai's way loads one from the network."""
        found = await self._ask({"role": self._role, "text": text})
        return found["num_tokens"]

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with short_address(Path(self._socket)) as address:
            connected = await anyio.connect_unix(address)
        async with connected as stream:
            await stream.send(json.dumps(request).encode("ascii"))
            await stream.send_eof()
            received = bytearray()
            try:
                while True:
                    received += await stream.receive(RECEIVED_BYTES)
            except anyio.EndOfStream:
                pass
        if not received:
            raise RuntimeError("the process that asks the model has ended")
        return json.loads(received)


_numbers = count()
_too_late: dict[str, list[int]] = {}
"""Numbers of questions whose answers came too late for those who asked, by the question."""


@contextmanager
def _numbered(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The request with a number of its own: the one that it had where its answer came too late, as of a task with
    ``attempt_timeout``, since another number may be another draw."""
    key = json.dumps(request, sort_keys=True)
    number = heappop(_too_late[key]) if _too_late.get(key) else next(_numbers)
    try:
        yield {**request, "number": number}
    except BaseException:
        heappush(_too_late.setdefault(key, []), number)
        raise


_ending: list[threading.Timer] = []


def _end_evaluation() -> None:
    """Ends it as Ctrl-C does, so that sandboxes are cleaned up, whatever errors a task catches; and by the end of the
    process where that takes long."""
    if not _ending:
        _ending.append(threading.Timer(END_SECONDS, os._exit, [1]))
        _ending[0].daemon = True
        _ending[0].start()
        signal.raise_signal(signal.SIGINT)


def _body(
    messages: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
) -> dict[str, Any]:
    given = config.model_dump(exclude_none=True)
    body: dict[str, Any] = {theirs: given[name] for name, theirs in BODY.items() if name in given}
    body["messages"] = [_message(message) for message in messages]
    if config.response_schema is not None:
        schema = config.response_schema.json_schema.model_dump(mode="json", exclude_none=True, by_alias=True)
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters.model_dump(mode="json", exclude_none=True, by_alias=True),
                },
            }
            for tool in tools
        ]
        body["tool_choice"] = _choice(tool_choice)
    return body | dict(config.extra_body or {})


def _choice(choice: ToolChoice) -> Any:
    if isinstance(choice, ToolFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice == "any" else choice


def _message(message: ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": _text(message)}
    if isinstance(message, ChatMessageAssistant):
        if thoughts := "\n".join(_thoughts(message)):
            found["reasoning_content"] = thoughts
        if message.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function, "arguments": json.dumps(call.arguments)},
                }
                for call in message.tool_calls
            ]
    if isinstance(message, ChatMessageTool):
        found["tool_call_id"] = message.tool_call_id
        if message.error is not None:
            found["content"] = f"Error: {message.error.message}"  # as inspect_ai tells it to models of OpenAI
    return found


def _text(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content:
        if isinstance(part, ContentText):
            texts.append(part.text)
        elif not isinstance(part, ContentReasoning):
            raise RuntimeError(f"a message has content of type {part.type}; this model takes texts")
    return "\n".join(texts)


def _thoughts(message: ChatMessageAssistant) -> Iterable[str]:
    for part in message.content if isinstance(message.content, list) else ():
        if isinstance(part, ContentReasoning) and isinstance(part.reasoning, str):
            yield part.reasoning


def _output(name: str, answer: dict[str, Any]) -> ModelOutput:
    usage = answer["usage"]
    return ModelOutput(
        model=name,
        choices=[_chosen(name, choice) for choice in answer["choices"]],
        usage=ModelUsage(
            input_tokens=usage["prompt_tokens"],
            output_tokens=usage["completion_tokens"],
            total_tokens=usage["total_tokens"],
        ),
    )


def _chosen(name: str, choice: dict[str, Any]) -> ChatCompletionChoice:
    message, logprobs = choice["message"], choice.get("logprobs")
    text, thought = parse_content_with_reasoning(message.get("content") or "")
    content = text if thought is None else [ContentReasoning(reasoning=thought.reasoning), ContentText(text=text)]
    return ChatCompletionChoice(
        message=ChatMessageAssistant(
            content=content,
            tool_calls=[_call(call) for call in message.get("tool_calls") or ()] or None,
            model=name,
            source="generate",
        ),
        stop_reason=STOP_REASONS[choice["finish_reason"]],  # pyright: ignore[reportArgumentType]
        logprobs=None if logprobs is None else Logprobs(content=logprobs["content"]),
    )


def _call(call: dict[str, Any]) -> ToolCall:
    function, problem = call["function"], None
    try:
        arguments = json.loads(function["arguments"])
    except ValueError as error:
        arguments, problem = {}, f"arguments that are no JSON: {error}"
    return ToolCall(id=call["id"], function=function["name"], arguments=arguments, parse_error=problem)


# What they come to


def _result(log: EvalLog, task: Task) -> dict[str, Any]:
    """Of a task: its questions, and its scores with their values and metrics; nothing that differs from run to run."""
    assert log.results is not None, "it succeeded"
    evaluated = {str(sample.id) for sample in log.samples or ()}
    ids = [str(number if sample.id is None else sample.id) for number, sample in enumerate(task.dataset, start=1)]
    values = {(found.scorer, found.reducer): found.samples for found in log.reductions or ()}
    lacking: set[tuple[str, int]] = set()
    unreadable: set[tuple[str, int]] = set()
    scores = []
    for score in log.results.scores:
        given = dict(_given(log, score))
        texts = {asked for asked, value in given.items() if isinstance(value, str) and not _is_readable(value)}
        lacking |= {asked for asked, value in given.items() if value is None or _is_nan(value)}
        if _counts_numbers(score):
            unreadable |= texts
        scores.append(
            _score(
                score,
                values.get((score.scorer, score.reducer), ()),
                without=set() if _counts_numbers(score) else {name for name, _ in texts},
                scored={name for (name, _), value in given.items() if value is not None and not _is_nan(value)},
                about={str(sample.id): sample.metadata for sample in log.samples or ()},
            )
        )
    return {
        "task": task.name,
        "questions": [name for name in ids if name in evaluated],
        "failed": sorted({str(sample.id) for sample in log.samples or () if sample.error is not None}),
        "lacking": sorted(name for name, _ in lacking),
        "unreadable": sorted(name for name, _ in unreadable - lacking),
        "scores": scores,
    }


_to_float = value_to_float()


def _given(log: EvalLog, score: EvalScore) -> Iterator[tuple[tuple[str, int], Any]]:
    """What the scorer said of each answer, by sample and epoch; None where it said nothing."""
    for sample in log.samples or ():
        if sample.error is None:
            found = (sample.scores or {}).get(score.scorer)
            value = None if found is None else found.value
            # Of a scorer that gives several, each has metrics of its own.
            yield (str(sample.id), sample.epoch), value.get(score.name) if isinstance(value, Mapping) else value


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _is_readable(text: str) -> bool:
    """Whether inspect_ai takes a score that is a text for a number; it counts 0 for others."""
    if _to_float(text) or text in (INCORRECT, NOANSWER) or text.lower() in ("no", "false"):
        return True
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _counts_numbers(score: EvalScore) -> bool:
    """Whether its figures are of numbers, which inspect_ai made of texts; a frequency of texts is not."""
    return any(name in MEANS and "to_float" not in metric.params for name, metric in score.metrics.items())


def _score(
    score: EvalScore,
    samples: Iterable[EvalSampleScore],
    *,
    without: Collection[str],
    scored: Collection[str],
    about: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    values: dict[str, float] = {}
    for sample in samples:
        value = sample.value
        if isinstance(value, Mapping):
            value = value.get(score.name)
        number = math.nan if value is None or isinstance(value, Mapping | list) else _to_float(value)
        if math.isfinite(number) and str(sample.sample_id) not in without:
            values[str(sample.sample_id)] = number
    plain = {name: metric for name, metric in score.metrics.items() if metric.group is None}
    found = {name: metric.value for name, metric in plain.items() if math.isfinite(metric.value)}
    return {
        "name": score.name if score.reducer in (None, "mean") else f"{score.name}@{score.reducer}",
        "scorer": score.scorer,
        "values": values,
        "metrics": {name: value for name, value in found.items() if name.rpartition("/")[2] not in SPREADS},
        "means": [name for name in found if name in MEANS],
        "stderr": found.get("stderr", found.get("bootstrap_stderr")),
        "groups": _grouped(score, [about[name] for name in scored]),
        "scored": len(scored),
    }


def _grouped(score: EvalScore, scored: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Metrics that are of a part of the samples, or one of several figures of a metric: each under its own name, with
    the standard error that is grouped alike. ``scored``: metadata of the samples that have a score."""
    figures: dict[tuple[str, str], dict[str, Any]] = {}
    errors: dict[tuple[str, str], float] = {}
    for metric in score.metrics.values():
        if metric.group is None or not math.isfinite(metric.value):
            continue
        inner = metric.params.get("metric")
        of = str(inner["name"] if isinstance(inner, Mapping) else metric.group).rpartition("/")[2]
        key, template = metric.params.get("group_key"), metric.params.get("name_template", "{group_name}")
        groups = Counter(str(metadata.get(key)) for metadata in scored if key is not None)
        counts = {template.format(group_name=name): (name, count) for name, count in groups.items()}
        name, count = counts.get(metric.name, (metric.name, len(scored)))
        within = f"{key}={name}" if metric.name in counts else name if key is None else f"{key}: {name}"
        if of in SPREADS:
            errors[within, of] = metric.value
        else:
            label = f"{of}[{within}]"
            figures[within, of] = {"name": label, "value": metric.value, "count": count, "is_mean": of in MEANS}
    for (within, _), figure in figures.items():
        is_mean = figure.pop("is_mean")
        figure["stderr"] = errors.get((within, "stderr"), errors.get((within, "bootstrap_stderr"))) if is_mean else None
    return list(figures.values())
