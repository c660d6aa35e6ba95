"""What vLLM's server is started with; apart from the server itself, which imports what an engine needs."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from rollout_core.config import VLLMBackend


class ServerJob(BaseModel):
    """The one argument of `rollout_core.serving.vllm_server`, as JSON."""

    owner: int
    """The process that started it."""
    folder: Path
    """Of the model."""
    name: str
    """Of the model for clients. Its id is none, as weights change."""
    socket: Path
    backend: VLLMBackend
    tool_call_parser: str | None = None
    """vLLM's parser of the calls that the model writes; None: no ``tool_choice`` of ``auto``."""
