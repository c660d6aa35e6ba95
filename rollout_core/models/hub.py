"""Repositories on the Hugging Face hub, as folders of its local cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.secrets import Redaction, read_secret, without_passwords


class HubOutOfReach(ConfigError):
    """A model is not on this machine, and nobody answers at the hub's address."""


GATED_OWNERS = ("meta-llama", "mistralai")
"""Owners on the hub of whose repositories most ask for a token."""


def is_gated(uri: str) -> bool:
    """Whether ``uri`` is a hub id that is known to ask for a token."""
    return looks_like_hub_id(uri) and uri.partition("/")[0] in GATED_OWNERS


def has_token() -> bool:
    """Whether this process can show the hub a token: ``ROLLOUT_SECRET_HF_TOKEN``, or the hub's own ways."""
    from huggingface_hub import get_token

    return (read_secret("HF_TOKEN") or get_token()) is not None


def looks_like_hub_id(uri: str) -> bool:
    """Whether ``uri`` has the form of a hub id (``name`` or ``owner/name``)."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", uri) is not None


def fetch_from_hub(
    uri: str, revision: str | None, what: str, patterns: Sequence[str], *, download: bool
) -> Path | None:
    """The cached folder with the repository's files that match ``patterns``; None where some are yet to be downloaded.

    With ``download`` they are fetched. Raises ConfigError when there is no such repository or revision, HubOutOfReach
    when nobody answers, Recoverable when the hub answers with an error. ``what`` stands for the repository in messages.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                uri,
                revision=revision,
                allow_patterns=list(patterns),
                local_files_only=not download,
                token=read_secret("HF_TOKEN"),  # without one, that of the environment or of a login
            )
        )
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"{what} {uri!r} is neither a folder here nor a hub repository you may read") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{what} {uri!r} has no revision {revision!r} on the hub") from error
    except LocalEntryNotFoundError as error:
        if not download and not is_offline_mode():
            return None
        message = f"{what} {uri!r} is not a folder here, and the hub could not be reached to look for it there"
        raise (ConfigError if is_offline_mode() else HubOutOfReach)(message) from error
    except HfHubHTTPError as error:  # the chained one would be logged with the hub's own words
        raise Recoverable(f"{what} {uri!r}: the hub answered with an error: {without_token(error)}") from None


def without_token(error: Exception) -> str:
    """What a hub, or a mirror of it, says, which may repeat the token that it was shown."""
    text, token = without_passwords(str(error)), read_secret("HF_TOKEN")
    return " ".join((text if token is None else Redaction(token).hide(text)).split())
