"""Resources an algorithm publishes and agents use: model endpoints and prompt templates, in versioned snapshots.

A prompt template may have been written by a model, so it is filled in within the bounds of
`rollout_core.base.templates`.
"""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from urllib.parse import quote

from pydantic import BaseModel, Field

from rollout_core.base.errors import ConfigError
from rollout_core.base.templates import MAX_WIDTH, Budget, compiled

if TYPE_CHECKING:
    from rollout_core.store.types import AttemptedRollout

logger = logging.getLogger(__name__)


class Resource(BaseModel):
    """Base of all resources. ``resource_type`` tells the kinds apart when they are read back."""

    resource_type: Any


class LLM(Resource):
    """A model behind an OpenAI-compatible endpoint."""

    resource_type: Literal["llm"] = "llm"
    endpoint: str
    """URL of the API."""
    model: str
    """Name of the model, as the endpoint knows it."""
    api_key: str | None = Field(default=None, repr=False)
    sampling_parameters: dict[str, Any] = Field(default_factory=dict)
    """Sampling settings such as temperature and top_p."""

    def get_base_url(self, *args: Any, **kwargs: Any) -> str:
        """URL for an OpenAI client. Arguments are ignored here; a ProxyLLM uses them."""
        return self.endpoint


class ProxyLLM(LLM):
    """A model behind the proxy, which files each request under the rollout and attempt named in its URL."""

    resource_type: Literal["proxy_llm"] = "proxy_llm"  # pyright: ignore[reportIncompatibleVariableOverride]

    def __getattribute__(self, name: str) -> Any:
        if name == "endpoint":
            logger.warning("ProxyLLM.endpoint names no rollout; use get_base_url(rollout_id, attempt_id) instead")
        return super().__getattribute__(name)

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """URL whose requests are recorded for this attempt; the bare endpoint when neither id is given.

        A trailing ``/v1`` of the endpoint moves behind the ids. Raises ConfigError when only one id is given.
        """
        endpoint: str = self.__dict__["endpoint"]
        if rollout_id is None and attempt_id is None:
            return endpoint
        if not isinstance(rollout_id, str) or not isinstance(attempt_id, str):
            raise ConfigError(
                f"got rollout_id={rollout_id!r}, attempt_id={attempt_id!r}; give both as strings, or none"
            )
        prefix = endpoint.removesuffix("/")
        root = prefix.removesuffix("/v1")
        version = "/v1" if root != prefix else ""
        return f"{root}/rollout/{quote(rollout_id, safe='')}/attempt/{quote(attempt_id, safe='')}{version}"

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """The same model as a plain LLM whose endpoint names this rollout and attempt."""
        return LLM(
            endpoint=self.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),
            model=self.model,
            api_key=self.api_key,
            sampling_parameters=self.sampling_parameters,
        )


class PromptTemplate(Resource):
    """A prompt with places to fill in."""

    resource_type: Literal["prompt_template"] = "prompt_template"
    template: str
    engine: Literal["jinja", "f-string", "poml"]
    """Syntax of the template."""

    def format(self, **values: Any) -> str:
        """The template with ``values`` filled in, by the engine ``f-string`` or ``jinja``.

        Templates may be written by a model, so neither reaches into what it is given: an f-string's fields are names
        alone, and jinja runs in its sandbox. Raises ConfigError for a template that is
        wrong, asks for a value that is not given, or goes beyond the bounds of time and size; NotImplementedError for
        ``poml``.
        """
        if self.engine == "poml":
            raise NotImplementedError("engine is poml; format() renders f-string and jinja, use the poml package")
        try:
            if self.engine == "jinja":
                return compiled(self.template).render(values)
            return _render_f_string(self.template, values)
        except (KeyError, IndexError) as error:
            raise ConfigError(f"the template asks for {error}; the values are {', '.join(values) or 'none'}") from error
        except ConfigError:
            raise
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the template cannot be rendered: {error}") from error


ResourceUnion = Annotated[LLM | ProxyLLM | PromptTemplate, Field(discriminator="resource_type")]
NamedResources = dict[str, ResourceUnion]
"""Resources by the name agents know them by."""


class ResourcesUpdate(BaseModel):
    """One stored snapshot of named resources."""

    resources_id: str
    create_time: float
    update_time: float
    version: int
    """1 for a new snapshot; raised by each update."""
    resources: NamedResources


class ClaimedTask(NamedTuple):
    """A rollout that was claimed, and the resources that it is to be worked on with."""

    rollout: AttemptedRollout
    resources: ResourcesUpdate | None
    """None also where they could not be had: who needs them asks for them."""


# Rendering


def _render_f_string(template: str, values: Mapping[str, Any]) -> str:
    """An f-string's fields filled in. Raises ConfigError beyond the bounds; KeyError, IndexError, ValueError and
    TypeError as ``str.format``."""
    return _Fields().vformat(template, (), values)


class _Fields(string.Formatter):
    """``str.format`` without attributes and items of values, ``{x.__class__}`` would read the program's secrets, and
    without widths that fill the memory."""

    def __init__(self) -> None:
        self._budget = Budget()

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        if "." in field_name or "[" in field_name:
            raise ConfigError(f"the template's field {{{field_name}}} reaches into a value; give the part by a name")
        return super().get_field(field_name, args, kwargs)

    def format_field(self, value: Any, format_spec: str) -> str:
        if any(int(width) > MAX_WIDTH for width in re.findall(r"\d{1,18}", format_spec)):
            raise ConfigError(f"the template's format :{format_spec[:20]} has a width above {MAX_WIDTH}; leave it out")
        return self._budget.spend(super().format_field(value, format_spec))
