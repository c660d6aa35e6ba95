"""A model card from lineage: what a model was made from, how, with what figures, what it earned, and how to make it
again.

Only records are read, no weights. What stands in a card is what was recorded: where nothing was, the card says nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import ModelCardData

from rollout_core.base.errors import CorruptObject, NotFound
from rollout_core.base.ids import ContentId, canonical_json, named_ids
from rollout_core.data.sample_lineage import step_rows
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import ROUNDS, Lineage, by_output, maker_for, trace_descendants, trace_lineage
from rollout_core.objects.origins import Imported, Source, imports_behind
from rollout_core.promotion.history import Entry, history_of, resources_with_history

SHOWN_ROWS = 12
"""Of the table of figures."""
_BARS = "▁▂▃▄▅▆▇█"
_FIGURES = (
    "loss",
    "reward",
    "eval_loss",
    "rewards",
    "reward/mean",
    "kl",
    "objective/kl",
    "entropy",
    "rewards/accuracies",
    "rewards/margins",
    "value_loss",
    "completions/mean_length",
    "grad_norm",
    "learning_rate",
)
"""Of an optimizer step, those that a card shows, in this order."""
_IDS = ("model", "reference", "train_state", "dataset", "held_out", "scores", "samples", "start_from", "reward_source")


@dataclass(frozen=True)
class Evaluation:
    """What a model earned on prompts that it was not trained on."""

    label: str
    num_samples: int
    mean_reward: float
    reward: Mapping[str, Any]
    sampling: Mapping[str, Any]


@dataclass(frozen=True)
class ModelHistory:
    """All that is recorded of a model."""

    model: ContentId
    made: Sequence[Lineage]
    """As `trace_lineage`: the last stage first."""
    imports: Sequence[Imported]
    metrics: Sequence[Mapping[str, Any]] = ()
    """Rows of optimizer steps, the first one first, of all updates of the last kind."""
    evaluations: Sequence[Evaluation] = ()
    promotions: Sequence[Entry] = ()
    num_parameters: int | None = None
    updates: Sequence[Lineage] = field(default=())
    """The stages that trained, the first one first."""
    dtype: str | None = None
    """Of the weights next to the card, where they are stored in another one."""


def history_of_model(objects: ObjectStore, model: ContentId) -> ModelHistory:
    """Read what is recorded of a model: of one that no stage made, only where it came from."""
    made = trace_lineage(objects, model)
    updates = list(_updates(made, model))
    last = updates[-1].stage if updates else None
    metrics = [row for update in updates if update.stage == last for row in step_rows(objects, update.outputs)]
    promotions = [
        entry
        for resource in resources_with_history(objects)
        for entry in history_of(objects, resource)
        if entry.model == model
    ]
    return ModelHistory(
        model=model,
        made=made,
        imports=imports_behind(objects, model, made),
        metrics=metrics,
        evaluations=list(_evaluations(objects, model)),
        promotions=promotions,
        updates=updates,
    )


def _updates(made: Sequence[Lineage], model: ContentId) -> Iterator[Lineage]:
    """The stages that trained what became ``model``, in order: each started from the model of the one before."""
    makers = by_output(lineage for lineage in made if lineage.stage.endswith("_update") or lineage.stage == ROUNDS)
    chain: list[Lineage] = []
    lineage = next(reversed(makers.get(model, ())), None)
    while lineage is not None and lineage not in chain:
        chain.append(lineage)
        before: Any = lineage.inputs.get("model")
        lineage = maker_for(lineage, before, makers.get(before, ()))
    yield from (lineage for lineage in reversed(chain) if lineage.stage != ROUNDS)


def _evaluations(objects: ObjectStore, model: ContentId) -> Iterator[Evaluation]:
    for lineage in trace_descendants(objects, model):
        prompts = lineage.inputs.get("prompts")
        if lineage.stage != "evaluate" or not isinstance(prompts, dict) or prompts.get("model") != model:
            continue
        for output in lineage.outputs:
            try:
                scores = objects.get_json(output) if objects.get_bytes(output)[:1] == b"[" else None
            except (NotFound, CorruptObject, ValueError):
                continue
            known = [score for score in scores if score is not None] if isinstance(scores, list) else []
            if known:
                yield Evaluation(
                    label=str(lineage.inputs.get("label") or "held out"),
                    num_samples=len(known),
                    mean_reward=math.fsum(known) / len(known),
                    reward=lineage.inputs.get("reward") or {},
                    sampling=lineage.inputs.get("sampling") or {},
                )


# The card


def model_card(history: ModelHistory, name: str, *, adapter_of: ContentId | None = None) -> str:
    """The text of a ``README.md`` as Hugging Face shows it, its figures from ``history``; ``adapter_of`` is the base of
    one whose adapter alone is next to it."""
    parts = [
        f"---\n{_front_matter(history, name, 'transformers' if adapter_of is None else 'peft')}\n---",
        f"# {name}",
        _summary(history),
        _use(name) if adapter_of is None else _use_adapter(history, name, adapter_of),
        _data(history),
        _training(history),
        _figures(history),
        _evaluation(history),
        _again(history),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def hub_source(history: ModelHistory, model: ContentId) -> Source | None:
    """Where a model behind a history came from, if it is one of the hub."""
    sources = (source for item in history.imports if model in item.outputs for source in item.sources)
    return next((source for source in sources if source.hub_id), None)


def _front_matter(history: ModelHistory, name: str, library: str) -> str:
    hub = {kind: _hub_ids(history, kind) for kind in ("model", "data")}
    algorithms = dict.fromkeys(update.stage.removesuffix("_update") for update in history.updates)
    data = ModelCardData(
        library_name=library,
        model_name=name,
        base_model=hub["model"] or None,
        datasets=hub["data"] or None,
        tags=["rollout", *algorithms],
        pipeline_tag=None if "rm" in algorithms else "text-generation",
    )
    return data.to_yaml().strip()


def _hub_ids(history: ModelHistory, kind: str) -> list[str]:
    sources = (source for item in history.imports for source in item.sources)
    return list(dict.fromkeys(source.hub_id for source in sources if source.kind == kind and source.hub_id))


def _summary(history: ModelHistory) -> str:
    rows = [("content id", f"`{history.model}`")]
    if history.dtype is not None:
        rows.append(("weights", f"{history.dtype} in this folder, another dtype under that id"))
    if history.updates:
        last = history.updates[-1]
        rows += [
            ("trained by", " → ".join(_counted([update.stage for update in history.updates]))),
            ("finished", f"{last.created_at:%Y-%m-%d %H:%M} UTC"),
            ("software", ", ".join(f"{package} {version}" for package, version in last.software.items())),
            ("arithmetic", ", ".join(f"{key}: {value}" for key, value in last.arithmetic.items())),
        ]
    return _table(("", ""), rows)


def _counted(names: Sequence[str]) -> Iterator[str]:
    """Neighbours of one name as one, with their number."""
    start = 0
    for place in range(1, len(names) + 1):
        if place == len(names) or names[place] != names[start]:
            count = place - start
            yield names[start].removesuffix("_update").upper() + (f" ({count} iterations)" if count > 1 else "")
            start = place


def _use(name: str) -> str:
    folder = json.dumps(name)
    return (
        "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"model = AutoModelForCausalLM.from_pretrained({folder})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({folder})\n```"
    )


def _use_adapter(history: ModelHistory, name: str, base: ContentId) -> str:
    source = hub_source(history, base)
    where = f"the folder of: rollout export {base.short} FOLDER --dtype stored" if source is None else source.hub_id
    kind = "SequenceClassification" if history.updates[-1].stage == "rm_update" else "CausalLM"
    options = ", num_labels=1" if kind != "CausalLM" else ""
    return (
        "## Use\n\nThis folder has a low-rank adapter alone, of float32. It was trained on the model below.\n\n"
        f"```python\nfrom peft import PeftModel\nfrom transformers import AutoModelFor{kind}\n\n"
        f"base = AutoModelFor{kind}.from_pretrained({json.dumps(where)}{options})\n"
        f"model = PeftModel.from_pretrained(base, {json.dumps(name)})\n```"
    )


def _data(history: ModelHistory) -> str:
    users: dict[ContentId, set[str]] = {}
    for lineage in history.made:
        for key, value in lineage.inputs.items():
            for named in named_ids([canonical_json(value)]):
                users.setdefault(named, set()).add(f"{lineage.stage}, {key.replace('_', ' ')}")
    rows = []
    for item in history.imports:
        for source in item.sources:
            used = "; ".join(sorted(users.get(item.outputs[0], {"this model"})))
            rows.append((source.kind, _address(source), f"{source.size_bytes:,}", f"`{item.outputs[0].short}`", used))
    return f"## Made from\n\n{_table(('what', 'from', 'bytes', 'content', 'used by'), rows)}" if rows else ""


def _address(source: Source) -> str:
    version = source.commit or source.revision
    if source.hub_id is None:
        return f"`{source.address}`"
    prefix = "datasets/" if source.kind == "data" else ""
    at = f" at `{version}`" if version else ""
    return f"[{source.hub_id}](https://huggingface.co/{prefix}{source.hub_id}){at}"


def _training(history: ModelHistory) -> str:
    """Settings of each kind of update; of iterations with equal settings once."""
    sections: list[str] = []
    seen: dict[bytes, None] = {}
    for update in history.updates:
        shown = {
            key: value for key, value in update.inputs.items() if key not in (*_IDS, "label") and value is not None
        }
        mark = canonical_json([update.stage, {key: value for key, value in shown.items() if key != "seed"}])
        if mark not in seen:
            seen[mark] = None
            settings = json.dumps(shown, indent=2, sort_keys=True)
            sections.append(f"### {update.stage.removesuffix('_update').upper()}\n\n```json\n{settings}\n```")
    for stage in ("score_rewards", "batch_inference"):
        last = next((lineage for lineage in history.made if lineage.stage == stage), None)
        if last is not None:
            settings = {key: last.inputs[key] for key in ("reward", "sampling", "backend") if key in last.inputs}
            sections.append(f"### {stage}\n\n```json\n{json.dumps(settings, indent=2, sort_keys=True)}\n```")
    return "## Configuration\n\n" + "\n\n".join(sections) if sections else ""


def _figures(history: ModelHistory) -> str:
    names = [name for name in _FIGURES if any(_is_number(row.get(name)) for row in history.metrics)]
    if not names:
        return ""
    curves = [(name, *_curve([row[name] for row in history.metrics if _is_number(row.get(name))])) for name in names]
    shown = history.metrics
    if len(shown) > SHOWN_ROWS:
        places = {round(place * (len(shown) - 1) / (SHOWN_ROWS - 1)) for place in range(SHOWN_ROWS)}
        shown = [shown[place] for place in sorted(places)]
    columns = ("step", *names[:6])
    rows = [tuple(_number(row.get(name)) for name in columns) for row in shown]
    return (
        f"## Figures\n\nOf {len(history.metrics)} optimizer steps; all of them are in `training-metrics.jsonl`.\n\n"
        f"{_table(('figure', 'curve', 'first', 'last', 'lowest', 'highest'), curves)}\n\n{_table(columns, rows)}"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _curve(values: Sequence[float]) -> tuple[str, ...]:
    """Bars, and the first, last, lowest and highest value."""
    low, high = min(values), max(values)
    width = min(len(values), 40)
    cut = [values[place * len(values) // width] for place in range(width)]
    top = len(_BARS) - 1
    bars = "".join(_BARS[round((value - low) / (high - low) * top) if high > low else 0] for value in cut)
    return (bars, *map(_number, (values[0], values[-1], low, high)))


def _number(value: Any) -> str:
    return f"{value:.4g}" if _is_number(value) else ""


def _evaluation(history: ModelHistory) -> str:
    parts = []
    if history.evaluations:
        rows = [
            (item.label, str(item.num_samples), f"{item.mean_reward:.4f}", f"`{item.reward.get('kind', '')}`")
            for item in history.evaluations
        ]
        parts.append(_table(("held-out prompts", "samples", "mean reward", "reward"), rows))
    for entry in history.promotions:
        lines = [] if entry.evidence is None else [f"- {line}" for line in entry.evidence.lines]
        what = "Promoted" if entry.action == "promote" else "Served again"
        head = f"{what} as `{entry.resource}` on {entry.at:%Y-%m-%d %H:%M} UTC: {entry.reason}"
        parts.append("\n".join([head, *([""] if lines else []), *lines]))
    return "## Evaluation\n\n" + "\n\n".join(parts) if parts else ""


def _again(history: ModelHistory) -> str:
    if not history.updates:
        return ""
    digits = history.model.short
    return (
        "## Reproduce\n\nWhere the object store of this model is:\n\n```\n"
        f"rollout lineage {digits}                      # every stage, input and setting behind it\n"
        f"rollout reproduce {digits} --check            # whether all that it takes is there\n"
        f"rollout reproduce {digits} --into FOLDER      # run it again, and compare ids stage by stage\n```\n\n"
        "`lineage.json` in this folder has the records themselves."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in lines
    )
