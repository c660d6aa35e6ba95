"""What every inference backend is: requests in, completions out as they finish, weights swapped in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId
from rollout_core.config import SamplingParams
from rollout_core.data.samples import Completion, Failure, Outcome


@dataclass(frozen=True)
class Request:
    """One completion to generate."""

    key: str
    """Names the request among those in flight; the sample id."""
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    """Seed of this request alone, in [0, 2**31): the same request draws the same tokens in any batch."""
    prompt_text: str = field(default="", compare=False)
    messages: Sequence[Mapping[str, str]] = field(default=(), compare=False)
    """Of a chat, before the template: role and content of each."""


@dataclass(frozen=True)
class ModelRef:
    """A model's content id and a local folder that holds it."""

    content_id: ContentId
    folder: Path


class InferenceBackend(Protocol):
    """Generates completions with one model at a time.

    ``stream`` is the primary form; it may be used by one caller at a time. ``generate`` is its gathered form.
    """

    @property
    def model_id(self) -> ContentId:
        """Content of the weights in use."""
        ...

    @property
    def batch_invariant(self) -> bool:
        """True where a request's tokens and logprobs are bitwise the same whatever else is in its batch."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus completion, in tokens; None where the backend knows no limit."""
        ...

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Outcome]:
        """Yield outcomes as they are known, in any order. Requests are drawn from the iterable as there is room.

        None among the requests means: none now, ask again soon. It comes only while requests are under way.
        """
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions of ``requests``, in their order. Raises Fatal where one fails."""
        ...

    def update_weights(self, model: ModelRef) -> None:
        """Use another model of the same architecture from now on. Raises Fatal when the parity check fails."""
        ...

    def close(self) -> None:
        """Free the engine. The backend is not used afterwards."""
        ...


class GathersStream:
    """`generate` in terms of `stream`."""

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Outcome]:
        raise NotImplementedError("a backend implements stream")

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        finished: dict[str, Completion] = {}
        for outcome in self.stream(requests):
            if isinstance(outcome, Failure):
                raise Fatal(f"request {outcome.key[:12]} failed: {outcome.reason}")
            finished[outcome.key] = outcome
        return [finished[request.key] for request in requests]
