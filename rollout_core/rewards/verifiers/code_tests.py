"""The tests' side of unit tests: it runs them against a program that lives elsewhere, and says which have passed.

Each line that it writes is one of JSON: how many cases a text of tests has, and then, case by case, whether it passed.
Where a text can judge no program, it says ``unusable`` before the program has said anything.
"""

import ast
import builtins
import importlib
import importlib.util
import json
import keyword
import math
import os
import sys
import types
import unittest
from collections.abc import Iterator
from typing import IO, TypeGuard

from rollout_core.rewards.verifiers.code_peer import Lost, Peer, Remote

VERDICT: IO[str]
"""Where it says so; what the tests print goes elsewhere."""
TESTS: list[str]
ENTRY_POINT: str | None
OBJECTS: bool | None
"""Whether the program may answer with objects of its own; None: where the tests name a class of it."""
STOPS: bool
"""Whether the first case that fails is the last."""
FIRST: int
"""The text to begin with."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_IDLE = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Pass, _Function, ast.ClassDef)
"""Statements that test nothing."""


class Unusable(Exception):
    """Tests that say nothing about any program."""


def say(**fields):
    """A line of the verdict."""
    VERDICT.write(json.dumps(fields) + "\n")
    VERDICT.flush()


# What can be said of a text without the program


def check_text(text: str) -> ast.Module:
    """The parsed text. Raises Unusable where it would fail, or test nothing, whatever the program is."""
    try:
        tree = ast.parse(text)
        compile(text, "tests.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unusable(f"they are no Python: {type(error).__name__}: {error}") from None
    for name in _imported(tree):
        if name != "solution" and not _is_module(name):
            raise Unusable(f"they import {name}, which the sandbox does not have; expected the standard library alone")
    cases = list(_case_definitions(tree))
    for function, in_class in cases:
        _check_function(function, in_class)
    if not cases and not runs_itself(tree) and not any(isinstance(node, ast.ClassDef) for node in tree.body):
        raise Unusable("they have no case: no assert, no function test_*, no test class, no check(candidate)")
    names = [function.name for function, in_class in cases if not in_class]
    if names == ["check"] and ENTRY_POINT is None and not runs_itself(tree):
        raise Unusable("check(candidate) is called with the function that the row's entry point names; it has none")
    return tree


def _is_module(name: str) -> bool:
    if name in sys.stdlib_module_names or name in sys.modules:
        return True
    return importlib.util.find_spec(name) is not None


def _imported(tree: ast.AST) -> Iterator[str]:
    """First names of modules that are imported without a way out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif not isinstance(node, ast.Try):
            yield from _imported(node)


def _case_definitions(tree: ast.Module) -> Iterator[tuple[_Function, ast.ClassDef | None]]:
    for node in tree.body:
        if isinstance(node, _Function) and (node.name.startswith("test") or node.name == "check"):
            if not is_helper(node, tree):
                yield node, None
        elif isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or _derives(node, "TestCase")):
            for inner in node.body:
                if isinstance(inner, _Function) and inner.name.startswith("test"):
                    yield inner, node


def is_helper(function: _Function, tree: ast.Module) -> bool:
    """Whether the text itself calls it, with arguments."""
    return bool(_needed(function)) and any(
        isinstance(node, ast.Name) and node.id == function.name and isinstance(node.ctx, ast.Load)
        for node in ast.walk(tree)
    )


def _needed(function: _Function) -> int:
    """How many arguments it has to be given."""
    given, defaults = function.args, function.args.defaults
    return len(given.posonlyargs) + len(given.args) - len(defaults) + given.kw_defaults.count(None)


def _derives(node: ast.ClassDef, name: str) -> bool:
    return any(ast.unparse(base).endswith(name) for base in node.bases)


def _check_function(function: _Function, in_class: ast.ClassDef | None) -> None:
    if function.decorator_list:
        return  # what is called is something else
    is_awaited = in_class is not None and _derives(in_class, "IsolatedAsyncioTestCase")
    if isinstance(function, ast.AsyncFunctionDef) and not is_awaited:
        raise Unusable(f"{function.name} is a coroutine, which nobody awaits; call asyncio.run within a plain function")
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(function)):
        raise Unusable(f"{function.name} is a generator, which nobody runs; expected a plain function")
    if in_class is None and function.name != "check" and _needed(function):
        raise Unusable(f"{function.name} takes arguments, and there are no fixtures; expected none")


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Of a function, without those of functions in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, _Function | ast.Lambda):
            yield node
            yield from _own_nodes(node)


def runs_itself(tree: ast.Module) -> bool:
    """Whether the text does something besides defining."""
    return any(
        not isinstance(node, _IDLE)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))
        for node in tree.body
    )


class Names:
    """Which names texts take from elsewhere."""

    def __init__(self, trees):
        self.mentioned, self.attributes, self.called, bound = set(), {}, None, set()
        for tree in trees:
            calls = set()
            for node in ast.walk(tree):
                match node:
                    case ast.Name():
                        (self.mentioned if isinstance(node.ctx, ast.Load) else bound).add(node.id)
                    case ast.Attribute(value=ast.Name(id=name)):
                        self.attributes.setdefault(name, set()).add(node.attr)
                    case ast.Call(func=ast.Name(id=name)):
                        calls.add(name)
                    case ast.ImportFrom(module="solution"):
                        self.mentioned.update(alias.name for alias in node.names)
                    case ast.Import() | ast.ImportFrom():
                        bound.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
                    case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.ExceptHandler():
                        bound.add(node.name)
                    case ast.arg():
                        bound.add(node.arg)
            self.called = calls if self.called is None else self.called & calls
        self.mentioned |= self.attributes.pop("solution", set())
        self.mentioned -= bound
        self.attributes = {name: found for name, found in self.attributes.items() if name not in bound}

    def meant(self):
        """The name that the texts mean by a built-in function's: the entry point, or the one built-in function that all
        of them call where they use no other name of a program."""
        called = (self.called or set()) & self.mentioned
        if ENTRY_POINT is None and len(called) == 1 and all(hasattr(builtins, name) for name in self.mentioned):
            return called.pop()
        return ENTRY_POINT


def judges(name):
    """Whether tests use a function of this name to say what is right."""
    return hasattr(builtins, name) or name in ("isclose", "allclose", "array_equal", "approx", "raises", "deepcopy")


# The program's names


def names_of(peer):
    """What the program has, by name; of its modules, this interpreter's own."""
    said = peer.receive()
    if "names" not in said:
        return None, str(said.get("failed"))
    names = {str(name): peer.decode(value) for name, value in said["names"]}
    for name, module in said.get("modules", {}).items():
        if str(module).partition(".")[0] in sys.stdlib_module_names:
            names[str(name)] = importlib.import_module(module)
    return {name: value for name, value in names.items() if _is_name(name)}, ""


def _is_name(name):
    """Whether a program may have it for the tests; ``__builtins__`` would be the built-in functions of theirs."""
    return name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__")


def for_tests(names, used, peer):
    """Those of the program's names that tests use without importing them. A function of the program's that is named
    `sorted` or `isclose` would judge its own results, and so would a module."""
    meant = used.meant()
    known = {name: value for name, value in names.items() if name == meant or not judges(name)}
    for name in used.attributes.keys() & sys.stdlib_module_names - {meant}:
        module = importlib.import_module(name)
        if all(hasattr(module, attribute) for attribute in used.attributes[name]):
            known[name] = module
    classes = {name for name in used.mentioned if name[:1].isupper() and isinstance(names.get(name), Remote)}
    peer.plain_only = not classes if OBJECTS is None else not OBJECTS
    return {"isclose": math.isclose} | known


# Cases


def cases_of(text, tree, names):
    """Name and function of each case of a text: its functions ``test_*``, its test classes' methods, its ``check``; of
    a text with none of these, the text itself, which is then run by that case."""
    module = types.ModuleType("tests")
    sys.modules["tests"] = module  # where unittest and dataclasses look for what belongs to a class
    namespace = module.__dict__
    namespace.update(names)
    namespace["__builtins__"] = builtins
    if ENTRY_POINT is not None:
        if ENTRY_POINT not in names:
            raise NameError(f"the program has no {ENTRY_POINT!r}")
        namespace["candidate"] = names[ENTRY_POINT]
    code = compile(text, "tests.py", "exec", dont_inherit=True)
    defines = [name for name in code.co_names if name.startswith("test") or name.startswith("Test") or name == "check"]
    if not defines and "TestCase" not in code.co_names:
        return [("asserts", lambda: exec(code, namespace))]
    before = dict(namespace)
    exec(code, namespace)
    helpers = {node.name for node in tree.body if isinstance(node, _Function) and is_helper(node, tree)}
    new = {name: value for name, value in namespace.items() if before.get(name) is not value and name not in helpers}
    cases = []
    for name, value in new.items():
        if _is_test_case(value):
            cases += [
                (f"{name}.{test}", method_case(value, test)) for test in unittest.TestLoader().getTestCaseNames(value)
            ]
        elif isinstance(value, type) and name.startswith("Test"):
            methods = [test for test in dir(value) if test.startswith("test") and callable(getattr(value, test))]
            cases += [(f"{name}.{test}", plain_case(value, test)) for test in methods]
        elif isinstance(value, types.FunctionType) and name.startswith("test"):
            cases.append((name, value))
        elif isinstance(value, types.FunctionType) and name == "check" and "candidate" in namespace:
            cases.append((name, lambda check=value: check(namespace["candidate"])))
    if not cases and not runs_itself(tree):
        raise Unusable("they have no case: no assert, no function test_*, no method test* of a test class")
    return cases or [("asserts", lambda: None)]


def _is_test_case(value) -> TypeGuard[type[unittest.TestCase]]:
    return isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == "tests"


def method_case(kind, test):
    """A function that raises where this test of a class does not pass."""

    def run():
        result = unittest.TestResult()
        unittest.TestSuite([kind(test)]).run(result)  # with what is set up for the class
        for _, text in [*result.failures, *result.errors]:
            raise AssertionError(text.strip().splitlines()[-1])
        if result.unexpectedSuccesses:
            raise AssertionError("an unexpected success")
        for _, reason in result.skipped:
            raise AssertionError(f"it was skipped: {reason}")

    return run


def plain_case(kind, test):
    """As `method_case`, of a class as pytest has them."""

    def run():
        instance = kind()
        method = getattr(instance, test)
        _fixture(kind, "setup_class", kind)
        try:
            _fixture(instance, "setup_method", method)
            try:
                return method()
            finally:
                _fixture(instance, "teardown_method", method)
        finally:
            _fixture(kind, "teardown_class", kind)

    return run


def _fixture(owner, name, argument):
    """Call it where there is one, with what it takes."""
    found = getattr(owner, name, None)
    if found is not None:
        function = getattr(found, "__func__", found)
        num_taken = function.__code__.co_argcount - (function is not found)
        found(*[argument][:num_taken])


def run_text(peer, number, text, tree, names):
    """Run the cases of a text, as far as the program lives; whether all have passed."""
    cases = []

    def load():
        cases.extend(cases_of(text, tree, names))

    reason = _reason(peer, load)
    say(text=number, cases=len(cases) or 1)
    if reason is not None:
        say(text=number, passed=False, reason=reason, lost=peer.is_lost)
        return False
    passed = True
    for name, case in cases:
        reason = _reason(peer, case)
        passed = passed and reason is None
        say(text=number, passed=reason is None, reason=f"{name}: {reason}", lost=peer.is_lost)
        if peer.is_lost or (STOPS and not passed):
            return False
    return passed


def _reason(peer, function):
    """Why what a function tests is not so; None where it is. Raises Unusable where that is no fault of the program."""
    peer.complaint = None
    try:
        found = function()
        if isinstance(found, types.CoroutineType | types.GeneratorType):
            raise Unusable(f"a test returns a {type(found).__name__}, which nobody runs")
        reason = peer.complaint
    except Unusable:
        raise
    except BaseException as error:  # noqa: BLE001 - so does a test fail, by itself or by the program
        reason = _described(error)
    if peer.refused:
        raise Unusable(peer.refused)
    return "the program was lost" if peer.is_lost and reason is None else reason


def _described(error):
    return f"{type(error).__name__}: {error}"[:300]


def main():
    """Run them all."""
    number = 0
    try:
        trees = []
        for number in range(len(TESTS)):
            trees.append(check_text(TESTS[number]))
        peer = Peer(3, may_look=False)
        try:
            names, failed = names_of(peer)
        except Lost as error:
            return say(failed=str(error), lost=True)
        except Exception as error:  # noqa: BLE001 - the program's word may be anything
            names, failed = None, _described(error)
        if names is None:
            return say(failed=failed[:500])
        module = types.ModuleType("solution")
        module.__dict__.update(names)
        sys.modules["solution"] = module
        known = for_tests(names, Names(trees), peer)
        for number in range(FIRST, len(TESTS)):
            passed = run_text(peer, number, TESTS[number], trees[number], known)
            if peer.is_lost:
                return None
            if STOPS and not passed:
                break
    except Unusable as error:
        return say(unusable=f"text {number}: {error}")
    return say(done=True)


if __name__ == "__main__":
    VERDICT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with open("tests.json", encoding="utf-8") as _file:
        TESTS, ENTRY_POINT, OBJECTS, STOPS, FIRST = json.load(_file)
    main()
