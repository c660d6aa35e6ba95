"""What this process's environment says: where objects and the database are kept, how long a stop may take, and secrets,
which are left out of what other processes get, and hidden in what is shown and stored.

``ROLLOUT_STORAGE`` is the object store's URL (default ``file://./data/objects``), ``ROLLOUT_DATABASE`` the store's
(default ``sqlite:///./data/rollout.db``), ``ROLLOUT_CACHE`` a local folder for checkpoints fetched from the object
store (default ``./data/cache``), ``ROLLOUT_CACHE_GIB`` is how large that may grow (default 100), ``ROLLOUT_TRACKING``
the folder of trackers (default ``./data/tracking``), or a block that says where they report to.
``ROLLOUT_LIMITS`` lists the concurrency limits that stages ask the Prefect server for (``engine``, ``learner``; default
none), ``ROLLOUT_EVENTS`` is a file for events of runs, or ``stderr`` (default none), ``ROLLOUT_PREFECT_EVENTS`` says
whether the Prefect server gets them (``on``, the default, or ``off``), ``ROLLOUT_STOP_SECONDS`` is how long a run
may take to end after a stop signal (default 10), and ``ROLLOUT_LEASE_SECONDS`` how long a machine that is not heard of
keeps others from its work (default 20). ``ROLLOUT_UPLOAD_PART_BYTES`` is the size of the parts in which large files go
to a bucket (default 16 MiB), and ``ROLLOUT_MAX_BLOB_BYTES`` refuses to store larger ones there (default: no limit).
``ROLLOUT_UI_URL`` is where people reach the pages of `rollout ui`, for links to runs (default: none).
``ROLLOUT_PLUGINS`` lists folders of plugins, separated as in ``PATH`` (default: none); ``--plugin`` puts its own first.
They say where, never what: no setting enters a cache key. Two do: ``ROLLOUT_NUMERICS``, which `determinism` reads, and
``ROLLOUT_HOT_RELOAD``, which ``--hot-reload`` sets to what no other run has, so that nothing else asks for its scores.

A secret is ``ROLLOUT_SECRET_<NAME>`` there, or elsewhere (see `secret_sources`), and only names on the list are read: a
configuration names secrets and may come from anyone who can start a run; the list is the worker's own, so nobody can
have a secret sent where it is not meant to go by naming it. Values are never logged.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote, quote_plus

from rollout_core.base.errors import ConfigError
from rollout_core.base.secret_sources import (
    BLOCK_PREFIX as BLOCK_PREFIX,  # for addresses of all kinds
    PLUGIN,
    SECRET_PREFIX,
    block_name,
    find_secret,
    source_names,
)

DEFAULT_STORAGE = "file://./data/objects"
DEFAULT_DATABASE = "sqlite:///./data/rollout.db"
DEFAULT_CACHE = "./data/cache"
DEFAULT_TRACKING = "./data/tracking"
DEFAULT_STOP_SECONDS = 10.0
DEFAULT_CACHE_GIB = 100.0
DEFAULT_LEASE_SECONDS = 20.0
DEFAULT_PART_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Locations:
    """Addresses of the shared parts and the local cache of this machine."""

    storage: str
    database: str
    cache: Path
    tracking: str
    """Folder of trackers, or the address of a block that says where they report to."""
    limits: frozenset[str]
    events: str | None
    """File for events of runs, or ``stderr``."""
    prefect_events: bool
    """Whether the Prefect server gets them."""


def locations() -> Locations:
    """Read the environment now, so that a worker's own settings count, not those of the machine that deployed."""
    return Locations(
        storage=os.environ.get("ROLLOUT_STORAGE", DEFAULT_STORAGE),
        database=os.environ.get("ROLLOUT_DATABASE", DEFAULT_DATABASE),
        cache=Path(os.environ.get("ROLLOUT_CACHE", DEFAULT_CACHE)),
        tracking=os.environ.get("ROLLOUT_TRACKING", DEFAULT_TRACKING),
        limits=frozenset(filter(None, os.environ.get("ROLLOUT_LIMITS", "").replace(" ", "").split(","))),
        events=os.environ.get("ROLLOUT_EVENTS", "").strip() or None,
        prefect_events=os.environ.get("ROLLOUT_PREFECT_EVENTS", "on").strip().lower() not in ("off", "0", "false"),
    )


PLUGINS = "ROLLOUT_PLUGINS"


def plugin_paths() -> list[str]:
    """Folders in which plugins are looked for before all others."""
    return [path for path in os.environ.get(PLUGINS, "").split(os.pathsep) if path]


HOT_RELOAD = "ROLLOUT_HOT_RELOAD"


def hot_reload() -> str | None:
    """What a run's plugins count as in keys, in place of their files, which may be edited while it goes; None where
    they are used as they were read."""
    return os.environ.get(HOT_RELOAD) or None


def ui_address() -> str | None:
    """Where people reach the pages of `rollout ui`, without a slash at its end; None where nobody said.

    Raises ConfigError for what is no address of a web page, and for one with a user or key: it is shown.
    """
    address = os.environ.get("ROLLOUT_UI_URL", "").strip().rstrip("/")
    if not address:
        return None
    if not re.fullmatch(r"https?://[^\s<>()\[\]\"'`\\]+", address):
        raise ConfigError(
            f"ROLLOUT_UI_URL is {without_password(address)!r}; expected the address of the pages of `rollout ui`, such "
            "as http://runs.example:4300, or http://runs.example:4747/ui of a store's server"
        )
    return refuse_credentials(address)


def stop_seconds() -> float:
    """From a stop signal to the end of the process, at the latest. Raises ConfigError for no positive number."""
    return _positive("ROLLOUT_STOP_SECONDS", DEFAULT_STOP_SECONDS, "seconds, such as 10")


def cache_bytes() -> int:
    """How large the local cache may grow. Raises ConfigError for no positive number."""
    return int(_positive("ROLLOUT_CACHE_GIB", DEFAULT_CACHE_GIB, "GiB, such as 100") * 2**30)


def checks_disk() -> bool:
    """Whether a run that the disk of its object store, or of TMPDIR, cannot hold is refused before it starts."""
    return os.environ.get("ROLLOUT_DISK_CHECK", "on").strip().lower() not in ("off", "0", "false")


def lease_seconds() -> float:
    """How long the lease of a stage lasts when it is not renewed. Raises ConfigError for no positive number."""
    return _positive("ROLLOUT_LEASE_SECONDS", DEFAULT_LEASE_SECONDS, "seconds, such as 20")


def _positive(name: str, default: float, what: str) -> float:
    text = os.environ.get(name, "")
    try:
        number = float(text) if text else default
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"{name} is {text!r}; expected a positive number of {what}")
    return number


def upload_part_bytes() -> int:
    """Of uploads to buckets in parts. Raises ConfigError for less than S3 takes."""
    return _whole("ROLLOUT_UPLOAD_PART_BYTES", 5 * 2**20, "S3's minimum of 5 MiB") or DEFAULT_PART_BYTES


def max_blob_bytes() -> int | None:
    """Above which nothing is stored in a bucket; None: no limit. Raises ConfigError for no positive number."""
    return _whole("ROLLOUT_MAX_BLOB_BYTES", 1, "one byte")


def _whole(name: str, least: int, what: str) -> int | None:
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}; expected a whole number of bytes")
    if int(text) < least:
        raise ConfigError(f"{name} is {text}, below {what}")
    return int(text)


SECRET_LIST = "ROLLOUT_SECRETS"
"""Setting with the further names that may be asked for, separated by commas. ``NAME=ID`` where a secret manager knows
it by another name, such as ``HF_TOKEN=rollout/hf-token``."""
ALLOWED = frozenset({"HF_TOKEN"})
"""Names that always may be."""


def allowed_secrets() -> frozenset[str]:
    """Names that may be asked for; what else begins with the prefix, or is in a secret manager, is never read."""
    return ALLOWED | _listed().keys()


def _listed() -> dict[str, str]:
    """What `SECRET_LIST` holds: names, each with the id that a secret manager knows it by."""
    entries = filter(None, os.environ.get(SECRET_LIST, "").replace(" ", "").split(","))
    pairs = (entry.partition("=") for entry in entries)
    return {name: secret_id or name for name, _, secret_id in pairs}


def read_secret(name: str) -> str | None:
    """The secret of this name; None where it is not set or empty. Raises ConfigError for a name that is not allowed."""
    allowed = allowed_secrets()
    if name not in allowed:
        raise ConfigError(
            f"secret {name!r} is not among those allowed here ({', '.join(sorted(allowed))}); its owner adds it to "
            f"{SECRET_LIST} in the environment of the worker"
        )
    secret = (find_secret(name, _listed().get(name)) or "").strip()  # a mounted file often ends with a line feed
    if not (secret.isascii() and secret.isprintable()):
        raise ConfigError(f"secret {name!r} holds what no key does; expected printable ASCII in {_where(name)}")
    return secret or None


def require_secret(name: str) -> str:
    """As `read_secret`, and ConfigError where it is not set."""
    secret = read_secret(name)
    if secret is None:
        raise ConfigError(f"secret {name!r} is not set; set it in {_where(name)}")
    return secret


def _where(name: str) -> str:
    """Where a secret is looked for, for people."""
    here, secret_id = f"{SECRET_PREFIX}{name} in the environment of the worker", _listed().get(name)
    if secret_id is None:
        return here
    places = {
        "environment": here,
        "prefect": f"the Prefect server's secret block {block_name(secret_id)}",
        "aws": f"AWS Secrets Manager as {secret_id}",
        "gcp": f"Google's Secret Manager as {secret_id}",
    }
    in_block, in_plugin = f"{{}} of the Prefect server under {name}", f"what plugin {{}} knows as {secret_id}"
    return " or ".join(
        places.get(source) or (in_plugin if source.startswith(PLUGIN) else in_block).format(source.removeprefix(PLUGIN))
        for source in source_names()
    )


HIDDEN = "***"
FRAGMENT = 8
"""So many characters of a key in a row are hidden wherever they stand; fewer may be there by chance."""
LONG = 16
"""A key of fewer characters may be a plain word, such as ``EMPTY``."""
MOST_TEXT = 65_536
"""Characters of a text that are looked at; the rest is cut off."""

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/{1,3}[^\s'\"<>`]+")
_HOST_FIRST = re.compile(r"[^@:/?#]*(:\d*)?([/?#]|$)")
_OPTION = re.compile(r"(?i)([\w.-]*(?:passw|pwd|secret|token|key|signature|sig|credential|auth)[\w.-]*=)[^&;\s'\"]+")
_QUERY_OPTION = re.compile(r"(?i)([?&][\w.-]*(?:secret|token|key|signature|sig|credential)=)[^&;\s'\")]+")
"""In a part of an address, such as a path that a client tells."""
_PASSWORD = re.compile(r"(?i)(\bpass(?:word|wd)?=)[^&;\s'\"]+")
_WEB = ("http", "https")
_NAMED_USERS = ("postgresql", "postgres")
"""Kinds of addresses whose lone user is a name; elsewhere it may be a key."""
_MASK = re.compile(r"(?:\*{2,}|\u2022{2,}|\u2026|\.{3,}|#{3,}|[xX]{4,})[*\u2022#]*")
_BEHIND_MASK = re.compile(r"[\w.-]*")


def without_password(address: str) -> str:
    """An address with ``***`` for its password, for a lone user that may be a key, and for secret options.

    Passwords are found even where they hold characters that should have been escaped; of such an address more may be
    hidden.
    """
    scheme, separator, rest = address.partition("://")
    if not separator:
        scheme, rest = "", address
    place, mark, options = _parted(_without_user(scheme.lower(), rest), "?#" if scheme.lower() in _WEB else "?")
    # An API's address has no options of its own, so these may be a key by themselves.
    secret = HIDDEN * bool(mark) if scheme.lower() in _WEB else _OPTION.sub(rf"\g<1>{HIDDEN}", options)
    return _PASSWORD.sub(rf"\g<1>{HIDDEN}", scheme + separator + place) + mark + secret


def _parted(text: str, marks: str) -> tuple[str, str, str]:
    """``text`` before the first of these characters, that character, and the rest."""
    found = re.search(f"[{marks}]", text)
    return (text[: found.start()], found[0], text[found.end() :]) if found else (text, "", "")


def _without_user(scheme: str, rest: str) -> str:
    """What follows the scheme of an address, without a password or key before its host."""
    before, at, _ = rest.partition("@")
    first = re.split(r"[/?#]", before, maxsplit=1)[0]
    # Of a password with a slash the first part looks like a port, which only a host of these has.
    user = first == before or (":" in first and not (scheme in _WEB and _HOST_FIRST.match(rest)))
    if not at or not user:
        return rest
    name, colon, _ = first.partition(":")
    host = rest.rpartition("@")[2]  # a password may hold an @ that nobody escaped
    if not colon and scheme in _NAMED_USERS:
        return rest
    return f"{name}:{HIDDEN}@{host}" if colon else f"{HIDDEN}@{host}"


def without_passwords(text: str) -> str:
    """A text for people, such as another program's error, with every address in it as `without_password` shows it, and
    parts of addresses without secret options."""
    text = _ADDRESS.sub(lambda found: without_password(found[0]), text)
    return _PASSWORD.sub(rf"\g<1>{HIDDEN}", _QUERY_OPTION.sub(rf"\g<1>{HIDDEN}", text))


def refuse_credentials(address: str) -> str:
    """``address`` as it is. Raises ConfigError where it holds a password, a key or a user."""
    scheme, separator, rest = address.partition("://")
    if separator and _without_user(scheme.lower(), rest) != rest:
        raise ConfigError(
            f"{without_password(address)!r} holds a user, password or key; an address is kept and shown, so it may "
            "hold none: put credentials into the environment, where the service's client reads them"
        )
    return address


class Redaction:
    """Hides one secret in texts of somebody who knows it and may repeat it."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        forms = sorted(set(_forms(secret)), key=len, reverse=True)
        pattern = "|".join(map(re.escape, forms))
        # A word such as "EMPTY" is hidden as a word only.
        self._forms = re.compile(pattern if len(secret) >= FRAGMENT else rf"(?<!\w)(?:{pattern})(?!\w)", re.IGNORECASE)
        self._told = [form.lower() for form in forms] if len(secret) >= LONG else []
        pieces = range(len(secret) - FRAGMENT + 1) if len(secret) >= LONG else ()
        self._pieces = {secret[start : start + FRAGMENT].lower() for start in pieces}

    def hide(self, text: str, *, most: int | None = MOST_TEXT) -> str:
        """The first ``most`` characters of ``text``, None: all of them, with ``***`` for the secret: as it is, encoded
        for URLs, JSON, HTML or Basic authorization, in hexadecimal, in parts of at least eight characters, and with its
        middle masked (``sk-ab****wxyz``)."""
        text = self._forms.sub(HIDDEN, text[:most])
        return self._without_pieces(self._without_masked(text))

    def is_repeated_in(self, text: str) -> bool:
        """Whether a text holds the whole of a secret that is too long to be there by chance, in any of these forms."""
        lowered = text.lower() if self._told else ""
        return any(form in lowered for form in self._told)

    def _without_masked(self, text: str) -> str:
        """In time that grows with the length of ``text``, whatever it is."""
        secret, kept, position = self._secret, [], 0
        marks = [found.span() for found in _MASK.finditer(text)]
        for (start, end), (next_start, _) in pairwise([*marks, (len(text), len(text))]):
            # What is longer than the secret is none of it.
            begin, least = start, max(position, start - len(secret) - 1)
            while begin > least and (text[begin - 1].isalnum() or text[begin - 1] in "_.-"):
                begin -= 1
            found = _BEHIND_MASK.match(text, end, min(next_start, end + len(secret) + 1))
            head, tail = text[begin:start], "" if found is None else found[0].rstrip(".-")
            begins = len(head) >= 2 and secret.startswith(head)
            ends = len(tail) >= 2 and secret.endswith(tail)
            if begins or ends:
                kept += [text[position:begin], HIDDEN]
                position = end + len(tail)
        return "".join([*kept, text[position:]])

    def _without_pieces(self, text: str) -> str:
        if not self._pieces:
            return text
        lowered = text.lower()
        if len(lowered) != len(text):  # some letters have no lower form of their length
            lowered = text
        kept, position = [], 0
        for start, end in _runs(lowered, self._pieces):
            kept += [text[position:start], HIDDEN]
            position = end
        return "".join([*kept, text[position:]])


def _runs(text: str, pieces: set[str]) -> Iterator[tuple[int, int]]:
    """Where ``text`` consists of ``pieces`` that may overlap, as starts and ends."""
    begun, end = None, 0
    for start in range(len(text) - FRAGMENT + 1):
        if text[start : start + FRAGMENT] not in pieces:
            continue
        if begun is not None and start > end:
            yield begun, end
            begun = None
        begun = start if begun is None else begun
        end = start + FRAGMENT
    if begun is not None:
        yield begun, end


def _forms(secret: str) -> Iterator[str]:
    """A secret as it is, and as other programs write it."""
    yield from (secret, quote(secret), quote(secret, safe=""), quote_plus(secret), html.escape(secret))
    escaped = json.dumps(secret)[1:-1]
    yield from (escaped, escaped.replace("/", r"\/"))
    if len(secret) < FRAGMENT:
        return
    yield secret.encode().hex()
    for before in range(3):
        # Those letters of the code that do not depend on what stands around it, as in "user:secret".
        first, last = -(-before * 8 // 6), (before + len(secret)) * 8 // 6
        code = base64.b64encode(b"\0" * before + secret.encode()).decode()[first:last]
        yield from (code, code.replace("+", "-").replace("/", "_"))
