"""Content-addressed bytes, streams and trees over a local folder, memory, S3 or GCS.

What is put is named by the blake3 digest of its bytes, is durable when the call returns, is never half visible, and is
verified whenever it is read. ``ObjectStore.from_url`` is the entry; the layout is the same on every provider. Names are
imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
