"""Generation: the backend protocol, its implementations, and the per-sample ledger that cannot lose a completion.

Names are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
