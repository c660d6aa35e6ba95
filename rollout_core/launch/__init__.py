"""Updates in processes of their own: the launcher that watches them, and the rank that works."""

from rollout_core.launch.launcher import kept_process, run_update

__all__ = ["kept_process", "run_update"]
