"""Updates in processes of their own: what a rank is told, what it does, and who watches it."""

from rollout_core.launch.launcher import run_update

__all__ = ["run_update"]
