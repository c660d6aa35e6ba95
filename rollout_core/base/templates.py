"""Jinja templates that other people or models wrote, filled in within bounds.

A template cannot look into the objects behind its values, takes no longer than ``MAX_SECONDS`` and gives no more than
``MAX_CHARACTERS``, whatever it says. Of jinja it may use output, ``if``, ``for`` and ``set``, tests, the filters and
methods named below, arithmetic on numbers, and ``~`` and ``+`` of texts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

from rollout_core.base.errors import ConfigError

if TYPE_CHECKING:
    import jinja2.nodes

MAX_CHARACTERS = 32_000_000
"""Of what a template gives, values included."""
MAX_STEPS = 100_000
"""Of all loops of a template together."""
MAX_BUILT = 4 * MAX_CHARACTERS
"""Of all texts that it makes on the way."""
MAX_SECONDS = 5.0
COMPILED = 64
"""Templates that are kept compiled: compiling takes a hundred times as long as filling in."""

_MAX_NUMBER = 10**15


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


_NODES = _names(
    "Template Output TemplateData Name Const For If CondExpr Compare Operand And Or Not Neg Pos Test Filter Getattr "
    "Getitem Slice Tuple List Dict Pair Keyword Call Assign Add Sub Mul Div FloorDiv Mod Concat"
)
_FILTERS = _names(
    "abs capitalize count d default dictsort e escape first float int items join last length list lower max min "
    "replace reverse round sort string sum title tojson trim truncate unique upper wordcount"
)
_WITH_WIDTHS = _names("round tojson truncate")
"""Of them, those that a number makes take any time or memory."""
MAX_WIDTH = 999
_METHODS = _names("items keys values get upper lower strip title capitalize startswith endswith")
_STEPS, _CONCAT = "steps of a loop", "texts behind each other"
"""Names of filters that no template can write."""


class Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self._end = time.monotonic() + MAX_SECONDS
        self._characters, self._built = MAX_CHARACTERS, MAX_BUILT
        self._steps = MAX_STEPS

    def spend(self, text: str) -> str:
        """The text, which becomes part of the result."""
        self._characters -= len(text)
        self.check(-self._characters, "gives", above=0)
        return text

    def build(self, size: int) -> None:
        """Raise ConfigError for a text of more characters than are allowed, on the way or in all."""
        self._built -= size
        self.check(size)
        if self._built < 0:
            raise ConfigError(f"the template builds more than {MAX_BUILT:,} characters in all; make it shorter")

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
        self.build(sum(map(len, parts)) + len(separator) * len(parts))
        return separator.join(parts)

    def replace(self, text: Any, old: str, new: str) -> str:
        """Jinja's ``replace``."""
        text, old, new = str(text), str(old), str(new)
        self.build(len(text) + text.count(old) * len(new))
        return text.replace(old, new)

    def concatenated(self, parts: Iterable[Any]) -> str:
        """Jinja's ``~``."""
        texts = [str(part) for part in parts]
        self.build(sum(map(len, texts)))
        return "".join(texts)


_budget: ContextVar[Budget] = ContextVar("budget")
"""Of the rendering under way."""


class BoundedTemplate:
    """A template, compiled. Raises ConfigError for one that is wrong, or uses what templates may not."""

    def __init__(self, text: str) -> None:
        import jinja2  # slow to import, and few programs have templates

        environment = _environment()
        try:
            self._template = environment.from_string(_checked(environment.parse(text)))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the text is no Jinja template: {error.message} (line {error.lineno})") from error
        except RecursionError as error:
            raise ConfigError("the template cannot be read: it is nested too deeply") from error

    def render(self, values: Mapping[str, Any]) -> str:
        """The template with values. Raises ConfigError where it cannot be filled in with these, or not within the
        bounds; from ``jinja2.UndefinedError`` where it reads what they have not."""
        budget = Budget()
        token = _budget.set(budget)
        try:
            return "".join(map(budget.spend, self._template.generate(dict(values))))
        except ConfigError:
            raise
        except Exception as error:  # whatever a template does with values
            raise ConfigError(f"the template cannot be rendered: {error}") from error
        finally:
            _budget.reset(token)


@lru_cache(maxsize=COMPILED)
def compiled(text: str) -> BoundedTemplate:
    """The template. Raises ConfigError as it does."""
    return BoundedTemplate(text)


def parsed(text: str) -> jinja2.nodes.Template:
    """The template's tree, such as for the names that it reads. Raises ``jinja2.TemplateSyntaxError``."""
    return _environment().parse(text)


@cache
def variables_of(template: str) -> frozenset[str]:
    """All names that the template reads. Raises ``jinja2.TemplateSyntaxError``."""
    from jinja2 import meta

    return frozenset(meta.find_undeclared_variables(parsed(template)) - _environment().globals.keys())


def _checked(tree: jinja2.nodes.Template) -> jinja2.nodes.Template:
    """The tree, with its loops and texts bounded. Raises ConfigError for what a template may not use."""
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
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _filtered(tree, loop.iter, _STEPS)
    for both in list(tree.find_all(nodes.Concat)):
        # Its parts become the one list that the filter takes.
        both.nodes = [_filtered(tree, nodes.List(both.nodes, lineno=both.lineno), _CONCAT)]
    return tree


def _filtered(tree: jinja2.nodes.Template, node: jinja2.nodes.Node, name: str) -> jinja2.nodes.Filter:
    from jinja2 import nodes

    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=tree.environment)


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
        isinstance(item, nodes.Const) and (not isinstance(item.value, int) or 0 <= item.value <= MAX_WIDTH)
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
    """Jinja's sandbox, with arithmetic on numbers and ``+`` of texts alone."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "+" and isinstance(left, str) and isinstance(right, str):
                return _budget.get().concatenated((left, right))
            for value in (left, right):
                if not isinstance(value, int | float) or abs(value) > _MAX_NUMBER:
                    raise ConfigError(f"the template's {operator} has an operand that is no number up to {_MAX_NUMBER}")
            return super().call_binop(context, operator, left, right)

    # Constants are not computed while a template is compiled, when nothing bounds them.
    environment = Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, optimized=False)
    known = {name: environment.filters[name] for name in _FILTERS}
    # Those that take jinja's context as their first argument cannot be wrapped.
    environment.filters = {
        name: partial(_timed, function) if getattr(function, "jinja_pass_arg", None) is None else function
        for name, function in known.items()
    } | {
        "join": lambda *args, **kwargs: _budget.get().join(*args, **kwargs),
        "replace": lambda *args, **kwargs: _budget.get().replace(*args, **kwargs),
        _STEPS: lambda items: _budget.get().steps(items),
        _CONCAT: lambda parts: _budget.get().concatenated(parts),
    }
    environment.globals = {"range": environment.globals["range"]}
    return environment


def _timed(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a filter."""
    budget = _budget.get()
    budget.check(0)
    found = function(*args, **kwargs)
    if isinstance(found, str):
        budget.build(len(found))
    return found
