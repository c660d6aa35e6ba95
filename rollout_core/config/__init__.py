"""Every run as a typed, strict description: the TOML schema, the flows' parameters and the published JSON Schema.

Alternatives are plain unions of models with a Literal ``kind`` (the orchestrator's run form shows those as tabs).
Unknown keys are refused with the nearest known key. Values that change speed but never results say so; they stay out of
cache keys (`cache_identity`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
