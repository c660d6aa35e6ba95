"""Learners: pure losses and advantages, one training loop, and the algorithms that feed it.

Names are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
