"""How tokens are drawn."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rollout_core.config.base import Settings
from rollout_core.config.structured import StructuredOutput


class SamplingParams(Settings):
    """How tokens are drawn. Every field enters the sample id; those that came later only where they are not left at
    their default."""

    identity_without_default: ClassVar[frozenset[str]] = frozenset(
        {
            "logprobs",
            "min_tokens",
            "stop_token_ids",
            "ignore_eos",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "structured",
        }
    )

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy decoding."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """-1 switches it off."""
    max_tokens: int = Field(default=16, ge=1)
    """Longest completion, in tokens."""
    min_tokens: int = Field(default=0, ge=0)
    """No end of sequence, stop token or stop string ends a completion before it has this many tokens."""
    seed: int | None = None
    """Mixed into every sample's own seed; another seed gives other completions."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a completion; they are not part of its text."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Tokens that end a completion, beside the model's own ends; they are among its token ids, not part of its text."""
    ignore_eos: bool = False
    """The model's own ends end nothing: completions go on until max_tokens, a stop string or a stop token."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Logits of tokens that occurred, in prompt or completion, are divided by it where they are positive, else
    multiplied; 1 switches it off."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken off the logits of tokens that occurred in the completion."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken off the logit of a token for each time that it occurred in the completion."""
    logprobs: int = Field(default=0, ge=0, le=20)
    """Most likely tokens whose log-probabilities are kept at every position, beside that of the token drawn; of those
    that could be drawn at all."""
    structured: StructuredOutput | None = None
    """A form that completions must have; one cut at max_tokens has only the beginning of it."""
    stream: Literal[False] = False
    """Only false: batch inference does not stream."""

    @field_validator("stop_token_ids")
    @classmethod
    def _one_order(cls, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(token_ids)))

    @model_validator(mode="after")
    def _ends_are_in_reach(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        return self
