"""Stages: retryable, cached Prefect tasks over ``rollout_core``. Each is one module-level function under `stage`.

Names are imported when they are first used. The decorator itself is `tasks.stage.stage`.
"""

import lazy_loader

from rollout_core.base.own_packages import require_own

require_own("blocks")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
