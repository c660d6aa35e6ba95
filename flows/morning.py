"""The entry point of deployments that an earlier version registered; it goes with the next release."""

from flows.daily_report import morning_check

__all__ = ["morning_check"]
