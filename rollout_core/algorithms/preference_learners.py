"""Updates from preference data, from content ids to content ids: reward model, DPO, IPO and KTO.

As in `learners`, an interrupted update goes on from its own last snapshot. Reference log-probabilities come from the
object store or are computed before training starts; the reference is never in memory beside the policy, unless it is
the policy without its adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.evaluation import Evaluation, evaluation_of
from rollout_core.algorithms.kto import KTO, unpaired_documents
from rollout_core.algorithms.learners import check_sequence_length
from rollout_core.algorithms.loop import Algorithm, build_accelerator, build_optimizer
from rollout_core.algorithms.parallel import divided, shard
from rollout_core.algorithms.policy import Policy
from rollout_core.algorithms.preference import DPO, pair_documents
from rollout_core.algorithms.reference import reference_logprobs
from rollout_core.algorithms.reward_model import BradleyTerry, RewardModel, load_reward_model, set_padding, until_eos
from rollout_core.algorithms.state import TrainState, load_policy
from rollout_core.algorithms.training import train_to_end
from rollout_core.base.ids import ContentId
from rollout_core.base.seeding import seed_everything
from rollout_core.config import DPOSettings, IPOSettings, KTOSettings, PreferenceSettings, RewardModelSettings
from rollout_core.data.item_table import Mapped
from rollout_core.data.packing import Document
from rollout_core.data.preference_data import Pair, PreferenceReport, UnpairedPreference
from rollout_core.data.training_data import pair_form, training_items, unpaired_form
from rollout_core.models.facts import check_reference
from rollout_core.models.lora import WithoutAdapters, with_lora
from rollout_core.models.tokenizers import load_tokenizer
from rollout_core.objects.records import Checkpoint

OnData = Callable[[PreferenceReport], None]
"""Hears of the rows before training starts."""


def rm_update(
    model: ContentId,
    dataset: ContentId,
    settings: RewardModelSettings,
    context: UpdateContext,
    *,
    held_out: ContentId | None = None,
    on_data: OnData = lambda report: None,
) -> tuple[Checkpoint, PreferenceReport]:
    """Train a reward model on the pairs of ``dataset``, from the trunk of ``model`` (or that reward model itself).

    The pairs ``held_out`` are looked at as ``settings.evaluation`` says. Raises ConfigError when rows, tokenizer and
    model do not fit.
    """
    folder = context.model(model)
    tokenizer = load_tokenizer(folder)

    def read(rows: ContentId) -> tuple[Sequence[Pair], PreferenceReport]:
        form = pair_form(settings, need_prompts=False)
        kept, report = training_items(context.objects, context.cache, rows, folder, form)
        return Mapped(kept, lambda pair: _ended(pair, tokenizer.eos_token_id)), report

    pairs, report = read(dataset)
    on_data(report)
    others = () if held_out is None else read(held_out)[0]
    seed_everything(context.seed, num_threads=context.num_threads)
    accelerator = build_accelerator(settings.precision)
    settings = divided(settings)
    trained = with_lora(load_reward_model(folder, new_head=True), settings.lora, seed=context.seed)
    trained = trained.to(accelerator.device).eval()  # no dropout
    set_padding(trained, tokenizer)
    longest = max(len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) for pair in chain(pairs, others))
    check_sequence_length(trained, longest)
    scorer = shard(RewardModel(trained), settings.parallel, accelerator.device)

    def algorithm(items: Sequence[Pair]) -> BradleyTerry:
        return BradleyTerry(scorer, items, settings, seed=context.seed, device=accelerator.device)

    evaluation = evaluation_of(algorithm(others) if held_out else None, settings, accelerator)
    return _train(algorithm(pairs), evaluation, trained, settings, accelerator, model, context), report


def _ended(pair: Pair, eos_token_id: int) -> Pair:
    chosen, rejected = until_eos(pair.chosen, eos_token_id), until_eos(pair.rejected, eos_token_id)
    return Pair(pair.prompt, chosen, rejected, pair.margin)


def dpo_update(
    model: ContentId,
    reference: ContentId,
    dataset: ContentId,
    settings: DPOSettings | IPOSettings,
    context: UpdateContext,
    *,
    held_out: ContentId | None = None,
    on_data: OnData = lambda report: None,
) -> tuple[Checkpoint, PreferenceReport]:
    """DPO or IPO of ``model`` against ``reference`` on the pairs of ``dataset``.

    The pairs ``held_out`` are looked at as ``settings.evaluation`` says. Raises ConfigError when rows, tokenizer, model
    and reference do not fit.
    """
    folder = context.model(model)

    def read(rows: ContentId) -> tuple[Sequence[Pair], PreferenceReport]:
        form = pair_form(settings, need_prompts=True)
        return training_items(context.objects, context.cache, rows, folder, form)

    pairs, report = read(dataset)
    on_data(report)
    others = () if held_out is None else read(held_out)[0]
    documents = pair_documents(pairs), pair_documents(others)
    accelerator, trained, ref_logps, ref_others = _start(model, reference, *documents, settings, context)
    settings = divided(settings)
    policy = shard(Policy(trained), settings.parallel, accelerator.device)

    def algorithm(items: Sequence[Pair], logps: Tensor) -> DPO:
        return DPO(policy, items, logps, settings, seed=context.seed, device=accelerator.device)

    evaluation = evaluation_of(algorithm(others, ref_others) if held_out else None, settings, accelerator)
    return _train(algorithm(pairs, ref_logps), evaluation, trained, settings, accelerator, model, context), report


def kto_update(
    model: ContentId,
    reference: ContentId,
    dataset: ContentId,
    settings: KTOSettings,
    context: UpdateContext,
    *,
    held_out: ContentId | None = None,
    on_data: OnData = lambda report: None,
) -> tuple[Checkpoint, PreferenceReport]:
    """KTO of ``model`` against ``reference`` on the labelled answers of ``dataset``.

    The answers ``held_out`` are looked at as ``settings.evaluation`` says. Raises ConfigError when rows, tokenizer,
    model and reference do not fit.
    """

    def read(rows: ContentId) -> tuple[Sequence[UnpairedPreference], PreferenceReport]:
        form = unpaired_form(settings)
        return training_items(context.objects, context.cache, rows, context.model(model), form)

    items, report = read(dataset)
    on_data(report)
    others = () if held_out is None else read(held_out)[0]
    documents = unpaired_documents(items), unpaired_documents(others)
    accelerator, trained, ref_logps, ref_others = _start(model, reference, *documents, settings, context)
    settings = divided(settings)
    policy = shard(Policy(trained), settings.parallel, accelerator.device)

    def algorithm(answers: Sequence[UnpairedPreference], logps: Tensor) -> KTO:
        return KTO(policy, answers, logps, settings, seed=context.seed, device=accelerator.device)

    evaluation = evaluation_of(algorithm(others, ref_others) if held_out else None, settings, accelerator)
    return _train(algorithm(items, ref_logps), evaluation, trained, settings, accelerator, model, context), report


def _start(
    model: ContentId,
    reference: ContentId,
    documents: Sequence[Document],
    held_out: Sequence[Document],
    settings: PreferenceSettings,
    context: UpdateContext,
) -> tuple[Accelerator, Any, Tensor, Tensor]:
    """The accelerator, the model to train, and the reference's log-probabilities of both sets of documents."""
    check_reference(context.model(model), context.model(reference))
    seed_everything(context.seed, num_threads=context.num_threads)
    accelerator = build_accelerator(settings.precision)

    def load_trained() -> Any:
        loaded = with_lora(load_policy(context.model(model)), settings.lora, seed=context.seed)
        return loaded.to(accelerator.device).eval()  # no dropout: the reference has none

    # Adapters that are switched off leave the reference itself. Otherwise the two are not in memory together.
    trained = load_trained() if settings.lora is not None and model == reference else None
    logps = _reference_pass(trained, reference, documents, held_out, settings, accelerator, context)
    # Loading the reference may or may not have drawn random numbers.
    seed_everything(context.seed, num_threads=context.num_threads)
    return accelerator, load_trained() if trained is None else trained, *logps


def _reference_pass(
    adapted: Any | None,
    reference: ContentId,
    documents: Sequence[Document],
    held_out: Sequence[Document],
    settings: PreferenceSettings,
    accelerator: Accelerator,
    context: UpdateContext,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of both sets of documents; ``adapted`` is the reference with adapters, if it is loaded."""

    @cache
    def load() -> nn.Module:
        loaded = adapted
        if loaded is None:
            loaded = load_policy(context.model(reference)).to(accelerator.device).eval().requires_grad_(False)
        longest = max(len(item.prefix) + max(map(len, item.branches)) for item in chain(documents, held_out))
        check_sequence_length(loaded, longest)
        policy = Policy(loaded)
        return shard(policy, settings.parallel, accelerator.device) if adapted is None else WithoutAdapters(policy)

    ref_logps, ref_held_out = (
        reference_logprobs(
            context.objects,
            reference,
            items,
            load,
            precision=f"{accelerator.mixed_precision}/{accelerator.device.type}",
            autocast=lambda: accelerator.autocast(),
            device=accelerator.device,
        )
        for items in (documents, held_out)
    )
    return ref_logps, ref_held_out


def _train(
    algorithm: Algorithm[Any],
    evaluation: Evaluation[Any] | None,
    trained: Any,
    settings: PreferenceSettings,
    accelerator: Accelerator,
    model: ContentId,
    context: UpdateContext,
) -> Checkpoint:
    state = TrainState(trained, build_optimizer(settings.optimizer, list(trained.parameters())), seed=context.seed)
    return train_to_end(
        algorithm,
        state,
        settings,
        accelerator,
        context,
        context.model(model),
        max_minutes=settings.budget.max_minutes,
        evaluation=evaluation,
    )
