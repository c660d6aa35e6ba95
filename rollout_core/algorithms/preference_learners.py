"""Updates from preference data, from content ids to content ids: reward model, DPO, IPO and KTO.

As in `learners`, an interrupted update goes on from its own last snapshot. Reference log-probabilities come from the
object store or are computed before training starts; the reference is never in memory beside the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from rollout_core.algorithms.evaluation import Evaluation, evaluation_of
from rollout_core.algorithms.kto import KTO, judged_documents
from rollout_core.algorithms.learners import check_sequence_length
from rollout_core.algorithms.loop import Algorithm, build_accelerator, build_optimizer
from rollout_core.algorithms.packing import Document
from rollout_core.algorithms.policy import Policy
from rollout_core.algorithms.preference import DPO, pair_documents
from rollout_core.algorithms.preference_data import Judged, Pair, PreferenceReport, tokenize_judged, tokenize_pairs
from rollout_core.algorithms.reference import reference_logprobs
from rollout_core.algorithms.reward_model import BradleyTerry, RewardModel, load_reward_model, set_padding, until_eos
from rollout_core.algorithms.state import TrainState, load_policy
from rollout_core.algorithms.training import train_to_end
from rollout_core.algorithms.workshop import Workshop
from rollout_core.config import DPOSettings, IPOSettings, KTOSettings, PreferenceSettings, RewardModelSettings
from rollout_core.ids import ContentId
from rollout_core.models import check_reference, load_tokenizer
from rollout_core.preferences import parse_judged, parse_pairs
from rollout_core.records import Checkpoint
from rollout_core.seeding import seed_everything


def rm_update(
    model: ContentId,
    dataset: ContentId,
    settings: RewardModelSettings,
    workshop: Workshop,
    *,
    held_out: ContentId | None = None,
) -> tuple[Checkpoint, PreferenceReport]:
    """Train a reward model on the pairs of ``dataset``, from the trunk of ``model`` (or that reward model itself).

    The pairs ``held_out`` are looked at as ``settings.evaluation`` says. Raises ConfigError when rows, tokenizer and
    model do not fit.
    """
    folder = workshop.model(model)
    tokenizer = load_tokenizer(folder)
    eos = tokenizer.eos_token_id
    pairs, report = _read_pairs(tokenizer, dataset, settings, workshop, until=eos)
    others = [] if held_out is None else _read_pairs(tokenizer, held_out, settings, workshop, until=eos)[0]
    seed_everything(workshop.seed, num_threads=workshop.num_threads)
    accelerator = build_accelerator(settings.precision)
    trained = load_reward_model(folder, new_head=True).to(accelerator.device).eval()  # no dropout
    set_padding(trained, tokenizer)
    longest = max(len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) for pair in (*pairs, *others))
    check_sequence_length(trained, longest)
    scorer = RewardModel(trained)

    def algorithm(items: list[Pair]) -> BradleyTerry:
        return BradleyTerry(scorer, items, settings, seed=workshop.seed, device=accelerator.device)

    evaluation = evaluation_of(algorithm(others) if held_out else None, settings, accelerator)
    return _train(algorithm(pairs), evaluation, trained, settings, accelerator, model, workshop), report


def dpo_update(
    model: ContentId,
    reference: ContentId,
    dataset: ContentId,
    settings: DPOSettings | IPOSettings,
    workshop: Workshop,
    *,
    held_out: ContentId | None = None,
) -> tuple[Checkpoint, PreferenceReport]:
    """DPO or IPO of ``model`` against ``reference`` on the pairs of ``dataset``.

    The pairs ``held_out`` are looked at as ``settings.evaluation`` says. Raises ConfigError when rows, tokenizer, model
    and reference do not fit.
    """
    tokenizer = load_tokenizer(workshop.model(model))
    pairs, report = _read_pairs(tokenizer, dataset, settings, workshop)
    others = [] if held_out is None else _read_pairs(tokenizer, held_out, settings, workshop)[0]
    documents = pair_documents(pairs), pair_documents(others)
    accelerator, ref_logps, ref_others = _reference_pass(model, reference, *documents, settings, workshop)
    trained = load_policy(workshop.model(model)).to(accelerator.device).eval()  # no dropout: the reference had none
    policy = Policy(trained)

    def algorithm(items: list[Pair], logps: Tensor) -> DPO:
        return DPO(policy, items, logps, settings, seed=workshop.seed, device=accelerator.device)

    evaluation = evaluation_of(algorithm(others, ref_others) if held_out else None, settings, accelerator)
    return _train(algorithm(pairs, ref_logps), evaluation, trained, settings, accelerator, model, workshop), report


def kto_update(
    model: ContentId,
    reference: ContentId,
    dataset: ContentId,
    settings: KTOSettings,
    workshop: Workshop,
    *,
    held_out: ContentId | None = None,
) -> tuple[Checkpoint, PreferenceReport]:
    """KTO of ``model`` against ``reference`` on the judged answers of ``dataset``.

    The answers ``held_out`` are looked at as ``settings.evaluation`` says. Raises ConfigError when rows, tokenizer,
    model and reference do not fit.
    """
    tokenizer = load_tokenizer(workshop.model(model))

    def read(rows_id: ContentId) -> tuple[list[Judged], PreferenceReport]:
        rows = parse_judged(workshop.objects.get_bytes(rows_id), name=f"dataset {rows_id.short}")
        return tokenize_judged(tokenizer, rows, max_seq_len=settings.packing.max_seq_len)

    items, report = read(dataset)
    others = [] if held_out is None else read(held_out)[0]
    documents = judged_documents(items), judged_documents(others)
    accelerator, ref_logps, ref_others = _reference_pass(model, reference, *documents, settings, workshop)
    trained = load_policy(workshop.model(model)).to(accelerator.device).eval()  # no dropout: the reference had none
    policy = Policy(trained)

    def algorithm(answers: list[Judged], logps: Tensor) -> KTO:
        return KTO(policy, answers, logps, settings, seed=workshop.seed, device=accelerator.device)

    evaluation = evaluation_of(algorithm(others, ref_others) if held_out else None, settings, accelerator)
    return _train(algorithm(items, ref_logps), evaluation, trained, settings, accelerator, model, workshop), report


def _read_pairs(
    tokenizer: Any, rows_id: ContentId, settings: PreferenceSettings, workshop: Workshop, *, until: int | None = None
) -> tuple[list[Pair], PreferenceReport]:
    """Pairs of token ids. A reward model's end at the EOS token, given by ``until``; other learners need prompts."""
    rows = parse_pairs(workshop.objects.get_bytes(rows_id), name=f"dataset {rows_id.short}")
    max_seq_len = settings.packing.max_seq_len
    pairs, report = tokenize_pairs(tokenizer, rows, max_seq_len=max_seq_len, need_prompts=until is None)
    if until is not None:
        pairs = [
            replace(pair, chosen=until_eos(pair.chosen, until), rejected=until_eos(pair.rejected, until))
            for pair in pairs
        ]
    return pairs, report


def _reference_pass(
    model: ContentId,
    reference: ContentId,
    documents: Sequence[Document],
    held_out: Sequence[Document],
    settings: PreferenceSettings,
    workshop: Workshop,
) -> tuple[Accelerator, Tensor, Tensor]:
    """The accelerator, and the reference's log-probabilities of both sets of documents."""
    folder = workshop.model(reference)
    check_reference(workshop.model(model), folder)
    seed_everything(workshop.seed, num_threads=workshop.num_threads)
    accelerator = build_accelerator(settings.precision)
    longest = max(len(item.prefix) + max(map(len, item.branches)) for item in (*documents, *held_out))

    @cache
    def load() -> Policy:
        loaded = load_policy(folder).to(accelerator.device).eval().requires_grad_(False)
        check_sequence_length(loaded, longest)
        return Policy(loaded)

    ref_logps, ref_held_out = (
        reference_logprobs(
            workshop.objects,
            reference,
            items,
            load,
            precision=f"{accelerator.mixed_precision}/{accelerator.device.type}",
            autocast=lambda: accelerator.autocast(),
            device=accelerator.device,
        )
        for items in (documents, held_out)
    )
    # Loading the reference may or may not have drawn random numbers.
    seed_everything(workshop.seed, num_threads=workshop.num_threads)
    return accelerator, ref_logps, ref_held_out


def _train(
    algorithm: Algorithm[Any],
    evaluation: Evaluation[Any] | None,
    trained: Any,
    settings: PreferenceSettings,
    accelerator: Accelerator,
    model: ContentId,
    workshop: Workshop,
) -> Checkpoint:
    state = TrainState(trained, build_optimizer(settings.optimizer, list(trained.parameters())), seed=workshop.seed)
    return train_to_end(
        algorithm,
        state,
        settings,
        accelerator,
        workshop,
        workshop.model(model),
        max_minutes=settings.budget.max_minutes,
        evaluation=evaluation,
    )
