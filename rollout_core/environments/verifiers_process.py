"""Environments of verifiers, which run their own loop: the model that they ask is whoever plays the episode.

It runs by any Python that has verifiers, so nothing is imported here that such a Python may lack. An environment is
loaded once for its process, in the main thread, and all episodes share it, as it is meant.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import verifiers  # pyright: ignore[reportMissingImports]

from rollout_core.base.errors import ConfigError, in_words
from rollout_core.environments.object_host import Unattended, answer
from rollout_core.environments.protocol import Done, Tool

MOST_FILES = 10_000
VERSIONS = "verifiers>=0.2,<0.3"
"""Whose environments are loaded by ``load_environment`` and ask a client."""
if not hasattr(verifiers, "load_environment"):
    raise ConfigError(
        f"verifiers {importlib.metadata.version('verifiers')} has no load_environment; task sets of verifiers.v1 run "
        f"programs of their own and are not played here: install '{VERSIONS}' for this environment"
    )


def about(given: Mapping[str, Any], report: Callable[[int], None]) -> dict[str, Any]:
    """What stands for an environment in ids: versions, and a hash of its files. Raises ConfigError where there is no
    such environment."""
    name = given["name"]
    _find_modules_in(given["folder"])
    module = name.replace("-", "_").split("/")[-1]
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ConfigError(
            f"verifiers environment {name}: {sys.executable} has no module {module}; install its package there, or "
            "give path = the folder that it lies in"
        )
    roots = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = dict(_files(roots, Path(spec.origin) if spec.origin else None))
    if not files or len(files) > MOST_FILES:
        raise ConfigError(f"verifiers environment {name} has {len(files)} files; expected 1 to {MOST_FILES:,}")
    names = importlib.metadata.packages_distributions().get(module, ())
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return {
        "verifiers": _version("verifiers"),
        "packages": {distribution: _version(distribution) for distribution in sorted(set(names))},
        "files": digest,
    }


def _version(distribution: str) -> str:
    return importlib.metadata.version(distribution)


def _find_modules_in(folder: str | None) -> None:
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)


def _files(roots: list[Path], origin: Path | None) -> Iterator[tuple[str, str]]:
    """Hashes of a module's files, by their places in it; hidden ones decide nothing."""
    for root in roots:
        for path in sorted(root.rglob("*")):
            parts = path.relative_to(root).parts
            is_hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
            if not is_hidden and path.is_file():
                yield str(path.relative_to(root)), hashlib.sha256(path.read_bytes()).hexdigest()
    if not roots and origin is not None:
        yield origin.name, hashlib.sha256(origin.read_bytes()).hexdigest()


def handle(given: dict[str, Any], report: Callable[[int], None]) -> dict[str, Any]:
    """As `answer`. Raises ConfigError where the environment cannot be loaded or played, or is not ``expected``."""
    keys, name = given["config"], given["config"]["name"]
    if about(keys, report) != given["expected"]:
        raise ConfigError(
            f"verifiers environment {name} has changed since the run began, or differs between machines; start the run "
            "again"
        )
    try:
        environment = verifiers.load_environment(name, **keys["config"])
    except Exception as error:
        raise ConfigError(f"verifiers environment {name} cannot be loaded: {in_words(error)}") from error
    if getattr(environment, "requires_group_rollouts", False):
        raise ConfigError(
            f"verifiers environment {name} has a reward function of whole groups, and episodes are rewarded one by "
            "one; leave it out of the rubric"
        )
    return answer(given, lambda: VerifiersEpisode(environment), report)


class _Asking(verifiers.Client):
    """The model of one rollout: what it is asked waits here for an answer."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: asyncio.Queue[tuple[list[Any], list[Any]]] = asyncio.Queue()
        self.answer: asyncio.Future[Any] | None = None

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **further: Any) -> Any:
        self.answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((list(prompt), list(tools or ())))
        return await self.answer

    async def _never(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("no server is asked")

    setup_client = to_native_tool = to_native_prompt = get_native_response = _never
    raise_from_native_response = from_native_response = _never

    async def close(self) -> None:
        """Nothing is held."""


class VerifiersEpisode(Unattended):
    """One rollout."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._client = _Asking()
        self._rollout: asyncio.Task[Any] | None = None
        self._prompt: list[dict[str, Any]] = []
        """That the model was asked last."""

    async def further_tools(self) -> list[Tool]:
        """Those of the environment, which calls them itself."""
        return [
            Tool(tool.name, tool.description or "", tool.parameters or {"type": "object", "properties": {}}, _unused)
            for tool in self._environment.tool_defs or ()
        ]

    def make_rows(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        """Rows of the environment's data sets, in the order that verifiers draws by the seed."""
        environment, most = self._environment, -1 if size is None else size
        if split == "eval":
            if environment.build_eval_dataset() is None:
                raise ValueError(
                    "it has no eval_dataset, so none of its rows are held out; give rows of a file where they are to be"
                )
            found = environment.get_eval_dataset(n=most, seed=seed)
        else:
            found = environment.get_dataset(n=most, seed=seed)
        rows = [dict(row) for row in found]
        for row in rows:
            json.dumps(row)  # raises for what no row can hold, such as an image
        return rows

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
        """What the model is asked first."""
        given = {"example_id": 0, **row}
        self._rollout = asyncio.create_task(self._environment.rollout(given, self._client, "model", {}))
        asked = await self._next()
        if asked is None:
            raise RuntimeError("the rollout ended before the model was asked")
        return asked

    async def step(self, message: Mapping[str, Any]) -> list[dict[str, Any]] | Done:
        """What follows an answer."""
        assert self._client.answer is not None
        if self._client.answer.done():  # by a time limit of the environment's own, it asks no more
            return Done()
        self._client.answer.set_result(_response(message))
        asked = await self._next()
        return Done() if asked is None else asked

    async def call_tools(self, message: Mapping[str, Any]) -> list[dict[str, Any]] | Done:
        """What follows an answer that calls tools."""
        return await self.step(message)

    async def reward(self) -> float | dict[str, float]:
        """What the rubric gives; its parts with their weights, where they make up the sum."""
        assert self._rollout is not None
        if not self._rollout.done() and self._client.answer is not None and not self._client.answer.done():
            # The episode is at its limits: the environment ends it as it does when a prompt is too long.
            self._client.answer.set_exception(verifiers.OverlongPromptError())
        state = await self._rollout
        rubric = self._environment.rubric
        await rubric.score_rollout(state)
        await rubric.cleanup(state)
        return _parts(rubric, state)

    async def close(self) -> None:
        """End the rollout, if it has not ended."""
        self._abandon()
        if self._rollout is not None:
            await asyncio.wait([self._rollout])

    def _abandon(self) -> None:
        """Have the rollout end, and the environment clean up after it."""
        if self._rollout is not None:
            self._rollout.cancel()

    async def _next(self) -> list[dict[str, Any]] | None:
        """The messages that the model has not seen yet; None where the rollout has ended."""
        assert self._rollout is not None
        asking = asyncio.ensure_future(self._client.asked.get())
        try:
            await asyncio.wait([asking, self._rollout], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                if (error := self._rollout.result().get("error")) is not None:
                    raise RuntimeError(f"the rollout ended with {in_words(error)}") from error
                return None
            prompt, tools = asking.result()
        finally:
            asking.cancel()
        self._check_tools(tools)
        messages = _chat(prompt)
        known = len(self._prompt)
        # Behind the earlier prompt stands the answer, which the player has by its tokens.
        answered = [message["role"] for message in messages[known : known + 1]]
        if messages[:known] != self._prompt or (known and answered != ["assistant"]):
            raise RuntimeError("the environment rewrites the conversation, and episodes continue what was said")
        self._prompt = messages
        return messages[known + 1 :] if known else messages

    def _check_tools(self, tools: list[Any]) -> None:
        given = [tool.name for tool in tools]
        offered = [tool.name for tool in self._environment.tool_defs or ()]
        if given != offered:
            raise RuntimeError(
                f"the row has tools of its own ({', '.join(given) or 'none'}), and the model was shown those of the "
                f"environment ({', '.join(offered) or 'none'})"
            )


def _unused(**_: Any) -> None:
    raise NotImplementedError("the environment calls its tools itself")


def _response(message: Mapping[str, Any]) -> Any:
    from verifiers import types  # pyright: ignore[reportMissingImports]

    calls = [
        types.ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    said = types.ResponseMessage(
        content=message["content"],
        tool_calls=calls or None,
        finish_reason="tool_calls" if calls else "stop",
        is_truncated=False,
    )
    return types.Response(id="answer", created=0, model="model", message=said)


def _chat(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages as chat templates take them. Raises ValueError for what is no text."""
    found = []
    names: dict[str, str] = {}
    for message in messages:
        given = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
        shown: dict[str, Any] = {"role": given["role"], "content": _text(given.get("content"))}
        if calls := given.get("tool_calls"):
            names |= {call["id"]: call["name"] for call in calls}
            shown["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": {key: call[key] for key in ("name", "arguments")}}
                for call in calls
            ]
        if (called := given.get("tool_call_id")) is not None:
            shown |= {"tool_call_id": called, "name": names.get(called, "")}
        found.append(shown)
    return found


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
    if other := next((part for part in parts if part.get("type") != "text"), None):
        raise ValueError(f"a message has a part of type {other.get('type')!r}; expected text alone")
    return "".join(part["text"] for part in parts)


def _parts(rubric: Any, state: Mapping[str, Any]) -> float | dict[str, float]:
    total, metrics = float(state["reward"]), state.get("metrics") or {}
    parts: dict[str, float] = {}
    for one in getattr(rubric, "rubrics", None) or [rubric]:
        for function, weight in zip(getattr(one, "funcs", ()), getattr(one, "weights", ()), strict=False):
            name = getattr(function, "__name__", repr(function))
            if weight and name in metrics:
                with suppress(TypeError, ValueError):
                    parts[name] = float(metrics[name]) * weight
    is_whole = len(parts) > 1 and math.isclose(sum(parts.values()), total, rel_tol=1e-9, abs_tol=1e-9)
    return parts if is_whole else total
