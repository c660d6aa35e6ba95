"""A user's reward in a process of its own: what goes wrong there fails the scoring, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.base.isolation.child import Child, Ended, Interrupted
from rollout_core.base.isolation.limits import Limits
from rollout_core.rewards.scoring import INPUT_FIELDS, RewardInput, places, whole_batch
from rollout_core.rewards.user_code import UserCode


class RewardProcess:
    """A reward function that is loaded and called in a child process, which stays from call to call.

    Raises ConfigError where the function cannot be loaded, as `load_function` does.
    """

    def __init__(
        self, code: UserCode, kwargs: Mapping[str, Any], limits: Limits, on_line: Callable[[str], None]
    ) -> None:
        self._code = code
        self._kwargs = dict(kwargs)
        name = code.callable
        self._child = Child(
            "rollout_core.rewards.worker:handle",
            limits,
            on_line=lambda line: on_line(f"reward {name}: {line}"),
            prepare=self._load,
        )
        self._child.start()

    def _load(self, ask: Callable[[Any], Any]) -> None:
        try:
            ask({"code": self._code.document(), "kwargs": self._kwargs})
        except Ended as error:
            raise ConfigError(f"reward {self._code.callable} cannot be loaded: it {error}") from error
        except Interrupted as error:
            raise Recoverable(f"reward {self._code.callable} was not loaded: its process {error.reason}") from error

    def __call__(self, inputs: Sequence[RewardInput]) -> list[float]:
        """The reward of each input. Raises as `score` does."""
        rows = [[_plain(getattr(sample, name)) for name in INPUT_FIELDS] for sample in inputs]
        try:
            return self._child.call({"inputs": rows})
        except Ended as error:
            place = _place(error.place, inputs)
            raise Fatal(f"reward {self._code.callable} failed on {place}: it {error}") from error
        except Interrupted as error:
            place = _place(error.place, inputs)
            raise Recoverable(
                f"reward {self._code.callable} was interrupted on {place}: its process {error.reason}"
            ) from error

    def close(self) -> None:
        """End the child."""
        self._child.close()


def _place(place: int | None, inputs: Sequence[RewardInput]) -> str:
    """Where it was, in words; what the process tells may be no place."""
    known = list(places(inputs))
    return known[place] if place is not None and 0 <= place < len(known) else whole_batch(inputs)


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Mapping):
        return dict(value)
    return value if isinstance(value, str | int | list) or value is None else list(value)
