"""How completions are made: in which form, how tokens are drawn, by which backend, and who works on a batch.

Each kind of backend says of itself: ``batch_invariant``, whether a request's tokens and logprobs are bitwise the same
whatever else is in its batch; and ``owns_batches``, whether the batches are ours to form, so that a set of requests
that is generated again as a whole gives the same again. Where both are false nothing can be repeated to the last bit,
and every sample is kept as it comes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from rollout_core.base.determinism import default_threads, numerics_identity, probe_device
from rollout_core.base.machine import bound_cores
from rollout_core.config.base import Address, Settings
from rollout_core.config.described import Described


def _as_text(value: Any) -> Any:
    # Text, so that the order of keys is kept wherever a configuration travels: properties are generated in that order.
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False) if isinstance(value, Mapping) else value


class JsonSchemaOutput(Settings):
    """Completions are JSON that a schema describes."""

    kind: Literal["json_schema"] = "json_schema"
    definition: Annotated[str, BeforeValidator(_as_text)]
    """The JSON Schema, as a table or as text."""

    @field_validator("definition")
    @classmethod
    def _is_a_schema(cls, text: str) -> str:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for

        try:
            schema = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from error
        if not isinstance(schema, dict):
            raise ValueError('a JSON Schema is an object here, such as {"type": "object"}')
        try:
            validator_for(schema).check_schema(schema)
        except SchemaError as error:
            where = ".".join(map(str, error.absolute_path)) or "(top level)"
            raise ValueError(f"not a JSON Schema: {where}: {error.message}") from error
        return _as_text(schema)


class RegexOutput(Settings):
    """Completions match a regular expression as a whole."""

    kind: Literal["regex"] = "regex"
    pattern: str = Field(min_length=1)
    """What the whole completion matches."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern


class ChoiceOutput(Settings):
    """Completions are one of these texts."""

    kind: Literal["choice"] = "choice"
    choices: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1)
    """The completion is one of these."""


class GrammarOutput(Settings):
    """Completions are words of a context-free grammar."""

    kind: Literal["grammar"] = "grammar"
    grammar: str = Field(min_length=1)
    """In the EBNF of llama.cpp (GBNF) or Lark's form; the first rule is ``root`` (GBNF) or ``start`` (Lark)."""


StructuredOutput = JsonSchemaOutput | RegexOutput | ChoiceOutput | GrammarOutput


class SamplingParams(Settings):
    """How tokens are drawn. Every field enters the sample id; those that came later only where they are not left at
    their default."""

    identity_without_default: ClassVar[frozenset[str]] = frozenset(
        {
            "logprobs",
            "min_tokens",
            "stop_token_ids",
            "ignore_eos",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "structured",
        }
    )

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy decoding."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: the likeliest tokens that together have this probability."""
    top_k: int = Field(default=-1, ge=-1)
    """-1 switches it off."""
    max_tokens: int = Field(default=16, ge=1)
    """Longest completion, in tokens."""
    min_tokens: int = Field(default=0, ge=0)
    """No end of sequence, stop token or stop string ends a completion before it has this many tokens."""
    seed: int | None = None
    """Mixed into every sample's own seed; another seed gives other completions."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a completion; they are not part of its text."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Tokens that end a completion, besides the model's own; they are among its token ids, not part of its text."""
    ignore_eos: bool = False
    """End-of-sequence tokens end nothing: completions continue until max_tokens, a stop string or a stop token."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Logits of tokens that occurred, in prompt or completion, are divided by it where they are positive, else
    multiplied; 1 switches it off."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken off the logits of tokens that occurred in the completion."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken off the logit of a token for each time that it occurred in the completion."""
    logprobs: int = Field(default=0, ge=0, le=20)
    """Most likely tokens whose log-probabilities are kept at every position, besides that of the token drawn; of those
    that could be drawn at all."""
    structured: StructuredOutput | None = None
    """A form that completions must have; one cut at max_tokens has only the beginning of it."""
    stream: Literal[False] = False
    """Only false: batch inference does not stream."""

    @field_validator("stop_token_ids")
    @classmethod
    def _one_order(cls, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(token_ids)))

    @property
    def bending(self) -> list[str]:
        """Fields that make tokens be drawn from another distribution than softmax(logits / temperature)."""
        names = {"top_p", "top_k", *self.identity_without_default} - {"logprobs", "stop_token_ids"}
        plain = SamplingParams()
        bent = sorted(name for name in names if getattr(self, name) != getattr(plain, name))
        return ["temperature", *bent] if self.temperature == 0 else bent

    @model_validator(mode="after")
    def _ends_are_in_reach(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        return self


CPU_BLOCK_SIZE = 32
"""Tokens of a block of vLLM's key/value cache on a CPU where prefixes are cached: what is shared is whole blocks, and
this is the smallest that its fast kernels take. vLLM's own default is 128, more than many a prompt has."""


class VLLMBackend(Settings):
    """vLLM in this process (the engine itself is a child process); device found by an explicit probe."""

    owns_batches: ClassVar[bool] = True

    kind: Literal["vllm"] = "vllm"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """``auto``: the model's own type on a GPU, float32 on a CPU."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion, in tokens; default: the model's own limit."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences generated together. Changes speed only where the engine is batch-invariant: a CPU in float32 with one
    thread."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Key/value cache on a CPU, in GiB. Changes speed only."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of the GPU's memory the engine may take. Changes speed only."""
    sleep: bool = False
    """Give the GPU's memory back while a learner of the same process trains, weights included, which are read again for
    the next samples. Changes speed only; on a CPU nothing."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share one copy of the model."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engine, on whose number last bits of a logprob may depend; with several the engine is not
    batch-invariant, so the shard is the unit of a commit. Default: one a core, but for one core that is left to the
    rest, or 1 with portable numerics."""
    enable_prefix_caching: bool | None = None
    """Take the keys and values of a prompt's beginning from an earlier request, such as another completion of the same
    prompt. Default: where that changes no bit (one CPU thread, float32, short contexts). True: always, and last bits of
    a logprob may change; false: never."""
    canary_tolerance: float | None = Field(default=None, gt=0)
    """Largest difference, in nats, between engine and trainer logprobs that a weight update may show; default: 2e-3 in
    float32, 5e-2 in half precision."""
    start_timeout_seconds: float = Field(default=900.0, gt=0)
    """Longest time an engine may take to start, loading the model included. Then the run fails."""
    hang_timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest time without a token while some are asked for; a step is one for all sequences. Then the engine is killed
    and started anew, and what it has not finished is generated again."""

    @property
    def concrete_dtype(self) -> str:
        """The dtype on this machine; ``auto`` is left on a GPU only, and means the model's own there."""
        return "float32" if self.dtype == "auto" and probe_device() == "cpu" else self.dtype

    @property
    def parity_tolerance(self) -> float:
        """See ``canary_tolerance``; nats."""
        return self.canary_tolerance or (2e-3 if self.concrete_dtype == "float32" else 5e-2)

    @property
    def fixed_threads(self) -> int | None:
        """CPU threads of the engine; None where vLLM chooses, or computes on a GPU."""
        return (self.num_threads or default_threads()) if probe_device() == "cpu" else None

    @property
    def is_single_threaded(self) -> bool:
        """Whether one CPU thread computes; several divide a step's rows among themselves by the whole batch."""
        if probe_device() != "cpu":
            return False
        if self.fixed_threads is not None:
            return self.fixed_threads == 1
        bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
        if bound == "nobind" and "OMP_NUM_THREADS" in os.environ:
            return os.environ["OMP_NUM_THREADS"] == "1"
        # By itself vLLM leaves one core free. It counts no hyperthreads, so there may be fewer threads than this.
        is_free = bound == "auto" and "VLLM_CPU_NUM_OF_RESERVED_CPU" not in os.environ
        # Time that a control group limits changes no number of threads.
        return bound_cores() - int(is_free) <= 1

    @property
    def batch_invariant(self) -> bool:
        """Whether a request's tokens and logprobs are bitwise the same whatever else is in its batch."""
        if probe_device() == "cpu":
            return self.concrete_dtype == "float32" and not self.enable_prefix_caching and self.is_single_threaded
        return os.environ.get("VLLM_BATCH_INVARIANT") == "1" and not self.enable_prefix_caching

    def cache_identity(self) -> Any:
        named = {
            "kind": self.kind,
            "device": probe_device(),
            "dtype": self.concrete_dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            # What a default decides changes no bit.
            "enable_prefix_caching": bool(self.enable_prefix_caching),
            **({"block_size": CPU_BLOCK_SIZE} if self.enable_prefix_caching and probe_device() == "cpu" else {}),
            **({} if self.fixed_threads is None else {"num_threads": self.fixed_threads}),
            **numerics_identity(),
        }
        # Where the machine decides how many threads there are, its number is no part of what counts as done.
        several = self.num_threads is not None and self.num_threads > 1
        if (probe_device(), self.concrete_dtype) == ("cpu", "float32") and not several:
            return named
        return {**named, "max_num_seqs": self.max_num_seqs, "batch_invariant": self.batch_invariant}


class TransformersBackend(Settings):
    """Plain ``transformers`` generation: slow, needs nothing else."""

    batch_invariant: ClassVar[bool] = True
    owns_batches: ClassVar[bool] = True

    kind: Literal["transformers"] = "transformers"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the weights."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion, in tokens. Default: the model's positions."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of generation, whatever the trainer uses: last bits of a logprob depend on their number."""
    start_timeout_seconds: float = Field(default=900.0, gt=0)
    """Longest time an engine may take to start, loading the model included. Then the run fails."""

    def cache_identity(self) -> Any:
        return {
            "kind": self.kind,
            "device": probe_device(),
            "dtype": self.dtype,
            "num_threads": self.num_threads,
            **numerics_identity(),
        }


class ScriptedBackend(Settings):
    """Deterministic answers without a model, for trying out a pipeline."""

    batch_invariant: ClassVar[bool] = True
    owns_batches: ClassVar[bool] = True

    kind: Literal["scripted"] = "scripted"
    text: str = "SCRIPTED:{prompt}"
    """Completion of every prompt; ``{prompt}`` is replaced."""
    delay_seconds: float = Field(default=0.0, ge=0)
    """Pretended time per sample. Changes speed only."""

    def cache_identity(self) -> Any:
        return {"kind": self.kind, "text": self.text}


def _endpoint_address(url: str) -> str:
    parts = urlsplit(url)
    _ = parts.port  # raises ValueError where it is no port
    if parts.scheme not in ("http", "https") or not parts.hostname or " " in url:
        raise ValueError("expected an address such as http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("an address is kept and shown, so it holds no key; name a secret as api_key")
    return url.rstrip("/")


EndpointAddress = Annotated[str, AfterValidator(_endpoint_address)]
"""URL of an API up to and with its version, such as ``http://127.0.0.1:8000/v1``."""


DECIDED_KEYS = ("model", "messages", "prompt", "system", "stream", "n", "max_tokens", "echo")
"""Of a request's body, which other settings, or the question, decide."""


def refuse_decided(where: str, keys: Iterable[str]) -> None:
    """Raise ValueError for a key that a configuration adds to, or takes from, each request's body and must not."""
    if decided := sorted(set(DECIDED_KEYS).intersection(keys)):
        raise ValueError(f"{where}.{decided[0]} is not for {where}: other settings or the question decide it")


class TokenBudget(Described):
    """The most that endpoints may take in a run. What a request could take is reserved before it is sent; the run stops
    before one that could take more than is left, and continues with a larger budget."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int | None = Field(default=None, ge=1)
    """Of prompts and answers together."""
    money: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """By ``prompt_price`` and ``answer_price``."""

    @model_validator(mode="after")
    def _limits_something(self) -> TokenBudget:
        if self.tokens is None and self.money is None:
            raise ValueError("give tokens or money; got neither")
        return self


class TokenPrices(Described):
    """What an endpoint asks for its answers."""

    prompt_price: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Of a million tokens of prompts."""
    answer_price: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Of a million tokens of answers."""

    def price_of(self, prompt_tokens: int, answer_tokens: int) -> float:
        """Money for so many tokens; what has no price costs nothing."""
        prompt, answer = (self.prompt_price or 0.0) * prompt_tokens, (self.answer_price or 0.0) * answer_tokens
        return (prompt + answer) / 1e6

    def refuse_unpriced(self, budget: TokenBudget | None, name: str) -> None:
        """Raise ValueError where a budget of money cannot be kept."""
        if budget is not None and budget.money is not None and None in (self.prompt_price, self.answer_price):
            raise ValueError(f"budget.money needs prompt_price and answer_price of each endpoint; {name} lacks one")


class PaidInference(TokenPrices):
    """An endpoint that generates for a budget of its own."""

    budget: TokenBudget | None = None
    """Most tokens and money of a run. Changes no result."""

    @property
    def name(self) -> str:
        """For people."""
        raise NotImplementedError("a subclass says which endpoint it is")

    @model_validator(mode="after")
    def _is_priced(self) -> Self:
        self.refuse_unpriced(self.budget, self.name)
        return self


class OpenAIBackend(Settings, PaidInference):
    """An endpoint with OpenAI's API, such as one of ``vllm serve``. Its answers are taken for those of the configured
    model, whose tokenizer is used; that it serves this model is for its operator to see to."""

    batch_invariant: ClassVar[bool] = False
    owns_batches: ClassVar[bool] = False

    kind: Literal["openai"] = "openai"
    url: EndpointAddress
    """Up to and with the version, such as ``http://127.0.0.1:8000/v1``."""
    served_model: str | None = Field(default=None, min_length=1)
    """Name of the model at the endpoint; default: the only one that it lists. Give it where it may serve another one
    later, whose answers would else pass for this one's."""
    api: Literal["completions", "chat"] = "completions"
    """``completions`` sends the prompt's token ids; ``chat`` the messages (of a plain prompt: one of a user), which the
    endpoint puts through its own chat template."""
    dialect: Literal["vllm", "openai"] = "vllm"
    """``vllm``: token ids and log-probabilities come back as they were sampled, all sampling fields are understood.
    ``openai``: only what OpenAI documents is sent; what comes back is text, token ids are made of it by the model's
    tokenizer, log-probabilities are not kept, so nothing can be trained on it."""
    api_key: str | None = Field(default=None, pattern=r"^[A-Z][A-Z0-9_]*$")
    """NAME of the secret that is the endpoint's key, sent as a bearer token: ``ROLLOUT_SECRET_<NAME>`` in the worker's
    environment, where ``ROLLOUT_SECRETS`` must list it."""
    max_concurrency: int = Field(default=64, ge=1)
    """Requests under way together. Changes speed only."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for an answer. Then the request is tried again."""
    max_retries: int = Field(default=6, ge=0)
    """Further tries after answers 408, 425, 429 and 5xx and lost connections."""
    backoff_seconds: float = Field(default=1.0, gt=0)
    """Wait before the first further try; doubled for each one after, up to a minute, less up to half of it at random.
    Where the endpoint asks for a longer wait (Retry-After), that counts."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion, in tokens; default: the model's own limit."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.served_model} at {self.url}" if self.served_model else self.url

    def cache_identity(self) -> Any:
        return {
            "kind": self.kind,
            "url": self.url,
            "served_model": self.served_model,
            "api": self.api,
            "dialect": self.dialect,
        }


class EndpointModel(Settings, PaidInference):
    """A model at an endpoint, whose files are not here. Its answers count as those of ``model`` in ``revision`` at this
    address."""

    batch_invariant: ClassVar[bool] = False
    owns_batches: ClassVar[bool] = False

    kind: Literal["endpoint"]
    url: EndpointAddress
    """Up to and with the version, such as ``https://api.openai.com/v1``."""
    api: Literal["chat", "completions", "anthropic"] = "chat"
    """``chat``: posted to ``/chat/completions``; ``completions``: plain texts to ``/completions``; ``anthropic``: to
    ``/messages``."""
    model: str = Field(min_length=1)
    """Name of the model at the endpoint."""
    revision: str = Field(default="", max_length=200)
    """What you call the model's present state, such as a date. Another one has every question asked anew."""
    api_key: str | None = Field(default=None, pattern=r"^[A-Z][A-Z0-9_]*$")
    """NAME of the secret that is the endpoint's key: ``ROLLOUT_SECRET_<NAME>`` in the worker's environment, where
    ``ROLLOUT_SECRETS`` must list it."""
    body: dict[str, Any] = Field(default={})
    """Further keys of each request's body. Refused are keys that other settings, or the question, decide, such as
    ``model``."""
    leave_out: tuple[str, ...] = ()
    """Keys of the body that are not sent, such as ``temperature``, which some models refuse. Those that ``body`` must
    not have must be sent."""
    max_tokens_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Key of the body that ``sampling.max_tokens`` is sent as; some models of OpenAI want ``max_completion_tokens``."""
    max_concurrency: int = Field(default=16, ge=1)
    """Most requests under way. They become fewer while the endpoint answers 429, and more again afterwards."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Most requests a minute. Default: any number."""
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Most tokens a minute, of prompts and answers. Default: any number."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for an answer. Then the request is tried again."""
    max_retries: int = Field(default=6, ge=0)
    """Further tries after answers 408, 425, 429 and 5xx and lost connections."""
    backoff_seconds: float = Field(default=1.0, gt=0)
    """Wait before the first further try; doubled for each one after, up to a minute. Where the endpoint asks for a
    longer wait (Retry-After), that counts."""

    @model_validator(mode="after")
    def _body_leaves_the_rest_alone(self) -> EndpointModel:
        refuse_decided("body", self.body)
        refuse_decided("leave_out", self.leave_out)
        if "max_completion_tokens" in {*self.body, *self.leave_out}:
            raise ValueError(
                "max_completion_tokens is neither for body nor for leave_out: set max_tokens_key = "
                "'max_completion_tokens', and sampling.max_tokens is sent as that"
            )
        if self.api != "chat" and self.max_tokens_key != "max_tokens":
            raise ValueError(f"max_tokens_key is 'max_completion_tokens', which api {self.api!r} has not; leave it out")
        return self

    @property
    def uri(self) -> str:
        """Which model it is, for people."""
        return f"{self.model} at {self.url}" + (f" ({self.revision})" if self.revision else "")

    @property
    def name(self) -> str:
        """For people."""
        return self.uri

    def cache_identity(self) -> Any:
        """What decides an answer."""
        named = {"kind", "url", "api", "model", "revision", "body", "leave_out"}
        if self.max_tokens_key != "max_tokens":
            named.add("max_tokens_key")
        return self.model_dump(mode="json", include=named)


EngineConfig = VLLMBackend | TransformersBackend | ScriptedBackend
"""Backends whose weights are ours to replace; training needs one of these."""
BackendConfig = EngineConfig | OpenAIBackend
AnyBackend = BackendConfig | EndpointModel
"""All that answers."""


class AdaptConfig(Settings):
    """A cluster that grows and shrinks with the work there is."""

    minimum: int = Field(default=0, ge=0)
    """Fewest workers."""
    maximum: int = Field(ge=1)
    """Most workers."""

    @model_validator(mode="after")
    def _in_order(self) -> AdaptConfig:
        if self.minimum > self.maximum:
            raise ValueError(f"minimum is {self.minimum} and maximum {self.maximum}; give minimum <= maximum")
        return self


SCHEDULER_ADDRESS = r"^(tcp|tls|ws|wss|ucx|ucxx)://\S+$"


Resources = dict[Annotated[str, StringConstraints(pattern=r"^[^\s=]+$")], Annotated[float, Field(gt=0)]]
"""Amounts by the names that ``dask worker --resources`` gives them."""


class DaskCluster(Settings):
    """A Dask cluster, one engine a worker process. Give ``address`` or ``cluster``."""

    address: Address | None = Field(default=None, pattern=SCHEDULER_ADDRESS)
    """Of a running scheduler, such as ``tcp://scheduler:8786``, or ``tls://...``."""
    cluster: str | None = Field(default=None, pattern=r"^\w+(\.\w+)+$")
    """Import path of a cluster class, such as ``distributed.LocalCluster``: a cluster for the length of this run."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the cluster class. Secrets do not belong here: the run's parameters show them."""
    adapt: AdaptConfig | None = None
    """Let the cluster have as many workers as the work needs."""
    wait_seconds: float = Field(default=600.0, gt=0)
    """A run that has had no worker for this long fails."""

    @model_validator(mode="after")
    def _one_cluster(self) -> DaskCluster:
        if (self.address is None) == (self.cluster is None):
            got = "neither" if self.address is None else "both"
            raise ValueError(f"give either address, of a running scheduler, or cluster, a class; got {got}")
        if self.address is not None and (self.options or self.adapt is not None):
            raise ValueError("options and adapt are for a cluster class; a running scheduler has its own")
        return self


class DaskConfig(DaskCluster):
    """Shards run on the workers of a Dask cluster."""

    gpus_per_worker: float | None = Field(default=None, gt=0)
    """What each worker offers as its Dask resource ``GPU`` (``dask worker --resources GPU=1``). A shard asks for half
    of it, since two are under way on a worker, and workers that offer less get none. Default: every worker works."""
    resources: Resources = Field(default_factory=dict)
    """The same of other resources, by name."""
    max_workers: int | None = Field(default=None, ge=1)
    """Most workers that are used at a time. Default: all."""

    @property
    def wanted(self) -> dict[str, float]:
        """What a worker has to offer."""
        return self.resources | ({} if self.gpus_per_worker is None else {"GPU": self.gpus_per_worker})


StagePlace = Literal["generation", "scoring", "learning"]
"""What stages do that a cluster's workers may run; the others take little time and stay in the flow's process."""


class StagePlacement(Settings):
    """Stages of one kind run on workers that offer ``resources``, one at a time on each."""

    resources: Resources = Field(default_factory=dict)
    """Such as ``{ GPU = 1 }``, for workers started with ``--resources "GPU=1"``. Default: any worker."""


class SharedPlacement(StagePlacement):
    """Several workers share each stage of this kind."""

    workers: int | None = Field(default=None, ge=1)
    """Most workers that do. Default: all that offer the resources."""


class PlacementConfig(Settings):
    """Stages run on the workers of a Dask cluster; a kind without a table stays in the flow's process.

    It changes no result, and is part of no cache key.
    """

    dask: DaskCluster
    """The cluster whose workers run them."""
    generation: SharedPlacement | None = None
    """Completions of PPO's and GRPO's prompts, of evaluations and of batch inference."""
    scoring: SharedPlacement | None = None
    """Rewards of completions. Only rewards that look at one completion at a time are shared."""
    learning: StagePlacement | None = None
    """Updates of the weights."""

    @model_validator(mode="after")
    def _something_is_placed(self) -> PlacementConfig:
        if not self.kinds:
            raise ValueError("give at least one of the tables generation, scoring and learning; got none")
        return self

    @property
    def kinds(self) -> dict[StagePlace, StagePlacement]:
        """What is placed, by the name of its table."""
        found: dict[StagePlace, StagePlacement | None] = {
            "generation": self.generation,
            "scoring": self.scoring,
            "learning": self.learning,
        }
        return {name: place for name, place in found.items() if place is not None}

    def of(self, kind: StagePlace) -> DaskConfig:
        """The cluster, with what its workers have to offer for stages of this kind."""
        place = self.kinds[kind]
        most = place.workers if isinstance(place, SharedPlacement) else 1
        # Only what was given: defaults depend on each other.
        given = self.dask.model_dump(exclude_unset=True)
        return DaskConfig(**given, resources=place.resources, max_workers=most)

    def cache_identity(self) -> Any:
        return None


class WorkersConfig(Settings):
    """Fan-out. Changes speed only."""

    count: int = Field(default=1, ge=1)
    """Shards worked on at the same time. One more is made ready meanwhile, so that the engine never waits for it."""
    shard_size: int = Field(default=4096, ge=1)
    """Prompts of a shard, which is one retryable, cached task."""
    claim_size: int | None = Field(default=None, ge=1)
    """Samples a worker claims at a time. Default: 256 on a cluster, where an idle worker may take what a busy one has
    not claimed, and 1024 on one machine."""
    stale_after_seconds: float = Field(default=30.0, ge=1)
    """The claims of a worker of another machine that was silent for so long are taken over. Workers give a sign of life
    every fifth of it."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """What a worker costs in an hour; the closing table then shows the cost of a million tokens."""
    dask: DaskConfig | None = None
    """Many machines instead of threads of this one."""

    @model_validator(mode="after")
    def _count_is_of_threads(self) -> WorkersConfig:
        if self.dask is not None and self.count != 1:
            raise ValueError(
                f"count is {self.count}, but it is for threads of one machine; a Dask cluster has the workers it has "
                "(dask.options.n_workers, dask.adapt, or as many as were started)"
            )
        return self

    @property
    def claimed_together(self) -> int:
        """``claim_size``, or its default."""
        return self.claim_size or (1024 if self.dask is None else 256)

    def cache_identity(self) -> Any:
        return None
