"""Episodes of several turns: an environment gives a task, the model answers or calls tools, and what came of it is
rewarded. `Done`, `Tool` and `ToolError` are what an environment's own file imports."""

from rollout_core.environments.protocol import Done, Tool
from rollout_core.environments.tools.results import ToolError

__all__ = ["Done", "Tool", "ToolError"]
