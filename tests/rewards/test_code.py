"""Programs against cases of input and output, and against unit tests that live elsewhere."""

from __future__ import annotations

import re
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
    grade = graded(sandbox, "def add(a, b): return a + b", "assert add(1, 2) == 3", "assert add(1, 2) == 4", "sub(1)")
    assert grade.passed == (True, False, False)
    assert grade.reasons[1].startswith("asserts: AssertionError")
    assert grade.reasons[2] == "asserts: NameError: name 'sub' is not defined"


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
import collections, datetime, decimal, fractions
values = [None, True, 1, -2**70, 0.1, float("inf"), 1j, "ü\\ud800", b"\\xff", [1, [2]], (1, (2,)), {1, 2}]
values += [frozenset({3}), {"a": {1: None}, (1, 2): 3}, range(3), bytearray(b"a")]
values += [fractions.Fraction(1, 3), decimal.Decimal("0.10"), collections.deque([1, (2,)], 3)]
values += [datetime.date(2020, 2, 29), datetime.time(1, 2), datetime.timedelta(-1, 3)]
values += [datetime.datetime(2020, 1, 2, 3, 4, 5, 6, datetime.timezone.utc), collections.Counter("aab")]
values += [collections.OrderedDict([(2, 1), (1, 2)]), collections.defaultdict(list, {1: [2]})]
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
    def twice(self): return self + self
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
assert a + b == Point(4, 6) and a != b and a.twice() == Point(2, 4)
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


FORGED = """
class A:
    def __getattr__(self, name): raise AttributeError(name)
    def __sub__(self, other): return 0.0
    __rsub__ = __add__ = __radd__ = __mod__ = __sub__
    def __abs__(self): return 0.0
    def __contains__(self, item): return True
    def __eq__(self, other): seen.append(other); return True
    def __lt__(self, other): seen.append(other); return True
    __gt__ = __le__ = __ge__ = __lt__
    def __instancecheck__(self, other): seen.append(other); return True
    def __round__(self, n=0): return seen[-1] if seen else 0
    __float__ = __int__ = __round__
seen = []
def asked(): return len(seen)
def f(x): return A()
def g(x): return [A()]
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert abs(f(3.5) - 0.5) < 1e-6",
        "assert abs(0.5 - f(3.5)) < 1e-6",
        "assert 5 in f(3)",
        "assert sum(g(1)) == 3",
        "assert f(1) % 7 == 0",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertAlmostEqual(f(1), 0.5)",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertIn(5, f(1))",
        "assert 5 == f(1)\nassert round(f(1)) == 5",
        "assert isinstance(5, f(1))",
        "import math\nassert math.isclose(f(1), 831)",
    ],
)
def test_no_object_of_a_program_is_asked_with_what_is_expected(sandbox: Sandbox, test: str):
    for objects in (None, True):
        grade = graded(sandbox, FORGED, test, "assert asked() == 0", objects=objects)
        assert grade.passed == (False, True), grade.reasons


def test_a_named_tuple_has_no_functions_that_answer_for_it(sandbox: Sandbox):
    source = """
import collections
Text = collections.namedtuple("Text", "startswith count index lower")
def yes(*arguments): return 2
def f(x): return Text(yes, yes, yes, yes)
"""
    tests = ["assert f(1).startswith('831')", "assert f(1).count(5) == 2", "assert f(1).index(5) == 2", "f(1).lower()"]
    assert graded(sandbox, source, *tests).passed == (False,) * 4


def test_a_program_replaces_no_built_in_function_of_the_tests(sandbox: Sandbox):
    source = """
import rollout_core.rewards.verifiers.code_peer as peer
real = peer.Peer.send
def send(self, message):
    if "names" in message:
        forged = self.encode({"abs": lambda x: 0.0, "all": lambda x: True, "set": lambda x: 0, "list": list})
        for name in ("__builtins__", "__name__", "a b", "None", "__loader__"):
            message["names"].append([name, forged])
    return real(self, message)
peer.Peer.send = send
abs = all = lambda x: 0
def f(x): return 1e9
"""
    tests = ["assert abs(f(3.5) - 0.5) < 1e-6", "assert all(f(i) == i for i in [1, 2])", "assert {f(1)} == set([2])"]
    assert graded(sandbox, source, *tests).passed == (False,) * 3
    check = "def check(candidate):\n    assert abs(candidate(3.5) - 0.5) < 1e-6\n"
    assert not graded(sandbox, source, check, entry_point="f").all_passed


def test_a_function_with_a_built_in_functions_name_is_what_the_tests_mean(sandbox: Sandbox):
    source = "def pow(a, b): return 7\ndef abs(x): return 0\ndef f(x): return x"
    assert graded(sandbox, source, "assert pow(2, 3) == 7", "assert pow(1, 1) == 7").all_passed
    assert graded(sandbox, source, "from solution import pow\nassert pow(2, 3) == 7").all_passed
    assert graded(sandbox, source, "import solution\nassert solution.pow(2, 3) == 7").all_passed
    assert not graded(sandbox, source, "assert abs(f(3)) == 0").all_passed
    assert not graded(
        sandbox, source, "def check(candidate): assert abs(candidate(3)) == 0", entry_point="f"
    ).all_passed


NEVER = [
    ("def check(candidate):\n    assert candidate(1) == 2\n", "the row's entry point names; it has none"),
    ("async def test_a():\n    assert False\n", "test_a is a coroutine"),
    ("def test_a():\n    assert False\n    yield\n", "test_a is a generator"),
    ("class TestA:\n    async def test_a(self): assert False\n", "test_a is a coroutine"),
    ("import unittest\nclass A(unittest.TestCase):\n    def test_a(self): yield\n", "test_a is a generator"),
    ("x = 1\n", "they have no case"),
    ("import unittest\nif __name__ == '__main__':\n    unittest.main()\n", "they have no case"),
    ("def test_a(tmp_path):\n    assert False\n", "test_a takes arguments, and there are no fixtures"),
    ("assert f(1 == 2", "they are no Python: SyntaxError"),
    ("import pytest\ndef test_a(): assert f(1) == 2", "they import pytest, which the sandbox does not have"),
]
WHEN_RUN = [
    ("class TestA:\n    def check_a(self): assert False\n", "they have no case"),
    ("import unittest\nclass A(unittest.TestCase):\n    def run_a(self): self.fail()\n", "they have no case"),
    ("class M: pass\nassert f(M()) == 2", "the tests hand a M to the program"),
]


@pytest.mark.parametrize(("test", "message"), NEVER)
@pytest.mark.parametrize("source", ["def f(x): return x", "def f("])
def test_tests_that_can_judge_no_program_are_the_rows_fault(sandbox: Sandbox, source: str, test: str, message: str):
    with pytest.raises(ConfigError, match=f"text 1: .*{re.escape(message)}"):
        graded(sandbox, source, "assert f(1) == 1", test)


@pytest.mark.parametrize(("test", "message"), WHEN_RUN)
def test_some_are_known_once_they_run(sandbox: Sandbox, test: str, message: str):
    with pytest.raises(ConfigError, match=f"text 1: {message}"):
        graded(sandbox, "def f(x): return x", "assert f(1) == 1", test)


def test_no_program_makes_its_failure_the_rows(sandbox: Sandbox):
    for error in ("ModuleNotFoundError('pytest')", "SyntaxError('x')", "TypeError('the tests hand')"):
        assert graded(sandbox, f"def f(x): raise {error}", "assert f(1) == 1").passed == (False,)


def test_what_tests_set_up_is_set_up(sandbox: Sandbox):
    tests = """
import unittest
def setUpModule():
    global SET
    SET = 1
class Cases(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.value = 3
    def test_value(self): self.assertEqual(f(self.value), 4)
    def test_module(self): self.assertEqual(SET, 1)
    def test_skipped(self): self.skipTest("why")
class Async(unittest.IsolatedAsyncioTestCase):
    async def test_a(self): self.assertEqual(f(1), 2)
    async def test_b(self): self.assertEqual(f(1), 3)
class TestPlain:
    def setup_class(cls): cls.number = 2
    def setup_method(self, method): self.name = method.__name__
    def test_number(self): assert f(self.number) == 3 and self.name == "test_number"
"""
    grade = graded(sandbox, "def f(x): return x + 1", tests)
    assert grade.passed == (True, False, True, True, False, True), grade.reasons
    assert grade.reasons[1] == "Cases.test_skipped: AssertionError: it was skipped: why"


def test_a_text_may_call_its_own_functions(sandbox: Sandbox):
    own = "def check(f, x, y):\n    assert f(x) == y\ncheck(f, 1, 2)\n"
    tests = "def test(got, expected):\n    assert got == expected\ntest(f(1), 2)\n"
    assert graded(sandbox, "def f(x): return x + 1", own, tests).all_passed
    assert not graded(sandbox, "def f(x): return x", own, tests).share


HONEST = """
import collections, enum, typing
Pair = collections.namedtuple("Pair", "a count")
class Step(typing.NamedTuple):
    x: int
    def __add__(self, other): return Step(self.x + other.x)
    def twice(self): return self + self
class Cache(collections.OrderedDict):
    def put(self, key, value): self[key] = value
class Stack(list):
    def push(self, item): self.append(item); return self
class Color(enum.Enum):
    RED = 1
class Size(enum.IntEnum):
    BIG = 5
class Value:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x
    def __hash__(self): return hash(self.x)
    def __getitem__(self, place): return self.x[place]
    def __iter__(self): return iter(self.x)
    def __len__(self): return len(self.x)
    def double(self, n): return n * 2
    def __float__(self): return 1.5
def pair(): return Pair(1, 2)
def given(x): return x
def stack(): return Stack([1])
def add(xs): return sum(xs)
def first(xs): return next(iter(xs))
def grown(xs): xs.append(1); return xs
def color(): return Color.RED
def named(p): return p.a + p.b
def missing(): return {}[1]
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert pair() == (1, 2) == Pair(1, 2) and pair().count == 2 and {pair()} == {(1, 2)}",
        "a, b = pair()\nassert (a, b) == (1, 2) and repr(pair()) == 'Pair(a=1, count=2)' and isinstance(pair(), Pair)",
        "assert given(pair())._asdict()['a'] == 1 and isinstance(pair(), tuple) and Pair(1, 2) is not None",
        "assert pair() + pair() == (1, 2, 1, 2) and repr(pair()) == 'Pair(a=1, count=2)'",
        "assert stack() == [1] and stack()[0] == 1 and len(stack()) == 1 and sorted(stack()) == [1]",
        "assert Step(1) + Step(2) == Step(3) and Step(2).twice().x == 4",
        "c = Cache()\nc.put(1, 2)\nassert c == {1: 2} and c[1] == 2 and len(c) == 1 and 1 in c and 2 not in c",
        "assert Stack().push(3).push(4) == [3, 4] and [Stack([1])] == [[1]] and 3 in Stack([3])",
        "assert color() is Color.RED == Color(1) and Color(1).name == 'RED' and Size.BIG == 5 and Size.BIG > 4",
        "v = Value([1, 2])\nassert v.double(3) == 6 and v[1] == 2 and len(v) == 2 and 2 in v and float(v) == 1.5",
        "assert len({Value(1), Value(1)}) == 1 and Value(1) in [Value(1)] and Value(1) is not Value(1)",
        "assert add(x for x in [1, 2]) == 3 and add(iter([1, 2])) == 3 and add({1: 2}.values()) == 2",
        "import itertools\nassert first(itertools.count(4)) == 4",
        "assert given({1: 2}).items() == {1: 2}.items() and list(given({1: 2}.keys())) == [1]",
        "import collections\nP = collections.namedtuple('P', 'a b')\nassert named(P(1, 2)) == 3",
        "x = []\nassert grown(x) is x and x == [1]",
        "import collections\nx = collections.deque()\ngrown(x)\nassert x == collections.deque([1])",
        "import collections\nassert given(collections.Counter('aab')).most_common(1) == [('a', 2)]",
        "try:\n    missing()\nexcept KeyError as error:\n    assert error.args == (1,)\nelse:\n    assert False",
    ],
)
def test_what_honest_programs_give_is_judged_as_python_does(sandbox: Sandbox, test: str):
    assert graded(sandbox, HONEST, test).reasons == ("",)


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("1000001", "1000000", False),
        (str(10**30 + 1), str(10**30), False),
        ("0010", "10", True),
        ("1.0", "1", True),
        ("1000000.1", "1000000", True),
        ("NaN", "nan", True),
        ("Infinity", "inf", True),
        ("2e400", "1e400", False),
        ("1e99999999999999999999", "1", False),
        ("1_0", "10", False),
        ("inf", "1e400", False),
    ],
)
def test_whole_numbers_are_compared_exactly(sandbox: Sandbox, written: str, expected: str, same: bool):
    source = f"print({written!r})"
    cases = [IoCase("", expected)]
    assert grade_output(sandbox, source, cases, compare="numbers", limits=LIMITS).all_passed == same


@pytest.mark.parametrize("hang", ["time.sleep(600)", "while True: pass"])
@pytest.mark.parametrize("at_load", [False, True])
def test_a_program_that_hangs_has_its_limits_once_and_the_reason_says_so(
    sandbox: Sandbox, hang: str, at_load: bool, monkeypatch: pytest.MonkeyPatch
):
    source = f"import time\n{hang}" if at_load else f"import time\ndef f(x):\n    {hang}"
    wall, cpu = (1.0, 30.0) if "sleep" in hang else (60.0, 0.5)
    starts, run = [], sandbox.run_linked
    monkeypatch.setattr(sandbox, "run_linked", lambda *programs: starts.append(programs) or run(*programs))
    grade = graded(sandbox, source, *["assert f(1) == 1"] * 5, limits=Limits(wall_seconds=wall, cpu_seconds=cpu))
    assert len(starts) == 1
    limit = "wall-clock time" if "sleep" in hang else "processor time"
    assert all(reason.endswith(f"it passed its limit of {limit}") for reason in grade.reasons), grade.reasons
    assert grade.passed == (False,) * 5


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
    # With a class in the tests, methods are the program's; what is computed or found with plain values still is not.
    named = [f"p = Plain()\n{text}" for text in plain]
    assert graded(sandbox, source, *named).passed == (True, False, True, True, False)
    assert graded(sandbox, source, *plain, objects=True).passed == (True, False, True, True, False)
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


def test_a_program_that_ends_in_one_test_is_started_anew_for_the_others(sandbox: Sandbox):
    source = "import os\ndef f(x):\n    if x == 1: os._exit(0)\n    return x"
    tests = ["assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2"]
    grade = graded(sandbox, source, *tests)
    assert grade.passed == (True, False, True)
    assert grade.reasons[1] == "it ended with exit code 0 before its tests did"
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
