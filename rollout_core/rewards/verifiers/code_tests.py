"""The tests' side of unit tests: it runs them against a program that lives elsewhere, and says which have passed.

Each line that it writes is one of JSON: how many cases a text of tests has, and then, case by case, whether it passed.
"""

import ast
import builtins
import importlib
import json
import math
import os
import sys
import types
import unittest
from typing import IO, TypeGuard

from rollout_core.rewards.verifiers.code_peer import Peer, Remote

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


def say(**fields):
    """A line of the verdict."""
    VERDICT.write(json.dumps(fields) + "\n")
    VERDICT.flush()


def names_of(peer):
    """What the program has, by name; of its modules, this interpreter's own."""
    said = peer.receive()
    if "names" not in said:
        return None, str(said.get("failed"))
    names = {str(name): peer.decode(value) for name, value in said["names"]}
    for name, module in said.get("modules", {}).items():
        if str(module).partition(".")[0] in sys.stdlib_module_names:
            names[str(name)] = importlib.import_module(module)
    used = Names(TESTS)
    for name in used.modules & sys.stdlib_module_names:
        names[name] = importlib.import_module(name)
    # A function of the program's that is named `sorted` or `isclose` would judge its own results.
    names = {name: value for name, value in names.items() if name == ENTRY_POINT or not judges(name)}
    classes = {name for name in used.mentioned if name[:1].isupper() and isinstance(names.get(name), Remote)}
    peer.plain_only = not classes if OBJECTS is None else not OBJECTS
    return {"isclose": math.isclose} | names, ""


def judges(name):
    """Whether tests use a function of this name to say what is right."""
    return hasattr(builtins, name) or name in ("isclose", "allclose", "array_equal", "approx", "raises", "deepcopy")


class Names:
    """Which names the tests take from elsewhere."""

    def __init__(self, texts):
        self.mentioned, self.modules, defined = set(), set(), set()
        for text in texts:
            try:
                tree = ast.parse(text)
            except (SyntaxError, ValueError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Name):
                    (self.mentioned if isinstance(node.ctx, ast.Load) else defined).add(node.id)
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    self.modules.add(node.value.id)
                    if node.value.id == "solution":
                        self.mentioned.add(node.attr)
                elif isinstance(node, ast.ImportFrom):
                    (self.mentioned if node.module == "solution" else defined).update(a.name for a in node.names)
                elif isinstance(node, ast.ClassDef | ast.FunctionDef):
                    defined.add(node.name)
        self.mentioned -= defined
        self.modules -= defined


def cases_of(text, names):
    """Name and function of each case of a text: its functions ``test_*``, its test classes' methods, its ``check``; of
    a text with none of these, the text itself, which is then run by that case."""
    namespace = dict(names, __name__="tests")
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
    new = {name: value for name, value in namespace.items() if before.get(name) is not value}
    cases = []
    for name, value in new.items():
        if _is_test_case(value):
            cases += [
                (f"{name}.{test}", method_case(value, test)) for test in unittest.TestLoader().getTestCaseNames(value)
            ]
        elif isinstance(value, type) and name.startswith("Test"):
            methods = [test for test in vars(value) if test.startswith("test")]
            cases += [(f"{name}.{test}", lambda value=value, test=test: getattr(value(), test)()) for test in methods]
        elif isinstance(value, types.FunctionType) and name.startswith("test"):
            cases.append((name, value))
        elif isinstance(value, types.FunctionType) and name == "check" and "candidate" in namespace:
            cases.append((name, lambda check=value: check(namespace["candidate"])))
    return cases or [("asserts", lambda: None)]


def _is_test_case(value) -> TypeGuard[type[unittest.TestCase]]:
    return isinstance(value, type) and issubclass(value, unittest.TestCase)


def method_case(kind, test):
    """A function that raises where this test of a class does not pass."""

    def run():
        result = unittest.TestResult()
        kind(test).run(result)
        for _, text in [*result.failures, *result.errors]:
            raise AssertionError(text.strip().splitlines()[-1])
        if result.unexpectedSuccesses:
            raise AssertionError("an unexpected success")

    return run


def main():
    """Run them all."""
    peer = Peer(3, may_look=False)
    try:
        names, failed = names_of(peer)
    except Exception as error:  # noqa: BLE001 - the program's word may be anything
        names, failed = None, f"{type(error).__name__}: {error}"
    if names is None:
        return say(failed=failed[:500])
    module = types.ModuleType("solution")
    module.__dict__.update(names)
    sys.modules["solution"] = module
    for number, text in enumerate(TESTS):
        if number < FIRST:
            continue
        try:
            cases = cases_of(text, names)
        except Exception as error:  # noqa: BLE001 - of the tests, or of the program by their call
            say(text=number, cases=1)
            say(text=number, passed=False, reason=f"{type(error).__name__}: {error}"[:300])
            if peer.is_lost:
                return None
            if STOPS:
                return say(done=True)
            continue
        say(text=number, cases=len(cases))
        for name, case in cases:
            peer.complaint = None
            try:
                case()
                reason = peer.complaint
            except BaseException as error:  # noqa: BLE001 - so does a test fail
                reason = f"{type(error).__name__}: {error}"
            if peer.is_lost and reason is None:
                reason = "the program was lost"
            say(text=number, passed=reason is None, reason=f"{name}: {reason}"[:300])
            if peer.is_lost:
                return None
            if STOPS and reason is not None:
                return say(done=True)
    return say(done=True)


if __name__ == "__main__":
    VERDICT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with open("tests.json", encoding="utf-8") as _file:
        TESTS, ENTRY_POINT, OBJECTS, STOPS, FIRST = json.load(_file)
    main()
