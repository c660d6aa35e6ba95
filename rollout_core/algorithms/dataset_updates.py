"""Updates from data sets, from content ids to content ids: SFT, reward models, and DPO, IPO and KTO.

An interrupted update continues from its own last snapshot, which is found under the update's key; everything else it
needs is a pure function of its inputs, so the outcome is the same bytes as without the interruption. Reference
log-probabilities come from the object store or are computed before training starts; the reference is never in memory
together with the policy, unless it is the policy without its adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.layers import layer_rates
from rollout_core.algorithms.loop import build_accelerator, build_optimizer
from rollout_core.algorithms.masters import lay_out
from rollout_core.algorithms.parallel import divided, is_sharded, load_to_train, shard
from rollout_core.algorithms.policy import Policy, Teacher
from rollout_core.algorithms.preference import (
    DPO,
    IPO,
    KTO,
    ORPO,
    SimPO,
    pair_documents,
    reference_logprobs,
    unpaired_documents,
)
from rollout_core.algorithms.state import TrainState
from rollout_core.algorithms.supervised import (
    SFT,
    BradleyTerry,
    DatasetAlgorithm,
    RewardModel,
    load_reward_model,
    set_padding,
)
from rollout_core.algorithms.training import Evaluation, evaluation_of, train_to_end
from rollout_core.base.determinism import PORTABLE, is_portable_here, seed_everything
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.config import (
    AnyPairSettings,
    DatasetSettings,
    GKDSettings,
    IPOSettings,
    KTOSettings,
    PreferenceSettings,
    RewardModelSettings,
    SFTSettings,
)
from rollout_core.data.curriculum import sorted_rows
from rollout_core.data.examples import Example, longest_sequence
from rollout_core.data.packing import Document
from rollout_core.data.preference_data import Pair, PreferenceReport
from rollout_core.data.tokenized import DataReport, ItemTable, Mapped
from rollout_core.data.training_data import RowForm, pair_form, sft_form, training_items, unpaired_form
from rollout_core.data.turn_ends import as_engines_end
from rollout_core.models.architecture import WithoutAdapters, with_lora
from rollout_core.models.facts import check_reference, check_teacher
from rollout_core.models.pretrained import load_tokenizer
from rollout_core.objects.records import Checkpoint

ItemT = TypeVar("ItemT")
ReportT = TypeVar("ReportT", bound=DataReport)


def sft_update(
    model: ContentId,
    dataset: ContentId,
    settings: SFTSettings,
    context: UpdateContext,
    *,
    held_out: ContentId | None = None,
    teacher: ContentId | None = None,
    on_data: Callable[[DataReport], None] = lambda report: None,
) -> tuple[Checkpoint, DataReport]:
    """Fine-tune ``model`` on the rows of ``dataset``; ``on_data`` is called with their outcomes before training
    starts.

    The rows ``held_out`` are evaluated as ``settings.evaluation`` says; ``teacher`` is that of
    ``settings.distillation``. Raises ConfigError when rows, tokenizer and models do not fit.
    """
    folder = context.model(model)
    examples, others, report = _read_rows(settings, sft_form(settings), dataset, held_out, folder, context, on_data)
    seed_everything(context.seed, num_threads=context.num_threads)
    accelerator = build_accelerator(settings.precision, settings.parallel)
    settings = divided(settings)
    loaded = load_to_train(folder, settings.parallel, accelerator.device)
    trained = with_lora(loaded, settings.lora, seed=context.seed).train()
    longest = max(map(longest_sequence, (examples, others or examples)))
    check_sequence_length(trained, longest)
    policy = shard(Policy(trained), settings, accelerator.device)
    options: Any = {"seed": context.seed, "device": accelerator.device}
    options["teacher"] = load_teacher(folder, teacher, settings, context, accelerator.device, longest)

    def algorithm(rows: Sequence[Example]) -> SFT:
        return SFT(policy, rows, settings, **options)

    evaluation = evaluation_of(None if others is None else algorithm(others), held_out, settings, accelerator)
    return _train(algorithm(examples), evaluation, trained, settings, accelerator, model, context), report


def rm_update(
    model: ContentId,
    dataset: ContentId,
    settings: RewardModelSettings,
    context: UpdateContext,
    *,
    held_out: ContentId | None = None,
    on_data: Callable[[PreferenceReport], None] = lambda report: None,
) -> tuple[Checkpoint, PreferenceReport]:
    """Train a reward model on the pairs of ``dataset``, from the trunk of ``model`` (or that reward model itself).

    ``held_out`` and ``on_data`` as in `sft_update`. Raises ConfigError when rows, tokenizer and model do not fit.
    """
    folder = context.model(model)
    tokenizer = load_tokenizer(folder)
    as_ended = as_engines_end(folder, tokenizer)

    def ended(pair: Pair) -> Pair:
        return Pair(pair.prompt, as_ended(pair.chosen), as_ended(pair.rejected), pair.margin)

    form = pair_form(settings, need_prompts=False)
    rows, other_rows, report = _read_rows(settings, form, dataset, held_out, folder, context, on_data)
    pairs, others = Mapped(rows, ended), Mapped(other_rows or (), ended)
    seed_everything(context.seed, num_threads=context.num_threads)
    accelerator = build_accelerator(settings.precision, settings.parallel)
    settings = divided(settings)
    if is_sharded(settings.parallel):
        loaded = load_reward_model(folder, new_head=True, deferred_to=accelerator.device)
    else:
        loaded = load_reward_model(folder, new_head=True).to(accelerator.device)
    trained = with_lora(loaded, settings.lora, seed=context.seed).eval()  # no dropout
    set_padding(trained, tokenizer)
    longest = max(len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) for pair in chain(pairs, others))
    check_sequence_length(trained, longest)
    scorer = shard(RewardModel(trained), settings, accelerator.device)

    def algorithm(items: Sequence[Pair]) -> BradleyTerry:
        return BradleyTerry(scorer, items, settings, seed=context.seed, device=accelerator.device)

    evaluation = evaluation_of(algorithm(others) if others else None, held_out, settings, accelerator)
    return _train(algorithm(pairs), evaluation, trained, settings, accelerator, model, context), report


def preference_update(
    model: ContentId,
    reference: ContentId,
    dataset: ContentId,
    settings: AnyPairSettings | IPOSettings | KTOSettings,
    context: UpdateContext,
    *,
    held_out: ContentId | None = None,
    on_data: Callable[[PreferenceReport], None] = lambda report: None,
) -> tuple[Checkpoint, PreferenceReport]:
    """DPO or one of its family, IPO or KTO of ``model`` against ``reference``, on the pairs or labelled answers of
    ``dataset``.

    ``held_out`` and ``on_data`` as in `sft_update`. Raises ConfigError when rows, tokenizer, model and reference do not
    fit.
    """
    algorithm_of = _ALGORITHMS[settings.kind]
    form: RowForm[Any, PreferenceReport]
    documents_of: Callable[[Sequence[Any]], Sequence[Document]]
    if settings.family == "kto":
        form, documents_of = unpaired_form(settings), unpaired_documents
    else:
        form, documents_of = pair_form(settings, need_prompts=True), pair_documents
    folder = context.model(model)
    items, other_items, report = _read_rows(settings, form, dataset, held_out, folder, context, on_data)
    others = other_items or ()
    documents = documents_of(items), documents_of(others)
    start = _start if settings.needs_reference else _start_alone
    accelerator, policy, ref_logps, ref_others = start(model, reference, *documents, settings, context)
    settings = divided(settings)

    options = {"seed": context.seed, "device": accelerator.device, "own_loss": context.loss_of(settings)}

    def algorithm(rows: Sequence[Any], logps: Tensor) -> DatasetAlgorithm[Any]:
        return algorithm_of(policy, rows, logps, settings, **options)

    held_out_algorithm = algorithm(others, ref_others) if others else None
    evaluation = evaluation_of(held_out_algorithm, held_out, settings, accelerator)
    trainer = algorithm(items, ref_logps)
    return _train(trainer, evaluation, policy.model, settings, accelerator, model, context), report


_ALGORITHMS: dict[str, Callable[..., DatasetAlgorithm[Any]]] = {
    "dpo": DPO,
    "orpo": ORPO,
    "simpo": SimPO,
    "ipo": IPO,
    "kto": KTO,
}
"""Of preferences, by the ``kind`` of their settings."""


def load_teacher(
    student: Path,
    teacher: ContentId | None,
    settings: SFTSettings | GKDSettings,
    context: UpdateContext,
    device: torch.device,
    longest: int,
) -> Teacher | None:
    """The teacher of ``settings.distillation``, where there is one, for rows of up to ``longest`` tokens. Draws no
    random numbers. Raises ConfigError for one that was not given, or that does not fit the student."""
    if settings.distillation is None:
        return None
    if teacher is None:
        raise ConfigError("distillation needs the content id of its teacher, and none was given")
    check_teacher(student, context.model(teacher), longest)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        loaded = load_to_train(context.model(teacher), settings.parallel, device)
    return Teacher(loaded, settings.distillation, settings, device)


def _read_rows(
    settings: DatasetSettings,
    form: RowForm[ItemT, ReportT],
    dataset: ContentId,
    held_out: ContentId | None,
    folder: Path,
    context: UpdateContext,
    on_data: Callable[[ReportT], None],
) -> tuple[ItemTable[ItemT], ItemTable[ItemT] | None, ReportT]:
    """The items of both sets of rows, and the rows to train on by outcome, which ``on_data`` gets first."""
    curriculum = settings.curriculum
    if curriculum is not None and curriculum.key is not None:
        dataset = sorted_rows(context.objects, dataset, form.row, curriculum.key)
    items, report = training_items(context.objects, context.cache, dataset, folder, form)
    on_data(report)
    if held_out is None:
        return items, None, report
    others, _ = training_items(context.objects, context.cache, held_out, folder, form)
    return items, others, report


def _start(
    model: ContentId,
    reference: ContentId,
    documents: Sequence[Document],
    held_out: Sequence[Document],
    settings: PreferenceSettings,
    context: UpdateContext,
) -> tuple[Accelerator, Policy, Tensor, Tensor]:
    """The accelerator, the policy to train, and the reference's log-probabilities of both sets of documents."""
    check_reference(context.model(model), context.model(reference))
    seed_everything(context.seed, num_threads=context.num_threads)
    accelerator = build_accelerator(settings.precision, settings.parallel)
    device = accelerator.device

    def load_policy() -> Policy:
        loaded = load_to_train(context.model(model), settings.parallel, device)
        trained = with_lora(loaded, settings.lora, seed=context.seed)
        policy = shard(Policy(trained.eval()), settings, device)  # no dropout: the reference has none
        lay_out(trained, settings)  # before it is compared with itself: the reference is these weights, rounded
        return policy

    # Adapters that are switched off leave the reference itself. Otherwise the two are not in memory together.
    policy = load_policy() if settings.lora is not None and model == reference else None

    @cache
    def load_reference() -> nn.Module:
        if policy is not None:
            check_sequence_length(policy.model, _longest(documents, held_out))
            return WithoutAdapters(policy)
        loaded = load_to_train(context.model(reference), settings.parallel, device)
        check_sequence_length(loaded, _longest(documents, held_out))
        loaded.eval().requires_grad_(False)
        held_to = shard(Policy(loaded), settings, device)
        lay_out(loaded, settings)
        return held_to

    otherwise = _computed_otherwise(settings, policy, context.num_threads)
    options: Any = {
        "precision": "/".join([accelerator.mixed_precision, device.type, *otherwise]),
        "autocast": lambda: accelerator.autocast(),
        "device": device,
    }
    logps, others = (
        reference_logprobs(context.objects, reference, items, load_reference, **options)
        for items in (documents, held_out)
    )
    # Loading the reference may or may not have drawn random numbers.
    seed_everything(context.seed, num_threads=context.num_threads)
    return accelerator, load_policy() if policy is None else policy, logps, others


def _computed_otherwise(settings: PreferenceSettings, shared: Policy | None, threads: int | None = None) -> list[str]:
    """In what the reference's weights differ from its files, and by what arithmetic a row's sums are added up, for the
    name under which its log-probabilities are kept; ``shared`` is the policy whose adapters are switched off for it."""
    found = [] if settings.weights == "float32" else [settings.weights]
    if is_portable_here():
        found.append(PORTABLE)
    if threads is not None:
        found.append(f"threads {threads}")
    if settings.parallel.cuts_matrices:
        found.append(f"tensor {settings.parallel.nproc}")
    if shared is not None and settings.lora is not None and settings.lora.quantization != "none":
        found.append(settings.lora.quantization)
    return found


def _start_alone(
    model: ContentId,
    reference: ContentId,
    documents: Sequence[Document],
    held_out: Sequence[Document],
    settings: PreferenceSettings,
    context: UpdateContext,
) -> tuple[Accelerator, Policy, Tensor, Tensor]:
    """As `_start` for a loss without a reference, which is not loaded: its log-probabilities are zeros."""
    seed_everything(context.seed, num_threads=context.num_threads)
    accelerator = build_accelerator(settings.precision, settings.parallel)
    loaded = load_to_train(context.model(model), settings.parallel, accelerator.device)
    trained = with_lora(loaded, settings.lora, seed=context.seed)
    check_sequence_length(trained, _longest(documents, held_out))
    policy = shard(Policy(trained.eval()), settings, accelerator.device)
    none, none_held_out = (torch.zeros(sum(len(item.branches) for item in items)) for items in (documents, held_out))
    return accelerator, policy, none, none_held_out


def _longest(documents: Sequence[Document], held_out: Sequence[Document]) -> int:
    return max(len(item.prefix) + max(map(len, item.branches)) for item in chain(documents, held_out))


def _train(
    algorithm: DatasetAlgorithm[Any],
    evaluation: Evaluation[Any] | None,
    trained: Any,
    settings: DatasetSettings,
    accelerator: Accelerator,
    model: ContentId,
    context: UpdateContext,
) -> Checkpoint:
    lay_out(trained, settings)
    rates = layer_rates(settings.optimizer, trained)
    optimizer = build_optimizer(settings.optimizer, list(trained.parameters()), rates)
    state = TrainState(trained, optimizer, seed=context.seed, ema_decay=settings.ema_decay, device=accelerator.device)
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


def check_sequence_length(policy: Any, longest: int) -> None:
    """Raises ConfigError where the longest row, in tokens, has no place in the model."""
    limit = getattr(policy.config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"the longest row has {longest} tokens, the model has {limit} positions; "
            f"set sequence.max_length to at most {limit}"
        )
