"""Upstreams: where the proxy sends requests, and the models under whose names agents ask for them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rollout_core.base.errors import ConfigError, near
from rollout_core.base.settings import refuse_credentials

_DIRECT = {"hosted_vllm": True, "vllm": True, "openai": False}
"""Providers, as LiteLLM names them, that speak OpenAI's API themselves, and whether they give token ids."""
_OPENAI = "https://api.openai.com/v1"
_FROM_ENVIRONMENT = "os.environ/"
_PARAMS = ("model", "api_base", "api_key", "timeout", "num_retries", "rpm", "max_parallel_requests")
"""Of an entry's ``litellm_params``, those that are understood here."""


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """One OpenAI-compatible server that answers for a model.

    Raises ConfigError for settings that cannot be meant.
    """

    url: str
    """What an OpenAI client would call the base URL, such as ``http://127.0.0.1:8000/v1``."""
    model: str | None = None
    """The model's name there; None: as the agent calls it."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token. Never shown, logged or stored."""
    token_ids: bool = True
    """Whether it understands vLLM's ``return_token_ids``. Others, such as OpenAI's own, refuse requests with it."""
    timeout: float = 600.0
    """Seconds that a request may take in all, from its arrival to its last byte, waits and retries included. Of several
    upstreams of a model the longest counts."""
    max_retries: int = 3
    """Further tries after answers 408, 425, 429 and 5xx and lost connections, while the agent has got no byte yet."""
    max_concurrent: int | None = None
    """Most requests under way; the others wait, first come, first served. None: no limit."""
    requests_per_second: float | None = None
    """Requests are spaced so that there are never more. None: no limit."""
    seeds: bool = False
    """Whether a recorded request without a seed is sent one that follows from its rollout and its number in the
    attempt, so that a run that is started again, or an attempt that is tried again, draws what it would have drawn."""
    model_id: str | None = None
    """Content id of the weights that it serves, noted in every span."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(
                f"the upstream's url is {self.url!r}; expected a base URL such as http://127.0.0.1:8000/v1"
            )
        refuse_credentials(self.url)
        object.__setattr__(self, "url", self.url.rstrip("/"))
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError(
                f"the API key for {self.url} is empty or holds what no header can; expected ASCII letters"
            )
        if self.timeout <= 0 or self.max_retries < 0:
            raise ConfigError(
                f"upstream {self.url}: timeout is {self.timeout} and max_retries {self.max_retries}; expected seconds "
                "above 0, and 0 or more"
            )
        for name in ("max_concurrent", "requests_per_second"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"upstream {self.url}: {name} is {value}; expected more than 0, or None for no limit")


@dataclass(frozen=True)
class ModelEntry:
    """A model, by the name that agents use, and the upstreams that answer for it, of which the least busy is asked."""

    name: str
    upstreams: Sequence[Upstream]


GivenModel = ModelEntry | Mapping[str, Any]
"""A model entry, or one in the form of LiteLLM's ``model_list``."""


def model_entries(given: Sequence[GivenModel]) -> list[ModelEntry]:
    """The entries of a ``model_list``; those of one name become one with all their upstreams.

    A dict is ``{"model_name": ..., "litellm_params": {"model": "hosted_vllm/NAME", "api_base": ..., "api_key": ...}}``,
    as users of LiteLLM and Agent-lightning know it. Raises ConfigError for what cannot be understood.
    """
    upstreams: dict[str, list[Upstream]] = {}
    for entry in given:
        found = entry if isinstance(entry, ModelEntry) else _from_litellm(entry)
        if not found.name or not found.upstreams:
            raise ConfigError(
                f"the model {found.name!r} has {len(found.upstreams)} upstreams; give a name and one or more"
            )
        upstreams.setdefault(found.name, []).extend(found.upstreams)
    return [ModelEntry(name, tuple(entries)) for name, entries in upstreams.items()]


def _from_litellm(entry: Any) -> ModelEntry:
    params = entry.get("litellm_params") if isinstance(entry, Mapping) else None
    if not isinstance(params, Mapping) or not isinstance(entry.get("model_name"), str):
        keys = list(entry) if isinstance(entry, Mapping) else type(entry).__name__
        raise ConfigError(
            f'got a model entry of {keys}; expected a ModelEntry, or {{"model_name": ..., "litellm_params": {{...}}}}'
        )
    if unknown := [key for key in params if key not in _PARAMS]:
        raise ConfigError(
            f"litellm_params has {unknown[0]!r}, which is not understood here; {near(unknown[0], _PARAMS)}"
        )
    name = entry["model_name"]
    provider, slash, model = str(params.get("model", name)).partition("/")
    if slash and provider not in _DIRECT:
        raise ConfigError(
            f"the model {name!r} is of provider {provider!r}, which does not speak OpenAI's API; run `litellm --model "
            f"{provider}/{model}` in an environment of its own and give its address, as Upstream(url=..., "
            "token_ids=False)"
        )
    api_base = params.get("api_base") or (_OPENAI if provider == "openai" and slash else None)
    if api_base is None:
        raise ConfigError(f"litellm_params of the model {name!r} has no api_base; give the server's base URL")
    limits: dict[str, Any] = {
        "timeout": params.get("timeout"),
        "max_retries": params.get("num_retries"),
        "max_concurrent": params.get("max_parallel_requests"),
        "requests_per_second": params["rpm"] / 60 if params.get("rpm") else None,
    }
    upstream = Upstream(
        url=api_base,
        model=model if slash else provider,
        api_key=_key(params.get("api_key")),
        token_ids=_DIRECT[provider] if slash else True,
        **{name: value for name, value in limits.items() if value is not None},
    )
    return ModelEntry(name, (upstream,))


def _key(given: str | None) -> str | None:
    if given is None or not given.startswith(_FROM_ENVIRONMENT):
        return given
    variable = given.removeprefix(_FROM_ENVIRONMENT)
    if not os.environ.get(variable):
        raise ConfigError(f"the API key is to come from the environment variable {variable}, which is not set")
    return os.environ[variable]
