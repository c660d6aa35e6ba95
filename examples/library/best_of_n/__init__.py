"""Best-of-n fine-tuning: draw n completions of each prompt, train on the best of them, and again (arXiv:2304.06767)."""

from rollout_core.base.determinism import prepare_environment

# Before torch reads its environment, so that runs on a GPU repeat bit for bit.
prepare_environment()
