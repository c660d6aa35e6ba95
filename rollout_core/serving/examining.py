"""The child process that looks at weights before they are served: ``python -m rollout_core.serving.examining JOB``. It
writes an `Examined` as JSON to its standard output."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from rollout_core.base.errors import RolloutError
from rollout_core.base.process_tree import signal_at_parents_end
from rollout_core.config import VLLMBackend
from rollout_core.inference.backend import ModelRef
from rollout_core.inference.engines import architecture_of
from rollout_core.inference.vllm_backend import canary_prompt, trainer_logprobs
from rollout_core.models.pretrained import load_tokenizer
from rollout_core.serving.weights import Canary, Examined, ExamineJob


def main() -> None:
    """Examine the job's model."""
    signal_at_parents_end(signal.SIGKILL)
    job = ExamineJob.model_validate_json(sys.argv[1])
    if os.getppid() != job.owner:
        return  # it ended before the kernel was asked to say so
    os.nice(5)  # requests go first
    try:
        fits = job.instead_of is not None and _fits(job.instead_of, job.model, job.backend)
        found = Examined(canary=_canary(job.model, job.num_tokens) if job.num_tokens else None, fits=fits)
    except RolloutError as error:
        sys.exit(str(error))
    sys.stdout.write(found.model_dump_json())


def _fits(old: ModelRef, new: ModelRef, backend: VLLMBackend) -> bool:
    """vLLM's server draws by the defaults of a model's generation_config.json, so these count as well."""
    return architecture_of(old, backend).suits(architecture_of(new, backend)) and _drawing(old) == _drawing(new)


def _drawing(model: ModelRef) -> dict[str, Any]:
    file = model.folder / "generation_config.json"
    written = json.loads(file.read_bytes()) if file.is_file() else {}
    return {key: value for key, value in written.items() if key not in ("_from_model_config", "transformers_version")}


def _canary(model: ModelRef, num_tokens: int) -> Canary:
    tokens = canary_prompt(len(load_tokenizer(model.folder)), num_tokens)
    return Canary(token_ids=tokens, logprobs=trainer_logprobs(model, tokens[:1], tokens[1:]))


if __name__ == "__main__":
    main()
