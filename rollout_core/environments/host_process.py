"""In a process of its own: an environment's code is loaded as it was read, and its objects are hosted
(`rollout_core.environments.object_host`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.environments.object_host import answer
from rollout_core.rewards.call_forms import named_object
from rollout_core.rewards.user_code import UserCode, importable


def handle(given: dict[str, Any], report: Callable[[int], None]) -> dict[str, Any]:
    """As `answer`, of the environment of a document. Raises ConfigError where it cannot be loaded."""
    code = UserCode.from_document(given["code"])
    with importable(code, alone=True):
        return answer(given, maker(named_object(code), given["name"], given["config"]), report)


def maker(made: Any, name: str, config: Mapping[str, Any]) -> Callable[[], Any]:
    """What makes an object of the class or function ``made``. Raises ConfigError where it does not take ``config``."""
    if not callable(made):
        raise ConfigError(f"environment {name} is a {type(made).__name__}; expected a class, or a function")
    try:
        inspect.signature(made).bind(**config)
    except TypeError as error:
        raise ConfigError(
            f"environment {name} has the signature {inspect.signature(made)}, and config gives "
            f"{', '.join(config) or 'nothing'}: {error}"
        ) from error
    except ValueError:  # some built-ins have no signature
        pass
    return lambda: made(**config)
