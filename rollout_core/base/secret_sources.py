"""Where secrets are found: in the environment, in blocks of the Prefect server, in the secret managers of AWS and of
Google Cloud, by plugins. Which of them, in which order, says ``ROLLOUT_SECRETS_FROM`` (default ``environment``).

What a manager answered is kept in this process's memory for ``ROLLOUT_SECRETS_SECONDS`` (default 300), so that a secret
that was changed there is used soon after, and asked for again no sooner.
"""

from __future__ import annotations

import base64
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from rollout_core.base.errors import ConfigError, Recoverable, RetryHint

log = logging.getLogger(__name__)

SECRET_PREFIX = "ROLLOUT_SECRET_"
SOURCES = "ROLLOUT_SECRETS_FROM"
LIFETIME = "ROLLOUT_SECRETS_SECONDS"
DEFAULT_LIFETIME_SECONDS = 300.0
BLOCK_PREFIX = "block:"
"""Begins an address that is the slug and name of a block on the Prefect server."""
BLOCKS = "blocks"
"""The source of all such addresses."""
GCP_ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER"
"""As gcloud calls it."""
ASK_SECONDS = 10.0

Source = Callable[[str, str], str | None]
"""From a secret's name, and its id in a secret manager, to its value; None where there is none of that name. A block
keeps secrets by their names, so that of `BLOCKS` gets its address in place of an id."""


def _aws(name: str, secret_id: str) -> str | None:
    try:
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.session import get_session
    except ImportError as error:
        raise ConfigError(f"{SOURCES} names aws, which needs the extra s3") from error
    _keep_out_of_the_log("botocore.parsers")
    waits = Config(connect_timeout=ASK_SECONDS, read_timeout=ASK_SECONDS, retries={"max_attempts": 3})
    try:
        client = get_session().create_client("secretsmanager", config=waits)
        answer = client.get_secret_value(SecretId=secret_id)
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code == "ResourceNotFoundException":
            return None
        message = f"AWS Secrets Manager does not give {secret_id!r} ({code})"
        if code in ("ThrottlingException", "InternalServiceError", "ServiceUnavailable", "RequestTimeout"):
            raise Recoverable(f"{message}; a passing fault, try again", RetryHint(1.0, 60.0)) from None
        raise ConfigError(f"{message}; allow secretsmanager:GetSecretValue on it, with valid credentials") from None
    except BotoCoreError as error:
        if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "NoRegionError"):
            raise ConfigError(f"AWS Secrets Manager: {error}; set credentials and AWS_DEFAULT_REGION") from None
        raise Recoverable(f"AWS Secrets Manager cannot be asked: {type(error).__name__}; try again") from None
    return answer.get("SecretString") or _text(name, answer["SecretBinary"])


def _gcp(name: str, secret_id: str) -> str | None:
    try:
        import google.auth
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import AuthorizedSession
        from requests import RequestException
    except ImportError as error:
        raise ConfigError(f"{SOURCES} names gcp, which needs the extra gcs") from error
    _keep_out_of_the_log("google.auth.transport.requests")
    endpoint = (os.environ.get(GCP_ENDPOINT) or "https://secretmanager.googleapis.com").rstrip("/")
    try:
        credentials, default_project = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
        project = os.environ.get("GOOGLE_CLOUD_PROJECT") or default_project
        if not project:
            raise ConfigError("Google's Secret Manager is in a project; set GOOGLE_CLOUD_PROJECT")
        with AuthorizedSession(credentials) as session:
            place = f"{endpoint}/v1/projects/{project}/secrets/{secret_id}/versions/latest:access"
            answer = session.get(place, timeout=ASK_SECONDS)
    except GoogleAuthError as error:
        raise ConfigError(f"Google Cloud refuses these credentials ({type(error).__name__}); log in again") from None
    except RequestException as error:
        raise Recoverable(f"Google's Secret Manager cannot be asked: {type(error).__name__}; try again") from None
    if answer.status_code == 404:
        return None
    if answer.status_code != 200:
        message = f"Google's Secret Manager does not give {secret_id!r} ({answer.status_code})"
        if answer.status_code == 429 or answer.status_code >= 500:
            raise Recoverable(f"{message}; a passing fault, try again", RetryHint(1.0, 60.0))
        raise ConfigError(f"{message}; grant roles/secretmanager.secretAccessor on it")
    return _text(name, base64.b64decode(answer.json()["payload"]["data"]))


def _keep_out_of_the_log(client: str) -> None:
    """Some clients log whole answers where DEBUG is asked for."""
    logger = logging.getLogger(client)
    logger.setLevel(max(logger.level, logging.INFO))


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"secret {name!r} holds bytes that are no UTF-8 text") from None


_sources: dict[str, Source] = {"aws": _aws, "gcp": _gcp}
_NAMES = ("environment", "prefect", "aws", "gcp")
PLUGIN = "plugin:"
"""Before the name of a plugin, where it is a source."""
_source_of_plugin: Callable[[str], Source] | None = None
_kept: dict[tuple[Any, ...], tuple[float, str | None]] = {}
"""By source, name, id and place: until when an answer holds, and what it was."""
_lock = threading.Lock()


def block_name(secret_id: str) -> str:
    """The Prefect block that holds a secret; its names have small letters, digits and dashes only."""
    return secret_id.lower().replace("_", "-").replace("/", "-")


def add_source(name: str, source: Source) -> None:
    """Have a source that this package cannot know, such as the Prefect server, asked under its name."""
    _sources[name] = source


def add_plugin_sources(source_of: Callable[[str], Source]) -> None:
    """Have plugins asked, each by what ``source_of`` makes of its name."""
    global _source_of_plugin
    _source_of_plugin = source_of


def source_names() -> tuple[str, ...]:
    """The sources of the settings in their order. Raises ConfigError for one that is unknown."""
    names = tuple(filter(None, os.environ.get(SOURCES, "environment").replace(" ", "").split(",")))
    unknown = [name for name in names if name not in _NAMES and not name.startswith((PLUGIN, BLOCK_PREFIX))]
    if unknown or not names or PLUGIN in names:
        expected = f"{', '.join(_NAMES)}, {BLOCK_PREFIX}rollout-secrets/NAME, and {PLUGIN}NAME of a plugin"
        raise ConfigError(f"{SOURCES} is {os.environ[SOURCES]!r}; expected some of {expected}")
    return names


def find_secret(name: str, secret_id: str | None) -> str | None:
    """The secret by the first source that has it; the environment alone is asked where it has no id.

    Raises ConfigError or Recoverable where a source cannot tell.
    """
    for source in source_names():
        if source == "environment":
            value = os.environ.get(SECRET_PREFIX + name)
        else:
            given = source if source.startswith(BLOCK_PREFIX) else secret_id
            value = None if secret_id is None or given is None else _asked(source, name, given)
        if value is not None and value.strip():
            return value
    return None


def _asked(source: str, name: str, secret_id: str) -> str | None:
    if source.startswith(PLUGIN) and source not in _sources and _source_of_plugin is not None:
        _sources[source] = _source_of_plugin(source.removeprefix(PLUGIN))
    kind = BLOCKS if source.startswith(BLOCK_PREFIX) else source
    if kind not in _sources:
        raise ConfigError(f"{SOURCES} names {source}, which only flows and tasks can ask")
    key = (source, name, secret_id, *map(os.environ.get, ("AWS_ENDPOINT_URL", GCP_ENDPOINT, "PREFECT_API_URL")))
    holds_seconds = lifetime_seconds()
    with _lock:  # one asks, the others wait for the answer
        until, value = _kept.get(key, (0.0, None))
        now = time.monotonic()
        if now < until:
            return value
        try:
            value = _sources[kind](name, secret_id)
        except Recoverable as error:
            if key not in _kept:
                raise
            log.warning("secret %s is used as it was: %s", name, error)
        _kept[key] = (now + holds_seconds, value)
        return value


def lifetime_seconds() -> float:
    """How long an answer holds. Raises ConfigError for no number of seconds."""
    text = os.environ.get(LIFETIME, "")
    try:
        seconds = float(text) if text else DEFAULT_LIFETIME_SECONDS
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{LIFETIME} is {text!r}; expected a number of seconds, such as 300")
    return seconds
