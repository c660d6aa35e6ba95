"""Content-addressed bytes, streams and trees over a local folder, memory, S3 or GCS.

What is put is named by the blake3 digest of its bytes, is durable when the call returns, is never half visible, and is
verified whenever it is read. ``ObjectStore.from_url`` is the entry; the layout is the same on every provider.
"""

from rollout_core.objects.store import ObjectStore
from rollout_core.objects.trees import TreeFile, TreeManifest

__all__ = ["ObjectStore", "TreeFile", "TreeManifest"]
