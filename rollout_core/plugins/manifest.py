"""What a plugin says of itself: ``rollout-plugin.toml``. Every key that is accepted has an effect; one that would have
none is refused by name, and so is what can be known to be wrong without running anything.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from rollout_core.base.errors import ConfigError, shown
from rollout_core.config.base import Settings, parse_config

MANIFEST = "rollout-plugin.toml"
OLDEST_PYTHON = (3, 11)
EVERY_HOST = "*"

KINDS: Mapping[str, str] = {
    "reward-model": "reward-model",
    "reward": "reward-model",
    "data-source": "data-source",
    "env-harness": "env-harness",
    "tool-harness": "tool-harness",
    "tracker": "tracker",
    "secret-source": "secret-source",
}
"""Kinds that a plugin may have, each with the name that it is known by here."""
KINDS_NOT_YET = (
    "eval-harness",
    "inference-backend",
    "storage",
    "queue",
    "object-store",
    "algorithm",
    "notifier",
    "custom",
)
TRAITS: Mapping[str, tuple[str, ...]] = {
    "reward-model": ("rollout_core::Plugin", "rollout_core::RewardModel"),
    "data-source": ("rollout_core::Plugin", "rollout_core::DataSource"),
    "env-harness": ("rollout_core::Plugin", "rollout_core::EnvHarness"),
    "tool-harness": ("rollout_core::Plugin", "rollout_core::ToolHarness"),
    "tracker": ("rollout_core::Plugin", "rollout_core::Tracker"),
    "secret-source": ("rollout_core::Plugin", "rollout_core::SecretSource"),
}
"""By kind, what ``trait_id`` may say."""
_LIMITS_ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "env-harness": {
        "call_seconds": "turn_seconds of the environment holds its calls",
        "batch_size": "a call is about one episode",
    },
    "tool-harness": {"batch_size": "a call is that of one tool"},
    "tracker": {"batch_size": "a call is about one step"},
    "secret-source": {"batch_size": "a call is about one secret"},
}
"""By kind, limits that would have no effect, and why."""
_NATIVE = ("rust-cdylib", "cdylib")
_IN_PROCESS = {"in-process": "in_process", "pyo3": "in_process", "in_process": "in_process"}
_NATIVE_REASON = (
    "a native library would run inside the run's own process, where its crash ends the run and no limit holds it; "
    "expected 'in-process' or 'sidecar', and a native program can be a sidecar"
)


def _of_a_kind(value: Any) -> Any:
    name = next(iter(value), "custom") if isinstance(value, Mapping) else value
    if name in KINDS_NOT_YET or isinstance(value, Mapping):
        raise ValueError(f"plugins of kind {name!r} are not supported yet; expected one of {_listed(KINDS)}")
    if name not in KINDS:
        raise ValueError(f"expected one of {_listed(KINDS)}")
    return KINDS[name]


def _a_mode(value: Any) -> Any:
    if value in _NATIVE:
        raise ValueError(_NATIVE_REASON)
    if value != "sidecar" and value not in _IN_PROCESS:
        raise ValueError("expected 'in-process' (also called 'pyo3') or 'sidecar'")
    return _IN_PROCESS.get(value, value)


def _inside(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or "\\" in value or not path.parts:
        raise ValueError("expected a path inside the plugin's folder, relative to it")
    return str(path)


def _dotted(value: str) -> str:
    if not all(part.isidentifier() for part in value.split(".")):
        raise ValueError("expected a name of Python, such as plugin or package.plugin")
    return value


def _listed(values: Iterable[str]) -> str:
    return ", ".join(map(repr, values))


PathInside = Annotated[str, AfterValidator(_inside)]
PythonName = Annotated[str, AfterValidator(_dotted)]


class Runtime(Settings):
    """What a plugin needs to run."""

    python_min: str | None = Field(default=None, pattern=r"^\d+\.\d+$")
    """Oldest Python that runs it, such as ``3.11``; required in process."""
    gpu: bool = False
    """Whether it sees the machine's GPUs."""
    memory_mib: int | None = Field(default=None, ge=32)
    """Memory of its processes together. Default: three quarters of the machine's."""


class PluginLimits(Settings):
    """What a plugin may take."""

    call_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Longest time for a call."""
    start_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Longest time until it is ready for calls."""
    processes: int = Field(default=64, ge=2)
    """Processes of the plugin at the same time, the one that looks after it among them."""
    answer_bytes: int = Field(default=2**20, ge=1024, le=2**26)
    """Longest answer."""
    batch_size: int = Field(default=1, ge=1, le=65536)
    """What a call is about at most, such as samples. A call that fails costs all of them."""


class InProcessEntry(Settings):
    """Python that is imported by a process of this project's, one for the plugin alone."""

    module: PythonName
    """Module of the plugin's folder, such as ``plugin``."""
    factory: PythonName
    """Function there that is called with the configuration, and returns what is called."""


class SidecarEntry(Settings):
    """A program that answers on a Unix socket."""

    command: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1)
    """Program and arguments. ``{python}`` stands for the interpreter that runs this project."""
    protocol: Literal["framed-json-uds", "framed-json-stdio"] = "framed-json-uds"
    """Where the socket is: it listens at the path that is its last argument; or its standard input and output are
    it."""


class Entry(Settings):
    """Where a plugin begins."""

    in_process: InProcessEntry | None = None
    """Of mode ``in-process``; also called ``pyo3``."""
    sidecar: SidecarEntry | None = None
    """Of mode ``sidecar``."""


class Manifest(Settings):
    """A ``rollout-plugin.toml``."""

    name: str = Field(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """By which configurations know it; letters, digits, dots, dashes."""
    version: str = Field(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9.+_-]*$")
    """Its own version."""
    kind: Annotated[str, BeforeValidator(_of_a_kind)]
    """What it is: ``reward-model``, also called ``reward``, ``data-source``, ``env-harness``,
    ``tool-harness``, ``tracker`` or ``secret-source``."""
    trait_id: str
    """What it implements, such as ``rollout_core::RewardModel``."""
    mode: Annotated[Literal["in_process", "sidecar"], BeforeValidator(_a_mode)]
    """``in-process`` or ``sidecar``."""
    network_allowlist: tuple[str, ...]
    """``[]``: it has no network. ``["*"]``: it has the machine's."""
    config_schema_path: PathInside | None = None
    """File of the JSON Schema of its configuration. Without one it has no configuration."""
    runtime: Runtime = Runtime()
    """What it needs to run."""
    limits: PluginLimits = PluginLimits()
    """What it may take."""
    entry: Entry
    """Where it begins."""

    @field_validator("network_allowlist")
    @classmethod
    def _all_or_nothing(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        if hosts not in ((), (EVERY_HOST,)):
            raise ValueError("single hosts cannot be allowed yet; expected [] for no network or ['*'] for all of it")
        return hosts

    @model_validator(mode="after")
    def _fits_together(self) -> Manifest:
        if self.trait_id not in TRAITS[self.kind]:
            raise ValueError(
                f"trait_id: got {shown(self.trait_id)}; expected {' or '.join(map(repr, TRAITS[self.kind]))} for kind "
                f"{self.kind!r}"
            )
        entries = {"in_process": self.entry.in_process, "sidecar": self.entry.sidecar}
        mode = self.mode.replace("_", "-")
        if entries[self.mode] is None:
            raise ValueError(f"entry.{self.mode}: got no such table; expected one for mode {mode!r}")
        if other := [name for name, entry in entries.items() if entry is not None and name != self.mode]:
            raise ValueError(f"entry.{other[0]}: got a table; expected none, as mode is {mode!r}")
        for name, instead in _LIMITS_ELSEWHERE.get(self.kind, {}).items():
            if name in self.limits.model_fields_set:
                raise ValueError(
                    f"limits.{name}: got {getattr(self.limits, name)!r}; expected none for kind {self.kind!r}: "
                    f"{instead}"
                )
        self._check_python()
        return self

    def _check_python(self) -> None:
        needed = self.runtime.python_min
        if self.mode == "sidecar":
            if needed is not None:
                raise ValueError(
                    f"runtime.python_min: got {needed!r}; expected none for a sidecar, whose command says what runs it"
                )
            return
        if needed is None:
            raise ValueError("runtime.python_min: got none; expected the oldest Python that runs it, such as '3.11'")
        version = tuple(map(int, needed.split(".")))
        if version < OLDEST_PYTHON:
            raise ValueError(f"runtime.python_min: got {needed!r}; expected '3.11' or later")
        if version > sys.version_info[:2]:
            here = ".".join(map(str, sys.version_info[:2]))
            raise ValueError(f"runtime.python_min: got {needed!r}; expected at most {here}, which runs here")

    @property
    def has_network(self) -> bool:
        """Whether its processes have the machine's network."""
        return EVERY_HOST in self.network_allowlist

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.name} {self.version}"


Files = Mapping[str, bytes]
"""What a plugin's folder holds, by paths relative to it."""


def parse_manifest(text: bytes, name: str, files: Files, package: str | None = None) -> Manifest:
    """The manifest of a plugin with these files. Raises ConfigError with a line for each thing wrong: ``name`` and key,
    what was got and what was expected. ``package``: name of the Python package that the folder is, if it is one."""
    try:
        tables = tomllib.loads(text.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{name}: (top level): not readable as TOML: {error}") from error
    written = _entry_as_written(tables, name)
    if isinstance(entry := tables.get("entry"), dict):
        tables["entry"] = {_IN_PROCESS.get(key, key): table for key, table in entry.items()}
    try:
        manifest = parse_config(tables, Manifest, name=name)
        if problem := _problem_with_files(manifest, files, package):
            raise ConfigError(problem, [f"{name}: {problem}"])
    except ConfigError as error:
        # What is found with several keys at hand names its own key.
        lines = [line.replace(": (top level): ", ": ", 1) for line in error.violations]
        lines = [line.replace("entry.in_process", f"entry.{written}") for line in lines]
        raise ConfigError("\n".join(lines), lines) from None
    return manifest


def _entry_as_written(tables: Mapping[str, Any], name: str) -> str:
    """By which of its names the table of a Python plugin stands there. Raises ConfigError where it stands there twice,
    and for a native library's."""
    entry = tables.get("entry")
    given = list(entry) if isinstance(entry, dict) else []
    if native := [key for key in given if key in _NATIVE]:
        raise ConfigError(f"{name}: entry: got {native[0]!r}: {_NATIVE_REASON}")
    named = [key for key in given if key in _IN_PROCESS]
    if len(named) > 1:
        raise ConfigError(f"{name}: entry: got {_listed(named)}, which are the same table; expected one of them")
    return next(iter(named), "in-process")


def _problem_with_files(manifest: Manifest, files: Files, package: str | None) -> str | None:
    if (entry := manifest.entry.in_process) is not None:
        begin = f"{package}." if package else ""
        if not entry.module.startswith(begin):
            return f"entry.in_process.module: got {entry.module!r}; expected a module of the package, {begin}..."
        inner = entry.module.removeprefix(begin).replace(".", "/")
        if f"{inner}.py" not in files and f"{inner}/__init__.py" not in files:
            return f"entry.in_process.module: got {entry.module!r}; expected a module of the folder, {inner}.py"
    if (entry := manifest.entry.sidecar) is not None:
        first = entry.command[0]
        if re.match(r"\.?\.?/", first) and not first.startswith("/"):
            path = first.removeprefix("./")
            if path not in files:
                return f"entry.sidecar.command: got {first!r}; expected a program that the folder has"
    if manifest.config_schema_path is not None:
        return _problem_with_schema(manifest.config_schema_path, files)
    return None


def _problem_with_schema(path: str, files: Files) -> str | None:
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for

    if path not in files:
        return f"config_schema_path: got {path!r}; expected a file that the folder has"
    try:
        schema = json.loads(files[path])
    except (ValueError, RecursionError) as error:
        return f"config_schema_path: got {path!r}, which is no JSON ({error}); expected a JSON Schema"
    if not isinstance(schema, dict):
        return f"config_schema_path: got {path!r}, which holds {shown(schema)}; expected a JSON Schema, an object"
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        where = ".".join(map(str, error.absolute_path)) or "(top level)"
        return f"config_schema_path: got {path!r}, whose {where} is wrong ({error.message}); expected a JSON Schema"
    return None


def check_config(manifest: Manifest, config: Mapping[str, Any], files: Files) -> None:
    """Raises ConfigError with a line for each key of ``config`` that the plugin's schema refuses."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from referencing import Registry

    if manifest.config_schema_path is None:
        if config:
            raise ConfigError(
                f"plugin {manifest.name}: config: got {_listed(sorted(config))}; expected none, as the plugin's "
                "manifest has no config_schema_path"
            )
        return
    schema = json.loads(files[manifest.config_schema_path])
    kind = validator_for(schema, default=Draft202012Validator)
    # A registry that retrieves nothing: a "$ref" to an address is never fetched.
    errors = kind(schema, registry=Registry()).iter_errors(dict(config))
    lines = [
        f"plugin {manifest.name}: {'.'.join(['config', *map(str, error.absolute_path)])}: {error.message}; expected "
        f"what {manifest.config_schema_path} of the plugin says"
        for error in sorted(errors, key=lambda error: list(map(str, error.path)))
    ]
    if lines:
        raise ConfigError("\n".join(lines), lines)
