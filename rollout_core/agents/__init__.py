"""Agents: any program becomes trainable without a change of its code.

``Trainer(algorithm=Baseline()).fit(agent, tasks)`` runs one. Names are imported when they are first used, so that
importing this package costs nothing. It needs the extra ``agents``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
