"""The tokenizer that a GGUF file describes, as tokenizer.json and tokenizer_config.json.

Two kinds are rebuilt. ``gpt2`` is byte-level BPE; how it cuts texts before it merges bytes is one of
`gguf_format.SPLITS`. ``llama`` is SentencePiece's BPE: its merges follow from its words and their scores, and tokens
that are marked as a user's own are matched in the text before anything is merged, as SentencePiece does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.models.gguf_format import BEGIN_WITH_BOS, OTHER_NAMES, SPLITS
from rollout_core.models.gguf_settings import GGUFSettings

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_NOT_A_TOKEN = re.compile(r"\[PAD\d+\]")
_SPACE = "\u2581"
_END_OF_PHI_3 = "<|end|>"
"""Ends a turn. Files do not say so, and llama.cpp knows it by its text; the template writes EOS behind it."""
_MOST_CHARACTERS = 1000
"""Of a word of SentencePiece, whose own limit is 16 unless it was given another; each is cut in every place."""
_INSTEAD = "give another tokenizer: --tokenizer, or model.tokenizer, a folder or a hub id"
_OF_NO_TEXT = (
    *("token_type_count", "remove_extra_whitespaces", "mask_token_id", "seperator_token_id", "cls_token_id"),
    *(f"{place}_token_id" for place in ("prefix", "suffix", "middle")),
    *(f"fim_{place}_token_id" for place in ("pre", "suf", "mid", "pad", "rep", "sep")),
)
"""Settings that say nothing of how a text becomes tokens."""


@dataclass(frozen=True)
class SpecialTokens:
    """Of the model's configuration."""

    bos: int | None
    eos: tuple[int, ...]
    """Any of them ends an answer; the tokenizer's own first."""
    pad: int | None

    def fields(self) -> dict[str, Any]:
        """As configurations name them."""
        eos = self.eos[0] if len(self.eos) == 1 else list(self.eos) or None
        return {"bos_token_id": self.bos, "eos_token_id": eos, "pad_token_id": self.pad}


@dataclass(frozen=True)
class RebuiltTokenizer:
    """Both files' contents."""

    document: dict[str, Any]
    settings: dict[str, Any]
    kind: str
    """For people."""


def special_tokens(settings: GGUFSettings) -> SpecialTokens:
    """Raises ConfigError for one that is no token."""
    found = {
        name: settings.whole(f"tokenizer.ggml.{name}_token_id", None)
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    tokens = settings.words("tokenizer.ggml.tokens")
    count = len(tokens)
    if found["eot"] is None and settings.text("general.architecture") == "phi3" and _END_OF_PHI_3 in tokens:
        found["eot"] = tokens.index(_END_OF_PHI_3)
    for name, number in found.items():
        if number is not None and number >= count:
            settings.refuse(f"tokenizer.ggml.{name}_token_id is {number}, and there are {count} tokens")
    ends = [number for name in ("eos", "eot", "eom") if (number := found[name]) is not None]
    return SpecialTokens(found["bos"], tuple(dict.fromkeys(ends)), found["padding"])


def rebuild_tokenizer(settings: GGUFSettings, max_length: int) -> RebuiltTokenizer:
    """Raises ConfigError for a kind that cannot be rebuilt, or one that does not fit together."""
    tokens = settings.words("tokenizer.ggml.tokens")
    types = settings.numbers("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        settings.refuse(f"there are {len(tokens)} tokens, and types of {len(types)}")
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        settings.refuse(f"token {twice!r} stands twice among its tokens; {_INSTEAD}")
    for name in _OF_NO_TEXT:
        settings.skip(f"tokenizer.ggml.{name}")
    for name in ("tokenizer.huggingface.json", "tokenizer.rwkv.world"):
        settings.skip(name)
    model = settings.text("tokenizer.ggml.model", None)
    if model == "gpt2":
        document, kind, begins = _byte_level(settings, tokens, types)
    elif model == "llama":
        document, kind, begins = _sentence_piece(settings, tokens, types)
    else:
        settings.refuse(
            f"its tokenizer is of the kind {model!r} (tokenizer.ggml.model), and gpt2 and llama are rebuilt; {_INSTEAD}"
        )
    special = special_tokens(settings)
    unknown = settings.whole("tokenizer.ggml.unknown_token_id", None)
    document |= _around(settings, tokens, special, begins)
    named = {"bos": special.bos, "eos": special.eos[0] if special.eos else None, "unk": unknown, "pad": special.pad}
    own = {f"{name}_token": tokens[number] for name, number in named.items() if number is not None}
    own |= {"clean_up_tokenization_spaces": False, "model_max_length": max_length}
    own |= {"tokenizer_class": "PreTrainedTokenizerFast", **_templates(settings)}
    _try(document, settings)
    return RebuiltTokenizer(document, own, kind)


def _try(document: dict[str, Any], settings: GGUFSettings) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # noqa: BLE001 - the library raises no other
        settings.refuse(f"its tokenizer cannot be built: {' '.join(str(error).split())}; {_INSTEAD}")


def _document(**parts: Any) -> dict[str, Any]:
    empty = {"truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None}
    return {"version": "1.0", **empty, "post_processor": None, "decoder": None, **parts}


def _bpe(vocabulary: dict[str, int], merges: Sequence[Sequence[str]], **options: Any) -> dict[str, Any]:
    defaults = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    kind = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **defaults, **kind, **options, "vocab": vocabulary, "merges": [list(m) for m in merges]}


def _vocabulary(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Without names of rows that no token has."""
    return {
        token: number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != UNUSED or not _NOT_A_TOKEN.fullmatch(token)
    }


def _added(tokens: Sequence[str], types: Sequence[int], strip_right: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Tokens that are looked for in a text before all else."""
    flags = {"single_word": False, "lstrip": False, "normalized": False}
    return [
        {"id": number, "content": token, **flags, "rstrip": token in strip_right, "special": kind != USER_DEFINED}
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and token
    ]


def _byte_level(
    settings: GGUFSettings, tokens: Sequence[str], types: Sequence[int]
) -> tuple[dict[str, Any], str, bool]:
    named = settings.text("tokenizer.ggml.pre", None)
    settings.skip("tokenizer.ggml.add_space_prefix")  # of the other kind
    settings.skip("tokenizer.ggml.scores")
    name = OTHER_NAMES.get(named or "", named or "")
    if name not in SPLITS:
        said = "it does not say how" if named is None else f"it cuts texts as {named!r} does"
        settings.refuse(
            f"its tokenizer cannot be rebuilt: {said} (tokenizer.ggml.pre), and the known ones are "
            f"{', '.join(sorted([*SPLITS, *OTHER_NAMES]))}; {_INSTEAD}"
        )
    split = SPLITS[name]
    merges = [tuple(merge.split(" ")) for merge in settings.words("tokenizer.ggml.merges")]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        settings.refuse(f"its tokenizer merges {' '.join(wrong)!r}; expected two pieces with a space between them")
    document = _document(
        added_tokens=_added(tokens, types),
        normalizer={"type": "NFC"} if split.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": split.steps()},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        model=_bpe(_vocabulary(tokens, types), merges, ignore_merges=split.ignore_merges),
    )
    return document, f"byte-level BPE ({named})", name in BEGIN_WITH_BOS


def _sentence_piece(
    settings: GGUFSettings, tokens: Sequence[str], types: Sequence[int]
) -> tuple[dict[str, Any], str, bool]:
    if (pre := settings.text("tokenizer.ggml.pre", "default")) != "default":
        settings.refuse(f"its SentencePiece tokenizer is of the kind {pre!r} (tokenizer.ggml.pre); {_INSTEAD}")
    settings.skip("tokenizer.ggml.merges")  # they follow from the scores, which count
    scores = settings.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        settings.refuse(f"there are {len(tokens)} tokens, and scores of {len(scores)}")
    if long := next((token for token in tokens if len(token) > _MOST_CHARACTERS), None):
        settings.refuse(f"token {long[:20]!r}... has {len(long):,} characters; expected at most {_MOST_CHARACTERS:,}")
    begins = settings.truth("tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []
    spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    document = _document(
        added_tokens=_added(tokens, types, _stripping(settings, tokens, types)),
        normalizer={"type": "Sequence", "normalizers": [prepend, replace]} if begins else replace,
        decoder={"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        model=_bpe(
            _vocabulary(tokens, types),
            _merges(tokens, types, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in types,
        ),
    )
    return document, "SentencePiece BPE", True


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The pairs of words that make another word, by the score of what they make."""
    words = {
        token: score
        for token, kind, score in zip(tokens, types, scores, strict=True)
        if kind in (NORMAL, UNUSED) or (kind == USER_DEFINED and _SPACE in token)  # which no text has as it stands
    }
    pairs = [
        (word[:cut], word[cut:])
        for word in words
        for cut in range(1, len(word))
        if word[:cut] in words and word[cut:] in words
    ]
    return sorted(pairs, key=lambda pair: (words["".join(pair)], len(pair[0]), len(pair[1])), reverse=True)


def _stripping(settings: GGUFSettings, tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    """Tokens that take the spaces behind them with them: those of Phi-3, of which files do not say so. llama.cpp goes
    by the model's name, too."""
    name = str(settings.text("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return []
    found = [t for t, kind in zip(tokens, types, strict=True) if kind in (CONTROL, UNKNOWN, USER_DEFINED)]
    return [token for token in (*found, "</s>") if token not in ("<unk>", "<s>", "<|endoftext|>")]


def _around(settings: GGUFSettings, tokens: Sequence[str], special: SpecialTokens, begins: bool) -> dict[str, Any]:
    """What is put before and behind each text."""
    first = settings.truth("tokenizer.ggml.add_bos_token", begins and special.bos is not None)
    last = settings.truth("tokenizer.ggml.add_eos_token", False)
    if settings.truth("tokenizer.ggml.add_sep_token", False):
        settings.refuse(f"its tokenizer separates texts by a token (tokenizer.ggml.add_sep_token); {_INSTEAD}")
    ids = {"bos": special.bos if first else None, "eos": special.eos[0] if last and special.eos else None}
    if (first and ids["bos"] is None) or (last and ids["eos"] is None):
        settings.refuse("its tokenizer puts a token around texts that it does not name")
    if not first and not last:
        return {}

    def step(number: int | None, kind: int) -> list[dict[str, Any]]:
        return [] if number is None else [{"SpecialToken": {"id": tokens[number], "type_id": kind}}]

    def around(name: str, kind: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": name, "type_id": kind}}
        return [*step(ids["bos"], kind), text, *step(ids["eos"], kind)]

    named = {tokens[n]: {"id": tokens[n], "ids": [n], "tokens": [tokens[n]]} for n in ids.values() if n is not None}
    template = {"single": around("A", 0), "pair": [*around("A", 0), *around("B", 1)], "special_tokens": named}
    return {"post_processor": {"type": "TemplateProcessing", **template}}


def _templates(settings: GGUFSettings) -> dict[str, Any]:
    """The chat template; where there are several, by name."""
    names = settings.words("tokenizer.chat_templates", [])
    found = {"default": settings.text("tokenizer.chat_template", None)}
    found |= {name: settings.text(f"tokenizer.chat_template.{name}", None) for name in names}
    known = [{"name": name, "template": text} for name, text in found.items() if text is not None]
    if not known:
        return {}
    return {"chat_template": known if len(known) > 1 or found["default"] is None else found["default"]}


def refuse_unread(settings: GGUFSettings, *, prefix: str, what: str) -> None:
    """Raises ConfigError for settings under ``prefix`` that nothing here has looked at."""
    if unread := settings.unread(prefix):
        raise ConfigError(
            f"{settings.file} has settings of {what} that are not understood, so it may be another one than what would "
            f"be made of it: {', '.join(unread)}"
        )
