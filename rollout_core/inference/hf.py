"""Plain transformers as a backend: one sequence at a time, sampled by hand from the model's own logits.

Slow and simple; it needs nothing beyond the training stack and is the reference other backends are checked against.
Each request is generated alone, so its tokens cannot depend on a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rollout_core.base.determinism import check_numerics, cpu_threads, probe_device
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.config import SamplingParams, TransformersBackend
from rollout_core.data.samples import Completion, FinishReason, TopLogprobs
from rollout_core.data.text import decode_completions, text_tokens
from rollout_core.inference.backend import GathersStream, ModelRef, Request, scored_completion
from rollout_core.models.facts import known_ids
from rollout_core.models.pretrained import HeldTokenizer, load_causal_lm, renewed_tokenizer


class TransformersEngine(GathersStream):
    """An `InferenceBackend` over ``AutoModelForCausalLM``."""

    batch_invariant = True

    def __init__(self, config: TransformersBackend, model: ModelRef) -> None:
        check_numerics(config.dtype)
        self._config = config
        self._held: HeldTokenizer | None = None
        self._load(model)

    def _load(self, model: ModelRef) -> None:
        self._policy = load_causal_lm(model.folder, self._config.dtype).to(probe_device()).eval()
        self._held = renewed_tokenizer(model.folder, self._held)
        self._tokenizer = self._held[0]
        self._known_ids = known_ids(model.folder, self._tokenizer)
        ends = self._policy.generation_config.eos_token_id
        # A base model's configuration may name none, and so may a tokenizer.
        self._end_ids = {self._tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        self._model = model

    @property
    def model_id(self) -> ContentId:
        return self._model.content_id

    @property
    def max_model_len(self) -> int | None:
        return self._config.max_model_len or getattr(self._policy.config, "max_position_embeddings", None)

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        for request in requests:
            if request is None:
                continue
            with cpu_threads(self._config.num_threads):
                completion = self._score(request) if request.scored else self._generate_one(request)
            yield completion

    def _score(self, request: Request) -> Completion:
        """Among all ids, as any other harness scores them, also where the vocabulary is padded."""
        import torch

        ids = torch.tensor([list(request.prompt_token_ids)], device=self._policy.device)
        continuation_T = ids[0, -request.scored :]
        with torch.no_grad():
            logits_TV = self._policy(ids[:, :-1]).logits[0, -request.scored :].float()
        self._refuse_nan(logits_TV)
        logprobs_T = logits_TV.log_softmax(-1).gather(-1, continuation_T[:, None])[:, 0]
        return scored_completion(
            request, logprobs_T.tolist(), greedy=bool((logits_TV.argmax(-1) == continuation_T).all())
        )

    def _refuse_nan(self, logits: Any) -> None:
        if logits.isnan().any():
            raise ConfigError(
                f"the model {self._model.folder} gives logits that are not numbers: its weights are broken, or "
                f"backend.dtype {self._config.dtype!r} is too small for them"
            )

    def _generate_one(self, request: Request) -> Completion:
        import torch

        params = request.params
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else self._end_ids | set(request.ends))
        generator = torch.Generator(device=self._policy.device).manual_seed(request.seed)
        token_ids: list[int] = []
        logprobs: list[float] = []
        top: list[TopLogprobs] = []
        inputs = torch.tensor([list(request.prompt_token_ids)], device=self._policy.device)
        cache: Any = None
        finish: FinishReason = "length"
        with torch.no_grad():
            for _ in range(params.max_tokens):
                output = self._policy(inputs, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                logits_V = penalized(output.logits[0, -1].float(), params, request.prompt_token_ids, token_ids)
                self._refuse_nan(logits_V)
                if self._known_ids is not None:
                    logits_V[self._known_ids :] = -torch.inf
                if len(token_ids) < params.min_tokens:
                    logits_V[sorted(ends | self._end_ids)] = -torch.inf
                distribution_V = _distribution(logits_V, params)
                token = _draw(distribution_V, params, generator)
                token_ids.append(token)
                logprobs.append(float(distribution_V[token]))
                if params.logprobs:
                    top.append(_most_likely(distribution_V, params.logprobs))
                if token in ends or self._stop_place(request, token_ids) is not None:
                    finish = "stop"
                    break
                inputs = torch.tensor([[token]], device=self._policy.device)
        text = self._text(request, text_tokens(token_ids, params, request.ends))
        return Completion(request.key, token_ids, logprobs, text[: self._stop_place(request, token_ids)], finish, top)

    def _text(self, request: Request, token_ids: Sequence[int]) -> str:
        return decode_completions(self._tokenizer, [request.prompt_token_ids], [token_ids])[0]

    def _stop_place(self, request: Request, token_ids: Sequence[int]) -> int | None:
        """Where in the text the first stop string begins; None without one. Those that end within the first
        ``min_tokens`` do not count."""
        if not request.params.stop:
            return None
        text = self._text(request, text_tokens(token_ids, request.params, request.ends))
        early = len(self._text(request, token_ids[: request.params.min_tokens])) if request.params.min_tokens else 0
        places = [text.find(stop, max(0, early - len(stop) + 1)) for stop in request.params.stop]
        return min((place for place in places if place >= 0), default=None)

    def update_weights(self, model: ModelRef) -> None:
        if model.content_id != self._model.content_id:
            self._load(model)

    def close(self) -> None:
        del self._policy


def penalized(logits_V: Any, params: SamplingParams, prompt: Sequence[int], token_ids: Sequence[int]) -> Any:
    """Logits [V] after the penalties for what occurred: repetition first, as vLLM has it; a new tensor."""
    import torch

    logits_V = logits_V.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *token_ids}), dtype=torch.long, device=logits_V.device)
        own = logits_V[seen]
        logits_V[seen] = torch.where(own > 0, own / params.repetition_penalty, own * params.repetition_penalty)
    if token_ids and (params.frequency_penalty or params.presence_penalty):
        counts_V = torch.bincount(torch.tensor(token_ids, device=logits_V.device), minlength=len(logits_V))
        logits_V -= params.frequency_penalty * counts_V + params.presence_penalty * (counts_V > 0)
    return logits_V


def _most_likely(distribution_V: Any, count: int) -> TopLogprobs:
    values, tokens = distribution_V.topk(min(count, distribution_V.numel()))
    return [(t, p) for t, p in zip(tokens.tolist(), values.tolist(), strict=True) if p > -math.inf]


def _distribution(logits_V: Any, params: SamplingParams) -> Any:
    """Log-probabilities after temperature, top-k and top-p; for greedy decoding the model's own."""
    import torch

    if params.temperature == 0:
        return torch.log_softmax(logits_V, -1)
    scaled_V = logits_V / params.temperature
    if params.top_k > 0:
        threshold = torch.topk(scaled_V, min(params.top_k, scaled_V.numel())).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < threshold, -torch.inf)
    if params.top_p < 1.0:
        ordered_V, order_V = scaled_V.sort(descending=True)
        before_V = ordered_V.softmax(-1).cumsum(-1) - ordered_V.softmax(-1)
        scaled_V = scaled_V.index_fill(0, order_V[before_V >= params.top_p], -torch.inf)
    return torch.log_softmax(scaled_V, -1)


def _draw(distribution_V: Any, params: SamplingParams, generator: Any) -> int:
    import torch

    if params.temperature == 0:
        return int(distribution_V.argmax())
    return int(torch.multinomial(distribution_V.exp(), 1, generator=generator))
