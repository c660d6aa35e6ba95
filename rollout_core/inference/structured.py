"""Guided decoding in vLLM's terms, of its engine and of its server."""

from __future__ import annotations

from typing import Any

from rollout_core.config import ChoiceOutput, GrammarOutput, JsonSchemaOutput, RegexOutput, StructuredOutput


def vllm_constraint(structured: StructuredOutput) -> dict[str, Any]:
    """The one argument of vLLM's ``StructuredOutputsParams``, by name."""
    match structured:
        case JsonSchemaOutput():
            return {"json": structured.definition}
        case RegexOutput():
            return {"regex": structured.pattern}
        case ChoiceOutput():
            return {"choice": list(structured.choices)}
        case GrammarOutput():
            return {"grammar": structured.grammar}
