"""Whether a model can be had and used, before any work."""

from __future__ import annotations

from pathlib import Path

from rollout_core.config import ModelSource
from rollout_core.models.facts import ModelFacts
from rollout_core.models.locating import describe
from rollout_core.models.model_import import check_adapter
from rollout_core.objects import ObjectStore


def check_model(source: ModelSource, base: Path, objects: ObjectStore | None = None) -> ModelFacts:
    """All that can be said of ``source`` before any work; of what is elsewhere, by configuration and tokenizer alone.

    Raises ConfigError for what is wrong, Unchecked when neither can be had now.
    """
    with describe(source, base, objects) as found:
        facts = found.inspect()
        if source.adapter is not None:
            check_adapter(source.adapter, found.folder, base, objects)
        return facts
