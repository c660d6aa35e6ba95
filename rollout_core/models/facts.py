"""What can be known of a model folder without loading its weights, and whether it is sound.

What was found is noted under a mark of the folder's files: their names, sizes, times and places on disk. A plan of a
folder that was found good before need not look into it again; hashing it is never spared, for results depend on content
alone.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from rollout_core import __version__
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, content_id
from rollout_core.models.pretrained import (
    build_model,
    check_tensors,
    check_weights,
    load_identified_tokenizer,
    load_tokenizer,
    one_line,
    prepare_transformers,
    read_config,
    read_object,
)
from rollout_core.objects import ObjectStore

FLOAT32_BYTES = 4
log = logging.getLogger(__name__)
MODEL_NOTES = "model-facts"


@dataclass(frozen=True)
class ModelSize:
    """What the estimate needs of a model."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the MLP."""
    head_size: int | None = None
    """Of the attention; None where the architecture has several, or an earlier look did not note it."""

    @property
    def weight_bytes(self) -> int:
        """In float32, in which every model is trained."""
        return self.num_parameters * FLOAT32_BYTES


@dataclass(frozen=True)
class ModelFacts:
    """What can be known of a model folder without loading its weights."""

    vocab_size: int
    max_positions: int | None
    """Longest sequence the architecture supports, in tokens."""
    tokenizer_size: int
    has_chat_template: bool
    tokenizer_id: ContentId
    is_reward_model: bool
    size: ModelSize
    tokenizer: Any = field(repr=False, compare=False)

    def document(self) -> dict[str, Any]:
        """All but the tokenizer, as JSON."""
        found = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "tokenizer"}
        return found | {"size": dataclasses.asdict(self.size), "tokenizer_id": str(self.tokenizer_id)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], tokenizer: Any = None) -> ModelFacts:
        """Inverse of `document`."""
        size, tokenizer_id = ModelSize(**document["size"]), ContentId(document["tokenizer_id"])
        return cls(**{**document, "size": size, "tokenizer_id": tokenizer_id}, tokenizer=tokenizer)


def inspect_model(folder: Path) -> ModelFacts:
    """Check that ``folder`` is a causal language model with weights and a tokenizer that fit each other.

    Raises ConfigError saying what is missing or does not fit. Loads the tokenizer, and of the weights names and shapes.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {folder} has no config.json; expected a model saved with save_pretrained")
    check_weights(folder)
    facts = describe_model(folder)
    check_tensors(folder)
    return facts


def describe_model(folder: Path) -> ModelFacts:
    """What configuration and tokenizer of ``folder`` say, and whether they fit. Raises ConfigError if they do not."""
    config = _text_config(folder)
    tokenizer, its_id = load_identified_tokenizer(folder)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    vocab_size = getattr(config, "vocab_size", None)
    if not isinstance(vocab_size, int):
        raise ConfigError(f"{folder / 'config.json'}: no vocab_size; is this a causal language model?")
    if highest >= vocab_size:
        raise ConfigError(
            f"tokenizer and model in {folder} do not fit: the tokenizer has ids up to {highest}, "
            f"the model embeds {vocab_size}; use the tokenizer the model was trained with"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"tokenizer in {folder} has no end-of-sequence token, so completions could never end")
    return ModelFacts(
        vocab_size=vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None),
        tokenizer_size=len(tokenizer),
        has_chat_template=bool(tokenizer.chat_template),
        tokenizer_id=its_id,
        is_reward_model=_architecture(folder).endswith("ForSequenceClassification"),
        size=_size(config),
        tokenizer=tokenizer,
    )


_LARGEST = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 100_000,
    "hidden_size": 10_000_000,
    "vocab_size": 100_000_000,
}
"""A hundred times what the largest models have."""


def _check_sizes(config: Mapping[str, Any], file: Path) -> None:
    """Raises ConfigError for sizes that no model has, before anybody makes as many of something."""
    for name, largest in _LARGEST.items():
        value = config.get(name)
        if value is not None and (type(value) is not int or not 0 < value <= largest):
            raise ConfigError(f"{file}: {name} is {value!r:.100}; expected a whole number from 1 to {largest}")


def max_positions(folder: Path) -> int | None:
    """The longest sequence that a model's configuration allows, in tokens, if it says so."""
    said = read_object(folder / "config.json")
    if type(said.get("max_position_embeddings")) is int and "text_config" not in said:
        return said["max_position_embeddings"]  # as transformers reads it, without its import
    return getattr(_text_config(folder), "max_position_embeddings", None)


def vocab_size(folder: Path) -> int:
    """Tokens that the model of a folder has; its token ids are below."""
    said = read_object(folder / "config.json")
    if type(said.get("vocab_size")) is int and "text_config" not in said:
        return said["vocab_size"]  # as transformers reads it, without its import
    return _text_config(folder).vocab_size


def end_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens at which every engine stops with the model of a folder: the tokenizer's EOS, and those of the generation
    configuration, or of the model's where there is none."""
    file = folder / "generation_config.json"
    said = read_object(file if file.is_file() else folder / "config.json").get("eos_token_id")
    named = said if isinstance(said, list) else [said]
    return frozenset(token for token in (tokenizer.eos_token_id, *named) if type(token) is int)


def known_ids(folder: Path, tokenizer: Any) -> int | None:
    """Where the model of a folder has outputs beyond the ids of its tokenizer (a vocabulary padded to a round number):
    how many ids the tokenizer has. They are the ones that are drawn, and among which probabilities are shared. None
    where the two have equally many."""
    size = vocab_size(folder)
    if len(tokenizer) >= size:
        return None
    known = max(tokenizer.get_vocab().values()) + 1  # more than its tokens, where it leaves some ids out
    return known if known < size else None


def blank_model(folder: Path, *, is_reward_model: bool = False) -> Any:
    """The language model, or the reward model, that a folder's configuration describes, without memory for its
    parameters."""
    return _blank(_text_config(folder), is_reward_model=is_reward_model)


def _blank(config: Any, *, is_reward_model: bool = False) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if is_reward_model:
        check_classifier(config)
        config.num_labels = 1
    with torch.device("meta"):
        return build_model(AutoModelForSequenceClassification if is_reward_model else AutoModelForCausalLM, config)


def check_classifier(config: Any) -> None:
    """Raises ConfigError where transformers cannot build a reward model of a configuration."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ConfigError(
            f"transformers has no sequence classifier of a {config.model_type!r}, and a reward model is one; choose "
            "another model, such as a Qwen2"
        )


def _size(config: Any) -> ModelSize:
    """Of a language model of this configuration."""
    model = _blank(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    intermediate_size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return ModelSize(
        num_parameters, config.num_hidden_layers, config.hidden_size, intermediate_size, _head_size(config)
    )


def _head_size(config: Any) -> int | None:
    heads = getattr(config, "num_attention_heads", None)
    has_keys = isinstance(getattr(config, "num_key_value_heads", heads), int)  # and is no state-space model
    if not isinstance(heads, int) or heads < 1 or not has_keys or getattr(config, "kv_lora_rank", None) is not None:
        return None  # latent attention (DeepSeek) has heads of several sizes
    return getattr(config, "head_dim", None) or config.hidden_size // heads


def _architecture(folder: Path) -> str:
    config = read_object(folder / "config.json")
    return (config.get("architectures") or ["model of unknown architecture"])[0]


def check_reference(model: Path, reference: Path) -> None:
    """Raises ConfigError unless the two model folders are of one architecture and read the same token ids."""
    kinds = [_text_config(folder).model_type for folder in (model, reference)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"the reference in {reference} is a {kinds[1]!r}, the model a {kinds[0]!r}; give an earlier checkpoint of "
            "the same architecture"
        )
    _check_vocabularies("reference", model, reference)


def check_teacher(model: Path, teacher: Path, longest: int) -> None:
    """Raises ConfigError unless a teacher reads the same token ids as the model, rows of ``longest`` tokens among
    them."""
    _check_vocabularies("teacher", model, teacher)
    positions = max_positions(teacher)
    if positions is not None and longest > positions:
        raise ConfigError(
            f"the longest row has {longest} tokens, the teacher in {teacher} has {positions} positions; take shorter "
            "rows, or another teacher"
        )


def _check_vocabularies(what: str, model: Path, other: Path) -> None:
    vocabularies = [load_tokenizer(folder).get_vocab() for folder in (model, other)]
    if vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            f"the tokenizer of the {what} in {other} has another vocabulary ({len(vocabularies[1])} tokens) "
            f"than the model's ({len(vocabularies[0])} tokens); give a {what} that reads the same token ids"
        )


def check_reward_model(folder: Path) -> None:
    """Raises ConfigError unless the model folder is a sequence classifier of one label."""
    config = read_object(folder / "config.json")
    kind, labels = _architecture(folder), len(config.get("id2label") or "..")
    if not kind.endswith("ForSequenceClassification") or labels != 1:
        raise ConfigError(
            f"{folder} holds a {kind} of {labels} labels, no reward model; train one with `rollout train rm`"
        )


def _text_config(folder: Path) -> Any:
    """Configuration of the text model in ``folder``."""
    prepare_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    file = folder / "config.json"
    found = read_object(file)
    for part in (found, found.get("text_config")):
        if isinstance(part, dict):
            _check_sizes(part, file)
    try:
        config = read_config(folder)
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file}: not a model that transformers knows: {one_line(error)}") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(f"{file}: a {config.model_type!r} is not a causal language model")
    return config.get_text_config()


def mark_of(files: Mapping[str, Path]) -> ContentId:
    """Differs after any of the files was written, replaced or renamed."""
    marks = []
    for name, path in sorted(files.items()):
        stat = path.stat()
        marks.append([name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino])
    return content_id("model-facts/2", [version("transformers"), marks])


def recall(objects: ObjectStore, mark: ContentId) -> ModelFacts | None:
    """What `remember` noted of a folder of files of this mark, without its tokenizer; None where they are new or
    changed."""
    ref = _ref(mark)
    kept = objects.cached_bytes(ref)
    if kept is None:
        return None
    try:
        return ModelFacts.from_document(orjson.loads(kept))
    except (ValueError, TypeError, KeyError, AttributeError):
        log.warning("what ref %s stands for is no note of a model; the model is looked at again", ref)
        return None


def is_known_trainable(objects: ObjectStore, mark: ContentId, *, is_reward_model: bool) -> bool:
    """Whether a folder of files of this mark was found to be one that can be trained."""
    return objects.cached_ref(_trainable_ref(mark, is_reward_model)) is not None


def remember_trainable(objects: ObjectStore, mark: ContentId, *, is_reward_model: bool) -> None:
    """Note that a folder of files of this mark can be trained."""
    objects.set_ref(_trainable_ref(mark, is_reward_model), objects.put_bytes(b"{}"))


def _trainable_ref(mark: ContentId, is_reward_model: bool) -> str:
    key = content_id("trainable/1", [mark, is_reward_model, version("torch"), __version__])
    return f"{MODEL_NOTES}/{key}"


def remember(objects: ObjectStore, mark: ContentId, facts: ModelFacts) -> None:
    """Note what was found of a folder of files of this mark."""
    objects.set_ref(_ref(mark), objects.put_bytes(orjson.dumps(facts.document())))


def _ref(mark: ContentId) -> str:
    return f"{MODEL_NOTES}/{mark}"
