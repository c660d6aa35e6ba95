"""Owner of vLLM engines, to be killed by ``test_vllm``: ``python engine_child.py MODEL_FOLDER``.

Kills its first engine and sees what comes of it, then starts another and generates with it until killed.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

import psutil

from rollout_core.base.errors import Recoverable
from rollout_core.base.ids import hash_bytes
from rollout_core.config import SamplingParams, VLLMBackend
from rollout_core.inference.base import ModelRef, Request
from rollout_core.inference.vllm_backend import VLLMEngine


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def engine_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.name().startswith("VLLM")]


def requests():
    params = SamplingParams(max_tokens=40)
    return (Request(f"r{number}", [5, 6, 7], params, number) for number in itertools.count())


def main() -> None:
    config = VLLMBackend(max_model_len=64, max_num_seqs=8)
    model = ModelRef(hash_bytes(b"any"), Path(sys.argv[1]))

    first = VLLMEngine(config, model)
    processes = engine_processes()
    try:
        for count, _ in enumerate(first.stream(requests())):
            if count == 20:
                processes[0].send_signal(signal.SIGKILL)
    except Recoverable as error:
        say("recoverable", error)
    first.close()
    psutil.wait_procs(processes, timeout=10)
    say("left", *[process.pid for process in engine_processes()])

    second = VLLMEngine(config, model)
    for count, _ in enumerate(second.stream(requests())):
        if count == 20:
            say("generating", *[process.pid for process in engine_processes()])


if __name__ == "__main__":
    main()
