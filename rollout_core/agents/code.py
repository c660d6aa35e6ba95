"""An agent's code: read once, with what of the user's own it imports, known by its content, and run as it was read."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_core.agents.lit_agent import LitAgent
from rollout_core.base.errors import ConfigError, near
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.isolation.child import Child, Ended
from rollout_core.base.processes import Limits
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import AgentSource
from rollout_core.rewards.source_ids import file_code
from rollout_core.rewards.user_code import UserCode, importable, load_module, read_code


@dataclass(frozen=True)
class AgentCode:
    """What ``path/to/agent.py:name`` or ``package.module:name`` names."""

    code: UserCode

    @classmethod
    def read(cls, function: str, base: Path) -> AgentCode:
        """Read the files, and run none. Raises ConfigError where there are none, or the file defines no such name."""
        return cls(read_code(function, base, what="agent"))

    @property
    def function(self) -> str:
        """As it was named."""
        return self.code.callable

    @property
    def id(self) -> ContentId:
        """Content of the code and the name in it; where the files lie does not count."""
        return content_id("agent/1", {"function": self.function.rpartition(":")[2], **self.code.identity()})

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return self.code.document()

    def file(self, objects: ObjectStore) -> ContentId:
        """File the document, and note where the code was read; the document's id."""
        return file_code(objects, self.id, self.code, "agent")

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> AgentCode:
        """Inverse of `document`."""
        return cls(UserCode.from_document(document))

    @classmethod
    def filed(cls, objects: ObjectStore, source: AgentSource) -> AgentCode:
        """Inverse of `file`."""
        return cls.from_document(json.loads(objects.get_bytes(source.code)))

    def load(self, *, alone: bool = False) -> LitAgent[Any]:
        """Run the code as it was read; what it imports of the user's own later is that code too. ``alone``: see
        `importable`.

        Raises ConfigError where it fails, or what is named is no agent.
        """
        context = importable(self.code, alone=alone)
        context.__enter__()
        # Left open, for an agent may import at any time; one that nothing referred to any more would be closed.
        atexit.register(context.__exit__, None, None, None)
        name = self.function.rpartition(":")[2]
        module = load_module(self.code)
        found = getattr(module, name, None)
        if isinstance(found, LitAgent):
            return found
        agents = [key for key, value in vars(module).items() if isinstance(value, LitAgent)]
        if found is None:
            raise ConfigError(f"agent {self.function}: there is no {name!r}; {near(name, agents)}")
        raise ConfigError(
            f"agent {self.function} is a {type(found).__name__}; expected a function decorated with @rollout, or an "
            "instance of a LitAgent"
        )


CHECK_LIMITS = Limits(seconds=120.0)


def check_agent(code: AgentCode, on_line: Callable[[str], None]) -> str | None:
    """Load the agent in a process of its own; ``on_line`` gets what it prints. Returns why it cannot be loaded where
    something that it imports is not installed, which other machines may have. Raises ConfigError where it can be loaded
    nowhere."""
    with Child("rollout_core.agents.code:handle_check", CHECK_LIMITS, on_line=on_line) as child:
        try:
            return child.call(code.document())
        except Ended as error:
            raise ConfigError(f"agent {code.function} cannot be loaded: it {error}") from error


def handle_check(document: dict[str, Any], step: Callable[[int], None]) -> str | None:
    """In the child: load the agent of a document. Returns what `check_agent` does."""
    try:
        AgentCode.from_document(document).load(alone=True)
    except ConfigError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and (missing.name or "").partition(".")[0] != "rollout_core":
            return str(error)
        raise
    return None
