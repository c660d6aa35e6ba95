"""Episodes of several turns: an environment gives a task, the model answers or calls tools, and what came of it is
rewarded. `Done` and `ToolError` are what an environment's own file imports."""

from rollout_core.environments.protocol import Done
from rollout_core.environments.tools.results import ToolError

__all__ = ["Done", "ToolError"]
