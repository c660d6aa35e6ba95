"""Programs against cases of input and output, and against unit tests that live elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.rewards.verifiers.code import CodeGrade, IoCase, grade_output, grade_tests
from rollout_core.sandbox import Limits, Sandbox

LIMITS = Limits(wall_seconds=60, cpu_seconds=30)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as made:
        if not made.walls().stand:
            pytest.skip(f"this machine has no sandbox: {'; '.join(made.walls().missing())}")
        yield made


def graded(sandbox: Sandbox, source: str, *tests: str, **options: object) -> CodeGrade:
    return grade_tests(sandbox, source, tests, **({"limits": LIMITS} | options))  # type: ignore[arg-type]


def test_the_share_of_cases_that_pass(sandbox: Sandbox):
    cases = [IoCase("1 2\n", "3\n"), IoCase("2 2\n", "4"), IoCase("2 3\n", "6"), IoCase("x y\n", "0")]
    grade = grade_output(sandbox, "print(sum(map(int, input().split())))", cases, limits=LIMITS)
    assert grade.passed == (True, True, False, False) and grade.share == 0.5 and not grade.all_passed
    assert grade.reasons[:3] == ("", "", "it wrote '5\\n'")
    assert grade.reasons[3].startswith("it ended with exit code 1: ValueError: invalid literal")


def test_after_a_failure_nothing_more_is_run_where_all_must_pass(sandbox: Sandbox):
    cases = [IoCase("1", "1"), IoCase("2", "0"), IoCase("3", "3")]
    grade = grade_output(sandbox, "print(input())", cases, limits=LIMITS, stop_at_failure=True)
    assert grade.reasons == ("", "it wrote '2\\n'", "not run: a case before it failed")


@pytest.mark.parametrize(
    ("compare", "written", "same"),
    [
        ("exact", "1 2\n", True),
        ("exact", "1 2", False),
        ("lines", "1 2  \n\n", True),
        ("lines", "1\n2", False),
        ("tokens", "1\n2", True),
        ("tokens", "1 3", False),
        ("numbers", "1.0000000001 2.0", True),
        ("numbers", "1.1 2", False),
        ("numbers", "nan 2", False),
        ("numbers", "1 2 3", False),
    ],
)
def test_what_counts_as_the_same_output(sandbox: Sandbox, compare, written: str, same: bool):
    source = f"import sys\nsys.stdout.write({written!r})"
    assert grade_output(sandbox, source, [IoCase("", "1 2\n")], compare=compare, limits=LIMITS).all_passed == same


def test_other_languages_have_cases_too(sandbox: Sandbox):
    assert grade_output(sandbox, "cat", [IoCase("a\n", "a\n")], language="sh", limits=LIMITS).all_passed


def test_each_text_of_asserts_is_a_case(sandbox: Sandbox):
    grade = graded(sandbox, "def add(a, b): return a + b", "assert add(1, 2) == 3", "assert add(1, 2) == 4", "add(")
    assert grade.passed == (True, False, False)
    assert grade.reasons[1].startswith("asserts: AssertionError") and grade.reasons[2].startswith("SyntaxError")


def test_functions_and_classes_of_tests_are_a_case_each(sandbox: Sandbox):
    tests = """
import unittest
from solution import Stack

def test_push():
    stack = Stack()
    stack.push(3)
    assert len(stack) == 1 and stack.items == [3] and 3 in stack and list(stack) == [3] and stack[0] == 3

def test_wrong():
    assert Stack().items == [1]

class TestPlain:
    def test_pop(self):
        stack = Stack()
        stack.push((1, 2))
        assert stack.pop() == (1, 2)

class Cases(unittest.TestCase):
    def setUp(self):
        self.stack = Stack()

    def test_empty(self):
        with self.assertRaises(IndexError):
            self.stack.pop()

    def test_equal(self):
        self.assertEqual(Stack(), self.stack)
        self.assertTrue(isinstance(self.stack, Stack))
"""
    source = """
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __contains__(self, item): return item in self.items
    def __getitem__(self, place): return self.items[place]
    def __eq__(self, other): return self.items == other.items
    def __repr__(self): return f"Stack({self.items})"
"""
    assert graded(sandbox, source, tests).passed == (True, False, True, True, True)


def test_check_gets_the_function_by_its_entry_point(sandbox: Sandbox):
    check = "def check(candidate):\n    assert candidate([3, 1]) == [1, 3]\n"
    assert graded(sandbox, "def order(x): return sorted(x)", check, entry_point="order").all_passed
    assert not graded(sandbox, "def order(x): return x", check, entry_point="order").all_passed
    assert not graded(sandbox, "def other(x): return x", check, entry_point="order").all_passed
    assert graded(sandbox, "def sorted(x): return [1, 3]", check, entry_point="sorted").all_passed


PLAIN = """
import collections, decimal, fractions
values = [None, True, 1, -2**70, 0.1, float("inf"), 1j, "ü\\ud800", b"\\xff", [1, [2]], (1, (2,)), {1, 2}]
values += [frozenset({3}), {"a": {1: None}, (1, 2): 3}, range(3), bytearray(b"a")]
values += [fractions.Fraction(1, 3), decimal.Decimal("0.10")]
def give(n): return values[n]
def same(x): return x
def counts(x): return collections.Counter(x)
def kinds(): return [type(x).__name__ for x in values]
"""


def test_plain_values_cross_as_they_are(sandbox: Sandbox):
    tests = f"""
{PLAIN.split("def give")[0]}
for number, value in enumerate(values):
    assert give(number) == value and type(give(number)) is type(value), number
    assert same(value) == value and type(same(value)) is type(value), number
assert counts("aab") == {{"a": 2, "b": 1}}
assert str(same(decimal.Decimal("0.10"))) == "0.10"
assert repr(same(-0.0)) == "-0.0" and same(float("nan")) != same(float("nan"))
"""
    source = PLAIN
    assert graded(sandbox, source, tests).reasons == ("",)


def test_what_is_no_plain_value_stays_with_the_program(sandbox: Sandbox):
    source = """
import dataclasses
@dataclasses.dataclass
class Point:
    x: int
    y: int = 0
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
    def __mul__(self, n): return Point(self.x * n, self.y * n)
    __rmul__ = __mul__
    def moved(self, dx): self.x += dx; return self
class Broken(ValueError): pass
def squares(n):
    for i in range(n): yield i * i
def each(f, xs): return [f(x) for x in xs]
def order(xs): xs.sort(); return None
def fill(d, **more): d.update(more)
def fails(text): raise Broken(text)
"""
    tests = """
a, b = Point(1, 2), Point(3, 4)
assert a + b == Point(4, 6) and a != b and 2 * a == a * 2 == Point(2, 4)
assert a.moved(2).x == 3 and a.x == 3
a.y = 7
assert a.y == 7 and repr(a) == "Point(x=3, y=7)" and f"{a}" == "Point(x=3, y=7)"
assert list(squares(4)) == [0, 1, 4, 9] and next(squares(2)) == 0
assert sum(squares(4)) == 14
assert each(lambda x: x + 1, [1, 2]) == [2, 3] and each(str, [1]) == ["1"]
xs, d = [2, 1], {}
assert order(xs) is None and xs == [1, 2]
fill(d, a=1)
assert d == {"a": 1}
try:
    fails("why")
except Broken as error:
    assert str(error) == "why" and isinstance(error, ValueError)
else:
    raise AssertionError
assert a != 3 and not a == "Point"
"""
    assert graded(sandbox, source, tests).reasons == ("",)


def test_a_plain_value_is_never_equal_to_what_only_says_so(sandbox: Sandbox):
    source = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __lt__
class Number(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def any(): return 0
def f(): return Any()
def g(): return Number(1)
def h(): return [Number(1), Any()]
def sorted(x): return [3]
"""
    tests = ["assert f() == 3", "assert 3 == f()", "assert f() < 3", "assert g() == 3", "assert h() == [3, 3]"]
    tests += ["assert sorted([1]) == [3]", "assert f() in [3]", "assert 3 in h()", "assert {3: 1}.get(f()) == 1"]
    assert graded(sandbox, source, *tests).passed == (False,) * 9


def test_objects_are_of_use_where_the_tests_name_a_class(sandbox: Sandbox):
    source = """
class Box(list):
    def holds(self, x): return True
class Plain:
    def holds(self, x): return True
    def __contains__(self, x): return True
    def __sub__(self, x): return 0
    def __len__(self): return 3
def f(x): return Plain()
def pairs(n): return zip(range(n), range(n))
def adder(n): return lambda x: x + n
"""
    plain = ["assert f(1).holds(3)", "assert 3 in f(1)", "assert len(f(1)) == 3", "assert f(1)", "assert f(1) - 3 == 0"]
    useful = ["assert list(pairs(2)) == [(0, 0), (1, 1)] and adder(2)(3) == 5 and f.__name__ == 'f'"]
    assert graded(sandbox, source, *plain, *useful).passed == (False,) * 5 + (True,)
    # With a class in the tests, methods are the program's; what computes with plain values still is not.
    named = [f"p = Plain()\n{text}" for text in plain]
    assert graded(sandbox, source, *named).passed == (True, True, True, True, False)
    assert graded(sandbox, source, *plain, objects=True).passed == (True, True, True, True, False)
    assert graded(sandbox, source, *named, objects=False).passed == (False,) * 5
    # An exception of ours is none of the program's.
    expecting = "try:\n    f(1) < 3\nexcept Exception:\n    pass\nelse:\n    assert False"
    assert not graded(sandbox, source, expecting, objects=True).all_passed


def test_names_that_judge_are_not_the_programs(sandbox: Sandbox):
    source = """
import math as m
class math:
    isclose = staticmethod(lambda *x: True)
def isclose(*x): return True
def gcd(a, b): return m.gcd(a, b)
"""
    tests = [
        "assert isclose(1, 2)",
        "assert math.isclose(1, 2)",
        "assert gcd(4, 6) == 2 and math.gcd(4, 6) == 2 and m.pi > 3",
    ]
    assert graded(sandbox, source, *tests).passed == (False, False, True)


def test_a_program_that_hangs_in_one_test_is_started_anew_for_the_others(sandbox: Sandbox):
    source = "import os\ndef f(x):\n    if x == 1: os._exit(0)\n    return x"
    tests = ["assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2"]
    grade = graded(sandbox, source, *tests)
    assert grade.passed == (True, False, True)
    assert grade.reasons[1] == "asserts: Lost: the program ended before its tests did"
    stopped = graded(sandbox, source, *tests, stop_at_failure=True)
    assert stopped.passed == (True, False, False)
    wrong = graded(sandbox, "def f(x): return 0", *tests, stop_at_failure=True)
    assert wrong.reasons == ("", "asserts: AssertionError: ", "not run: a case before it failed")


def test_what_a_program_says_of_itself_counts_for_nothing(sandbox: Sandbox):
    for source in ("import os\nos._exit(0)", "raise SystemExit(0)", "def f(", "1/0", "while True: pass"):
        grade = graded(sandbox, source, "assert f() == 1", limits=Limits(wall_seconds=60, cpu_seconds=0.3))
        assert grade.passed == (False,) and grade.reasons[0], source


def test_without_cases_there_is_no_grade(sandbox: Sandbox):
    with pytest.raises(ConfigError, match="without cases"):
        grade_output(sandbox, "", [])
    with pytest.raises(ConfigError, match="without tests"):
        grade_tests(sandbox, "", [])
