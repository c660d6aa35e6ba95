"""rollout_core: post-training stages, ledger, snapshots and learners, true without an orchestrator.

Nothing here imports Prefect. Heavy libraries (torch, vllm, transformers) are imported only by the modules that need
them, so importing this package, or any module of plain data in it, costs little.
"""

__version__ = "0.1.0"
DISTRIBUTION = "rollout-post-training"
"""What pip calls this project; `rollout` there is somebody else's."""
