"""What is left of addresses and texts when the secrets in them are hidden."""

from __future__ import annotations

import base64
import json
import string
from urllib.parse import quote

import pytest
from hypothesis import given, strategies as st

from rollout_core.base.errors import ConfigError
from rollout_core.base.settings import Redaction, refuse_credentials, without_password, without_passwords


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://user:pw@host/db", "postgresql://user:***@host/db"),
        ("postgresql://user@host/db", "postgresql://user@host/db"),
        ("postgresql://u:p/w@a@host:1/db", "postgresql://u:***@host:1/db"),
        ("postgresql://u:123/abc@host/db", "postgresql://u:***@host/db"),
        ("postgresql://u:p?w#@host/db", "postgresql://u:***@host/db"),
        ("postgres://host/db?user=x&password=pw&sslmode=no", "postgres://host/db?user=x&password=***&sslmode=no"),
        ("mysql://root:pw@host", "mysql://root:***@host"),
        ("root:pw@host/db", "root:***@host/db"),
        ("postgresql:/u:pw@host/db", "postgresql:***@host/db"),
        ("host=h user=x password=pw", "host=h user=x password=***"),
        ("https://key@host/x", "https://***@host/x"),
        ("https://host/x?anything", "https://host/x?***"),
        ("s3://user:secret/with/slashes@bucket/key", "s3://user:***@bucket/key"),
    ],
)
def test_a_password_is_hidden_in_an_address_and_in_a_text_about_it(address, shown):
    assert without_password(address) == shown
    if "://" in address:
        assert without_passwords(f"cannot open '{address}': refused") == f"cannot open '{shown}': refused"


def test_a_token_in_a_part_of_an_address_is_hidden():
    told = "HTTPSConnectionPool(host='x', port=443): with url: /tokeninfo?access_token=ya29.abc (Caused by ...)"
    assert "?access_token=*** (Caused" in without_passwords(told)
    assert without_passwords("set max_tokens=16 and key=5") == "set max_tokens=16 and key=5"


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket/photo@2x.jsonl",
        "s3://bucket/12:30@noon/key=5/token=6.jsonl",
        "file:///a:b@c/d",
        "sqlite:///a@b.db",
        "http://127.0.0.1:8000/v1/a@b",
        "memory://name",
        "data/a:b@c.jsonl",
        "Qwen/Qwen2.5-0.5B",
        "tcp://scheduler:8786",
    ],
)
def test_addresses_without_a_secret_stay_as_they_are(address):
    assert without_password(address) == without_passwords(address) == refuse_credentials(address) == address


def test_an_address_that_is_kept_may_hold_no_credentials():
    with pytest.raises(ConfigError, match=r"'s3://user:\*\*\*@bucket' holds a user, password or key"):
        refuse_credentials("s3://user:secret@bucket")


@given(
    password=st.text(string.ascii_letters + string.digits + "/@?#:%&=+.", min_size=6, max_size=30),
    scheme=st.sampled_from(["postgresql", "mysql", "s3", "gs", "tcp"]),
)
def test_no_password_however_odd_survives(password, scheme):
    told = without_password(f"{scheme}://user:{password}@host/place")
    assert told == f"{scheme}://user:***@host/place"


@given(
    secret=st.text(string.ascii_letters + string.digits + "-_/+=.", min_size=20, max_size=60),
    before=st.text(max_size=5),
    after=st.text(max_size=5),
)
def test_a_secret_is_hidden_in_every_form(secret, before, after):
    code = base64.b64encode(f"{before}{secret}{after}".encode()).decode()
    forms = [secret, quote(secret, safe=""), json.dumps(secret), code, secret.encode().hex(), secret.upper()]
    redaction = Redaction(secret)
    for form in forms:
        text = f"{before} {form} {after}"
        assert redaction.is_repeated_in(text)
        hidden = redaction.hide(text)
        assert "***" in hidden and secret.lower() not in hidden.lower()
        assert not redaction.is_repeated_in(hidden)
    for start in range(len(secret) - 8):
        assert secret[start : start + 9] not in redaction.hide(f"begins {secret[start : start + 9]} ends")


def test_a_text_without_the_secret_is_left_alone():
    text = "HTTP 400: **bold** ... sk- xxxx `a.b.c` 12****"
    assert Redaction("sk-proj-abcdefghijklmnop").hide(text) == text
    assert not Redaction("EMPTY").is_repeated_in("EMPTY") and Redaction("EMPTY").hide("an EMPTY or EMPTYING") == (
        "an *** or EMPTYING"
    )


@pytest.mark.parametrize("unit", ["d", "a-s", "....a", "*", "sk-ab****"])
def test_a_long_text_takes_a_moment_whatever_it_is(unit: str):
    """Of words without end a search for masked secrets once took minutes."""
    text = (unit * 200_000)[:200_000]
    hidden = Redaction("sk-abcdef-1234567-wxyz").hide(text, most=None)
    assert hidden == text if "sk-" not in unit else hidden.startswith("***" * 20_000) and "sk-ab" not in hidden
    assert len(Redaction("sk-abcdef-1234567-wxyz").hide(text)) <= 65_536
