"""Resources an algorithm publishes and agents use: model endpoints and prompt templates, in versioned snapshots.

A prompt template may have been written by a model. It cannot look into the objects behind its values, takes no longer
than ``MAX_SECONDS`` and gives no more than ``MAX_CHARACTERS``, whatever it says. Of jinja it may use output, ``if``,
``for`` and ``set``, tests, the filters and methods named below, and arithmetic on numbers.
"""

from __future__ import annotations

import logging
import re
import string
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from urllib.parse import quote

from pydantic import BaseModel, Field

from rollout_core.base.errors import ConfigError

if TYPE_CHECKING:
    import jinja2.nodes

    from rollout_core.store.types import AttemptedRollout

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 32_000_000
"""Of what a template gives, values included."""
MAX_STEPS = 100_000
"""Of all loops of a template together."""
MAX_SECONDS = 5.0

_MAX_WIDTH = 999
_MAX_NUMBER = 10**15


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


_NODES = _names(
    "Template Output TemplateData Name Const For If CondExpr Compare Operand And Or Not Neg Pos Test Filter Getattr "
    "Getitem Slice Tuple List Dict Pair Keyword Call Assign Add Sub Mul Div FloorDiv Mod"
)
_FILTERS = _names(
    "abs capitalize count d default dictsort e escape first float int items join last length list lower max min "
    "replace reverse round sort string sum title tojson trim truncate unique upper wordcount"
)
_WITH_WIDTHS = _names("round tojson truncate")
"""Of them, those that a number makes take any time or memory."""
_METHODS = _names("items keys values get upper lower strip title capitalize startswith endswith")


class Resource(BaseModel):
    """Base of all resources. ``resource_type`` tells the kinds apart when they are read back."""

    resource_type: Any


class LLM(Resource):
    """A model behind an OpenAI-compatible endpoint."""

    resource_type: Literal["llm"] = "llm"
    endpoint: str
    """URL of the API."""
    model: str
    """Name of the model, as the endpoint knows it."""
    api_key: str | None = Field(default=None, repr=False)
    sampling_parameters: dict[str, Any] = Field(default_factory=dict)
    """Sampling settings such as temperature and top_p."""

    def get_base_url(self, *args: Any, **kwargs: Any) -> str:
        """URL for an OpenAI client. Arguments are ignored here; a ProxyLLM uses them."""
        return self.endpoint


class ProxyLLM(LLM):
    """A model behind the proxy, which files each request under the rollout and attempt named in its URL."""

    resource_type: Literal["proxy_llm"] = "proxy_llm"  # pyright: ignore[reportIncompatibleVariableOverride]

    def __getattribute__(self, name: str) -> Any:
        if name == "endpoint":
            logger.warning("ProxyLLM.endpoint names no rollout; use get_base_url(rollout_id, attempt_id) instead")
        return super().__getattribute__(name)

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """URL whose requests are recorded for this attempt; the bare endpoint when neither id is given.

        A trailing ``/v1`` of the endpoint moves behind the ids. Raises ConfigError when only one id is given.
        """
        endpoint: str = self.__dict__["endpoint"]
        if rollout_id is None and attempt_id is None:
            return endpoint
        if not isinstance(rollout_id, str) or not isinstance(attempt_id, str):
            raise ConfigError(
                f"got rollout_id={rollout_id!r}, attempt_id={attempt_id!r}; give both as strings, or none"
            )
        prefix = endpoint.removesuffix("/")
        root = prefix.removesuffix("/v1")
        version = "/v1" if root != prefix else ""
        return f"{root}/rollout/{quote(rollout_id, safe='')}/attempt/{quote(attempt_id, safe='')}{version}"

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """The same model as a plain LLM whose endpoint names this rollout and attempt."""
        return LLM(
            endpoint=self.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),
            model=self.model,
            api_key=self.api_key,
            sampling_parameters=self.sampling_parameters,
        )


class PromptTemplate(Resource):
    """A prompt with places to fill in."""

    resource_type: Literal["prompt_template"] = "prompt_template"
    template: str
    engine: Literal["jinja", "f-string", "poml"]
    """Syntax of the template."""

    def format(self, **values: Any) -> str:
        """The template with ``values`` filled in, by the engine ``f-string`` or ``jinja``.

        Templates may be written by a model, so neither reaches into what it is given: an f-string's fields are names
        alone, and jinja runs in its sandbox, with what is named above. Raises ConfigError for a template that is
        wrong, asks for a value that is not given, or goes beyond the bounds of time and size; NotImplementedError for
        ``poml``.
        """
        if self.engine == "poml":
            raise NotImplementedError("engine is poml; format() renders f-string and jinja, use the poml package")
        try:
            if self.engine == "jinja":
                return _render_jinja(self.template, values)
            return _render_f_string(self.template, values)
        except (KeyError, IndexError) as error:
            raise ConfigError(f"the template asks for {error}; the values are {', '.join(values) or 'none'}") from error
        except ConfigError:
            raise
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the template cannot be rendered: {error}") from error


ResourceUnion = Annotated[LLM | ProxyLLM | PromptTemplate, Field(discriminator="resource_type")]
NamedResources = dict[str, ResourceUnion]
"""Resources by the name agents know them by."""


class ResourcesUpdate(BaseModel):
    """One stored snapshot of named resources."""

    resources_id: str
    create_time: float
    update_time: float
    version: int
    """1 for a new snapshot; raised by each update."""
    resources: NamedResources


class ClaimedTask(NamedTuple):
    """A rollout that was claimed, and the resources that it is to be worked on with."""

    rollout: AttemptedRollout
    resources: ResourcesUpdate | None
    """None also where they could not be had: who needs them asks for them."""


# Rendering


def _render_f_string(template: str, values: Mapping[str, Any]) -> str:
    """An f-string's fields filled in. Raises ConfigError beyond the bounds; KeyError, IndexError, ValueError and
    TypeError as ``str.format``."""
    return _Fields().vformat(template, (), values)


class _Fields(string.Formatter):
    """``str.format`` without attributes and items of values, ``{x.__class__}`` would read the program's secrets, and
    without widths that fill the memory."""

    def __init__(self) -> None:
        self._budget = _Budget()

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        if "." in field_name or "[" in field_name:
            raise ConfigError(f"the template's field {{{field_name}}} reaches into a value; give the part by a name")
        return super().get_field(field_name, args, kwargs)

    def format_field(self, value: Any, format_spec: str) -> str:
        if any(int(width) > _MAX_WIDTH for width in re.findall(r"\d{1,18}", format_spec)):
            raise ConfigError(f"the template's format :{format_spec[:20]} has a width above {_MAX_WIDTH}; leave it out")
        return self._budget.spend(super().format_field(value, format_spec))


class _Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self._end = time.monotonic() + MAX_SECONDS
        self._characters = MAX_CHARACTERS
        self._steps = MAX_STEPS

    def spend(self, text: str) -> str:
        """The text, which becomes part of the result."""
        self._characters -= len(text)
        self.check(-self._characters, "gives", above=0)
        return text

    def check(self, size: int, does: str = "builds", *, above: int = MAX_CHARACTERS) -> None:
        """Raise ConfigError for a text of more characters than are allowed, or when the time is up."""
        if size > above:
            raise ConfigError(f"the template {does} more than {MAX_CHARACTERS:,} characters; make it shorter")
        if time.monotonic() > self._end:
            raise ConfigError(f"the template takes longer than {MAX_SECONDS:g} s; leave out its loops")

    def steps(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop."""
        for item in items:
            self._steps -= 1
            if self._steps < 0:
                raise ConfigError(f"the template's loops take more than {MAX_STEPS:,} steps; leave them out")
            self.check(0)
            yield item

    def join(self, value: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
        """Jinja's ``join`` of the items, or of one attribute of each."""
        if attribute is not None:
            raise ConfigError("the template joins by an attribute; write a loop instead")
        parts = [str(item) for item in self.steps(value)]
        separator = str(separator)
        self.check(sum(map(len, parts)) + len(separator) * len(parts))
        return separator.join(parts)

    def replace(self, text: Any, old: str, new: str) -> str:
        """Jinja's ``replace``."""
        text, old, new = str(text), str(old), str(new)
        self.check(len(text) + text.count(old) * len(new))
        return text.replace(old, new)

    def timed(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a filter."""
        self.check(0)
        found = function(*args, **kwargs)
        if isinstance(found, str):
            self.check(len(found))
        return found


def _render_jinja(template: str, values: Mapping[str, Any]) -> str:
    """A jinja template filled in. Raises ConfigError for one that is wrong, goes beyond the bounds, or asks for a
    value that is not given."""
    import jinja2  # heavy, and few templates need it

    budget = _Budget()
    environment = _environment()(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, optimized=False)
    known = {name: environment.filters[name] for name in _FILTERS}
    # Those that take jinja's context as their first argument cannot be wrapped.
    environment.filters = {
        name: partial(budget.timed, function) if getattr(function, "jinja_pass_arg", None) is None else function
        for name, function in known.items()
    } | {"join": budget.join, "replace": budget.replace, _STEPS: budget.steps}
    environment.globals = {"range": environment.globals["range"]}
    try:
        tree = _checked(environment.parse(template))
        return "".join(map(budget.spend, environment.from_string(tree).generate(dict(values))))
    # Jinja's filters check their arguments by assertions, too.
    except (jinja2.TemplateError, ArithmeticError, AssertionError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the template cannot be rendered: {error}") from error


_STEPS = "steps of a loop"
"""A name that no template can write."""


def _checked(tree: jinja2.nodes.Template) -> jinja2.nodes.Template:
    """The tree, with its loops bounded. Raises ConfigError for what a template may not use."""
    from jinja2 import nodes

    for node in list(tree.find_all(nodes.Node)):
        kind = type(node).__name__
        if kind not in _NODES:
            raise _refused(node, kind)
        if isinstance(node, nodes.Filter) and (node.name not in _FILTERS or node.node is None):
            raise _refused(node, f"the filter {node.name}")
        if isinstance(node, nodes.Filter) and node.name in _WITH_WIDTHS and not _has_small_arguments(node):
            raise _refused(node, f"the filter {node.name} with such an argument")
        if isinstance(node, nodes.Call) and not _may_be_called(node):
            raise _refused(node, "this call")
        if isinstance(node, nodes.Assign) and not isinstance(node.target, nodes.Name):
            raise _refused(node, "set of several names")
        if isinstance(node, nodes.List | nodes.Tuple) and not _is_plain(node):
            raise _refused(node, "a list of values")
        if isinstance(node, nodes.Pair) and not isinstance(node.value, nodes.Const):
            raise _refused(node, "a dict of values")
        if isinstance(node, nodes.For):
            node.iter = nodes.Filter(
                node.iter, _STEPS, [], [], None, None, lineno=node.lineno, environment=tree.environment
            )
    return tree


def _is_plain(node: jinja2.nodes.List | jinja2.nodes.Tuple) -> bool:
    """Whether it holds constants alone, or is what a loop assigns to: lists of lists of values grow without end."""
    from jinja2 import nodes

    return getattr(node, "ctx", "load") == "store" or all(
        isinstance(item, nodes.Const) or (isinstance(item, nodes.List | nodes.Tuple) and _is_plain(item))
        for item in node.items
    )


def _has_small_arguments(node: jinja2.nodes.Filter) -> bool:
    from jinja2 import nodes

    arguments = [*node.args, *(argument.value for argument in node.kwargs)]
    return (node.dyn_args or node.dyn_kwargs) is None and all(
        isinstance(item, nodes.Const) and (not isinstance(item.value, int) or 0 <= item.value <= _MAX_WIDTH)
        for item in arguments
    )


def _may_be_called(call: jinja2.nodes.Call) -> bool:
    from jinja2 import nodes

    if call.dyn_args is not None or call.dyn_kwargs is not None:
        return False
    if isinstance(call.node, nodes.Getattr):
        return call.node.attr in _METHODS
    return isinstance(call.node, nodes.Name) and call.node.name == "range"


def _refused(node: jinja2.nodes.Node, what: str) -> ConfigError:
    return ConfigError(
        f"line {node.lineno} of the template uses {what}, which templates may not; they have output, if, for, set, "
        f"tests, and the filters {', '.join(sorted(_FILTERS))}"
    )


@cache
def _environment() -> Any:
    """Jinja's sandbox, with arithmetic on numbers alone."""
    import jinja2.sandbox

    class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            for value in (left, right):
                if not isinstance(value, int | float) or abs(value) > _MAX_NUMBER:
                    raise ConfigError(f"the template's {operator} has an operand that is no number up to {_MAX_NUMBER}")
            return super().call_binop(context, operator, left, right)

    return Environment
