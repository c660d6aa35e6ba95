"""What a program and its unit tests, each in a sandbox of its own, say to one another: calls and plain values.

A value crosses as what it is: numbers, text, bytes, lists, tuples, sets, dictionaries, fractions and decimals. So the
tests compare values of their own, with no method of the program's. Anything else stays where it is, and the other side
has a `Remote` of it, which passes calls, attributes and operators on. Two remotes compare where they are. A remote is
never equal to a plain value, nor less or more, and computing with one gives no plain value: the program would say what
the difference to the expected number is.

Both run this file; it stands alone. Of what the tests hand over, the program may call functions, and nothing else.
"""

import builtins
import decimal
import fractions
import json
import operator
import socket
import struct
import types

MOST_BYTES = 64 * 2**20
"""Of a message."""
_NOTHING = object()
_LENGTH = struct.Struct("!I")
COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")
ARITHMETIC = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("pow", "rpow", "and", "rand", "or", "ror", "xor", "rxor", "matmul"),
)
OPERATORS = (
    *("len", "next", "getitem", "setitem", "delitem", "contains", "str", "repr", "bool", "int", "float", "index"),
    *ARITHMETIC,
    *("neg", "pos", "abs", "invert"),
    *("enter", "exit", "reversed", "round", "instancecheck"),
)
"""Special methods that a remote passes on."""
_BY_BUILTIN = ("str", "repr", "len", "bool", "int", "float", "next", "abs", "round", "reversed")
_KNOWN = {
    getattr(builtins, name): name
    for name in (
        *("int", "float", "str", "bool", "list", "tuple", "dict", "set", "frozenset", "bytes", "complex", "object"),
        *("len", "sum", "min", "max", "sorted", "abs", "any", "all"),
    )
}
"""Built-in types and functions that are the same on both sides."""


class Lost(Exception):
    """The other side is gone, or speaks otherwise."""


class NotPlain(Exception):
    """The tests would have to take the program's word for something."""


class Peer:
    """One side. ``may_look``: whether the other side may do more with what stays here than call it.

    Once ``plain_only`` is set, of what the other side hands over only functions and iterators are of use.
    """

    def __init__(self, descriptor, may_look):
        self._socket = socket.socket(fileno=descriptor)
        self._may_look = may_look
        self.is_lost = False
        self.plain_only = False
        self.complaint = None
        self._kept = {}
        self._errors = {}

    # Messages

    def send(self, message):
        """Send one."""
        try:
            content = json.dumps(message).encode()
            self._socket.sendall(_LENGTH.pack(len(content)) + content)
        except OSError as error:
            raise self._lost(f"the other side is gone: {error.strerror}") from None

    def complain(self, reason):
        """Raise, and remember it: tests that expect an exception have not seen one of the program's."""
        self.complaint = reason
        raise NotPlain(reason)

    def _lost(self, reason):
        self.is_lost = True
        return Lost(reason)

    def receive(self):
        """Wait for one."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MOST_BYTES:
            raise self._lost(f"a message of {length} bytes")
        try:
            message = json.loads(self._exactly(length))
        except (ValueError, RecursionError) as error:
            raise self._lost(f"a message that is none: {type(error).__name__}") from None
        if not isinstance(message, dict):
            raise self._lost("a message that is none")
        return message

    def _exactly(self, size):
        parts = []
        while size:
            try:
                part = self._socket.recv(min(size, 2**20))
            except OSError as error:
                raise self._lost(f"the other side is gone: {error.strerror}") from None
            if not part:
                raise self._lost("the program ended before its tests did")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    # Requests

    def ask(self, operation, target, arguments=(), named=None):
        """Have the other side do something with what it has; meanwhile it may ask this one."""
        named = named or {}
        self.send(
            {
                "do": operation,
                "with": self.encode(target),
                "arguments": [self.encode(item) for item in arguments],
                "named": [[name, self.encode(value)] for name, value in named.items()],
            }
        )
        while "do" in (message := self.receive()):
            self.answer(message)
        try:
            if "error" in message:
                raise self._error(message["error"])
            for place, changed in message.get("changed", ()):
                _change(named[place] if isinstance(place, str) else arguments[place], self.decode(changed))
            return self.decode(message["result"])
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            if "error" in message:
                raise
            raise Lost(f"an answer that is none: {type(error).__name__}") from None

    def answer(self, message):
        """Do what the other side asks, and say what came of it."""
        try:
            target = self.decode(message["with"])
            arguments = [self.decode(item) for item in message["arguments"]]
            named = {str(name): self.decode(value) for name, value in message["named"]}
            before = [(place, self._shape(item)) for place, item in [*enumerate(arguments), *named.items()]]
            result = self._do(message["do"], target, arguments, named)
            reply = {"result": self.encode(result)}
            after = dict([*enumerate(arguments), *named.items()])
            changed = [
                [place, self.encode(after[place])] for place, shape in before if shape != self._shape(after[place])
            ]
            if changed:
                reply["changed"] = changed
        except Lost:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever the other side's call raises is its answer
            reply = {"error": self._described(error)}
        self.send(reply)

    def _shape(self, item):
        """What changes with a container that a call may change."""
        return json.dumps(self.encode(item)) if isinstance(item, list | dict | set | bytearray) else None

    def _do(self, operation, target, arguments, named):
        if operation == "call":
            return target(*arguments, **named)
        if not self._may_look:
            raise TypeError("a function of the tests can be called, and nothing else")
        if operation == "iter":
            return _Kept(iter(target))
        if operation == "getattr":
            return getattr(target, *arguments)
        if operation == "setattr":
            return setattr(target, *arguments)
        if operation in _BY_BUILTIN:
            return getattr(builtins, operation)(target, *arguments)
        if operation == "instancecheck":
            return isinstance(arguments[0], target)
        if operation in ("enter", "exit"):
            return getattr(type(target), f"__{operation}__")(target, *arguments)
        if operation in OPERATORS or operation in COMPARING:
            plain = getattr(operator, f"__{operation}__", None)
            if plain is None:  # radd and its kind
                return getattr(operator, f"__{operation[1:]}__")(arguments[0], target)
            return plain(target, *arguments)
        raise TypeError(f"{operation!r} is unknown")

    # Errors

    def _described(self, error):
        kinds = [kind.__name__ for kind in type(error).__mro__]
        try:
            text = str(error)
        except BaseException:  # noqa: BLE001 - a method of the program's
            text = ""
        return [kinds, text[:10_000]]

    def _error(self, described):
        kinds, text = described
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds) or not isinstance(text, str):
            raise Lost("an error that is none")
        return self.error_class(kinds)(text)

    def error_class(self, kinds):
        """A class here of an exception there: the built-in one, or one of its name derived from that."""
        known = next((kind for kind in kinds if _is_exception(getattr(builtins, kind, None))), "Exception")
        base = getattr(builtins, known)
        if not issubclass(base, Exception):  # SystemExit and others that would end the tests
            base = RuntimeError
        elif kinds[0] == known:
            return base if base not in (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError) else ValueError
        return self._errors.setdefault(kinds[0], type(kinds[0], (_AnyArguments, base), {}))

    # Values

    def encode(self, value):
        """As JSON values."""
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind in (type, types.BuiltinFunctionType) and value in _KNOWN:
            return {"k": _KNOWN[value]}
        if isinstance(value, Remote):
            return {"yours": object.__getattribute__(value, "_number")}
        if isinstance(value, bool | int):
            return {"i": hex(int.__add__(value, 0))}
        if isinstance(value, float):
            return {"f": float.hex(value)}
        if isinstance(value, complex):
            return {"c": [float.hex(complex(value).real), float.hex(complex(value).imag)]}
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, bytes):
            return {"b": bytes.hex(value)}
        if isinstance(value, bytearray):
            return {"a": bytearray.hex(value)}
        if kind is fractions.Fraction:
            return {"q": [hex(value.numerator), hex(value.denominator)]}
        if kind is decimal.Decimal:
            return {"D": str(value)}
        if isinstance(value, tuple) and not hasattr(kind, "_fields"):
            return {"t": [self.encode(item) for item in tuple.__iter__(value)]}
        if isinstance(value, list):
            return {"l": [self.encode(item) for item in list.__iter__(value)]}
        if isinstance(value, set):
            return {"s": [self.encode(item) for item in set.__iter__(value)]}
        if isinstance(value, frozenset):
            return {"z": [self.encode(item) for item in frozenset.__iter__(value)]}
        if isinstance(value, dict):
            return {"d": [[self.encode(key), self.encode(item)] for key, item in dict.items(value)]}
        if isinstance(value, range):
            return {"r": [value.start, value.stop, value.step]}
        if kind.__module__ == "numpy" and hasattr(value, "dtype") and getattr(value, "shape", None) == ():
            return self.encode(getattr(value, "item")())  # noqa: B009 - numpy's scalars
        return self._keep(value)

    def _keep(self, value):
        if isinstance(value, _Kept):
            value = value.value
        elif not self._may_look and not callable(value):
            raise TypeError(
                f"the tests hand a {type(value).__name__} to the program; expected plain values and functions"
            )
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"x": [kind.__name__ for kind in value.__mro__]}
        self._kept[id(value)] = value  # kept alive, so that no other has its id
        return {"mine": id(value)}

    def decode(self, message):
        """Inverse of `encode`."""
        if message is None or type(message) in (bool, str):
            return message
        if type(message) is not dict or len(message) != 1:
            raise Lost("a value that is none")
        [(tag, body)] = message.items()
        if tag == "yours":
            return self._kept[body]
        if tag == "mine":
            return Remote(self, int(body), self.plain_only)
        if tag == "x":
            return self.error_class(body)
        return self._plain(tag, body)

    def _plain(self, tag, body):
        if tag in _SCALARS:
            return _SCALARS[tag](body)
        if tag in _CONTAINERS:
            return _CONTAINERS[tag]([self.decode(item) for item in body])
        if tag == "d":
            return {self.decode(key): self.decode(item) for key, item in body}
        raise Lost("a value that is none")


class _AnyArguments:
    """Of an exception class: what it is made with does not matter."""

    def __new__(cls, *arguments, **named):
        return super().__new__(cls, *arguments)

    def __init__(self, *arguments, **named):
        super().__init__(*arguments)


class _Kept:
    """What stays here whatever it is: an iterator over a list is no list."""

    def __init__(self, value):
        self.value = value


_SCALARS = {
    "i": lambda body: int(body, 16),
    "f": float.fromhex,
    "c": lambda body: complex(*map(float.fromhex, body)),
    "b": bytes.fromhex,
    "a": bytearray.fromhex,
    "q": lambda body: fractions.Fraction(int(body[0], 16), int(body[1], 16)),
    "D": decimal.Decimal,
    "k": lambda body: getattr(builtins, body) if body in _KNOWN.values() else None,
    "r": lambda body: range(*map(int, body)),
}
_CONTAINERS = {"t": tuple, "l": list, "s": set, "z": frozenset}


def _is_exception(found):
    return isinstance(found, type) and issubclass(found, BaseException)


def _change(mine, theirs):
    """Have a container that the other side has changed be as it is there."""
    if type(mine) is not type(theirs):
        return
    if isinstance(mine, list | bytearray):
        mine[:] = theirs
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(theirs)


class Remote:
    """Something that the other side has."""

    __slots__ = ("_number", "_peer", "_plain_only")

    def __init__(self, peer, number, plain_only=False):
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_plain_only", plain_only)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments, **named):
        return _ask(self, "call", arguments, named)

    def __getattr__(self, name):
        return _ask(self, "getattr", (name,))

    def __setattr__(self, name, value):
        _ask(self, "setattr", (name, value))

    def __iter__(self):
        items = _ask(self, "iter")
        while True:
            try:
                yield _ask(items, "next")
            except StopIteration:
                return

    def __hash__(self):
        return object.__getattribute__(self, "_number")


def _ask(remote, operation, arguments=(), named=None):
    peer = _peer_of(remote)
    if object.__getattribute__(remote, "_plain_only") and operation not in ("call", "iter", "next"):
        if operation == "len":  # list() asks for it, and does without
            raise TypeError("the program returned an object that has no length here")
        peer.complain("the program returned an object, where the tests name none of its classes")
    return peer.ask(operation, remote, arguments, named)


def _peer_of(remote):
    return object.__getattribute__(remote, "_peer")


def _passing(name):
    def method(self, *arguments):
        if name == "exit":  # an exception of the tests stays with them
            arguments = (None, None, None)
        result = _ask(self, name, arguments)
        if name in ARITHMETIC and not isinstance(result, Remote) and not all(isinstance(a, Remote) for a in arguments):
            _peer_of(self).complain("an object of the program computes with a plain value to a plain value")
        return result

    return method


def _contains(self, item):
    if isinstance(item, Remote):
        return _ask(self, "contains", (item,))
    try:
        iterator = iter(self)
        first = next(iterator, _NOTHING)
    except TypeError:  # it cannot be iterated, so it is the program's to say
        return _ask(self, "contains", (item,))
    return first is not _NOTHING and (first == item or any(other == item for other in iterator))


def _comparing(name):
    def method(self, other):
        if isinstance(other, Remote):
            return _ask(self, name, (other,))
        if name in ("eq", "ne"):
            return name == "ne"
        return _peer_of(self).complain("an object of the program is to be less or more than a plain value")

    return method


for _name in OPERATORS:
    setattr(Remote, f"__{_name}__", _passing(_name))
for _name in COMPARING:
    setattr(Remote, f"__{_name}__", _comparing(_name))
setattr(Remote, "__contains__", _contains)  # noqa: B010 - as those above
