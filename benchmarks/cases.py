"""Training cases on exact token ids, so that another library can be given identical work.

Rows are JSON lines: ``input_ids``, ``labels`` for sft; ``prompt_ids``, ``chosen_ids``, ``rejected_ids`` for dpo and ipo
(without ``prompt_ids`` whole sequences, for reward); ``prompt_ids``, ``completion_ids``, ``label`` for kto, whose
mismatched completions are those of the batch. A step of dpo, ipo and kto includes the reference's pass over its rows,
as where it is computed inline; with ``-cached`` behind it is done before the steps, as `reference_logprobs` keeps it.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

CASES = ("sft", "reward", "dpo", "dpo-cached", "ipo", "kto", "kto-cached")


@dataclass(frozen=True)
class Figure:
    """What a case showed."""

    step_ms: float
    """Median."""
    tokens_per_second: float
    """Real tokens of all rows, prompts of both answers counted, over the sum of all steps."""
    peak_rss_mib: float
    losses: list[float]
    tokens_per_processor_second: float = 0.0
    """The same over the processor time of this process, which another one's load hardly changes."""
    generating: float = 0.0
    """Share of the time in which an on-policy case generates."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The work of a case."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def num_tokens(row: dict[str, Any]) -> int:
    """Real tokens of a row as one sequence, or as one for each answer."""
    if "input_ids" in row:
        return len(row["input_ids"])
    prompt = len(row.get("prompt_ids", ()))
    return sum(prompt + len(row[key]) for key in ("chosen_ids", "rejected_ids", "completion_ids") if key in row)


def settings(kind: type[Any], batch: int, steps: int, **changes: Any) -> Any:
    """Settings of a learner without files."""
    return kind.model_validate(
        {
            "dataset": {"path": "none"},
            "minibatch_size": batch,
            "optimizer": {"lr": 1e-4},
            "budget": {"max_steps": steps},
            "precision": "float32",
            "snapshots": {"every_steps": steps + 1},
            **changes,
        }
    )


def run_case(
    name: str,
    model: Any,
    rows: Sequence[dict[str, Any]],
    *,
    batch: int,
    steps: int,
    warm: int = 2,
    precision: str = "float32",
    lora: int | None = None,
) -> Figure:
    """``steps`` optimizer steps of ``batch`` rows each, after ``warm`` that do not count, in the order of ``rows``.

    ``precision`` as in the settings of a learner; ``lora`` is the rank of adapters, which are then what is trained.
    """
    from rollout_core.algorithms.loop import build_accelerator, build_optimizer, train
    from rollout_core.algorithms.state import TrainState
    from rollout_core.config import LoRAConfig
    from rollout_core.models.architecture import with_lora

    adapted = with_lora(model, None if lora is None else LoRAConfig(r=lora), seed=0)
    algorithm, trained = _BUILDERS[name](adapted, rows, batch, steps + warm)
    config = algorithm.settings
    state = TrainState(trained, build_optimizer(config.optimizer, list(trained.parameters())))
    accelerator = build_accelerator(precision)
    algorithm.autocast = accelerator.autocast
    seconds, processor = [], []
    for step in range(steps + warm):
        algorithm.num_steps = step + 1
        started, begun = time.perf_counter(), time.process_time()
        train(algorithm, state, config, accelerator, total_steps=steps + warm)
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - begun)
    done = sum(num_tokens(row) for step in range(warm, warm + steps) for row in algorithm.rows(step))
    return Figure(
        step_ms=1e3 * statistics.median(seconds[warm:]),
        tokens_per_second=done / sum(seconds[warm:]),
        tokens_per_processor_second=done / sum(processor[warm:]),
        peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        losses=[row["loss"] for row in state.metrics],
    )


class _InOrder:
    """An algorithm whose step s takes the rows s * batch, s * batch + 1, ..., around the end of the work."""

    def __init__(self, inner: Any, config: Any, rows: Sequence[dict[str, Any]], make: Callable[[list[int]], Any]):
        self.name = inner.name
        self.settings = config
        self.num_steps = inner.num_steps
        self.num_tokens = inner.num_tokens
        self.sequences = inner.sequences
        self.loss = inner.loss
        self.autocast: Callable[..., AbstractContextManager[None]] = nullcontext
        """What a pass of the reference runs in, as the stage has it."""
        self._rows = rows
        self._make = make

    def _positions(self, step: int) -> list[int]:
        size = self.settings.minibatch_size
        return [position % len(self._rows) for position in range(step * size, (step + 1) * size)]

    def rows(self, step: int) -> list[dict[str, Any]]:
        """Rows of a step."""
        return [self._rows[position] for position in self._positions(step)]

    def minibatches(self, step: int) -> list[Any]:
        with self.autocast():
            return [self._make(self._positions(step))]


def _sft(model: Any, rows: Sequence[dict[str, Any]], batch: int, steps: int) -> tuple[_InOrder, Any]:
    import torch

    from rollout_core.algorithms.policy import Policy
    from rollout_core.algorithms.supervised import SFT
    from rollout_core.config import SFTSettings
    from rollout_core.data.examples import Example
    from rollout_core.data.packing import Document, pack

    config = settings(SFTSettings, batch, steps)
    examples = [Example(row["input_ids"], [label != -100 for label in row["labels"]]) for row in rows]
    inner = SFT(Policy(model), examples, config, seed=0, device=torch.device("cpu"))

    def make(positions: list[int]) -> Any:
        chosen = [examples[position] for position in positions]
        return pack([Document(example.token_ids, trained=example.trained) for example in chosen])

    return _InOrder(inner, config, rows, make), model


def _reward(model: Any, rows: Sequence[dict[str, Any]], batch: int, steps: int) -> tuple[_InOrder, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification

    from rollout_core.algorithms.supervised import BradleyTerry, RewardModel
    from rollout_core.config import RewardModelSettings

    config = settings(RewardModelSettings, batch, steps)
    changed = {**model.config.to_dict(), "num_labels": 1, "pad_token_id": 0}
    scorer = AutoModelForSequenceClassification.from_config(type(model.config).from_dict(changed))
    scorer.base_model.load_state_dict(model.base_model.state_dict())
    inner = BradleyTerry(RewardModel(scorer), _pairs(rows), config, seed=0, device=torch.device("cpu"))
    return _InOrder(inner, config, rows, inner.minibatch), scorer


def _pairs(rows: Sequence[dict[str, Any]]) -> list[Any]:
    from rollout_core.data.preference_data import Pair

    return [Pair(row.get("prompt_ids", []), row["chosen_ids"], row["rejected_ids"]) for row in rows]


def _reference_logps(model: Any, documents: Sequence[Any], batch: int) -> Any:
    """[2N] float32, of both branches of every document."""
    import torch

    from rollout_core.algorithms.policy import Policy
    from rollout_core.data.packing import pack_branches

    policy, found = Policy(model), []
    with torch.no_grad():
        for start in range(0, len(documents), batch):
            tokens = pack_branches([documents[place] for place in range(start, min(start + batch, len(documents)))])
            found.append(tokens.row_sums(policy(tokens).logprobs))
    return torch.cat(found)


def _direct(kind: str, *, cached: bool = False) -> Callable[..., tuple[_InOrder, Any]]:
    def build(model: Any, rows: Sequence[dict[str, Any]], batch: int, steps: int) -> tuple[_InOrder, Any]:
        import copy

        import torch

        from rollout_core.algorithms.policy import Policy
        from rollout_core.algorithms.preference import DPO, IPO, PairBatch, pair_documents
        from rollout_core.config import DPOSettings, IPOSettings
        from rollout_core.data.packing import pack_branches

        config = settings(DPOSettings if kind == "dpo" else IPOSettings, batch, steps)
        reference = Policy(copy.deepcopy(model).requires_grad_(False))
        pairs = _pairs(rows)
        documents = pair_documents(pairs)
        logps = _reference_logps(model, documents, batch) if cached else torch.zeros(2 * len(pairs))
        algorithm = DPO if kind == "dpo" else IPO
        inner = algorithm(Policy(model), pairs, logps, config, seed=0, device=torch.device("cpu"))

        def make(positions: list[int]) -> Any:
            tokens = pack_branches([documents[position] for position in positions])
            with torch.no_grad():
                return PairBatch(tokens, tokens.row_sums(reference(tokens).logprobs).view(-1, 2))

        return _InOrder(inner, config, rows, inner.minibatch if cached else make), model

    return build


def _kto(
    model: Any, rows: Sequence[dict[str, Any]], batch: int, steps: int, *, cached: bool = False
) -> tuple[_InOrder, Any]:
    import copy
    import dataclasses

    import torch

    from rollout_core.algorithms.policy import Policy
    from rollout_core.algorithms.preference import KTO, unpaired_documents
    from rollout_core.config import KTOSettings
    from rollout_core.data.packing import pack_branches
    from rollout_core.data.preference_data import UnpairedPreference

    config = settings(KTOSettings, batch, steps)
    reference = Policy(copy.deepcopy(model).requires_grad_(False))
    items = [UnpairedPreference(row["prompt_ids"], row["completion_ids"], row["label"]) for row in rows]
    documents = unpaired_documents(items)
    logps = _reference_logps(model, documents, batch) if cached else torch.zeros(2 * len(items))
    inner = KTO(Policy(model), items, logps, config, seed=0, device=torch.device("cpu"))

    def make(positions: list[int]) -> Any:
        tokens = pack_branches([documents[position] for position in positions])
        with torch.no_grad():
            own, mismatched = tokens.row_sums(reference(tokens).logprobs).view(-1, 2).T
        return dataclasses.replace(inner.minibatch(positions), ref_logps=own, ref_mismatched=mismatched)

    return _InOrder(inner, config, rows, inner.minibatch if cached else make), model


_BUILDERS: dict[str, Callable[..., tuple[_InOrder, Any]]] = {
    "sft": _sft,
    "reward": _reward,
    "dpo": _direct("dpo"),
    "dpo-cached": _direct("dpo", cached=True),
    "ipo": _direct("ipo"),
    "kto": _kto,
    "kto-cached": partial(_kto, cached=True),
}
