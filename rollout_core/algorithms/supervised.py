"""What learners from a data set share (which items a step trains on, how many steps there are), supervised fine-tuning
(next-token cross entropy on the assistant's tokens, arXiv:2203.02155, section 3.5), and reward models: a trunk with one
linear output, read at the last token of a sequence (the same section).

A reward model is what transformers calls a sequence classifier with one label, and is saved as that. Its score of a
sequence is the head's output at the sequence's last token, which for an answer that was ended is the EOS token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rollout_core.algorithms.loop import MinibatchLoss
from rollout_core.algorithms.losses import bradley_terry_loss
from rollout_core.algorithms.parallel import data_ranks, token_microbatches
from rollout_core.algorithms.policy import PackedModel, Teacher, scalar_head
from rollout_core.algorithms.state import TrainState
from rollout_core.base.determinism import check_numerics, cpu_threads, default_threads
from rollout_core.base.errors import ConfigError
from rollout_core.config import DatasetSettings
from rollout_core.data.curriculum import easiest_first, num_open, open_positions
from rollout_core.data.examples import Cursor, Example, epoch_order, positions_between
from rollout_core.data.packing import Document, PackedTokens, num_branch_tokens, pack, pack_branches
from rollout_core.data.preference_data import Pair
from rollout_core.models.architecture import check_score_head
from rollout_core.models.deferred import defer
from rollout_core.models.facts import check_classifier
from rollout_core.models.pretrained import load_model, read_config, without_load_report

BatchT = TypeVar("BatchT")
CURSOR = "cursor"
"""Key of a state's extras: the `Cursor` behind a last step that was smaller than others."""


class DatasetAlgorithm(Generic[BatchT]):
    """The part of `Algorithm` that follows from the items alone; a subclass makes minibatches and gives their loss."""

    name: str

    def __init__(
        self, model: Any, items: Sequence[Any], settings: DatasetSettings, *, seed: int, device: torch.device
    ) -> None:
        self._model = model
        self._items = items
        self._settings: Any = settings
        self._passes = settings.budget.passes
        self._seed = seed
        self._device = device
        self.num_items = len(items)
        self._since = Cursor()
        self.num_steps = self._steps()

    def _steps(self) -> int:
        tokens = self.item_tokens
        return num_steps(self._settings, self.num_items, seed=self._seed, item_tokens=tokens, since=self._since)

    def item_tokens(self, position: int) -> int:
        """Computed tokens of an item, by which ``budget.max_tokens`` counts."""
        raise NotImplementedError

    def minibatches(self, step: int) -> list[BatchT]:
        first, end = self._numbers(step)
        curriculum = self._settings.curriculum
        if curriculum is None:
            return self.cut(positions_between(first, end, num_items=self.num_items, seed=self._seed))
        opened = num_open(step, self.num_steps, self.num_items, curriculum)
        return self.cut(open_positions(first, end, order=self._easiest_first, num_open=opened, seed=self._seed))

    def _numbers(self, step: int) -> tuple[int, int]:
        passes = self._passes
        end = None if passes is None else passes * self.num_items
        return self._since.numbers(step, items_per_step(self._settings), end)

    def note_end(self, state: TrainState) -> None:
        """Have ``state`` tell after a smaller last step where it left the data: training may go on from it under a
        larger budget."""
        first, end = self._numbers(state.step - 1)
        if state.step == self.num_steps and end - first < items_per_step(self._settings):
            state.extras[CURSOR] = asdict(Cursor(state.step, end))

    def continue_from(self, state: TrainState) -> None:
        """Take up the data where ``state`` left them."""
        if CURSOR in state.extras:
            self._since = Cursor(**state.extras[CURSOR])
            self.num_steps = self._steps()

    @cached_property
    def _easiest_first(self) -> Sequence[int]:
        """Positions of all items in the order of the curriculum; one by a key has the rows sorted already."""
        by_length = self._settings.curriculum.by == "length"
        return easiest_first(map(self.item_tokens, range(self.num_items))) if by_length else range(self.num_items)

    def cut(self, positions: Sequence[int]) -> list[BatchT]:
        """Minibatches of the items at ``positions``: of so many items each, or of so many tokens."""
        size, max_tokens = self._settings.minibatch_size, self._settings.max_tokens_per_microbatch
        if max_tokens is None:
            return [self.minibatch(positions[start : start + size]) for start in range(0, len(positions), size)]
        parts = token_microbatches([self.item_tokens(position) for position in positions], max_tokens, data_ranks())
        return [self.minibatch([positions[number] for number in part]) for part in parts]

    def minibatch(self, positions: Sequence[int]) -> BatchT:
        """The items at ``positions``."""
        raise NotImplementedError

    def loss(self, batch: BatchT, step_batches: Sequence[BatchT]) -> MinibatchLoss:
        """As in `Algorithm`."""
        raise NotImplementedError

    def tokens_of(self, batch: BatchT) -> PackedTokens:
        """What is computed for a minibatch."""
        raise NotImplementedError

    def num_tokens(self, batch: BatchT) -> int:
        return self.tokens_of(batch).num_tokens

    def sequences(self, batch: BatchT) -> list[list[int]]:
        return self.tokens_of(batch).sequences()


def share_of_step(mean_loss: Tensor, figures: Mapping[str, Any], *, items: int, step_items: int) -> MinibatchLoss:
    """The part of a step's loss that a minibatch of ``items`` adds, where the step's is a mean over ``step_items``.

    ``figures``: by name, a value for each item of the minibatch.
    """
    means = {name: (values.mean(), float(items)) for name, values in figures.items()}
    return MinibatchLoss(items / step_items * mean_loss, means)


def items_per_step(settings: DatasetSettings) -> int:
    """Items of an optimizer step that is no smaller last one."""
    return settings.minibatch_size * settings.gradient_accumulation


def num_steps(
    settings: DatasetSettings,
    num_items: int,
    *,
    seed: int,
    item_tokens: Callable[[int], int],
    since: Cursor = Cursor(),  # noqa: B008 - frozen
) -> int:
    """Optimizer steps of a run over ``num_items`` items: as many as the first limit of ``settings.budget`` allows.

    ``item_tokens`` gives the tokens that are computed for an item. A schedule can span the whole run, for tokens count
    in the order of training, which follows from ``seed``. Wall time cannot be known beforehand and is left to `train`.
    """
    budget, per_step = settings.budget, items_per_step(settings)
    limits = []
    if budget.max_steps is not None:
        limits.append(budget.max_steps)
    if budget.max_tokens is not None:
        limits.append(since.steps(_items_of_tokens(budget.max_tokens, num_items, seed, item_tokens), per_step))
    if budget.passes is not None:
        limits.append(since.steps(budget.passes * num_items, per_step))
    return min(limits)


def _items_of_tokens(max_tokens: int, num_items: int, seed: int, item_tokens: Callable[[int], int]) -> int:
    """The step with the item that reaches ``max_tokens`` is the last one."""
    whole_epoch = sum(map(item_tokens, range(num_items)))
    epochs = (max_tokens - 1) // whole_epoch
    tokens = epochs * whole_epoch
    order = epoch_order(num_items, seed=seed, epoch=epochs)
    for number in count(1):
        tokens += item_tokens(order[number - 1])
        if tokens >= max_tokens:
            return epochs * num_items + number
    raise AssertionError("an epoch has the tokens that are left")


class SFT(DatasetAlgorithm[PackedTokens]):
    """`Algorithm` over tokenised examples.

    The loss of a step sums over the trained tokens of all its minibatches and divides by their number, so gradient
    accumulation gives the gradient of the whole. With a teacher it is the divergence from it at these tokens, likewise.
    """

    name = "sft"

    def __init__(
        self, model: Any, items: Sequence[Any], settings: Any, *, teacher: Teacher | None = None, **options: Any
    ) -> None:
        self._teacher = teacher
        super().__init__(model, items, settings, **options)

    def item_tokens(self, position: int) -> int:
        return len(self._items[position].token_ids)

    def minibatch(self, positions: Sequence[int]) -> PackedTokens:
        examples: list[Example] = [self._items[position] for position in positions]
        parts = (part for example in examples for part in example.sequences())
        return pack([Document(token_ids, trained=trained) for token_ids, trained in parts])

    def loss(self, batch: PackedTokens, step_batches: Sequence[PackedTokens]) -> MinibatchLoss:
        num_targets = sum(other.num_targets for other in step_batches)
        weights = torch.full((batch.num_targets,), 1.0 / num_targets, device=self._device)
        tokens = batch.to(self._device)
        if self._teacher is None:
            found = self._model(tokens, nll_weights=weights)
        else:
            found = self._model(tokens, distill=self._teacher.target(tokens, weights))
        figures: dict[str, Any] = {"mean_token_accuracy": (found.is_best.float().mean(), batch.num_targets)}
        if self._teacher is not None:
            figures["nll"] = (-found.logprobs.mean(), batch.num_targets)
        return MinibatchLoss(found.loss, figures)

    def tokens_of(self, batch: PackedTokens) -> PackedTokens:
        return batch


class RewardModel(PackedModel):
    """A sequence classifier of one label over `PackedTokens`."""

    def forward(self, batch: PackedTokens) -> Tensor:
        """[R] float32: the score of every row."""
        rows = torch.arange(batch.num_rows, device=batch.ends.device)
        return scalar_head(self.model.score, self.hidden_states(batch, batch.ends, rows))


@dataclass(frozen=True)
class ScoredPairs:
    """P pairs; the rows of ``tokens`` are chosen and rejected sequence of one pair after the other."""

    tokens: PackedTokens
    margins: Tensor
    """[P] float32."""


class BradleyTerry(DatasetAlgorithm[ScoredPairs]):
    """`Algorithm` over tokenised pairs. The loss of a step is the mean over all its pairs."""

    name = "rm"

    def item_tokens(self, position: int) -> int:
        return num_branch_tokens(_shared_document(self._items[position]))

    def minibatch(self, positions: Sequence[int]) -> ScoredPairs:
        pairs: list[Pair] = [self._items[position] for position in positions]
        uses_margins = self._settings.head == "bradley_terry"
        margins = torch.tensor([pair.margin if uses_margins else 0.0 for pair in pairs])
        return ScoredPairs(pack_branches([_shared_document(pair) for pair in pairs]), margins)

    def loss(self, batch: ScoredPairs, step_batches: Sequence[ScoredPairs]) -> MinibatchLoss:
        chosen, rejected = self._model(batch.tokens.to(self._device)).view(-1, 2).T
        loss = bradley_terry_loss(chosen, rejected, batch.margins.to(chosen))
        if self._settings.center_coef:
            loss = loss + self._settings.center_coef * ((chosen + rejected) ** 2).mean()
        figures = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).float(),
        }
        step_pairs = sum(len(other.margins) for other in step_batches)
        return share_of_step(loss, figures, items=len(chosen), step_items=step_pairs)

    def tokens_of(self, batch: ScoredPairs) -> PackedTokens:
        return batch.tokens


def _shared_document(pair: Pair) -> Document:
    """Both sequences with all tokens they begin with as one prefix: no token is a target, so any may be shared."""
    chosen, rejected = [*pair.prompt, *pair.chosen], [*pair.prompt, *pair.rejected]
    shortest = min(len(chosen), len(rejected)) - 1
    shared = next((place for place in range(shortest) if chosen[place] != rejected[place]), shortest)
    return Document(chosen[:shared], (chosen[shared:], rejected[shared:]))


def load_reward_model(folder: Path, *, new_head: bool = False, deferred_to: torch.device | None = None) -> Any:
    """The sequence classifier of a Hugging Face folder, float32.

    With ``new_head`` the folder may be a causal language model: its trunk gets a head drawn from torch's generator.
    With ``deferred_to`` its weights are still to be read on that device, as of `load_deferred`.
    Raises ConfigError for a folder that is no such model.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    options: dict[str, Any] = {"num_labels": 1, "dtype": torch.float32}
    if deferred_to is not None:
        options["device_map"] = "meta"
    try:
        check_classifier(read_config(folder))
        with without_load_report():  # also that the head is new
            model, found = load_model(AutoModelForSequenceClassification, folder, **options)
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model in {folder} cannot be loaded as a reward model: {error}") from error
    check_score_head(model)
    missing = {name for name in found["missing_keys"] if not (new_head and name.startswith("score."))}
    if missing:
        raise ConfigError(
            f"model in {folder} is no reward model: it lacks {', '.join(sorted(missing)[:3])}; "
            "train one with `rollout train rm`"
        )
    if deferred_to is not None:
        model = defer(model, folder, deferred_to, new=found["missing_keys"])
    return load_reward_model(folder, new_head=new_head).to(deferred_to) if model is None else model


def set_padding(model: Any, tokenizer: Any) -> None:
    """Name the padding token, by which transformers finds the last token of a padded row.

    A tokenizer that pads with EOS leaves it unnamed: transformers would take the token before the EOS for the last
    one. Such a model is scored there a row at a time.
    """
    padding = tokenizer.pad_token_id
    model.config.get_text_config().pad_token_id = None if padding == tokenizer.eos_token_id else padding


def score_samples(folder: Path, samples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
    """Scores by the reward model in ``folder`` of prompts with their completions, as token ids.

    Raises ConfigError for a folder that is no reward model, and for samples it cannot score.
    """
    if not all(completion for _, completion in samples):
        raise ConfigError("a reward model scores token ids, and a completion without any was given")
    check_numerics()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = RewardModel(load_reward_model(folder).to(device).eval())
    with cpu_threads(default_threads()):
        return score_sequences(model, [[*prompt, *completion] for prompt, completion in samples], device=device)


@torch.no_grad()
def score_sequences(
    model: RewardModel, sequences: Sequence[Sequence[int]], *, device: torch.device, batch_tokens: int = 4096
) -> list[float]:
    """The score of each sequence of token ids, in order, about ``batch_tokens`` tokens at a time.

    Raises ConfigError for a sequence longer than the model has positions.
    """
    limit = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(map(len, sequences), default=0)
    if limit is not None and longest > limit:
        raise ConfigError(f"a sequence of {longest} tokens is to be scored; the reward model has {limit} positions")
    scores: list[float] = []
    while len(scores) < len(sequences):
        batch, tokens = [], 0
        for sequence in sequences[len(scores) :]:
            if batch and tokens + len(sequence) > batch_tokens:
                break
            batch.append(Document(sequence))
            tokens += len(sequence)
        scores += model(pack(batch).to(device)).float().tolist()
    return scores
