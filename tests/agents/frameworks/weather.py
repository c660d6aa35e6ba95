"""What all of these agents know: how warm it is. It is the user's own module next to theirs."""

from __future__ import annotations

DEGREES = {
    "Lisbon": 17,
    "Oslo": 3,
    "Cairo": 31,
    "Lima": 19,
    "Kyoto": 12,
    "Accra": 29,
    "Quito": 14,
    "Riga": 5,
    "Perth": 24,
    "Turin": 11,
    "Minsk": 2,
    "Dakar": 27,
}


def degrees_in(city: str) -> str:
    """What a weather service says."""
    return f"{DEGREES[city]} degrees" if city in DEGREES else f"There is no city {city}."


def is_right(task: dict, answer: str | None) -> bool:
    """Whether the answer has the temperature of the task's city."""
    return f"{task['degrees']} degrees" in (answer or "")
