"""Prefect blocks: saved, typed settings that build a `rollout_core` object.

Register them with ``prefect block register -m blocks``.
"""

from blocks.database import RolloutDatabase
from blocks.storage import ContentAddressedStorage

__all__ = ["ContentAddressedStorage", "RolloutDatabase"]
