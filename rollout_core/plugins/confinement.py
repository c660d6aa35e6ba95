"""What a plugin's process gives up before the plugin's code runs in it."""

from __future__ import annotations

import os

from rollout_core.base.errors import ConfigError
from rollout_core.sandbox import kernel


def confine(name: str, *, network: bool, gpu: bool) -> None:
    """Take network and GPUs from this process, and from all that it starts. Raises ConfigError where the machine does
    not let it. The process has one thread."""
    if not gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if network:
        return
    try:
        _leave_network()
    except OSError as error:
        raise ConfigError(
            f"plugin {name}: network_allowlist: got [], and this machine does not let a process give up its network "
            f"({error}); expected user namespaces, which `rollout doctor` tells of, or ['*'] for a plugin that may "
            "have the network"
        ) from error


def _leave_network() -> None:
    step = "a network namespace"
    if os.geteuid() == 0:
        try:
            return kernel.unshare(kernel.NEW_NET, step)
        except OSError:
            pass  # root of a container that may not; perhaps in a namespace of its own
    ids = os.geteuid(), os.getegid()
    kernel.unshare(kernel.NEW_USER | kernel.NEW_NET, step)
    kernel.map_ids(ids, ids)
