"""Work pools and blocks that the deployments in ``prefect.yaml`` count on. Creating what is there changes nothing.

Run: python -m deployments.pools   (against the configured Prefect API)
"""

from __future__ import annotations

from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists

from blocks import ContentAddressedStorage, RolloutDatabase

POOLS = {
    "cpu": "Flows that need no GPU, and everything on a machine without one.",
    "gpu": "Flows that generate or train on GPUs.",
}
POOL_TYPE = "process"


def create_pools() -> None:
    """Create the work pools and register the block types."""
    with get_client(sync_client=True) as client:
        for name, description in POOLS.items():
            try:
                client.create_work_pool(WorkPoolCreate(name=name, type=POOL_TYPE, description=description))
            except ObjectAlreadyExists:
                continue
    for block in (ContentAddressedStorage, RolloutDatabase):
        block.register_type_and_schema()


if __name__ == "__main__":
    create_pools()
