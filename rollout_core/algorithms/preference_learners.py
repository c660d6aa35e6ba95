"""Updates from preference data, from content ids to content ids: reward model, DPO, IPO and KTO.

As in `learners`, an interrupted update goes on from its own last snapshot. Reference log-probabilities come from the
object store or are computed before training starts; the reference is never in memory beside the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from rollout_core.algorithms.kto import KTO, judged_documents
from rollout_core.algorithms.learners import check_sequence_length
from rollout_core.algorithms.loop import Algorithm, build_accelerator, build_optimizer
from rollout_core.algorithms.packing import Document
from rollout_core.algorithms.policy import Policy
from rollout_core.algorithms.preference import DPO, pair_documents
from rollout_core.algorithms.preference_data import Pair, PreferenceReport, tokenize_judged, tokenize_pairs
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
    model: ContentId, dataset: ContentId, settings: RewardModelSettings, workshop: Workshop
) -> tuple[Checkpoint, PreferenceReport]:
    """Train a reward model on the pairs of ``dataset``, from the trunk of ``model`` (or that reward model itself).

    Raises ConfigError when rows, tokenizer and model do not fit.
    """
    folder = workshop.model(model)
    tokenizer = load_tokenizer(folder)
    rows = parse_pairs(workshop.objects.get_bytes(dataset), name=f"dataset {dataset.short}")
    pairs, report = tokenize_pairs(tokenizer, rows, max_seq_len=settings.packing.max_seq_len, need_prompts=False)
    pairs = [
        Pair(
            pair.prompt,
            until_eos(pair.chosen, tokenizer.eos_token_id),
            until_eos(pair.rejected, tokenizer.eos_token_id),
            pair.margin,
        )
        for pair in pairs
    ]
    seed_everything(workshop.seed, num_threads=workshop.num_threads)
    accelerator = build_accelerator(settings.precision)
    trained = load_reward_model(folder, new_head=True).to(accelerator.device).eval()  # no dropout
    set_padding(trained, tokenizer)
    check_sequence_length(trained, max(len(p.prompt) + max(len(p.chosen), len(p.rejected)) for p in pairs))
    algorithm = BradleyTerry(RewardModel(trained), pairs, settings, seed=workshop.seed, device=accelerator.device)
    return _train(algorithm, trained, settings, accelerator, model, workshop), report


def dpo_update(
    model: ContentId,
    reference: ContentId,
    dataset: ContentId,
    settings: DPOSettings | IPOSettings,
    workshop: Workshop,
) -> tuple[Checkpoint, PreferenceReport]:
    """DPO or IPO of ``model`` against ``reference`` on the pairs of ``dataset``.

    Raises ConfigError when rows, tokenizer, model and reference do not fit.
    """
    tokenizer = load_tokenizer(workshop.model(model))
    rows = parse_pairs(workshop.objects.get_bytes(dataset), name=f"dataset {dataset.short}")
    pairs, report = tokenize_pairs(tokenizer, rows, max_seq_len=settings.packing.max_seq_len, need_prompts=True)
    accelerator, ref_logps = _reference_pass(model, reference, pair_documents(pairs), settings, workshop)
    trained = load_policy(workshop.model(model)).to(accelerator.device).eval()  # no dropout: the reference had none
    algorithm = DPO(Policy(trained), pairs, ref_logps, settings, seed=workshop.seed, device=accelerator.device)
    return _train(algorithm, trained, settings, accelerator, model, workshop), report


def kto_update(
    model: ContentId, reference: ContentId, dataset: ContentId, settings: KTOSettings, workshop: Workshop
) -> tuple[Checkpoint, PreferenceReport]:
    """KTO of ``model`` against ``reference`` on the judged answers of ``dataset``.

    Raises ConfigError when rows, tokenizer, model and reference do not fit.
    """
    tokenizer = load_tokenizer(workshop.model(model))
    rows = parse_judged(workshop.objects.get_bytes(dataset), name=f"dataset {dataset.short}")
    items, report = tokenize_judged(tokenizer, rows, max_seq_len=settings.packing.max_seq_len)
    accelerator, ref_logps = _reference_pass(model, reference, judged_documents(items), settings, workshop)
    trained = load_policy(workshop.model(model)).to(accelerator.device).eval()  # no dropout: the reference had none
    algorithm = KTO(Policy(trained), items, ref_logps, settings, seed=workshop.seed, device=accelerator.device)
    return _train(algorithm, trained, settings, accelerator, model, workshop), report


def _reference_pass(
    model: ContentId,
    reference: ContentId,
    documents: Sequence[Document],
    settings: PreferenceSettings,
    workshop: Workshop,
) -> tuple[Accelerator, Tensor]:
    folder = workshop.model(reference)
    check_reference(workshop.model(model), folder)
    seed_everything(workshop.seed, num_threads=workshop.num_threads)
    accelerator = build_accelerator(settings.precision)

    def load() -> Policy:
        loaded = load_policy(folder).to(accelerator.device).eval().requires_grad_(False)
        check_sequence_length(loaded, max(len(item.prefix) + max(map(len, item.branches)) for item in documents))
        return Policy(loaded)

    ref_logps = reference_logprobs(
        workshop.objects,
        reference,
        documents,
        load,
        precision=f"{accelerator.mixed_precision}/{accelerator.device.type}",
        autocast=lambda: accelerator.autocast(),
        device=accelerator.device,
    )
    # Loading the reference may or may not have drawn random numbers.
    seed_everything(workshop.seed, num_threads=workshop.num_threads)
    return accelerator, ref_logps


def _train(
    algorithm: Algorithm[Any],
    trained: Any,
    settings: PreferenceSettings,
    accelerator: Accelerator,
    model: ContentId,
    workshop: Workshop,
) -> Checkpoint:
    state = TrainState(trained, build_optimizer(settings.optimizer, list(trained.parameters())), seed=workshop.seed)
    folder, max_minutes = workshop.model(model), settings.budget.max_minutes
    return train_to_end(algorithm, state, settings, accelerator, workshop, folder, max_minutes=max_minutes)
