"""An environment as users of verifiers write it: tools, turns that it answers itself, and a rubric."""

from tool_notes.notes import load_environment

__all__ = ["load_environment"]
