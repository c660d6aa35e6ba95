"""What an environment is: a class, or a function that makes one, of an object for each episode.

::

    from rollout_core.environments import Done

    class Env:
        def reset(self, row, seed):              # the first messages: a text is the user's
            self.answer = row["answer"]
            return row["question"]

        def add(self, a: int, b: int) -> int:    # a public method is a tool: its name, docstring and signature
            \"\"\"Add two numbers.\"\"\"
            return a + b

        def step(self, message):                 # optional: what the user says to an answer without tool calls
            return Done() if self.answer in message["content"] else "That is not right. Try again."

        def turn_reward(self):                   # optional: what the last answer earned by itself; None: nothing
            return 0.1

        def reward(self):                        # of the whole: a number, or several by name
            return 1.0

        def call_tools(self, message):           # optional: what follows an answer with tool calls, in place of
            ...                                  # having tools called one by one

        def close(self):                         # optional
            ...

        def further_tools(self):                 # optional: tools that are known only now, each a `Tool`
            return []

        def make_rows(self, split, size, seed):  # optional: rows of the environment's own, "train" or "eval"
            return [{"question": "1 + 1 = ?", "answer": "2"}]

        # With `episodic_memory = true` in the settings, all three:
        def load_memory(self, memory):           # before reset: what earlier iterations left, None at first
            ...

        def save_memory(self):                   # after reward: what this episode leaves, as JSON; None: nothing
            return {"tried": "..."}

        def merge_memory(self, memory, notes):   # of an object of its own: the memory of the next iteration, as JSON
            return [*(memory or []), *notes][-100:]

Every method may be ``async``. An episode ends where `step` gives `Done` or None, where a tool gives `Done`, where there
is no `step` and the model calls no tool, and at its limits. The object is used by one episode alone, its methods one at
a time. What a method draws at random has to follow from ``seed``: a row's episodes all get the same one, and an episode
that is played again gets it again.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout_core.base.errors import ConfigError, Fatal, Recoverable, shown
from rollout_core.environments.tools.results import ToolError

RESERVED = ("reset", "step", "call_tools", "turn_reward", "reward", "close", "further_tools", "make_rows")
"""Methods that are no tools."""
MEMORY_METHODS = ("load_memory", "save_memory", "merge_memory")
"""Nor are these, where the settings say that an environment has a memory; else they are methods like others."""
MOST_NOTE_BYTES = 2**20
"""Of what an episode leaves, as JSON."""
MOST_FAULTS = 5
"""Of arguments that one message names."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Done:
    """Ends the episode. ``text`` is what the tool that gives it answers at last."""

    text: str = ""


@dataclass(frozen=True)
class Tool:
    """A tool that an environment knows of only when it runs, such as those of a server."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments, an object."""
    function: Callable[..., Any]
    """Called with the arguments by their names; what it gives counts as what a method gives."""

    def schema(self) -> dict[str, Any]:
        """As OpenAI's API describes it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def checked(self, arguments: Any) -> dict[str, Any]:
        """The arguments, as the function is called with them. Raises ToolError with the faults of them."""
        return checked_by_schema(self.name, self.parameters, arguments)


def checked_by_schema(tool: str, schema: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    """Arguments of a tool that fit a JSON Schema of an object. Raises ToolError with the faults of them, and
    EnvironmentFailed where the schema leads to another document: nothing is fetched."""
    from jsonschema import Draft202012Validator
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    validator = Draft202012Validator(dict(schema), registry=Registry())
    try:
        faults = [error.message for error in validator.iter_errors(arguments)]
    except Unresolvable as error:
        raise EnvironmentFailed(f"the schema of tool {tool} leads nowhere: {error}") from None
    if faults or not isinstance(arguments, Mapping):
        shown = "; ".join(faults[:MOST_FAULTS]) or "expected a JSON object"
        keys = ", ".join(schema.get("properties", ()))
        raise ToolError(f"wrong arguments: {shown:.500}. Expected: {keys or 'no keys'}")
    return dict(arguments)


def further_tools_of(given: Any) -> dict[str, Tool]:
    """What `further_tools` gave, by name. Raises EnvironmentFailed for anything but a list of tools whose names differ
    and are such as chats take."""
    if not isinstance(given, list | tuple) or not all(isinstance(tool, Tool) for tool in given):
        raise EnvironmentFailed(f"further_tools gave {_shown(given)}; expected a list of rollout's Tool")
    found = {tool.name: tool for tool in given}
    wrong = [tool.name for tool in given if not _NAME.fullmatch(tool.name)]
    if wrong or len(found) < len(given):
        names = ", ".join(tool.name for tool in given)
        raise EnvironmentFailed(f"further_tools gave tools called {names:.200}; expected names of letters, each once")
    return found


def described_tools(given: Any, begin: str) -> dict[str, Tool]:
    """The tools that a program describes, by name; what they are called for is up to the caller. Raises ConfigError,
    which begins with ``begin``, for what is none."""
    from jsonschema import Draft202012Validator, SchemaError

    def refuse(key: str, got: Any, expected: str) -> ConfigError:
        return ConfigError(f"{begin}, {key}: got {shown(got)}; expected {expected}")

    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise refuse("tools", given, "a list of objects")
    made = []
    for tool in given:
        name, description, parameters = (tool.get(key) for key in ("name", "description", "parameters"))
        if not (isinstance(name, str) and isinstance(description, str) and isinstance(parameters, dict)):
            raise refuse("tools", tool, "name and description, texts, and parameters, a JSON Schema")
        try:
            Draft202012Validator.check_schema(parameters)
        except SchemaError as error:
            raise refuse(f"parameters of tool {name}", error.message, "a JSON Schema") from None
        made.append(Tool(name, description, parameters, _called_elsewhere))
    try:
        return further_tools_of(made)
    except EnvironmentFailed as error:
        raise ConfigError(f"{begin}: {error}") from error


def _called_elsewhere(**arguments: Any) -> Any:
    raise NotImplementedError("the process that described the tool is asked")


class EnvironmentFailed(Fatal):
    """A method of an environment raised, gave something else than it may, or took too long."""


class HostEnded(Recoverable):
    """A process that had something of an episode ended; ``is_suspect`` whether a method of this one was under way, so
    that it may have been the reason."""

    def __init__(self, reason: str, *, is_suspect: bool, process: str = "the environment's process") -> None:
        self.is_suspect = is_suspect
        super().__init__(f"{process} {reason}")


def tools_of(environment: Any, *, has_memory: bool = False) -> dict[str, Callable[..., Any]]:
    """The methods of an environment that are tools, by name, in the order in which its class has them."""
    reserved = {*RESERVED, *(MEMORY_METHODS if has_memory else ())}
    found: dict[str, Callable[..., Any]] = {}
    for owner in reversed(type(environment).__mro__[:-1]):
        for name, value in vars(owner).items():
            if not name.startswith("_") and name not in reserved and inspect.isfunction(value):
                found[name] = getattr(environment, name)
    return found


def messages_of(given: Any, what: str) -> list[dict[str, Any]]:
    """Messages as a chat template gets them: a text is one of the user's. Raises EnvironmentFailed for anything else;
    ``what`` gave it, for the message."""
    if isinstance(given, str):
        return [{"role": "user", "content": clean_text(given)}]
    listed = [given] if isinstance(given, Mapping) else given
    if not isinstance(listed, list | tuple) or not listed:
        raise EnvironmentFailed(f"{what} gave {_shown(given)}; expected a text, a message or a list of messages")
    return [_message(message, what) for message in listed]


def _message(message: Any, what: str) -> dict[str, Any]:
    is_one = isinstance(message, Mapping) and message.get("role") in ROLES
    if not is_one or not isinstance(message.get("content"), str):
        expected = f"a message with a role ({', '.join(ROLES)}) and a content that is text"
        raise EnvironmentFailed(f"{what} gave {_shown(message)}; expected {expected}")
    found = {str(name): value for name, value in message.items()}
    found["content"] = clean_text(found["content"])
    try:
        _as_stored(found)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(f"{what} gave a message that JSON cannot hold: {error}") from None
    return found


def method_function(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Of a method. What is remembered of it must not keep its object."""
    return getattr(tool, "__func__", tool)


def tool_text(found: Any) -> str:
    """What a tool gave, as the model reads it."""
    if isinstance(found, str):
        return found
    import orjson

    try:
        return orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:
        return str(found)


def _as_stored(message: Any) -> None:
    """Raise TypeError or ValueError for what cannot be stored."""
    try:
        import orjson
    except ImportError:  # in an interpreter of another project's environment
        json.dumps(message, ensure_ascii=False).encode()
    else:
        orjson.dumps(message)


def clean_text(text: str) -> str:
    """Without lone surrogates, which can be neither stored nor tokenised."""
    return text.encode("utf-8", "replace").decode()


def reward_of(given: Any) -> float | dict[str, float]:
    """A reward as JSON has it. Raises EnvironmentFailed for what is no finite number, nor such numbers by name."""
    if isinstance(given, Mapping):
        if not given:
            raise EnvironmentFailed("reward gave no number: its mapping is empty")
        parts = {str(name): _number(value, f"reward {name!r}") for name, value in given.items()}
        _number(sum(parts.values()), "the sum of what reward gave,")
        return parts
    return _number(given, "reward")


def turn_reward_of(given: Any) -> float | None:
    """What a turn earned, as JSON has it; None where nothing was given for it. Raises EnvironmentFailed for what is no
    finite number."""
    return None if given is None else _number(given, "turn_reward")


def note_of(given: Any) -> str | None:
    """What an episode leaves, as canonical JSON; None where it leaves nothing. Raises EnvironmentFailed for what JSON
    cannot hold, and what is too long."""
    if given is None:
        return None
    try:
        text = canonical(given)
    except ConfigError as error:
        raise EnvironmentFailed(f"save_memory gave what JSON cannot hold: {error}") from None
    if len(text.encode()) > MOST_NOTE_BYTES:
        size = len(text.encode())
        raise EnvironmentFailed(f"save_memory gave {size} bytes of JSON; expected at most {MOST_NOTE_BYTES}")
    return text


def canonical(given: Any) -> str:
    """Canonical JSON. Raises ConfigError for what that cannot hold."""
    from rollout_core.base.ids import canonical_json

    return canonical_json(given).decode()


def _number(given: Any, what: str) -> float:
    try:
        # NumPy's and torch's scalars are numbers, too; a text is none, though float() reads it.
        number = None if isinstance(given, str | bytes) or given is None else float(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = None
    if number is None or not math.isfinite(number):
        raise EnvironmentFailed(f"{what} gave {_shown(given)}; expected a finite number")
    return number


def _shown(given: Any) -> str:
    return f"{given!r:.80} ({type(given).__name__})"
