"""A number for each completion: rules, functions of the user's own in processes of their own, models.

Names are imported when they are first used: a process that runs a user's code starts with this package.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
