"""vLLM's own OpenAI server as the child process of a replica: ``python -m rollout_core.serving.vllm_server JOB``.

It listens on a Unix socket alone. It ends with the process that started it, also by ``kill -9``, and its engine's
processes end with it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from rollout_core.base.determinism import check_numerics, probe_device
from rollout_core.base.errors import RolloutError
from rollout_core.base.process_tree import signal_at_parents_end
from rollout_core.inference.engine_process import ENGINES, end_with_engine, noting_reason, started_ahead
from rollout_core.inference.vllm_backend import (
    engine_options,
    import_vllm,
    prepare_engine_environment,
    thread_environment,
)
from rollout_core.models.facts import known_ids
from rollout_core.models.pretrained import load_tokenizer, refuse_own_code
from rollout_core.serving.vllm_job import ServerJob


def main() -> None:
    """Serve until SIGTERM."""
    signal_at_parents_end(signal.SIGKILL)
    job = ServerJob.model_validate_json(sys.argv[1])
    if os.getppid() != job.owner:
        return  # it ended before the kernel was asked to say so
    # Ctrl-C in a terminal is for the owner to answer, which lets requests finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with noting_reason(ENGINES):
            _start(job)
    except (ValueError, OSError, RolloutError):
        end_with_engine(1)  # the owner says why
    end_with_engine(0)


def _start(job: ServerJob) -> None:
    prepare_engine_environment(job.backend, probe_device())
    # Has vLLM's server take calls to its workers, and drop what it caches, on the socket that the owner alone reaches.
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    check_numerics(job.backend.concrete_dtype)
    refuse_own_code(job.folder)
    if probe_device() != "cpu":
        return _serve(job)
    with started_ahead(thread_environment(job.backend)):
        _serve(job)


def _serve(job: ServerJob) -> None:
    import_vllm()
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args: Any = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for name, value in _arguments(job).items():
        assert hasattr(args, name), f"vLLM's server has no argument {name}"
        setattr(args, name, value)
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args))


def _arguments(job: ServerJob) -> dict[str, Any]:
    known = known_ids(job.folder, load_tokenizer(job.folder))
    # Conversations repeat their beginnings with every message.
    caches_prefixes = job.backend.enable_prefix_caching is not False
    return engine_options(job.backend, known=known, caches_prefixes=caches_prefixes) | {
        "model": str(job.folder),
        "served_model_name": [job.name],
        "trust_remote_code": False,
        "uds": str(job.socket),
        "disable_uvicorn_access_log": True,
        "uvicorn_log_level": "warning",
        "enable_auto_tool_choice": job.tool_call_parser is not None,
        # Calls have the form of their tool's parameters, though clients seldom send `strict`.
        "tool_strict_level": "parameter",
        "tool_call_parser": job.tool_call_parser,
    }


if __name__ == "__main__":
    main()
