"""The LightningStore: the ledger of rollouts, attempts, spans, resources and workers, and the queue between them.

``SqlLightningStore.from_url("sqlite:///data/rollout.db")`` opens one. Names are imported when they are first used, so
that importing this package costs nothing.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
