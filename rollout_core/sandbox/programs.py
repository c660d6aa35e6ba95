"""A program of others: what it is, what it may take, and how it ended."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from rollout_core.base.errors import ConfigError
from rollout_core.base.processes import signal_name

SandboxKind = Literal["auto", "namespaces", "bubblewrap", "docker", "gvisor", "command", "http", "none"]
Ended = Literal["exit", "signal", "time", "cpu", "memory", "output", "processes", "disk", "stopped"]

LANGUAGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "python": ("main.py", ("python3", "main.py")),
    "sh": ("main.sh", ("sh", "main.sh")),
    "bash": ("main.sh", ("bash", "main.sh")),
    "javascript": ("main.js", ("node", "main.js")),
    "perl": ("main.pl", ("perl", "main.pl")),
    "ruby": ("main.rb", ("ruby", "main.rb")),
    "php": ("main.php", ("php", "main.php")),
    "lua": ("main.lua", ("lua", "main.lua")),
    "r": ("main.R", ("Rscript", "--vanilla", "main.R")),
    "julia": ("main.jl", ("julia", "--startup-file=no", "main.jl")),
    "c": ("main.c", ("sh", "-c", "cc -O1 -o main main.c -lm && exec ./main")),
    "c++": ("main.cc", ("sh", "-c", "c++ -O1 -o main main.cc && exec ./main")),
}
"""Of a source: the name of its file, and the command that runs it, where the machine has it."""
MOST_FILES = 4_000
_PLAIN_NAME = re.compile(r"[^/\0]{1,60}")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may take, with all the processes that it starts."""

    wall_seconds: float = 10.0
    """From its start to its end. A busy machine makes this longer; ``cpu_seconds`` does not hang on it."""
    cpu_seconds: float = 10.0
    memory_bytes: int = 512 * 2**20
    """Resident. One process that asks for more is refused (MemoryError); together they are ended."""
    processes: int = 32
    """At a time, threads among them."""
    output_bytes: int = 2**20
    """Of standard output and error together."""
    disk_bytes: int = 64 * 2**20
    """Of all files that it writes. They lie in memory."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            kinds = int if isinstance(item.default, int) else int | float
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 2**62:
                whole = ", a whole one" if kinds is int else ""
                raise ConfigError(f"{item.name} of a sandbox's limits is {value!r}; expected a positive number{whole}")


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is to be run: a source in some language, or a command."""

    source: str | None = None
    language: str = "python"
    """Of the source; one of `LANGUAGES`."""
    argv: Sequence[str] = ()
    """A command, or the arguments of the source."""
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """By relative path, in the folder where the program starts; executable where they begin with ``#!``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Besides `PATH`, `HOME`, `TMPDIR` and the locale, the only variables it gets."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.source is None and not self.argv:
            raise ConfigError("a program has neither source nor argv; expected one of them")
        if self.source is not None and not isinstance(self.source, str):
            raise ConfigError(f"source of a program is {type(self.source).__name__}; expected a text")
        if self.source is not None and self.language not in LANGUAGES:
            raise ConfigError(f"language {self.language!r} is not known; expected one of {', '.join(LANGUAGES)}")
        if len(self.files) > MOST_FILES:
            raise ConfigError(f"a program has {len(self.files)} files; expected at most {MOST_FILES}")
        for name in self.files:
            parts = name.split("/")
            if not all(_PLAIN_NAME.fullmatch(part) and part not in (".", "..") for part in parts):
                raise ConfigError(f"file {name!r} of a program; expected a relative path without '.' and '..'")
        names = self.command()[1].keys()
        for name in names:
            for end in range(len(name)):
                if name[end] == "/" and name[:end] in names:
                    raise ConfigError(f"files {name[:end]!r} and {name!r} of a program; expected a file or a folder")
        for text in (*self.argv, *self.environment, *self.environment.values()):
            if "\0" in text:
                raise ConfigError(f"an argument or variable of a program holds a null character: {text[:50]!r}")

    def command(self) -> tuple[Sequence[str], Mapping[str, bytes]]:
        """What runs it where no interpreter waits for its source, and its files, of which the source is one then."""
        if self.source is None:
            return self.argv, self.files
        name, command = LANGUAGES[self.language]
        return [*command, *self.argv], {name: self.source.encode("utf-8", "surrogatepass"), **self.files}

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "source": self.source,
            "language": self.language,
            "argv": list(self.argv),
            "stdin": base64.b64encode(self.stdin).decode(),
            "files": {name: base64.b64encode(content).decode() for name, content in self.files.items()},
            "environment": dict(self.environment),
            "limits": asdict(self.limits),
        }

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> Program:
        """Inverse of `to_json`. Raises ConfigError."""
        try:
            return cls(
                source=message["source"],
                language=message["language"],
                argv=tuple(map(str, message["argv"])),
                stdin=base64.b64decode(message["stdin"], validate=True),
                files={name: base64.b64decode(content, validate=True) for name, content in message["files"].items()},
                environment={str(name): str(value) for name, value in message["environment"].items()},
                limits=Limits(**message["limits"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"not a program: {type(error).__name__}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a program ended, and what it wrote."""

    ended: Ended
    """``exit``: by itself; ``signal``: by one that it sent itself, or met; ``time``, ``cpu``, ``memory``, ``output``,
    ``processes``: by a limit; ``disk``: its own files do not fit, so it never began; ``stopped``: with its partner, or
    because the caller said so."""
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    """The beginning of it where ``ended`` is ``output``; so also ``stderr``."""
    stderr: bytes = b""
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, without an error."""
        return self.ended == "exit" and self.exit_code == 0

    @property
    def reason(self) -> str:
        """For people, in a form that follows "it"."""
        if self.ended == "exit":
            return f"ended with exit code {self.exit_code}"
        if self.ended == "signal":
            return f"was ended by {signal_name(self.signal or 0)}"
        if self.ended == "stopped":
            return "was stopped"
        return f"passed its limit of {_LIMITED.get(self.ended, self.ended)}"

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        encoded = {name: base64.b64encode(getattr(self, name)).decode() for name in ("stdout", "stderr")}
        return asdict(self) | encoded

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> Outcome:
        """Inverse of `to_json`. Raises ValueError and TypeError for what is none."""
        if message["ended"] not in get_args(Ended):
            raise ValueError(f"a program ended by {message['ended']!r}")
        return cls(
            ended=message["ended"],
            exit_code=message["exit_code"],
            signal=message["signal"],
            stdout=base64.b64decode(message["stdout"], validate=True),
            stderr=base64.b64decode(message["stderr"], validate=True),
            wall_seconds=float(message["wall_seconds"]),
            cpu_seconds=float(message["cpu_seconds"]),
        )


_LIMITED = {"time": "wall-clock time", "cpu": "processor time", "disk": "disk, by the files that it comes with"}
