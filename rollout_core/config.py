"""Every run as a typed, strict description: the TOML schema, the flows' parameters and the published JSON Schema.

Alternatives are plain unions of models with a Literal ``kind`` (the orchestrator's run form shows those as tabs).
Unknown keys are refused with the nearest known key. Values that change speed but never results say so; they stay out of
cache keys (`cache_identity`).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollout_core.errors import ConfigError
from rollout_core.rewards import ExactMatchReward, RewardSpec

SCHEMA_VERSION = 1


class Settings(BaseModel):
    """Base of every configuration model: unknown keys are errors, values never change after parsing."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def cache_identity(self) -> Any:
        """What of this model enters a stage's cache key: by default the identities of all its fields."""
        return {name: identity(getattr(self, name)) for name in type(self).model_fields}


def identity(value: Any) -> Any:
    """What of a stage input enters its cache key, as JSON. Raises ConfigError for what is no id or small value."""
    if isinstance(value, Settings):
        return value.cache_identity()
    if isinstance(value, BaseModel):
        return {name: identity(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): identity(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [identity(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ConfigError(
        f"a stage input of type {type(value).__name__} has no identity; give content ids and small typed values"
    )


class RunInfo(Settings):
    """How people call this run."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    """Label of the run's snapshots and resources; letters, digits, dots, dashes."""
    tags: tuple[str, ...] = ()
    """Free labels shown beside the run."""
    refresh: bool = False
    """Compute every stage again, cached or not. Samples already in the store's ledger are still not generated twice."""

    def cache_identity(self) -> Any:
        return None


class ModelSource(Settings):
    """Where a model comes from. Its content, not this address, enters cache keys."""

    uri: str = Field(min_length=1)
    """A folder in Hugging Face format, a hub id such as ``Qwen/Qwen2.5-0.5B-Instruct``, or the content id of a
    checkpoint in the object store."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    tokenizer: str | None = None
    """Folder or hub id of another tokenizer than the model's own."""


class SamplingParams(Settings):
    """How tokens are drawn. Every field enters the sample id."""

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy decoding."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """-1 switches it off."""
    max_tokens: int = Field(default=16, ge=1)
    """Longest completion, in tokens."""
    seed: int | None = None
    """Mixed into every sample's own seed; another seed gives other completions."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they are not part of its text."""
    stream: Literal[False] = False
    """Only false: batch inference does not stream."""


class VLLMBackend(Settings):
    """vLLM in this process (the engine itself is a child process); device found by an explicit probe."""

    kind: Literal["vllm"] = "vllm"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """``auto``: the model's own type on a GPU, float32 on a CPU."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion, in tokens; default: the model's own limit."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences generated together. Changes speed only."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Key/value cache on a CPU, in GiB. Changes speed only."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of the GPU's memory the engine may take. Changes speed only."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    enable_prefix_caching: bool = False
    """Off by default: a cache hit may change last bits of a logprob."""
    canary_tolerance: float = Field(default=2e-3, gt=0)
    """Largest difference, in nats, between engine and trainer logprobs that a weight update may show."""

    def cache_identity(self) -> Any:
        return {"kind": self.kind, "dtype": self.dtype, "tensor_parallel_size": self.tensor_parallel_size}


class TransformersBackend(Settings):
    """Plain ``transformers`` generation: slow, needs nothing else."""

    kind: Literal["transformers"] = "transformers"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: int | None = Field(default=None, ge=2)
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of generation, whatever the trainer uses: last bits of a logprob depend on their number."""

    def cache_identity(self) -> Any:
        return {"kind": self.kind, "dtype": self.dtype, "num_threads": self.num_threads}


class ScriptedBackend(Settings):
    """Deterministic answers without a model, for trying out a pipeline."""

    kind: Literal["scripted"] = "scripted"
    text: str = "SCRIPTED:{prompt}"
    """Completion of every prompt; ``{prompt}`` is replaced."""
    delay_seconds: float = Field(default=0.0, ge=0)
    """Pretended time per sample. Changes speed only."""

    def cache_identity(self) -> Any:
        return {"kind": self.kind, "text": self.text}


BackendConfig = VLLMBackend | TransformersBackend | ScriptedBackend


class OptimizerConfig(Settings):
    """Optimizer and learning-rate schedule."""

    kind: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: float = Field(gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; linear and cosine fall to 0 at the last step."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""


class BudgetConfig(Settings):
    """When training ends: whichever limit comes first."""

    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps; default: as many as ``epochs`` gives."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the data when max_steps is not given."""


class JsonlDataset(Settings):
    """A JSONL file of rows."""

    kind: Literal["jsonl_path"] = "jsonl_path"
    path: str = Field(min_length=1)

    def cache_identity(self) -> Any:
        return None  # the content id of the file enters instead


class Padded(Settings):
    """One row a sequence, right-padded to the longest of its minibatch."""

    kind: Literal["off"] = "off"
    max_seq_len: int = Field(default=1024, ge=2)
    """Longer rows are cut at the right and counted."""


class SnapshotPolicy(Settings):
    """When training is made resumable. Changes speed only."""

    every_steps: int = Field(default=100, ge=1)
    """Optimizer steps between train-state snapshots."""
    keep_last: int = Field(default=3, ge=1)
    """Older unlabelled snapshots of the run are dropped from the list."""

    def cache_identity(self) -> Any:
        return None


class LossOn(Settings):
    """Which tokens are trained."""

    kind: Literal["assistant_only", "full"] = "assistant_only"


class LearnerSettings(Settings):
    """What every learner shares."""

    optimizer: OptimizerConfig
    minibatch_size: int = Field(default=8, ge=1)
    """Sequences in one forward and backward pass."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Minibatches in one optimizer step."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """``auto``: bfloat16 autocast where the GPU has it, else float32."""
    snapshots: SnapshotPolicy = SnapshotPolicy()


class SFTSettings(LearnerSettings):
    """Supervised fine-tuning."""

    dataset: JsonlDataset
    """Rows ``{prompt, completion}`` or ``{messages: [...]}``."""
    packing: Padded = Padded()
    loss_on: LossOn = LossOn()
    budget: BudgetConfig = BudgetConfig()


class AdaptiveKL(Settings):
    """Controller of the KL coefficient (arXiv:1909.08593, section 2.2)."""

    init_coef: float = Field(default=0.05, ge=0)
    target: float = Field(default=0.1, gt=0)
    """Wished-for KL to the reference policy, nats per sequence."""
    horizon: int = Field(default=10_000, ge=1)
    """Sequences over which the coefficient reacts."""
    adaptive: bool = True
    """False keeps the coefficient at init_coef."""


class PPOSettings(LearnerSettings):
    """Proximal policy optimization (arXiv:1707.06347) with a value head, GAE and a KL penalty to a reference policy."""

    prompts: JsonlDataset
    """Training prompts: ``{prompt}`` or ``{messages}`` a line; other keys reach the reward."""
    iterations: int = Field(default=10, ge=1)
    """Rounds of generate, score, update."""
    prompts_per_iteration: int = Field(default=128, ge=1)
    samples_per_prompt: int = Field(default=1, ge=1)
    sampling: SamplingParams = SamplingParams()
    epochs: int = Field(default=2, ge=1)
    """Passes over each iteration's samples."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda."""
    clip: float = Field(default=0.2, gt=0)
    """Clip range of the policy ratio."""
    value_clip: float = Field(default=0.2, gt=0)
    value_coef: float = Field(default=0.5, ge=0)
    entropy_coef: float = Field(default=0.0, ge=0)
    kl: AdaptiveKL = AdaptiveKL()
    whiten_advantages: bool = True
    missing_eos_penalty: float = Field(default=0.0, ge=0)
    """Taken off the reward of a completion cut at max_tokens."""

    @model_validator(mode="after")
    def _samples_from_the_policy_itself(self) -> PPOSettings:
        if self.sampling.temperature == 0 or self.sampling.top_p != 1.0 or self.sampling.top_k != -1:
            raise ValueError(
                "PPO needs samples of the policy itself: sampling.temperature above 0, top_p 1 and top_k -1; got "
                f"temperature {self.sampling.temperature}, top_p {self.sampling.top_p}, top_k {self.sampling.top_k}"
            )
        return self


class SFTAlgorithm(SFTSettings):
    """`[algorithm] kind = "sft"`."""

    kind: Literal["sft"] = "sft"
    base_model: ModelSource


class PPOAlgorithm(PPOSettings):
    """`[algorithm] kind = "ppo"`."""

    kind: Literal["ppo"] = "ppo"
    base_model: ModelSource
    reward: RewardSpec = ExactMatchReward()


class TrainSFTConfig(Settings):
    """`rollout train sft`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run: RunInfo = RunInfo(name="sft")
    seed: int = Field(default=0, ge=0, lt=2**31)
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the trainer; fixed threads make CPU training repeatable bit for bit."""
    algorithm: SFTAlgorithm


class TrainPPOConfig(Settings):
    """`rollout train ppo`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run: RunInfo = RunInfo(name="ppo")
    seed: int = Field(default=0, ge=0, lt=2**31)
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the trainer; fixed threads make CPU training repeatable bit for bit."""
    algorithm: PPOAlgorithm
    backend: BackendConfig = VLLMBackend()


class InputGlob(Settings):
    """Prompts to complete."""

    glob: str = Field(min_length=1)
    """A JSONL file, or a pattern with ``*`` or ``?``; lines hold ``prompt`` or ``messages``, optional ``id``, more."""


class OutputDir(Settings):
    """Where results go; the run id lives there too."""

    dir: str = Field(min_length=1)


class WorkersConfig(Settings):
    """Fan-out on this machine. Changes speed only."""

    count: int = Field(default=1, ge=1)
    """Shards of the input; each is one retryable task."""


class InferBatchConfig(Settings):
    """`rollout infer batch`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    model: ModelSource
    sampling: SamplingParams
    input: InputGlob
    output: OutputDir
    workers: WorkersConfig = WorkersConfig()
    backend: BackendConfig = VLLMBackend()


class EvaluationConfig(Settings):
    """Held-out prompts that decide whether a checkpoint is better."""

    prompts: JsonlDataset
    sampling: SamplingParams = SamplingParams(temperature=0.0)


class PromotionConfig(Settings):
    """When the new checkpoint becomes the ``latest`` resources of the store."""

    enabled: bool = True
    resource: str = Field(default="policy", pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the model among the resources."""
    tolerance: float = Field(default=0.0, ge=0)
    """The held-out reward may fall by this much and still be promoted."""


class NightlyConfig(Settings):
    """SFT, then PPO iterations, evaluation before and after, promotion, report."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run: RunInfo = RunInfo(name="nightly")
    seed: int = Field(default=0, ge=0, lt=2**31)
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the trainer; fixed threads make CPU training repeatable bit for bit."""
    model: ModelSource
    reward: RewardSpec = ExactMatchReward()
    backend: BackendConfig = VLLMBackend()
    sft: SFTSettings
    ppo: PPOSettings
    evaluation: EvaluationConfig
    promotion: PromotionConfig = PromotionConfig()
    report_dir: str = "data/report"
    """Folder of the report: an HTML page and the curves as PNG."""


RunConfig = NightlyConfig | TrainSFTConfig | TrainPPOConfig | InferBatchConfig
SettingsT = TypeVar("SettingsT", bound=Settings)


def load_config(path: str | Path, model: type[SettingsT], overrides: Mapping[str, Any] | None = None) -> SettingsT:
    """Read a TOML file as ``model``. ``overrides`` maps dotted keys to values, such as ``{"ppo.iterations": 3}``.

    Raises ConfigError with one line for each thing wrong: the file, the key, what was got and what was expected.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not readable as TOML: {error}") from error
    return parse_config(data, model, name=str(path), overrides=overrides)


def parse_config(
    data: Mapping[str, Any], model: type[SettingsT], *, name: str = "config", overrides: Mapping[str, Any] | None = None
) -> SettingsT:
    """Validate ``data`` as ``model``; raises ConfigError as `load_config` does."""
    merged = apply_overrides(data, overrides or {})
    try:
        return model.model_validate(merged)
    except ValidationError as error:
        violations = tuple(f"{name}: {line}" for line in _explain(error, model, merged))
        raise ConfigError("\n".join(violations), violations) from None


def apply_overrides(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``data`` with dotted keys replaced. Raises ConfigError where a key leads through a plain value."""
    result = _copy(data)
    for dotted, value in overrides.items():
        *parents, leaf = dotted.split(".")
        table = result
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ConfigError(f"override {dotted!r}: {parent!r} is a plain value, not a table")
        table[leaf] = value
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return list(value) if isinstance(value, list | tuple) else value


def _explain(error: ValidationError, model: type[BaseModel], data: Any) -> Iterator[str]:
    seen: set[str] = set()
    for item in error.errors():
        location = _plain_location(item["loc"], data)
        dotted = ".".join(str(part) for part in location) or "(top level)"
        if item["type"] == "extra_forbidden":
            hint = _nearest_key(model, item["loc"])
            line = f"{dotted}: unknown key" + (f"; did you mean {hint!r}?" if hint else "")
        elif item["type"] == "missing":
            line = f"{dotted}: required, but not given"
        elif item["type"] in ("literal_error", "model_type", "model_attributes_type"):
            line = f"{dotted}: {item['msg']}; got {_shown(item['input'])}"
        else:
            line = f"{dotted}: {item['msg'].removeprefix('Value error, ')}; got {_shown(item['input'])}"
        if line not in seen:
            seen.add(line)
            yield line


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain_location(location: tuple[int | str, ...], data: Any) -> list[int | str]:
    """Drops the names of union members that pydantic puts into a location, which are no keys of the file."""
    plain: list[int | str] = []
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if (isinstance(data, Mapping) and part in data) or (
            isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)
        ):
            data = data[part]  # pyright: ignore[reportCallIssue, reportArgumentType]
            plain.append(part)
        elif last:
            plain.append(part)
    return plain


def _nearest_key(model: type[BaseModel], location: tuple[int | str, ...]) -> str | None:
    candidates: set[str] = set(model.model_fields)
    models: list[type[BaseModel]] = [model]
    for part in location[:-1]:
        members = [member for member in models if part in member.model_fields]
        if members:
            models = [m for member in members for m in _models_in(member.model_fields[str(part)].annotation)]
        else:
            models = [member for member in models if member.__name__ == part] or models
        candidates = {name for member in models for name in member.model_fields}
    close = difflib.get_close_matches(str(location[-1]), candidates, n=1, cutoff=0.6)
    return close[0] if close else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


CONFIG_KINDS: dict[str, type[Settings]] = {
    "nightly": NightlyConfig,
    "train-sft": TrainSFTConfig,
    "train-ppo": TrainPPOConfig,
    "infer-batch": InferBatchConfig,
}


def json_schema() -> dict[str, Any]:
    """JSON Schema of every run configuration, by kind."""
    return {name: model.model_json_schema() for name, model in CONFIG_KINDS.items()}
